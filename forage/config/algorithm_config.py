"""The settings of ``algorithm``: how rewards become advantages and advantages become a loss.

``run_config.py`` hangs them under its root and adds the checks that span other sections. Which keys
an estimator or a loss reads is written down once, in ``dead_keys``: a key that would do nothing is
refused where it is given, and left out where a config is written. docs/algorithms.md has each
option's formula, paper and key.
"""

from __future__ import annotations

from typing import Literal, Self

from pydantic import Field, model_validator

from forage.settings import Settings

Advantage = Literal[
    "grpo",
    "dr_grpo",
    "rloo",
    "reinforce",
    "reinforce_plus_plus",
    "remax",
    "pass_at_k",
    "turn_level",
    "gae",
]
Baseline = Literal["group", "running", "none"]
Loss = Literal["clipped", "gspo", "cispo", "reinforce"]
Aggregate = Literal["token_mean", "sequence_mean", "sequence_sum", "constant"]
Level = Literal["token", "sequence", "geometric"]
KlForm = Literal["k1", "k2", "k3", "absolute"]

GROUP_BASELINES: tuple[Advantage, ...] = ("grpo", "dr_grpo", "rloo", "pass_at_k", "turn_level")
TOKEN_CREDIT: tuple[Advantage, ...] = ("turn_level", "gae", "reinforce_plus_plus")
"""Estimators that tell the tokens of an episode apart, so that a turn's own reward has a place."""


class TurnsConfig(Settings):
    """Rewards of single turns, beside the outcome that the last one gets."""

    section = "algorithm.turns"
    discount: float = Field(default=1.0, gt=0, le=1)
    retrieval_bonus: float = Field(default=0.0, ge=0)
    search_cost: float = Field(default=0.0, ge=0)


class CriticConfig(Settings):
    """The value model of PPO: the policy's family with a value head, and its own optimizer.

    ``path`` None starts from the policy's weights. In the first ``num_warmup_steps`` steps of the
    loop the critic learns alone.
    """

    section = "algorithm.critic"
    path: str | None = None
    learning_rate: float = Field(default=1e-5, gt=0)
    warmup_steps: int = Field(default=0, ge=0)
    weight_decay: float = Field(default=0.0, ge=0)
    max_grad_norm: float = Field(default=1.0, gt=0)
    value_clip: float | None = Field(default=0.5, gt=0)
    num_warmup_steps: int = Field(default=0, ge=0)


class KlConfig(Settings):
    """The leash to a reference model; ``reference`` None is the weights that the run starts with.

    With ``target`` the coefficient follows the measured divergence (``horizon`` in episodes).
    """

    section = "algorithm.kl"
    coefficient: float = Field(default=0.0, ge=0)
    form: KlForm = "k3"
    place: Literal["loss", "reward"] = "loss"
    reference: str | None = None
    target: float | None = Field(default=None, gt=0)
    horizon: int = Field(default=10_000, ge=1)

    def dead_keys(self) -> dict[str, str]:
        if not self.coefficient:
            others = ("form", "place", "reference", "target", "horizon")
            return dict.fromkeys(others, "set algorithm.kl.coefficient above 0")
        return {} if self.target else {"horizon": "set algorithm.kl.target"}


class OverlongConfig(Settings):
    """The penalty for writing close to ``max_tokens`` sampled tokens; None: there is none."""

    section = "algorithm.overlong"
    max_tokens: int | None = Field(default=None, ge=1)
    buffer_tokens: int = Field(default=128, ge=1)
    penalty: float = Field(default=1.0, gt=0)

    def dead_keys(self) -> dict[str, str]:
        if self.max_tokens is None:
            return dict.fromkeys(("buffer_tokens", "penalty"), "set algorithm.overlong.max_tokens")
        return {}

    @model_validator(mode="after")
    def _buffer_fits(self) -> Self:
        if self.max_tokens is not None and self.buffer_tokens > self.max_tokens:
            raise ValueError(
                f"algorithm.overlong.buffer_tokens ({self.buffer_tokens}) is above max_tokens "
                f"({self.max_tokens}): every episode would be too long; lower buffer_tokens"
            )
        return self


