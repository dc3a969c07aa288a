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
    fall,
    leash,
    whole,
)

_ACTOR, _ROLLOUT = "actor_rollout_ref.actor", "actor_rollout_ref.rollout"
_LOSSES = {
    **{"vanilla": "clipped", "gspo": "gspo", "geo_mean": "gmpo", "cispo": "cispo"},
    **{"sapo": "sapo", "clip_cov": "clip_cov", "kl_cov": "kl_cov"},
}
_WITH_BOUNDS = ("clipped", "gspo", "cispo", "clip_cov")
_HOST = "placement.engine.offload lets all states rest in host memory while servers sample"
_CRITIC = "algorithm.advantage.critic"
_END = "trainer.final_learning_rate_ratio"

KEYS = (
    ForeignKey("data.train_files", "data.train", "the first", None, True),
    ForeignKey("data.val_files", "data.test", "the first", None, True),
    ForeignKey("data.train_batch_size", "trainer.questions_per_step"),
    ForeignKey("data.val_batch_size", note="an evaluation plays as many as fit"),
    ForeignKey(
        "data.max_prompt_length", "environment.max_tokens", "with what follows it", None, True
    ),
    ForeignKey("data.max_response_length", "environment.max_turn_tokens"),
    ForeignKey("data.max_start_length", note="a prompt that is too long is refused and never cut"),
    ForeignKey("data.max_obs_length", "environment.max_observation_tokens"),
    ForeignKey("data.train_data_num", note="cut the file, or lower trainer.num_steps"),
    ForeignKey("data.val_data_num", note="set evaluation.num_questions"),
    ForeignKey("data.shuffle_train_dataloader", note=SHUFFLED),
    ForeignKey("data.shuffle", note=SHUFFLED),
    ForeignKey("data.seed", "seed"),
    ForeignKey("data.filter_overlong_prompts", note="a prompt that is too long is refused"),
    ForeignKey("data.truncation", note="nothing is truncated"),
    ForeignKey("data.return_raw_chat", note="prompts are rendered by environment.prompt"),
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
    ForeignKey("algorithm.gamma", "algorithm.advantage.discount", "with gae", None, True),
    ForeignKey("algorithm.lam", "algorithm.advantage.gae_lambda", "with gae", None, True),
    ForeignKey(
        "algorithm.norm_adv_by_std_in_grpo",
        "algorithm.advantage.normalise_by_std",
        "with grpo",
        None,
        True,
    ),
    ForeignKey("algorithm.use_kl_in_reward", "algorithm.kl.place", "true: reward", None, True),
    ForeignKey("algorithm.kl_penalty", "algorithm.kl.form", "in the reward", KL_FORMS, True),
    ForeignKey(
        "algorithm.kl_ctrl.kl_coef", "algorithm.kl.coefficient", "in the reward", None, True
    ),
    ForeignKey(
        "algorithm.kl_ctrl.type", note="set algorithm.kl.adaptive for an adaptive coefficient"
    ),
    ForeignKey("algorithm.no_think_rl", note="thoughts are always trained"),
    ForeignKey("actor_rollout_ref.model.path", "model.path"),
    ForeignKey(
        "actor_rollout_ref.model.enable_gradient_checkpointing", "model.gradient_checkpointing"
    ),
    ForeignKey("actor_rollout_ref.model.use_remove_padding", note="sequences are always packed"),
    ForeignKey("actor_rollout_ref.model.lora_rank", "model.lora.rank"),
    ForeignKey("actor_rollout_ref.model.lora_alpha", "model.lora.alpha"),
    ForeignKey(f"{_ACTOR}.optim.lr", "trainer.learning_rate"),
    ForeignKey(
        f"{_ACTOR}.optim.lr_warmup_steps_ratio",
        "trainer.warmup_steps",
        "of trainer.total_training_steps, in optimizer steps",
        None,
        True,
    ),
    ForeignKey(
        f"{_ACTOR}.optim.lr_warmup_steps",
        "trainer.warmup_steps",
        "in optimizer steps",
        None,
        True,
    ),
    *(
        ForeignKey(f"{_ACTOR}.optim.{name}", _END, "", FALLS, True)
        for name in ("lr_scheduler_type", "warmup_style", "lr_decay_style")
    ),
    ForeignKey(f"{_ACTOR}.optim.min_lr_ratio", _END, "", None, True),
    ForeignKey(f"{_ACTOR}.optim.min_lr", _END, "by optim.lr", None, True),
    ForeignKey(
        f"{_ACTOR}.calculate_sum_pi_squared", note="done where advantage: optimal_token needs it"
    ),
    ForeignKey(f"{_ACTOR}.optim.weight_decay", "trainer.weight_decay"),
    ForeignKey(f"{_ACTOR}.use_kl_loss", "algorithm.kl.place", "true: loss", None, True),
    ForeignKey(f"{_ACTOR}.kl_loss_coef", "algorithm.kl.coefficient", "in the loss", None, True),
    ForeignKey(f"{_ACTOR}.kl_loss_type", "algorithm.kl.form", "in the loss", KL_FORMS, True),
    ForeignKey(
        f"{_ACTOR}.ppo_mini_batch_size",
        "trainer.num_mini_batches",
        "how many of them a step has; Search-R1 counts episodes, veRL questions",
        None,
        True,
    ),
    ForeignKey(f"{_ACTOR}.ppo_micro_batch_size", note=MICRO),
    ForeignKey(f"{_ACTOR}.ppo_micro_batch_size_per_gpu", note=MICRO),
    ForeignKey(f"{_ACTOR}.use_dynamic_bsz", note=MICRO),
    ForeignKey(f"{_ACTOR}.ppo_max_token_len_per_gpu", "trainer.max_tokens_per_micro_batch"),
    ForeignKey(f"{_ACTOR}.ppo_epochs", "trainer.num_epochs"),
    ForeignKey(f"{_ACTOR}.clip_ratio", "algorithm.loss.low", "and algorithm.loss.high", None, True),
    ForeignKey(f"{_ACTOR}.clip_ratio_low", "algorithm.loss.low", "", None, True),
    ForeignKey(f"{_ACTOR}.clip_ratio_high", "algorithm.loss.high", "", None, True),
    ForeignKey(f"{_ACTOR}.clip_ratio_c", "algorithm.loss.dual_clip", "veRL: 3.0", None, True),
    ForeignKey(f"{_ACTOR}.policy_loss.loss_mode", "algorithm.loss.kind", "", _LOSSES, True),
    ForeignKey(f"{_ACTOR}.entropy_coeff", "algorithm.entropy_coefficient"),
    ForeignKey(f"{_ACTOR}.grad_clip", "trainer.max_grad_norm"),
    ForeignKey(
        f"{_ACTOR}.loss_agg_mode",
        "algorithm.aggregate.kind",
        "seq-mean-token-sum-norm: constant, with the tokens of a reply",
        {
            "token-mean": "token_mean",
            "seq-mean-token-sum": "sequence_sum",
            "seq-mean-token-mean": "sequence_mean",
            "seq-mean-token-sum-norm": "constant",
        },
    ),
    ForeignKey(
        f"{_ACTOR}.state_masking", note="tokens that the policy did not write are never trained"
    ),
    ForeignKey(f"{_ACTOR}.ulysses_sequence_parallel_size", "placement.trainer.sequence_parallel"),
    ForeignKey(f"{_ACTOR}.strategy", note="FSDP2"),
    *(
        ForeignKey(f"{place}.fsdp_config.{what}_offload", note=_HOST)
        for place in (_ACTOR, "actor_rollout_ref.ref", "critic.model")
        for what in ("param", "grad", "optimizer")
    ),
    ForeignKey(f"{_ROLLOUT}.n", "trainer.group_size"),
    ForeignKey(f"{_ROLLOUT}.n_agent", "trainer.group_size"),
    ForeignKey(f"{_ROLLOUT}.temperature", "rollout.temperature"),
    ForeignKey(f"{_ROLLOUT}.top_p", note="sampling from a cut distribution breaks the ratio: 1.0"),
    ForeignKey(f"{_ROLLOUT}.top_k", note="sampling from a cut distribution breaks the ratio"),
    ForeignKey(f"{_ROLLOUT}.tensor_model_parallel_size", "placement.engine.tensor_parallel"),
    ForeignKey(
        f"{_ROLLOUT}.name",
        "placement.engine.kind",
        "",
        {"vllm": "vllm", "sglang": "sglang", "hf": "torch"},
    ),
    ForeignKey(f"{_ROLLOUT}.mode", note="episodes are always played without a barrier"),
    ForeignKey(f"{_ROLLOUT}.gpu_memory_utilization", note="set placement.engine.arguments"),
    ForeignKey(f"{_ROLLOUT}.max_model_len", note="environment.max_tokens"),
    ForeignKey(f"{_ROLLOUT}.log_prob_micro_batch_size", note=MICRO),
    ForeignKey(f"{_ROLLOUT}.log_prob_micro_batch_size_per_gpu", note=MICRO),
    ForeignKey(f"{_ROLLOUT}.multi_turn.enable", note="episodes have turns"),
    ForeignKey(
        f"{_ROLLOUT}.multi_turn.format", note="environment.protocol: tools asks the template"
    ),
    ForeignKey(f"{_ROLLOUT}.multi_turn.max_assistant_turns", "environment.max_turns"),
    ForeignKey(f"{_ROLLOUT}.multi_turn.max_turns", "environment.max_turns"),
    ForeignKey(
        f"{_ROLLOUT}.multi_turn.max_tool_response_length", "environment.max_reply_characters"
    ),
    ForeignKey(
        f"{_ROLLOUT}.multi_turn.tool_config_path",
        note="set search.url to its retrieval_service_url, search.topk to its topk",
    ),
    ForeignKey("actor_rollout_ref.ref.log_prob_micro_batch_size", note=MICRO),
    ForeignKey("actor_rollout_ref.ref.log_prob_micro_batch_size_per_gpu", note=MICRO),
    ForeignKey("actor_rollout_ref.hybrid_engine", note="placement says who shares which GPUs"),
    ForeignKey("critic.optim.lr", f"{_CRITIC}.learning_rate"),
    ForeignKey("critic.optim.lr_warmup_steps_ratio", f"{_CRITIC}.warmup_steps", "", None, True),
    ForeignKey("critic.model.path", f"{_CRITIC}.path"),
    ForeignKey(
        "critic.model.enable_gradient_checkpointing", note="as model.gradient_checkpointing"
    ),
    ForeignKey("critic.model.use_remove_padding", note="sequences are always packed"),
    ForeignKey("critic.ppo_micro_batch_size", note=MICRO),
    ForeignKey("critic.ppo_micro_batch_size_per_gpu", note=MICRO),
    ForeignKey("critic.cliprange_value", f"{_CRITIC}.value_clip"),
    ForeignKey("trainer.critic_warmup", f"{_CRITIC}.num_warmup_steps", "with gae", None, True),
    ForeignKey("trainer.total_training_steps", "trainer.num_steps"),
    ForeignKey("trainer.total_epochs", note="trainer.num_steps counts steps"),
    ForeignKey("trainer.n_gpus_per_node", "placement.gpus_per_node"),
    ForeignKey("trainer.nnodes", "placement.num_nodes"),
    ForeignKey("trainer.save_freq", "trainer.checkpoint_every", "-1: never", None, True),
    ForeignKey("trainer.test_freq", "evaluation.every", "-1: never", None, True),
    ForeignKey("trainer.val_before_train", note="forage eval RECIPE evaluates before"),
    ForeignKey("trainer.val_only", note="forage eval RECIPE"),
    ForeignKey("trainer.logger", note=LOGGED),
    ForeignKey("trainer.project_name", note="a run is named by its output_dir"),
    ForeignKey("trainer.experiment_name", "name"),
    ForeignKey("trainer.default_local_dir", "output_dir"),
    ForeignKey("trainer.default_hdfs_dir", note="trainer.checkpoint_url keeps copies elsewhere"),
    ForeignKey("max_turns", "environment.max_turns", "Search-R1"),
    ForeignKey("do_search", note="tools are in environment.tools"),
    ForeignKey("retriever.url", "search.url", "without /retrieve", None, True),
    ForeignKey("retriever.topk", "search.topk"),
    ForeignKey(
        "reranker.do_rerank", note="forage serve --rerank MODEL does it in the search service"
    ),
    ForeignKey("reranker.url", note="forage serve --rerank MODEL"),
    ForeignKey("reranker.topk", note="set search.topk"),
    ForeignKey("reward_model.structure_format_score", "reward.structure_score"),
    ForeignKey("reward_model.final_format_score", "reward.final_format_score"),
    ForeignKey("reward_model.retrieval_score", "reward.retrieval_score"),
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
    for theirs, name in (("train", "data.train"), ("val", "data.test")):
        if files := given.values.get(f"data.{theirs}_files"):
            ours[name] = files[0] if isinstance(files, list) else files
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
    num_mini_batches = 1
    optim = f"{_ACTOR}.optim"
    names = [f"{optim}.{name}" for name in ("lr_scheduler_type", "warmup_style", "lr_decay_style")]
    ends = [given.number(f"{optim}.{name}") for name in ("min_lr_ratio", "min_lr", "lr")]
    ours = fall(given.text(*names) or "constant", *ends)
    if batch and mini:
        num_mini_batches = whole(batch * (size if is_search_r1 else 1) / mini)
        ours["trainer.num_mini_batches"] = num_mini_batches
    steps, a_step = given.number("trainer.total_training_steps"), num_mini_batches
    if (rollouts := given.number(f"{_ACTOR}.optim.lr_warmup_steps")) and rollouts > 0:
        ours["trainer.warmup_steps"] = int(rollouts) * a_step
    elif steps and (ratio := given.number(f"{_ACTOR}.optim.lr_warmup_steps_ratio")):
        ours["trainer.warmup_steps"] = int(ratio * steps) * a_step
    if steps and (ratio := given.number("critic.optim.lr_warmup_steps_ratio")):
        ours[f"{_CRITIC}.warmup_steps"] = int(ratio * steps) * a_step
    return ours


def _placement(given: Given) -> Recipe:
    ours: Recipe = {}
    if (given.number("trainer.nnodes") or 1) > 1:
        ours["placement.cluster"] = "ray"
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
