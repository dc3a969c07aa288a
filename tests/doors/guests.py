"""A recipe played by other programs: the tiny world's questions and search, native tool calls."""

from __future__ import annotations

import copy
from functools import cache
from pathlib import Path
from typing import Any

from transformers import PreTrainedTokenizerFast

from forage.config.config_file import merge
from forage.config.run_config import RunConfig, build_config
from forage.rewards.scorer import Scorer
from forage.rollout.play.player import Job, Player
from forage.types import Episode, Question, Retriever
from tests.environment.families import family_model, family_tokenizer
from tests.fakes import ScriptedEngine
from tests.tiny_runs import scratch, search_server, world_dir

THOUGHT = "<think>\nWhere is it?\n</think>\n\n"


@cache
def qwen3(chat_template: str) -> Path:
    """A tiny random Qwen3 with a chat template."""
    out = scratch() / "guests"
    tokenizer = copy.deepcopy(family_tokenizer("qwen3"))
    tokenizer.chat_template = chat_template
    tokenizer.save_pretrained(out)
    family_model("qwen3").save_pretrained(out)
    return out


def recipe(model: Path, **changes: Any) -> RunConfig:
    """A recipe with up to two searches; ``search={"url": ...}`` changes keys of a section."""
    tree: dict[str, Any] = {
        "model": {"path": str(model)},
        "data": {"train": str(world_dir() / "train.jsonl")},
        "environment": {
            **{"protocol": "tools", "max_turns": 2, "max_turn_tokens": 300},
            **{"max_observation_tokens": 400, "max_tokens": 3000},
        },
        "search": {"url": search_server().url, "topk": 2, "deadline_s": 10},
        "reward": {"structure_score": 0.2, "retrieval_score": 0.1, "search_cost": 0.05},
    }
    return build_config(merge(tree, changes, (RunConfig,)))


async def played_by_forage(
    config: RunConfig,
    tokenizer: PreTrainedTokenizerFast,
    question: Question,
    turns: list[str],
    search: Retriever,
) -> Episode:
    """The same turns in Forage's own environment, not yet scored."""
    player = Player(config.environment, config.rollout, tokenizer, config.seed)
    engine = ScriptedEngine(tokenizer, *turns)
    return await player.play(Job(question, 0, "0/q/0"), engine, search)


async def reward_of(config: RunConfig, episode: Episode) -> dict[str, float]:
    """The value and the components of Forage's reward for an episode."""
    async with Scorer(config.reward, config.environment.protocol) as score:
        reward = await score(episode)
    return {"": reward.value, **reward.parts}
