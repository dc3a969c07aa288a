"""Rules for the keys of RLinf that are read together; ``rlinf.yaml`` lists all keys."""

from __future__ import annotations

import re

from forage.config.foreign.foreign_keys import (
    UNSET,
    Given,
    Recipe,
    cadence,
    fall,
    leash,
    machines,
    read_trainer,
    warmup,
    whole,
)

_NUM_GPUS = 8
"""GPUs of a node of the published example; ``all`` in its placement gives no number."""
_WHERE = "cluster.component_placement"
_PARTS = ("actor,rollout,reward", "rollout,reward", "actor", "rollout", "all")
_AGGREGATE = "algorithm.aggregate.kind"


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


RLINF = read_trainer(
    "rlinf",
    lambda values: any(name.startswith(("runner.", "agentloop.")) for name in values),
    derive,
)
