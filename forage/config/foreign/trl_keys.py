"""The arguments of TRL's ``GRPOConfig``, from YAML, a command line or a call in Python."""

from __future__ import annotations

from forage.config.foreign.foreign_keys import (
    CUT,
    FALLS,
    LOGGED,
    MICRO,
    SERVER,
    UNSET,
    ForeignKey,
    ForeignTrainer,
    Given,
    Recipe,
    derived,
    fall,
    leash,
    no_place,
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

_NO_PLACE = f"""
name a file of questions in data.train: dataset_name
set trainer.num_steps, unless max_steps is set: num_train_epochs
an evaluation plays as many episodes as fit: per_device_eval_batch_size
{MICRO}: steps_per_generation
a prompt that is too long is refused, never cut: max_prompt_length
{CUT}: top_p top_k
algorithm.overlong has a penalty for them: mask_truncated_completions
{SERVER}: vllm_gpu_memory_utilization
weights are float32; model.arithmetic or compute_dtype set the products: bf16
0 in training, or the sampler would be another policy: lora_dropout
trainer.checkpoint_every: save_strategy
every step is recorded: logging_steps
{LOGGED}: report_to
every episode is recorded; forage view shows them: log_completions
"""

KEYS = (
    ForeignKey("model_name_or_path", "model.path"),
    ForeignKey("output_dir", "output_dir"),
    ForeignKey("run_name", "name"),
    ForeignKey("seed", "seed"),
    ForeignKey("learning_rate", "trainer.learning_rate"),
    derived("lr_scheduler_type", _END, "linear where it is not set", FALLS),
    derived("lr_scheduler_kwargs.min_lr_rate", _END),
    derived("lr_scheduler_kwargs.min_lr", _END, "by learning_rate"),
    ForeignKey("warmup_steps", "trainer.warmup_steps"),
    derived("warmup_ratio", "trainer.warmup_steps", "of max_steps"),
    ForeignKey("weight_decay", "trainer.weight_decay"),
    ForeignKey("max_grad_norm", "trainer.max_grad_norm"),
    derived("max_steps", "trainer.num_steps", "-1: none"),
    ForeignKey("num_iterations", "trainer.num_epochs"),
    ForeignKey("num_generations", "trainer.group_size"),
    derived(
        "per_device_train_batch_size",
        "trainer.questions_per_step",
        "with gradient_accumulation_steps, by num_generations, for one device",
    ),
    derived("gradient_accumulation_steps", "trainer.questions_per_step"),
    derived("generation_batch_size", "trainer.questions_per_step", "by num_generations"),
    ForeignKey(
        "max_completion_length", "environment.max_tokens", "prompt and observations included"
    ),
    ForeignKey("temperature", "rollout.temperature"),
    derived("beta", "algorithm.kl.coefficient", "k3 in the loss; 0: none"),
    derived("epsilon", "algorithm.loss.low", "and high, unless epsilon_high is set"),
    derived("epsilon_high", "algorithm.loss.high"),
    derived("delta", "algorithm.loss.dual_clip", "of bad tokens' ratio"),
    derived("loss_type", "algorithm.loss.kind", "and algorithm.aggregate", _LOSSES),
    derived("importance_sampling_level", "algorithm.loss.kind", "sequence: gspo"),
    derived("scale_rewards", "algorithm.advantage.normalise_by_std", values=_SCALED),
    derived("use_vllm", "placement.engine.kind", "true: vllm"),
    derived("vllm_mode", "placement.engine.offload", "colocate: true"),
    derived("vllm_server_base_url", "placement.engine.urls"),
    ForeignKey("vllm_tensor_parallel_size", "placement.engine.tensor_parallel"),
    derived(
        "vllm_importance_sampling_correction", "algorithm.correction.weights.kind", "true: truncate"
    ),
    derived("vllm_importance_sampling_cap", "algorithm.correction.weights.high"),
    ForeignKey("gradient_checkpointing", "model.gradient_checkpointing"),
    derived("use_peft", "model.lora", "true: {}"),
    ForeignKey("lora_r", "model.lora.rank"),
    ForeignKey("lora_alpha", "model.lora.alpha"),
    derived("lora_target_modules", "model.lora.target_modules", "all-linear: none"),
    ForeignKey("save_steps", "trainer.checkpoint_every"),
    ForeignKey("save_total_limit", "trainer.keep_checkpoints"),
    ForeignKey("eval_steps", "evaluation.every"),
    *no_place(_NO_PLACE),
)

_START = {
    "environment.protocol": "tools",
    "environment.prompt": "tools",
    "search.url": "http://127.0.0.1:8000",
    "reward.answer": "em",
    "algorithm.advantage.kind": "grpo",
}


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
    """The schedule, by default a line, whose last step has one share of all."""
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


TRL = ForeignTrainer(
    "TRL",
    lambda values: bool({"num_generations", "max_completion_length", "use_vllm"} & {*values}),
    KEYS,
    _START,
    derive,
    "dataset_name",
)
