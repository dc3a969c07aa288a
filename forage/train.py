"""THE loop: play, score, weigh, pack, learn, publish.

One loop for every mode: synchronous training is staleness 0. What a step needs is a function of
its number and the run's seed, so a run that is stopped and resumed takes the same steps.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from contextlib import AsyncExitStack
from math import ceil
from pathlib import Path

from forage.algorithms.dynamic_sampling import DynamicSamplingConfig
from forage.algorithms.packing import pack_mini_batches
from forage.config.run_config import RunConfig, to_yaml
from forage.data.order import StepQuestions, training_questions
from forage.errors import UserError
from forage.evaluation.along_training import TrainingEvaluation
from forage.evaluation.scores import scores_of
from forage.evaluation.summary import source_metrics
from forage.hardware import choose_matmul_kernel
from forage.progress import Bar, progress_bar
from forage.records import METRICS_FILE, RunRecords, read_metrics
from forage.retrieval.client.client import SearchClient, SearchCounts
from forage.rewards.scorer import Scorer
from forage.rollout.engines.torch.stopping import StopTable
from forage.rollout.engines.torch.torch_engine import TorchEngine
from forage.rollout.play.player import Player
from forage.rollout.play.refill import GroupSource, NothingToLearn, Refilled, num_oversampled
from forage.rollout.play.scheduler import GroupScheduler, Scheduler
from forage.stop_signal import Stopped, StopSignal
from forage.training.checkpoint import (
    RunState,
    latest_checkpoint,
    load_checkpoint,
    save_checkpoint,
)
from forage.training.credit import Credit
from forage.training.model import load_policy, load_tokenizer
from forage.training.trainer import build_trainer
from forage.types import Group, Question
from forage.watch.collapse_guard import Collapsed, CollapseGuard, GoBack
from forage.watch.episode_metrics import episode_metrics
from forage.watch.phase_clock import PhaseClock
from forage.watch.vitals import vitals

LOG = logging.getLogger(__name__)


def run_training(config: RunConfig, resume: bool) -> None:
    """``forage train``: run to the end, or to a signal; raises ``UserError``."""
    config.check_trainable()
    config.check_placement()
    _check_output(config.output_dir, resume)
    try:
        asyncio.run(_Run(config).run())
    except Stopped:
        LOG.warning("stopped; go on with: forage train ... --resume")
        raise KeyboardInterrupt from None


class _Run:
    """A training run: its parts, put together once, and the loop over them."""

    def __init__(self, config: RunConfig) -> None:
        assert config.data.train is not None, "checked by check_trainable"
        self.config = config
        questions, self.questions = _questions(config)
        choose_matmul_kernel()
        self.tokenizer = load_tokenizer(config.model)
        self.player = Player(config.environment, config.rollout, self.tokenizer, config.seed)
        self.player.check_prompts(questions)
        self.scorer = Scorer(config.reward, config.environment.protocol)
        model = load_policy(config.model, config.seed)
        self.trainer = build_trainer(model, config)
        self.credit = Credit(config.algorithm, config.rollout.train_on_failed_searches)
        self.num_steps_done = 0
        self.evaluation = TrainingEvaluation(config, self.player, self.scorer)
        self.guard = CollapseGuard(config)
        self.records = RunRecords(config.output_dir, self.player.codec.identity())
        self.searches_logged = SearchCounts()
        self.stop = StopSignal()
        # Last, because it starts a thread: what cannot be set up above is said with nothing to end.
        self.engine = TorchEngine(
            model,
            StopTable.of(self.tokenizer),
            config.rollout.engine,
            config.environment.max_tokens,
        )

    async def run(self) -> None:
        config = self.config
        async with AsyncExitStack() as stack:
            stack.callback(self.records.close)
            stack.push_async_callback(self.engine.close)
            start = self._resume()
            self.search = await stack.enter_async_context(SearchClient(config.search))
            await stack.enter_async_context(self.scorer)
            stack.enter_context(self.stop.heard())
            if config.note:
                LOG.info("%s", config.note)
            await self.stop.or_stop(self.search.wait_until_ready())
            await self.stop.or_stop(self.evaluation.open(self.engine, self.search, stack))
            await self._learn(start)
            if config.evaluation.at_end:
                await self._evaluate_at_end()

    async def _learn(self, start: int) -> None:
        """The loop, again from an earlier checkpoint where the guard goes back."""
        while True:
            await self.engine.receive_weights(self.trainer.version)
            try:
                return await self._loop(start)
            except GoBack as back:
                start = self._load(back.checkpoint)

    async def _loop(self, start: int) -> None:
        config = self.config
        if start == 0 and config.sentinel is not None and config.sentinel.kind == "roll_back":
            self._checkpoint(0)  # what to go back to from the first steps
        scheduler = self._group_scheduler(start)
        source = self._group_source(scheduler)
        try:
            with progress_bar("training", config.trainer.num_steps) as bar:
                bar.progress.update(bar.task, completed=start)
                for step in range(start, config.trainer.num_steps):
                    clock = PhaseClock()
                    rollout = await self.stop.or_stop(source.groups_of(step))
                    clock.lap("rollout")
                    metrics = await self._learn_from(step, rollout.chosen)
                    clock.lap("train")
                    await self.engine.receive_weights(version=self.trainer.version)
                    clock.lap("publish")
                    await self._after_step(step, rollout, metrics, clock, bar)
        except Collapsed:
            raise  # what was learnt last is not worth keeping
        except (Stopped, NothingToLearn, UserError):
            await scheduler.close()
            self._checkpoint(self.num_steps_done)  # it may come before or after the step's own
            raise
        finally:
            await scheduler.close()
        self._checkpoint(config.trainer.num_steps)

    async def _learn_from(self, step: int, groups: Sequence[Group]) -> dict[str, float]:
        """Weigh the groups, pack them, learn them; the version has grown when it is done."""
        trainer, settings = self.trainer, self.config.trainer
        prepared_P, seen = await asyncio.to_thread(trainer.prepare, self.credit.unweighed(groups))
        weighed_P, credited = self.credit.weigh(groups, prepared_P, trainer.kl_coefficient)
        weighed_P, unmasked = await asyncio.to_thread(trainer.unmask_observations, weighed_P)
        batches = pack_mini_batches(
            weighed_P,
            settings.num_mini_batches,
            settings.max_tokens_per_micro_batch,
            trainer.cost_of,
        )
        with self.guard.against_divergence(step):
            learnt = await asyncio.to_thread(trainer.learn, batches, self.engine.weights_lock)
        self.num_steps_done = step + 1
        return learnt | seen | credited | unmasked

    def _group_scheduler(self, start: int) -> GroupScheduler:
        config = self.config
        scheduler = Scheduler(
            lambda job: self.player.play(job, self.engine, self.search),
            self.scorer,
            config.rollout.max_concurrent_episodes,
        )
        return GroupScheduler(
            scheduler,
            self._questions_to_play,
            config.trainer.group_size,
            start,
            config.trainer.num_steps,
            config.rollout.max_staleness,
            has_greedy=config.algorithm.advantage.plays_greedy,
        )

    def _group_source(self, scheduler: GroupScheduler) -> GroupSource:
        return GroupSource(
            self.config.algorithm.dynamic_sampling,
            scheduler,
            self.config.trainer.questions_per_step,
            self.questions.spare,
            self.credit.is_flat,
            self.credit.is_learnable,
        )

    def _questions_to_play(self, step: int) -> Sequence[Question]:
        """The step's own questions, and more where it is oversampled."""
        config = self.config
        num_more = num_oversampled(
            config.algorithm.dynamic_sampling, config.trainer.questions_per_step
        )
        more = self.questions.spare(step)[:num_more] if num_more else []
        return [*self.questions.own(step), *more]

    async def _after_step(
        self,
        step: int,
        rollout: Refilled,
        metrics: dict[str, float],
        clock: PhaseClock,
        bar: Bar,
    ) -> None:
        config = self.config
        episodes = [episode for group in rollout.played for episode in group.episodes_G]
        metrics |= episode_metrics(episodes) | vitals(episodes, config.reward.answer)
        alarms, watched = self.guard.see(step, metrics)
        metrics |= watched
        if config.algorithm.dynamic_sampling is not None:
            metrics["groups/played"] = float(len(rollout.played))
            metrics["groups/learnt"] = float(len(rollout.chosen))
            metrics["groups/rounds"] = float(rollout.num_rounds)
        metrics |= self.search.counts.metrics_since(self.searches_logged)
        self.searches_logged = self.search.counts
        metrics |= self.engine.counters.metrics()
        metrics["rollout/tokens_per_s"] = (
            sum(episode.num_sampled_tokens for episode in episodes) / clock.seconds["rollout"]
        )
        try:
            if config.evaluation.every and (step + 1) % config.evaluation.every == 0:
                metrics |= await self.stop.or_stop(self._evaluate())
                clock.lap("evaluate")
        finally:  # the weights have taken the step: it is recorded, also when a stop comes here
            self.records.write_episodes(step, episodes)
            greedy = [group.greedy for group in rollout.played if group.greedy is not None]
            self.records.write_episodes(step, greedy, arm="greedy")
            clock.lap("record")
            self.records.write_metrics(step, metrics | clock.metrics())
        self.guard.act_on(alarms)
        if (step + 1) % config.trainer.checkpoint_every == 0:
            self._checkpoint(step + 1)
        if metrics["search/failures"] and not any(map(self.credit.is_learnable, episodes)):
            LOG.warning("every episode of step %d met a failed search; waiting for search", step)
            await self.stop.or_stop(self.search.wait_until_ready())
        bar.advance(f"reward {metrics['reward/mean']:.2f}  EM {metrics['em/mean']:.2f}")

    async def _evaluate(self) -> dict[str, float]:
        metrics: dict[str, float] = {}
        for arm, episodes in (await self.evaluation.play_subset()).items():
            figures = episode_metrics(episodes) | source_metrics(scores_of(episodes))
            metrics |= {f"eval/{arm}/{name}": value for name, value in figures.items()}
        return metrics

    async def _evaluate_at_end(self) -> None:
        work = self.evaluation.play_all(self.trainer.model, self.tokenizer, self.num_steps_done)
        LOG.info("final evaluation: %s", await self.stop.or_stop(work))

    def _checkpoint(self, num_steps_done: int) -> None:
        self.records.sync()
        state = RunState(
            num_steps_done, self.config.seed, self.records.offsets(), self.credit.baseline
        )
        save_checkpoint(
            self.config.output_dir,
            self.trainer,
            self.tokenizer,
            state,
            self.config.trainer.keep_checkpoints,
        )

    def _resume(self) -> int:
        """The step to start with; records and weights are those of the newest checkpoint."""
        out = self.config.output_dir
        (out / "config.yaml").write_text(to_yaml(self.config), encoding="utf-8")
        checkpoint = latest_checkpoint(out)
        if checkpoint is None:
            self.records.truncate_to({})
            return 0
        start = self._load(checkpoint)
        LOG.info("resuming after step %d from %s", start, checkpoint)
        return start

    def _load(self, checkpoint: Path) -> int:
        """Weights, records and everything remembered as they were; gives the steps done."""
        with self.engine.weights_lock:  # the engine tries the weights out when it starts
            state = load_checkpoint(checkpoint, self.trainer)
        if state.seed != self.config.seed:
            raise UserError(
                f"{checkpoint} was made with seed {state.seed}, the config says "
                f"{self.config.seed}: set seed={state.seed} to go on"
            )
        self.records.truncate_to(state.record_offsets)
        self.credit.baseline = state.baseline
        self.num_steps_done = state.num_steps_done
        self.trainer.rate_factor = self.guard.rate_factor
        self.guard.remember(read_metrics(self.config.output_dir))
        return state.num_steps_done


def _questions(config: RunConfig) -> tuple[list[Question], StepQuestions]:
    """All that may be asked, and what each step asks; raises ``UserError``."""
    trainer, dynamic = config.trainer, config.algorithm.dynamic_sampling or DynamicSamplingConfig()
    questions, order = training_questions(config.data, config.seed)
    num_own = trainer.questions_per_step
    if len(questions) < num_own:
        raise UserError(
            f"{config.data.train} holds {len(questions)} questions, fewer than "
            f"trainer.questions_per_step ({num_own})"
        )
    num_spare = ceil(num_own * dynamic.oversampling) * (dynamic.max_rounds + 1)
    return questions, StepQuestions(order, len(questions), num_own, num_spare, config.seed)


def _check_output(out: Path, resume: bool) -> None:
    metrics = out / METRICS_FILE
    has_rows = metrics.exists() and metrics.stat().st_size > 0
    has_run = latest_checkpoint(out) is not None or has_rows
    if has_run and not resume:
        raise UserError(
            f"{out} already holds a run; go on with --resume, or set another output_dir"
        )
    if resume and not has_run:
        raise UserError(f"{out} holds no run to resume; leave --resume out")
