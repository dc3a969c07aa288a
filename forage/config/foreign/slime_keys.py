"""slime's arguments, and those of the YAML that ``--custom-config-path`` lays above them.

Defaults are those of 624b824 and, for the optimizer, of its Megatron.
"""

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
    derived,
    fall,
    leash,
    machines,
    no_place,
    whole,
)

_LOSSES = {"gspo": "gspo", "cispo": "cispo"}  # the others' loss is clipped
_WEIGHTS, _REJECT = "algorithm.correction.weights", "algorithm.correction.reject"
_PLUS = "gspo, cispo: with that algorithm.loss; ..._baseline: with baseline: group"
_ESTIMATORS = {
    **{"grpo": "grpo", "gspo": "grpo", "cispo": "grpo", "ppo": "gae"},
    **dict.fromkeys(("reinforce_plus_plus", "reinforce_plus_plus_baseline"), "reinforce_plus_plus"),
}
_LEVELS = {"token": "token", "sequence": "sequence", "geometric": "geometric"}
_FUNCTIONS = {
    "examples.train_infer_mismatch_helper.mis.compute_mis_weights_with_cp": "as tis-mode",
    "slime.backends.megatron_utils.loss.icepop_function": "mask",
}
_MODEL = "the model's config.json describes it"

_NO_PLACE = f"""
the reference is the starting weights, or algorithm.kl.reference: ref-load
forage train --resume continues from output_dir: load
the form of a file is recognised: input-key label-key eval-input-key eval-label-key
{TEMPLATE}: apply-chat-template
{SHUFFLED}: rollout-shuffle
{CUT}: rollout-top-p rollout-top-k
an evaluation has the budgets of training: eval-max-* eval-top-p eval-top-k
micro-batches are balanced by their tokens: balance-data
the file that it names is read with this one: custom-config-path
{ADAM}: optimizer=adam adam-beta1 adam-beta2 adam-eps
{MICRO}: use-dynamic-batch-size micro-batch-size
{SERVER}: sglang-mem-fraction-static
a limit of one server; rollout.max_concurrent_episodes limits all: sglang-server-concurrency
turns, topk and url are in its code; set environment and search: custom-generate-function-path
the reward is exact match; for your own, reward.functions: custom-rm-path rm-type
algorithm.advantage normalises: normalize-advantages=false
Forage has no such loss: use-opd=false loss-type=policy_loss
belongs to a loss that Forage does not have: opd-* custom-loss-function-path
Forage has no dropout: attention-dropout=0|0.0 hidden-dropout=0|0.0
FSDP2 trains, and has no such part: sequence-parallel pipeline-model-parallel-size expert-*
FSDP2 trains, and has no such part: recompute-method recompute-num-layers attention-backend
FSDP2 trains, and has no such part: accumulate-allreduce-grads-in-fp32 attention-softmax-in-fp32
{_MODEL}: swiglu num-layers hidden-size ffn-hidden-size num-attention-heads kv-channels
{_MODEL}: use-rotary-position-embeddings disable-bias-linear add-qkv-bias normalization
{_MODEL}: norm-epsilon rotary-* group-query-attention num-query-groups vocab-size qk-layernorm
{_MODEL}: untie-embeddings-and-output-weights make-vocab-size-divisible-by
{LOGGED}: use-wandb wandb-*
"""

