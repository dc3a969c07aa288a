"""THE loop: play, score, weigh, pack, learn, publish.

One loop for every mode: synchronous training is staleness 0. What a step needs is a function of
its number and the run's seed, so a run that is stopped and resumed takes the same steps.
"""

from __future__ import annotations

import asyncio
import logging
import math
import random
import signal
import time
from collections import Counter
from collections.abc import Awaitable, Sequence
from contextlib import AsyncExitStack
from math import ceil
from pathlib import Path
from statistics import fmean
from typing import TypeVar

from forage.algorithms.packing import pack_mini_batches
from forage.config import RunConfig, to_yaml
from forage.data.training import training_questions
from forage.errors import UserError
from forage.evaluation.along_training import TrainingEvaluation
from forage.evaluation.scores import scores_of
from forage.evaluation.summary import source_metrics
from forage.hardware import choose_matmul_kernel
from forage.progress import Bar, progress_bar
from forage.records import METRICS_FILE, RunRecords, read_metrics
from forage.retrieval.client import SearchClient
from forage.retrieval.counts import SearchCounts
from forage.rewards.scorer import Scorer
from forage.rollout.player import Player
from forage.rollout.refill import GroupSource, NothingToLearn, Refilled, num_oversampled
from forage.rollout.scheduler import GroupScheduler, Scheduler
from forage.rollout.stopping import StopTable
from forage.rollout.torch_engine import TorchEngine
from forage.training.checkpoint import (
    RunState,
    latest_checkpoint,
    load_checkpoint,
    save_checkpoint,
)
from forage.training.credit import Credit
from forage.training.guard import Collapsed, GoBack, Guard
from forage.training.model import load_policy, load_tokenizer
from forage.training.trainer import build_trainer
from forage.training.vitals import vitals
from forage.types import Episode, Question, Status

LOG = logging.getLogger(__name__)

T = TypeVar("T")


class Stopped(Exception):
    """Somebody asked the run to end; what was learnt is in the checkpoint."""


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
        self.questions, self.order = training_questions(config.data, config.seed)
        if len(self.questions) < config.trainer.questions_per_step:
            raise UserError(
                f"{config.data.train} holds {len(self.questions)} questions, fewer than "
                f"trainer.questions_per_step ({config.trainer.questions_per_step})"
            )
        choose_matmul_kernel()
        self.tokenizer = load_tokenizer(config.model)
        self.player = Player(config.environment, config.rollout, self.tokenizer, config.seed)
        self.player.check_prompts(self.questions)
        self.scorer = Scorer(config.reward, config.environment.protocol)
        model = load_policy(config.model, config.seed)
        self.trainer = build_trainer(model, config)
        self.credit = Credit(config.algorithm, config.rollout.train_on_failed_searches)
        self.num_steps_done = 0
        self.evaluation = TrainingEvaluation(config, self.player, self.scorer)
        self.guard = Guard(config)
        self.records = RunRecords(config.output_dir, self.player.codec.identity())
        self.searches_logged = SearchCounts()
        self.stop = asyncio.Event()
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
            loop = asyncio.get_running_loop()
            for signum in (signal.SIGINT, signal.SIGTERM):
                loop.add_signal_handler(signum, self.stop.set)
                stack.callback(loop.remove_signal_handler, signum)
            if config.note:
                LOG.info("%s", config.note)
            await self._or_stop(self.search.wait_until_ready())
            await self._or_stop(self.evaluation.open(self.engine, self.search, stack))
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
        if start == 0 and config.sentinel.action == "roll_back":
            self._checkpoint(0)  # what to go back to from the first steps
        scheduler = self._group_scheduler(start)
        source = self._group_source(scheduler)
        num_mini_batches = config.trainer.num_mini_batches
        max_tokens = config.trainer.max_tokens_per_micro_batch
        try:
            with progress_bar("training", config.trainer.num_steps) as bar:
                bar.progress.update(bar.task, completed=start)
                for step in range(start, config.trainer.num_steps):
                    clock = _Clock()
                    rollout = await self._or_stop(source.groups_of(step))
                    clock.lap("rollout")
                    groups = rollout.chosen
                    views_P, seen = await asyncio.to_thread(
                        self.trainer.look, self.credit.unweighed(groups)
                    )
                    weighed_P, credited = self.credit.weigh(
                        groups, views_P, self.trainer.kl_coefficient
                    )
                    weighed_P, unmasked = await asyncio.to_thread(self.trainer.unmask, weighed_P)
                    batches = pack_mini_batches(
                        weighed_P, num_mini_batches, max_tokens, self.trainer.cost_of
                    )
                    with self.guard.against_divergence(step):
                        learnt = await asyncio.to_thread(
                            self.trainer.learn, batches, self.engine.weights_lock
                        )
                    self.num_steps_done = step + 1
                    clock.lap("train")
                    await self.engine.receive_weights(version=self.trainer.version)
                    clock.lap("publish")
                    metrics = learnt | seen | credited | unmasked
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
            has_greedy=config.algorithm.advantage == "remax",
        )

    def _group_source(self, scheduler: GroupScheduler) -> GroupSource:
        return GroupSource(
            self.config.algorithm.dynamic_sampling,
            scheduler,
            self.config.trainer.questions_per_step,
            self._spare_questions,
            self.credit.is_flat,
            self.credit.is_learnable,
        )

    def _questions_to_play(self, step: int) -> Sequence[Question]:
        """The step's own questions, and more where it is oversampled."""
        config = self.config
        num_more = num_oversampled(
            config.algorithm.dynamic_sampling, config.trainer.questions_per_step
        )
        more = self._spare_questions(step)[:num_more] if num_more else []
        return [*self._questions_of_step(step), *more]

    def _spare_questions(self, step: int) -> list[Question]:
        """Questions beside the step's own, in the run's mixture: a function of the step alone.

        They stand at positions of the order that no run gets to, as many as could be asked for.
        """
        trainer, dynamic = self.config.trainer, self.config.algorithm.dynamic_sampling
        num_wanted = ceil(trainer.questions_per_step * dynamic.oversampling)
        num_wanted *= dynamic.max_rounds + 1
        first = random.Random(f"{self.config.seed}/spare/{step}").randrange(1 << 40, 1 << 41)
        spare: dict[str, Question] = {}
        own = {question.id for question in self._questions_of_step(step)}
        for position in range(first, first + 2 * len(self.questions)):  # a whole epoch, at least
            question = self.order.at(position)
            if question.id not in own:
                spare.setdefault(question.id, question)
            if len(spare) == num_wanted:
                break
        return list(spare.values())

    def _questions_of_step(self, step: int) -> Sequence[Question]:
        """A function of the step and the seed alone, so that a resumed run asks the same."""
        return self.order.of_step(step, self.config.trainer.questions_per_step)

    async def _after_step(
        self,
        step: int,
        rollout: Refilled,
        metrics: dict[str, float],
        clock: _Clock,
        bar: Bar,
    ) -> None:
        config = self.config
        episodes = [episode for group in rollout.played for episode in group.episodes_G]
        metrics |= episode_metrics(episodes) | vitals(episodes, config.reward.answer)
        alarms, watched = self.guard.see(step, metrics)
        metrics |= watched
        if config.algorithm.dynamic_sampling.is_enabled:
            metrics["groups/played"] = float(len(rollout.played))
            metrics["groups/learnt"] = float(len(rollout.chosen))
            metrics["groups/rounds"] = float(rollout.num_rounds)
        metrics |= self.search.counts.metrics_since(self.searches_logged)
        self.searches_logged = self.search.counts
        metrics["transcript/violations"] = self.engine.counters.transcript_violations
        metrics["rollout/tokens_per_s"] = (
            sum(episode.num_sampled_tokens for episode in episodes) / clock.seconds["rollout"]
        )
        try:
            if config.evaluation.every and (step + 1) % config.evaluation.every == 0:
                metrics |= await self._or_stop(self._evaluate())
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
            await self._or_stop(self.search.wait_until_ready())
        bar.advance(f"reward {metrics['reward/mean']:.2f}  EM {metrics['em/mean']:.2f}")

    async def _evaluate(self) -> dict[str, float]:
        metrics: dict[str, float] = {}
        for arm, episodes in (await self.evaluation.play_subset()).items():
            figures = episode_metrics(episodes) | source_metrics(scores_of(episodes))
            metrics |= {f"eval/{arm}/{name}": value for name, value in figures.items()}
        return metrics

    async def _evaluate_at_end(self) -> None:
        work = self.evaluation.play_all(self.trainer.model, self.tokenizer, self.num_steps_done)
        LOG.info("final evaluation: %s", await self._or_stop(work))

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

    async def _or_stop(self, work: Awaitable[T]) -> T:
        """The result of ``work``, or ``Stopped`` as soon as a signal came."""
        task = asyncio.ensure_future(work)
        stopping = asyncio.ensure_future(self.stop.wait())
        try:
            await asyncio.wait({task, stopping}, return_when=asyncio.FIRST_COMPLETED)
            if not task.done():
                raise Stopped
            return task.result()
        finally:
            stopping.cancel()
            if not task.done():
                task.cancel()
                await asyncio.gather(task, return_exceptions=True)


