"""The published forms of question records, and how a file's form is recognised.

The first row of a file decides for all its rows. The log names the form, and the user can name the
form of a file that matches several. This file has the forms whose question is not part of a prompt;
``chat_rows.py`` has the rest. SQuAD's paragraphs also serve as a corpus.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from forage.data.forms.chat_rows import rlinf_question, search_r1_question, slime_question
from forage.data.forms.fields import Record, as_list, objects
from forage.data.forms.rows import Row, read_rows, stem
from forage.errors import UserError
from forage.types import Passage, Question

# The first of these keys that a row has contains its golden answers.
_ANSWER_KEYS = ("golden_answers", "answers", "possible_answers", "answer")
_COMMON_KEYS = frozenset(
    {"id", "_id", "qid", "idx", "question_id", "questionid", "data_source", "source", "question"}
)
_TITLE_WORDS = 6


@dataclass(frozen=True, slots=True)
class _Form:
    """A form of record: the keys its rows need, in words and as a test, and its reader.

    ``read`` is None for SQuAD, where one row contains many questions. ``keys`` are those it reads
    in addition to ``_COMMON_KEYS``.
    """

    needed: str
    fits: Callable[[Row], bool]
    read: Callable[[Record], Question] | None
    keys: tuple[str, ...]


def _is_squad(row: Row) -> bool:
    return isinstance(row.get("data"), list)


def flat_question(record: Record) -> Question:
    """The question in a row of one of the flat forms.

    Plain ``{"question", "answers"}``; NQ-open ``{"question", "answer": [..]}``; FlashRAG ``{"id",
    "question", "golden_answers"}``; HotpotQA and 2Wiki ``{"_id", "question", "answer"}``; MuSiQue,
    which adds ``answer_aliases``; TriviaQA, whose ``answer`` is ``{"value", "aliases"}``; PopQA,
    whose ``possible_answers`` are JSON text; the generated world's, which adds ``data_source`` and
    ``{"metadata": {"gold_passage_ids": [..], "hops": [{"subject", "relation", "value",
    "passage_id"}]}}``; and that of ``forage questions`` (``Record.with_steps``).
    """
    row = record.row
    answers = next((row[key] for key in _ANSWER_KEYS if key in row), None)
    if aliases := as_list(record.read(row.get("answer_aliases"))):
        answers = [*as_list(answers), *aliases]
    keys = '"golden_answers", "answers" or "answer"'
    question = record.question(row.get("question"), answers, keys)
    return record.with_steps(question)


def asearcher_question(record: Record) -> Question:
    """The question in ``{"id" | "qid" | "idx", "question", "answer", "aug_answer"}``.

    ``aug_answer`` has alternative wordings of ``answer``; all of them are golden, ``answer`` first.
    """
    row = record.row
    both = (record.read(row.get(key)) for key in ("answer", "aug_answer"))
    answers = [answer for found in both for answer in as_list(found)]
    return record.question(row.get("question"), answers, '"answer"')


BROWSECOMP_PLUS = "browsecomp-plus"


def browsecomp_plus_question(record: Record) -> Question:
    """The question in ``{"query_id", "query", "answer"}``, decrypted, without gold documents."""
    row = record.row
    question = record.question(row["query"], row["answer"], '"answer"', '"query"')
    key = str(row.get("query_id") or record.default_id)
    return replace(question, id=key, source=BROWSECOMP_PLUS)


# A row has the first form that matches.
_FORMS = {
    "squad": _Form("data, a list of articles with paragraphs", _is_squad, None, ("data",)),
    "search-r1": _Form(
        "reward_model, and prompt or question (Search-R1, veRL)",
        lambda row: "reward_model" in row and ("prompt" in row or "question" in row),
        search_r1_question,
        ("prompt", "reward_model", "golden_answers", "extra_info", "metadata"),
    ),
    "rlinf": _Form(
        "prompt, solutions",
        lambda row: {"prompt", "solutions"} <= row.keys(),
        rlinf_question,
        ("prompt", "solutions"),
    ),
    "slime": _Form(
        "prompt, label",
        lambda row: {"prompt", "label"} <= row.keys(),
        slime_question,
        ("prompt", "label"),
    ),
    "asearcher": _Form(
        "question, answer, aug_answer",
        lambda row: {"question", "aug_answer"} <= row.keys(),
        asearcher_question,
        ("answer", "aug_answer"),
    ),
    BROWSECOMP_PLUS: _Form(
        "query_id, query, answer (BrowseComp-Plus)",
        lambda row: {"query_id", "query", "answer"} <= row.keys(),
        browsecomp_plus_question,
        ("query_id", "query", "answer"),
    ),
    "flat": _Form(
        "question, and answers, golden_answers or answer (plain, FlashRAG, NQ-open)",
        lambda row: "question" in row and not row.keys().isdisjoint(_ANSWER_KEYS),
        flat_question,
        (*_ANSWER_KEYS, "answer_aliases", "metadata", "gold_passage_ids", "hops", "hop_questions"),
    ),
}


def recognise(place: str, row: Row) -> str:
    """The form of a file's first row; raises a ``UserError`` that names the row's keys."""
    for name, form in _FORMS.items():
        if form.fits(_small_keys(row)):
            return name
    all_needed = "; ".join(f"{name}: {form.needed}" for name, form in _FORMS.items())
    raise UserError(
        f"{place}: no known form of question has these keys: "
        f"{', '.join(map(str, row)) or 'none'}; rename them to match one: {all_needed}"
    )


def check_form(form: str) -> str:
    """Returns ``form``; raises ``UserError`` if it is unknown."""
    if form not in _FORMS:
        raise UserError(f"{form!r} is not a question form; choose one of {', '.join(_FORMS)}")
    return form


def unread_keys(form: str, row: Row) -> list[str]:
    """The keys of a row that its form does not read, and that ``forage questions`` did not add."""
    read = _COMMON_KEYS.union(_FORMS[form].keys, ("answerable", "is_impossible"))
    if "checks" in row:
        read |= {"kind", "evidence", "checks"}
    return [str(key) for key in row if str(key).lower() not in read]


def questions_of(
    form: str, place: str, row: Row, default_id: str, file_stem: str
) -> Iterator[tuple[str, Question | None]]:
    """A row's questions, each with its position: many in SQuAD's form, one in other forms.

    A question is None if it is marked as unanswerable (MuSiQue, SQuAD 2.0).
    """
    read = _FORMS[form].read
    if read is None:
        yield from _squad_questions(place, row, file_stem)
    elif _is_unanswerable(row := _small_keys(row)):
        yield place, None
    else:
        yield place, read(Record(place, row, default_id, file_stem))


def _is_unanswerable(row: Row) -> bool:
    is_flat_squad = row.get("answers") == {"text": [], "answer_start": []}
    return row.get("answerable") is False or row.get("is_impossible") is True or is_flat_squad


def _small_keys(row: Row) -> Row:
    """The row with the lower-case keys that Bamboogle and TriviaQA capitalise."""
    if "question" in row or "Question" not in row:
        return row
    return {str(key).lower(): value for key, value in row.items()}


def squad_passages(path: Path | str) -> list[Passage]:
    """The paragraphs of a SQuAD file as a corpus, with the ids used in ``gold_passage_ids``."""
    path = Path(path)
    rows = read_rows(path)
    place, tree = next(rows, ("", {}))
    if not _is_squad(tree):
        raise UserError(f'{path} is not a SQuAD file: a JSON object with "data" is needed')
    return [passage for passage, _ in _paragraphs(place, tree, stem(path))]


def _squad_questions(
    place: str, tree: Row, file_stem: str
) -> Iterator[tuple[str, Question | None]]:
    for passage, paragraph in _paragraphs(place, tree, file_stem):
        where = f"{place}: paragraph {passage.id}"
        for number, row in enumerate(objects(where, paragraph.get("qas"), "qas")):
            here = f"{where}, question {number}"
            if _is_unanswerable(row):
                yield here, None
                continue
            record = Record(here, row, f"{passage.id}-{number}", file_stem)
            found = row.get("answers")
            listed = found if isinstance(found, list) else []
            answers = [each.get("text") if isinstance(each, dict) else each for each in listed]
            question = record.question(row.get("question"), answers, '"answers"')
            yield here, replace(question, gold_passage_ids=(passage.id,))


def _paragraphs(place: str, tree: Row, file_stem: str) -> Iterator[tuple[Passage, Row]]:
    """Each paragraph as a passage and as in the file, numbered over the whole file."""
    number = 0
    for article in objects(place, tree.get("data"), "data"):
        for paragraph in objects(place, article.get("paragraphs"), "paragraphs"):
            if not isinstance(paragraph.get("context"), str):
                raise UserError(
                    f'{place}: paragraph {number} must be an object with a string under "context"'
                )
            context = paragraph["context"]
            title = str(article.get("title") or "").replace("_", " ").strip()
            title = title or " ".join(context.split()[:_TITLE_WORDS])
            yield Passage(id=f"{file_stem}-{number}", title=title, text=context), paragraph
            number += 1
