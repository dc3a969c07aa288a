"""``forage play``: plays one question greedily and shows the episode in the terminal."""

from __future__ import annotations

import asyncio
from argparse import ArgumentParser, Namespace

from rich.console import Console, Group
from rich.panel import Panel
from rich.text import Text

from forage.commands.arguments import add_overrides, add_recipe
from forage.config.run_config import RunConfig, load_config
from forage.types import Episode, Question


def add_arguments(parser: ArgumentParser) -> None:
    add_recipe(parser)
    parser.add_argument("question", metavar="QUESTION", help="the question to play")
    add_overrides(parser)


def run(args: Namespace) -> int:
    play_one(load_config(args.config, args.overrides), args.question)
    return 0


def play_one(config: RunConfig, question: str) -> None:
    """Play ``question`` with the policy and the retriever at ``search.url``; show it."""
    episode = asyncio.run(_play(config, Question("asked", question, (), "command line")))
    Console().print(episode_panel(episode))


async def _play(config: RunConfig, question: Question) -> Episode:
    from forage.evaluation.methods.methods import make_player
    from forage.retrieval.client.client import SearchClient
    from forage.rollout.engines.open_engine import open_engine
    from forage.rollout.play.player import Job
    from forage.training.model import load_sampled, load_tokenizer

    tokenizer = load_tokenizer(config.model)
    player = make_player(config, tokenizer, score=None)
    player.check_prompts([question])
    async with (
        open_engine(config, tokenizer, load_sampled(config.model)) as engine,
        SearchClient(config.search) as client,
    ):
        if config.evaluation.searches:
            await client.wait_until_ready()
        return await player.play(Job(question, 0, "play"), engine, client, temperature=0.0)


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
