"""What DAPO adds around the loss: dynamic sampling, and a penalty for episodes that run too long.

Pure selection and arithmetic; playing more questions is the loop's part. Source:
https://arxiv.org/abs/2503.14476, section 3.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import ceil
from typing import Self

from pydantic import Field, model_validator

from forage.settings import Frozen


class DynamicSamplingConfig(Frozen):
    """Replaces groups whose episodes all earned the same by groups of other questions."""

    max_rounds: int = Field(default=10, ge=0)
    """Rounds of replacement in a step at most."""
    oversampling: float = Field(default=1.0, ge=1)
    """1.5 plays half as many groups again in each round."""


def is_flat(returns_G: Sequence[float]) -> bool:
    """Whether no two episodes of the group differ in what they earned."""
    return not returns_G or min(returns_G) == max(returns_G)


def choose(is_flat_P: Sequence[bool], num_wanted: int) -> list[int]:
    """The first ``num_wanted`` groups that are not flat, in their order."""
    return [index for index, flat in enumerate(is_flat_P) if not flat][:num_wanted]


def oversampled(count: int, factor: float) -> int:
    """``count`` times ``factor``, rounded up, but for the rounding of the product itself."""
    return ceil(count * factor - 1e-9)


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
