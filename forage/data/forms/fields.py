"""The fields of a question out of a row: what the forms of record have in common.

Each function takes the place of the row, so that its errors name the line.
"""

from __future__ import annotations

from collections.abc import Sequence

from forage.data.corpus import replace_surrogates
from forage.data.forms.rows import Row, shorten
from forage.errors import UserError
from forage.types import Hop

_ID_KEYS = ("id", "qid", "idx")


def row_id(row: Row) -> str | None:
    """The row's own id as text, or None."""
    value = next((row[key] for key in _ID_KEYS if row.get(key) is not None), None)
    return None if value is None else str(value)


def question_text(place: str, row: Row, value: object, needed: str = '"question"') -> str:
    """``value`` as a question; ``needed`` is the key that the error names."""
    if not isinstance(value, str) or not value.strip():
        raise UserError(f"{place}: no question; a text under {needed} is needed, {_found(row)}")
    return replace_surrogates(value)


def golden_answers(place: str, row: Row, value: object, needed: str) -> tuple[str, ...]:
    """One answer or a list of them, each once."""
    values = [value] if isinstance(value, str | int | float) else value
    if not isinstance(values, Sequence) or not values:
        raise UserError(
            f"{place}: a question without answers; a list of texts is needed under {needed}, "
            f"{_found(row)}"
        )
    texts: list[str] = []
    for answer in values:
        if not isinstance(answer, str) or not answer.strip():
            raise UserError(f"{place}: the answer {shorten(answer)} is no text; put it in quotes")
        texts.append(replace_surrogates(answer))
    return tuple(dict.fromkeys(texts))


def objects(place: str, value: object, what: str) -> list[Row]:
    """``value`` as a list of objects, empty for None; ``what`` is what the error calls them."""
    rows = [] if value is None else value
    if not isinstance(rows, list | tuple) or any(not isinstance(row, dict) for row in rows):
        raise UserError(f"{place}: {what} must be a list of objects, not {shorten(value)}")
    return list(rows)


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


def _found(row: Row) -> str:
    return f"found: {', '.join(map(str, row)) or 'nothing'}"
