"""The fields of a question out of a row: what every form of record has in common.

Each function takes the place of the row, so that what is wrong is told with its line.
"""

from __future__ import annotations

from collections.abc import Sequence

from forage.data.rows import Row, shorten
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
    values = [value] if isinstance(value, str) else value
    if not isinstance(values, Sequence) or not values:
        raise UserError(
            f"{place}: a question without answers; a list of texts is needed under {needed}, "
            f"{_found(row)}"
        )
    for answer in values:
        if not isinstance(answer, str) or not answer.strip():
            raise UserError(f"{place}: the answer {shorten(answer)} is no text; put it in quotes")
    return tuple(dict.fromkeys(mend(answer) for answer in values))


def mend(text: str) -> str:
    """Lone surrogates (JSON may escape them) replaced, so that the text can be written again."""
    return text.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace")


def _found(row: Row) -> str:
    return f"found: {', '.join(map(str, row)) or 'nothing'}"
