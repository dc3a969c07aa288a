"""Rows with the question and its answers side by side: the plain form, FlashRAG's, ASearcher's."""

from __future__ import annotations

from forage.data.forms.fields import golden_answers, mend, objects, question_text, row_id
from forage.data.forms.rows import Row, shorten
from forage.errors import UserError
from forage.types import Hop, Question

# The first of these keys that a row has holds its golden answers.
ANSWER_KEYS = ("golden_answers", "answers", "answer")


def flat_question(place: str, row: Row, default_id: str, default_source: str) -> Question:
    """A row of one of the flat forms.

    Plain ``{"question", "answers"}``; NQ-open ``{"question", "answer": [..]}``; FlashRAG
    ``{"id", "question", "golden_answers"}``; the generated world's, which adds ``data_source`` and
    ``{"metadata": {"gold_passage_ids": [..], "hops": [{"subject", "relation", "value",
    "passage_id"}]}}``.
    """
    key = next((key for key in ANSWER_KEYS if key in row), None)
    answers = golden_answers(
        place, row, row[key] if key else None, '"golden_answers", "answers" or "answer"'
    )
    return Question(
        id=row_id(row) or default_id,
        text=question_text(place, row, row.get("question")),
        golden_answers=answers,
        source=str(row.get("data_source") or default_source),
        gold_passage_ids=gold_passage_ids(place, row),
        hops=hops(place, row),
    )


def asearcher_question(place: str, row: Row, default_id: str, default_source: str) -> Question:
    """``{"id" | "qid" | "idx", "question", "answer", "aug_answer"}``.

    ``aug_answer`` holds other wordings of ``answer``; all of them are golden, ``answer`` first.
    """
    others = row.get("aug_answer") or []
    return Question(
        id=row_id(row) or default_id,
        text=question_text(place, row, row.get("question")),
        golden_answers=golden_answers(
            place, row, [*_as_list(row.get("answer")), *_as_list(others)], '"answer"'
        ),
        source=mend(str(row.get("source") or default_source)),
    )


def gold_passage_ids(place: str, row: Row) -> tuple[str, ...]:
    ids = _metadata(row).get("gold_passage_ids") or ()
    if not isinstance(ids, list | tuple):
        raise UserError(f"{place}: gold_passage_ids must be a list, not {shorten(ids)}")
    return tuple(str(i) for i in ids)


def hops(place: str, row: Row) -> tuple[Hop, ...]:
    return tuple(_hop(place, hop) for hop in objects(place, _metadata(row).get("hops"), "hops"))


def _metadata(row: Row) -> Row:
    metadata = row.get("metadata")
    return metadata if isinstance(metadata, dict) else {}


def _hop(place: str, hop: Row) -> Hop:
    names = ("subject", "relation", "value", "passage_id")
    if any(not isinstance(hop.get(name), str) for name in names):
        raise UserError(f"{place}: a hop is an object with texts under {', '.join(names)}")
    return Hop(*(hop[name] for name in names))


def _as_list(value: object) -> list[object]:
    if value is None:
        return []
    return list(value) if isinstance(value, list | tuple) else [value]
