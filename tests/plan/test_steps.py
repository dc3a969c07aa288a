"""The amount of work in a recipe, compared with the figures published by its authors."""

from pathlib import Path
from typing import Any

import pytest

from forage.config.run_config import build_config, load_config
from forage.plan.plan import Work, count_work, num_micro_batches

CONFIGS = Path(__file__).parents[2] / "configs"
NUM_QUESTIONS = 169_615


def work_of(recipe: str) -> Work:
    return count_work(load_config(CONFIGS / f"{recipe}.yaml"), NUM_QUESTIONS)


def small(**sections: Any) -> Work:
    trainer = {"questions_per_step": 6, "group_size": 3, **sections.pop("trainer", {})}
    return count_work(build_config({"model": {"path": "x"}, "trainer": trainer, **sections}), None)


def test_a_grpo_step_of_search_r1_is_the_2560_episodes_that_are_published() -> None:
    work = work_of("search-r1-grpo-v0.2")
    assert work.episodes_per_step == 2560
    assert work.tokens_per_step == 2560 * 4096
    assert work.searches_per_step == 2560 * 4
    assert (work.updates_per_step, work.num_updates) == (10, 10_050)


def test_an_epoch_of_rlinf_is_the_331_steps_that_are_published() -> None:
    work = work_of("rlinf-3b")
    assert (work.steps_per_epoch, work.num_steps, work.num_updates) == (331, 331, 662)
    assert work.episodes_per_step == 512 * 4
    assert work.searches_per_step == 512 * 4, "of two turns one can be observed"


def test_slime_plays_32_questions_eight_times() -> None:
    work = work_of("slime-lite-3b")
    assert (work.questions_per_step, work.group_size, work.episodes_per_step) == (32, 8, 256)


def test_remax_plays_one_greedy_episode_more_a_question() -> None:
    assert small().episodes_per_step == 18
    assert small(algorithm={"advantage": "remax"}).episodes_per_step == 24


def test_oversampling_plays_more_groups() -> None:
    dynamic = {"oversampling": 1.5}
    assert small(algorithm={"dynamic_sampling": dynamic}).episodes_per_step == 27


def test_a_tool_call_may_ask_several_queries() -> None:
    tools = small(environment={"protocol": "tools", "max_turns": 2})
    tags = small(environment={"max_turns": 2})
    assert tools.searches_per_step == 4 * tags.searches_per_step == 4 * 18 * 2


@pytest.mark.parametrize(("num_mini_batches", "expected"), [(1, 5), (2, 3)])
def test_micro_batches_of_an_optimizer_step_are_rounded_up(
    num_mini_batches: int, expected: int
) -> None:
    """18 episodes of up to 4,096 tokens, four of which fit a micro-batch of 16,384."""
    trainer = {"questions_per_step": 6, "group_size": 3, "num_mini_batches": num_mini_batches}
    config = build_config({"model": {"path": "x"}, "trainer": trainer})
    assert num_micro_batches(config, count_work(config, None)) == expected
