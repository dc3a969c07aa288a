"""THE loop: play, score, weigh, pack, learn, publish.

One loop for every mode: synchronous is staleness 0, a replay reads its groups, a rollout learns
nothing. A step follows from its number and the seed, so a resumed run takes the same steps.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from contextlib import AsyncExitStack, ExitStack, closing, suppress
from functools import partial
from pathlib import Path

from forage.batch import Credited
from forage.cluster.places import open_places
from forage.config.run_config import RunConfig
from forage.data.order import questions_of_run
from forage.errors import UserError
from forage.evaluation.along_training import TrainingEvaluation
from forage.hardware import loaded_objects_frozen
from forage.publish import Publisher, open_sampling
from forage.records import RunRecords, read_metrics
from forage.retrieval.client.client import SearchClient
from forage.rewards.scorer import Scorer
from forage.rollout.engines.engine import IdleEngine
from forage.rollout.play.groups import GroupsInFlight, GroupSource
from forage.rollout.play.player import Player
from forage.rollout.play.recorded_groups import RecordedGroups, refuse_own_records
from forage.training.checkpoints.run_directory import run_directory
from forage.training.checkpoints.savepoints import Savepoints
from forage.training.credit import Credit
from forage.training.model import load_tokenizer
from forage.training.ranks.rank_processes import RankDiedError
from forage.training.ranks.trainer_ranks import open_trainer
from forage.types import Group
from forage.watch.after_step import AfterStep, Watcher
from forage.watch.collapse_guard import Collapsed, CollapseGuard, GoBack
from forage.watch.dashboard import Dashboard
from forage.watch.step_report import PhaseClock
from forage.watch.stop_signal import Stopped, StopSignal
from forage.watch.trace_file import TraceFile
from forage.watch.trackers.tracker import Trackers

LOG = logging.getLogger(__name__)


def run_training(
    config: RunConfig,
    resume: bool,
    replay: Sequence[Path] = (),
    played: range | None = None,
    trace: Path | None = None,
    watcher: Watcher | None = None,
) -> None:
    """``forage train``: run to the end, or to a signal; raises ``UserError``.

    ``replay`` are episode files to learn from instead of playing; ``played`` are steps to play and
    record, from which nothing is learnt. ``trace`` is a file for a timeline; ``watcher`` looks on.
    """
    with suppress(RuntimeError):
        asyncio.get_running_loop()
        raise UserError("an event loop runs on this thread already: use forage.Run instead")
    config.check_trainable()
    config.check_placement()
    refuse_own_records(replay, config.output_dir)
    if replay or played:
        config = config.without_evaluation()
    try:
        with run_directory(config, resume):
            asyncio.run(_Run(config, replay, played).run(trace, watcher))
    except Stopped as stopped:
        rest = "the steps recorded are whole; play the rest into another output_dir"
        LOG.warning("stopped; %s", rest if played else f"go on with: {stopped}")
        raise KeyboardInterrupt from None
    except RankDiedError as error:
        raise UserError(f"{error}; go on from the last checkpoint with --resume") from error


class _Run:
    """A training run: its parts, put together once, and the loop over them."""

    def __init__(self, config: RunConfig, replay: Sequence[Path], played: range | None) -> None:
        self.config, self.played, self.recorded = config, played, None
        self.tokenizer = load_tokenizer(config.model)
        self.player = Player(config.environment, config.rollout, self.tokenizer, config.seed)
        self.credit = Credit(config.algorithm, config.rollout.train_on_failed_searches)
        if replay:
            self.recorded = RecordedGroups(replay, config, self.player.codec, self.credit)
        else:
            questions, self.questions = questions_of_run(config)
            self.player.check_prompts(questions)
        self.scorer = Scorer(config.reward, config.environment.protocol)
        self.evaluation = TrainingEvaluation(config, self.player, self.scorer)
        self.guard, self.num_steps_done = CollapseGuard(config, is_replay=bool(replay)), 0
        identity, trackers = self.player.codec.identity(), config.tracking.trackers
        with ExitStack() as opened:  # an error on the way ends what was begun before it
            hold = opened.enter_context
            self.places = hold(closing(open_places(config)))
            self.trainer = hold(closing(open_trainer(config, self.places.start_ranks)))
            self.records = hold(RunRecords(config.output_dir, identity, "tensorboard" in trackers))
            saved = (self.trainer, self.tokenizer, self.records, self.credit, identity)
            asked = None if self.recorded else self.questions
            replayed = self.recorded and self.recorded.digest
            saves = Savepoints(config, *saved, asked, learns=not played, replayed=replayed)
            self.savepoints = hold(closing(saves))
            self.opened = opened.pop_all()

    async def run(self, trace: Path | None, watcher: Watcher | None) -> None:
        self.stop = StopSignal() if watcher is None else watcher.stop
        config, model = self.config, self.trainer.model
        async with AsyncExitStack() as stack:
            stack.enter_context(self.opened)
            self.trace = trace and stack.enter_context(closing(TraceFile(trace)))
            self.engine = updated = IdleEngine()
            if self.recorded is None:
                hosts, trainer = self.places.server_hosts, self.trainer
                opened = open_sampling(config, self.tokenizer, model, hosts, trainer)
                self.engine, updated = await stack.enter_async_context(opened)
            self.weights = Publisher(updated, self.trainer)
            start = await self._restore(None)
            trackers = stack.enter_context(Trackers(config))
            self.search = await stack.enter_async_context(SearchClient(config.search))
            stack.enter_context(self.stop.heard())
            if self.recorded is None:
                await self.stop.or_stop(stack.enter_async_context(self.scorer))
                await self.stop.or_stop(self.search.wait_until_ready(config.data.index))
                await self.stop.or_stop(self.evaluation.open(self.engine, self.search, stack))
            played = (self.engine, self.search, self.recorded is None, self.evaluation.play_subset)
            kept = (self.records, self.savepoints, self.guard, self.credit)
            stack.enter_context(loaded_objects_frozen(collects_old=False))
            self.after_step = AfterStep(config, *played, *kept, trackers, self.trace, watcher)
            await self._learn(start)
            digest = self.trainer.weights_digest
            await self.stop.or_stop(self.evaluation.at_end(digest, self.num_steps_done))
            newest = await asyncio.to_thread(self.savepoints.newest)
            await trackers.upload(config.output_dir / "config.yaml", newest)

    async def _learn(self, start: int) -> None:
        """The loop, again from an earlier checkpoint where the guard goes back."""
        while True:
            await self.weights.publish()
            try:
                return await self._loop(start)
            except GoBack as back:
                start = await self._restore(back.checkpoint)

    async def _restore(self, checkpoint: Path | None) -> int:
        """Everything as it was at ``checkpoint``, None for the newest; gives the steps done."""
        await self.weights.begin()
        self.num_steps_done = start = self.savepoints.restore(checkpoint)
        self.trainer.rate_factor = self.guard.rate_factor
        self.guard.remember(read_metrics(self.config.output_dir))
        return start

    async def _loop(self, start: int) -> None:
        num_steps, sentinel = self.config.trainer.num_steps, self.config.sentinel
        source = self.recorded or self._played_groups()
        self.savepoints.finished_ahead = source.finished_ahead
        if start == 0 and sentinel is not None and sentinel.kind == "roll_back":
            await self.savepoints.save(0)  # what to go back to from the first steps
        try:
            with Dashboard(num_steps, start) as self.after_step.board:
                for step in self.played or range(start, num_steps):
                    clock = PhaseClock()
                    groups = await self.stop.or_stop(source.next_groups(step))
                    clock.lap("rollout")
                    credited, metrics = [], {}
                    if not self.played:
                        credited, metrics = await self._learn_from(step, groups.chosen, clock)
                    await self.stop.or_stop(self.after_step(step, groups, credited, metrics, clock))
        except Collapsed:
            raise  # what was learnt last is not worth keeping
        except (Stopped, UserError):
            await source.close()
            if self._is_recorded():  # else the run goes on from the last checkpoint
                # It may come before or after the step's own.
                await self.savepoints.save(self.num_steps_done)
                # Also one in the background, while a second Ctrl-C still ends the run at once.
                await asyncio.to_thread(self.savepoints.wait)
            raise
        finally:
            await source.close()
        if self.num_steps_done % self.config.trainer.checkpoint_every:  # else it has been written
            await self.savepoints.save(self.num_steps_done)

    def _is_recorded(self) -> bool:
        """Whether the records hold every step that the weights have taken."""
        rows = read_metrics(self.config.output_dir)
        return self.num_steps_done == (int(rows[-1]["step"]) + 1 if rows else 0)

    async def _learn_from(
        self, step: int, groups: Sequence[Group], clock: PhaseClock
    ) -> tuple[list[list[Credited]], dict[str, float]]:
        """Weigh the groups, pack them, learn them, and publish the weights that come of it."""
        trainer = self.trainer
        if self.config.placement.engine.offload:
            await self.weights.begin()  # servers sleep: their GPUs are the trainer's now
        prepared_P, seen = await asyncio.to_thread(trainer.prepare, self.credit.uncredited(groups))
        with self.guard.against_divergence(step, self.savepoints.wait):
            credited_P, credited = self.credit.credit(groups, prepared_P, trainer.kl_coefficient)
        batches, unmasked = await asyncio.to_thread(trainer.pack, credited_P)
        self.num_steps_done = step + 1  # from here on the weights are no longer those before it
        with self.guard.against_divergence(step, self.savepoints.wait):
            learnt = await asyncio.to_thread(trainer.learn, batches, self.weights)
        clock.lap("train")
        await self.weights.publish()
        clock.lap("publish")
        return credited_P, learnt | seen | credited | unmasked

    def _played_groups(self) -> GroupSource:
        """The groups of each step, played with what the run samples and searches with."""
        play = partial(self.player.play, engine=self.engine, search=self.search)
        if self.trace:
            play = self.trace.playing(self.player, self.engine, self.search)
        rest = (self.scorer, self.credit, self.savepoints.ahead)
        return GroupsInFlight(self.config, self.questions, play, *rest)
