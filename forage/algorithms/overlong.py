"""A penalty for episodes that write almost to their limit, growing within a buffer before it."""

from __future__ import annotations

from typing import Self

from pydantic import Field, model_validator

from forage.settings import Frozen


class OverlongConfig(Frozen):
    """The penalty for episodes that write close to a limit of sampled tokens."""

    max_tokens: int = Field(ge=1)
    """Sampled tokens at which the penalty is whole."""
    buffer_tokens: int = Field(default=128, ge=1)
    """Tokens before that over which the penalty grows from 0."""
    penalty: float = Field(default=1.0, gt=0)
    """What is taken off the reward at most."""

    @model_validator(mode="after")
    def _buffer_fits(self) -> Self:
        if self.buffer_tokens > self.max_tokens:
            raise ValueError(
                f"algorithm.overlong.buffer_tokens ({self.buffer_tokens}) is above max_tokens "
                f"({self.max_tokens}): every episode would be too long; lower buffer_tokens"
            )
        return self

    def penalty_for(self, num_sampled_tokens: int) -> float:
        """What an episode loses that wrote so many tokens."""
        limits = (self.max_tokens, self.buffer_tokens, self.penalty)
        return overlong_penalty(num_sampled_tokens, *limits)


def overlong_penalty(
    num_sampled_tokens: int, max_tokens: int, buffer_tokens: int, penalty: float
) -> float:
    """What is taken off the reward: 0 up to the buffer, then linearly up to ``penalty`` at the end.

    Only what the policy wrote is counted: a long observation costs nothing. Source: DAPO's soft
    overlong punishment, https://arxiv.org/abs/2503.14476, equation 13.
    """
    into_buffer = num_sampled_tokens - (max_tokens - buffer_tokens)
    return penalty * min(max(into_buffer / buffer_tokens, 0.0), 1.0)
