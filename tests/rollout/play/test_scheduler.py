"""No barrier, a bound on staleness, a stable order, and an end that leaves nothing behind."""

import asyncio

import pytest
from hypothesis import given
from hypothesis import strategies as st

from forage.rollout.play.scheduler import GroupScheduler, Job, Scheduler
from forage.types import Episode, Group, Question, Reward, Segment, Status
from tests.fakes import segments_of

STEP_SIZE, GROUP_SIZE = 3, 2


def question(number: int) -> Question:
    return Question(f"q{number}", f"question {number}", ("yes",), "test")


def episode_of(job: Job, segments: tuple[Segment, ...] = (), version: int = 0) -> Episode:
    return Episode(
        job.question, job.member, segments or segments_of("P 1 S 2", version), (), Status.ANSWERED
    )


async def score(episode: Episode) -> Reward:
    return Reward(float(episode.member), {"em": float(episode.member)})


def jobs(count: int) -> list[Job]:
    return [Job(question(index), 0, f"job-{index}") for index in range(count)]


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
    """Let every task run until it waits for something else than a turn of the loop."""
    for _ in range(50):
        await asyncio.sleep(0)


# --- jobs -----------------------------------------------------------------------------------------


async def test_an_episode_that_waits_blocks_no_other():
    stage = Stage()
    scheduler = Scheduler(stage.play, score, max_concurrent_episodes=2)
    playing = asyncio.create_task(scheduler.play_all(jobs(5)))
    await settle()
    for key in ("job-1", "job-2", "job-3", "job-4"):
        stage.finish(key)  # job-0 waits for its search all the while
        await settle()
    assert stage.ended == ["job-1", "job-2", "job-3", "job-4"]
    stage.finish("job-0")
    assert [episode.question.id for episode in await playing] == ["q0", "q1", "q2", "q3", "q4"]


async def test_never_more_episodes_than_allowed_run_and_they_start_in_order():
    stage = Stage()
    scheduler = Scheduler(stage.play, score, max_concurrent_episodes=3)
    playing = asyncio.create_task(scheduler.play_all(jobs(8)))
    await settle()
    assert stage.playing == {"job-0", "job-1", "job-2"}
    for key in ("job-2", "job-0", "job-1", "job-4", "job-3", "job-5", "job-7", "job-6"):
        assert len(stage.playing) <= 3
        stage.finish(key)
        await settle()
    await playing
    assert stage.started == [f"job-{index}" for index in range(8)]


@given(order=st.permutations(range(6)), cap=st.integers(6, 9))
def test_episodes_come_back_in_the_order_of_the_jobs_and_are_seen_as_they_end(
    order: list[int], cap: int
):
    async def play_in_order() -> None:
        stage, seen = Stage(), []
        scheduler = Scheduler(stage.play, score, cap)
        playing = asyncio.create_task(
            scheduler.play_all(jobs(6), lambda episode: seen.append(episode.question.id))
        )
        await settle()
        for index in order:
            stage.finish(f"job-{index}")
            await settle()
        assert [episode.question.id for episode in await playing] == [f"q{i}" for i in range(6)]
        assert seen == [f"q{index}" for index in order]

    asyncio.run(play_in_order())


async def test_every_episode_is_scored():
    stage = Stage()

    async def quarter(episode: Episode) -> Reward:
        return Reward(0.25, {"em": 1.0})

    scheduler = Scheduler(stage.play, quarter, 4)
    playing = asyncio.create_task(scheduler.play_all(jobs(2)))
    await settle()
    stage.finish("job-0")
    stage.finish("job-1")
    assert [episode.reward for episode in await playing] == [Reward(0.25, {"em": 1.0})] * 2


