"""``forage sft``: supervised learning from episodes, before reinforcement learning.

The episodes are recorded ones, or scripted demonstrations of the training questions, which are
played through the real environment and the real retriever; with them, demonstrations of test
questions measure how well the model reads. The result is an ordinary model directory. What is
learnt, and how, is ``training/warmstart.py``.
"""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import Sequence
from pathlib import Path

from forage.config import RunConfig
from forage.data.questions import read_questions
from forage.errors import UserError
from forage.hardware import choose_matmul_kernel
from forage.progress import progress_bar
from forage.records import read_episodes
from forage.retrieval.client import SearchClient
from forage.reward_config import RewardConfig
from forage.rewards.scoring import score_episode
from forage.rollout.demonstrator import Demonstrator, FirstHit, ScriptWriter
from forage.rollout.player import Player
from forage.rollout.scheduler import Job, Scheduler
from forage.training.model import load_model, load_tokenizer, save_model
from forage.training.reading import find_read_arguments, reading_accuracy
from forage.training.warmstart import warm_start, weigh
from forage.types import Episode, Question, Reward, Status

LOSSES_FILE = "warm_start.jsonl"
READING_EVERY = 100
NUM_HELD_OUT = 64


def run_sft(config: RunConfig, out: Path) -> None:
    """Train ``model.path`` on episodes and write the model to ``out``; raises ``UserError``."""
    config.check_weights_are_here("supervised learning")
    choose_matmul_kernel()
    tokenizer = load_tokenizer(config.model)
    player = Player(config.environment, config.rollout, tokenizer, config.seed)
    settings = config.warm_start
    held_out: list[Episode] = []
    if settings.episodes is not None:
        episodes = [record.episode for record in read_episodes(settings.episodes)]
    else:
        num_episodes = settings.num_steps * settings.sequences_per_step
        form = config.data.train_form
        questions = _questions_with_hops(config.data.train, form, "data.train")
        episodes = asyncio.run(demonstrate(config, player, questions, num_episodes))
        if config.data.test is not None:
            form = config.data.test_form
            questions = _questions_with_hops(config.data.test, form, "data.test")
            held_out = asyncio.run(demonstrate(config, player, questions, NUM_HELD_OUT))
    if not episodes:
        raise UserError("there is no episode to learn from: the file of episodes is empty")
    sequences = [weigh(episode, player.codec, settings) for episode in episodes]
    read_arguments = [find_read_arguments(episode, player.codec) for episode in held_out]
    model = load_model(config.model)
    config.output_dir.mkdir(parents=True, exist_ok=True)
    with (
        (config.output_dir / LOSSES_FILE).open("w", buffering=1, encoding="utf-8") as losses,
        progress_bar("warm start", settings.num_steps) as bar,
    ):
        said = ""
        for step, loss in enumerate(warm_start(model, sequences, settings), start=1):
            row = {"step": step, "loss": loss}
            if read_arguments and (step % READING_EVERY == 0 or step == settings.num_steps):
                row["reading"] = reading_accuracy(model, read_arguments)
                said = f", reads {row['reading']:.0%}"
            losses.write(json.dumps(row) + "\n")
            bar.advance(f"loss {loss:.2f}{said}")
    save_model(model, tokenizer, out)


async def demonstrate(
    config: RunConfig, player: Player, questions: Sequence[Question], num_episodes: int
) -> list[Episode]:
    """Scripted episodes of questions drawn at random; raises ``UserError``."""
    if config.environment.protocol != "tags":
        raise UserError(
            "demonstrations are written in tags: set environment.protocol to tags, or "
            "warm_start.episodes to recorded episodes"
        )
    settings = config.warm_start
    writer = ScriptWriter(questions, settings.poor_share)
    num_short = round(settings.single_passage_share * num_episodes)
    rng = random.Random(f"demonstrations-{config.seed}")
    jobs = [
        Job(rng.choice(questions), index, f"demonstration/{index}") for index in range(num_episodes)
    ]

    async with SearchClient(config.search) as client:
        await client.wait_until_ready()

        async def play(job: Job) -> Episode:
            script = writer.write(job.question, random.Random(f"{config.seed}/{job.key}"))
            search = FirstHit(client) if job.member < num_short else client
            return await player.play(job, Demonstrator(script, player.codec), search)

        async def score(episode: Episode) -> Reward:
            # For the record: no judge, nothing paid.
            return score_episode(episode, RewardConfig(), protocol=config.environment.protocol)

        scheduler = Scheduler(play, score, config.rollout.max_concurrent_episodes)
        with progress_bar("demonstrations", num_episodes) as bar:
            episodes = await scheduler.play_all(jobs, lambda _: bar.advance())
    answered = [episode for episode in episodes if episode.status is Status.ANSWERED]
    if len(answered) < len(episodes) / 2:
        raise UserError(
            f"only {len(answered)} of {len(episodes)} demonstrations reached their answer: "
            "raise environment.max_tokens, max_turns or max_turn_tokens, or look at the retriever"
        )
    return answered


def _questions_with_hops(path: Path | None, form: str | None, key: str) -> Sequence[Question]:
    if path is None:
        raise UserError(f"{key} is missing: name a file of questions")
    questions = [question for question in read_questions(path, form) if question.hops]
    if not questions:
        raise UserError(
            f"no question of {path} says how it is solved (metadata.hops), so none "
            "can be demonstrated: set warm_start.episodes to recorded episodes"
        )
    return questions
