"""The fields of a question out of a row: what the forms of record have in common.

Errors name the place of the row.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from forage.data.corpus import replace_surrogates
from forage.data.forms.rows import Row, shorten
from forage.errors import UserError
from forage.types import Hop, Question

_ID_KEYS = ("id", "qid", "idx")
_HOP_KEYS = ("subject", "relation", "value", "passage_id")


@dataclass(frozen=True, slots=True)
class Record:
    """A row, where it stands, and what its question has where the row does not say it."""

    place: str
    row: Row
    default_id: str
    default_source: str

    @property
    def own_id(self) -> str | None:
        value = next((self.row[key] for key in _ID_KEYS if self.row.get(key) is not None), None)
        return None if value is None else str(value)

    def question(
        self,
        text: object,
        answers: object,
        answers_key: str,
        text_key: str = '"question"',
        source_key: str = "data_source",
    ) -> Question:
        """The question of ``text``; the keys are those that errors name."""
        if not isinstance(text, str) or not text.strip():
            raise UserError(
                f"{self.place}: no question; a text under {text_key} is needed, {self._found()}"
            )
        return Question(
            id=self.own_id or self.default_id,
            text=replace_surrogates(text),
            golden_answers=self._golden_answers(answers, answers_key),
            source=replace_surrogates(str(self.row.get(source_key) or self.default_source)),
        )

    def _golden_answers(self, value: object, key: str) -> tuple[str, ...]:
        """One answer or a list of them, each once."""
        values = [value] if isinstance(value, str | int | float) else value
        if not isinstance(values, Sequence) or not values:
            raise UserError(
                f"{self.place}: a question without answers; a list of texts is needed under {key}, "
                f"{self._found()}"
            )
        for answer in values:
            if not isinstance(answer, str) or not answer.strip():
                raise UserError(
                    f"{self.place}: the answer {shorten(answer)} is no text; put it in quotes"
                )
        return tuple(dict.fromkeys(map(replace_surrogates, values)))

    def _found(self) -> str:
        return f"found: {', '.join(map(str, self.row)) or 'nothing'}"

    def gold_passage_ids(self) -> tuple[str, ...]:
        ids = self._metadata().get("gold_passage_ids") or ()
        if not isinstance(ids, list | tuple):
            raise UserError(f"{self.place}: gold_passage_ids must be a list, not {shorten(ids)}")
        return tuple(str(i) for i in ids)

    def hops(self) -> tuple[Hop, ...]:
        hops = objects(self.place, self._metadata().get("hops"), "hops")
        if any(not isinstance(hop.get(name), str) for hop in hops for name in _HOP_KEYS):
            raise UserError(
                f"{self.place}: a hop is an object with texts under {', '.join(_HOP_KEYS)}"
            )
        return tuple(Hop(*(hop[name] for name in _HOP_KEYS)) for hop in hops)

    def _metadata(self) -> Row:
        metadata = self.row.get("metadata")
        return metadata if isinstance(metadata, dict) else {}


def objects(place: str, value: object, what: str) -> list[Row]:
    """``value`` as a list of objects, empty for None; ``what`` is what the error calls them."""
    rows = [] if value is None else value
    if not isinstance(rows, list | tuple) or any(not isinstance(row, dict) for row in rows):
        raise UserError(f"{place}: {what} must be a list of objects, not {shorten(value)}")
    return list(rows)
