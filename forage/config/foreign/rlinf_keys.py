"""RLinf's settings for its Search-R1 example."""

from __future__ import annotations

from forage.config.foreign.foreign_keys import (
    KL_FORMS,
    MICRO,
    SHUFFLED,
    ForeignKey,
    ForeignTrainer,
    Given,
    Recipe,
    leash,
)

_STOPS = "the protocol's own tags end a turn"

KEYS = (
    ForeignKey("runner.experiment_name", "name"),
    ForeignKey("runner.output_dir", "output_dir"),
    ForeignKey("runner.max_steps", "trainer.num_steps", "-1: none", None, True),
    ForeignKey("runner.max_epochs", note="trainer.num_steps counts steps"),
    ForeignKey("runner.val_check_interval", "evaluation.every", "-1: never", None, True),
    ForeignKey("runner.save_interval", "trainer.checkpoint_every"),
    ForeignKey("runner.seq_length", "environment.max_tokens"),
    ForeignKey("runner.max_tokens_per_mbs", "trainer.max_tokens_per_micro_batch"),
    ForeignKey("runner.enable_dynamic_batch_size", note=MICRO),
    ForeignKey("runner.resume_dir", note="forage train --resume"),
    ForeignKey("cluster.num_nodes", "placement.num_nodes"),
    ForeignKey("algorithm.group_size", "trainer.group_size"),
    ForeignKey("algorithm.n_minibatches", "trainer.num_mini_batches"),
    ForeignKey(
        "algorithm.adv_type",
        "algorithm.advantage.kind",
        "",
        {"grpo": "grpo", "grpo_dynamic": "grpo", "gae": "gae", "rloo": "rloo"},
    ),
    ForeignKey(
        "algorithm.loss_agg_func", "algorithm.aggregate.kind", "", {"token-mean": "token_mean"}
    ),
    ForeignKey("algorithm.ratio_clip_eps", "algorithm.loss.low", "and high", None, True),
    ForeignKey("algorithm.clip_ratio_low", "algorithm.loss.low", "", None, True),
    ForeignKey("algorithm.clip_ratio_high", "algorithm.loss.high", "", None, True),
    ForeignKey("algorithm.clip_ratio_c", "algorithm.loss.dual_clip", "null: none", None, True),
    ForeignKey("algorithm.kl_beta", "algorithm.kl.coefficient", "0: none", None, True),
    ForeignKey("algorithm.kl_penalty_type", "algorithm.kl.form", "", KL_FORMS, True),
    ForeignKey("algorithm.entropy_bonus", "algorithm.entropy_coefficient"),
    ForeignKey("algorithm.early_stop_imp_ratio", "algorithm.early_stop_ratio", "of a whole update"),
    ForeignKey("algorithm.recompute_logprobs", "algorithm.decoupled"),
    ForeignKey(
        "algorithm.normalize_advantages", note="algorithm.advantage says what it divides by"
    ),
    ForeignKey("algorithm.sampling_params.temperature", "rollout.temperature"),
    ForeignKey(
        "algorithm.sampling_params.top_p", note="sampling from a cut distribution breaks the ratio"
    ),
    ForeignKey(
        "algorithm.sampling_params.top_k", note="sampling from a cut distribution breaks the ratio"
    ),
    ForeignKey("algorithm.sampling_params.stop", note=_STOPS),
    ForeignKey("algorithm.sampling_params.max_new_tokens", note="environment.max_tokens bounds it"),
    ForeignKey("data.train_data_paths", "data.train", "the first", None, True),
    ForeignKey("data.val_data_paths", "data.test", "the first", None, True),
    ForeignKey("data.rollout_batch_size", "trainer.questions_per_step"),
    ForeignKey("data.max_prompt_length", note="a prompt that is too long is refused"),
    ForeignKey("data.seed", "seed"),
    ForeignKey("data.shuffle", note=SHUFFLED),
    ForeignKey("data.prompt_key", note="the form of a file is recognised"),
    ForeignKey("data.answer_key", note="the form of a file is recognised"),
    ForeignKey("agentloop.max_turns", "environment.max_turns"),
    ForeignKey("agentloop.max_tool_response_length", "environment.max_observation_tokens"),
    ForeignKey("tools.search.server_addr", "search.url", "", None, True),
    ForeignKey("tools.search.topk", "search.topk"),
    ForeignKey("rollout.model.model_path", "model.path"),
    ForeignKey(
        "rollout.rollout_backend", "placement.engine.kind", "", {"sglang": "sglang", "vllm": "vllm"}
    ),
    ForeignKey("rollout.tensor_parallel_size", "placement.engine.tensor_parallel"),
    ForeignKey("rollout.gpu_memory_utilization", note="set placement.engine.arguments"),
    ForeignKey("reward.reward_type", note="the reward is exact match; one's own: reward.functions"),
    ForeignKey("actor.optim.lr", "trainer.learning_rate"),
    ForeignKey("actor.optim.weight_decay", "trainer.weight_decay"),
    ForeignKey("actor.optim.clip_grad", "trainer.max_grad_norm"),
    ForeignKey("actor.optim.adam_beta1", note="0.9"),
    ForeignKey("actor.optim.adam_beta2", note="0.999: there is no key for it"),
    ForeignKey("actor.optim.adam_eps", note="1e-8: there is no key for it"),
    ForeignKey(
        "actor.lr_sched.lr_warmup_fraction", "trainer.warmup_steps", "of lr_decay_iters", None, True
    ),
    ForeignKey(
        "actor.lr_sched.lr_decay_iters", "trainer.num_steps", "by n_minibatches", None, True
    ),
    ForeignKey(
        "actor.model.recompute_granularity", "model.gradient_checkpointing", "any", None, True
    ),
    ForeignKey("actor.model.tensor_model_parallel_size", "placement.trainer.tensor_parallel"),
    ForeignKey(
        "actor.model.precision", note="weights are float32; set model.dtype or compute_dtype"
    ),
    ForeignKey("actor.seed", note="seed"),
    ForeignKey("critic.use_critic_model", note="algorithm.advantage: gae has a critic"),
)

