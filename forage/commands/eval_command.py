"""``forage eval``: evaluates a model on a recipe's questions, under each of its arms."""

from __future__ import annotations

from argparse import Namespace

from forage.config.run_config import load_config
from forage.environment.remembered import as_trained


def run(args: Namespace) -> int:
    config = as_trained(load_config(args.config, args.overrides))  # before torch is imported
    from forage.evaluation.evaluate import run_evaluation
    from forage.plan.fit_here import fit_here
    from forage.viewer.evaluation_pages import write_evaluation_page

    config = fit_here(config, "evaluation")
    result, out = run_evaluation(config, args.out, args.fresh, args.retry_failed)
    write_evaluation_page(out.with_suffix(".html"), result)
    return 0
