"""veRL's settings, and those of Search-R1, which is built on an older veRL.

Defaults are veRL's of January 2026 (b178a3c) and Search-R1's (a14dc3a). ``verl_derived.py`` has
what several keys say together.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from forage.config.foreign.foreign_keys import (
    ADAM,
    CUT,
    FALLS,
    KL_FORMS,
    LOGGED,
    MICRO,
    SERVER,
    SHUFFLED,
    START,
    TEMPLATE,
    ForeignKey,
    ForeignTrainer,
    derived,
    no_place,
)
from forage.config.foreign.verl_derived import (
    ACTOR,
    BYPASS_LOSSES,
    CRITIC,
    IS,
    LOSSES,
    OF_LOSSES,
    OPTIM,
    REJECTIONS,
    ROLLOUT,
    STYLES,
    TOOL,
    TURNS,
    derive_verl,
    is_search_r1,
)

_NO_PLACE = f"""
FSDP2 shards over all ranks, and placement.engine.offload rests states in the host: *.fsdp_config.*
FSDP2 shards over all ranks: *.strategy actor_rollout_ref.ref.ulysses_sequence_parallel_size
an evaluation plays as many episodes as fit: data.val_batch_size
a prompt that is too long is refused, never cut: data.max_start_length data.truncation
a prompt that is too long is refused, never cut: data.filter_overlong_prompts*
cut the file, or lower trainer.num_steps: data.train_data_num data.train_max_samples
{SHUFFLED}: data.shuffle_train_dataloader data.shuffle data.validation_shuffle
{TEMPLATE}: data.return_* data.tool_config_path data.tokenizer
the form of a file is recognised: data.prompt_key data.reward_fn_key
thoughts are always trained: algorithm.no_think_rl=false
Forage has no PF-PPO: algorithm.use_pf_ppo=false
the tags of the protocol decide: algorithm.state_masking.*
sequences are always packed: *.use_remove_padding
algorithm.advantage: optimal_token computes it: {ACTOR}.calculate_sum_pi_squared
{MICRO}: *micro_batch_size* *use_dynamic_bsz *log_prob_max_token_len_per_gpu
{MICRO}: critic.ppo_max_token_len_per_gpu critic.forward_max_token_len_per_gpu
micro-batches are balanced by their tokens: trainer.balance_batch
kernels do not change what is learned: *.use_torch_compile
{ADAM}: *.optim.betas *.optim.optimizer=adamw
{CUT}: {ROLLOUT}.top_p {ROLLOUT}.top_k
episodes are always played without a barrier: {ROLLOUT}.mode
{SERVER}: {ROLLOUT}.gpu_memory_utilization {ROLLOUT}.enforce_eager
{SERVER}: {ROLLOUT}.max_num_* {ROLLOUT}.enable_*
{SERVER}: {ROLLOUT}.free_cache_engine {ROLLOUT}.load_format {ROLLOUT}.engine_kwargs.*
servers sample in placement.trainer.compute_dtype: {ROLLOUT}.dtype
environment.max_tokens is the limit: {ROLLOUT}.max_model_len
episodes always have turns: {TURNS}.enable=true
environment.protocol: tools uses the tokenizer's template: {TURNS}.format
the middle of a reply is cut: {TURNS}.tool_response_truncate_side=middle
environment.max_turns counts the assistant's turns: {TURNS}.max_user_turns=none
the file that it names is read with this one: {TURNS}.tool_config_path config-path config-name
Hydra's own; its defaults that differ from ours are carried over: hydra.* defaults defaults.*
placement decides who shares which GPUs: actor_rollout_ref.hybrid_engine
model.gradient_checkpointing also covers the critic: critic.model.enable_gradient_checkpointing
forage eval RECIPE evaluates the starting weights: trainer.val_before_train
run forage eval RECIPE instead of forage train: trainer.val_only
{LOGGED}: trainer.logger trainer.log_val_generations
trainer.checkpoint_url copies checkpoints: trainer.default_hdfs_dir
forage train --resume continues a run: trainer.resume_mode trainer.resume_from_path
environment.tools names the tools: do_search=true
environment.tools names the tools: tools.0.class_name=verl.tools.search_tool.searchtool
the dialect shows its own schema of search: tools.0.tool_schema.*
tools run in this process: {TOOL}.type=native
forage serve --rerank MODEL reranks in the search service: reranker.*
the reward is exact match; reward.judge is a model: reward_model.enable=false
"""

_END = "trainer.final_learning_rate_ratio"
_MINI = "a step divided by it; Search-R1 counts episodes, veRL questions"
_PLUS = "reinforce_plus_plus_baseline: with baseline: group; gpg: with rescale_by: rewards"
_OWN_PARTS = "names of your own: reward.functions, in which you set the module"
_IN_LOSS = "bypass_mode with loss_type reinforce: algorithm.loss.weights"
_ALSO = "several: algorithm.correction.also_reject"
_INVERSE = "low_high of the inverse ratio; one for all rules, or one for each"
_GPG = "gpg: with weights: none"
_ESTIMATORS = {
    **{name: name for name in ("gae", "grpo", "rloo", "remax", "reinforce_plus_plus")},
    **{name: name for name in ("opo", "gpg", "gdpo", "grpo_passk")},
    **{"grpo_vectorized": "grpo", "rloo_vectorized": "rloo"},
    **{"reinforce_plus_plus_baseline": "reinforce_plus_plus"},
    **dict.fromkeys(("optimal_token_baseline", "tir_optimal_token_baseline"), "optimal_token"),
}
_AGGREGATES = {
    **{"token-mean": "token_mean", "token-sum": "token_sum", "seq-mean-token-sum": "sequence_sum"},
    **{"seq-mean-token-mean": "sequence_mean", "seq-mean-token-sum-norm": "constant"},
}
_ENGINES = {"vllm": "vllm", "sglang": "sglang", "sglang_async": "sglang", "hf": "torch"}
_LEVELS = {"token": "token", "sequence": "sequence"}
_CONTROLS = {"fixed": None, "adaptive": "target_kl"}

KEYS = (
    derived("data.train_files", "data.train", "one file; join several to train on all"),
    derived("data.val_files", "data.test", "one file; join several to evaluate on all"),
    ForeignKey("data.train_batch_size", "trainer.questions_per_step"),
    derived("data.max_prompt_length", "environment.max_tokens", "with what follows it"),
    derived("data.max_response_length", "environment.max_turn_tokens"),
    ForeignKey("data.max_obs_length", "environment.max_observation_tokens"),
    ForeignKey("data.seed", "seed"),
    ForeignKey("algorithm.adv_estimator", "algorithm.advantage.kind", _PLUS, _ESTIMATORS),
    ForeignKey("algorithm.gamma", "algorithm.advantage.discount", "with gae"),
    ForeignKey("algorithm.lam", "algorithm.advantage.gae_lambda", "with gae"),
    derived("algorithm.norm_adv_by_std_in_grpo", "algorithm.advantage.normalise_by_std"),
    derived("algorithm.gdpo_reward_keys", "algorithm.advantage.parts", _OWN_PARTS),
    derived("algorithm.gdpo_reward_weights", "algorithm.advantage.parts"),
    derived("algorithm.use_kl_in_reward", "algorithm.kl.place", "true: reward"),
    derived("algorithm.kl_penalty", "algorithm.kl.form", "in the reward", KL_FORMS),
    derived("algorithm.kl_ctrl.kl_coef", "algorithm.kl.coefficient", "in the reward"),
    derived("algorithm.kl_ctrl.type", "algorithm.kl.adaptive.target", "", _CONTROLS),
    derived("algorithm.kl_ctrl.target_kl", "algorithm.kl.adaptive.target", "if adaptive"),
    derived("algorithm.kl_ctrl.horizon", "algorithm.kl.adaptive.horizon", "if adaptive"),
    derived(f"{IS}.rollout_is", "algorithm.correction.weights.level", _IN_LOSS, _LEVELS),
    derived(f"{IS}.rollout_is_threshold", "algorithm.correction.weights.high", _IN_LOSS),
    derived(f"{IS}.rollout_is_batch_normalize", "algorithm.correction.weights.normalise", _IN_LOSS),
    ForeignKey(
        f"{IS}.rollout_rs", "algorithm.correction.reject.kind", _ALSO, REJECTIONS, True, True
    ),
    derived(f"{IS}.rollout_rs_threshold", "algorithm.correction.reject.high", _INVERSE),
    derived(f"{IS}.bypass_mode", "algorithm.decoupled", "true: false"),
    derived(f"{IS}.loss_type", "algorithm.loss.kind", "if bypass_mode", BYPASS_LOSSES),
    ForeignKey("actor_rollout_ref.model.path", "model.path"),
    ForeignKey(
        "actor_rollout_ref.model.enable_gradient_checkpointing", "model.gradient_checkpointing"
    ),
    derived("actor_rollout_ref.model.lora_rank", "model.lora.rank", "0: none"),
    derived("actor_rollout_ref.model.lora_alpha", "model.lora.alpha", "with lora_rank"),
    ForeignKey(f"{OPTIM}.lr", "trainer.learning_rate"),
    derived(f"{OPTIM}.lr_warmup_steps_ratio", "trainer.warmup_steps", "in optimizer steps"),
    derived(f"{OPTIM}.lr_warmup_steps", "trainer.warmup_steps", "in optimizer steps"),
    *(derived(f"{OPTIM}.{name}", _END, values=FALLS) for name in STYLES),
    derived(f"{OPTIM}.min_lr_ratio", _END),
    derived(f"{OPTIM}.min_lr", _END, "by optim.lr"),
    ForeignKey(f"{OPTIM}.weight_decay", "trainer.weight_decay"),
    derived(f"{ACTOR}.use_kl_loss", "algorithm.kl.place", "true: loss"),
    derived(f"{ACTOR}.kl_loss_coef", "algorithm.kl.coefficient", "in the loss"),
    derived(f"{ACTOR}.kl_loss_type", "algorithm.kl.form", "in the loss", KL_FORMS),
    derived(f"{ACTOR}.ppo_mini_batch_size", "trainer.num_mini_batches", _MINI),
    ForeignKey(f"{ACTOR}.ppo_max_token_len_per_gpu", "trainer.max_tokens_per_micro_batch"),
    ForeignKey(f"{ACTOR}.ppo_epochs", "trainer.num_epochs"),
    derived(f"{ACTOR}.clip_ratio", "algorithm.loss.low", "and algorithm.loss.high"),
    derived(f"{ACTOR}.clip_ratio_low", "algorithm.loss.low"),
    derived(f"{ACTOR}.clip_ratio_high", "algorithm.loss.high"),
    derived(f"{ACTOR}.policy_loss.loss_mode", "algorithm.loss.kind", _GPG, LOSSES),
    derived(f"{ACTOR}.clip_ratio_c", "algorithm.loss.dual_clip", "dppo_*: max_ratio"),
    *(
        derived(f"{ACTOR}.{theirs}", f"algorithm.loss.{ours}", f"with {loss}")
        for loss, keys in OF_LOSSES.items()
        for ours, theirs in keys.items()
        if not theirs.startswith("clip_ratio")
    ),
    ForeignKey(f"{ACTOR}.entropy_coeff", "algorithm.entropy_coefficient"),
    ForeignKey(f"{ACTOR}.grad_clip", "trainer.max_grad_norm"),
    ForeignKey(f"{ACTOR}.loss_agg_mode", "algorithm.aggregate.kind", "", _AGGREGATES),
    ForeignKey(f"{ACTOR}.ulysses_sequence_parallel_size", "placement.trainer.sequence_parallel"),
    derived(f"{ROLLOUT}.n", "trainer.group_size"),
    derived(f"{ROLLOUT}.n_agent", "trainer.group_size"),
    ForeignKey(f"{ROLLOUT}.temperature", "rollout.temperature"),
    ForeignKey(f"{ROLLOUT}.tensor_model_parallel_size", "placement.engine.tensor_parallel"),
    ForeignKey(f"{ROLLOUT}.name", "placement.engine.kind", "", _ENGINES),
    derived(f"{TURNS}.max_assistant_turns", "environment.max_turns"),
    derived(f"{TURNS}.max_turns", "environment.max_turns"),
    derived(f"{TURNS}.max_tool_response_length", "environment.max_reply_characters"),
    ForeignKey("critic.optim.lr", f"{CRITIC}.learning_rate", "with gae"),
    derived("critic.optim.lr_warmup_steps_ratio", f"{CRITIC}.warmup_steps", "with gae"),
    ForeignKey("critic.optim.weight_decay", f"{CRITIC}.weight_decay", "with gae"),
    ForeignKey("critic.grad_clip", f"{CRITIC}.max_grad_norm", "with gae"),
    ForeignKey("critic.model.path", f"{CRITIC}.path", "with gae"),
    ForeignKey("critic.cliprange_value", f"{CRITIC}.value_clip", "with gae"),
    ForeignKey("trainer.critic_warmup", f"{CRITIC}.num_warmup_steps", "with gae"),
    derived("trainer.total_training_steps", "trainer.num_steps", "or total_epochs if less"),
    derived("trainer.total_epochs", "trainer.num_steps", "or total_training_steps if less"),
    ForeignKey("trainer.n_gpus_per_node", "placement.gpus_per_node"),
    ForeignKey("trainer.nnodes", "placement.num_nodes"),
    derived("trainer.save_freq", "trainer.checkpoint_every", "-1: never"),
    derived("trainer.test_freq", "evaluation.every", "-1: never"),
    ForeignKey("trainer.experiment_name", "name"),
    derived("trainer.default_local_dir", "output_dir"),
    derived("trainer.project_name", "output_dir", "without default_local_dir"),
    derived("max_turns", "environment.max_turns", "Search-R1"),
    derived(f"{TOOL}.retrieval_service_url", "search.url", "without /retrieve"),
    ForeignKey(f"{TOOL}.topk", "search.topk"),
    derived(f"{TOOL}.timeout", "search.timeout_s"),
    derived(f"{TOOL}.num_workers", "search.max_concurrent_requests", "or rate_limit if less"),
    derived(f"{TOOL}.rate_limit", "search.max_concurrent_requests", "or num_workers if less"),
    derived("retriever.url", "search.url", "without /retrieve"),
    ForeignKey("retriever.topk", "search.topk"),
    ForeignKey("reward_model.structure_format_score", "reward.structure_score"),
    ForeignKey("reward_model.final_format_score", "reward.final_format_score"),
    ForeignKey("reward_model.retrieval_score", "reward.retrieval_score"),
    derived("data.val_data_num", "evaluation.num_questions", "null: all"),
    derived(f"{ACTOR}.state_masking", "algorithm.train_observations", "false: true"),
    *no_place(_NO_PLACE),
)

_START: dict[str, Any] = {
    **START,
    "environment.max_observation_tokens": 500,
    "rollout.max_concurrent_episodes": 1024,
    "algorithm.decoupled": True,
    "algorithm.correction": {},
}

_SHARED_DEFAULTS: dict[str, Any] = {
    "algorithm.adv_estimator": "gae",
    "algorithm.kl_ctrl.kl_coef": 0.001,
    "data.train_batch_size": 1024,
    "data.max_prompt_length": 512,
    "data.max_response_length": 512,
    f"{ACTOR}.ppo_mini_batch_size": 256,
    f"{ACTOR}.clip_ratio": 0.2,
    f"{ACTOR}.kl_loss_coef": 0.001,
    f"{OPTIM}.weight_decay": 0.01,
    f"{ROLLOUT}.n": 1,
    f"{ROLLOUT}.tensor_model_parallel_size": 2,
    "critic.optim.weight_decay": 0.01,
    "trainer.n_gpus_per_node": 8,
    "trainer.nnodes": 1,
    "trainer.total_epochs": 30,
    "trainer.project_name": "verl_examples",
}
_VERL_DEFAULTS = {
    f"{ACTOR}.clip_ratio_low": 0.2,  # so that clip_ratio alone does nothing there
    f"{ACTOR}.clip_ratio_high": 0.2,
    f"{ACTOR}.clip_ratio_c": 3.0,
    f"{ACTOR}.policy_loss.ppo_kl_coef": 0.1,
    f"{IS}.rollout_is_threshold": 2.0,
    "actor_rollout_ref.model.enable_gradient_checkpointing": True,
    f"{TURNS}.max_tool_response_length": 256,
}
_SEARCH_R1_DEFAULTS = {
    "data.max_obs_length": 512,
    f"{ACTOR}.entropy_coeff": 0.001,
    f"{ACTOR}.state_masking": False,
    f"{ROLLOUT}.name": "vllm",
    "max_turns": 10,
}


def _defaults(values: Mapping[str, Any]) -> Mapping[str, Any]:
    return _SHARED_DEFAULTS | (_SEARCH_R1_DEFAULTS if is_search_r1(values) else _VERL_DEFAULTS)


VERL = ForeignTrainer(
    "veRL, Search-R1",
    lambda values: any(name.startswith("actor_rollout_ref.") for name in values),
    KEYS,
    _START,
    derive_verl,
    "data.train_files",
    _defaults,
)
