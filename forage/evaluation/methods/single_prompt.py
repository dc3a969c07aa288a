"""The baselines with one prompt: a single context, and at most one search, made by the method.

Direct inference, as in Search-R1's table (https://arxiv.org/abs/2503.09516), asks for the answer at
once; the prompt's wording differs. Chain of thought: Wei et al., https://arxiv.org/abs/2201.11903.
They show worked examples before the question; here the prompt asks for steps in words, as zero-shot
prompts do (Kojima et al., https://arxiv.org/abs/2205.11916), and the answer is in tags, so that no
second prompt has to extract it. Retrieval-augmented generation: Lewis et al.,
https://arxiv.org/abs/2005.11401. They train retriever and reader together and sum over passages;
here, as in Search-R1's table, one prompt shows the ``search.topk`` passages to a model that was not
trained for it.
"""

from __future__ import annotations

from forage.environment.prompt import with_question_mark
from forage.evaluation.methods.asking import Asking, read_template
from forage.types import Status

DIRECT = read_template("direct")
CHAIN_OF_THOUGHT = read_template("chain_of_thought")
RAG = read_template("rag")


async def ask_once(asking: Asking, template: str, passages: tuple[int, ...] = ()) -> Status:
    """Fills in the prompt, and takes the answer from the answer tags."""
    fillings = {"question": with_question_mark(asking.job.question.text), "passages": passages}
    return await asking.answer(asking.open(asking.prompt(template, fillings)))


async def ask_with_passages(asking: Asking) -> Status:
    """Searches for the question, shows the results, and takes the answer."""
    question = asking.job.question.text
    found = await asking.search(question)
    bare = asking.prompt(RAG, {"question": with_question_mark(question), "passages": ()})
    passages = asking.show(found, asking.room_after(bare))
    asking.note_own_search(found, passages)
    return await ask_once(asking, RAG, passages.token_ids)
