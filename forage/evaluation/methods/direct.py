"""The baseline that knows what it knows: the question, and the answer at once.

"Direct inference" of Search-R1's table (https://arxiv.org/abs/2503.09516). One context, no search.
What differs from there: the wording of the prompt.
"""

from __future__ import annotations

from forage.environment.prompt import asked
from forage.evaluation.methods.asking import Asking, read_template
from forage.types import Status

TEMPLATE = read_template("direct")


async def ask_directly(asking: Asking) -> Status:
    """Ask, and take what stands in the answer tags."""
    question = asked(asking.job.question.text)
    return await asking.answer(asking.open(asking.prompt(TEMPLATE, {"question": question})))
