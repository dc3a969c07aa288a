"""Self-distillation in hindsight: the policy teaches itself, having read a better episode.

An episode that failed, or that searched more often than necessary, has a sibling that did better.
The teacher is the policy itself, with the current weights and without gradient. It reads the
sibling's transcript before the episode's own and then scores the same tokens::

    policy     prompt  sampled  observation  sampled
    teacher    [sibling's transcript]  prompt  sampled  observation  sampled

Both transcripts are the recorded token ids; nothing is encoded again.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Literal

from pydantic import Field

from forage.algorithms.loss.distill_loss import reverse_kl
from forage.algorithms.loss.token_loss import TokenLoss

if TYPE_CHECKING:
    from torch import Tensor

    from forage.batch import Credited, Rows
    from forage.types import Episode

HINDSIGHT = "hindsight_ids"
"""The extra column with the tokens that the teacher reads first; it is not one value per token."""


class HindsightLoss(TokenLoss):
    """KL to the policy itself after it has read a correct sibling's transcript."""

    kind: Literal["hindsight"] = "hindsight"
    direction: Literal["forward", "reverse"] = "forward"
    """KL(teacher || policy) as in Search-E1, or KL(policy || teacher) as in SDPO."""
    max_tokens: int = Field(default=2048, ge=2)
    """Maximum tokens that the teacher reads; episodes that need more are not taught."""

    def mark(self, credited: Sequence[Credited]) -> list[Credited]:
        import torch

        groups: dict[str, list[Episode]] = {}
        for each in credited:
            groups.setdefault(each.episode.question.id, []).append(each.episode)
        best = {question: most_efficient(group) for question, group in groups.items()}
        marked: list[Credited] = []
        for each in credited:
            ids = self._read_first(each.episode, best[each.episode.question.id])
            found = {HINDSIGHT: torch.tensor(ids, dtype=torch.int64)} if ids else {}
            marked.append(each.having(found))
        return marked

    def _read_first(self, episode: Episode, best: Episode | None) -> tuple[int, ...]:
        """The better sibling's tokens; none without one, or if they take too many tokens."""
        if best is None or effort(episode) <= effort(best):
            return ()
        ids = best.contexts[-1].token_ids_T
        longest = max(context.num_tokens for context in episode.contexts)
        return ids if len(ids) + longest <= self.max_tokens else ()

    def mask(self, rows: Rows) -> Tensor:
        is_taught_N = rows.is_sampled_N.new_zeros(rows.is_sampled_N.shape)
        if rows.informed is not None:
            source_N = rows.informed.source_N
            is_taught_N[source_N[source_N >= 0]] = True
        return rows.is_sampled_N & is_taught_N

    def divergence(self, logprobs_CV: Tensor, teacher_CV: Tensor) -> Tensor:
        kl = forward_kl if self.direction == "forward" else reverse_kl
        return kl(logprobs_CV, teacher_CV)


def effort(episode: Episode) -> tuple[bool, int]:
    """Orders the episodes of a question: correct ones first, then by their searches."""
    is_correct = episode.reward is not None and episode.reward.parts.get("em") == 1.0
    return not is_correct, episode.num_searches


def most_efficient(group: Sequence[Episode]) -> Episode | None:
    """The correct episode with the fewest searches, then the fewest tokens; None without one."""
    best = min(group, key=lambda each: (*effort(each), each.num_sampled_tokens, each.member))
    return None if effort(best)[0] else best


def forward_kl(logprobs_CV: Tensor, teacher_CV: Tensor) -> Tensor:
    """KL(teacher || policy) of each position [C]: the exact sum over the vocabulary.

    Source: Search-E1's self-distillation towards a more efficient sibling,
    https://arxiv.org/abs/2605.22511; SDPO (https://arxiv.org/abs/2601.20802) has the other
    direction, and feedback in the place of the sibling.
    """
    return (teacher_CV.exp() * (teacher_CV - logprobs_CV)).sum(dim=-1)
