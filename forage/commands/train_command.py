"""``forage train``: reinforcement learning on a recipe, or the plan of what it would take."""

from __future__ import annotations

from argparse import ArgumentParser, Namespace

from forage.commands.arguments import add_config
from forage.config.run_config import load_config


def add_arguments(parser: ArgumentParser) -> None:
    add_config(parser)
    how = parser.add_mutually_exclusive_group()
    how.add_argument("--resume", action="store_true", help="go on from the last checkpoint")
    text = (
        "check everything and print the plan (memory, steps, places, downloads), then stop "
        "without starting anything"
    )
    how.add_argument("--dry-run", action="store_true", help=text)


def run(args: Namespace) -> int:
    config = load_config(args.config, args.overrides)  # before torch is imported
    if args.dry_run:
        from forage.plan.plan import make_plan
        from forage.plan.plan_text import print_plan

        print_plan(make_plan(config))
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
