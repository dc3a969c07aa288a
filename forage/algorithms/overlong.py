"""A penalty for episodes that write almost to their limit, growing within a buffer before it."""

from __future__ import annotations


def overlong_penalty(
    num_sampled_tokens: int, max_tokens: int, buffer_tokens: int, penalty: float
) -> float:
    """What is taken off the reward: 0 up to the buffer, then linearly up to ``penalty`` at the end.

    Only what the policy wrote is counted: a long observation costs nothing. Source: DAPO's soft
    overlong punishment, https://arxiv.org/abs/2503.14476, equation 13.
    """
    into_buffer = num_sampled_tokens - (max_tokens - buffer_tokens)
    return penalty * min(max(into_buffer / buffer_tokens, 0.0), 1.0)
