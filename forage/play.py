"""``forage play``: one question, one greedy episode, shown turn by turn in the terminal."""

from __future__ import annotations

import asyncio

from rich.console import Console, Group
from rich.panel import Panel
from rich.text import Text

from forage.config import RunConfig
from forage.hardware import choose_matmul_kernel
from forage.retrieval.client import SearchClient
from forage.rollout.player import Player
from forage.rollout.scheduler import Job
from forage.rollout.stopping import StopTable
from forage.rollout.torch_engine import TorchEngine
from forage.training.model import load_model, load_tokenizer
from forage.types import Episode, Question


def play_one(config: RunConfig, question: str) -> None:
    """Play ``question`` with ``model.path`` and the retriever at ``search.url``; show it."""
    episode = asyncio.run(_play(config, Question("asked", question, (), "command line")))
    Console().print(episode_panel(episode))


async def _play(config: RunConfig, question: Question) -> Episode:
    choose_matmul_kernel()
    tokenizer = load_tokenizer(config.model)
    player = Player(config.environment, config.rollout, tokenizer, config.seed)
    player.check_prompts([question])
    async with SearchClient(config.search) as client:
        await client.wait_until_ready()
        engine = TorchEngine(
            load_model(config.model),
            StopTable.of(tokenizer),
            config.rollout.engine,
            config.environment.max_tokens,
        )
        try:
            return await player.play(Job(question, 0, "play"), engine, client, temperature=0.0)
        finally:
            await engine.close()


def episode_panel(episode: Episode) -> Panel:
    """What the policy wrote (bold) and what it was shown (dim), in order."""
    lines: list[Text] = []
    for turn in episode.turns:
        lines.append(Text(turn.sampled.strip(), style="bold"))
        if turn.observation:
            lines.append(Text(turn.observation.strip(), style="dim"))
    answer = episode.answer if episode.answer is not None else "no answer"
    footer = f"{answer} · {episode.status.value} · {episode.num_searches} searches"
    return Panel(
        Group(*lines), title=Text(episode.question.text), subtitle=Text(footer), title_align="left"
    )
