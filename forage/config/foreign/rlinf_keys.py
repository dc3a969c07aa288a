"""RLinf's settings for its Search-R1 example, trained by Megatron or by FSDP (a3816b5)."""

from __future__ import annotations

import re

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
    UNSET,
    ForeignKey,
    ForeignTrainer,
    Given,
    Recipe,
    cadence,
    derived,
    fall,
    leash,
    machines,
    no_place,
    warmup,
    whole,
)

_NUM_GPUS = 8
"""GPUs of a node of the published example; ``all`` in its placement gives no number."""
_WHERE = "cluster.component_placement"
_PARTS = ("actor,rollout,reward", "rollout,reward", "actor", "rollout", "all")
_ESTIMATORS = {
    **{"grpo": "grpo", "grpo_dynamic": "grpo", "gae": "gae", "rloo": "rloo", "raw": "reinforce"},
}
_SCALES = {"['group_level', 'agent_level', 'turn_level']": "sequence_mean", "[]": "token_mean"}
_RAW = "raw: with baseline: none"
_AGGREGATE = "algorithm.aggregate.kind"
_ENGINES = {"sglang": "sglang", "vllm": "vllm"}
_EQUAL = "group, agent and turn level: each trajectory weighs the same"
_END = "trainer.final_learning_rate_ratio"
_SCHEDULE = "the steps of a warm-up's share; by n_minibatches those of the loop, if unknown"
_CHECKPOINTING = "model.gradient_checkpointing"

_NO_PLACE = f"""
this example has no adapters; set model.lora: actor.model.is_lora=false
the command decides: runner.task_type=reasoning|reasoning_eval
{LOGGED}: runner.logger.*
{MICRO}: runner.enable_dynamic_batch_size algorithm.*batch_size* agentloop.is_dynamic_*
forage train --resume continues a run: runner.resume_dir
algorithm.advantage normalises: algorithm.normalize_advantages=false
an episode has one advantage: algorithm.advantage_mode=trajectory
algorithm.loss is the policy's: algorithm.loss_type=actor
algorithm.aggregate counts sampled tokens: algorithm.use_valid_token_scale=false
entropy is always measured: algorithm.calculate_entropy
mini-batches keep groups together: algorithm.shuffle_rollout
{CUT}: algorithm.sampling_params.top_p algorithm.sampling_params.top_k
{CUT}: algorithm.sampling_params.repetition_penalty=1|1.0
training always samples: algorithm.sampling_params.do_sample=true
a turn may be empty: algorithm.sampling_params.min_new_tokens=0|1
the protocol's own tags end a turn: algorithm.sampling_params.stop
environment.max_tokens is the limit: algorithm.sampling_params.max_new_tokens
a prompt that is too long is refused, never cut: data.max_prompt_length data.filter_prompt*
an evaluation plays as many episodes as fit: data.val_rollout_batch_size
{SHUFFLED}: data.shuffle data.validation_shuffle
the form of a file is recognised: data.type data.prompt_key data.answer_key
files are read once, when the run starts: data.num_workers
{TEMPLATE}: data.apply_chat_template
environment.protocol is tags: agentloop.toolcall_parser=searchr1-qwen
the end of an observation is cut: agentloop.tool_response_truncate_side=right
searches are real: tools.search.dummy_mode
every episode is recorded; forage view shows them: *.print_outputs reward.random_print_percent
parts of a run have no names: *.group_name
the tokenizer and its special tokens are the model's: rollout.padding rollout.eos *.tokenizer.*
the model's config.json describes it: rollout.model.model_type
every log-probability is recorded: rollout.return_logprobs
{SERVER}: rollout.*
exact match; for your own, reward.functions: reward.reward_type=searchr1
reward.judge is a model's reward: reward.use_reward_model=false
reward.weights scales the parts: reward.reward_scale=1|1.0
{ADAM}: actor.optim.optimizer=adam
{ADAM}: actor.optim.adam_*
the schedule is actor.lr_sched: actor.optim.min_lr actor.lr_sched.max_lr
a warm-up starts at 0: actor.lr_sched.lr_warmup_init=0|0.0
weights are float32 and arithmetic is bfloat16: actor.model.precision rollout.model.precision
environment.max_tokens, as runner.seq_length: actor.model.seq_length actor.model.encoder_*
seed is the run's: actor.seed
algorithm.advantage: gae has a critic: critic.use_critic_model=false
FSDP2 trains the model of config.json in bfloat16, and has no such part: actor.* inference.*
Hydra's own, or in a file that is read with this one: hydra.* defaults defaults.* config-*
"""

