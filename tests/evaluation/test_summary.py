"""The figures of an evaluation, counted by hand on a few episodes."""

import json

import pytest
from rich.console import Console

from forage.evaluation.summary import (
    EvaluationSummary,
    before_after_table,
    em_gain,
    gold_recall,
    summarise,
)
from forage.types import (
    ActionKind,
    Episode,
    FailureKind,
    Origin,
    Question,
    Reward,
    Segment,
    Status,
    Turn,
)


def played(
    question_id: str,
    em: float,
    gold: tuple[str, ...] = ("g1", "g2"),
    found: tuple[tuple[str, ...], ...] = (),
    failure: FailureKind | None = None,
    status: Status = Status.ANSWERED,
) -> Episode:
    """An episode with one search for each entry of ``found`` and 4 sampled tokens."""
    turns = tuple(
        Turn("<search>", ActionKind.SEARCH, "q", "seen", passage_ids, failure)
        for passage_ids in found
    )
    return Episode(
        Question(question_id, "t", ("a",), "world", gold),
        0,
        (Segment(Origin.PROMPT, (1, 2)), Segment(Origin.SAMPLED, (3,) * 4, (-1.0,) * 4, (0,) * 4)),
        turns,
        status,
        Reward(em, {"em": em, "cover_em": em, "f1": em / 2}),
    )


EPISODES = [
    played("a", 1.0, found=(("g1", "x"), ("g2",))),
    played("b", 0.0, found=(("g1",),), failure=FailureKind.TIMEOUT, status=Status.OUT_OF_TURNS),
    played("c", 1.0, gold=("g9",), found=(("x",),)),
    played("d", 0.0, gold=(), status=Status.ENGINE_FAILED),
]


def test_figures_are_those_counted_by_hand() -> None:
    arm = summarise({"normal": EPISODES}).arms["normal"]
    overall = arm.overall
    assert overall.num_questions == 4
    assert overall.em.mean == 0.5
    assert overall.f1.mean == 0.25
    assert overall.em.low < 0.5 < overall.em.high
    assert overall.mean_searches == 1.0
    assert overall.mean_sampled_tokens == 4.0
    assert overall.answered == 0.5
    assert overall.gold_recall == pytest.approx((1.0 + 0.5 + 0.0) / 3)
    assert overall.failures == {"timeout": 1, "engine_failed": 1}
    assert list(arm.by_hops) == [1, 2]
    assert (arm.by_hops[1].num_questions, arm.by_hops[2].num_questions) == (1, 2)
    assert arm.by_hops[2].em.mean == 0.5


def test_questions_that_name_no_gold_passage_have_no_recall() -> None:
    assert gold_recall(EPISODES[3]) is None
    summary = summarise({"normal": [EPISODES[3]]})
    assert summary.arms["normal"].overall.gold_recall is None
    assert summary.arms["normal"].by_hops == {}


def test_a_summary_comes_back_from_json_equal() -> None:
    summary = summarise({"normal": EPISODES, "closed_book": EPISODES[:1]})
    assert EvaluationSummary.from_json(json.loads(json.dumps(summary.to_json()))) == summary


def test_an_arm_without_episodes_is_refused() -> None:
    with pytest.raises(ValueError, match="arm gold has no episodes"):
        summarise({"gold": []})


def test_the_gain_pairs_questions_by_id_whatever_their_order() -> None:
    before = [played("a", 0.0), played("b", 1.0), played("c", 0.0)]
    after = [played("c", 1.0), played("a", 1.0), played("b", 1.0)]
    assert em_gain(before, after).mean == pytest.approx(2 / 3)
    with pytest.raises(ValueError, match="the same ones before and after"):
        em_gain(before, after[:2])


def test_the_table_sets_before_beside_after_and_fits_a_terminal() -> None:
    before = summarise({"normal": EPISODES[:2], "closed_book": EPISODES[:1]})
    after = summarise({"normal": EPISODES[:1], "gold": EPISODES[:1]})
    console = Console(width=100, record=True, force_terminal=False)
    console.print(before_after_table(before, after))
    text = console.export_text()
    assert "0.50 [0.00, 1.00]" in text
    assert "1.00 [1.00, 1.00]" in text
    assert "1.50 → 2.00" in text
    assert "gold" not in text, "an arm of one evaluation alone has nothing to compare"
    assert "…" not in text