KEYS = (
    ForeignKey("hf-checkpoint", "model.path"),
    ForeignKey("save", "output_dir"),
    derived("save-interval", "trainer.checkpoint_every", "at least 1"),
    ForeignKey("prompt-data", "data.train"),
    derived("eval-prompt-data", "data.test", "one file, of a slice the first questions"),
    ForeignKey("rollout-seed", "seed"),
    derived("num-rollout", "trainer.num_steps"),
    derived("num-epoch", "trainer.num_steps", "without num-rollout"),
    ForeignKey("rollout-batch-size", "trainer.questions_per_step"),
    ForeignKey("n-samples-per-prompt", "trainer.group_size"),
    derived("global-batch-size", "trainer.num_mini_batches", "a step's episodes by it"),
    derived("num-steps-per-rollout", "trainer.num_mini_batches", "without global-batch-size"),
    ForeignKey("rollout-max-response-len", "environment.max_turn_tokens"),
    derived("rollout-max-context-len", "environment.max_tokens"),
    ForeignKey("rollout-temperature", "rollout.temperature"),
    ForeignKey("eval-interval", "evaluation.every"),
    ForeignKey("n-samples-per-eval-prompt", "evaluation.num_samples"),
    derived("eval-temperature", "evaluation.temperature", "with several samples"),
    derived("dynamic-sampling-filter-path", "algorithm.dynamic_sampling", "any: {}"),
    ForeignKey("advantage-estimator", "algorithm.advantage.kind", _PLUS, _ESTIMATORS),
    derived("disable-grpo-std-normalization", "algorithm.advantage.normalise_by_std"),
    derived("use-kl-loss", "algorithm.kl.place", "loss; without it the reward's"),
    derived("kl-loss-coef", "algorithm.kl.coefficient", "in the loss"),
    derived("kl-loss-type", "algorithm.kl.form", values=KL_FORMS),
    derived("kl-coef", "algorithm.kl.coefficient", "in the reward"),
    ForeignKey("entropy-coef", "algorithm.entropy_coefficient"),
    derived("eps-clip", "algorithm.loss.low", "and high, unless eps-clip-high is set"),
    derived("eps-clip-high", "algorithm.loss.high"),
    derived("eps-clip-c", "algorithm.loss.dual_clip"),
    ForeignKey("gamma", "algorithm.advantage.discount", "with ppo"),
    ForeignKey("lambd", "algorithm.advantage.gae_lambda", "with ppo"),
    ForeignKey("value-clip", "algorithm.advantage.critic.value_clip", "with ppo"),
    ForeignKey("critic-lr", "algorithm.advantage.critic.learning_rate", "with ppo"),
    ForeignKey("critic-lr-warmup-iters", "algorithm.advantage.critic.warmup_steps", "with ppo"),
    ForeignKey("num-critic-only-steps", "algorithm.advantage.critic.num_warmup_steps", "with ppo"),
    derived("calculate-per-token-loss", "algorithm.aggregate.kind", "true: token_mean"),
    derived("use-unbiased-kl", "algorithm.kl.is_importance_weighted", "in the loss"),
    derived("use-opsm", "algorithm.sequence_mask", "true: on"),
    derived("opsm-delta", "algorithm.sequence_mask.delta", "with use-opsm"),
    derived("use-tis", f"{_WEIGHTS}.kind", "truncate, or as tis-mode says"),
    derived("tis-clip", f"{_WEIGHTS}.high", "without tis-mode"),
    derived("tis-clip-low", f"{_WEIGHTS}.low", "without tis-mode; 0: truncate"),
    derived("custom-tis-function-path", f"{_WEIGHTS}.kind", values=_FUNCTIONS),
    derived("tis-mode", f"{_WEIGHTS}.kind", values={"truncate": "", "clip": "", "mask": ""}),
    derived("tis-level", f"{_WEIGHTS}.level", values=_LEVELS),
    derived("tis-lower-bound", f"{_WEIGHTS}.low", "not of truncate; also of use-rs"),
    derived("tis-upper-bound", f"{_WEIGHTS}.high", "also of use-rs"),
    derived("tis-batch-normalize", f"{_WEIGHTS}.normalise"),
    derived("use-rs", f"{_REJECT}.kind", "true: ratio, with use-tis"),
    derived("rs-level", f"{_REJECT}.level", values=_LEVELS),
    derived("rs-lower-bound", f"{_REJECT}.low", "null: that of tis"),
    derived("rs-upper-bound", f"{_REJECT}.high", "null: that of tis"),
    derived("rs-veto-threshold", "algorithm.correction.veto", "with use-rs"),
    ForeignKey("lr", "trainer.learning_rate"),
    derived("lr-decay-style", "trainer.final_learning_rate_ratio", values=FALLS),
    derived("min-lr", "trainer.final_learning_rate_ratio", "by lr"),
    ForeignKey("lr-warmup-iters", "trainer.warmup_steps"),
    ForeignKey("weight-decay", "trainer.weight_decay"),
    ForeignKey("clip-grad", "trainer.max_grad_norm"),
    ForeignKey("max-tokens-per-gpu", "trainer.max_tokens_per_micro_batch"),
    ForeignKey("tensor-model-parallel-size", "placement.trainer.tensor_parallel"),
    ForeignKey("context-parallel-size", "placement.trainer.sequence_parallel"),
    ForeignKey("actor-num-nodes", "placement.num_nodes"),
    ForeignKey("actor-num-gpus-per-node", "placement.gpus_per_node"),
    derived("colocate", "placement.engine.offload"),
    derived("rollout-num-gpus", "placement.engine.own_gpus", "not with colocate"),
    ForeignKey("rollout-num-gpus-per-engine", "placement.engine.tensor_parallel"),
    derived("recompute-granularity", "model.gradient_checkpointing", "any: true"),
    *no_place(_NO_PLACE),
)