class _Clock:
    """Seconds by phase of one step."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self._last = time.perf_counter()

    def lap(self, phase: str) -> None:
        now = time.perf_counter()
        self.seconds[phase] = now - self._last
        self._last = now

    def metrics(self) -> dict[str, float]:
        return {f"seconds/{phase}": seconds for phase, seconds in self.seconds.items()}


def episode_metrics(episodes: Sequence[Episode]) -> dict[str, float]:
    """Means over episodes, some by number of hops, and counts of failures."""
    rewards = [episode.reward for episode in episodes if episode.reward is not None]
    scored = [reward for reward in rewards if reward.failure is None]
    unscored = Counter(reward.failure for reward in rewards if reward.failure)
    turns = [turn for episode in episodes for turn in episode.turns]
    failures = Counter(turn.search_failure for turn in turns if turn.search_failure)
    metrics = {
        "reward/mean": fmean(reward.value for reward in scored) if scored else math.nan,
        "em/mean": fmean(reward.parts["em"] for reward in rewards),
        "searches/mean": fmean(episode.num_searches for episode in episodes),
        "tokens/sampled_mean": fmean(episode.num_sampled_tokens for episode in episodes),
        "episodes/answered": fmean(episode.status is Status.ANSWERED for episode in episodes),
        "seconds/search_wait": sum(turn.search_s for turn in turns) / len(episodes),
        "search/failures": float(sum(failures.values())),
        "judge/failures": float(sum(unscored.values())),
    }
    for name in sorted({name for reward in rewards for name in reward.parts} - {"em"}):
        metrics[f"reward/{name}"] = fmean(r.parts[name] for r in rewards if name in r.parts)
    metrics |= {f"search/failures_{kind}": float(count) for kind, count in failures.items()}
    metrics |= {f"judge/failures_{kind}": float(count) for kind, count in unscored.items()}
    for num_hops in sorted({e.question.num_hops for e in episodes if e.question.num_hops}):
        those = [e for e in episodes if e.question.num_hops == num_hops]
        ems = [e.reward.parts["em"] for e in those if e.reward is not None]
        metrics[f"em/hops_{num_hops}"] = fmean(ems)
        metrics[f"searches/hops_{num_hops}"] = fmean(e.num_searches for e in those)
    return metrics


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
