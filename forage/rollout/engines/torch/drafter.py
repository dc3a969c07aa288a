"""Guesses of what an episode says next: the continuation of the same few tokens, seen before.

Episodes copy names from what they read, repeat the protocol's tags, and resemble the other episodes
of their group, so a look into a table guesses several tokens at once. A pass checks them all, and
keeps those that it would have sampled: a guess changes how fast tokens come, never which.
The idea is known as n-gram or prompt-lookup speculation; exactness is here simpler than in
Leviathan et al., "Fast inference from transformers via speculative decoding", 2023, because the
noise of a position is known before its token is chosen.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

ORDERS = (16, 8, 4, 2)
"""Lengths of the contexts that are looked up, the longest first."""
MAX_ENTRIES = 65_536
_MEMORY = 0.995
"""What a look-up's outcome still counts after the next one: the last few hundred decide."""


@dataclass(frozen=True, slots=True)
class Guess:
    """A token, and the chance that it and all guesses before it are right."""

    token: int
    chance: float


class Drafter:
    """A table from the last few tokens to the one that followed them most recently.

    The table is in two halves: when the new one is full it becomes the old one, which is forgotten.
    It keeps count of how often a context of each length was right about a sampled token, whether
    it was asked or not: a policy that cannot be guessed is soon not guessed any more, and one that
    has become so is found out.
    """

    def __init__(self, max_entries: int = MAX_ENTRIES) -> None:
        self._max_new = max_entries // 2
        self._new: dict[tuple[int, ...], int] = {}
        self._old: dict[tuple[int, ...], int] = {}
        self._num_right: dict[int, float] = dict.fromkeys(ORDERS, 0.5)
        self._num_asked: dict[int, float] = dict.fromkeys(ORDERS, 1.0)

    def learn(self, token_ids: Sequence[int], start: int, are_sampled: bool) -> None:
        """Take the tokens from ``start`` on, each after those before it; forget the oldest."""
        first = max(0, start - ORDERS[0])
        recent = tuple(token_ids[first:])
        for index in range(start - first, len(recent)):
            token = recent[index]
            if are_sampled:
                self._judge(recent[max(0, index - ORDERS[0]) : index], token)
            for order in ORDERS:
                if index >= order:
                    self._new[recent[index - order : index]] = token
            if len(self._new) > self._max_new:
                self._old, self._new = self._new, {}

    def draft(self, token_ids: Sequence[int], most: int) -> list[Guess]:
        """At most ``most`` tokens that may follow; none after a context that was never seen."""
        seen = tuple(token_ids[-ORDERS[0] :])
        chance = 1.0
        drafted: list[Guess] = []
        while len(drafted) < most:
            found = self._look_up(seen)
            if found is None:
                break
            token, order = found
            chance *= self._num_right[order] / self._num_asked[order]
            drafted.append(Guess(token, chance))
            seen = (*seen[-ORDERS[0] :], token)
        return drafted

    def _look_up(self, seen: tuple[int, ...]) -> tuple[int, int] | None:
        """The token that followed the longest known context, and the length of that context."""
        for order in ORDERS:
            if order <= len(seen):
                context = seen[-order:]
                token = self._new.get(context)
                if token is None:
                    token = self._old.get(context)
                if token is not None:
                    return token, order
        return None

    def _judge(self, seen: tuple[int, ...], token: int) -> None:
        """Count whether the table would have been right about a token that was sampled."""
        found = self._look_up(seen)
        if found is None:
            return
        guess, order = found
        self._num_right[order] = self._num_right[order] * _MEMORY + (guess == token)
        self._num_asked[order] = self._num_asked[order] * _MEMORY + 1


def count_worth(
    drafts: Sequence[Sequence[Guess]], num_tokens: int, overhead_tokens: int
) -> list[int]:
    """How many guesses of each draft make the pass yield more tokens in the time it takes.

    ``num_tokens`` are in the pass anyway, and each draft's episode samples one token for certain;
    a pass takes as long as its tokens and ``overhead_tokens`` more. Guesses are taken by falling
    chance, while one's chance is above what the pass yields for each token so far.
    """
    worth = [0] * len(drafts)
    expected = float(len(drafts))
    cost = num_tokens + overhead_tokens
    chances = [(-g.chance, depth, i) for i, d in enumerate(drafts) for depth, g in enumerate(d)]
    for negative, _, index in sorted(chances):
        if -negative * cost <= expected:
            break
        worth[index] += 1
        expected -= negative
        cost += 1
    return worth
