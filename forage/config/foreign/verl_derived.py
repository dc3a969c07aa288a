"""What several of veRL's or Search-R1's keys say together.

``verl_keys.py`` has the table of single keys and the defaults of both.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from forage.config.foreign.foreign_keys import (
    UNSET,
    Given,
    Recipe,
    cadence,
    fall,
    leash,
    machines,
    warmup,
    whole,
)

ACTOR, ROLLOUT = "actor_rollout_ref.actor", "actor_rollout_ref.rollout"
OPTIM = f"{ACTOR}.optim"
STYLES = ("lr_scheduler_type", "warmup_style", "lr_decay_style")
LOSSES = {
    **{"vanilla": "clipped", "gspo": "gspo", "geo_mean": "gmpo", "cispo": "cispo"},
    **{"sapo": "sapo", "clip_cov": "clip_cov", "kl_cov": "kl_cov"},
}
_WITH_BOUNDS = ("clipped", "gspo", "cispo", "clip_cov")
REJECTIONS = {  # their name: our kind and level
    **{"token_k1": ("ratio", "token"), "seq_sum_k1": ("ratio", "sequence")},
    **{"seq_mean_k1": ("ratio", "geometric"), "token_k2": ("k2", "token")},
    **{"token_k3": ("k3", "token"), "seq_sum_k2": ("k2", "sum"), "seq_sum_k3": ("k3", "sum")},
    **{"seq_mean_k2": ("k2", "mean"), "seq_mean_k3": ("k3", "mean")},
    **{"seq_max_k2": ("k2", "max"), "seq_max_k3": ("k3", "max")},
}
CRITIC = "algorithm.advantage.critic"
IS = "algorithm.rollout_correction"
TURNS = f"{ROLLOUT}.multi_turn"
TOOL = "tools.0.config"


def derive_verl(given: Given) -> Recipe:
    """What several keys say together, or what Search-R1 means by them and veRL does not."""
    has_tags = is_search_r1(given.values)
    ours = _environment(given, has_tags) | _leash(given, has_tags)
    ours |= _loss(given, has_tags) | _correction(given)
    ours |= _optimizer_steps(given, has_tags) | _placement(given)
    if rank := given.number("actor_rollout_ref.model.lora_rank"):
        ours["model.lora.rank"] = int(rank)
        ours["model.lora.alpha"] = given.number("actor_rollout_ref.model.lora_alpha") or 16
    estimator = given.text("algorithm.adv_estimator")
    if estimator == "grpo" and given.value("algorithm.norm_adv_by_std_in_grpo") is not None:
        is_divided = given.flag("algorithm.norm_adv_by_std_in_grpo")
        ours["algorithm.advantage.normalise_by_std"] = is_divided
    if estimator == "reinforce_plus_plus_baseline":
        ours["algorithm.advantage.baseline"] = "group"
    return ours


def _environment(given: Given, has_tags: bool) -> Recipe:
    prompt, reply = given.number("data.max_prompt_length"), given.number("data.max_response_length")
    ours: Recipe = {
        "environment.dialect": "search_r1" if has_tags else "verl",
        "environment.protocol": "tags" if has_tags else "tools",
        "environment.prompt": "search-r1" if has_tags else "tools",
        "environment.has_final_turn": has_tags,
        # Search-R1's prompt is the whole transcript; veRL's reply is all that follows the prompt.
        "environment.max_tokens": int((prompt or 0) + (0 if has_tags else reply or 0)),
        "environment.max_turn_tokens": int(reply or 0),
    }
    ours |= given.first_files("data.train_files", "data.val_files")
    url = given.text("retriever.url" if has_tags else f"{TOOL}.retrieval_service_url")
    if url is not None:
        ours["search.url"] = url.rstrip("/").removesuffix("/retrieve")
    if questions := given.number("data.val_data_num"):
        ours["evaluation.num_questions"] = int(questions)
    if has_tags:
        ours["environment.max_turns"] = int(given.number("max_turns") or 10)
        if not given.flag(f"{ACTOR}.state_masking"):
            ours["algorithm.train_observations"] = True
        return ours
    turns = given.number(f"{TURNS}.max_assistant_turns", f"{TURNS}.max_turns")
    ours["environment.max_turns"] = int(turns or (reply or 0) // 3)  # as many as fit, in veRL
    if given.text(f"{ROLLOUT}.name") != "sglang_async":  # its rollout of 2025 cut no reply
        cut = given.number(f"{TURNS}.max_tool_response_length")
        ours["environment.max_reply_characters"] = int(cut or 256)
    return ours | _tool(given)


def _tool(given: Given) -> Recipe:
    """How patient the tool's client is; the tighter of its two limits holds."""
    ours: Recipe = {}
    limits = [given.number(f"{TOOL}.{name}") for name in ("num_workers", "rate_limit")]
    if known := [int(limit) for limit in limits if limit is not None]:
        ours["search.max_concurrent_requests"] = min(known)
    if timeout := given.number(f"{TOOL}.timeout"):
        ours["search.timeout_s"] = float(timeout)
        ours["search.deadline_s"] = 2.0 * timeout
    return ours


