"""Which of the published forms a row is written in, and the reader for it.

The first row of a file decides for all of them. Forms are named in the log, and can be given by
name where a file fits more than one.
"""

from __future__ import annotations

from collections.abc import Iterator

from forage.data.forms.chat_rows import rlinf_question, search_r1_question, slime_question
from forage.data.forms.flat import ANSWER_KEYS, asearcher_question, flat_question
from forage.data.forms.rows import Row
from forage.data.forms.squad import is_squad, squad_questions
from forage.errors import UserError
from forage.types import Question

NEEDED_KEYS = {
    "search-r1": "reward_model, and prompt or question (Search-R1, veRL)",
    "rlinf": "prompt, solutions",
    "slime": "prompt, label",
    "asearcher": "question, answer, aug_answer",
    "flat": "question, and answers, golden_answers or answer (plain, FlashRAG, NQ-open)",
    "squad": "data, a list of articles with paragraphs",
}
"""The forms by name, each with the keys that a row of it has."""


def recognise(place: str, row: Row) -> str:
    """The form of the first row of a file; raises ``UserError`` that names what it holds."""
    has_prompt = "prompt" in row
    if is_squad(row):
        return "squad"
    if "reward_model" in row and (has_prompt or "question" in row):
        return "search-r1"
    if has_prompt and "solutions" in row:
        return "rlinf"
    if has_prompt and "label" in row:
        return "slime"
    if "question" in row and "aug_answer" in row:
        return "asearcher"
    if "question" in row and any(key in row for key in ANSWER_KEYS):
        return "flat"
    raise UserError(
        f"{place}: no known form of question has these keys: {', '.join(map(str, row)) or 'none'}; "
        f"rename them to fit one: {_all_needed()}"
    )


def check_form(form: str) -> str:
    """``form`` itself; raises ``UserError`` for an unknown one."""
    if form not in NEEDED_KEYS:
        raise UserError(f"{form!r} is no form of question file; there are {', '.join(NEEDED_KEYS)}")
    return form


def questions_of(
    form: str, place: str, row: Row, default_id: str, file_stem: str
) -> Iterator[tuple[str, Question]]:
    """The questions of a row, each with its place: many in SQuAD's form, one in the others."""
    match form:
        case "squad":
            yield from squad_questions(place, row, file_stem)
        case "search-r1":
            yield place, search_r1_question(place, row, default_id, file_stem)
        case "rlinf":
            yield place, rlinf_question(place, row, default_id, file_stem)
        case "slime":
            yield place, slime_question(place, row, default_id, file_stem)
        case "asearcher":
            yield place, asearcher_question(place, row, default_id, file_stem)
        case _:
            yield place, flat_question(place, row, default_id, file_stem)


def _all_needed() -> str:
    return "; ".join(f"{form}: {needed}" for form, needed in NEEDED_KEYS.items())