_START = {
    "model.dtype": "float32",
    "model.device": "cuda",
    "environment.protocol": "tags",
    "environment.dialect": "rlinf",
    "environment.prompt": "search-r1",
    "environment.has_final_turn": False,
    "environment.max_turn_tokens": 500,
    "search.url": "http://127.0.0.1:8000",
    "rollout.max_concurrent_episodes": 1024,
    "reward.answer": "em",
    "reward.max_answer_tags": 10,
    "reward.many_answers_factor": 0.25,
    "algorithm.correction": {},
    "placement.engine.offload": True,
}


def derive(given: Given) -> Recipe:
    """What stands in several keys."""
    ours: Recipe = {"algorithm.loss.kind": "clipped"}
    for side in ("low", "high"):
        bound = given.number(f"algorithm.clip_ratio_{side}", "algorithm.ratio_clip_eps")
        ours[f"algorithm.loss.{side}"] = bound or 0.2
    if dual := given.number("algorithm.clip_ratio_c"):
        ours["algorithm.loss.dual_clip"] = dual
    form = given.text("algorithm.kl_penalty_type") or "low_var_kl"
    ours |= leash(given.number("algorithm.kl_beta"), form, "loss")
    mini, updates = (
        given.number("algorithm.n_minibatches") or 1,
        given.number("actor.lr_sched.lr_decay_iters"),
    )
    if updates:
        ours["trainer.num_steps"] = max(1, int(updates // mini))
        fraction = given.number("actor.lr_sched.lr_warmup_fraction") or 0
        ours["trainer.warmup_steps"] = int(updates * fraction)
    if (steps := given.number("runner.max_steps")) and steps > 0:
        ours["trainer.num_steps"] = int(steps)
    if (every := given.number("runner.val_check_interval")) is not None:
        ours["evaluation.every"] = max(0, int(every))
    for theirs, name in (("train", "data.train"), ("val", "data.test")):
        paths = given.values.get(f"data.{theirs}_data_paths")
        if paths:
            ours[name] = paths[0] if isinstance(paths, list) else paths
    if address := given.text("tools.search.server_addr"):
        ours["search.url"] = address if "://" in address else f"http://{address}"
    if "actor.model.recompute_granularity" in given.values:
        ours["model.gradient_checkpointing"] = True
    if (given.number("cluster.num_nodes") or 1) > 1:
        ours["placement.cluster"] = "ray"
    return ours


RLINF = ForeignTrainer(
    "RLinf",
    lambda values: any(name.startswith(("runner.", "agentloop.")) for name in values),
    KEYS,
    _START,
    derive,
)
