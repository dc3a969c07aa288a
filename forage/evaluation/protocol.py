"""How the episodes of an evaluation were played: told beside figures, and guarded when resuming.

``Protocol`` is what a reader needs to know to compare figures; ``fingerprint_of`` is every setting
that an episode depends on, so that a file of episodes never holds two kinds. Settings that change
speed alone (slots, concurrency, time limits) are in neither.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, Self

from forage.config import RunConfig
from forage.environment.template import PromptTemplate
from forage.evaluation.baselines.rejection_sampling import num_candidates
from forage.retrieval.exchange import Served


@dataclass(frozen=True, slots=True)
class Protocol:
    """``retriever`` and ``num_passages`` are None where the server does not tell."""

    model: str
    retriever: str | None
    num_passages: int | None
    topk: int
    prompt: str
    form: str
    max_turns: int
    has_final_turn: bool
    max_turn_tokens: int
    max_observation_tokens: int
    max_tokens: int
    temperature: float
    num_samples: int
    method: str = "search"

    @classmethod
    def of(cls, config: RunConfig, served: Served | None) -> Self:
        environment, evaluation = config.environment, config.evaluation
        endpoint, told = config.model.endpoint, evaluation.method.replace("_", " ")
        is_environments = evaluation.method in ("search", "rejection_sampling")
        if evaluation.method == "rejection_sampling":
            told += f" (the best of {num_candidates(config)} by the golden answers)"
        return cls(
            model=config.model.path if endpoint is None else endpoint.served_model,
            retriever=served.backend if served else None,
            num_passages=served.num_passages if served else None,
            topk=config.search.topk,
            prompt=environment.prompt if is_environments else "the method's own",
            form=environment.protocol,
            max_turns=environment.max_turns,
            has_final_turn=environment.has_final_turn,
            max_turn_tokens=environment.max_turn_tokens,
            max_observation_tokens=environment.max_observation_tokens,
            max_tokens=environment.max_tokens,
            temperature=evaluation.temperature,
            num_samples=evaluation.num_samples,
            method=told,
        )

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, row: Mapping[str, Any]) -> Self:
        """The inverse of ``to_json``; raises ``TypeError``."""
        return cls(**row)


def fingerprint_of(
    config: RunConfig, policy: Mapping[str, str], served: Served | None, corpus: str | None
) -> dict[str, str]:
    """What the episodes depend on, by name: a setting's key, or words where it is no setting.

    ``policy`` names the weights (digests) or the server; ``corpus`` is the digest of the passages
    behind the arms ``gold`` and ``random``. Only what the arms that are played need is in it: an
    arm may be added to a finished evaluation.
    """
    evaluation = config.evaluation
    arms = evaluation.arms
    found: dict[str, object] = {**policy}
    if config.model.endpoint is None:
        found["model.dtype"] = config.model.dtype
        found["model.device"] = config.model.device.partition(":")[0]
    found |= {f"environment.{k}": v for k, v in config.environment.model_dump().items()}
    found["environment.prompt"] = _short_hash(PromptTemplate.load(config.environment.prompt).text)
    found["evaluation.temperature"] = evaluation.temperature
    found["evaluation.method"] = evaluation.method
    if evaluation.method == "rejection_sampling":
        found["evaluation.num_candidates"] = num_candidates(config)
        found["rollout.temperature"] = config.rollout.temperature
        found["reward"] = _short_hash(config.reward.model_dump_json())
    is_noisy = bool(evaluation.temperature) or evaluation.method == "rejection_sampling"
    if is_noisy:
        found["rollout.top_p"] = config.rollout.top_p
    if is_noisy or "random" in arms:
        found["seed"] = config.seed
    if "normal" in arms:
        found["search.url"] = ", ".join(config.search.urls)
        if served is not None:
            found["what search.url serves"] = f"{served.backend}, {served.num_passages} passages"
    if {"normal", "random"} & set(arms):
        found["search.topk"] = config.search.topk
    if evaluation.other_search is not None:
        found["evaluation.other_search.url"] = ", ".join(evaluation.other_search.urls)
        found["evaluation.other_search.topk"] = evaluation.other_search.topk
    if corpus is not None and {"gold", "random"} & set(arms):
        found["the corpus of data.index"] = corpus
    return {name: str(value) for name, value in found.items()}


def _short_hash(text: str) -> str:
    return hashlib.sha256(text.encode("utf-8")).hexdigest()[:16]