@pytest.mark.parametrize("place", ["play", "score", "on_done"])
async def test_a_bug_in_one_episode_cancels_the_rest_and_is_raised(place: str):
    stage = Stage()

    async def score_it(episode: Episode) -> Reward:
        if place == "score":
            raise ZeroDivisionError("a bug")
        return await score(episode)

    def on_done(episode: Episode) -> None:
        if place == "on_done":
            raise ZeroDivisionError("a bug")

    async def play(job: Job) -> Episode:
        episode = await stage.play(job)
        if place == "play":
            raise ZeroDivisionError("a bug")
        return episode

    scheduler = Scheduler(play, score_it, max_concurrent_episodes=3)
    playing = asyncio.create_task(scheduler.play_all(jobs(5), on_done))
    await settle()
    stage.finish("job-1")
    with pytest.raises(ZeroDivisionError, match="a bug"):
        await playing
    assert set(stage.cancelled) >= {"job-0", "job-2"}
    assert not stage.playing
    assert len(asyncio.all_tasks()) == 1


async def test_closing_cancels_what_runs_and_what_waits_and_leaves_no_task():
    stage = Stage()
    scheduler = Scheduler(stage.play, score, max_concurrent_episodes=2)
    tasks = [scheduler.start(job) for job in jobs(4)]
    await settle()
    await scheduler.close()
    assert sorted(stage.cancelled) == ["job-0", "job-1"]
    assert all(task.cancelled() for task in tasks)
    assert len(asyncio.all_tasks()) == 1
    await scheduler.close()


async def test_cancelling_the_caller_cancels_its_episodes():
    stage = Stage()
    scheduler = Scheduler(stage.play, score, max_concurrent_episodes=2)
    playing = asyncio.create_task(scheduler.play_all(jobs(4)))
    await settle()
    playing.cancel()
    with pytest.raises(asyncio.CancelledError):
        await playing
    assert sorted(stage.cancelled) == ["job-0", "job-1"]
    assert len(asyncio.all_tasks()) == 1


# --- the groups of training steps -----------------------------------------------------------------


def questions_of_step(step: int) -> list[Question]:
    return [question(step * STEP_SIZE + index) for index in range(STEP_SIZE)]


def group_scheduler(
    scheduler: Scheduler, max_staleness: int, num_steps: int, first_step: int = 0
) -> GroupScheduler:
    return GroupScheduler(
        scheduler, questions_of_step, GROUP_SIZE, first_step, num_steps, max_staleness
    )


async def run_steps(max_staleness: int, num_steps: int) -> tuple[list[list[Group]], list[str]]:
    """A training loop without a trainer: the groups of each step, and the log of what happened."""
    log: list[str] = []
    published = 0

    async def play(job: Job) -> Episode:
        log.append(f"start {job.key}")
        version = published
        for _ in range(hash_of(job.key)):  # as long as it takes
            await asyncio.sleep(0)
        return episode_of(job, version=version)

    groups = group_scheduler(Scheduler(play, score, 64), max_staleness, num_steps)
    steps: list[list[Group]] = []
    for step in range(num_steps):
        steps.append(await groups.next_groups())
        log.append(f"train {step}")
        await settle()  # the trainer works, the rollout goes on
        published = step + 1
        log.append(f"publish {published}")
    await groups.close()
    return steps, log


def hash_of(key: str) -> int:
    return sum(key.encode()) % 7


@pytest.mark.parametrize("max_staleness", [0, 1, 2])
async def test_no_episode_is_older_than_the_bound_and_the_bound_is_used(max_staleness: int):
    steps, _ = await run_steps(max_staleness, num_steps=6)
    staleness = [
        {step - episode.oldest_version for group in groups for episode in group.episodes_G}
        for step, groups in enumerate(steps)
    ]
    assert max(max(ages) for ages in staleness) == max_staleness
    assert staleness[-1] == {max_staleness}


@pytest.mark.parametrize("max_staleness", [0, 1, 2])
async def test_groups_start_ahead_of_the_trainer_exactly_as_far_as_allowed(max_staleness: int):
    _, log = await run_steps(max_staleness, num_steps=6)
    for step in range(6):
        first_start = log.index(f"start {step}/q{step * STEP_SIZE}/0")
        needed = max(step - max_staleness, 0)
        if needed:
            assert log.index(f"publish {needed}") < first_start
        if needed < step:
            assert first_start < log.index(f"publish {needed + 1}")


async def test_no_group_of_a_step_beyond_the_last_is_started():
    _, log = await run_steps(max_staleness=2, num_steps=3)
    assert sum(line.startswith("start") for line in log) == 3 * STEP_SIZE * GROUP_SIZE


