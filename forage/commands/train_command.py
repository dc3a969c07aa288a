"""``forage train``: reinforcement learning on a recipe, or a plan of what it requires."""

from __future__ import annotations

import logging
from argparse import Namespace

from forage.config.run_config import RunConfig, load_config
from forage.environment.remembered import as_trained
from forage.errors import UserError

LOG = logging.getLogger(__name__)


def run(args: Namespace) -> int:
    config = as_trained(load_config(args.config, args.overrides))  # before torch is imported
    if args.hardware is not None and not args.dry_run:
        raise UserError("--hardware only applies to a plan: add --dry-run")
    if args.dry_run:
        from forage.plan.accelerators import parse_hardware
        from forage.plan.model_check import with_model_check
        from forage.plan.plan import make_plan
        from forage.plan.plan_text import print_plan

        hardware = None if args.hardware is None else parse_hardware(args.hardware)
        print_plan(with_model_check(make_plan(config, hardware=hardware)))
        return 0
    from forage.plan.fit_here import fit_here
    from forage.train import run_training
    from forage.training.checkpoints.run_directory import earlier_settings

    played = args.rollout_only
    if played and args.resume:
        raise UserError("--rollout-only has no checkpoint to resume; name the remaining steps")
    if played:
        config = _up_to(config, played.stop)
    config.check_trainable()
    earlier = earlier_settings(config) if args.resume else None
    config = fit_here(config, "evaluation" if played else "training", earlier)
    run_training(config, args.resume, args.replay, played, args.trace)
    if config.evaluation.at_end and not (args.replay or played):
        from forage.evaluation.along_training import final_figures
        from forage.evaluation.result import read_result
        from forage.viewer.evaluation_pages import write_evaluation_page

        figures = final_figures(config)
        write_evaluation_page(figures.with_suffix(".html"), read_result(figures))
    LOG.info("%s", _what_is_next(config, args))
    return 0


def _what_is_next(config: RunConfig, args: Namespace) -> str:
    out, played = config.output_dir, args.rollout_only
    if played:
        episodes = out / "episodes.jsonl"
        learn = f"forage train {args.config} --replay {episodes} output_dir=ANOTHER"
        return f"Finished {_num_steps(len(played))}. Episodes: {episodes}. Next: {learn}"
    export = f"forage export {out} --out MODEL"
    if args.replay:
        return f"Finished learning from the records. Checkpoints: {out}. Next: {export}"
    done = f"Finished {_num_steps(config.trainer.num_steps)}. Records and checkpoints: {out}."
    return f"{done} Next: forage view {out}, or {export}"


def _num_steps(number: int) -> str:
    return f"{number} step{'s' * (number != 1)}"


def _up_to(config: RunConfig, num_steps: int) -> RunConfig:
    if num_steps > config.trainer.num_steps:
        raise UserError(
            f"--rollout-only includes step {num_steps - 1}, but trainer.num_steps is "
            f"{config.trainer.num_steps}: choose earlier steps or raise it"
        )
    trainer = config.trainer.model_copy(update={"num_steps": num_steps})
    return config.model_copy(update={"trainer": trainer})
