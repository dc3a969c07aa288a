"""veRL's settings, and those of Search-R1, which is written on top of an older veRL."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from forage.config.foreign.foreign_keys import (
    FALLS,
    KL_FORMS,
    LOGGED,
    MICRO,
    SHUFFLED,
    ForeignKey,
    ForeignTrainer,
    Given,
    Recipe,
    derived,
    fall,
    leash,
    none,
    whole,
)

_ACTOR, _ROLLOUT = "actor_rollout_ref.actor", "actor_rollout_ref.rollout"
_OPTIM = f"{_ACTOR}.optim"
_STYLES = ("lr_scheduler_type", "warmup_style", "lr_decay_style")
_LOSSES = {
    **{"vanilla": "clipped", "gspo": "gspo", "geo_mean": "gmpo", "cispo": "cispo"},
    **{"sapo": "sapo", "clip_cov": "clip_cov", "kl_cov": "kl_cov"},
}
_WITH_BOUNDS = ("clipped", "gspo", "cispo", "clip_cov")
_HOST = "placement.engine.offload lets all states rest in host memory while servers sample"
_CRITIC = "algorithm.advantage.critic"
_END = "trainer.final_learning_rate_ratio"

KEYS = (
    derived("data.train_files", "data.train", "the first"),
    derived("data.val_files", "data.test", "the first"),
    ForeignKey("data.train_batch_size", "trainer.questions_per_step"),
    derived("data.max_prompt_length", "environment.max_tokens", "with what follows it"),
    ForeignKey("data.max_response_length", "environment.max_turn_tokens"),
    ForeignKey("data.max_obs_length", "environment.max_observation_tokens"),
    ForeignKey("data.seed", "seed"),
    ForeignKey(
        "algorithm.adv_estimator",
        "algorithm.advantage.kind",
        "reinforce_plus_plus_baseline: reinforce_plus_plus with baseline: group",
        {
            **{"gae": "gae", "grpo": "grpo", "rloo": "rloo", "remax": "remax"},
            **{"reinforce_plus_plus": "reinforce_plus_plus", "grpo_passk": "pass_at_k"},
            "reinforce_plus_plus_baseline": "reinforce_plus_plus",
            "optimal_token_baseline": "optimal_token",
            "tir_optimal_token_baseline": "optimal_token",
        },
    ),
    derived("algorithm.gamma", "algorithm.advantage.discount", "with gae"),
    derived("algorithm.lam", "algorithm.advantage.gae_lambda", "with gae"),
    derived(
        "algorithm.norm_adv_by_std_in_grpo", "algorithm.advantage.normalise_by_std", "with grpo"
    ),
    derived("algorithm.use_kl_in_reward", "algorithm.kl.place", "true: reward"),
    derived("algorithm.kl_penalty", "algorithm.kl.form", "in the reward", KL_FORMS),
    derived("algorithm.kl_ctrl.kl_coef", "algorithm.kl.coefficient", "in the reward"),
    ForeignKey("actor_rollout_ref.model.path", "model.path"),
    ForeignKey(
        "actor_rollout_ref.model.enable_gradient_checkpointing", "model.gradient_checkpointing"
    ),
    ForeignKey("actor_rollout_ref.model.lora_rank", "model.lora.rank"),
    ForeignKey("actor_rollout_ref.model.lora_alpha", "model.lora.alpha"),
    ForeignKey(f"{_OPTIM}.lr", "trainer.learning_rate"),
    derived(
        f"{_OPTIM}.lr_warmup_steps_ratio",
        "trainer.warmup_steps",
        "of trainer.total_training_steps, in optimizer steps",
    ),
    derived(f"{_OPTIM}.lr_warmup_steps", "trainer.warmup_steps", "in optimizer steps"),
    *(derived(f"{_OPTIM}.{name}", _END, values=FALLS) for name in _STYLES),
    derived(f"{_OPTIM}.min_lr_ratio", _END),
    derived(f"{_OPTIM}.min_lr", _END, "by optim.lr"),
    ForeignKey(f"{_OPTIM}.weight_decay", "trainer.weight_decay"),
    derived(f"{_ACTOR}.use_kl_loss", "algorithm.kl.place", "true: loss"),
    derived(f"{_ACTOR}.kl_loss_coef", "algorithm.kl.coefficient", "in the loss"),
    derived(f"{_ACTOR}.kl_loss_type", "algorithm.kl.form", "in the loss", KL_FORMS),
    derived(
        f"{_ACTOR}.ppo_mini_batch_size",
        "trainer.num_mini_batches",
        "how many of them a step has; Search-R1 counts episodes, veRL questions",
    ),
    ForeignKey(f"{_ACTOR}.ppo_max_token_len_per_gpu", "trainer.max_tokens_per_micro_batch"),
    ForeignKey(f"{_ACTOR}.ppo_epochs", "trainer.num_epochs"),
    derived(f"{_ACTOR}.clip_ratio", "algorithm.loss.low", "and algorithm.loss.high"),
    derived(f"{_ACTOR}.clip_ratio_low", "algorithm.loss.low"),
    derived(f"{_ACTOR}.clip_ratio_high", "algorithm.loss.high"),
    derived(f"{_ACTOR}.clip_ratio_c", "algorithm.loss.dual_clip", "veRL: 3.0"),
    derived(f"{_ACTOR}.policy_loss.loss_mode", "algorithm.loss.kind", values=_LOSSES),
    ForeignKey(f"{_ACTOR}.entropy_coeff", "algorithm.entropy_coefficient"),
    ForeignKey(f"{_ACTOR}.grad_clip", "trainer.max_grad_norm"),
    ForeignKey(
        f"{_ACTOR}.loss_agg_mode",
        "algorithm.aggregate.kind",
        "seq-mean-token-sum-norm: constant, with the tokens of a reply",
        {
            **{"token-mean": "token_mean", "seq-mean-token-sum": "sequence_sum"},
            **{"seq-mean-token-mean": "sequence_mean", "seq-mean-token-sum-norm": "constant"},
        },
    ),
    ForeignKey(f"{_ACTOR}.ulysses_sequence_parallel_size", "placement.trainer.sequence_parallel"),
    *(
        ForeignKey(f"{place}.fsdp_config.{what}_offload", note=_HOST)
        for place in (_ACTOR, "actor_rollout_ref.ref", "critic.model")
        for what in ("param", "grad", "optimizer")
    ),
    ForeignKey(f"{_ROLLOUT}.n", "trainer.group_size"),
    ForeignKey(f"{_ROLLOUT}.n_agent", "trainer.group_size"),
    ForeignKey(f"{_ROLLOUT}.temperature", "rollout.temperature"),
    ForeignKey(f"{_ROLLOUT}.tensor_model_parallel_size", "placement.engine.tensor_parallel"),
    ForeignKey(
        f"{_ROLLOUT}.name",
        "placement.engine.kind",
        values={"vllm": "vllm", "sglang": "sglang", "hf": "torch"},
    ),
    ForeignKey(f"{_ROLLOUT}.multi_turn.max_assistant_turns", "environment.max_turns"),
    ForeignKey(f"{_ROLLOUT}.multi_turn.max_turns", "environment.max_turns"),
    ForeignKey(
        f"{_ROLLOUT}.multi_turn.max_tool_response_length", "environment.max_reply_characters"
    ),
    ForeignKey("critic.optim.lr", f"{_CRITIC}.learning_rate"),
    derived("critic.optim.lr_warmup_steps_ratio", f"{_CRITIC}.warmup_steps"),
    ForeignKey("critic.model.path", f"{_CRITIC}.path"),
    ForeignKey("critic.cliprange_value", f"{_CRITIC}.value_clip"),
    derived("trainer.critic_warmup", f"{_CRITIC}.num_warmup_steps", "with gae"),
    ForeignKey("trainer.total_training_steps", "trainer.num_steps"),
    ForeignKey("trainer.n_gpus_per_node", "placement.gpus_per_node"),
    ForeignKey("trainer.nnodes", "placement.num_nodes"),
    derived("trainer.save_freq", "trainer.checkpoint_every", "-1: never"),
    derived("trainer.test_freq", "evaluation.every", "-1: never"),
    ForeignKey("trainer.experiment_name", "name"),
    ForeignKey("trainer.default_local_dir", "output_dir"),
    ForeignKey("max_turns", "environment.max_turns", "Search-R1"),
    derived("retriever.url", "search.url", "without /retrieve"),
    ForeignKey("retriever.topk", "search.topk"),
    ForeignKey("reward_model.structure_format_score", "reward.structure_score"),
    ForeignKey("reward_model.final_format_score", "reward.final_format_score"),
    ForeignKey("reward_model.retrieval_score", "reward.retrieval_score"),
    *none("an evaluation plays as many as fit", "data.val_batch_size"),
    *none("a prompt that is too long is refused and never cut", "data.max_start_length"),
    *none("cut the file, or lower trainer.num_steps", "data.train_data_num"),
    *none("set evaluation.num_questions", "data.val_data_num"),
    *none(SHUFFLED, "data.shuffle_train_dataloader data.shuffle"),
    *none("a prompt that is too long is refused", "data.filter_overlong_prompts"),
    *none("nothing is truncated", "data.truncation"),
    *none("prompts are rendered by environment.prompt", "data.return_raw_chat"),
    *none("set algorithm.kl.adaptive for an adaptive coefficient", "algorithm.kl_ctrl.type"),
    *none("thoughts are always trained", "algorithm.no_think_rl"),
    *none(
        "sequences are always packed",
        "actor_rollout_ref.model.use_remove_padding critic.model.use_remove_padding",
    ),
    *none("done where advantage: optimal_token needs it", f"{_ACTOR}.calculate_sum_pi_squared"),
    *none(
        MICRO,
        f"{_ACTOR}.ppo_micro_batch_size {_ACTOR}.ppo_micro_batch_size_per_gpu "
        f"{_ACTOR}.use_dynamic_bsz {_ROLLOUT}.log_prob_micro_batch_size "
        f"{_ROLLOUT}.log_prob_micro_batch_size_per_gpu "
        "actor_rollout_ref.ref.log_prob_micro_batch_size "
        "actor_rollout_ref.ref.log_prob_micro_batch_size_per_gpu "
        "critic.ppo_micro_batch_size critic.ppo_micro_batch_size_per_gpu",
    ),
    *none("tokens that the policy did not write are never trained", f"{_ACTOR}.state_masking"),
    *none("FSDP2", f"{_ACTOR}.strategy"),
    *none("sampling from a cut distribution breaks the ratio: 1.0", f"{_ROLLOUT}.top_p"),
    *none("sampling from a cut distribution breaks the ratio", f"{_ROLLOUT}.top_k"),
    *none("episodes are always played without a barrier", f"{_ROLLOUT}.mode"),
    *none("set placement.engine.arguments", f"{_ROLLOUT}.gpu_memory_utilization"),
    *none("environment.max_tokens", f"{_ROLLOUT}.max_model_len"),
    *none("episodes have turns", f"{_ROLLOUT}.multi_turn.enable"),
    *none("environment.protocol: tools asks the template", f"{_ROLLOUT}.multi_turn.format"),
    *none(
        "set search.url to its retrieval_service_url, search.topk to its topk",
        f"{_ROLLOUT}.multi_turn.tool_config_path",
    ),
    *none("placement says who shares which GPUs", "actor_rollout_ref.hybrid_engine"),
    *none("as model.gradient_checkpointing", "critic.model.enable_gradient_checkpointing"),
    *none("trainer.num_steps counts steps", "trainer.total_epochs"),
    *none("forage eval RECIPE evaluates before", "trainer.val_before_train"),
    *none("forage eval RECIPE", "trainer.val_only"),
    *none(LOGGED, "trainer.logger"),
    *none("a run is named by its output_dir", "trainer.project_name"),
    *none("trainer.checkpoint_url keeps copies elsewhere", "trainer.default_hdfs_dir"),
    *none("tools are in environment.tools", "do_search"),
    *none("forage serve --rerank MODEL does it in the search service", "reranker.do_rerank"),
    *none("forage serve --rerank MODEL", "reranker.url"),
    *none("set search.topk", "reranker.topk"),
)

_START: dict[str, Any] = {
    "model.dtype": "float32",
    "model.device": "cuda",
    "environment.max_observation_tokens": 500,
    "environment.prompt": "search-r1",
    "search.url": "http://127.0.0.1:8000",
    "rollout.max_concurrent_episodes": 1024,
    "reward.answer": "em",
    "algorithm.decoupled": True,
    "algorithm.correction": {},
    "trainer.weight_decay": 0.01,
}


def derive(given: Given) -> Recipe:
    """What stands in several keys, or means another thing in Search-R1 than in veRL."""
    is_search_r1 = _is_search_r1(given.values)
    ours = _environment(given, is_search_r1) | _leash(given, is_search_r1)
    ours |= _loss(given, is_search_r1) | _optimizer_steps(given, is_search_r1)
    ours |= _placement(given)
    estimator = given.text("algorithm.adv_estimator")
    if estimator == "gae":
        for theirs, name in (("gamma", "discount"), ("lam", "gae_lambda")):
            if (value := given.number(f"algorithm.{theirs}")) is not None:
                ours[f"algorithm.advantage.{name}"] = value
        if (steps := given.number("trainer.critic_warmup")) is not None:
            ours[f"{_CRITIC}.num_warmup_steps"] = int(steps)
    if estimator == "grpo" and "algorithm.norm_adv_by_std_in_grpo" in given.values:
        is_divided = given.flag("algorithm.norm_adv_by_std_in_grpo")
        ours["algorithm.advantage.normalise_by_std"] = is_divided
    if estimator == "reinforce_plus_plus_baseline":
        ours["algorithm.advantage.baseline"] = "group"
    return ours


def _is_search_r1(values: Mapping[str, Any]) -> bool:
    return f"{_ROLLOUT}.n_agent" in values or any(name.startswith("retriever.") for name in values)


def _environment(given: Given, is_search_r1: bool) -> Recipe:
    prompt, reply = given.number("data.max_prompt_length"), given.number("data.max_response_length")
    ours: Recipe = {"environment.dialect": "search_r1" if is_search_r1 else "verl"}
    ours |= {"environment.protocol": "tags" if is_search_r1 else "tools"}
    ours |= {"environment.has_final_turn": is_search_r1}
    if not is_search_r1:
        ours["environment.prompt"] = "tools"
    ours |= given.first_files("data.train_files", "data.val_files")
    if prompt is not None:
        # Search-R1's prompt is the whole transcript; veRL's reply is all that follows the prompt.
        ours["environment.max_tokens"] = int(prompt if is_search_r1 else prompt + (reply or 0))
    if (url := given.text("retriever.url")) is not None:
        ours["search.url"] = url.rstrip("/").removesuffix("/retrieve")
    return ours


def _leash(given: Given, is_search_r1: bool) -> Recipe:
    if given.flag(f"{_ACTOR}.use_kl_loss"):
        place, name = "loss", given.text(f"{_ACTOR}.kl_loss_type") or "low_var_kl"
        coefficient = given.number(f"{_ACTOR}.kl_loss_coef")
    elif is_search_r1 or given.flag("algorithm.use_kl_in_reward"):
        place, name = "reward", given.text("algorithm.kl_penalty") or "kl"
        coefficient = given.number("algorithm.kl_ctrl.kl_coef")
    else:
        return {}
    return leash(0.001 if coefficient is None else coefficient, name, place)


def _loss(given: Given, is_search_r1: bool) -> Recipe:
    kind = _LOSSES.get(given.text(f"{_ACTOR}.policy_loss.loss_mode") or "vanilla", "clipped")
    ours: Recipe = {"algorithm.loss.kind": kind}
    if kind in _WITH_BOUNDS:
        for side in ("low", "high"):
            bound = given.number(f"{_ACTOR}.clip_ratio_{side}", f"{_ACTOR}.clip_ratio")
            ours[f"algorithm.loss.{side}"] = 0.2 if bound is None else bound
    if kind == "clipped" and not is_search_r1:
        ours["algorithm.loss.dual_clip"] = given.number(f"{_ACTOR}.clip_ratio_c") or 3.0
    if given.text(f"{_ACTOR}.loss_agg_mode") == "seq-mean-token-sum-norm":
        ours["algorithm.aggregate.tokens"] = int(given.number("data.max_response_length") or 1024)
    if kind in ("gspo", "gmpo"):
        ours["algorithm.aggregate.kind"] = "sequence_mean"
    return ours


def _optimizer_steps(given: Given, is_search_r1: bool) -> Recipe:
    """Mini-batches and rates; their warm-ups are in rollouts, ours in optimizer steps."""
    batch, mini = (
        given.number("data.train_batch_size"),
        given.number(f"{_ACTOR}.ppo_mini_batch_size"),
    )
    size = given.number(f"{_ROLLOUT}.n_agent", f"{_ROLLOUT}.n") or 1
    ends = [given.number(f"{_OPTIM}.{name}") for name in ("min_lr_ratio", "min_lr", "lr")]
    style = given.text(*(f"{_OPTIM}.{name}" for name in _STYLES)) or "constant"
    ours, a_step = fall(style, *ends), 1
    if batch and mini:
        a_step = whole(batch * (size if is_search_r1 else 1) / mini)
        ours["trainer.num_mini_batches"] = a_step
    steps = given.number("trainer.total_training_steps")
    if (rollouts := given.number(f"{_OPTIM}.lr_warmup_steps")) and rollouts > 0:
        ours["trainer.warmup_steps"] = int(rollouts) * a_step
    elif steps and (ratio := given.number(f"{_OPTIM}.lr_warmup_steps_ratio")):
        ours["trainer.warmup_steps"] = int(ratio * steps) * a_step
    if steps and (ratio := given.number("critic.optim.lr_warmup_steps_ratio")):
        ours[f"{_CRITIC}.warmup_steps"] = int(ratio * steps) * a_step
    return ours


def _placement(given: Given) -> Recipe:
    ours: Recipe = {}
    num_nodes = given.number("trainer.nnodes") or 1
    if num_nodes > 1:
        ours["placement.cluster"] = "ray"
    if num_nodes * (given.number("trainer.n_gpus_per_node") or 1) > 1:
        ours["placement.trainer.compute_dtype"] = "bfloat16"  # what FSDP computes in there
    if given.text(f"{_ROLLOUT}.name") in ("vllm", "sglang"):
        ours["placement.engine.offload"] = True
    for theirs, name in (("save", "trainer.checkpoint_every"), ("test", "evaluation.every")):
        every = given.number(f"trainer.{theirs}_freq")
        if every is not None and (every > 0 or theirs == "test"):
            ours[name] = max(0, int(every))
    return ours


VERL = ForeignTrainer(
    "veRL, Search-R1",
    lambda values: any(name.startswith("actor_rollout_ref.") for name in values),
    KEYS,
    _START,
    derive,
)
