"""Rules for the keys of veRL and Search-R1 that are read together; ``verl.yaml`` lists all keys."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from itertools import zip_longest
from typing import Any

from forage.config.foreign.foreign_keys import (
    UNSET,
    Given,
    Recipe,
    cadence,
    comma_separated,
    fall,
    leash,
    machines,
    read_trainer,
    warmup,
    whole,
)
from forage.errors import UserError
from forage.rewards.reward_config import RewardConfig

_ACTOR, _ROLLOUT = "actor_rollout_ref.actor", "actor_rollout_ref.rollout"
_OPTIM = f"{_ACTOR}.optim"
_STYLES = ("lr_scheduler_type", "warmup_style", "lr_decay_style")
_LOSSES = {
    **{"vanilla": "clipped", "gspo": "gspo", "geo_mean": "gmpo", "cispo": "cispo"},
    **{"sapo": "sapo", "clip_cov": "clip_cov", "kl_cov": "kl_cov", "gpg": "reinforce"},
    **{"dppo_tv": "dppo_tv", "dppo_kl": "dppo_kl", "dro": "dro"},
}
_BYPASS_LOSSES = {"ppo_clip": "clipped", "reinforce": "reinforce"}
_WITH_BOUNDS = ("clipped", "gspo", "cispo", "clip_cov", "dppo_tv", "dppo_kl")
_MODE = "policy_loss"
_OF_LOSSES = {  # our loss: its key and theirs
    "clipped": {"dual_clip": "clip_ratio_c"},
    "gmpo": {"bound": "clip_ratio_high"},
    "sapo": {"temperature_good": "tau_pos", "temperature_bad": "tau_neg"},
    "clip_cov": {
        **{"share": f"{_MODE}.clip_cov_ratio", "min_covariance": f"{_MODE}.clip_cov_lb"},
        **{"max_covariance": f"{_MODE}.clip_cov_ub"},
    },
    "kl_cov": {"share": f"{_MODE}.kl_cov_ratio", "coefficient": f"{_MODE}.ppo_kl_coef"},
    "dppo_tv": {"max_ratio": "clip_ratio_c"},
    "dppo_kl": {"max_ratio": "clip_ratio_c"},
    "dro": {"beta": f"{_MODE}.dro_beta"},
}
_REJECTIONS = {  # their name: our kind and level
    **{"token_k1": ("ratio", "token"), "seq_sum_k1": ("ratio", "sequence")},
    **{"seq_mean_k1": ("ratio", "geometric"), "token_k2": ("k2", "token")},
    **{"token_k3": ("k3", "token"), "seq_sum_k2": ("k2", "sum"), "seq_sum_k3": ("k3", "sum")},
    **{"seq_mean_k2": ("k2", "mean"), "seq_mean_k3": ("k3", "mean")},
    **{"seq_max_k2": ("k2", "max"), "seq_max_k3": ("k3", "max")},
}
_CRITIC = "algorithm.advantage.critic"
_IS = "algorithm.rollout_correction"
_TURNS = f"{_ROLLOUT}.multi_turn"
_TOOL = "tools.0.config"


def derive(given: Given) -> Recipe:
    """The settings that follow from several keys, or from Search-R1's own meaning of a key."""
    has_tags = _is_search_r1(given.values)
    ours = _environment(given, has_tags) | _leash(given, has_tags)
    ours |= _loss(given, has_tags) | _correction(given)
    ours |= _optimizer_steps(given, has_tags) | _placement(given)
    if rank := given.number("actor_rollout_ref.model.lora_rank"):
        ours["model.lora.rank"] = int(rank)
        ours["model.lora.alpha"] = given.number("actor_rollout_ref.model.lora_alpha") or 16
    estimator = given.text("algorithm.adv_estimator")
    is_divided = "algorithm.norm_adv_by_std_in_grpo"
    if estimator in ("grpo", "grpo_passk") and given.value(is_divided) is not None:
        ours["algorithm.advantage.normalise_by_std"] = given.flag(is_divided)
    if estimator == "reinforce_plus_plus_baseline":
        ours["algorithm.advantage.baseline"] = "group"
    if estimator == "gpg":
        ours["algorithm.advantage.rescale_by"] = "rewards"
    return ours | (_parts(given) if estimator == "gdpo" else {})


def _parts(given: Given) -> Recipe:
    """GDPO's reward components; the user must write those that Forage lacks."""
    names = given.value("algorithm.gdpo_reward_keys") or []
    weights = given.value("algorithm.gdpo_reward_weights") or [1.0] * len(names)
    ours: Recipe = {"algorithm.advantage.parts": dict(zip_longest(names, weights))}
    own = [name for name in names if name not in RewardConfig().parts]
    functions = [{"path": f"set_your_module:{name}", "weight": 0.0} for name in own]
    return ours | ({"reward.functions": functions} if own else {})