async def test_groups_come_in_the_order_of_the_questions_and_members_in_theirs():
    steps, _ = await run_steps(max_staleness=1, num_steps=3)
    for step, groups in enumerate(steps):
        assert [group.question for group in groups] == questions_of_step(step)
        for group in groups:
            assert [episode.member for episode in group.episodes_G] == [0, 1]
            assert all(episode.question == group.question for episode in group.episodes_G)
            assert all(episode.reward is not None for episode in group.episodes_G)


async def test_a_resumed_run_asks_for_the_same_jobs():
    keys: list[str] = []

    async def play(job: Job) -> Episode:
        keys.append(job.key)
        return episode_of(job)

    whole = group_scheduler(Scheduler(play, score, 64), max_staleness=0, num_steps=4)
    for _ in range(4):
        await whole.next_groups()
    in_one_go, keys[:] = list(keys), []
    resumed = group_scheduler(Scheduler(play, score, 64), 0, num_steps=4, first_step=2)
    for _ in range(2):
        await resumed.next_groups()
    assert keys == in_one_go[2 * STEP_SIZE * GROUP_SIZE :]


async def test_episodes_of_a_question_that_comes_twice_in_a_step_have_keys_of_their_own():
    """Where two epochs meet in a step a question may come twice: both played under the same key,
    took each other's slot, and the first turn of the two was never answered."""
    keys: list[str] = []

    async def play(job: Job) -> Episode:
        keys.append(job.key)
        return episode_of(job)

    groups = GroupScheduler(
        Scheduler(play, score, 64), lambda _: [question(0), question(0)], GROUP_SIZE, 0, 1, 0
    )
    played = await groups.next_groups()
    assert [episode.member for group in played for episode in group.episodes_G] == [0, 1, 0, 1]
    assert len(set(keys)) == 4


async def test_a_bug_in_a_group_started_ahead_is_raised_when_its_step_comes():
    async def play(job: Job) -> Episode:
        if job.key == "1/q4/1":
            raise ZeroDivisionError("a bug")
        return episode_of(job)

    groups = group_scheduler(Scheduler(play, score, 64), max_staleness=1, num_steps=3)
    await groups.next_groups()
    with pytest.raises(ZeroDivisionError):
        await groups.next_groups()
    assert len(asyncio.all_tasks()) == 1


async def test_closing_cancels_the_groups_in_flight():
    stage = Stage()
    groups = group_scheduler(Scheduler(stage.play, score, 4), max_staleness=1, num_steps=3)
    waiting = asyncio.create_task(groups.next_groups())
    await settle()
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    await groups.close()
    assert not stage.playing
    assert len(stage.cancelled) == 4
    assert len(asyncio.all_tasks()) == 1


async def test_a_greedy_episode_is_played_beside_each_group_where_one_is_asked_for():
    keys: list[tuple[str, bool]] = []

    async def play(job: Job) -> Episode:
        keys.append((job.key, job.is_greedy))
        return episode_of(job)

    groups = GroupScheduler(
        Scheduler(play, score, 64),
        lambda _: [question(0), question(0)],
        GROUP_SIZE,
        0,
        1,
        0,
        has_greedy=True,
    )
    played = await groups.next_groups()
    assert [len(group.episodes_G) for group in played] == [GROUP_SIZE, GROUP_SIZE]
    assert all(group.greedy is not None and group.greedy.reward is not None for group in played)
    assert [is_greedy for _, is_greedy in keys] == [False, False, True] * 2
    assert len({key for key, _ in keys}) == 6


async def test_more_groups_are_played_at_once_under_keys_of_their_own():
    keys: list[str] = []

    async def play(job: Job) -> Episode:
        keys.append(job.key)
        return episode_of(job)

    groups = group_scheduler(Scheduler(play, score, 64), max_staleness=0, num_steps=2)
    await groups.next_groups()
    more = await groups.more_groups([question(0), question(9)], "0+1")
    assert [group.question.id for group in more] == ["q0", "q9"]
    assert len(set(keys)) == len(keys) == (STEP_SIZE + 2) * GROUP_SIZE
    assert len(await groups.next_groups()) == STEP_SIZE
