"""The arguments of TRL's ``GRPOConfig``, from YAML, a command line or a call in Python."""

from __future__ import annotations

from forage.config.foreign.foreign_keys import (
    FALLS,
    LOGGED,
    MICRO,
    ForeignKey,
    ForeignTrainer,
    Given,
    Recipe,
    fall,
    leash,
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

KEYS = (
    ForeignKey("model_name_or_path", "model.path"),
    ForeignKey("dataset_name", note="name a file of questions in data.train"),
    ForeignKey("output_dir", "output_dir"),
    ForeignKey("run_name", "name"),
    ForeignKey("seed", "seed"),
    ForeignKey("learning_rate", "trainer.learning_rate"),
    ForeignKey("lr_scheduler_type", _END, "linear where it is not set", FALLS, True),
    ForeignKey("lr_scheduler_kwargs.min_lr_rate", _END, "", None, True),
    ForeignKey("lr_scheduler_kwargs.min_lr", _END, "by learning_rate", None, True),
    ForeignKey("warmup_steps", "trainer.warmup_steps"),
    ForeignKey("warmup_ratio", "trainer.warmup_steps", "of max_steps", None, True),
    ForeignKey("weight_decay", "trainer.weight_decay"),
    ForeignKey("max_grad_norm", "trainer.max_grad_norm"),
    ForeignKey("max_steps", "trainer.num_steps", "-1: none", None, True),
    ForeignKey("num_train_epochs", note="trainer.num_steps counts steps"),
    ForeignKey("num_iterations", "trainer.num_epochs"),
    ForeignKey("num_generations", "trainer.group_size"),
    ForeignKey(
        "per_device_train_batch_size",
        "trainer.questions_per_step",
        "with gradient_accumulation_steps, by num_generations, for one device",
        None,
        True,
    ),
    ForeignKey("gradient_accumulation_steps", "trainer.questions_per_step", "", None, True),
    ForeignKey(
        "generation_batch_size", "trainer.questions_per_step", "by num_generations", None, True
    ),
    ForeignKey("per_device_eval_batch_size", note="an evaluation plays as many as fit"),
    ForeignKey("steps_per_generation", note=MICRO),
    ForeignKey("max_prompt_length", note="a prompt that is too long is refused and never cut"),
    ForeignKey(
        "max_completion_length", "environment.max_tokens", "prompt and observations included"
    ),
    ForeignKey("temperature", "rollout.temperature"),
    ForeignKey("top_p", note="sampling from a cut distribution breaks the ratio: 1.0"),
    ForeignKey("top_k", note="sampling from a cut distribution breaks the ratio"),
    ForeignKey("beta", "algorithm.kl.coefficient", "k3 in the loss; 0: none", None, True),
    ForeignKey("epsilon", "algorithm.loss.low", "and high, unless epsilon_high is set", None, True),
    ForeignKey("epsilon_high", "algorithm.loss.high", "", None, True),
    ForeignKey("delta", "algorithm.loss.dual_clip", "of bad tokens' ratio", None, True),
    ForeignKey("loss_type", "algorithm.loss.kind", "and algorithm.aggregate", _LOSSES, True),
    ForeignKey("importance_sampling_level", "algorithm.loss.kind", "sequence: gspo", None, True),
    ForeignKey("scale_rewards", "algorithm.advantage.normalise_by_std", "", _SCALED, True),
    ForeignKey("mask_truncated_completions", note="algorithm.overlong has a penalty for them"),
    ForeignKey("use_vllm", "placement.engine.kind", "true: vllm", None, True),
    ForeignKey("vllm_mode", "placement.engine.offload", "colocate: true", None, True),
    ForeignKey("vllm_server_base_url", "placement.engine.urls", "", None, True),
    ForeignKey("vllm_tensor_parallel_size", "placement.engine.tensor_parallel"),
    ForeignKey("vllm_gpu_memory_utilization", note="set placement.engine.arguments"),
    ForeignKey(
        "vllm_importance_sampling_correction",
        "algorithm.correction.weights.kind",
        "true: truncate",
        None,
        True,
    ),
    ForeignKey("vllm_importance_sampling_cap", "algorithm.correction.weights.high", "", None, True),
    ForeignKey(
        "bf16", note="weights are float32; model.arithmetic or compute_dtype set the products"
    ),
    ForeignKey("gradient_checkpointing", "model.gradient_checkpointing"),
    ForeignKey("use_peft", "model.lora", "true: {}", None, True),
    ForeignKey("lora_r", "model.lora.rank"),
    ForeignKey("lora_alpha", "model.lora.alpha"),
    ForeignKey("lora_dropout", note="0 in training: the sampler would be another policy"),
    ForeignKey("lora_target_modules", "model.lora.target_modules", "all-linear: none", None, True),
    ForeignKey("save_steps", "trainer.checkpoint_every"),
    ForeignKey("save_strategy", note="trainer.checkpoint_every"),
    ForeignKey("save_total_limit", "trainer.keep_checkpoints"),
    ForeignKey("eval_steps", "evaluation.every"),
    ForeignKey("logging_steps", note="every step is recorded"),
    ForeignKey("report_to", note=LOGGED),
    ForeignKey("log_completions", note="every episode is recorded; forage view shows them"),
)

_START = {
    "environment.protocol": "tools",
    "environment.prompt": "tools",
    "search.url": "http://127.0.0.1:8000",
    "reward.answer": "em",
    "algorithm.advantage.kind": "grpo",
}


def derive(given: Given) -> Recipe:
    """What stands in several keys."""
    ours = _loss(given) | _engine(given)
    size = given.number("num_generations") or 8
    ours["trainer.group_size"] = int(size)
    batch = given.number("generation_batch_size")
    if batch is None and (each := given.number("per_device_train_batch_size")):
        batch = each * (given.number("gradient_accumulation_steps") or 1)
    if batch:
        ours["trainer.questions_per_step"] = whole(batch / size)
    if (steps := given.number("max_steps")) and steps > 0:
        ours["trainer.num_steps"] = int(steps)
        if ratio := given.number("warmup_ratio"):
            ours["trainer.warmup_steps"] = int(steps * ratio)
    ours |= leash(given.number("beta"), "k3", "loss")
    if not _SCALED.get(str(given.values.get("scale_rewards", "group")).lower(), True):
        ours["algorithm.advantage.normalise_by_std"] = False
    return ours | _fall(given, steps) | _lora(given)


def _lora(given: Given) -> Recipe:
    layers = given.values.get("lora_target_modules")
    if layers and layers != "all-linear":
        return {"model.lora.target_modules": [layers] if isinstance(layers, str) else layers}
    has_keys = any(given.number(name) for name in ("lora_r", "lora_alpha"))
    return {"model.lora": {}} if given.flag("use_peft") and not has_keys else {}


def _fall(given: Given, steps: float | None) -> Recipe:
    """The schedule, which is linear where none is named: its last step has one share of all."""
    style = given.text("lr_scheduler_type") or "linear"
    ratio = given.number("lr_scheduler_kwargs.min_lr_rate")
    if style == "linear" and steps and steps > 0:
        ratio = 1 / steps
    floor = given.number("lr_scheduler_kwargs.min_lr")
    return fall(style, ratio, floor, given.number("learning_rate") or 1e-6)


def _loss(given: Given) -> Recipe:
    loss_type = given.text("loss_type") or "dapo"
    kind = _LOSSES.get(loss_type, "clipped")
    if given.text("importance_sampling_level") == "sequence":
        kind, loss_type = "gspo", "grpo"
    ours: Recipe = {"algorithm.loss.kind": kind}
    ours["algorithm.aggregate.kind"] = _AGGREGATES.get(loss_type, "token_mean")
    if ours["algorithm.aggregate.kind"] == "constant":
        tokens = given.number("max_completion_length") or 256
        ours["algorithm.aggregate.tokens"] = int(tokens)
    if kind != "sapo":
        low = given.number("epsilon") or 0.2
        ours["algorithm.loss.low"] = low
        ours["algorithm.loss.high"] = given.number("epsilon_high") or low
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


TRL = ForeignTrainer(
    "TRL",
    lambda values: bool({"num_generations", "max_completion_length", "use_vllm"} & {*values}),
    KEYS,
    _START,
    derive,
)
