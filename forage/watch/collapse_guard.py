"""What a run does when the sentinel alarms: warn, stop, or go back to before the trouble.

The loop shows it each step, and catches ``GoBack``. Going back drops the checkpoints from the
trouble on; ``rollbacks.jsonl`` is the one file of a run that is not cut then: it keeps the reasons
and the metrics of the steps undone, and its lines say how small the step has become, also to a
resumed run.
"""

from __future__ import annotations

import logging
import math
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

from forage.config.placement_config import USUAL_LOGPROB_DIFF
from forage.config.run_config import RunConfig
from forage.config.sentinel_config import RollBack
from forage.errors import UserError, disk_failures
from forage.records import ROLLBACKS_FILE, json_line, open_for_lines, read_metrics
from forage.training.checkpoints.checkpoint import checkpoints, drop_checkpoint
from forage.training.checkpoints.remote_copies import copies_of
from forage.watch.sentinel import Alarm, Sentinel

LOG = logging.getLogger(__name__)


class Collapsed(UserError):
    """An alarm ends the run; no checkpoint is written then."""


class GoBack(Exception):
    """An alarm sends the run back to ``checkpoint``."""

    def __init__(self, checkpoint: Path) -> None:
        super().__init__(str(checkpoint))
        self.checkpoint = checkpoint


