"""SQuAD v1.1 JSON: questions under their paragraphs, and the paragraphs as a corpus."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from forage.data.forms.fields import golden_answers, mend, objects, question_text, row_id
from forage.data.forms.rows import Row, read_rows, stem
from forage.errors import UserError
from forage.types import Passage, Question

_TITLE_WORDS = 6


def squad_questions(place: str, tree: Row, file_stem: str) -> Iterator[tuple[str, Question]]:
    """Each question with its place; answers once each, in the file's order."""
    for passage, paragraph in _paragraphs(place, tree, file_stem):
        where = f"{place}: paragraph {passage.id}"
        for number, row in enumerate(objects(where, paragraph.get("qas"), "qas")):
            here = f"{where}, question {number}"
            answers = golden_answers(here, row, _texts(row.get("answers")), '"answers"')
            yield (
                here,
                Question(
                    id=row_id(row) or f"{passage.id}-{number}",
                    text=question_text(here, row, row.get("question")),
                    golden_answers=answers,
                    source=file_stem,
                    gold_passage_ids=(passage.id,),
                ),
            )


def squad_passages(path: Path | str) -> list[Passage]:
    """The paragraphs of a SQuAD file as a corpus; ids are those in ``gold_passage_ids``."""
    path = Path(path)
    rows = read_rows(path)
    place, tree = next(rows, ("", {}))
    if not is_squad(tree):
        raise UserError(f'{path} is no SQuAD file: a JSON object with "data" is needed')
    return [passage for passage, _ in _paragraphs(place, tree, stem(path))]


def is_squad(row: Row) -> bool:
    return isinstance(row.get("data"), list)


def _paragraphs(place: str, tree: Row, file_stem: str) -> Iterator[tuple[Passage, Row]]:
    """Each paragraph as a passage, and as it stands in the file; numbered through the file."""
    number = 0
    for article in objects(place, tree.get("data"), "data"):
        for paragraph in objects(place, article.get("paragraphs"), "paragraphs"):
            if not isinstance(paragraph.get("context"), str):
                raise UserError(
                    f'{place}: paragraph {number}: an object with a text under "context" is needed'
                )
            context = mend(paragraph["context"])
            title = str(article.get("title") or "").replace("_", " ").strip()
            title = title or " ".join(context.split()[:_TITLE_WORDS])
            yield Passage(id=f"{file_stem}-{number}", title=title, text=context), paragraph
            number += 1


def _texts(value: object) -> list[object]:
    """The texts of ``[{"text", "answer_start"}]``; none for anything else."""
    answers = value if isinstance(value, list) else []
    return [answer.get("text") if isinstance(answer, dict) else answer for answer in answers]
