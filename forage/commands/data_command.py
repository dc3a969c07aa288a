"""``forage data``: worlds, published sets and corpora, other forms of files, the best of episodes.

``forage.commands.commands`` lists the command; each kind below passes its arguments on to a module
of ``data/``. Imports stand inside the functions, so that the other commands start without them.
"""

from __future__ import annotations

from argparse import ArgumentParser, Namespace
from pathlib import Path

from forage.commands.arguments import count, positive


def add_data_arguments(parser: ArgumentParser) -> None:
    """The kinds of ``forage data`` and the arguments of each; they set ``run``."""
    kinds = parser.add_subparsers(metavar="KIND", title="kinds", required=True)
    world = kinds.add_parser("world", help="a generated encyclopedia", allow_abbrev=False)
    world.add_argument("--size", type=positive, required=True, metavar="N", help="articles")
    world.add_argument("--seed", type=count, default=0)
    world.add_argument("--hops", type=int, choices=(1, 2, 3), help="of all questions; else mixed")
    world.add_argument("--out", type=Path, required=True, metavar="DIR")
    world.set_defaults(run=run_world, usage=world.format_usage)
    squad = kinds.add_parser("squad", help="a file of SQuAD v1.1 JSON", allow_abbrev=False)
    squad.add_argument("file", type=Path, metavar="FILE")
    squad.add_argument("--out", type=Path, required=True, metavar="DIR")
    squad.set_defaults(run=_data_squad, usage=squad.format_usage)
    prepare = kinds.add_parser("prepare", help="published question sets", allow_abbrev=False)
    prepare.add_argument("sets", metavar="NAMES", help="nq,hotpotqa; seven: the seven test sets")
    prepare.add_argument("--split", choices=["train", "test"], required=True)
    prepare.add_argument("--source", metavar="ID_OR_DIR", help="another hub id, or a local copy")
    _add_question_output(prepare)
    prepare.set_defaults(run=_data_prepare, usage=prepare.format_usage)
    convert = kinds.add_parser("convert", help="question files of any form", allow_abbrev=False)
    convert.add_argument("files", type=Path, nargs="+", metavar="FILE")
    convert.add_argument("--form", help="of the files, where they fit more than one")
    convert.add_argument("--split", default="train", help="to write into Search-R1's rows")
    _add_question_output(convert)
    convert.set_defaults(run=_data_convert, usage=convert.format_usage)
    chosen = kinds.add_parser("select", help="the best of recorded episodes", allow_abbrev=False)
    chosen.add_argument("files", type=Path, nargs="+", metavar="EPISODES.jsonl")
    chosen.add_argument("--out", type=Path, metavar="FILE.jsonl", help="only counted if left out")
    chosen.add_argument("--min-reward", type=float, metavar="R")
    chosen.add_argument("--best-of-group", action="store_true", help="of a question in a step")
    chosen.add_argument("--max-per-question", type=positive, metavar="N")
    chosen.add_argument("--keep-duplicates", action="store_true", help="of the same tokens")
    chosen.add_argument("--arm", action="append", metavar="ARM", help="normal if left out")
    chosen.set_defaults(run=_data_select, usage=chosen.format_usage)
    corpus = kinds.add_parser("corpus", help="a published corpus", allow_abbrev=False)
    corpus.add_argument("name", metavar="NAME_OR_URL", help="wiki-18, wiki-18-e5, ... or http://")
    corpus.add_argument("--out", type=Path, required=True, metavar="DIR")
    corpus.add_argument("--sha256", help="of the file at the address")
    corpus.add_argument("--hub", metavar="URL", help="a mirror of the hub")
    corpus.add_argument("--revision", help="branch, tag or commit; main if left out")
    corpus.set_defaults(run=_data_corpus, usage=corpus.format_usage)


def _add_question_output(parser: ArgumentParser) -> None:
    parser.add_argument("--out", type=Path, required=True, metavar="FILE.jsonl|FILE.parquet")
    parser.add_argument("--prompt", default="search-r1", help="template of Search-R1's parquet")


def run_world(args: Namespace) -> int:
    from forage.data.world.encyclopedia import write_world

    write_world(args.out, size=args.size, seed=args.seed, num_hops=args.hops)
    return 0


def _data_squad(args: Namespace) -> int:
    from forage.data.corpus import write_corpus
    from forage.data.forms.forms import squad_passages
    from forage.data.questions import read_questions, write_questions

    passages = squad_passages(args.file)
    questions = read_questions(args.file)
    write_corpus(args.out / "corpus.jsonl", passages)
    write_questions(args.out / "questions.jsonl", questions)
    return 0


def _data_prepare(args: Namespace) -> int:
    from forage.data.published.benchmarks import names_of
    from forage.data.published.prepare import prepare
    from forage.environment.template import PromptTemplate

    template = PromptTemplate.load(args.prompt).text
    prepare(names_of(args.sets), args.split, args.out, args.source, template)
    return 0


def _data_convert(args: Namespace) -> int:
    from forage.data.published.prepare import convert
    from forage.environment.template import PromptTemplate

    convert(args.files, args.form, args.out, args.split, PromptTemplate.load(args.prompt).text)
    return 0


def _data_select(args: Namespace) -> int:
    from rich.console import Console

    from forage.config.warm_start_config import SelectConfig
    from forage.data.selection import select
    from forage.records import write_records

    config = SelectConfig(
        min_reward=args.min_reward,
        best_of_group=args.best_of_group,
        max_per_question=args.max_per_question,
        deduplicate=not args.keep_duplicates,
        arms=tuple(args.arm or ["normal"]),
    )
    selection = select(args.files, config)
    if args.out is not None:
        write_records(args.out, selection.records())
    Console().print(selection.explain(), soft_wrap=True)
    return 0


def _data_corpus(args: Namespace) -> int:
    from forage.data.published.published_corpora import fetch

    fetch(args.name, args.out, args.hub, args.revision, args.sha256)
    return 0
