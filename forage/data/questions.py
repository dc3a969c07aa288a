"""Question files in, ``Question`` out: every published form is told apart by its keys.

``train`` and ``eval`` read their questions here, and the generated encyclopedia writes them here.
What each form looks like is shown beside its reader. Passages are the corpus store's business,
except those that a SQuAD file carries along with its questions.
"""

from __future__ import annotations

import gzip
import json
import zlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from forage.errors import UserError
from forage.types import Hop, Passage, Question

Row = dict[str, Any]

# The first of these keys that a row has holds its golden answers.
_ANSWER_KEYS = ("golden_answers", "answers", "answer")
_ID_KEYS = ("id", "qid", "idx")
_TITLE_WORDS = 6


def read_questions(path: Path | str) -> list[Question]:
    """All questions of a file (JSON lines, a JSON list or SQuAD JSON, gzipped too), ids unique.

    Raises ``UserError`` with the line or record number for what cannot be a question.
    """
    path = Path(path)
    text = _read_text(path)
    squad = _as_squad(text)
    places = list(_row_questions(path, text) if squad is None else _squad_questions(path, squad))
    if not places:
        raise UserError(f"{path} holds no questions")
    first_place: dict[str, str] = {}
    for place, question in places:
        if question.id in first_place:
            raise UserError(
                f"{place}: the id {question.id!r} was already given to {first_place[question.id]}; "
                "make ids unique, or leave them out to have them numbered"
            )
        first_place[question.id] = place
    return [question for _, question in places]


def write_questions(path: Path | str, questions: Iterable[Question]) -> None:
    """Write JSON lines that ``read_questions`` reads back equal; folders are made as needed."""
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w", encoding="utf-8") as file:
        for question in questions:
            file.write(json.dumps(_to_row(question), ensure_ascii=False) + "\n")


def squad_passages(path: Path | str) -> list[Passage]:
    """The paragraphs of a SQuAD file as a corpus; ids are those in ``gold_passage_ids``."""
    path = Path(path)
    squad = _as_squad(_read_text(path))
    if squad is None:
        raise UserError(f'{path} is no SQuAD file: a JSON object with "data" is needed')
    return [passage for passage, _ in _squad_paragraphs(path, squad)]


def _read_text(path: Path) -> str:
    try:
        data = path.read_bytes()
        return (gzip.decompress(data) if path.suffix == ".gz" else data).decode("utf-8-sig")
    except (OSError, EOFError, zlib.error) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise UserError(f"cannot read the questions {path}: {reason}") from error
    except UnicodeDecodeError as error:
        raise UserError(f"{path} is not UTF-8 text (byte {error.start})") from error


# --- rows -----------------------------------------------------------------------------------------


def _row_questions(path: Path, text: str) -> Iterator[tuple[str, Question]]:
    """Each question with its place."""
    stem = _stem(path)
    for number, (place, row) in enumerate(_rows(path, text), start=1):
        if not isinstance(row, dict):
            raise UserError(f"{place}: a JSON object is needed, not {_shorten(row)}")
        read = _search_r1_question if "reward_model" in row else _row_question
        yield place, read(place, row, f"{stem}-{number}", stem)


def _rows(path: Path, text: str) -> Iterator[tuple[str, object]]:
    """Each JSON value of the file with its place: ``path:line``, or ``path: record n``."""
    if text.lstrip().startswith("["):
        try:
            values = json.loads(text)
        except json.JSONDecodeError as error:
            raise UserError(f"{path}:{error.lineno}: this is no JSON ({error.msg})") from error
        yield from ((f"{path}: record {n}", value) for n, value in enumerate(values, start=1))
        return
    # Not splitlines(): JSON strings may hold U+2028 and its like unescaped.
    for number, line in enumerate(text.split("\n"), start=1):
        if not line.strip():
            continue
        try:
            yield f"{path}:{number}", json.loads(line)
        except json.JSONDecodeError as error:
            raise UserError(f"{path}:{number}: this line is no JSON ({error.msg})") from error


def _row_question(place: str, row: Row, default_id: str, default_source: str) -> Question:
    """A row of one of the flat forms.

    Plain ``{"question", "answers"}``; NQ-open ``{"question", "answer": [..]}``; FlashRAG
    ``{"id", "question", "golden_answers"}``; the generated world's, which adds ``data_source`` and
    ``{"metadata": {"gold_passage_ids": [..], "hops": [{"subject", "relation", "value",
    "passage_id"}]}}``.
    """
    key = next((key for key in _ANSWER_KEYS if key in row), None)
    metadata = row.get("metadata")
    metadata = metadata if isinstance(metadata, dict) else {}
    return Question(
        id=_row_id(row) or default_id,
        text=_question_text(place, row.get("question")),
        golden_answers=_golden_answers(place, row[key] if key else None),
        source=str(row.get("data_source") or default_source),
        gold_passage_ids=tuple(str(i) for i in metadata.get("gold_passage_ids") or ()),
        hops=tuple(_hop(place, hop) for hop in metadata.get("hops") or ()),
    )


