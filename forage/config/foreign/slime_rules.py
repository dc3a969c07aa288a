"""Rules for the keys of slime that are read together; ``slime.yaml`` lists all keys."""

from __future__ import annotations

import re

from forage.config.foreign.foreign_keys import (
    UNSET,
    Given,
    Recipe,
    fall,
    leash,
    machines,
    read_trainer,
    whole,
)

_LOSSES = {"gspo": "gspo", "cispo": "cispo"}  # all other kinds use a clipped loss
_WEIGHTS, _REJECT = "algorithm.correction.weights", "algorithm.correction.reject"


def derive(given: Given) -> Recipe:
    ours = _leash(given) | _loss(given) | _correction(given) | _steps(given) | _evaluation(given)
    if given.value("dynamic-sampling-filter-path") is not None:
        ours["algorithm.dynamic_sampling"] = {}
    estimator = given.text("advantage-estimator")
    if estimator in ("grpo", "gspo") and given.flag("disable-grpo-std-normalization"):
        ours["algorithm.advantage.normalise_by_std"] = False
    if estimator == "reinforce_plus_plus_baseline":
        ours["algorithm.advantage.baseline"] = "group"
    if estimator != "gspo" and given.flag("calculate-per-token-loss"):
        ours["algorithm.aggregate.kind"] = "token_mean"
    if given.value("recompute-granularity") is not None:
        ours["model.gradient_checkpointing"] = True
    longest = given.number("rollout-max-context-len") or max(
        4096, 500 + int(given.number("rollout-max-response-len") or 0)
    )
    ours["environment.max_tokens"] = int(longest)
    return ours | _placement(given)


def _steps(given: Given) -> Recipe:
    ours: Recipe = {}
    batch, size = given.number("rollout-batch-size"), given.number("n-samples-per-prompt") or 1
    steps = given.number("num-rollout") or given.steps("num-epoch", batch)
    ours["trainer.num_steps"] = int(steps) if steps else f"{UNSET}trainer.num_steps"
    if batch and (mini := given.number("global-batch-size")):
        ours["trainer.num_mini_batches"] = whole(batch * size / mini)
    elif mini := given.number("num-steps-per-rollout"):
        ours["trainer.num_mini_batches"] = int(mini)
    if batch:
        ours["rollout.max_concurrent_episodes"] = int(batch * size)
    if (every := given.number("save-interval")) is not None:
        ours["trainer.checkpoint_every"] = whole(every)
    return ours | fall(given, given.text("lr-decay-style"), "min-lr", "lr")


def _evaluation(given: Given) -> Recipe:
    """The evaluation settings; its question file follows a name and may end in a slice."""
    ours: Recipe = {}
    if named := given.value("eval-prompt-data"):
        file, _, kept = str(named[1] if isinstance(named, list) else named).partition("@")
        ours["data.test"] = file
        if found := re.fullmatch(r"\[0?:(\d+)\]", kept):
            ours |= {"evaluation.num_questions": int(found[1]), "evaluation.subset_seed": None}
    if (given.number("n-samples-per-eval-prompt") or 1) > 1:
        temperature = given.number("eval-temperature", "rollout-temperature")
        ours["evaluation.temperature"] = 1.0 if temperature is None else temperature
    return ours


def _placement(given: Given) -> Recipe:
    ours: Recipe = {}
    own = 0
    if given.flag("colocate"):
        ours["placement.engine.offload"] = True
    elif own := int(given.number("rollout-num-gpus") or 0):
        ours["placement.engine.own_gpus"] = own
    num_gpus = given.number("actor-num-gpus-per-node")
    return ours | machines(given.number("actor-num-nodes"), num_gpus, own)


def _leash(given: Given) -> Recipe:
    is_loss = given.flag("use-kl-loss")
    coefficient = given.number("kl-loss-coef" if is_loss else "kl-coef")
    place = "loss" if is_loss else "reward"
    ours = leash(coefficient, lambda: given.text("kl-loss-type"), place)
    if ours and is_loss and given.flag("use-unbiased-kl"):
        ours["algorithm.kl.is_importance_weighted"] = True
    return ours


def _loss(given: Given) -> Recipe:
    kind = _LOSSES.get(given.text("advantage-estimator") or "grpo", "clipped")
    low = given.number("eps-clip")
    high = given.number("eps-clip-high")
    ours: Recipe = {"algorithm.loss.kind": kind, "algorithm.loss.low": low}
    ours["algorithm.loss.high"] = low if high is None else high
    if kind == "clipped" and (dual := given.number("eps-clip-c")):
        ours["algorithm.loss.dual_clip"] = dual
    if given.flag("use-opsm"):
        ours["algorithm.sequence_mask.delta"] = given.number("opsm-delta")
    return ours


def _correction(given: Given) -> Recipe:
    """slime's own truncation, or the rules of its mismatch helper, which sets ``tis_mode``."""
    if not given.flag("use-tis"):
        return {}
    function = given.text("custom-tis-function-path") or ""
    mode = None if "icepop" in function else given.text("tis-mode")
    if mode is None:
        least, high = given.number("tis-clip-low") or 0, given.number("tis-clip") or 2.0
        kind = "mask" if "icepop" in function else "clip" if least else "truncate"
        bounds = {} if kind == "truncate" else {"low": least}
        return _named(_WEIGHTS, kind=kind, high=high, **bounds)
    high = given.number("tis-upper-bound") or 2.0

    def low() -> float:
        bound = given.number("tis-lower-bound")
        return 1.0 / high if bound is None else bound

    ours = _named(_WEIGHTS, kind=mode, level=given.text("tis-level") or "token", high=high)
    ours[f"{_WEIGHTS}.normalise"] = given.flag("tis-batch-normalize")
    if mode != "truncate":
        ours[f"{_WEIGHTS}.low"] = low()
    if given.flag("use-rs"):
        level, least = given.text("rs-level") or "token", given.number("rs-lower-bound")
        most = given.number("rs-upper-bound") or high
        least = low() if least is None else least
        ours |= _named(_REJECT, kind="ratio", level=level, low=least, high=most)
        if veto := given.number("rs-veto-threshold"):
            ours["algorithm.correction.veto"] = veto
    return ours


def _named(section: str, **values: float | str) -> Recipe:
    return {f"{section}.{name}": value for name, value in values.items()}


SLIME = read_trainer(
    "slime", lambda values: "hf-checkpoint" in values or "prompt-data" in values, derive
)
