"""The baseline that searches once, for the question itself, and reads before it answers.

Retrieval-augmented generation: Lewis et al., https://arxiv.org/abs/2005.11401. What differs: they
train retriever and reader together and sum over passages; here, as in Search-R1's table
(https://arxiv.org/abs/2503.09516), the ``search.topk`` passages stand in one prompt of a model that
was not trained for it. The search is the method's: the policy sampled nothing to ask for it.
"""

from __future__ import annotations

from forage.environment.prompt import asked
from forage.evaluation.methods.asking import Asking, read_template
from forage.types import Status

TEMPLATE = read_template("rag")


async def ask_with_passages(asking: Asking) -> Status:
    """Search for the question, show what was found, take the answer."""
    question = asking.job.question.text
    found = await asking.search(question)
    bare = asking.prompt(TEMPLATE, {"question": asked(question), "passages": ()})
    passages = asking.show(found, asking.room_beside(bare))
    asking.note_own_search(found, passages)
    prompt = {"question": asked(question), "passages": passages.token_ids}
    return await asking.answer(asking.open(asking.prompt(TEMPLATE, prompt)))
