"""``forage convert-config``: another trainer's script or settings as a recipe."""

from __future__ import annotations

import sys
from argparse import ArgumentParser, Namespace
from pathlib import Path

import yaml

from forage.config.foreign.foreign_file import read_foreign
from forage.config.foreign.foreign_keys import ForeignTrainer, Translated, table, translate
from forage.config.foreign.rlinf_keys import RLINF
from forage.config.foreign.slime_keys import SLIME
from forage.config.foreign.trl_keys import TRL
from forage.config.foreign.verl_keys import VERL
from forage.config.run_config import build_config
from forage.errors import UserError
from forage.records import write_whole_text

TRAINERS = {"verl": VERL, "slime": SLIME, "rlinf": RLINF, "trl": TRL}


def add_arguments(parser: ArgumentParser) -> None:
    add = parser.add_argument
    text = "a shell script, a YAML file or, for TRL, a Python script; it is read and never run"
    add("file", nargs="?", type=Path, metavar="FILE", help=text)
    add("--out", type=Path, metavar="RECIPE", help="file to write; by default it is printed")
    text = "whose settings they are; by default their names say it (verl: Search-R1 as well)"
    add("--trainer", choices=sorted(TRAINERS), help=text)
    add("--table", choices=sorted(TRAINERS), help="print the table of a trainer's keys instead")


def run(args: Namespace) -> int:
    if args.table:
        sys.stdout.write(table(TRAINERS[args.table]))
        return 0
    if args.file is None:
        raise UserError("name the file to convert, or a table with --table")
    recipe = convert(args.file, args.trainer)
    if args.out is None:
        sys.stdout.write(recipe)
        return 0
    if args.out.exists():
        raise UserError(f"{args.out} is there already; name another file in --out")
    write_whole_text(args.out, recipe)
    sys.stdout.write(
        f"wrote {args.out}. Look at it, and see what it takes:\n\n"
        f"    forage train {args.out} --dry-run\n"
    )
    return 0


def convert(path: Path, named: str | None = None) -> str:
    """The recipe as YAML, with what has no place in one as comments; raises ``UserError``."""
    values = read_foreign(path)
    trainers = [TRAINERS[named]] if named else [t for t in TRAINERS.values() if t.is_his(values)]
    if len(trainers) != 1:
        known = ", ".join(trainer.name for trainer in TRAINERS.values())
        raise UserError(
            f"{path} sets nothing that says whose it is (known: {known}); name one with --trainer"
        )
    (trainer,) = trainers
    translated = translate(trainer, values)
    tree = translated.tree()
    tree.setdefault("model", {}).setdefault("path", "set/model.path")
    tree.setdefault("data", {}).setdefault("train", "set/data.train.jsonl")
    build_config(tree, source=f"the recipe that {path} becomes")
    return _comments(path, trainer, translated) + yaml.safe_dump(tree, sort_keys=False)


def _comments(path: Path, trainer: ForeignTrainer, translated: Translated) -> str:
    lines = [f"From {path.name} ({trainer.name}) by forage convert-config."]
    if translated.left_out:
        lines += ["", "Without a place in a recipe:", *translated.left_out]
    if translated.unknown:
        lines += ["", "Not known, and left out:", *translated.unknown]
    # A value may have several lines, and the second would be read as a setting.
    return "".join(f"# {' '.join(line.splitlines())}".rstrip() + "\n" for line in lines)
