"""THE loop: play, score, weigh, pack, learn, publish.

One loop for every mode: synchronous training is staleness 0, a replay has its groups from records,
and a rollout alone learns nothing. What a step needs is a function of its number and the run's
seed, so a run that is stopped and resumed takes the same steps.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from contextlib import AsyncExitStack, closing, suppress
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Protocol

from forage.batch import Weighed
from forage.cluster.model_servers import open_servers
from forage.cluster.places import open_places
from forage.config.run_config import RunConfig
from forage.data.order import questions_of_run
from forage.errors import UserError
from forage.evaluation.along_training import TrainingEvaluation
from forage.hardware import choose_matmul_kernel
from forage.publish import open_publisher
from forage.records import RunRecords, read_metrics
from forage.retrieval.client.client import SearchClient
from forage.rewards.scorer import Scorer
from forage.rollout.engines.engine import Engine, IdleEngine
from forage.rollout.engines.open_engine import open_engine
from forage.rollout.play.groups import GroupsInFlight, GroupSource, NothingToLearn, StepGroups
from forage.rollout.play.player import Player
from forage.rollout.play.recorded_groups import RecordedGroups
from forage.training.checkpoint import latest_checkpoint
from forage.training.credit import Credit
from forage.training.model import load_tokenizer
from forage.training.rank_processes import RankDiedError
from forage.training.savepoints import Savepoints, check_run
from forage.training.trainer_ranks import open_trainer
from forage.types import Group
from forage.watch.collapse_guard import Collapsed, CollapseGuard, GoBack
from forage.watch.dashboard import Dashboard
from forage.watch.step_report import PhaseClock, StepReport
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
    record, from which nothing is learnt. ``trace`` is a file for a timeline of the run. ``watcher``
    sees each step.
    """
    with suppress(RuntimeError):
        asyncio.get_running_loop()
        raise UserError("an event loop runs on this thread already: use forage.Run instead")
    config.check_trainable()
    config.check_placement()
    check_run(config, resume)
    if replay or played:
        config = config.without_evaluation()
    try:
        asyncio.run(_Run(config, replay, played, watcher).run(trace))
    except Stopped:
        rest = "the steps recorded are whole; play the rest into another output_dir"
        LOG.warning("stopped; %s", rest if played else "go on with: forage train ... --resume")
        raise KeyboardInterrupt from None
    except RankDiedError as error:
        raise UserError(f"{error}; go on from the last checkpoint with --resume") from error


class Watcher(Protocol):
    """Who looks on: ``forage/run.py`` hands each step to the script that started the run."""

    @property
    def stop(self) -> StopSignal:
        """What ends the run when it is set."""
        ...

    async def see(self, step: int, groups: StepGroups, metrics: dict[str, float]) -> None:
        """A step is over; the next begins when this returns."""
        ...


