import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from forage.algorithms.losses import (
    clipped_loss,
    mismatch_metrics,
    reinforce_loss,
    sequence_mean,
    token_mean,
)


def column(*numbers: float) -> Tensor:
    return torch.tensor(numbers, dtype=torch.float64)


def at_ratio(ratio: float, advantage: float, clip_low: float = 0.2, clip_high: float = 0.2):
    """The loss of one token, its clip metric, and the gradient by its log-probability."""
    sampler = column(-1.0)
    logprob = (sampler + column(ratio).log()).requires_grad_()
    loss, metrics = clipped_loss(logprob, sampler, column(advantage), clip_low, clip_high)
    loss.sum().backward()
    assert logprob.grad is not None
    return loss.item(), metrics["loss/clip_fraction"].item(), logprob.grad.item()


def test_at_ratio_one_the_gradient_is_minus_the_advantage():
    for advantage in (1.5, -0.5, 0.0):
        loss, clipped, gradient = at_ratio(1.0, advantage)
        assert (loss, clipped) == (-advantage, 0.0)
        assert gradient == pytest.approx(-advantage)


@pytest.mark.parametrize(
    ("ratio", "advantage", "expected", "is_clipped"),
    [
        (1.1, 1.0, -1.1, False),
        (1.3, 1.0, -1.2, True),  # enough was gained: no reason to go on
        (0.5, 1.0, -0.5, False),  # a good token became rare: bring it back
        (0.9, -1.0, 0.9, False),
        (0.5, -1.0, 0.8, True),
        (1.3, -1.0, 1.3, False),  # a bad token became likely: push it down
    ],
)
def test_the_clipped_surrogate_at_worked_points(ratio, advantage, expected, is_clipped):
    loss, clipped, gradient = at_ratio(ratio, advantage)
    assert loss == pytest.approx(expected)
    assert clipped == float(is_clipped)
    assert gradient == pytest.approx(0.0 if is_clipped else -advantage * ratio)


def test_each_bound_of_the_clip_does_something():
    assert at_ratio(1.25, 1.0, clip_high=0.28)[0] == pytest.approx(-1.25)
    assert at_ratio(1.25, 1.0, clip_high=0.2)[0] == pytest.approx(-1.2)
    assert at_ratio(0.75, -1.0, clip_low=0.3)[0] == pytest.approx(0.75)
    assert at_ratio(0.75, -1.0, clip_low=0.2)[0] == pytest.approx(0.8)


def test_reinforce_weighs_by_a_ratio_that_takes_no_gradient():
    sampler = column(-1.0, -2.0)
    logprobs = column(-1.0, -1.5).requires_grad_()
    loss_M, metrics = reinforce_loss(logprobs, sampler, column(2.0, -1.0))
    loss_M.sum().backward()
    assert logprobs.grad is not None
    ratio = torch.exp(column(0.5)).item()
    torch.testing.assert_close(logprobs.grad, column(-2.0, ratio))
    assert metrics == {}


def test_at_staleness_zero_both_losses_have_the_same_gradient():
    sampler, advantages = column(-1.0, -0.1, -3.0), column(1.0, -2.0, 0.5)
    gradients = []
    for loss in (
        lambda logprobs: clipped_loss(logprobs, sampler, advantages, 0.2, 0.2)[0],
        lambda logprobs: reinforce_loss(logprobs, sampler, advantages)[0],
    ):
        logprobs = sampler.clone().requires_grad_()
        loss(logprobs).sum().backward()
        gradients.append(logprobs.grad)
    torch.testing.assert_close(gradients[0], -advantages)
    torch.testing.assert_close(gradients[1], -advantages)


def test_the_two_means_weigh_a_long_sequence_differently():
    """Sequence 0 has one token, sequence 1 has three."""
    loss_M, sequence_of_M = column(4.0, 1.0, 1.0, 1.0), torch.tensor([0, 1, 1, 1])
    assert token_mean(loss_M, 4).item() == pytest.approx(7 / 4)
    assert sequence_mean(loss_M, sequence_of_M, 2, 2).item() == pytest.approx((4 + 1) / 2)


# Promise 6: how tokens are split into micro-batches changes nothing.

sequences = st.lists(st.lists(st.floats(-5, 5), min_size=1, max_size=6), min_size=1, max_size=8)


@given(sequences, st.data())
@settings(max_examples=100)
def test_the_aggregates_do_not_depend_on_the_micro_batches(losses_S, data):
    num_sequences = len(losses_S)
    num_tokens = sum(len(losses) for losses in losses_S)
    bins = data.draw(st.lists(st.integers(0, 3), min_size=num_sequences, max_size=num_sequences))
    by_token, by_sequence = column(0.0).sum(), column(0.0).sum()
    for bin_ in set(bins):
        here = [losses for losses, b in zip(losses_S, bins, strict=True) if b == bin_]
        here = data.draw(st.permutations(here))
        loss_M = column(*(loss for losses in here for loss in losses))
        sequence_of_M = torch.tensor([i for i, losses in enumerate(here) for _ in losses])
        by_token += token_mean(loss_M, num_tokens)
        by_sequence += sequence_mean(loss_M, sequence_of_M, len(here), num_sequences)
    whole = sum(sum(losses) for losses in losses_S) / num_tokens
    assert by_token.item() == pytest.approx(whole, abs=1e-12)
    means = [sum(losses) / len(losses) for losses in losses_S]
    assert by_sequence.item() == pytest.approx(sum(means) / num_sequences, abs=1e-12)


def test_a_micro_batch_with_nothing_in_it_adds_nothing():
    empty, no_sequence = column(), torch.tensor([], dtype=torch.int64)
    assert token_mean(empty, 5).item() == 0.0
    assert sequence_mean(empty, no_sequence, 0, 5).item() == 0.0


def test_equal_policies_show_no_mismatch():
    metrics = mismatch_metrics(column(-1.0, -2.0), column(-1.0, -2.0))
    assert metrics["policy/logprob_diff_max"].tolist() == [0.0, 0.0]
    assert metrics["policy/kl"].tolist() == [0.0, 0.0]


@given(st.floats(-8, 0), st.floats(-8, 0))
def test_the_mismatch_is_never_negative(trainer: float, sampler: float):
    metrics = mismatch_metrics(column(trainer), column(sampler))
    assert metrics["policy/kl"].item() >= 0.0
    assert metrics["policy/logprob_diff_max"].item() == pytest.approx(abs(trainer - sampler))


def test_a_tiny_mismatch_is_measured_and_not_rounded_away():
    """In float32, exp(x) - 1 - x once gave 0 or 6e-8, of either sign, for x = 1e-4."""
    sampler = torch.tensor([-1e-4], dtype=torch.float32)
    kl = mismatch_metrics(torch.zeros(1), sampler)["policy/kl"]
    assert kl.item() == pytest.approx(0.5e-8, rel=0.01)


def test_the_mismatch_estimates_the_divergence_of_the_sampler_from_the_trainer():
    """The mean over the sampler's distribution is KL(sampler || trainer) exactly."""
    sampler, trainer = column(0.7, 0.2, 0.1), column(0.3, 0.3, 0.4)
    kl = (sampler * (sampler / trainer).log()).sum()
    estimates = mismatch_metrics(trainer.log(), sampler.log())["policy/kl"]
    torch.testing.assert_close((sampler * estimates).sum(), kl)
