"""``forage sft``: supervised learning from episodes, before reinforcement learning.

The episodes are recorded ones that ``data/selection.py`` selects, or scripted demonstrations of the
training questions, played through the real environment and retriever. Demonstrations of test
questions then measure how well the model reads. A question writer learns from lessons instead of
episodes (``questions/lessons.py``). The result is an ordinary model directory; the learning is in
``training/warm_start.py``.
"""

from __future__ import annotations

import asyncio
import json
import logging
import random
from argparse import ArgumentParser, Namespace
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from forage.commands.arguments import add_config
from forage.config.run_config import RunConfig, load_config
from forage.config.warm_start_config import (
    ReadingSource,
    RecordedSource,
    ScriptedSource,
    WritingSource,
)
from forage.data.questions import read_questions
from forage.data.selection import select
from forage.disk.disk_failures import refuse_unwritable
from forage.episode_json import EpisodeRecord
from forage.errors import UserError
from forage.hardware import choose_matmul_kernel
from forage.progress import progress_bar
from forage.rewards.reward_config import RewardConfig
from forage.rewards.scoring import score_episode
from forage.types import Episode, Generate, Origin, Question, Status, TokenizerId

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerFast

    from forage.environment.codec import Codec
    from forage.rollout.play.player import Job, Player
    from forage.training.warm_start import ReadArguments, WeightedTokens

LOG = logging.getLogger(__name__)

LOSSES_FILE = "warm_start.jsonl"
READING_EVERY = 100
NUM_HELD_OUT = 64


def add_arguments(parser: ArgumentParser) -> None:
    add_config(parser)
    text = "directory to write the trained model to"
    parser.add_argument("--out", type=Path, required=True, metavar="DIR", help=text)
    text = "write only the LoRA adapters, not merged into the model"
    parser.add_argument("--adapter", action="store_true", help=text)


def run(args: Namespace) -> int:
    config = load_config(args.config, args.overrides)  # before torch is imported
    run_sft(config, args.out, adapter_only=args.adapter)
    then = f"forage train {args.config} model.path={args.out}"
    if isinstance(config.warm_start.source, WritingSource):
        then = f"forage questions DOCUMENTS --out DIR --model {args.out}"
    LOG.info(
        "Wrote the model after %d steps to %s. Next: %s",
        config.warm_start.num_steps,
        args.out,
        then,
    )
    return 0


def run_sft(config: RunConfig, out: Path, adapter_only: bool = False) -> None:
    """Trains ``model.path`` on episodes and writes the model to ``out``; raises ``UserError``.

    Adapters (``model.lora``) are merged into the model, or written alone with ``adapter_only``.
    """
    config.check_supervised()
    import torch

    from forage.environment.remembered import memory_of
    from forage.environment.template import MEMORY_FILE
    from forage.plan.fit_here import fit_here
    from forage.questions.lessons import read_lessons
    from forage.training import lora
    from forage.training.model import load_policy, load_tokenizer, save_model

    if adapter_only and config.model.lora is None:
        raise UserError("without model.lora there are no adapters to write; leave --adapter out")
    if out.exists() and not out.is_dir():
        raise UserError(f"--out {out} is a file; name a directory for the model")
    refuse_unwritable(out)
    config = fit_here(config, "supervised")
    choose_matmul_kernel()
    tokenizer = load_tokenizer(config.model)
    is_writer = isinstance(config.warm_start.source, WritingSource)
    if is_writer:
        sequences, read_arguments = read_lessons(config, tokenizer)
    else:
        sequences, read_arguments = _episodes(config, tokenizer)
    model = load_policy(config.model, config.seed)
    torch.manual_seed(config.seed)  # for the dropout of adapters
    _learn(config, model, sequences, read_arguments)
    if lora.has_adapters(model) and not adapter_only:
        lora.merge(model)
    save_model(model, tokenizer, out)
    if not is_writer:
        (out / MEMORY_FILE).write_text(memory_of(config.environment), encoding="utf-8")


