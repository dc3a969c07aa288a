"""Plays a question with a baseline, using a script for the policy and passages by title."""

from dataclasses import dataclass
from typing import Any

from transformers import PreTrainedTokenizerFast

from forage.config.run_config import RunConfig, build_config
from forage.evaluation.methods.methods import make_player
from forage.evaluation.methods.own_prompts import read_template
from forage.rollout.play.player import Job
from forage.types import Episode, Origin, Passage, Question
from tests.fakes import Fault, ScriptedEngine, ScriptedSearch, reply_with, tiny_tokenizer

QUESTION = Question("q1", "Which river is the capital of Italy on", ("Tiber",), "test")
ASKED = f"{QUESTION.text}?"
ITALY = Passage("p1", "Italy", "Its capital is Rome.")
ROME = Passage("p2", "Rome", "It lies on the Tiber.")
ENVIRONMENT = {
    "max_turns": 3,
    "max_turn_tokens": 120,
    "max_observation_tokens": 250,
    "max_tokens": 2400,
}
END = "<|endoftext|>"


@dataclass(frozen=True)
class Played:
    """An episode, and the requests it made to the engine and the retriever."""

    episode: Episode
    engine: ScriptedEngine
    search: ScriptedSearch

    @property
    def prompts(self) -> list[str]:
        """The engine's inputs, call by call, as text."""
        decode = tiny_tokenizer().decode
        return [str(decode(list(call.token_ids))) for call in self.engine.calls]

    @property
    def written(self) -> list[str]:
        return [turn.sampled for turn in self.episode.turns]


def config_of(method: str, **sections: Any) -> RunConfig:
    evaluation = {"method": method, **sections.pop("evaluation", {})}
    environment = {**ENVIRONMENT, **sections.pop("environment", {})}
    tree = {"model": {"path": "unused"}, "environment": environment, "evaluation": evaluation}
    return build_config({**tree, **sections})


async def play(
    method: str,
    *turns: str | Fault,
    search: ScriptedSearch | None = None,
    question: Question = QUESTION,
    tokenizer: PreTrainedTokenizerFast | None = None,
    temperature: float | None = 0.0,
    **sections: Any,
) -> Played:
    """Plays the question; ``turns`` are the policy's texts, call by call."""
    tokenizer = tokenizer or tiny_tokenizer()
    engine = ScriptedEngine(tokenizer, *turns)
    search = search or ScriptedSearch()
    player = make_player(config_of(method, **sections), tokenizer, score=None)
    player.check_prompts([question])
    job = Job(question, 0, "eval/normal/q1")
    episode = await player.play(job, engine, search, temperature)
    recorded, seen = contexts_of(episode), contexts_seen(engine)
    # A context that is no longer used may contain the text before the end.
    assert len(recorded) >= len(seen)
    for mine, its in zip(recorded, seen, strict=False):
        assert mine[: len(its)] == its, "the record is not what the engine saw"
    return Played(episode, engine, search)


def contexts_of(episode: Episode) -> list[tuple[int, ...]]:
    """The contexts according to the segments: from one prompt to the next."""
    contexts: list[tuple[int, ...]] = []
    for segment in episode.segments:
        if segment.origin is Origin.PROMPT:
            contexts.append(())
        elif not contexts:
            assert not segment.token_ids_T, "only an empty turn may precede the first prompt"
            continue
        contexts[-1] += segment.token_ids_T
    return contexts


def contexts_seen(engine: ScriptedEngine) -> list[tuple[int, ...]]:
    """The contexts that the engine received, in the order in which they began."""
    contexts: dict[str, tuple[int, ...]] = {}
    for call in engine.calls:
        key = call.sampling.episode_key
        before = contexts.get(key, ())
        assert call.token_ids[: len(before)] == before, "a context only grows"
        completed = call.completion.token_ids_T if call.completion else ()
        contexts[key] = (*call.token_ids, *completed)
    return list(contexts.values())


def expected(template: str, **fillings: str) -> str:
    """The prompt with its placeholders filled in."""
    text = read_template(template)
    for name, filling in fillings.items():
        text = text.replace(f"{{{name}}}", filling)
    return text


def found(*passages: Passage) -> ScriptedSearch:
    """A retriever that finds one passage per query, in this order."""
    return ScriptedSearch(*(reply_with(passage) for passage in passages))
