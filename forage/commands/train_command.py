"""``forage train``: reinforcement learning on a recipe, or the plan of what it would take."""

from __future__ import annotations

import logging
from argparse import ArgumentParser, ArgumentTypeError, Namespace
from pathlib import Path

from forage.commands.arguments import add_config
from forage.config.run_config import RunConfig, load_config
from forage.environment.remembered import as_trained
from forage.errors import UserError

LOG = logging.getLogger(__name__)


def add_arguments(parser: ArgumentParser) -> None:
    add_config(parser)
    how = parser.add_mutually_exclusive_group()
    how.add_argument("--resume", action="store_true", help="go on from the last checkpoint")
    text = (
        "check everything and print the plan (memory, steps, places, downloads), then stop "
        "without starting anything"
    )
    how.add_argument("--dry-run", action="store_true", help=text)
    text = (
        "with --dry-run: whether the recipe fits this hardware, what to change where it does not, "
        "and an estimate of the hours, such as 8xH100-80GB or 4x8xH100-80GB"
    )
    parser.add_argument("--hardware", metavar="NAME", help=text)
    half = parser.add_mutually_exclusive_group()
    text = (
        "learn from recorded episodes instead of playing, step by step: the file of a finished run "
        "gives its updates again (may be repeated)"
    )
    half.add_argument("--replay", type=Path, action="append", default=[], metavar="FILE", help=text)
    text = (
        "play and record the groups of some steps (0:10, or 3 for one) with the weights of "
        "model.path, and learn nothing"
    )
    half.add_argument("--rollout-only", type=_steps, metavar="FIRST:END", help=text)
    text = "write a timeline of steps, episodes, turns and searches (open it in ui.perfetto.dev)"
    parser.add_argument("--trace", type=Path, help=text)


def run(args: Namespace) -> int:
    config = as_trained(load_config(args.config, args.overrides))  # before torch is imported
    if args.hardware is not None and not args.dry_run:
        raise UserError("--hardware is for a plan: add --dry-run")
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
        raise UserError("--rollout-only has no checkpoint to resume; name the steps that are left")
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
    """What has been written, and the commands that use it."""
    out, played = config.output_dir, args.rollout_only
    if played:
        episodes = out / "episodes.jsonl"
        steps = f"{len(played)} step{'s' * (len(played) > 1)}"
        learn = f"forage train {args.config} --replay {episodes} output_dir=ANOTHER"
        return f"{episodes}: the groups of {steps}; next: {learn}"
    export = f"forage export {out} --out MODEL"
    if args.replay:
        return f"{out}: checkpoints of what was learnt again; next: {export}"
    what = f"the records and checkpoints of {config.trainer.num_steps} steps"
    return f"{out}: {what}; next: forage view {out}, or {export}"


def _steps(text: str) -> range:
    """``3:6`` or ``3``."""
    first, colon, end = text.partition(":")
    if not (first.isdecimal() and (end.isdecimal() or not colon)):
        raise ArgumentTypeError(f"{text!r} names no steps; write FIRST:END, 0:10 for example")
    steps = range(int(first), int(end) if colon else int(first) + 1)
    if not steps:
        raise ArgumentTypeError(f"{text!r} names no steps: the end is not above the first")
    return steps


def _up_to(config: RunConfig, num_steps: int) -> RunConfig:
    """The run with fewer steps; raises ``UserError`` where it has no more."""
    if num_steps > config.trainer.num_steps:
        raise UserError(
            f"--rollout-only: step {num_steps - 1} is asked for, and trainer.num_steps is "
            f"{config.trainer.num_steps}"
        )
    trainer = config.trainer.model_copy(update={"num_steps": num_steps})
    return config.model_copy(update={"trainer": trainer})
