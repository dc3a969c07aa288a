"""``forage data``: generated worlds, published sets, other forms of files, chosen episodes.

Each kind passes its arguments on to a module of ``data/``. Imports stand inside the functions, so
that one kind does not wait for the packages of another.
"""

from __future__ import annotations

import logging
import math
from argparse import ArgumentParser, ArgumentTypeError, Namespace
from pathlib import Path

from forage.commands.arguments import add_kind, add_kinds, count, made_of, positive
from forage.errors import UserError

LOG = logging.getLogger(__name__)


def add_arguments(parser: ArgumentParser) -> None:
    kinds = add_kinds(parser)
    _add_world(add_kind(kinds, "world", "a generated encyclopedia and its questions", _world))
    squad = add_kind(kinds, "squad", "a file of SQuAD v1.1 as corpus and questions", _squad)
    squad.add_argument("file", type=Path, metavar="FILE", help="a file of SQuAD v1.1 JSON")
    _add_directory(squad)
    _add_prepare(add_kind(kinds, "prepare", "published question sets, downloaded", _prepare))
    _add_convert(add_kind(kinds, "convert", "question files of any known form", _convert))
    _add_select(add_kind(kinds, "select", "the best of recorded episodes", _select))
    _add_corpus(add_kind(kinds, "corpus", "a published corpus, downloaded", _corpus))


def _add_world(parser: ArgumentParser) -> None:
    add = parser.add_argument
    add("--size", type=positive, required=True, help="articles of the encyclopedia")
    add("--seed", type=count, default=0, help="number that the world is drawn from")
    text = "searches that every question takes (default: a mixture of 1, 2 and 3)"
    how = parser.add_mutually_exclusive_group()
    how.add_argument("--hops", type=int, choices=(1, 2, 3), help=text)
    text = "the hard world, with these skills, or with no name all of them: four_hops, comparison, "
    text += "distractors, unanswerable, numbers, paraphrase"
    how.add_argument("--hard", nargs="*", metavar="SKILL", help=text)
    _add_directory(parser)


def _add_prepare(parser: ArgumentParser) -> None:
    add = parser.add_argument
    text = "names of question sets, for example nq,hotpotqa; or seven, for the seven test sets"
    add("sets", metavar="NAMES", help=text)
    add("--split", choices=["train", "test"], required=True, help="the part of each set to take")
    text = "another id on the hub, or a directory that holds a copy (default: the set's own id)"
    add("--source", metavar="ID_OR_DIR", help=text)
    _add_question_output(parser)


def _add_convert(parser: ArgumentParser) -> None:
    add = parser.add_argument
    add("files", type=Path, nargs="+", metavar="FILE", help="files of questions")
    add("--form", help="the form of the files, needed where they fit more than one")
    add("--split", default="train", help="name of the split to write into Search-R1's rows")
    _add_question_output(parser)


def _add_select(parser: ArgumentParser) -> None:
    add = parser.add_argument
    text = "recorded episodes of runs or evaluations"
    add("files", type=Path, nargs="+", metavar="EPISODES.jsonl", help=text)
    text = "file to write the chosen episodes to (default: they are only counted)"
    add("--out", type=Path, metavar="FILE.jsonl", help=text)
    add("--min-reward", type=_reward, metavar="R", help="lowest reward that an episode may have")
    text = "keep only the best episode of each question in each step"
    add("--best-of-group", action="store_true", help=text)
    text = "highest number of episodes to keep for a question"
    add("--max-per-question", type=positive, help=text)
    text = "keep episodes of the same tokens more than once"
    add("--keep-duplicates", action="store_false", dest="deduplicate", help=text)
    text = "arm of an evaluation whose episodes are taken; repeat for more (default normal)"
    add("--arm", action="append", help=text)


def _add_corpus(parser: ArgumentParser) -> None:
    add = parser.add_argument
    text = "a corpus by name (wiki-18, wiki-18-e5, ...), or the address of one (http://...)"
    add("name", metavar="NAME_OR_URL", help=text)
    _add_directory(parser)
    add("--sha256", metavar="HEX", help="SHA-256 that the file at the address must have")
    add("--hub", metavar="URL", help="address of a mirror of the hub (default: the hub itself)")
    add("--revision", help="branch, tag or commit on the hub (default main)")


def _add_directory(parser: ArgumentParser) -> None:
    text = "directory to write to"
    parser.add_argument("--out", type=Path, required=True, metavar="DIR", help=text)


def _add_question_output(parser: ArgumentParser) -> None:
    text = "file to write the questions to, in Forage's form (jsonl) or Search-R1's (parquet)"
    metavar = "FILE.jsonl|FILE.parquet"
    parser.add_argument("--out", type=_question_file, required=True, metavar=metavar, help=text)
    text = "prompt template to write into Search-R1's parquet rows"
    parser.add_argument("--prompt", default="search-r1", metavar="TEMPLATE", help=text)


def _question_file(text: str) -> Path:
    """A file to write questions to: its ending says in which form."""
    if Path(text).suffix not in (".jsonl", ".parquet"):
        raise ArgumentTypeError(f"{text!r} must end in .jsonl or .parquet, which says the form")
    return Path(text)


def _reward(text: str) -> float:
    """A number: every episode would pass the bound ``nan``."""
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if math.isnan(value):
        raise ArgumentTypeError(f"{text!r} is not a number")
    return value


def _world(args: Namespace) -> int:
    from forage.data.world.encyclopedia import write_world
    from forage.data.world.hard_world import SKILLS, write_hard_world

    if args.hard is not None:
        if unknown := sorted(set(args.hard) - set(SKILLS)):
            raise UserError(
                f"--hard: there is no skill {unknown[0]}; there are {', '.join(SKILLS)}"
            )
        skills = args.hard or SKILLS
        world = write_hard_world(args.out, size=args.size, seed=args.seed, skills=skills)
    else:
        world = write_world(args.out, size=args.size, seed=args.seed, num_hops=args.hops)
    questions = f"{len(world.train)} questions to train on, {len(world.test)} to test with"
    _say_written(args.out, f"{len(world.passages)} articles, {questions}")
    return 0


def _squad(args: Namespace) -> int:
    from forage.data.corpus import write_corpus
    from forage.data.forms.forms import squad_passages
    from forage.data.questions import read_questions, write_questions

    passages, questions = squad_passages(args.file), read_questions(args.file)
    write_corpus(args.out / "corpus.jsonl", passages)
    write_questions(args.out / "questions.jsonl", questions)
    _say_written(args.out, f"{len(passages)} passages, {len(questions)} questions")
    return 0


def _say_written(out: Path, what: str) -> None:
    next_command = f"forage index --corpus {out / 'corpus.jsonl'} --out {out / 'index'}"
    LOG.info("%s: %s; next: %s", out, what, next_command)


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