def _episodes(
    config: RunConfig, tokenizer: PreTrainedTokenizerFast
) -> tuple[list[WeightedTokens], list[ReadArguments]]:
    """The episodes to learn from, and held-out ones to measure how well the model reads."""
    from forage.rollout.play.player import Player
    from forage.training.warm_start import find_read_arguments, weigh

    player = Player(config.environment, config.rollout, tokenizer, config.seed)
    settings, source = config.warm_start, config.warm_start.source
    held_out: list[Episode] = []
    if isinstance(source, ScriptedSource | ReadingSource):
        num_episodes = settings.num_steps * settings.sequences_per_step
        questions = _questions_to_show(config, "train")
        episodes = asyncio.run(demonstrate(config, source, player, questions, num_episodes))
        if config.data.test is not None:
            questions = _questions_to_show(config, "test")
            held_out = asyncio.run(demonstrate(config, source, player, questions, NUM_HELD_OUT))
    else:
        episodes = recorded(config, player.codec)
    contexts = [context for episode in episodes for context in episode.contexts]
    sequences = [weigh(context, player.codec, settings) for context in contexts]
    return sequences, [find_read_arguments(episode, player.codec) for episode in held_out]


def recorded(config: RunConfig, codec: Codec) -> list[Episode]:
    """The episodes that ``source.select`` selects, shuffled with the seed.

    Raises ``UserError``, also for episodes that were played with another tokenizer.
    """
    source = config.warm_start.source
    assert isinstance(source, RecordedSource), "scripted demonstrations are played, not read"
    selection = select(source.files, source.select)
    LOG.info("%s", selection.explain())
    mine = codec.identity()
    episodes: list[Episode] = []
    for record in selection.records():
        _check_tokens(record, codec, mine)
        episodes.append(record.episode)
    # A run writes the episodes of a question one after another, but a step should mix questions.
    random.Random(f"sft/{config.seed}").shuffle(episodes)
    return episodes


def _check_tokens(record: EpisodeRecord, codec: Codec, mine: TokenizerId) -> None:
    theirs, episode = record.tokenizer, record.episode
    if theirs is not None:
        if theirs.sha256 != mine.sha256:
            raise UserError(
                f"the episodes were played with the tokenizer {theirs.name} ({theirs.sha256}), but "
                f"model.path has {mine.name} ({mine.sha256}), whose ids mean other words; play "
                "them with this model, or train a model with that tokenizer"
            )
        return
    # Records without a tokenizer name also contain the sampled text: compare that.
    sampled = [s.token_ids_T for s in episode.segments if s.origin is Origin.SAMPLED]
    for token_ids_T, turn in zip(sampled, episode.turns, strict=False):
        read = codec.decode(token_ids_T)
        if read != turn.sampled:
            raise UserError(
                f"the episode of question {episode.question.id} (step {record.step}) was played "
                f"with another tokenizer than {mine.name} ({mine.sha256}), which reads "
                f"{read[:40]!r} instead of the sampled {turn.sampled[:40]!r}; play it with this "
                "model"
            )


def _learn(
    config: RunConfig,
    model: PreTrainedModel,
    sequences: Sequence[WeightedTokens],
    read_arguments: Sequence[ReadArguments],
) -> None:
    from forage.training.warm_start import (
        reading_accuracy,
        supervised_micro_batches,
        warm_start,
    )

    settings, micro_batches = config.warm_start, supervised_micro_batches(config, model)
    config.output_dir.mkdir(parents=True, exist_ok=True)
    with (
        (config.output_dir / LOSSES_FILE).open("w", buffering=1, encoding="utf-8") as losses,
        progress_bar("warm start", settings.num_steps) as bar,
    ):
        reading = ""
        steps = warm_start(model, sequences, settings, micro_batches)
        for step, loss in enumerate(steps, start=1):
            row = {"step": step, "loss": loss, **micro_batches.metrics()}
            if read_arguments and (step % READING_EVERY == 0 or step == settings.num_steps):
                row["reading"] = reading_accuracy(model, read_arguments)
                reading = f", reads {row['reading']:.0%}"
            losses.write(json.dumps(row) + "\n")
            bar.advance(f"loss {loss:.2f}{reading}")


