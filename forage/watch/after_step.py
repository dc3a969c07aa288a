"""What follows each step of the loop: report, evaluation, records, alarms and checkpoint.

``train.py`` calls it once the new weights are published. Evaluations and checkpoints happen here
too, each on its own schedule. Nothing here changes a weight or chooses an episode.
"""

from __future__ import annotations

import asyncio
import gc
import logging
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import Protocol

from forage.batch import Credited
from forage.config.run_config import RunConfig
from forage.records import RunRecords
from forage.retrieval.client.client import SearchClient
from forage.rollout.engines.engine import Engine
from forage.rollout.play.groups import StepGroups, Worth
from forage.training.checkpoints.savepoints import Savepoints
from forage.watch.collapse_guard import CollapseGuard
from forage.watch.dashboard import Dashboard
from forage.watch.step_report import PhaseClock, StepReport
from forage.watch.stop_signal import StopSignal
from forage.watch.trace_file import TraceFile
from forage.watch.trackers.tracker import Trackers

LOG = logging.getLogger(__name__)


class Watcher(Protocol):
    """An observer: ``forage/run.py`` hands each step to the script that started the run."""

    @property
    def stop(self) -> StopSignal:
        """Ends the run when it is set."""
        ...

    async def see(self, step: int, groups: StepGroups, metrics: dict[str, float]) -> None:
        """Receives a finished step; the next one begins when this returns."""
        ...


@dataclass(slots=True)
class AfterStep:
    """Everything that happens after a step; the loop awaits it before it begins the next."""

    config: RunConfig
    engine: Engine
    search: SearchClient
    is_played: bool
    """Whether the episodes use the engine and search; otherwise they were recorded."""
    evaluate: Callable[[], Awaitable[dict[str, float]]]
    """Runs the evaluation of ``evaluation.every``; returns its metrics."""
    records: RunRecords
    savepoints: Savepoints
    guard: CollapseGuard
    worth: Worth
    trackers: Trackers
    trace: TraceFile | None
    watcher: Watcher | None
    board: Dashboard = field(init=False)
    """Opened by the loop when its steps begin."""
    report: StepReport = field(init=False)

    def __post_init__(self) -> None:
        self.report = StepReport(self.config)
        if self.config.note:
            LOG.info("%s", self.config.note)

    async def __call__(
        self,
        step: int,
        groups: StepGroups,
        credited_P: Sequence[Sequence[Credited]],
        metrics: dict[str, float],
        clock: PhaseClock,
    ) -> None:
        """Reports, evaluates, records, acts on alarms and checkpoints, each on its schedule.

        Raises what the guard raises, and ``UserError`` for a checkpoint that cannot be written.
        """
        config = self.config
        metrics |= self.report.of(groups, self.search.counts, self.engine.counters, clock)
        self.report.warn_of_flat_groups(step, metrics)
        alarms, watched = self.guard.see(step, metrics)
        metrics |= watched
        try:
            if config.evaluation.every and (step + 1) % config.evaluation.every == 0:
                metrics |= await self.evaluate()
                clock.lap("evaluate")
        finally:  # the weights have been updated: record the step even if a stop arrives here
            # Rejection alone computes the trainer's, and the ratio's old policy is the sampler.
            learnt = (list(chain(*credited_P)), config.algorithm.decoupled)
            self.records.write_groups(step, groups.played, groups.chosen, *learnt)
            clock.lap("record")
            self.records.write_metrics(step, metrics | clock.metrics())
        await self.trackers.log(step, metrics | clock.metrics(), groups.episodes)
        self.board.show(step, metrics, clock.seconds, alarms)
        self.savepoints.check()
        if alarms:
            # A rollback needs complete checkpoints to choose from.
            await asyncio.to_thread(self.savepoints.wait)
        self.guard.act_on(alarms)
        if (step + 1) % config.trainer.checkpoint_every == 0:
            await self.savepoints.save(step + 1)
        if self.is_played and metrics["search/failures"]:
            await self._search_is_back(step, groups)
        if self.watcher is not None:
            await self.watcher.see(step, groups, metrics)
        gc.collect()  # no episode waits for it here, except prefetched ones
        clock.lap("checkpoint")
        if self.trace is not None:
            self.trace.step(step, clock)

    async def _search_is_back(self, step: int, groups: StepGroups) -> None:
        """Waits for search if it failed in every episode of the step; raises ``UserError``."""
        if not any(map(self.worth.is_learnable, groups.episodes)):
            LOG.warning("a search failed in every episode of step %d; waiting for search", step)
            await self.search.wait_until_ready(self.config.data.index)
