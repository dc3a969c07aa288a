"""``forage data``: generates, downloads, converts and selects questions, corpora and episodes.

Each kind passes its arguments to a module of ``data/``. Imports are inside the functions, so that
one kind does not load the packages of another.
"""

from __future__ import annotations

import logging
from argparse import Namespace
from pathlib import Path

from forage.commands.arguments import made_of
from forage.errors import UserError

LOG = logging.getLogger(__name__)


def _world(args: Namespace) -> int:
    from forage.data.world.encyclopedia import write_world
    from forage.data.world.hard_world import SKILLS, write_hard_world

    if args.hard is not None:
        if unknown := sorted(set(args.hard) - set(SKILLS)):
            raise UserError(f"--hard: unknown skill {unknown[0]}; choose from {', '.join(SKILLS)}")
        skills = args.hard or SKILLS
        world = write_hard_world(args.out, size=args.size, seed=args.seed, skills=skills)
    else:
        world = write_world(args.out, size=args.size, seed=args.seed, num_hops=args.hops)
    questions = f"{len(world.train)} training questions and {len(world.test)} test questions"
    _log_written(args.out, f"{len(world.passages)} articles, {questions}")
    return 0


def _squad(args: Namespace) -> int:
    from forage.data.corpus import write_corpus
    from forage.data.forms.forms import squad_passages
    from forage.data.questions import read_questions, write_questions

    passages, questions = squad_passages(args.file), read_questions(args.file)
    write_corpus(args.out / "corpus.jsonl", passages)
    write_questions(args.out / "questions.jsonl", questions)
    _log_written(args.out, f"{len(passages)} passages, {len(questions)} questions")
    return 0


def _log_written(out: Path, what: str) -> None:
    next_command = f"forage index --corpus {out / 'corpus.jsonl'} --out {out / 'index'}"
    LOG.info("Wrote %s: %s. Next: %s", out, what, next_command)


def _prepare(args: Namespace) -> int:
    from forage.data.published.benchmarks import names_of
    from forage.data.published.prepare import prepare
    from forage.environment.template import PromptTemplate

    template = PromptTemplate.load(args.prompt).text
    prepare(names_of(args.sets), args.split, args.out, args.source, template)
    return 0


def _convert(args: Namespace) -> int:
    from forage.data.published.prepare import convert
    from forage.environment.template import PromptTemplate

    convert(args.files, args.form, args.out, args.split, PromptTemplate.load(args.prompt).text)
    return 0


def _select(args: Namespace) -> int:
    from rich.console import Console

    from forage.config.warm_start_config import SelectConfig
    from forage.data.selection import select
    from forage.records import write_records

    config = made_of(args, SelectConfig, arms=tuple(args.arm or ["normal"]))
    selection = select(args.files, config)
    if args.out is not None:
        write_records(args.out, selection.records())
    Console().print(selection.explain(), soft_wrap=True)
    return 0


def _corpus(args: Namespace) -> int:
    from forage.data.published.published_corpora import fetch

    fetch(args.name, args.out, args.hub, args.revision, args.sha256)
    return 0


KINDS = {
    "world": _world,
    "squad": _squad,
    "prepare": _prepare,
    "convert": _convert,
    "select": _select,
    "corpus": _corpus,
}