class DynamicSamplingConfig(Settings):
    """Groups whose episodes all earned the same are replaced, for ``max_rounds`` rounds at most.

    ``oversampling`` 1.5 plays half as many groups again from the start, so that fewer rounds wait.
    """

    section = "algorithm.dynamic_sampling"
    is_enabled: bool = False
    max_rounds: int = Field(default=10, ge=0)
    oversampling: float = Field(default=1.0, ge=1)

    def dead_keys(self) -> dict[str, str]:
        if self.is_enabled:
            return {}
        remedy = "set algorithm.dynamic_sampling.is_enabled: true"
        return dict.fromkeys(("max_rounds", "oversampling"), remedy)


class LikelihoodProtectionConfig(Settings):
    """LLDS: what was good may not become less likely; ``gate`` says whose sum must have fallen."""

    section = "algorithm.likelihood_protection"
    coefficient: float = Field(default=0.0, ge=0)
    gate: Literal["turn", "episode"] = "turn"

    def dead_keys(self) -> dict[str, str]:
        remedy = "set algorithm.likelihood_protection.coefficient above 0"
        return {} if self.coefficient else {"gate": remedy}


class CorrectionConfig(Settings):
    """Importance weights and rejection for what sampler and trainer see differently.

    ``weights`` and ``reject`` may each be used alone. Ratios are trainer over sampler.
    """

    section = "algorithm.correction"
    weights: Literal["none", "truncate", "clip", "mask"] = "none"
    level: Level = "token"
    low: float = Field(default=0.5, ge=0, le=1)
    high: float = Field(default=2.0, ge=1)
    normalise: bool = False
    reject: Literal["none", "token", "sequence", "geometric"] = "none"
    reject_low: float = Field(default=0.5, ge=0, le=1)
    reject_high: float = Field(default=2.0, ge=1)
    veto: float | None = Field(default=None, gt=0, lt=1)

    @property
    def is_on(self) -> bool:
        return self.weights != "none" or self.reject != "none" or self.veto is not None

    def dead_keys(self) -> dict[str, str]:
        dead: dict[str, str] = {}
        if self.weights == "none":
            remedy = "set algorithm.correction.weights to truncate, clip or mask"
            dead |= dict.fromkeys(("level", "low", "high", "normalise"), remedy)
        elif self.weights == "truncate":
            dead["low"] = "truncation has no lower bound, algorithm.correction.weights: clip has"
        if self.reject == "none":
            remedy = "set algorithm.correction.reject to token, sequence or geometric"
            dead |= dict.fromkeys(("reject_low", "reject_high"), remedy)
        return dead