_START = {
    **START,
    "environment.protocol": "tags",
    "environment.dialect": "slime",
    "environment.prompt": "search-r1",
    "environment.max_turns": 2,
    "environment.has_final_turn": False,
    "environment.max_observation_tokens": 500,
    "algorithm.decoupled": True,
    "algorithm.correction": {},
    "algorithm.aggregate.kind": "sequence_mean",
    "placement.engine.kind": "sglang",
}


_DEFAULTS = {
    "advantage-estimator": "grpo",
    "eps-clip": 0.2,
    "kl-loss-type": "k1",
    "lr-decay-style": "linear",
    "n-samples-per-prompt": 1,
    "opsm-delta": 1e-4,
    "value-clip": 0.2,
    "weight-decay": 0.01,
}


def derive(given: Given) -> Recipe:
    ours = _leash(given) | _loss(given) | _correction(given) | _steps(given) | _evaluation(given)
    if given.value("dynamic-sampling-filter-path") is not None:
        ours["algorithm.dynamic_sampling"] = {}
    estimator = given.text("advantage-estimator")
    if estimator in ("grpo", "gspo") and given.flag("disable-grpo-std-normalization"):
        ours["algorithm.advantage.normalise_by_std"] = False
    if estimator == "reinforce_plus_plus_baseline":
        ours["algorithm.advantage.baseline"] = "group"
    if estimator != "gspo" and given.flag("calculate-per-token-loss"):
        ours["algorithm.aggregate.kind"] = "token_mean"
    if given.value("recompute-granularity") is not None:
        ours["model.gradient_checkpointing"] = True
    longest = given.number("rollout-max-context-len") or max(
        4096, 500 + int(given.number("rollout-max-response-len") or 0)
    )
    ours["environment.max_tokens"] = int(longest)
    return ours | _placement(given)


def _steps(given: Given) -> Recipe:
    ours: Recipe = {}
    batch, size = given.number("rollout-batch-size"), given.number("n-samples-per-prompt") or 1
    steps = given.number("num-rollout") or given.steps("num-epoch", batch)
    ours["trainer.num_steps"] = int(steps) if steps else f"{UNSET}trainer.num_steps"
    if batch and (mini := given.number("global-batch-size")):
        ours["trainer.num_mini_batches"] = whole(batch * size / mini)
    elif mini := given.number("num-steps-per-rollout"):
        ours["trainer.num_mini_batches"] = int(mini)
    if batch:
        ours["rollout.max_concurrent_episodes"] = int(batch * size)
    if (every := given.number("save-interval")) is not None:
        ours["trainer.checkpoint_every"] = whole(every)
    return ours | fall(given, given.text("lr-decay-style"), "min-lr", "lr")


