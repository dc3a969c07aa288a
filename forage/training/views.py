"""What the models say of the episodes of a step before it is learnt from.

The policy's own log-probabilities where the algorithm needs them apart from the sampler's, those of
the reference model, the critic's values, and the weights that correct for the sampler: all computed
over the whole step, so that no micro-batch has a say in them. No gradients, no update.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from transformers import PreTrainedModel

from forage.algorithms.diagnostics import effective_share, mismatch
from forage.algorithms.loss.corrections import importance_weights, normalised, reject, veto
from forage.algorithms.packing import CostOf, balanced_bins, lay
from forage.batch import Rows, Weighed
from forage.config.algorithm_config import AlgorithmConfig, CorrectionConfig
from forage.training.critic import Critic
from forage.training.gradients import evaluate
from forage.training.logprobs import token_logprobs
from forage.training.observations import fill_in, unmask


@dataclass(frozen=True, slots=True)
class Viewer:
    """The models to ask, and the room that a micro-batch has."""

    policy: PreTrainedModel
    reference: PreTrainedModel | None
    critic: Critic | None
    algorithm: AlgorithmConfig
    temperature: float
    max_tokens: int
    cost_of: CostOf

    def look(
        self, weighed: Sequence[Weighed], needs_logprobs: bool
    ) -> tuple[list[Weighed], dict[str, float]]:
        """The episodes with what the models say of them, and the metrics of the correction.

        ``needs_logprobs`` asks for the trainer's log-probabilities of the sampled tokens.
        """
        metrics: dict[str, float] = {}
        seen = list(weighed)
        if needs_logprobs and seen:
            logprobs = self._ask(seen, lambda rows: self._logprobs(self.policy, rows))
            seen, metrics = correct(seen, logprobs, self.algorithm)
        if self.reference is not None:
            reference = self.reference
            logprobs = self._ask(seen, lambda rows: self._logprobs(reference, rows))
            seen = [
                replace(each, reference_logprobs_M=logprobs_M)
                for each, logprobs_M in zip(seen, logprobs, strict=True)
            ]
        if self.critic is not None:
            critic = self.critic
            values = self._ask(seen, lambda rows: critic.values(rows.packed, rows.is_sampled_N))
            seen = [
                replace(each, values_M=values_M)
                for each, values_M in zip(seen, values, strict=True)
            ]
        return seen, metrics

    def unmask(self, weighed: Sequence[Weighed]) -> tuple[list[Weighed], dict[str, float]]:
        """The episodes with their observations trained as well (see ``observations.py``)."""
        unmasked = [unmask(each) for each in weighed]
        wide = [each.weighed for each in unmasked]
        policy = self._ask(wide, lambda rows: self._logprobs(self.policy, rows))
        model = self.reference
        reference = self._ask(wide, lambda rows: self._logprobs(model, rows)) if model else policy
        filled = [fill_in(*each) for each in zip(unmasked, policy, reference, strict=True)]
        num_observed = sum(int(each.was_observed_M.sum()) for each in unmasked)
        num_trained = sum(len(each.was_observed_M) for each in unmasked)
        return filled, {"loss/observed_fraction": num_observed / max(num_trained, 1)}

    def _logprobs(self, model: PreTrainedModel, rows: Rows) -> Tensor:
        return token_logprobs(model, rows.packed, rows.is_sampled_N, self.temperature)[0]

    def _ask(self, weighed: Sequence[Weighed], ask: Callable[[Rows], Tensor]) -> list[Tensor]:
        """One float32 [M] on the CPU an episode, in their order."""
        everything = [replace(each, is_kept_M=torch.ones_like(each.is_kept_M)) for each in weighed]
        sizes = [each.episode.num_tokens for each in weighed]
        bins = balanced_bins(sizes, self.max_tokens, self.cost_of)
        rows = [lay([everything[i] for i in bin_]) for bin_ in bins]
        device = next(self.policy.parameters()).device
        answers = evaluate(device, [lambda each=each: ask(each).float().cpu() for each in rows])
        by_episode: dict[int, Tensor] = {}
        for bin_, values in zip(bins, answers, strict=True):
            lengths = [len(weighed[i].old_logprobs_M) for i in bin_]
            by_episode |= zip(bin_, values.split(lengths), strict=True)
        return [by_episode[i] for i in range(len(weighed))]


def correct(
    weighed: Sequence[Weighed], logprobs: Sequence[Tensor], algorithm: AlgorithmConfig
) -> tuple[list[Weighed], dict[str, float]]:
    """Take the trainer's log-probabilities in: the ratio's old policy, weights, rejections.

    Returns the mismatch as well, and what the correction cut.
    """
    lengths = [len(logprobs_M) for logprobs_M in logprobs]
    sequence_of_M = torch.repeat_interleave(torch.tensor(lengths))
    trainer_M = torch.cat(list(logprobs))
    sampler_M = torch.cat([each.old_logprobs_M for each in weighed])
    metrics = mismatch(trainer_M, sampler_M, sequence_of_M, len(lengths))
    log_ratio_M = trainer_M - sampler_M
    weights_M, is_kept_M, cuts = _bound(
        algorithm.correction, log_ratio_M, sequence_of_M, len(lengths)
    )
    corrected = [
        replace(
            each,
            old_logprobs_M=logprobs_M if algorithm.decoupled else each.old_logprobs_M,
            weights_M=weights,
            is_kept_M=is_kept,
        )
        for each, logprobs_M, weights, is_kept in zip(
            weighed, logprobs, weights_M.split(lengths), is_kept_M.split(lengths), strict=True
        )
    ]
    return corrected, metrics | cuts


def _bound(
    config: CorrectionConfig, log_ratio_M: Tensor, sequence_of_M: Tensor, num_sequences: int
) -> tuple[Tensor, Tensor, dict[str, float]]:
    """Weights and what is kept, over all sampled tokens of the step."""
    weights_M = torch.ones_like(log_ratio_M)
    is_kept_M = torch.ones_like(log_ratio_M, dtype=torch.bool)
    metrics: dict[str, float] = {}
    if config.reject != "none":
        rejected = reject(
            log_ratio_M,
            sequence_of_M,
            num_sequences,
            config.reject,
            config.reject_low,
            config.reject_high,
        )
        is_kept_M = is_kept_M & rejected.is_kept_M
        metrics["correction/rejected_tokens"] = rejected.token_fraction
        metrics["correction/rejected_sequences"] = rejected.sequence_fraction
    if config.veto is not None:
        vetoed = veto(log_ratio_M, sequence_of_M, num_sequences, config.veto)
        is_kept_M = is_kept_M & vetoed.is_kept_M
        metrics["correction/vetoed_sequences"] = vetoed.sequence_fraction
    if config.weights != "none":
        found = importance_weights(
            log_ratio_M,
            sequence_of_M,
            num_sequences,
            config.level,
            config.weights,
            config.low,
            config.high,
        )
        weights_M = found.weights_M
        metrics["correction/cut_fraction"] = found.cut_fraction
        if config.normalise:
            weights_M = normalised(weights_M, is_kept_M, sequence_of_M, num_sequences, config.level)
        kept_M = weights_M[is_kept_M]
        metrics["correction/weight_mean"] = kept_M.mean().item() if len(kept_M) else 0.0
        metrics["correction/weight_ess"] = (
            effective_share(kept_M).item() if bool((kept_M > 0).any()) else 0.0
        )
    return weights_M, is_kept_M, metrics
