"""The baselines that ask once: in one context, with at most one search, and that the method's.

Direct inference, as in Search-R1's table (https://arxiv.org/abs/2503.09516), asks for the answer at
once; the wording of the prompt differs. Chain of thought: Wei et al.,
https://arxiv.org/abs/2201.11903. They show worked examples before the question; here the prompt
asks for the steps in words, as zero-shot prompts do (Kojima et al.,
https://arxiv.org/abs/2205.11916), and the answer stands in tags, so that no second prompt has to
pick it out. Retrieval-augmented generation: Lewis et al., https://arxiv.org/abs/2005.11401. They
train retriever and reader together and sum over passages; here, as in Search-R1's table, the
``search.topk`` passages stand in one prompt of a model that was not trained for it.
"""

from __future__ import annotations

from forage.environment.prompt import asked
from forage.evaluation.methods.asking import Asking, read_template
from forage.types import Status

DIRECT = read_template("direct")
CHAIN_OF_THOUGHT = read_template("chain_of_thought")
RAG = read_template("rag")


async def ask_once(asking: Asking, template: str, passages: tuple[int, ...] = ()) -> Status:
    """Fill the prompt in, and take what stands in the answer tags."""
    fillings = {"question": asked(asking.job.question.text), "passages": passages}
    return await asking.answer(asking.open(asking.prompt(template, fillings)))


async def ask_with_passages(asking: Asking) -> Status:
    """Search for the question, show what was found, take the answer."""
    question = asking.job.question.text
    found = await asking.search(question)
    bare = asking.prompt(RAG, {"question": asked(question), "passages": ()})
    passages = asking.show(found, asking.room_beside(bare))
    asking.note_own_search(found, passages)
    return await ask_once(asking, RAG, passages.token_ids)