def _environment(given: Given, has_tags: bool) -> Recipe:
    prompt, reply = given.number("data.max_prompt_length"), given.number("data.max_response_length")
    is_2025 = given.text(f"{_ROLLOUT}.name") == "sglang_async"
    ours: Recipe = {
        "environment.dialect": "search_r1" if has_tags else "verl_2025" if is_2025 else "verl",
        "environment.protocol": "tags" if has_tags else "tools",
        "environment.prompt": "search-r1" if has_tags else "tools",
        "environment.has_final_turn": has_tags,
        # Search-R1's prompt is the whole transcript; veRL's reply is all that follows the prompt.
        "environment.max_tokens": int((prompt or 0) + (0 if has_tags else reply or 0)),
        "environment.max_turn_tokens": int(reply or 0),
    }
    ours |= given.first_files("data.train_files", "data.val_files")
    url = given.text("retriever.url" if has_tags else f"{_TOOL}.retrieval_service_url")
    if url is not None:
        ours["search.url"] = url.rstrip("/").removesuffix("/retrieve")
    if questions := given.number("data.val_data_num"):
        ours["evaluation.num_questions"] = int(questions)
    if has_tags:
        ours["environment.max_turns"] = int(given.number("max_turns") or 10)
        if not given.flag(f"{_ACTOR}.state_masking"):
            ours["algorithm.train_observations"] = True
        return ours
    turns = given.number(f"{_TURNS}.max_assistant_turns", f"{_TURNS}.max_turns")
    ours["environment.max_turns"] = int(turns or (reply or 0) // 3)  # as many as fit, in veRL
    if not is_2025:  # veRL's rollout of 2025 truncated no reply
        cut = given.number(f"{_TURNS}.max_tool_response_length")
        ours["environment.max_reply_characters"] = int(cut or 256)
    return ours | _tool(given)


def _tool(given: Given) -> Recipe:
    """The timeouts and the limit of parallel requests; the lower of two limits applies."""
    ours: Recipe = {}
    limits = [given.number(f"{_TOOL}.{name}") for name in ("num_workers", "rate_limit")]
    if known := [int(limit) for limit in limits if limit is not None]:
        ours["search.max_concurrent_requests"] = min(known)
    if timeout := given.number(f"{_TOOL}.timeout"):
        ours["search.timeout_s"] = float(timeout)
        ours["search.deadline_s"] = 2.0 * timeout
    return ours


def _leash(given: Given, has_tags: bool) -> Recipe:
    if given.flag(f"{_ACTOR}.use_kl_loss"):
        coefficient = given.number(f"{_ACTOR}.kl_loss_coef")
        return leash(coefficient, lambda: given.text(f"{_ACTOR}.kl_loss_type"), "loss")
    if not (has_tags or given.flag("algorithm.use_kl_in_reward")):
        return {}
    coefficient = given.number("algorithm.kl_ctrl.kl_coef")
    ours = leash(coefficient, lambda: given.text("algorithm.kl_penalty") or "kl", "reward")
    if ours and given.text("algorithm.kl_ctrl.type") == "adaptive":
        ours["algorithm.kl.adaptive.target"] = given.number("algorithm.kl_ctrl.target_kl") or 0.1
        horizon = given.number("algorithm.kl_ctrl.horizon") or 10_000
        ours["algorithm.kl.adaptive.horizon"] = int(horizon)
    return ours


def _loss(given: Given, has_tags: bool) -> Recipe:
    is_bypassed = given.flag(f"{_IS}.bypass_mode")  # it has two losses and reads no loss_mode
    name = f"{_IS}.loss_type" if is_bypassed else f"{_ACTOR}.policy_loss.loss_mode"
    kind = (_BYPASS_LOSSES if is_bypassed else _LOSSES).get(given.text(name) or "", "clipped")
    ours: Recipe = {"algorithm.loss.kind": kind}
    if kind == "reinforce":
        ours["algorithm.loss.weights.kind"] = "none"
        if is_bypassed:
            ours |= _weights(given, "algorithm.loss.weights")
    if kind in _WITH_BOUNDS:
        for side in ("low", "high"):
            bound = given.value(f"{_ACTOR}.clip_ratio_{side}", f"{_ACTOR}.clip_ratio")
            is_none = side == "low" and kind != "dppo_kl" and isinstance(bound, int | float)
            ours[f"algorithm.loss.{side}"] = min(bound, 1.0) if is_none else bound  # 1: no bound
    if not has_tags:
        for key, theirs in _OF_LOSSES.get(kind, {}).items():
            if (value := given.value(f"{_ACTOR}.{theirs}")) is not None:
                ours[f"algorithm.loss.{key}"] = value
    if given.text(f"{_ACTOR}.loss_agg_mode") == "seq-mean-token-sum-norm":
        ours["algorithm.aggregate.tokens"] = int(given.number("data.max_response_length") or 1024)
    if kind in ("gspo", "gmpo"):
        ours["algorithm.aggregate.kind"] = "sequence_mean"
    return ours


def _correction(given: Given) -> Recipe:
    is_bypassed = given.flag(f"{_IS}.bypass_mode")
    section = "algorithm.correction"
    ours = {"algorithm.decoupled": False} if is_bypassed else _weights(given, f"{section}.weights")
    names = comma_separated(given.value(f"{_IS}.rollout_rs"))
    rules = [_REJECTIONS[name] for name in names if name in _REJECTIONS]
    bounds = str(given.value(f"{_IS}.rollout_rs_threshold")).split(",") if rules else []
    bounds = bounds * len(rules) if len(bounds) == 1 else bounds
    rejections = [_rejection(*each) for each in zip_longest(rules, bounds[: len(rules)])]
    for first in rejections[:1]:
        ours |= {f"{section}.reject.{key}": value for key, value in first.items()}
    return ours | ({f"{section}.also_reject": rejections[1:]} if rejections[1:] else {})


def _weights(given: Given, section: str) -> Recipe:
    """Truncated ratios, or with two bounds IcePop's mask."""
    if (level := given.text(f"{_IS}.rollout_is")) is None:
        return {}
    low, high = _bounds(given.text(f"{_IS}.rollout_is_threshold"))
    weights: Recipe = {"kind": "mask", "low": low} if low else {"kind": "truncate"}
    weights |= {"level": level, "high": high}
    weights["normalise"] = given.flag(f"{_IS}.rollout_is_batch_normalize")
    return {f"{section}.{key}": value for key, value in weights.items()}


def _rejection(rule: tuple[str, str], written: str | None) -> Recipe:
    """Our rejection rule; veRL's ratio is its inverse, and a single bound b means 1/b to b."""
    (kind, level), (low, high) = rule, _bounds(written)
    if kind != "ratio":
        return {"kind": kind, "level": level, "high": high}
    return {"kind": kind, "level": level, "low": 1 / high, "high": 1 / low if low else high}


def _bounds(written: str | None) -> tuple[float | None, float]:
    """The bounds of ``high`` or ``low_high``; raises ``UserError``."""
    low, _, high = (written or "").strip(" '\"").rpartition("_")
    with suppress(ValueError):
        if float(high) > 0 and (not low or float(low) > 0):
            return float(low) if low else None, float(high)
    raise UserError(f"{_IS}: {written} has no bounds; write numbers above 0, as high or low_high")


def _optimizer_steps(given: Given, has_tags: bool) -> Recipe:
    """Steps, mini-batches and rates; veRL's warm-ups count rollouts, ours count optimizer steps."""
    ours: Recipe = {}
    batch = given.number("data.train_batch_size") or 1
    mini = given.number(f"{_ACTOR}.ppo_mini_batch_size") or batch
    size = given.number(f"{_ROLLOUT}.n_agent", f"{_ROLLOUT}.n") or 1
    ours["trainer.group_size"] = int(size)
    a_step = whole(batch * (size if has_tags else 1) / mini)
    ours["trainer.num_mini_batches"] = a_step
    epochs = given.steps("trainer.total_epochs", batch)
    total = given.number("trainer.total_training_steps") or epochs
    ours["trainer.num_steps"] = f"{UNSET}trainer.num_steps"
    if total:
        ours["trainer.num_steps"] = int(min(total, epochs or total))
    style = given.text(*(f"{_OPTIM}.{name}" for name in _STYLES))
    ours |= fall(given, style, f"{_OPTIM}.min_lr", f"{_OPTIM}.lr", f"{_OPTIM}.min_lr_ratio")
    if (rollouts := given.number(f"{_OPTIM}.lr_warmup_steps")) and rollouts > 0:
        ours["trainer.warmup_steps"] = int(rollouts) * a_step
    elif ratio := given.number(f"{_OPTIM}.lr_warmup_steps_ratio"):
        ours["trainer.warmup_steps"] = warmup(total, ratio, a_step)
    is_ppo = given.text("algorithm.adv_estimator") == "gae"
    if is_ppo and (ratio := given.number("critic.optim.lr_warmup_steps_ratio")):
        ours[f"{_CRITIC}.warmup_steps"] = warmup(total, ratio, a_step)
    return ours


def _placement(given: Given) -> Recipe:
    ours = machines(given.number("trainer.nnodes"), given.number("trainer.n_gpus_per_node"))
    ours |= cadence(given, "trainer.save_freq", "trainer.test_freq")
    if given.text(f"{_ROLLOUT}.name") in ("vllm", "sglang", "sglang_async"):
        ours["placement.engine.offload"] = True
    if (folder := given.text("trainer.default_local_dir")) is None:
        experiment = given.text("trainer.experiment_name") or "gsm8k"
        folder = f"checkpoints/{given.text('trainer.project_name')}/{experiment}"
    return ours | {"output_dir": folder}


def _is_search_r1(values: Mapping[str, Any]) -> bool:
    return f"{_ROLLOUT}.n_agent" in values or any(name.startswith("retriever.") for name in values)


VERL = read_trainer(
    "verl",
    lambda values: any(name.startswith("actor_rollout_ref.") for name in values),
    derive,
    {"losses": _LOSSES, "bypass_losses": _BYPASS_LOSSES, "rejections": _REJECTIONS},
    lambda values: "search_r1" if _is_search_r1(values) else "verl",
)
