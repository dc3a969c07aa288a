"""slime's arguments."""

from __future__ import annotations

from forage.config.foreign.foreign_keys import (
    FALLS,
    KL_FORMS,
    LOGGED,
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

KEYS = (
    ForeignKey("hf-checkpoint", "model.path"),
    ForeignKey("save", "output_dir"),
    ForeignKey("save-interval", "trainer.checkpoint_every"),
    ForeignKey("prompt-data", "data.train"),
    ForeignKey("rollout-seed", "seed"),
    ForeignKey("num-rollout", "trainer.num_steps"),
    ForeignKey("rollout-batch-size", "trainer.questions_per_step"),
    ForeignKey("n-samples-per-prompt", "trainer.group_size"),
    derived("global-batch-size", "trainer.num_mini_batches", "a step's episodes by it"),
    ForeignKey("num-steps-per-rollout", "trainer.num_mini_batches"),
    ForeignKey("rollout-max-response-len", "environment.max_turn_tokens"),
    ForeignKey("rollout-max-context-len", "environment.max_tokens"),
    ForeignKey("rollout-temperature", "rollout.temperature"),
    ForeignKey("eval-interval", "evaluation.every"),
    ForeignKey("n-samples-per-eval-prompt", "evaluation.num_samples"),
    derived("eval-temperature", "evaluation.temperature", "of several samples"),
    derived("dynamic-sampling-filter-path", "algorithm.dynamic_sampling", "any: {}"),
    ForeignKey(
        "advantage-estimator",
        "algorithm.advantage.kind",
        "gspo: grpo, with algorithm.loss: gspo",
        {
            **{"grpo": "grpo", "gspo": "grpo", "ppo": "gae"},
            "reinforce_plus_plus": "reinforce_plus_plus",
            "reinforce_plus_plus_baseline": "reinforce_plus_plus",
        },
    ),
    derived("disable-grpo-std-normalization", "algorithm.advantage.normalise_by_std"),
    derived("use-kl-loss", "algorithm.kl.place", "loss; without it the reward's"),
    derived("kl-loss-coef", "algorithm.kl.coefficient", "in the loss"),
    derived("kl-loss-type", "algorithm.kl.form", values=KL_FORMS),
    derived("kl-coef", "algorithm.kl.coefficient", "in the reward"),
    ForeignKey("entropy-coef", "algorithm.entropy_coefficient"),
    derived("eps-clip", "algorithm.loss.low", "and high, unless eps-clip-high is set"),
    derived("eps-clip-high", "algorithm.loss.high"),
    derived("eps-clip-c", "algorithm.loss.dual_clip"),
    derived("use-tis", "algorithm.correction.weights.kind", "truncate"),
    derived("tis-clip", "algorithm.correction.weights.high"),
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
    ForeignKey("colocate", "placement.engine.offload"),
    derived("rollout-num-gpus", "placement.engine.own_gpus", "not with colocate"),
    ForeignKey("rollout-num-gpus-per-engine", "placement.engine.tensor_parallel"),
    derived("recompute-granularity", "model.gradient_checkpointing", "any: true"),
    *none("the starting weights, or algorithm.kl.reference", "ref-load"),
    *none("forage train --resume goes on from output_dir", "load"),
    *none("set data.test", "eval-prompt-data"),
    *none("the form of a file is recognised", "input-key label-key"),
    *none("environment.prompt renders prompts", "apply-chat-template"),
    *none(SHUFFLED, "rollout-shuffle"),
    *none("sampling from a cut distribution breaks the ratio: 1.0", "rollout-top-p"),
    *none("micro-batches are balanced by their tokens", "balance-data"),
    *none(
        "docs/algorithms.md has the kinds of correction",
        "tis-clip-low custom-tis-function-path custom-config-path",
    ),
    *none("AdamW", "optimizer"),
    *none("0.9", "adam-beta1"),
    *none("0.999: there is no key for it", "adam-beta2"),
    *none("micro-batches count tokens", "use-dynamic-batch-size micro-batch-size"),
    *none("you start SGLang's servers (docs/engines.md)", "sglang-mem-fraction-static"),
    *none(
        "turns that one server gets at a time; rollout.max_concurrent_episodes bounds all",
        "sglang-server-concurrency",
    ),
    *none(
        "turns, topk and the search server stand in that file: environment and search",
        "custom-generate-function-path",
    ),
    *none("the reward is exact match; one's own: reward.functions", "custom-rm-path"),
    *none(
        "FSDP2 trains, which has no such part",
        "sequence-parallel pipeline-model-parallel-size expert-model-parallel-size "
        "expert-tensor-parallel-size recompute-method recompute-num-layers "
        "attention-dropout hidden-dropout accumulate-allreduce-grads-in-fp32 "
        "attention-softmax-in-fp32 attention-backend",
    ),
    *none(LOGGED, "use-wandb wandb-project wandb-group wandb-key"),
)

_START = {
    "model.dtype": "float32",
    "model.device": "cuda",
    "environment.protocol": "tags",
    "environment.dialect": "slime",
    "environment.prompt": "search-r1",
    "environment.max_turns": 2,
    "environment.has_final_turn": False,
    "environment.max_observation_tokens": 500,
    "environment.max_tokens": 4096,
    "search.url": "http://127.0.0.1:8000",
    "reward.answer": "em",
    "algorithm.decoupled": True,
    "algorithm.correction": {},
    "algorithm.aggregate.kind": "sequence_mean",
    "placement.engine.kind": "sglang",
}


def derive(given: Given) -> Recipe:
    ours = _leash(given) | _loss(given)
    style = given.text("lr-decay-style") or "constant"
    ours |= fall(style, None, given.number("min-lr"), given.number("lr"))
    batch, size = given.number("rollout-batch-size"), given.number("n-samples-per-prompt") or 1
    if batch and (mini := given.number("global-batch-size")):
        ours["trainer.num_mini_batches"] = whole(batch * size / mini)
    if (given.number("n-samples-per-eval-prompt") or 1) > 1:
        temperature = given.number("eval-temperature", "rollout-temperature")
        ours["evaluation.temperature"] = 1.0 if temperature is None else temperature
    if batch:
        ours["rollout.max_concurrent_episodes"] = int(batch * size)
    if "dynamic-sampling-filter-path" in given.values:
        ours["algorithm.dynamic_sampling"] = {}
    if given.flag("disable-grpo-std-normalization"):
        ours["algorithm.advantage.normalise_by_std"] = False
    if given.text("advantage-estimator") == "reinforce_plus_plus_baseline":
        ours["algorithm.advantage.baseline"] = "group"
    if "recompute-granularity" in given.values:
        ours["model.gradient_checkpointing"] = True
    own = 0 if given.flag("colocate") else int(given.number("rollout-num-gpus") or 0)
    if own:
        ours["placement.engine.kind"] = "vllm"  # Forage starts no SGLang on GPUs of its own
        ours["placement.engine.own_gpus"] = own
    num_nodes = given.number("actor-num-nodes") or 1
    if num_nodes > 1:
        ours["placement.cluster"] = "ray"
    if num_nodes * (given.number("actor-num-gpus-per-node") or 1) - own > 1:
        ours["placement.trainer.compute_dtype"] = "bfloat16"  # what Megatron computes in there
    return ours


def _leash(given: Given) -> Recipe:
    is_loss = given.flag("use-kl-loss")
    coefficient = given.number("kl-loss-coef" if is_loss else "kl-coef")
    return leash(coefficient, given.text("kl-loss-type") or "k1", "loss" if is_loss else "reward")


def _loss(given: Given) -> Recipe:
    kind = "gspo" if given.text("advantage-estimator") == "gspo" else "clipped"
    low = given.number("eps-clip") or 0.2
    ours: Recipe = {"algorithm.loss.kind": kind, "algorithm.loss.low": low}
    ours["algorithm.loss.high"] = given.number("eps-clip-high") or low
    if kind == "clipped" and (dual := given.number("eps-clip-c")):
        ours["algorithm.loss.dual_clip"] = dual
    if given.flag("use-tis"):
        weights: Recipe = {"weights": {"kind": "truncate"}}
        if high := given.number("tis-clip"):
            weights["weights"]["high"] = high
        ours["algorithm.correction"] = weights
    return ours


SLIME = ForeignTrainer(
    "slime",
    lambda values: "hf-checkpoint" in values or "prompt-data" in values,
    KEYS,
    _START,
    derive,
)
