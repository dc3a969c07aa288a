"""The baseline that searches while reasoning and condenses the results in a separate context.

Search-o1: Li et al., https://arxiv.org/abs/2501.05366. When the policy writes a search while
reasoning, the passages do not enter its reasoning. Instead the policy first reads them in a
separate context, given the query and the reasoning so far, and its notes are inserted into the
chain. A turn that neither searches nor answers ends the chain, as in the paper.

Differences from the paper: the chain has our search tags, so that passages can open none, and the
answer is in tags, not in a box. The reader gets passages as the retriever returns them, not whole
web pages. After ``environment.max_turns`` searches there is one last turn, whose search is not run.
"""

from __future__ import annotations

from forage.environment.actions import STOP_STRINGS, Search, parse_action
from forage.environment.observation import (
    NOTHING_FOUND,
    SEARCH_FAILED,
    Observation,
    fixed_observation,
    note_observation,
)
from forage.environment.open_episode import OpenEpisode
from forage.environment.prompt import with_question_mark
from forage.evaluation.methods import own_prompts
from forage.evaluation.methods.own_prompts import Found, read_template
from forage.types import Status, Turn

TEMPLATE = read_template("search_o1")
READER_TEMPLATE = read_template("search_o1_reader")
MARK = "Final information:"


async def reason_with_searches(episode: OpenEpisode) -> Status:
    """Reasons until an answer, with a condensed note after each search."""
    max_searches = episode.config.max_turns
    template = TEMPLATE.replace("{searches}", str(max_searches))
    question = with_question_mark(episode.question.text)
    chain = own_prompts.open_prompt(episode, template, {"question": question})
    reasoning = ""
    for num_searches in range(max_searches + 1):
        sampled = await episode.sample(chain, STOP_STRINGS)
        action = parse_action(sampled.text)
        if not isinstance(action, Search):
            return own_prompts.take_answer(episode, sampled)
        if num_searches == max_searches:
            turn = Turn(sampled.text, action.kind, action.query, generate_s=sampled.seconds)
            episode.turns.append(turn)
            return Status.OUT_OF_TOKENS if sampled.is_cut else Status.OUT_OF_TURNS
        reasoning += sampled.text
        found = await own_prompts.search(episode, action.query)
        shown, note = await _condense(episode, found, reasoning)
        observation = Observation(note.token_ids, note.text, shown.passage_ids)
        episode.turns.append(found.turn(observation, sampled))
        if not episode.has_room(chain.transcript, note):
            return Status.OUT_OF_TOKENS
        chain.transcript.append_observation(note.token_ids)
        reasoning += note.text
    raise AssertionError("the last turn ends the chain")


async def _condense(
    episode: OpenEpisode, found: Found, reasoning: str
) -> tuple[Observation, Observation]:
    """The passages as the reader saw them, and the note that is inserted into the chain.

    If nothing was found, there is nothing to read, and the chain gets a fixed text that says so.
    """
    codec, budget = episode.codec, episode.config.max_observation_tokens
    if found.failure is not None or not found.hits_K:
        note = SEARCH_FAILED if found.failure is not None else NOTHING_FOUND
        fixed = fixed_observation(note, codec, budget)
        return fixed, fixed
    shown = own_prompts.shown_result(episode, found)
    texts = {"query": found.query, "passages": shown.token_ids}
    room = own_prompts.room_after(episode, READER_TEMPLATE, {**texts, "reasoning": ()})
    # If the reasoning is too long, its latest part matters most.
    latest = tuple(codec.encode_untrusted(reasoning))
    latest = latest[len(latest) - room :] if len(latest) > room else latest
    texts = {**texts, "reasoning": latest}
    reader = own_prompts.open_prompt(episode, READER_TEMPLATE, texts)
    sampled = await episode.sample(reader, ())
    episode.release(reader)
    content = own_prompts.content_of(episode, sampled)
    conclusion = content.rpartition(MARK)[2].strip()  # everything if the mark is missing
    return shown, note_observation(f"{conclusion}\n", codec, budget)