class CollapseGuard:
    """The sentinel of a run, and what its alarms do."""

    def __init__(self, config: RunConfig, is_replay: bool = False) -> None:
        """``is_replay``: another policy sampled the episodes, so it may differ from the trainer."""
        self._config = config
        self._is_replay = is_replay
        self._sentinel = self._new_sentinel()

    @property
    def rate_factor(self) -> float:
        """The share of the learning rate that is left after the rollbacks so far."""
        sentinel = self._config.sentinel
        # A run that has rolled back may go on under another kind of sentinel.
        settings = sentinel if isinstance(sentinel, RollBack) else RollBack()
        return settings.rate_factor ** self._num_rollbacks()

    def see(self, step: int, metrics: Mapping[str, float]) -> tuple[list[Alarm], dict[str, float]]:
        """The alarms that begin with this step, and the sentinel's own metrics."""
        if self._sentinel is None:
            return [], {}
        return self._sentinel.see(step, metrics), self._sentinel.metrics()

    def remember(self, rows: Iterable[Mapping[str, float]]) -> None:
        """Start over from the recorded metrics of a run."""
        self._sentinel = sentinel = self._new_sentinel()
        if sentinel is not None:
            for row in rows:
                sentinel.see(int(row["step"]), row)

    def act_on(self, alarms: Sequence[Alarm]) -> None:
        """Warn; raises ``Collapsed`` or ``GoBack`` where ``sentinel.kind`` asks for it."""
        for alarm in alarms:
            LOG.warning("collapse ahead? %s", alarm)
        if not alarms:
            return
        sentinel = self._config.sentinel
        if sentinel is not None and sentinel.kind == "stop":
            raise Collapsed(f"the run is collapsing: {_listed(alarms)}. {self._remedy(alarms)}")
        if sentinel is not None and sentinel.kind == "roll_back":
            raise GoBack(self._roll_back(alarms, sentinel.max_rollbacks))

    @contextmanager
    def against_divergence(self, step: int, wait: Callable[[], object]) -> Iterator[None]:
        """Around the learning of ``step``: a gradient that is not finite is an alarm too.

        ``wait`` returns when no checkpoint is being written: going back chooses among whole ones.
        """
        try:
            yield
        except FloatingPointError as error:
            sentinel = self._config.sentinel
            if sentinel is None or sentinel.kind == "warn":
                raise
            wait()
            signal, meaning = "optimizer/grad_norm", f"the run has diverged ({error})"
            self.act_on([Alarm(step, step, signal, math.nan, math.nan, math.inf, meaning)])

    def _remedy(self, alarms: Sequence[Alarm]) -> str:
        """What the user can do once the run has been stopped."""
        healthy = self._healthy_checkpoints(alarms)
        if not healthy:
            return (
                "No checkpoint left is from before that: change reward or trainer.learning_rate, "
                "raise trainer.keep_checkpoints, and start anew"
            )
        step = max(healthy)
        return (
            f"{healthy[step]} is from before that. To go on from there with a smaller step: "
            "sentinel.kind=roll_back and --resume. To mend the reward first: forage export "
            f"{self._config.output_dir} --step {step} --out DIR, and another run with "
            "model.path=DIR"
        )

    def _roll_back(self, alarms: Sequence[Alarm], most: int) -> Path:
        """Drop the checkpoints from the trouble on, record it, and give the newest that is left.

        Raises ``Collapsed`` where there is none, or after ``most`` rollbacks.
        """
        if self._num_rollbacks() >= most:
            raise Collapsed(
                f"the run collapses again after {most} rollbacks: {_listed(alarms)}. Look at the "
                "reward for what can be had without a right answer, or lower trainer.learning_rate"
            )
        healthy = self._healthy_checkpoints(alarms)
        if not healthy:
            raise Collapsed(
                f"the run is collapsing and holds no checkpoint from before: {_listed(alarms)}. "
                "Raise trainer.keep_checkpoints, and start anew"
            )
        newest = max(healthy)
        try:
            self._go_back(newest, alarms)
        except UserError as error:  # others would have a checkpoint written of the spoilt weights
            text = f"the run is collapsing ({_listed(alarms)}) and cannot go back: {error}"
            raise Collapsed(text) from error
        LOG.warning("back to after step %d, with %g of the learning rate", newest, self.rate_factor)
        return healthy[newest]

    def _go_back(self, to_step: int, alarms: Sequence[Alarm]) -> None:
        """Drop the later checkpoints, and record why; raises ``UserError``."""
        out, elsewhere = self._config.output_dir, copies_of(self._config)
        # Elsewhere first: --resume would fetch from there what was dropped here. Should the
        # process die on the way, the alarm comes again, or the run goes on from before the trouble.
        if elsewhere is not None:
            elsewhere.forget_after(to_step)
        for step, checkpoint in reversed(checkpoints(out).items()):
            if step > to_step:
                drop_checkpoint(checkpoint)
        self._record(to_step, alarms)
        if elsewhere is not None:
            elsewhere.put_files(out)

    def _healthy_checkpoints(self, alarms: Sequence[Alarm]) -> dict[int, Path]:
        """Those from at least a window before the alarms began, by the steps done.

        A sign passes its limit when the decay is well under way, and what is normal is the median
        of a window. The weights after n steps were seen in step n + staleness, the first that they
        alone have played. Those before the first step are healthy by definition.
        """
        config, sentinel = self._config, self._config.sentinel
        assert sentinel is not None, "alarms are a sentinel's"
        since = min(alarm.since for alarm in alarms)
        last_healthy = max(0, since - 1 - sentinel.window - config.rollout.max_staleness)
        all_steps = checkpoints(config.output_dir)
        return {step: path for step, path in all_steps.items() if step <= last_healthy}

    def _record(self, to_step: int, alarms: Sequence[Alarm]) -> None:
        """Add a line to the file: why, and the metrics of the steps that are cut now."""
        cut = [row for row in read_metrics(self._config.output_dir) if row["step"] >= to_step]
        row = {
            "to_step": to_step,
            "alarms": [str(alarm) for alarm in alarms],
            "cut": [{name: v for name, v in row.items() if math.isfinite(v)} for row in cut],
        }
        path = self._config.output_dir / ROLLBACKS_FILE
        with (
            disk_failures(path, "see that you may write there, and continue with --resume"),
            open_for_lines(path) as file,
        ):
            file.write(json_line(row))
            file.flush()
            os.fsync(file.fileno())

    def _num_rollbacks(self) -> int:
        path = self._config.output_dir / ROLLBACKS_FILE
        return path.read_bytes().count(b"\n") if path.exists() else 0

    def _new_sentinel(self) -> Sentinel | None:
        config, sentinel = self._config, self._config.sentinel
        if sentinel is None:
            return None
        if sentinel.max_logprob_diff is None and not self._is_replay:
            limit = config.placement.max_logprob_diff(config.model)
            if config.rollout.max_staleness:  # older weights sampled, and differ by what was learnt
                limit = max(limit, USUAL_LOGPROB_DIFF["bfloat16"])
            sentinel = sentinel.model_copy(update={"max_logprob_diff": limit})
        return Sentinel(sentinel, config.trainer.max_grad_norm)


def _listed(alarms: Sequence[Alarm]) -> str:
    return "; ".join(map(str, alarms))