def _evaluation(given: Given) -> Recipe:
    """A question file follows its name and may end in a slice."""
    ours: Recipe = {}
    if named := given.value("eval-prompt-data"):
        file, _, kept = str(named[1] if isinstance(named, list) else named).partition("@")
        ours["data.test"] = file
        if found := re.fullmatch(r"\[0?:(\d+)\]", kept):
            ours |= {"evaluation.num_questions": int(found[1]), "evaluation.subset_seed": None}
    if (given.number("n-samples-per-eval-prompt") or 1) > 1:
        temperature = given.number("eval-temperature", "rollout-temperature")
        ours["evaluation.temperature"] = 1.0 if temperature is None else temperature
    return ours


def _placement(given: Given) -> Recipe:
    ours: Recipe = {}
    own = 0
    if given.flag("colocate"):
        ours["placement.engine.offload"] = True
    elif own := int(given.number("rollout-num-gpus") or 0):
        ours["placement.engine.kind"] = "vllm"  # Forage does not start SGLang
        ours["placement.engine.own_gpus"] = own
    num_gpus = given.number("actor-num-gpus-per-node")
    return ours | machines(given.number("actor-num-nodes"), num_gpus, own)


def _leash(given: Given) -> Recipe:
    is_loss = given.flag("use-kl-loss")
    coefficient = given.number("kl-loss-coef" if is_loss else "kl-coef")
    place = "loss" if is_loss else "reward"
    ours = leash(coefficient, lambda: given.text("kl-loss-type"), place)
    if ours and is_loss and given.flag("use-unbiased-kl"):
        ours["algorithm.kl.is_importance_weighted"] = True
    return ours


def _loss(given: Given) -> Recipe:
    kind = _LOSSES.get(given.text("advantage-estimator") or "grpo", "clipped")
    low = given.number("eps-clip")
    high = given.number("eps-clip-high")
    ours: Recipe = {"algorithm.loss.kind": kind, "algorithm.loss.low": low}
    ours["algorithm.loss.high"] = low if high is None else high
    if kind == "clipped" and (dual := given.number("eps-clip-c")):
        ours["algorithm.loss.dual_clip"] = dual
    if given.flag("use-opsm"):
        ours["algorithm.sequence_mask.delta"] = given.number("opsm-delta")
    return ours


def _correction(given: Given) -> Recipe:
    """slime's own truncation, or the rules of its mismatch helper, which sets ``tis_mode``."""
    if not given.flag("use-tis"):
        return {}
    function = given.text("custom-tis-function-path") or ""
    mode = None if "icepop" in function else given.text("tis-mode")
    if mode is None:
        least, high = given.number("tis-clip-low") or 0, given.number("tis-clip") or 2.0
        kind = "mask" if "icepop" in function else "clip" if least else "truncate"
        bounds = {} if kind == "truncate" else {"low": least}
        return _named(_WEIGHTS, kind=kind, high=high, **bounds)
    high = given.number("tis-upper-bound") or 2.0

    def low() -> float:
        bound = given.number("tis-lower-bound")
        return 1.0 / high if bound is None else bound

    ours = _named(_WEIGHTS, kind=mode, level=given.text("tis-level") or "token", high=high)
    ours[f"{_WEIGHTS}.normalise"] = given.flag("tis-batch-normalize")
    if mode != "truncate":
        ours[f"{_WEIGHTS}.low"] = low()
    if given.flag("use-rs"):
        level, least = given.text("rs-level") or "token", given.number("rs-lower-bound")
        most = given.number("rs-upper-bound") or high
        least = low() if least is None else least
        ours |= _named(_REJECT, kind="ratio", level=level, low=least, high=most)
        if veto := given.number("rs-veto-threshold"):
            ours["algorithm.correction.veto"] = veto
    return ours


def _named(section: str, **values: float | str) -> Recipe:
    return {f"{section}.{name}": value for name, value in values.items()}


SLIME = ForeignTrainer(
    "slime",
    lambda values: "hf-checkpoint" in values or "prompt-data" in values,
    KEYS,
    _START,
    derive,
    "prompt-data",
    lambda values: _DEFAULTS,
)
