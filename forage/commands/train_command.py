"""``forage train``: reinforcement learning on a recipe, or the plan of what it would take."""

from __future__ import annotations

from argparse import ArgumentParser, Namespace

from forage.commands.arguments import add_config
from forage.config.run_config import load_config
from forage.errors import UserError


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


def run(args: Namespace) -> int:
    config = load_config(args.config, args.overrides)  # before torch is imported
    if args.hardware is not None and not args.dry_run:
        raise UserError("--hardware is for a plan: add --dry-run")
    if args.dry_run:
        from forage.plan.accelerators import parse_hardware
        from forage.plan.plan import make_plan
        from forage.plan.plan_text import print_plan

        hardware = None if args.hardware is None else parse_hardware(args.hardware)
        print_plan(make_plan(config, hardware=hardware))
        return 0
    from forage.train import run_training

    run_training(config, resume=args.resume)
    if config.evaluation.at_end:
        from forage.evaluation.along_training import final_figures
        from forage.evaluation.result import read_result
        from forage.viewer.evaluation_pages import write_evaluation_page

        figures = final_figures(config)
        write_evaluation_page(figures.with_suffix(".html"), read_result(figures))
    return 0