async def demonstrate(
    config: RunConfig,
    source: ScriptedSource | ReadingSource,
    player: Player,
    questions: Sequence[Question],
    num_episodes: int,
) -> list[Episode]:
    """Plays scripted episodes of randomly drawn questions; raises ``UserError``."""
    from forage.retrieval.client.client import SearchClient
    from forage.rollout.play.demonstrator import FirstHit
    from forage.rollout.play.player import Job, play_all

    demonstrator_of = _demonstrators(source, player, questions, config.seed)
    num_short = 0
    if isinstance(source, ScriptedSource):
        num_short = round(source.single_passage_share * num_episodes)
    rng = random.Random(f"demonstrations-{config.seed}")
    jobs = [
        Job(_drawn(questions, source, rng), index, f"demonstration/{index}")
        for index in range(num_episodes)
    ]

    async with SearchClient(config.search) as client:
        await client.wait_until_ready(config.data.index)

        async def play(job: Job) -> Episode:
            search = FirstHit(client) if job.member < num_short else client
            episode = await player.play(job, demonstrator_of(job), search)
            # The reward is only recorded, so it does not use a judge, which may cost money.
            reward = score_episode(episode, RewardConfig(), protocol=config.environment.protocol)
            return replace(episode, reward=reward)

        episodes: dict[str, Episode] = {}
        with progress_bar("demonstrations", num_episodes) as bar:

            def keep(job: Job, episode: Episode) -> None:
                episodes[job.key] = episode
                bar.advance()

            await play_all(jobs, play, config.rollout.max_concurrent_episodes, keep)
    in_order = [episodes[job.key] for job in jobs]
    answered = [episode for episode in in_order if episode.status is Status.ANSWERED]
    if len(answered) < len(episodes) / 2:
        raise UserError(
            f"only {len(answered)} of {len(episodes)} demonstrations reached their answer: "
            "raise environment.max_tokens, max_turns or max_turn_tokens, or check the retriever"
        )
    return answered


def _demonstrators(
    source: ScriptedSource | ReadingSource, player: Player, questions: Sequence[Question], seed: int
) -> Callable[[Job], Generate]:
    from forage.retrieval.words.languages import stop_words
    from forage.rollout.play.demonstrator import (
        Demonstrator,
        Reader,
        ScriptWriter,
        plan_reading,
        words_without,
    )

    if isinstance(source, ScriptedSource):
        writer = ScriptWriter(questions, source.poor_share, player.write_search)

        def script(job: Job) -> Generate:
            written = writer.write(job.question, random.Random(f"{seed}/{job.key}"))
            return Demonstrator(written, player.codec)

        return script
    shares = (source.poor_share, source.keyword_share)
    key_words = words_without(stop_words("en"))

    def read(job: Job) -> Generate:
        rng = random.Random(f"{seed}/{job.key}")
        plan = plan_reading(job.question, questions, *shares, key_words, rng)
        return Reader(job.question, plan, player.codec, player.write_search)

    return read


def _drawn(
    questions: Sequence[Question], source: ScriptedSource | ReadingSource, rng: random.Random
) -> Question:
    if isinstance(source, ReadingSource) or source.multi_hop_share is None:
        return rng.choice(questions)
    is_multi = rng.random() < source.multi_hop_share
    for _ in range(1000):
        question = rng.choice(questions)
        if (len(question.hops) > 1) == is_multi:
            return question
    raise UserError(
        f"warm_start.source.multi_hop_share is {source.multi_hop_share}, but almost no question of "
        f"data.train needs {'two or more searches' if is_multi else 'one search'}; change it"
    )


def _questions_to_show(config: RunConfig, split: Literal["train", "test"]) -> Sequence[Question]:
    """The questions of a file that can be demonstrated; raises ``UserError`` if there are none."""
    is_train, data = split == "train", config.data
    path, form = (data.train, data.train_form) if is_train else (data.test, data.test_form)
    if path is None:
        raise UserError(f"data.{split} is missing: name a file of questions")
    questions = read_questions(path, form)
    if isinstance(config.warm_start.source, ReadingSource):
        return questions
    questions = [question for question in questions if question.hops]
    if not questions:
        raise UserError(
            f"no question of {path} contains its solution (metadata.hops), so none can be "
            "demonstrated step by step: demonstrate how to search, read and answer with "
            "warm_start.source=reading, or learn from recorded episodes with "
            "warm_start.source.kind=recorded and warm_start.source.episodes=FILE"
        )
    return questions
