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
    derived,
    leash,
    none,
)

KEYS = (
    ForeignKey("runner.experiment_name", "name"),
    ForeignKey("runner.output_dir", "output_dir"),
    derived("runner.max_steps", "trainer.num_steps", "-1: none"),
    derived("runner.val_check_interval", "evaluation.every", "-1: never"),
    ForeignKey("runner.save_interval", "trainer.checkpoint_every"),
    ForeignKey("runner.seq_length", "environment.max_tokens"),
    ForeignKey("runner.max_tokens_per_mbs", "trainer.max_tokens_per_micro_batch"),
    ForeignKey("cluster.num_nodes", "placement.num_nodes"),
    ForeignKey("algorithm.group_size", "trainer.group_size"),
    ForeignKey("algorithm.n_minibatches", "trainer.num_mini_batches"),
    ForeignKey(
        "algorithm.adv_type",
        "algorithm.advantage.kind",
        values={"grpo": "grpo", "grpo_dynamic": "grpo", "gae": "gae", "rloo": "rloo"},
    ),
    ForeignKey(
        "algorithm.loss_agg_func", "algorithm.aggregate.kind", values={"token-mean": "token_mean"}
    ),
    derived("algorithm.ratio_clip_eps", "algorithm.loss.low", "and high"),
    derived("algorithm.clip_ratio_low", "algorithm.loss.low"),
    derived("algorithm.clip_ratio_high", "algorithm.loss.high"),
    derived("algorithm.clip_ratio_c", "algorithm.loss.dual_clip", "null: none"),
    derived("algorithm.kl_beta", "algorithm.kl.coefficient", "0: none"),
    derived("algorithm.kl_penalty_type", "algorithm.kl.form", values=KL_FORMS),
    ForeignKey("algorithm.entropy_bonus", "algorithm.entropy_coefficient"),
    ForeignKey("algorithm.early_stop_imp_ratio", "algorithm.early_stop_ratio", "of a whole update"),
    ForeignKey("algorithm.recompute_logprobs", "algorithm.decoupled"),
    ForeignKey("algorithm.sampling_params.temperature", "rollout.temperature"),
    derived("data.train_data_paths", "data.train", "the first"),
    derived("data.val_data_paths", "data.test", "the first"),
    ForeignKey("data.rollout_batch_size", "trainer.questions_per_step"),
    ForeignKey("data.seed", "seed"),
    ForeignKey("agentloop.max_turns", "environment.max_turns"),
    ForeignKey("agentloop.max_tool_response_length", "environment.max_observation_tokens"),
    derived("tools.search.server_addr", "search.url"),
    ForeignKey("tools.search.topk", "search.topk"),
    ForeignKey("rollout.model.model_path", "model.path"),
    ForeignKey(
        "rollout.rollout_backend",
        "placement.engine.kind",
        values={"sglang": "sglang", "vllm": "vllm"},
    ),
    ForeignKey("rollout.tensor_parallel_size", "placement.engine.tensor_parallel"),
    ForeignKey("actor.optim.lr", "trainer.learning_rate"),
    ForeignKey("actor.optim.weight_decay", "trainer.weight_decay"),
    ForeignKey("actor.optim.clip_grad", "trainer.max_grad_norm"),
    derived("actor.lr_sched.lr_warmup_fraction", "trainer.warmup_steps", "of lr_decay_iters"),
    derived("actor.lr_sched.lr_decay_iters", "trainer.num_steps", "by n_minibatches"),
    derived("actor.model.recompute_granularity", "model.gradient_checkpointing", "any"),
    ForeignKey("actor.model.tensor_model_parallel_size", "placement.trainer.tensor_parallel"),
    *none("trainer.num_steps counts steps", "runner.max_epochs"),
    *none(MICRO, "runner.enable_dynamic_batch_size"),
    *none("forage train --resume", "runner.resume_dir"),
    *none("algorithm.advantage says what it divides by", "algorithm.normalize_advantages"),
    *none(
        "sampling from a cut distribution breaks the ratio",
        "algorithm.sampling_params.top_p algorithm.sampling_params.top_k",
    ),
    *none("the protocol's own tags end a turn", "algorithm.sampling_params.stop"),
    *none("environment.max_tokens bounds it", "algorithm.sampling_params.max_new_tokens"),
    *none("a prompt that is too long is refused", "data.max_prompt_length"),
    *none(SHUFFLED, "data.shuffle"),
    *none("the form of a file is recognised", "data.prompt_key data.answer_key"),
    *none("set placement.engine.arguments", "rollout.gpu_memory_utilization"),
    *none("the reward is exact match; one's own: reward.functions", "reward.reward_type"),
    *none("0.9", "actor.optim.adam_beta1"),
    *none("0.999: there is no key for it", "actor.optim.adam_beta2"),
    *none("1e-8: there is no key for it", "actor.optim.adam_eps"),
    *none("weights are float32; set model.dtype or compute_dtype", "actor.model.precision"),
    *none("seed", "actor.seed"),
    *none("algorithm.advantage: gae has a critic", "critic.use_critic_model"),
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
    ours: Recipe = {"algorithm.loss.kind": "clipped"}
    for side in ("low", "high"):
        bound = given.number(f"algorithm.clip_ratio_{side}", "algorithm.ratio_clip_eps")
        ours[f"algorithm.loss.{side}"] = bound or 0.2
    if dual := given.number("algorithm.clip_ratio_c"):
        ours["algorithm.loss.dual_clip"] = dual
    form = given.text("algorithm.kl_penalty_type") or "low_var_kl"
    ours |= leash(given.number("algorithm.kl_beta"), form, "loss")
    mini = given.number("algorithm.n_minibatches") or 1
    if updates := given.number("actor.lr_sched.lr_decay_iters"):
        ours["trainer.num_steps"] = max(1, int(updates // mini))
        fraction = given.number("actor.lr_sched.lr_warmup_fraction") or 0
        ours["trainer.warmup_steps"] = int(updates * fraction)
    if (steps := given.number("runner.max_steps")) and steps > 0:
        ours["trainer.num_steps"] = int(steps)
    if (every := given.number("runner.val_check_interval")) is not None:
        ours["evaluation.every"] = max(0, int(every))
    ours |= given.first_files("data.train_data_paths", "data.val_data_paths")
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