class _Run:
    """A training run: its parts, put together once, and the loop over them."""

    def __init__(
        self,
        config: RunConfig,
        replay: Sequence[Path],
        played: range | None,
        watcher: Watcher | None,
    ) -> None:
        self.config, self.played, self.watcher = config, played, watcher
        choose_matmul_kernel()
        self.tokenizer = load_tokenizer(config.model)
        self.player = Player(config.environment, config.rollout, self.tokenizer, config.seed)
        self.credit = Credit(config.algorithm, config.rollout.train_on_failed_searches)
        self.recorded = None
        if replay:
            self.recorded = RecordedGroups(replay, config, self.player.codec, self.credit)
        else:
            questions, self.questions = questions_of_run(config)
            self.player.check_prompts(questions)
        self.scorer = Scorer(config.reward, config.environment.protocol)
        self.places = open_places(config)
        self.trainer = open_trainer(config, self.places.start_ranks)
        self.evaluation = TrainingEvaluation(config, self.player, self.scorer)
        self.guard = CollapseGuard(config)
        self.report = StepReport(config)
        has_tensorboard = "tensorboard" in config.tracking.trackers
        identity = self.player.codec.identity()
        self.records = RunRecords(config.output_dir, identity, has_tensorboard)
        saved = (self.trainer, self.tokenizer, self.records, self.credit)
        self.savepoints = Savepoints(config, *saved)
        self.stop = StopSignal() if watcher is None else watcher.stop
        self.source: GroupSource | None = None
        self.num_steps_done = 0

    async def run(self, trace: Path | None) -> None:
        config, model = self.config, self.trainer.model
        async with AsyncExitStack() as stack:
            stack.callback(self.places.close)
            stack.callback(self.trainer.close)
            stack.callback(self.records.close)
            stack.callback(self.savepoints.close)
            self.trace = trace and stack.enter_context(closing(TraceFile(trace)))
            self.engine: Engine = IdleEngine()
            if self.recorded is None:
                servers = await stack.enter_async_context(
                    open_servers(config, self.places.server_hosts)
                )
                opened = open_engine(config, self.tokenizer, model, servers)
                self.engine = await stack.enter_async_context(opened)
            published = open_publisher(config, self.engine, self.trainer)
            self.weights = await stack.enter_async_context(published)
            start = await self._restore(None)
            self.trackers = stack.enter_context(Trackers(config))
            self.search = await stack.enter_async_context(SearchClient(config.search))
            stack.enter_context(self.stop.heard())
            if config.note:
                LOG.info("%s", config.note)
            if self.recorded is None:
                await self.stop.or_stop(stack.enter_async_context(self.scorer))
                await self.stop.or_stop(self.search.wait_until_ready())
                await self.stop.or_stop(self.evaluation.open(self.engine, self.search, stack))
            await self._learn(start)
            if config.evaluation.at_end:
                work = self.evaluation.play_all(model, self.tokenizer, self.num_steps_done)
                LOG.info("final evaluation: %s", await self.stop.or_stop(work))
            out = config.output_dir
            await self.trackers.upload(out / "config.yaml", latest_checkpoint(out))

    async def _learn(self, start: int) -> None:
        """The loop, again from an earlier checkpoint where the guard goes back."""
        while True:
            await self.weights.publish()
            try:
                return await self._loop(start)
            except GoBack as back:
                start = await self._restore(back.checkpoint)

    async def _loop(self, start: int) -> None:
        config, num_steps = self.config, self.config.trainer.num_steps
        if start == 0 and config.sentinel is not None and config.sentinel.kind == "roll_back":
            self._checkpoint(0)  # what to go back to from the first steps
        self.source = source = self._source()
        try:
            with Dashboard(num_steps, start) as board:
                for step in self.played or range(start, num_steps):
                    self.clock = PhaseClock()
                    groups = await self.stop.or_stop(source.next_groups(step))
                    self.clock.lap("rollout")
                    weighed, metrics = [], {}
                    if not self.played:
                        weighed, metrics = await self._learn_from(step, groups.chosen)
                    await self._after_step(step, groups, weighed, metrics, board)
                    self.clock.lap("checkpoint")
                    if self.trace:
                        self.trace.step(step, self.clock)
        except Collapsed:
            raise  # what was learnt last is not worth keeping
        except (Stopped, NothingToLearn, UserError):
            await source.close()
            self._checkpoint(self.num_steps_done)  # it may come before or after the step's own
            raise
        finally:
            self.source = None
            await source.close()
        self._checkpoint(num_steps)

    def _source(self) -> GroupSource:
        """Where groups come from: they are played here, or were recorded."""
        if self.recorded is not None:
            return self.recorded
        play = partial(self.player.play, engine=self.engine, search=self.search)
        if self.trace:
            play = self.trace.playing(self.player, self.engine, self.search)
        rest = (self.scorer, self.credit, self.savepoints.ahead)
        return GroupsInFlight(self.config, self.questions, play, *rest)

    async def _learn_from(
        self, step: int, groups: Sequence[Group]
    ) -> tuple[list[Weighed], dict[str, float]]:
        """Weigh the groups, pack them, learn them, and publish the weights that come of it."""
        trainer = self.trainer
        if self.config.placement.engine.offload:
            await self.weights.begin()  # servers sleep: their GPUs are the trainer's now
        prepared_P, seen = await asyncio.to_thread(trainer.prepare, self.credit.unweighed(groups))
        weighed_P, credited = self.credit.weigh(groups, prepared_P, trainer.kl_coefficient)
        batches, unmasked = await asyncio.to_thread(trainer.pack, weighed_P)
        with self.guard.against_divergence(step):
            learnt = await asyncio.to_thread(trainer.learn, batches, self.weights)
        self.num_steps_done = step + 1
        self.clock.lap("train")
        await self.weights.publish()
        self.clock.lap("publish")
        return list(chain.from_iterable(weighed_P)), learnt | seen | credited | unmasked

    async def _after_step(
        self,
        step: int,
        groups: StepGroups,
        weighed: Sequence[Weighed],
        metrics: dict[str, float],
        board: Dashboard,
    ) -> None:
        """Report, evaluate, record, act on alarms, write a checkpoint: each on its own cadence."""
        config, clock, episodes = self.config, self.clock, groups.episodes
        metrics |= self.report.of(groups, self.search.counts, self.engine.counters, clock)
        self.report.warn_of_flat_groups(step, metrics)
        alarms, watched = self.guard.see(step, metrics)
        metrics |= watched
        try:
            if config.evaluation.every and (step + 1) % config.evaluation.every == 0:
                metrics |= await self.stop.or_stop(self.evaluation.play_subset())
                clock.lap("evaluate")
        finally:  # the weights have taken the step: it is recorded, also when a stop comes here
            has_logprobs = config.algorithm.needs_recomputed_logprobs
            self.records.write_groups(step, groups.played, groups.chosen, weighed, has_logprobs)
            clock.lap("record")
            self.records.write_metrics(step, metrics | clock.metrics())
        await self.stop.or_stop(self.trackers.log(step, metrics | clock.metrics(), episodes))
        board.show(step, metrics, clock.seconds, alarms)
        self.savepoints.check()
        if alarms:
            self.savepoints.wait()  # whoever goes back chooses among whole checkpoints
        self.guard.act_on(alarms)
        if (step + 1) % config.trainer.checkpoint_every == 0:
            self._checkpoint(step + 1)
        has_failed = metrics["search/failures"] and self.recorded is None
        if has_failed and not any(map(self.credit.is_learnable, episodes)):
            LOG.warning("every episode of step %d met a failed search; waiting for search", step)
            await self.stop.or_stop(self.search.wait_until_ready())
        if self.watcher is not None:
            await self.stop.or_stop(self.watcher.see(step, groups, metrics))

    def _checkpoint(self, num_steps_done: int) -> None:
        self.records.sync()
        if not self.played:  # else nothing was learnt
            ahead = {} if self.source is None else self.source.finished_ahead()
            self.savepoints.save(num_steps_done, ahead)

    async def _restore(self, checkpoint: Path | None) -> int:
        """Everything as it was at ``checkpoint``, None for the newest; gives the steps done."""
        await self.weights.begin()
        start = self.savepoints.resume() if checkpoint is None else self.savepoints.load(checkpoint)
        self.num_steps_done = start
        self.trainer.rate_factor = self.guard.rate_factor
        self.guard.remember(read_metrics(self.config.output_dir) if start else [])
        return start