KEYS = (
    ForeignKey("runner.experiment_name", "name"),
    ForeignKey("runner.output_dir", "output_dir"),
    derived("runner.max_steps", "trainer.num_steps", "-1: max_epochs"),
    derived("runner.max_epochs", "trainer.num_steps", "without max_steps"),
    derived("runner.val_check_interval", "evaluation.every", "-1: never"),
    derived("runner.save_interval", "trainer.checkpoint_every", "-1: never"),
    ForeignKey("runner.seq_length", "environment.max_tokens"),
    ForeignKey("runner.max_tokens_per_mbs", "trainer.max_tokens_per_micro_batch"),
    ForeignKey("cluster.num_nodes", "placement.num_nodes"),
    *(derived(f"{_WHERE}.{who}", "placement.gpus_per_node", "all: 8") for who in _PARTS),
    ForeignKey("algorithm.group_size", "trainer.group_size"),
    ForeignKey("algorithm.n_minibatches", "trainer.num_mini_batches"),
    ForeignKey("algorithm.adv_type", "algorithm.advantage.kind", _RAW, _ESTIMATORS),
    derived("algorithm.loss_agg_func", _AGGREGATE, "", {"token-mean": "token_mean"}),
    derived("algorithm.loss_scales", _AGGREGATE, _EQUAL, _SCALES),
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
    derived("data.train_data_paths", "data.train", "one file; join several to train on all"),
    derived("data.val_data_paths", "data.test", "one file; join several to evaluate on all"),
    ForeignKey("data.rollout_batch_size", "trainer.questions_per_step"),
    ForeignKey("data.seed", "seed"),
    derived("data.data_size", "evaluation.num_questions", "-1: all"),
    ForeignKey("agentloop.max_turns", "environment.max_turns"),
    ForeignKey("agentloop.max_tool_response_length", "environment.max_observation_tokens"),
    derived("tools.search.server_addr", "search.url"),
    ForeignKey("tools.search.topk", "search.topk"),
    ForeignKey("rollout.model.model_path", "model.path"),
    ForeignKey("rollout.rollout_backend", "placement.engine.kind", "", _ENGINES),
    ForeignKey("rollout.tensor_parallel_size", "placement.engine.tensor_parallel"),
    derived("rollout.max_running_requests", "rollout.max_concurrent_episodes", "times the engines"),
    ForeignKey("actor.optim.lr", "trainer.learning_rate"),
    ForeignKey("actor.optim.weight_decay", "trainer.weight_decay"),
    ForeignKey("actor.optim.clip_grad", "trainer.max_grad_norm"),
    derived("actor.lr_sched.lr_warmup_fraction", "trainer.warmup_steps", "of lr_decay_iters"),
    derived("actor.lr_sched.lr_warmup_iters", "trainer.warmup_steps", "without a fraction"),
    derived("actor.lr_sched.lr_decay_iters", "trainer.warmup_steps", _SCHEDULE),
    derived("actor.lr_sched.lr_decay_style", _END, values=FALLS),
    derived("actor.lr_sched.min_lr", _END, "by optim.lr"),
    derived("actor.optim.lr_warmup_steps_ratio", "trainer.warmup_steps", "of FSDP's steps"),
    derived("actor.optim.total_training_steps", "trainer.warmup_steps", _SCHEDULE),
    derived("actor.model.recompute_granularity", _CHECKPOINTING, "any: true"),
    derived("actor.fsdp_config.gradient_checkpointing", _CHECKPOINTING),
    ForeignKey("actor.model.tensor_model_parallel_size", "placement.trainer.tensor_parallel"),
    *no_place(_NO_PLACE),
)

_START = {
    **START,
    "environment.protocol": "tags",
    "environment.dialect": "rlinf",
    "environment.prompt": "search-r1",
    "environment.has_final_turn": False,
    "environment.max_turn_tokens": 500,
    "rollout.max_concurrent_episodes": 1024,
    "reward.max_answer_tags": 10,
    "reward.many_answers_factor": 0.25,
    "algorithm.correction": {},
    "placement.engine.offload": True,
}


