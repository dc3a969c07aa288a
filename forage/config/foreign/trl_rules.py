"""Rules for the arguments of TRL that are read together; ``trl.yaml`` lists all of them."""

from __future__ import annotations

from forage.config.foreign.foreign_keys import (
    UNSET,
    Given,
    Recipe,
    fall,
    leash,
    read_trainer,
    warmup,
    whole,
)

_LOSSES = {
    **{"grpo": "clipped", "bnpo": "clipped", "dapo": "clipped", "dr_grpo": "clipped"},
    **{"cispo": "cispo", "sapo": "sapo"},
}
_AGGREGATES = {
    **{"grpo": "sequence_mean", "bnpo": "token_mean", "dapo": "token_mean"},
    **{"dr_grpo": "constant", "cispo": "token_mean", "sapo": "sequence_mean"},
}

_SCALED = {"false": False, "none": False, "true": True, "group": True}
_END = "trainer.final_learning_rate_ratio"


def derive(given: Given) -> Recipe:
    ours = _loss(given) | _engine(given)
    size = given.number("num_generations")
    size = 8 if size is None else size
    ours["trainer.group_size"] = int(size)
    batch = given.number("generation_batch_size")
    if batch is None and (each := given.number("per_device_train_batch_size")):
        batch = each * (given.number("gradient_accumulation_steps") or 1)
    if batch:
        ours["trainer.questions_per_step"] = whole(batch / size)
    steps = given.number("max_steps")
    steps = int(steps) if steps and steps > 0 else f"{UNSET}trainer.num_steps"
    ours["trainer.num_steps"] = steps
    if ratio := given.number("warmup_ratio"):
        ours["trainer.warmup_steps"] = warmup(steps, ratio)
    ours |= leash(given.number("beta"), lambda: "k3", "loss")
    if not _SCALED.get((given.text("scale_rewards") or "group").lower(), True):
        ours["algorithm.advantage.normalise_by_std"] = False
    return ours | _fall(given, steps) | _lora(given)


def _lora(given: Given) -> Recipe:
    layers = given.value("lora_target_modules")
    if layers and layers != "all-linear":
        return {"model.lora.target_modules": [layers] if isinstance(layers, str) else layers}
    has_keys = any(given.number(name) for name in ("lora_r", "lora_alpha"))
    return {"model.lora": {}} if given.flag("use_peft") and not has_keys else {}


def _fall(given: Given, steps: int | str) -> Recipe:
    """The learning-rate schedule, by default linear down to 1 / ``steps`` in the last step."""
    style = given.text("lr_scheduler_type") or "linear"
    if style == "linear":
        return {_END: 1 / steps if isinstance(steps, int) else 0.0}
    kwargs = "lr_scheduler_kwargs.min_lr"
    return fall(given, style, kwargs, "learning_rate", f"{kwargs}_rate")


def _loss(given: Given) -> Recipe:
    loss_type = given.text("loss_type") or "dapo"
    kind = _LOSSES.get(loss_type.lower(), "clipped")
    if given.text("importance_sampling_level") == "sequence":
        kind, loss_type = "gspo", "grpo"
    ours: Recipe = {"algorithm.loss.kind": kind}
    ours["algorithm.aggregate.kind"] = _AGGREGATES.get(loss_type, "token_mean")
    if ours["algorithm.aggregate.kind"] == "constant":
        tokens = given.number("max_completion_length") or 256
        ours["algorithm.aggregate.tokens"] = int(tokens)
    if kind != "sapo":
        low, high = given.number("epsilon"), given.number("epsilon_high")
        ours["algorithm.loss.low"] = low = 0.2 if low is None else low
        ours["algorithm.loss.high"] = low if high is None else high
    if kind == "clipped" and (delta := given.number("delta")):
        ours["algorithm.loss.dual_clip"] = delta
    return ours


def _engine(given: Given) -> Recipe:
    if not given.flag("use_vllm"):
        return {}
    ours: Recipe = {"model.device": "cuda", "placement.engine.kind": "vllm"}
    if url := given.text("vllm_server_base_url"):
        ours["placement.engine.urls"] = [url]
    elif given.text("vllm_mode") == "colocate":
        ours["placement.engine.offload"] = True
        ours["placement.trainer.num_ranks"] = 1
    if given.flag("vllm_importance_sampling_correction"):
        ours["algorithm.decoupled"] = True
        ours["algorithm.correction.weights.kind"] = "truncate"
        if cap := given.number("vllm_importance_sampling_cap"):
            ours["algorithm.correction.weights.high"] = cap
    return ours


TRL = read_trainer(
    "trl",
    lambda values: bool({"num_generations", "max_completion_length", "use_vllm"} & {*values}),
    derive,
    {"losses": _LOSSES, "scaled": _SCALED},
)