def _leash(given: Given, has_tags: bool) -> Recipe:
    if given.flag(f"{ACTOR}.use_kl_loss"):
        coefficient = given.number(f"{ACTOR}.kl_loss_coef")
        return leash(coefficient, lambda: given.text(f"{ACTOR}.kl_loss_type"), "loss")
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
    kind = LOSSES.get(given.text(f"{ACTOR}.policy_loss.loss_mode") or "vanilla", "clipped")
    ours: Recipe = {"algorithm.loss.kind": kind}
    if kind in _WITH_BOUNDS:
        for side in ("low", "high"):
            bound = given.number(f"{ACTOR}.clip_ratio_{side}", f"{ACTOR}.clip_ratio")
            ours[f"algorithm.loss.{side}"] = bound
    if kind == "clipped" and not has_tags:
        ours["algorithm.loss.dual_clip"] = given.number(f"{ACTOR}.clip_ratio_c")
    if given.text(f"{ACTOR}.loss_agg_mode") == "seq-mean-token-sum-norm":
        ours["algorithm.aggregate.tokens"] = int(given.number("data.max_response_length") or 1024)
    if kind in ("gspo", "gmpo"):
        ours["algorithm.aggregate.kind"] = "sequence_mean"
    return ours


def _correction(given: Given) -> Recipe:
    """Weights and rejection of ``rollout_correction``; a lone bound b of a ratio means 1/b to b."""
    ours: Recipe = {}
    is_bypassed = given.flag(f"{IS}.bypass_mode")
    if is_bypassed:
        ours["algorithm.decoupled"] = False
    if not is_bypassed and (level := given.text(f"{IS}.rollout_is")):
        high = given.number(f"{IS}.rollout_is_threshold") or 2.0
        is_normalised = given.flag(f"{IS}.rollout_is_batch_normalize")
        weights = {"kind": "truncate", "level": level, "high": high, "normalise": is_normalised}
        ours |= {f"algorithm.correction.weights.{key}": value for key, value in weights.items()}
    rule = REJECTIONS.get(given.text(f"{IS}.rollout_rs") or "")
    bounds = given.text(f"{IS}.rollout_rs_threshold") if rule else None
    if rule and (found := re.fullmatch(r"(?:([\d.]+)_)?([\d.]+)", bounds or "")):
        high = float(found[2])
        reject = {"kind": rule[0], "level": rule[1], "high": high}
        if rule[0] == "ratio":
            reject["low"] = float(found[1] or 1 / high)
        ours |= {f"algorithm.correction.reject.{key}": value for key, value in reject.items()}
    return ours


def _optimizer_steps(given: Given, has_tags: bool) -> Recipe:
    """Steps, mini-batches and rates; their warm-ups count rollouts, ours optimizer steps."""
    ours: Recipe = {}
    batch = given.number("data.train_batch_size") or 1
    mini = given.number(f"{ACTOR}.ppo_mini_batch_size") or batch
    size = given.number(f"{ROLLOUT}.n_agent", f"{ROLLOUT}.n") or 1
    ours["trainer.group_size"] = int(size)
    a_step = whole(batch * (size if has_tags else 1) / mini)
    ours["trainer.num_mini_batches"] = a_step
    epochs = given.steps("trainer.total_epochs", batch)
    total = given.number("trainer.total_training_steps") or epochs
    ours["trainer.num_steps"] = f"{UNSET}trainer.num_steps"
    if total:
        ours["trainer.num_steps"] = int(min(total, epochs or total))
    style = given.text(*(f"{OPTIM}.{name}" for name in STYLES))
    ours |= fall(given, style, f"{OPTIM}.min_lr", f"{OPTIM}.lr", f"{OPTIM}.min_lr_ratio")
    if (rollouts := given.number(f"{OPTIM}.lr_warmup_steps")) and rollouts > 0:
        ours["trainer.warmup_steps"] = int(rollouts) * a_step
    elif ratio := given.number(f"{OPTIM}.lr_warmup_steps_ratio"):
        ours["trainer.warmup_steps"] = warmup(total, ratio, a_step)
    is_ppo = given.text("algorithm.adv_estimator") == "gae"
    if is_ppo and (ratio := given.number("critic.optim.lr_warmup_steps_ratio")):
        ours[f"{CRITIC}.warmup_steps"] = warmup(total, ratio, a_step)
    return ours


def _placement(given: Given) -> Recipe:
    ours = machines(given.number("trainer.nnodes"), given.number("trainer.n_gpus_per_node"))
    ours |= cadence(given, "trainer.save_freq", "trainer.test_freq")
    if given.text(f"{ROLLOUT}.name") in ("vllm", "sglang", "sglang_async"):
        ours["placement.engine.offload"] = True
    if (folder := given.text("trainer.default_local_dir")) is None:
        experiment = given.text("trainer.experiment_name") or "gsm8k"
        folder = f"checkpoints/{given.text('trainer.project_name')}/{experiment}"
    return ours | {"output_dir": folder}


def is_search_r1(values: Mapping[str, Any]) -> bool:
    return f"{ROLLOUT}.n_agent" in values or any(name.startswith("retriever.") for name in values)
