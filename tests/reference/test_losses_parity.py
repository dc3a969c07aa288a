"""Advantages and losses against second implementations: plain loops in float64.

Written from the papers' formulas and not from the code under test.
"""

import math
from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from forage.algorithms.advantages import grpo_advantages, rloo_advantages
from forage.algorithms.aggregation import sequence_mean, token_mean
from forage.algorithms.losses import clipped_loss, reinforce_loss

rewards = st.lists(st.floats(-3, 3).map(lambda r: round(r, 3)), min_size=2, max_size=16)


def slow_grpo(rewards_G: list[float], normalise_by_std: bool) -> list[float]:
    """https://arxiv.org/abs/2402.03300: (r_i - mean(r)) / std(r), std over G - 1."""
    size = len(rewards_G)
    mean = math.fsum(rewards_G) / size
    std = math.sqrt(math.fsum((reward - mean) ** 2 for reward in rewards_G) / (size - 1))
    divisor = std + 1e-6 if normalise_by_std else 1.0
    return [(reward - mean) / divisor for reward in rewards_G]


def slow_rloo(rewards_G: list[float]) -> list[float]:
    """https://arxiv.org/abs/2402.14740, equation 5: r_i - mean over j other than i of r_j."""
    advantages = []
    for i, reward in enumerate(rewards_G):
        others = [other for j, other in enumerate(rewards_G) if j != i]
        advantages.append(reward - math.fsum(others) / len(others))
    return advantages


@given(rewards, st.booleans())
def test_grpo_is_the_papers_formula(rewards_G: list[float], normalise_by_std: bool):
    fast = grpo_advantages(rewards_G, normalise_by_std)
    assert fast == pytest.approx(slow_grpo(rewards_G, normalise_by_std), rel=1e-9, abs=1e-8)


@given(rewards)
def test_rloo_is_the_papers_formula(rewards_G: list[float]):
    assert rloo_advantages(rewards_G) == pytest.approx(slow_rloo(rewards_G), abs=1e-12)


@given(rewards)
def test_rloo_is_the_plain_baseline_scaled_by_g_over_g_minus_one(rewards_G: list[float]):
    scale = len(rewards_G) / (len(rewards_G) - 1)
    plain = grpo_advantages(rewards_G, normalise_by_std=False)
    scaled = [advantage * scale for advantage in plain if advantage is not None]
    assert rloo_advantages(rewards_G) == pytest.approx(scaled, abs=1e-12)


Token = tuple[float, float, float]
"""New log-probability, old one, advantage."""


def numbers(low: float, high: float) -> st.SearchStrategy[float]:
    return st.floats(low, high).map(lambda number: round(number, 3))


tokens = st.tuples(numbers(-6, 0), numbers(-6, 0), numbers(-3, 3))
sequences = st.lists(st.lists(tokens, min_size=1, max_size=6), min_size=1, max_size=5)
bounds = st.tuples(numbers(0.05, 0.5), numbers(0.05, 0.5))


def slow_clipped(token: Token, low: float, high: float) -> float:
    """https://arxiv.org/abs/1707.06347, equation 7, negated."""
    new, old, advantage = token
    ratio = math.exp(new - old)
    clipped = min(max(ratio, 1.0 - low), 1.0 + high)
    return -min(ratio * advantage, clipped * advantage)


def columns(tokens_S: list[list[Token]]) -> tuple[Tensor, Tensor, Tensor]:
    flat_M3 = torch.tensor([t for tokens in tokens_S for t in tokens], dtype=torch.float64)
    new_M, old_M, advantages_M = flat_M3.unbind(dim=1)
    return new_M, old_M, advantages_M


def numbering(lengths: list[int]) -> Tensor:
    return torch.tensor([i for i, length in enumerate(lengths) for _ in range(length)])


