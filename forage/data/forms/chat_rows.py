"""Rows whose question stands inside a prompt: Search-R1 and veRL, RLinf, slime.

They are made for trainers that send the prompt unchanged. Forage writes its own prompt, so it takes
the bare question out of theirs. ``search_r1_row`` writes the first of these forms.
"""

from __future__ import annotations

import re
from dataclasses import asdict

from forage.data.corpus import replace_surrogates
from forage.data.forms.fields import gold_passage_ids, golden_answers, hops, question_text, row_id
from forage.data.forms.rows import Row
from forage.types import Question, Tag, tag_pattern

_MARK = "Question:"
# Where a template without tags has it: at the start of a line or of a sentence.
_MARK_OF_SENTENCE = re.compile(r"(?:^|[.!?:])\s*Question:", re.MULTILINE)
# Tags of the tags protocol, and of veRL's wording of it.
_TAG = tag_pattern(Tag)
# Where a prompt given as rendered text ends the user's message.
_MESSAGE_END = re.compile(r"<\|im_end\|>|<\|eot_id\|>|\n\s*Assistant:")
# veRL's own preprocessing writes the source like this.
_VERL_PREFIX = "searchR1_"


def search_r1_question(place: str, row: Row, default_id: str, default_source: str) -> Question:
    """A row as Search-R1 and veRL write them.

    ``{"data_source", "prompt": [{"role", "content"}], "reward_model": {"ground_truth": {"target":
    [..]}}, "extra_info": {"split", "index"}}``, with or without the columns of the source. Ids and
    ``index`` count from 0 in each source, so the id has the source in front.
    """
    source = str(row.get("data_source") or default_source).removeprefix(_VERL_PREFIX)
    extra = row.get("extra_info")
    extra = extra if isinstance(extra, dict) else {}
    own_id = row_id(row)
    if own_id is None and extra.get("index") is not None:
        own_id = f"{extra.get('split') or 'train'}_{extra['index']}"
    identity = f"{source}/{own_id}" if own_id is not None else default_id
    text = row.get("question") or bare_question(row.get("prompt"))
    answers = _target(row["reward_model"]) if "reward_model" in row else None
    return Question(
        id=str(extra.get("question_id") or identity),
        text=question_text(place, row, text, '"question", or a prompt with "Question: ..."'),
        golden_answers=golden_answers(
            place, row, answers or row.get("golden_answers"), '"reward_model.ground_truth.target"'
        ),
        source=replace_surrogates(source),
        gold_passage_ids=gold_passage_ids(place, row),
        hops=hops(place, row),
    )


def rlinf_question(place: str, row: Row, default_id: str, default_source: str) -> Question:
    """``{"prompt": text or messages, "solutions": [..]}``."""
    return _prompted(place, row, row.get("solutions"), '"solutions"', default_id, default_source)


def slime_question(place: str, row: Row, default_id: str, default_source: str) -> Question:
    """``{"prompt": text or messages, "label": text, list or {"ground_truth": {"target"}}}``."""
    answers = _target(row.get("label"))
    return _prompted(place, row, answers, '"label"', default_id, default_source)


def search_r1_row(question: Question, index: int, split: str, template: str) -> Row:
    """The row of a question in Search-R1's form, number ``index`` of its source.

    ``template`` is the prompt with one ``{question}`` in it. ``question_id``, and ``metadata``
    where the question has some, are read back by ``search_r1_question`` alone.
    """
    text = question.text.strip()
    asked = text if text.endswith(("?", "？")) else text + "?"
    own_id = question.id.removeprefix(f"{question.source}/")
    row: Row = {
        "id": own_id,
        "question": question.text,
        "golden_answers": list(question.golden_answers),
        "data_source": question.source,
        "prompt": [{"role": "user", "content": template.replace("{question}", asked)}],
        "ability": "fact-reasoning",
        "reward_model": {
            "style": "rule",
            "ground_truth": {"target": list(question.golden_answers)},
        },
        "extra_info": {"split": split, "index": index, "question_id": question.id},
        "metadata": {
            "gold_passage_ids": list(question.gold_passage_ids),
            "hops": [asdict(hop) for hop in question.hops],
        },
    }
    return row


def bare_question(prompt: object) -> str | None:
    """The question inside a prompt (a text, or messages); None where it cannot be found.

    It follows the first ``Question:`` behind the template's last tag, or, in a template without
    tags, the first one that begins a line or a sentence, which keeps a question that holds that
    word whole. A prompt that has neither is the question itself.
    """
    text = _last_user_text(prompt)
    if text is None:
        return None
    text = _MESSAGE_END.split(text, maxsplit=1)[0] if _MARK in text else text
    tags = list(_TAG.finditer(text))
    if not tags:
        return _MARK_OF_SENTENCE.split(text, maxsplit=1)[-1].strip()
    behind_tags = text.find(_MARK, tags[-1].end())
    start = behind_tags if behind_tags >= 0 else text.rfind(_MARK)
    return text[start + len(_MARK) :].strip() if start >= 0 else None


def _prompted(
    place: str, row: Row, answers: object, needed: str, default_id: str, default_source: str
) -> Question:
    text = row.get("question") or bare_question(row.get("prompt"))
    return Question(
        id=row_id(row) or default_id,
        text=question_text(place, row, text, '"prompt", behind "Question:"'),
        golden_answers=golden_answers(place, row, answers, needed),
        source=replace_surrogates(str(row.get("data_source") or default_source)),
    )


def _last_user_text(prompt: object) -> str | None:
    if isinstance(prompt, str):
        # Rendered by a chat template: the last message of the user.
        return prompt.rpartition("<|im_start|>user\n")[2]
    messages = prompt if isinstance(prompt, list) else []
    for message in reversed(messages):
        if isinstance(message, dict) and message.get("role") == "user":
            content = message.get("content")
            return content if isinstance(content, str) else None
    return None


def _target(value: object) -> object:
    """``{"ground_truth": {"target": [..]}}``, or any shorter form of it, down to the answers."""
    for key in ("ground_truth", "target"):
        value = value.get(key) if isinstance(value, dict) else value
    return value
