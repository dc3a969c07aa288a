"""Many episodes at once, without a barrier: each goes on as soon as what it waits for is there.

The scheduler starts episodes in order while there is room, keeps the groups of a step together
and hands them over when all their episodes are done. How old a policy may have been when it
sampled is bounded by how far ahead of the trainer groups are started: with ``max_staleness`` s,
the groups of step k start once version k - s is out.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable, Iterable, Sequence
from dataclasses import dataclass, replace

from forage.types import Episode, Group, Question, Score


@dataclass(frozen=True, slots=True)
class Job:
    """One episode to play: ``key`` names it, and seeds its noise together with the run's seed."""

    question: Question
    member: int
    key: str
    is_greedy: bool = False


Play = Callable[[Job], Awaitable[Episode]]
"""Plays one episode to its end; failures of engine and search are in the episode's status."""

QuestionsOfStep = Callable[[int], Sequence[Question]]
"""The questions of a step: a function of the step alone, so that a resumed run asks the same."""


class Scheduler:
    """Plays jobs concurrently, at most ``max_concurrent_episodes`` at a time."""

    def __init__(self, play: Play, score: Score, max_concurrent_episodes: int) -> None:
        self._play = play
        self._score = score
        self._room = asyncio.Semaphore(max_concurrent_episodes)
        self._tasks: set[asyncio.Task[Episode]] = set()

    def start(self, job: Job) -> asyncio.Task[Episode]:
        """Queue one job; tasks get room in the order they were started."""
        task = asyncio.create_task(self._run(job), name=job.key)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    async def play_all(
        self, jobs: Iterable[Job], on_done: Callable[[Episode], None] = lambda _: None
    ) -> list[Episode]:
        """Play every job; episodes in the order of the jobs, ``on_done`` in order of completion.

        The first exception (a bug) cancels the rest and is raised.
        """
        tasks = [self.start(job) for job in jobs]
        try:
            for finished in asyncio.as_completed(tasks):
                on_done(await finished)
        except BaseException:
            await self.close()
            raise
        return [task.result() for task in tasks]

    async def close(self) -> None:
        """Cancel what is in flight and wait until it has gone."""
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _run(self, job: Job) -> Episode:
        async with self._room:
            episode = await self._play(job)
        return replace(episode, reward=await self._score(episode))  # a judge's wait holds no room


@dataclass(frozen=True, slots=True)
class _Started:
    """A group in flight: its episodes, and the greedy one where there is one."""

    question: Question
    tasks_G: list[asyncio.Task[Episode]]
    greedy: asyncio.Task[Episode] | None

    @property
    def tasks(self) -> list[asyncio.Task[Episode]]:
        return [*self.tasks_G, *([self.greedy] if self.greedy else [])]

    def group(self) -> Group:
        episodes_G = tuple(task.result() for task in self.tasks_G)
        return Group(self.question, episodes_G, self.greedy.result() if self.greedy else None)


class GroupScheduler:
    """The groups of one training step after another, started ahead as staleness allows."""

    def __init__(
        self,
        scheduler: Scheduler,
        questions_of_step: QuestionsOfStep,
        group_size: int,
        first_step: int,
        num_steps: int,
        max_staleness: int,
        has_greedy: bool = False,
    ) -> None:
        """``has_greedy`` plays one more episode a question, without noise, beside each group."""
        self._scheduler = scheduler
        self._questions_of_step = questions_of_step
        self._group_size = group_size
        self._step = first_step
        self._num_steps = num_steps
        self._max_staleness = max_staleness
        self._has_greedy = has_greedy
        self._started: dict[int, list[_Started]] = {}

    async def next_groups(self, on_done: Callable[[Episode], None] = lambda _: None) -> list[Group]:
        """The groups of the next step, in the order of its questions.

        To be called when the weights of the step before are published. ``on_done`` sees each
        episode of the step as it ends.
        """
        for step in range(self._step, min(self._step + self._max_staleness + 1, self._num_steps)):
            if step not in self._started:
                self._started[step] = self._start(self._questions_of_step(step), f"{step}")
        started = self._started.pop(self._step)
        self._step += 1
        return await self._finish(started, on_done)

    async def more_groups(self, questions: Sequence[Question], key: str) -> list[Group]:
        """Groups beyond those of a step; ``key`` tells their episodes from all others."""
        return await self._finish(self._start(questions, key), lambda _: None)

    async def close(self) -> None:
        """Cancel the groups in flight."""
        await self._scheduler.close()

    async def _finish(
        self, started: Sequence[_Started], on_done: Callable[[Episode], None]
    ) -> list[Group]:
        try:
            for finished in asyncio.as_completed([t for each in started for t in each.tasks]):
                on_done(await finished)
        except BaseException:
            await self._scheduler.close()
            raise
        return [each.group() for each in started]

    def _start(self, questions: Sequence[Question], key: str) -> list[_Started]:
        started: list[_Started] = []
        num_times: Counter[str] = Counter()
        for question in questions:
            # Where two epochs meet in a step a question may come twice; keys must not.
            first = num_times[question.id] * self._group_size
            greedy = Job(question, 0, f"{key}/{question.id}/greedy{first}", is_greedy=True)
            num_times[question.id] += 1
            jobs_G = [
                Job(question, member, f"{key}/{question.id}/{first + member}")
                for member in range(self._group_size)
            ]
            started.append(
                _Started(
                    question,
                    [self._scheduler.start(job) for job in jobs_G],
                    self._scheduler.start(greedy) if self._has_greedy else None,
                )
            )
        return started
