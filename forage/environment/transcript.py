"""The append-only record of an episode's tokens, segment by segment.

What the engine is given is always ``token_ids``: the concatenation of the segments so far. There
is no method that changes or removes what was appended, and none that takes text.
"""

from __future__ import annotations

from collections.abc import Sequence

from forage.types import Completion, Origin, Segment


class Transcript:
    """Starts as the prompt and grows by sampled segments and observations."""

    __slots__ = ("_segments", "_token_ids")

    def __init__(self, prompt_ids: Sequence[int]) -> None:
        assert prompt_ids, "an episode starts with a prompt"
        self._token_ids: list[int] = []
        self._segments: list[Segment] = []
        self._append(Segment(Origin.PROMPT, tuple(prompt_ids)))

    def append_sampled(self, completion: Completion) -> None:
        """Add one turn exactly as the engine sampled it."""
        segment = Segment(
            Origin.TRANSCRIBED if completion.is_transcribed else Origin.SAMPLED,
            completion.token_ids_T,
            completion.logprobs_T,
            completion.versions_T,
            completion.alternatives_T,
        )
        self._append(segment)

    def append_observation(self, token_ids: Sequence[int]) -> None:
        """Add what the environment says in reply to the last turn."""
        assert self._segments[-1].origin.is_policys, "an observation answers a turn"
        self._append(Segment(Origin.OBSERVATION, tuple(token_ids)))

    @property
    def token_ids(self) -> tuple[int, ...]:
        """All tokens so far, in order."""
        return tuple(self._token_ids)

    @property
    def last_id(self) -> int:
        """The last token so far."""
        return self._token_ids[-1]

    @property
    def segments(self) -> tuple[Segment, ...]:
        return tuple(self._segments)

    def __len__(self) -> int:
        return len(self._token_ids)

    def _append(self, segment: Segment) -> None:
        self._segments.append(segment)
        self._token_ids.extend(segment.token_ids_T)
