"""The baseline that reasons before it answers, and searches nothing.

Chain of thought: Wei et al., https://arxiv.org/abs/2201.11903. What differs: they show worked
examples before the question; here the prompt asks for the steps in words, as zero-shot prompts do
(Kojima et al., https://arxiv.org/abs/2205.11916), and the answer stands in tags, so that no second
prompt has to pick it out. One context, no search.
"""

from __future__ import annotations

from forage.environment.prompt import asked
from forage.evaluation.methods.asking import Asking, read_template
from forage.types import Status

TEMPLATE = read_template("chain_of_thought")


async def ask_for_reasons(asking: Asking) -> Status:
    """Ask for the reasoning and the answer in one go."""
    question = asked(asking.job.question.text)
    return await asking.answer(asking.open(asking.prompt(TEMPLATE, {"question": question})))
