"""The fields of a question out of a row: what every form of record has in common.

Each function takes the place of the row, so that what is wrong is told with its line.
"""

from __future__ import annotations

from collections.abc import Sequence

from forage.data.forms.rows import Row, shorten
from forage.errors import UserError

_ID_KEYS = ("id", "qid", "idx")


def row_id(row: Row) -> str | None:
    """The row's own id as text, or None."""
    value = next((row[key] for key in _ID_KEYS if row.get(key) is not None), None)
    return None if value is None else str(value)


def question_text(place: str, row: Row, value: object, needed: str = '"question"') -> str:
    """``value`` as a question; ``needed`` is the key that the error names."""
    if not isinstance(value, str) or not value.strip():
        raise UserError(f"{place}: no question; a text under {needed} is needed, {_found(row)}")
    return mend(value)


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
        texts.append(mend(answer))
    return tuple(dict.fromkeys(texts))


def objects(place: str, value: object, what: str) -> list[Row]:
    """``value`` as a list of objects, empty for None; ``what`` is what the error calls them."""
    rows = [] if value is None else value
    if not isinstance(rows, list | tuple) or any(not isinstance(row, dict) for row in rows):
        raise UserError(f"{place}: {what} must be a list of objects, not {shorten(value)}")
    return list(rows)


def mend(text: str) -> str:
    """Lone surrogates (JSON may escape them) replaced, so that the text can be written again."""
    return text.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace")


def _found(row: Row) -> str:
    return f"found: {', '.join(map(str, row)) or 'nothing'}"
