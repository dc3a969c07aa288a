"""The groups of training steps: started ahead, played without a barrier, replaced where flat.

Each episode goes on as soon as what it waits for is there; no step waits for another. How old a
policy may have been when it sampled is bounded by how far ahead of the trainer groups are started:
with ``max_staleness`` s, the groups of step k start once version k - s is out. Groups that teach
nothing give way to more questions, in a bounded number of rounds.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Protocol

from forage.algorithms.dapo import DynamicSamplingConfig, choose, oversampled
from forage.config.run_config import RunConfig
from forage.data.order import StepQuestions
from forage.environment.turnstile import Turnstile
from forage.errors import UserError
from forage.rollout.play.player import Job
from forage.types import Episode, Group, Question, Score, Status

LOG = logging.getLogger(__name__)

Play = Callable[[Job], Awaitable[Episode]]
"""Plays one episode to its end; failures of engine and search are in the episode's status."""

PlayMore = Callable[[Sequence[Question], int], Awaitable[list[Group]]]
"""Plays groups of these questions; the number is the round's, from 1."""


class Worth(Protocol):
    """What is asked of the credit: whether anything can be learnt from what was played."""

    def is_flat(self, group: Group) -> bool:
        """Whether its episodes earned the same, so that it teaches nothing."""
        ...

    def is_learnable(self, episode: Episode) -> bool:
        """Whether an episode may enter the loss."""
        ...


class NothingToLearn(UserError):
    """All groups of a step were flat, also those played in their place."""


class EngineGone(UserError):
    """All episodes of a step ended because no turn could be sampled: the next ones would, too."""


def has_failed(episode: Episode) -> bool:
    """Whether the engine failed it; played again, it may end otherwise."""
    return episode.status is Status.ENGINE_FAILED


@dataclass(frozen=True, slots=True)
class StepGroups:
    """The groups to learn from, in the order played, and all that were played for them."""

    chosen: tuple[Group, ...]
    played: tuple[Group, ...]
    num_rounds: int = 0

    @property
    def episodes(self) -> list[Episode]:
        """Every episode played but the greedy ones."""
        return [episode for group in self.played for episode in group.episodes_G]


class GroupSource(Protocol):
    """Where the loop has its groups from: they are played, or were recorded."""

    async def next_groups(self, step: int) -> StepGroups:
        """The groups of ``step``; raises ``UserError`` where there is nothing to learn from."""
        ...

    def finished_ahead(self) -> dict[str, Episode]:
        """Episodes that are over and not learnt yet, by the key of their job."""
        ...

    def start_over(self, kept: Mapping[str, Episode]) -> None:
        """Another step comes next; ``kept`` are what ``finished_ahead`` gave before it."""
        ...

    async def close(self) -> None:
        """Ends what is in flight."""
        ...


