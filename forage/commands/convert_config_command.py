"""``forage convert-config``: another trainer's script or settings as a recipe."""

from __future__ import annotations

import sys
from argparse import ArgumentParser, Namespace
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import yaml

from forage.config.foreign.foreign_file import ForeignFile
from forage.config.foreign.foreign_keys import (
    PUBLISHED,
    UNSET,
    ForeignTrainer,
    table,
)
from forage.config.foreign.foreign_translation import Translated, translate
from forage.config.foreign.rlinf_keys import RLINF
from forage.config.foreign.slime_keys import SLIME
from forage.config.foreign.trl_keys import TRL
from forage.config.foreign.verl_keys import VERL
from forage.config.run_config import build_config
from forage.data.forms.rows import read_rows
from forage.errors import UserError
from forage.records import write_whole_text

TRAINERS = {"verl": VERL, "slime": SLIME, "rlinf": RLINF, "trl": TRL}


def add_arguments(parser: ArgumentParser) -> None:
    add = parser.add_argument
    text = "a shell script, a YAML file or, for TRL, a Python script; it is never run"
    add("file", nargs="?", type=Path, metavar="FILE", help=text)
    add("--out", type=Path, metavar="RECIPE", help="file to write; by default it is printed")
    text = "the trainer that the file belongs to; by default its keys decide (verl: also Search-R1)"
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
        raise UserError(f"{args.out} exists already; name another file in --out")
    write_whole_text(args.out, recipe)
    sys.stdout.write(
        f"Wrote {args.out}. Read the comments at its top, then check what it needs:\n\n"
        f"    forage train {args.out} --dry-run\n"
    )
    return 0


def convert(path: Path, named: str | None = None) -> str:
    """The recipe as YAML under comments on keys that it does not show; raises ``UserError``."""
    file = ForeignFile(path)
    trainers = [TRAINERS[named]] if named else _recognised(file)
    if len(trainers) != 1:
        known = ", ".join(trainer.name for trainer in TRAINERS.values())
        raise UserError(
            f"{path} has no keys that tell whose it is (known: {known}); name one with --trainer"
            + "".join(f"\n  {note}" for note in file.notes)
        )
    (trainer,) = trainers
    translated = translate(trainer, file.values, _num_questions(file, trainer))
    if translated.refused:
        raise UserError(
            f"{path} asks for what Forage cannot do; change it in a copy:\n  "
            + "\n  ".join(translated.refused)
        )
    recipe = translated.recipe
    for name in ("model.path", "data.train"):
        recipe.setdefault(name, f"{UNSET}{name}")
    unset = [f"{name}: set it" for name, value in recipe.items() if str(value).startswith(UNSET)]
    build_config(_without_unset_numbers(translated), source=f"the recipe that {path} becomes")
    sections = {
        "Not in the file, and needed": unset,
        "Read as": translated.read_as,
        "Without a place or an effect in a recipe": translated.left_out,
        "Not known, and left out; check whether they matter": translated.unknown,
        "The files themselves": file.notes,
    }
    return _comments(f"From {path.name} ({trainer.name}) by forage convert-config.", sections) + (
        yaml.safe_dump(translated.tree(), sort_keys=False)
    )


def _recognised(file: ForeignFile) -> list[ForeignTrainer]:
    return [trainer for trainer in TRAINERS.values() if trainer.recognises(file.values)]


def _num_questions(file: ForeignFile, trainer: ForeignTrainer) -> int | None:
    """Training questions: rows of the file if it is here, or of the published set of that name."""
    names = file.values.get(trainer.train_files)
    name = str(names[0] if isinstance(names, list) and names else names or "")
    if (path := file.find(name)) is not None:
        with suppress(UserError):  # of a form that forage train will refuse
            return sum(1 for _ in read_rows(path))
    sizes = [size for part, size in PUBLISHED.items() if part in name.lower()]
    if sizes:
        file.notes.append(f"{name} is not here: counted as the published set, {sizes[0]} questions")
    return sizes[0] if sizes else None


def _without_unset_numbers(translated: Translated) -> dict[str, Any]:
    """The tree with our defaults for numbers that the user has to set, to check the rest."""
    known = {n: v for n, v in translated.recipe.items() if v != f"{UNSET}{n}" or "steps" not in n}
    return Translated(known).tree()


def _comments(title: str, sections: Mapping[str, Sequence[str]]) -> str:
    lines = [title]
    for heading, sentences in sections.items():
        lines += ["", f"{heading}:", *sentences] if sentences else []
    # A value may have several lines, and the second would be read as a setting.
    return "".join(f"# {' '.join(line.splitlines())}".rstrip() + "\n" for line in lines)
