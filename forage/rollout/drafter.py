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
from itertools import cycle

_ORDERS = (8, 4, 2)
"""Lengths of the contexts that are looked up, the longest first: it is wrong least often."""
MAX_ENTRIES = 65_536


class Drafter:
    """A table from the last few tokens to the one that followed them most recently."""

    def __init__(self, max_entries: int = MAX_ENTRIES) -> None:
        self._max_entries = max_entries
        self._next: dict[tuple[int, ...], int] = {}

    def learn(self, token_ids: Sequence[int], start: int) -> None:
        """Take the tokens from ``start`` on, each after those before it; forget the oldest."""
        table = self._next
        for index in range(start, len(token_ids)):
            for order in _ORDERS:
                if index >= order:
                    context = tuple(token_ids[index - order : index])
                    table.pop(context, None)  # put anew, it is the last to be forgotten
                    table[context] = token_ids[index]
        while len(table) > self._max_entries:
            del table[next(iter(table))]

    def draft(self, token_ids: Sequence[int], most: int) -> list[int]:
        """At most ``most`` tokens that may follow, none where nothing alike was seen."""
        seen = list(token_ids[-_ORDERS[0] :])
        drafted: list[int] = []
        while len(drafted) < most:
            contexts = (tuple(seen[-order:]) for order in _ORDERS if order <= len(seen))
            found = next((self._next[c] for c in contexts if c in self._next), None)
            if found is None:
                break
            drafted.append(found)
            seen.append(found)
        return drafted


def share_room(drafts: Sequence[Sequence[int]], room: int) -> list[int]:
    """How many tokens of each draft to take: in turn one of each, ``room`` in all.

    ``share_room([[1, 2, 3], [], [4]], 3)`` gives ``[2, 0, 1]``. A first guess is right more often
    than a second.
    """
    taken = [0] * len(drafts)
    left = min(room, sum(map(len, drafts)))
    for index in cycle(range(len(drafts))):
        if left == 0:
            return taken
        if taken[index] < len(drafts[index]):
            taken[index] += 1
            left -= 1
    return taken