class GroupsInFlight:
    """Plays the groups of one training step after another."""

    def __init__(
        self,
        config: RunConfig,
        questions: StepQuestions,
        play: Play,
        score: Score,
        worth: Worth,
        kept: Mapping[str, Episode] = MappingProxyType({}),
    ) -> None:
        """``kept``: as in ``start_over``."""
        self._dynamic = config.algorithm.dynamic_sampling
        self._trainer = config.trainer
        self._max_staleness = config.rollout.max_staleness
        self._has_greedy = config.algorithm.advantage.plays_greedy
        self._questions = questions
        self._play = play
        self._score = score
        self._worth = worth
        self._room = asyncio.Semaphore(config.rollout.max_concurrent_episodes)
        self._turnstile = Turnstile(1)
        """One begins after the other: thousands at once would hold the loop for seconds."""
        self._tasks: set[asyncio.Task[Episode]] = set()
        self.start_over(kept)

    def start_over(self, kept: Mapping[str, Episode]) -> None:
        """See ``GroupSource``; nothing may be in flight. ``kept`` episodes are not played again."""
        self._kept = dict(kept)
        self._started: dict[int, list[_Started]] = {}

    async def next_groups(self, step: int) -> StepGroups:
        """The groups of ``step``, in the order of its questions; flat ones replaced if asked for.

        Called when the weights of the step before are published. Raises ``NothingToLearn``
        where no group varies, and ``EngineGone`` where the engine sampled no episode to its end.
        """
        for ahead in range(step, min(step + self._max_staleness + 1, self._trainer.num_steps)):
            if ahead not in self._started:
                self._started[ahead] = self._start(self._questions_to_play(ahead), f"{ahead}")
        groups = await self._finish(self._started[step])
        if all(has_failed(episode) for group in groups for episode in group.episodes_G):
            raise EngineGone(
                f"the engine failed every episode of step {step}, which is not recorded. Look into "
                "the servers' logs and the warnings above, or raise rollout.episode_deadline_s "
                "where episodes take longer, and go on with --resume"
            )
        found = StepGroups(tuple(groups), tuple(groups))
        if self._dynamic is not None:
            found = await self._replace_flat(step, groups, self._dynamic)
        del self._started[step]  # not before: a stop in the rounds above keeps what is over
        return self._worth_learning(step, found)

    def finished_ahead(self) -> dict[str, Episode]:
        """See ``GroupSource``; a checkpoint keeps them."""
        begun = [each for started in self._started.values() for each in started]
        over = [task for each in begun for task in each.tasks if task.done()]
        return {
            task.get_name(): task.result()
            for task in over
            if not task.cancelled() and task.exception() is None and not has_failed(task.result())
        }

    async def close(self) -> None:
        """Cancel the episodes in flight and wait until they have gone."""
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def _questions_to_play(self, step: int) -> list[Question]:
        """The step's own questions, and more where it is oversampled."""
        num_more = num_oversampled(self._dynamic, self._trainer.questions_per_step)
        more = self._questions.spare(step)[:num_more] if num_more else []
        return [*self._questions.own(step), *more]

    def _start(self, questions: Sequence[Question], key: str) -> list[_Started]:
        """Start the groups of these questions; ``key`` tells their episodes from all others."""
        size = self._trainer.group_size
        started: list[_Started] = []
        num_times: Counter[str] = Counter()
        for question in questions:
            # Where two epochs meet in a step a question may come twice; keys must not.
            first = num_times[question.id] * size
            num_times[question.id] += 1
            jobs = [Job(question, i, f"{key}/{question.id}/{first + i}") for i in range(size)]
            if self._has_greedy:
                greedy_key = f"{key}/{question.id}/greedy{first}"
                jobs.append(Job(question, 0, greedy_key, is_greedy=True))
            tasks = [asyncio.create_task(self._run(job), name=job.key) for job in jobs]
            for task in tasks:
                self._tasks.add(task)
                task.add_done_callback(self._tasks.discard)
            started.append(_Started(question, tasks[:size], *tasks[size:]))
        return started

    async def _run(self, job: Job) -> Episode:
        """Play and score one episode; episodes get room in the order they were started."""
        if (kept := self._kept.pop(job.key, None)) is not None:
            return kept
        async with self._room:
            await self._turnstile.through()
            episode = await self._play(job)
        return replace(episode, reward=await self._score(episode))  # a judge's wait holds no room

    async def _finish(self, started: Sequence[_Started]) -> list[Group]:
        """Wait for these groups; the first exception (a bug) cancels all and is raised."""
        try:
            for finished in asyncio.as_completed([t for each in started for t in each.tasks]):
                await finished
        except BaseException:
            await self.close()
            raise
        return [each.group() for each in started]

    async def _replace_flat(
        self, step: int, groups: Sequence[Group], dynamic: DynamicSamplingConfig
    ) -> StepGroups:
        """More groups for those of ``step`` that are flat."""

        def play_more(questions: Sequence[Question], number: int) -> Awaitable[list[Group]]:
            started = self._start(questions, f"{step}+{number}")
            self._started[step] += started
            return self._finish(started)

        num_wanted = self._trainer.questions_per_step
        return await refill(
            groups,
            num_wanted,
            self._worth.is_flat,
            self._questions.spare(step)[num_oversampled(dynamic, num_wanted) :],
            play_more,
            dynamic.max_rounds,
            dynamic.oversampling,
        )

    def _worth_learning(self, step: int, found: StepGroups) -> StepGroups:
        """What was found; raises ``NothingToLearn`` where no group varies.

        Where all were spoilt from outside they are kept: searches that fail say nothing about the
        questions.
        """
        if not found.chosen and not any(map(self._worth.is_learnable, found.episodes)):
            return replace(found, chosen=found.played)
        if not found.chosen:
            raise NothingToLearn(
                f"in each of the {len(found.played)} groups of step {step} (after "
                f"{found.num_rounds} rounds of algorithm.dynamic_sampling) all episodes earned the "
                "same: the questions are all too hard or all too easy for the policy, or the "
                "reward tells nothing apart. Change data.train, reward or trainer.group_size, and "
                "go on with --resume"
            )
        if len(found.chosen) < self._trainer.questions_per_step:
            message = "step %d learns from %d groups: no more of %d varied"
            LOG.warning(message, step, len(found.chosen), len(found.played))
        return found


@dataclass(frozen=True, slots=True)
class _Started:
    """A group in flight: its episodes, and the greedy one where there is one."""

    question: Question
    tasks_G: list[asyncio.Task[Episode]]
    greedy: asyncio.Task[Episode] | None = None

    @property
    def tasks(self) -> list[asyncio.Task[Episode]]:
        return [*self.tasks_G, *([self.greedy] if self.greedy else [])]

    def group(self) -> Group:
        episodes_G = tuple(task.result() for task in self.tasks_G)
        return Group(self.question, episodes_G, self.greedy.result() if self.greedy else None)


def num_oversampled(config: DynamicSamplingConfig | None, num_wanted: int) -> int:
    """How many groups beyond those wanted are played from the start."""
    return 0 if config is None else oversampled(num_wanted, config.oversampling) - num_wanted


async def refill(
    groups: Sequence[Group],
    num_wanted: int,
    is_flat: Callable[[Group], bool],
    spare_questions: Sequence[Question],
    play_more: PlayMore,
    max_rounds: int,
    oversampling: float,
) -> StepGroups:
    """The first ``num_wanted`` groups that are not flat, of ``groups`` and of those played more.

    Each round plays ``oversampling`` times as many groups as are missing, from
    ``spare_questions`` in order. Fewer are chosen where the rounds or the questions run out.
    """
    played = list(groups)
    flat = [is_flat(group) for group in played]
    num_rounds = num_used = 0
    while num_rounds < max_rounds:
        num_missing = max(num_wanted - flat.count(False), 0)
        questions = spare_questions[num_used : num_used + oversampled(num_missing, oversampling)]
        if not questions:
            break
        num_rounds += 1
        num_used += len(questions)
        more = await play_more(questions, num_rounds)
        played += more
        flat += [is_flat(group) for group in more]
    chosen = tuple(played[index] for index in choose(flat, num_wanted))
    return StepGroups(chosen, tuple(played), num_rounds)