class AlgorithmConfig(Settings):
    """How rewards become advantages and advantages become a loss.

    ``train_observations`` is an ablation: search results are trained as if the policy had written
    them. Without it only sampled tokens are, whatever else is set.
    """

    section = "algorithm"
    advantage: Advantage = "grpo"
    normalise_by_std: bool = True
    baseline: Baseline = "group"
    baseline_decay: float = Field(default=0.9, ge=0, lt=1)
    pass_k: int = Field(default=4, ge=2)
    discount: float = Field(default=1.0, gt=0, le=1)
    gae_lambda: float = Field(default=1.0, ge=0, le=1)
    whiten: bool = True
    turns: TurnsConfig = TurnsConfig()
    critic: CriticConfig = CriticConfig()
    loss: Loss = "clipped"
    clip_low: float = Field(default=0.2, gt=0, le=1)
    clip_high: float = Field(default=0.2, gt=0)
    dual_clip: float | None = Field(default=None, gt=1)
    decoupled: bool = False
    aggregate: Aggregate = "token_mean"
    constant_tokens: int | None = Field(default=None, ge=1)
    train_observations: bool = False
    entropy_coefficient: float = Field(default=0.0, ge=0)
    kl: KlConfig = KlConfig()
    likelihood_protection: LikelihoodProtectionConfig = LikelihoodProtectionConfig()
    overlong: OverlongConfig = OverlongConfig()
    dynamic_sampling: DynamicSamplingConfig = DynamicSamplingConfig()
    correction: CorrectionConfig = CorrectionConfig()

    @property
    def needs_groups(self) -> bool:
        """Whether the baseline of an episode is made of others of the same question."""
        if self.advantage in ("reinforce", "reinforce_plus_plus"):
            return self.baseline == "group"
        return self.advantage in GROUP_BASELINES

    @property
    def tells_tokens_apart(self) -> bool:
        """Whether the tokens of an episode may get different advantages."""
        return self.advantage in TOKEN_CREDIT

    @property
    def needs_recomputed_logprobs(self) -> bool:
        """Whether the trainer's log-probabilities are needed before the first update."""
        return self.decoupled or self.correction.is_on

    def dead_keys(self) -> dict[str, str]:
        read_by = {
            "normalise_by_std": ("advantage", "grpo", "turn_level"),
            "baseline": ("advantage", "reinforce", "reinforce_plus_plus"),
            "pass_k": ("advantage", "pass_at_k"),
            "discount": ("advantage", "gae", "reinforce_plus_plus"),
            "gae_lambda": ("advantage", "gae"),
            "whiten": ("advantage", "gae"),
            "turns": ("advantage", *TOKEN_CREDIT),
            "critic": ("advantage", "gae"),
            "clip_low": ("loss", "clipped", "gspo", "cispo"),
            "clip_high": ("loss", "clipped", "gspo", "cispo"),
            "dual_clip": ("loss", "clipped"),
            "constant_tokens": ("aggregate", "constant"),
        }
        dead = {
            name: f"it is read with algorithm.{key}: {' or '.join(values)}, not {chosen}"
            for name, (key, *values) in read_by.items()
            if (chosen := getattr(self, key)) not in values
        }
        if "baseline" in dead or self.baseline != "running":
            dead["baseline_decay"] = "it is read with algorithm.baseline: running"
        return dead

    @model_validator(mode="after")
    def _no_contradictions(self) -> Self:
        if self.aggregate == "constant" and self.constant_tokens is None:
            raise ValueError(
                "algorithm.aggregate: constant needs algorithm.constant_tokens, the tokens that "
                "an episode may write (for example environment.max_tokens)"
            )
        if self.advantage == "dr_grpo" and self.aggregate != "constant":
            raise ValueError(
                f"algorithm.advantage: dr_grpo is made for algorithm.aggregate: constant, not "
                f"{self.aggregate}; set it, or take advantage: grpo with normalise_by_std: false"
            )
        if self.loss == "gspo" and self.aggregate != "sequence_mean":
            raise ValueError(
                "algorithm.loss: gspo weighs sequences and not tokens: set "
                f"algorithm.aggregate: sequence_mean instead of {self.aggregate}"
            )
        if self.advantage != "turn_level" and self.turns.discount != 1:
            raise ValueError(
                "algorithm.turns.discount does nothing: it is read with advantage: turn_level; "
                f"{self.advantage} discounts over tokens, set algorithm.discount"
            )
        if self.train_observations and self.advantage == "gae":
            raise ValueError(
                "algorithm.train_observations: a critic has no value and no return for tokens that "
                "nobody chose; take another advantage than gae, or leave it off"
            )
        if self.correction.weights != "none" and not self.decoupled:
            raise ValueError(
                "algorithm.correction.weights needs algorithm.decoupled: true: without it the "
                "loss's own ratio is taken to the sampler and would be counted twice"
            )
        return self
