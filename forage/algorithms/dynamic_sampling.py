"""Which groups are worth learning from: a group that earned the same everywhere teaches nothing.

Pure selection; playing more questions is the loop's part. Source: DAPO's dynamic sampling,
https://arxiv.org/abs/2503.14476, section 3.2.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import ceil

from pydantic import Field

from forage.settings import Frozen


class DynamicSamplingConfig(Frozen):
    """Replaces groups whose episodes all earned the same by groups of other questions."""

    max_rounds: int = Field(default=10, ge=0)
    """Rounds of replacement in a step at most."""
    oversampling: float = Field(default=1.0, ge=1)
    """1.5 plays half as many groups again in each round."""


def is_flat(returns_G: Sequence[float | None]) -> bool:
    """Whether no two kept episodes of the group differ in what they earned."""
    kept = [value for value in returns_G if value is not None]
    return not kept or min(kept) == max(kept)


def choose(is_flat_P: Sequence[bool], num_wanted: int) -> list[int]:
    """The first ``num_wanted`` groups that are not flat, in their order."""
    return [index for index, flat in enumerate(is_flat_P) if not flat][:num_wanted]


def oversampled(count: int, factor: float) -> int:
    """``count`` times ``factor``, rounded up, but for the rounding of the product itself."""
    return ceil(count * factor - 1e-9)
