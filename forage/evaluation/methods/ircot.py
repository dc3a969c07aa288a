"""The baseline that searches with each sentence of its reasoning, then reads everything it found.

IRCoT: Trivedi et al., https://arxiv.org/abs/2212.10509. The first search is for the question. Then,
repeatedly, the policy writes the next sentence of a chain of thought, with all passages found so
far and the previous sentences in its prompt, and that sentence is the next query. The chain ends
with a sentence that contains "answer is", with an empty one, or after ``environment.max_turns``
searches. Finally a reader (the same policy) gets the question and every passage, without the chain,
reasons and answers.

Differences: no worked examples in the prompts; up to ``max_turns`` searches instead of up to eight;
as many passages as fit into the context, in the order found, instead of fifteen.
"""

from __future__ import annotations

import re

from forage.environment.observation import Observation
from forage.environment.prompt import with_question_mark
from forage.evaluation.methods.asking import Asking, Found, Written, read_template
from forage.types import ActionKind, Hit, Status, Turn

CHAIN_TEMPLATE = read_template("ircot")
READER_TEMPLATE = read_template("ircot_reader")
MAX_SENTENCE_TOKENS = 128
"""Tokens sampled for one sentence; text after the first sentence is not used."""

_END_OF_CHAIN = "answer is"
_SENTENCE_END = re.compile(r"[.!?][\"'”’)\]]*(?=\s|$)|\n")
_ABBREVIATION = re.compile(
    r"(?:\b(?:[A-Z]|Dr|Mr|Mrs|Ms|St|Mt|Jr|Sr|No|vs|ca|cf|e\.g|i\.e))\.$", re.ASCII
)


async def interleave(asking: Asking) -> Status:
    """Searches and reasons alternately, then reads everything found and answers."""
    question = asking.job.question.text
    found = await asking.search(question)
    asking.note_own_search(found, _shown(asking, found))
    hits = {hit.passage.id: hit for hit in found.hits_K}
    sentences: list[str] = []
    max_searches = asking.environment.max_turns
    while len(sentences) < max_searches:
        written = await _next_sentence(asking, hits, sentences)
        sentence = first_sentence(written.content)
        sentences.append(sentence)
        is_over = not sentence or _END_OF_CHAIN in sentence.lower()
        if is_over or len(sentences) == max_searches:
            # The chain is not the answer: the reader gives that.
            kind = ActionKind.SEARCH if sentence else ActionKind.INVALID
            argument = sentence or "The sentence is empty."
            asking.turns.append(Turn(written.text, kind, argument, generate_s=written.seconds))
            break
        found = await asking.search(sentence)
        asking.turns.append(found.turn(written.text, _shown(asking, found), written.seconds))
        hits |= {hit.passage.id: hit for hit in found.hits_K}
    return await asking.answer(asking.open(_prompt(asking, READER_TEMPLATE, hits, {})))


async def _next_sentence(asking: Asking, hits: dict[str, Hit], sentences: list[str]) -> Written:
    so_far = {"reasoning": " ".join(sentences)}
    context = asking.open(_prompt(asking, CHAIN_TEMPLATE, hits, so_far))
    written = await context.write((), MAX_SENTENCE_TOKENS)
    context.close()
    return written


def _prompt(
    asking: Asking, template: str, hits: dict[str, Hit], others: dict[str, str]
) -> list[int]:
    """The template with the question, the passages that fit, and ``others``."""
    texts = {"question": with_question_mark(asking.job.question.text), **others}
    room = asking.room_after(asking.prompt(template, {**texts, "passages": ()}))
    passages = asking.gather(list(hits.values()), room)
    return asking.prompt(template, {**texts, "passages": passages.token_ids})


def _shown(asking: Asking, found: Found) -> Observation:
    """The passages of one search, for the record: each prompt gathers those of all searches."""
    return asking.show(found, asking.environment.max_observation_tokens)


def first_sentence(text: str) -> str:
    """The text up to the end of its first sentence or line.

    >>> first_sentence(" Dr. A. Belo was born in Tavi. It lies on a lake.")
    'Dr. A. Belo was born in Tavi.'
    """
    text = text.strip()
    for match in _SENTENCE_END.finditer(text):
        sentence = text[: match.end()].strip()
        if not _ABBREVIATION.search(sentence):
            return sentence
    return text