@given(sequences, bounds)
def test_the_clipped_loss_and_both_means_are_the_loops(tokens_S, bounds):
    low, high = bounds
    slow_S = [[slow_clipped(token, low, high) for token in seq] for seq in tokens_S]
    num_tokens = sum(len(sequence) for sequence in tokens_S)
    new_M, old_M, advantages_M = columns(tokens_S)
    fast_M, metrics = clipped_loss(new_M, old_M, advantages_M, low, high)
    assert fast_M.tolist() == pytest.approx([x for s in slow_S for x in s], rel=1e-12, abs=1e-12)
    by_token = sum(sum(losses) for losses in slow_S) / num_tokens
    assert token_mean(fast_M, num_tokens).item() == pytest.approx(by_token, rel=1e-9, abs=1e-9)
    by_sequence = sum(sum(losses) / len(losses) for losses in slow_S) / len(slow_S)
    sequence_of_M = numbering([len(sequence) for sequence in tokens_S])
    fast = sequence_mean(fast_M, sequence_of_M, len(slow_S), len(slow_S)).item()
    assert fast == pytest.approx(by_sequence, rel=1e-9, abs=1e-9)
    clipped = [
        (a > 0 and math.exp(new - old) > 1 + high) or (a < 0 and math.exp(new - old) < 1 - low)
        for sequence in tokens_S
        for new, old, a in sequence
    ]
    assert metrics["loss/clip_fraction"].tolist() == [float(is_clipped) for is_clipped in clipped]


@given(st.lists(tokens, min_size=1, max_size=8))
@settings(max_examples=50)
def test_the_gradients_are_the_finite_differences(tokens_M):
    """REINFORCE's ratio is held still: its loss is not the integral of its gradient."""
    step, low, high = 1e-6, 0.2, 0.28
    edges = (math.log(1 - low), math.log(1 + high))
    for new, old, advantage in tokens_M:
        if min(abs(new - old - edge) for edge in edges) < 1e-4:
            continue  # the surrogate has a corner there
        logprob = torch.tensor([new], dtype=torch.float64, requires_grad=True)
        others = (torch.tensor([old]).double(), torch.tensor([advantage]).double())
        loss_M, _ = clipped_loss(logprob, *others, low, high)
        (gradient,) = torch.autograd.grad(loss_M.sum(), logprob)
        old, advantage = others[0].item(), others[1].item()
        above, below = (slow_clipped((new + d, old, advantage), low, high) for d in (step, -step))
        slope = (above - below) / (2 * step)
        assert gradient.item() == pytest.approx(slope, rel=1e-4, abs=1e-4)
        loss_M, _ = reinforce_loss(logprob, *others)
        (gradient,) = torch.autograd.grad(loss_M.sum(), logprob)
        assert gradient.item() == pytest.approx(-math.exp(new - old) * advantage, rel=1e-9)


@given(st.lists(tokens, min_size=1, max_size=8))
def test_the_mismatch_metrics_are_the_loops(tokens_M):
    """k3 of http://joschu.net/blog/kl-approx.html with samples from the sampler."""
    new_M, old_M, _ = columns([tokens_M])
    metrics = mismatch_metrics(new_M, old_M)
    ratios = [math.exp(new - old) for new, old, _ in tokens_M]
    k3 = [ratio - 1 - math.log(ratio) for ratio in ratios]
    assert metrics["policy/kl"].tolist() == pytest.approx(k3, rel=1e-6, abs=1e-9)
    differences = [abs(new - old) for new, old, _ in tokens_M]
    assert metrics["policy/logprob_diff_max"].tolist() == pytest.approx(differences)


@given(sequences, st.data())
def test_a_batch_cut_into_micro_batches_has_the_loss_of_the_loop_over_all(tokens_S, data):
    """Promise 6, with the numbers of the whole loss and not only of its mean."""
    num_tokens = sum(len(sequence) for sequence in tokens_S)
    cuts = data.draw(st.sets(st.integers(1, max(1, len(tokens_S) - 1))))
    edges = sorted({0, len(tokens_S), *(cut for cut in cuts if cut < len(tokens_S))})
    token_total = sequence_total = 0.0
    for start, end in pairwise(edges):
        here = tokens_S[start:end]
        loss_M, _ = clipped_loss(*columns(here), 0.2, 0.2)
        sequence_of_M = numbering([len(sequence) for sequence in here])
        token_total += token_mean(loss_M, num_tokens).item()
        sequence_total += sequence_mean(loss_M, sequence_of_M, len(here), len(tokens_S)).item()
    slow_S = [[slow_clipped(token, 0.2, 0.2) for token in seq] for seq in tokens_S]
    expected_token = sum(sum(losses) for losses in slow_S) / num_tokens
    expected_sequence = sum(sum(losses) / len(losses) for losses in slow_S) / len(slow_S)
    assert token_total == pytest.approx(expected_token, rel=1e-9, abs=1e-9)
    assert sequence_total == pytest.approx(expected_sequence, rel=1e-9, abs=1e-9)
