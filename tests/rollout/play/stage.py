"""Episodes that end when the test says so."""

import asyncio

from forage.rollout.play.player import Job
from forage.types import Episode, Question, Reward, Segment, Status
from tests.fakes import segments_of


def question(number: int) -> Question:
    return Question(f"q{number}", f"question {number}", ("yes",), "test")


def episode_of(job: Job, segments: tuple[Segment, ...] = (), version: int = 0) -> Episode:
    return Episode(
        job.question, job.member, segments or segments_of("P 1 S 2", version), (), Status.ANSWERED
    )


async def score(episode: Episode) -> Reward:
    return Reward(float(episode.member), {"em": float(episode.member)})


class Stage:
    """Plays episodes that end when the test says so."""

    def __init__(self) -> None:
        self.started: list[str] = []
        self.ended: list[str] = []
        self.cancelled: list[str] = []
        self._gates: dict[str, asyncio.Event] = {}

    @property
    def playing(self) -> set[str]:
        return set(self.started) - set(self.ended) - set(self.cancelled)

    def finish(self, key: str) -> None:
        self._gates[key].set()

    async def play(self, job: Job) -> Episode:
        self.started.append(job.key)
        gate = self._gates.setdefault(job.key, asyncio.Event())
        try:
            await gate.wait()
        except asyncio.CancelledError:
            self.cancelled.append(job.key)
            raise
        self.ended.append(job.key)
        return episode_of(job)


async def settle() -> None:
    """Runs every task until it waits for something other than an iteration of the loop."""
    for _ in range(50):
        await asyncio.sleep(0)