def derive(given: Given) -> Recipe:
    ours: Recipe = {"algorithm.loss.kind": "clipped"}
    for side in ("low", "high"):
        bound = given.number(f"algorithm.clip_ratio_{side}", "algorithm.ratio_clip_eps")
        ours[f"algorithm.loss.{side}"] = bound
    if dual := given.number("algorithm.clip_ratio_c"):
        ours["algorithm.loss.dual_clip"] = dual
    if given.value("algorithm.loss_scales"):
        ours[_AGGREGATE] = "sequence_mean"
    else:
        ours[_AGGREGATE] = (given.text("algorithm.loss_agg_func") or "token_mean").replace("-", "_")
    if given.text("algorithm.adv_type") == "raw":
        ours["algorithm.advantage.baseline"] = "none"
    beta = given.number("algorithm.kl_beta")
    ours |= leash(beta, lambda: given.text("algorithm.kl_penalty_type"), "loss")
    ours |= _steps(given) | _placement(given)
    ours |= cadence(given, "runner.save_interval", "runner.val_check_interval")
    if (size := given.number("data.data_size")) and size > 0:
        ours["evaluation.num_questions"] = int(size)
    ours |= given.first_files("data.train_data_paths", "data.val_data_paths")
    if address := given.text("tools.search.server_addr"):
        ours["search.url"] = address if "://" in address else f"http://{address}"
    is_fsdp = given.flag("actor.fsdp_config.gradient_checkpointing")
    if is_fsdp or given.value("actor.model.recompute_granularity") is not None:
        ours["model.gradient_checkpointing"] = True
    return ours


def _steps(given: Given) -> Recipe:
    """Steps of the loop, and the schedule, which counts optimizer steps."""
    ours: Recipe = {}
    batch, mini = given.number("data.rollout_batch_size"), given.number("algorithm.n_minibatches")
    schedule = ("actor.lr_sched.lr_decay_iters", "actor.optim.total_training_steps")
    steps = given.number("runner.max_steps")
    if steps is None or steps < 0:
        steps = given.steps("runner.max_epochs", batch)
    if steps is None and (updates := given.number(*schedule)):
        steps = whole(updates // (mini or 1))
    if steps:
        ours["trainer.num_steps"] = int(steps)
    elif given.value("data.train_data_paths"):
        ours["trainer.num_steps"] = f"{UNSET}trainer.num_steps"
    ratios = ("actor.lr_sched.lr_warmup_fraction", "actor.optim.lr_warmup_steps_ratio")
    if ratio := given.number(*ratios):
        ours["trainer.warmup_steps"] = warmup(given.number(*schedule), ratio)
    elif iterations := given.number("actor.lr_sched.lr_warmup_iters"):
        ours["trainer.warmup_steps"] = int(iterations)
    style = given.text("actor.lr_sched.lr_decay_style")
    return ours | fall(given, style, "actor.lr_sched.min_lr", "actor.optim.lr")


def _placement(given: Given) -> Recipe:
    num_nodes = given.number("cluster.num_nodes") or 1
    accelerators = given.text(*(f"{_WHERE}.{who}" for who in _PARTS)) or "all"
    num_gpus = _NUM_GPUS
    if found := re.fullmatch(r"(\d+)(?:-(\d+))?", accelerators):
        num_gpus = int(found[2] or found[1]) - int(found[1]) + 1
        num_gpus = whole(num_gpus / num_nodes)
    ours: Recipe = {"placement.gpus_per_node": num_gpus} | machines(num_nodes, num_gpus)
    if each := given.number("rollout.max_running_requests"):
        engines = num_nodes * num_gpus // (given.number("rollout.tensor_parallel_size") or 1)
        ours["rollout.max_concurrent_episodes"] = whole(each * engines)
    return ours


RLINF = ForeignTrainer(
    "RLinf",
    lambda values: any(name.startswith(("runner.", "agentloop.")) for name in values),
    KEYS,
    _START,
    derive,
    "data.train_data_paths",
    lambda values: {"algorithm.ratio_clip_eps": 0.2},
)