def _search_r1_question(place: str, row: Row, default_id: str, default_source: str) -> Question:
    """A row as Search-R1 and veRL write them.

    ``{"data_source", "prompt": [{"role", "content"}], "reward_model": {"ground_truth": {"target":
    [..]}}, "extra_info": {"split", "index"}}``, the source's columns beside it or not. Ids count
    from 0 in each source, so the id has the source in front.
    """
    source = str(row.get("data_source") or default_source)
    extra = row.get("extra_info")
    extra = extra if isinstance(extra, dict) else {}
    own_id = _row_id(row)
    if own_id is None and "index" in extra:
        own_id = f"{extra.get('split', 'train')}_{extra['index']}"
    truth = row["reward_model"].get("ground_truth") if isinstance(row["reward_model"], dict) else {}
    target = truth.get("target") if isinstance(truth, dict) else truth
    text = row.get("question") or _question_in_prompt(row.get("prompt"))
    return Question(
        id=f"{source}/{own_id}" if own_id is not None else default_id,
        text=_question_text(place, text),
        golden_answers=_golden_answers(place, target or row.get("golden_answers")),
        source=source,
    )


def _question_in_prompt(prompt: object) -> str | None:
    """What follows the last ``Question:`` of the user's message."""
    messages = prompt if isinstance(prompt, list) else []
    for message in reversed(messages):
        if isinstance(message, dict) and message.get("role") == "user":
            _, found, text = str(message.get("content")).rpartition("Question:")
            return text.strip() if found else None
    return None


# --- SQuAD ----------------------------------------------------------------------------------------


def _as_squad(text: str) -> list[Any] | None:
    """The articles of a SQuAD v1.1 file, or None for anything else."""
    try:
        tree = json.loads(text)
    except json.JSONDecodeError:
        return None
    articles = tree.get("data") if isinstance(tree, dict) else None
    return articles if isinstance(articles, list) else None


def _squad_paragraphs(path: Path, articles: list[Any]) -> Iterator[tuple[Passage, Row]]:
    """Each paragraph as a passage, and as it stands in the file; numbered through the file."""
    number = 0
    for article in articles:
        for paragraph in article.get("paragraphs") or () if isinstance(article, dict) else ():
            place = f"{path}: paragraph {number}"
            if not isinstance(paragraph, dict) or not isinstance(paragraph.get("context"), str):
                raise UserError(f'{place}: an object with a text under "context" is needed')
            context = _mend(paragraph["context"])
            title = str(article.get("title") or "").replace("_", " ").strip()
            title = title or " ".join(context.split()[:_TITLE_WORDS])
            yield Passage(id=f"{_stem(path)}-{number}", title=title, text=context), paragraph
            number += 1


def _squad_questions(path: Path, articles: list[Any]) -> Iterator[tuple[str, Question]]:
    """Each question with its place; answers once each, in the file's order."""
    for passage, paragraph in _squad_paragraphs(path, articles):
        for number, row in enumerate(paragraph.get("qas") or ()):
            place = f"{path}: paragraph {passage.id}, question {number}"
            if not isinstance(row, dict):
                raise UserError(f"{place}: a JSON object is needed, not {_shorten(row)}")
            yield (
                place,
                Question(
                    id=_row_id(row) or f"{passage.id}-{number}",
                    text=_question_text(place, row.get("question")),
                    golden_answers=_golden_answers(place, _squad_answers(row.get("answers"))),
                    source=_stem(path),
                    gold_passage_ids=(passage.id,),
                ),
            )


def _squad_answers(value: object) -> list[object]:
    """The texts of ``[{"text", "answer_start"}]``; none for anything else."""
    answers = value if isinstance(value, list) else []
    return [answer.get("text") if isinstance(answer, dict) else answer for answer in answers]


# --- fields ---------------------------------------------------------------------------------------


def _row_id(row: Row) -> str | None:
    value = next((row[key] for key in _ID_KEYS if row.get(key) is not None), None)
    return None if value is None else str(value)


def _question_text(place: str, value: object) -> str:
    if not isinstance(value, str) or not value.strip():
        raise UserError(f'{place}: no question; a text under "question" is needed')
    return _mend(value)


def _golden_answers(place: str, value: object) -> tuple[str, ...]:
    """One answer or a list of them, each once."""
    values = [value] if isinstance(value, str) else value
    if not isinstance(values, Sequence) or not values:
        raise UserError(
            f"{place}: a question without answers; a list of texts is needed under "
            '"golden_answers", "answers", "answer" or "reward_model.ground_truth.target"'
        )
    for answer in values:
        if not isinstance(answer, str) or not answer.strip():
            raise UserError(f"{place}: the answer {_shorten(answer)} is no text; put it in quotes")
    return tuple(dict.fromkeys(_mend(answer) for answer in values))


def _hop(place: str, hop: object) -> Hop:
    names = ("subject", "relation", "value", "passage_id")
    if not isinstance(hop, dict) or any(not isinstance(hop.get(name), str) for name in names):
        raise UserError(f"{place}: a hop is an object with texts under {', '.join(names)}")
    return Hop(*(hop[name] for name in names))


def _to_row(question: Question) -> Row:
    hops = [asdict(hop) for hop in question.hops]
    return {
        "id": question.id,
        "question": question.text,
        "golden_answers": list(question.golden_answers),
        "data_source": question.source,
        "metadata": {"gold_passage_ids": list(question.gold_passage_ids), "hops": hops},
    }


def _stem(path: Path) -> str:
    """The file's name without what says how it is written: ``xquad.en.json`` is ``xquad.en``."""
    return path.name.removesuffix(".gz").removesuffix(".jsonl").removesuffix(".json")


def _mend(text: str) -> str:
    """Lone surrogates (JSON may escape them) replaced, so that the text can be written again."""
    return text.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace")


def _shorten(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."
