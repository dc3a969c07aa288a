"""A recipe's file as a tree of settings, on top of the files that it is based on.

``base: other.yaml``, or a list of files, names what a recipe starts from, relative to itself. Later
files win over earlier ones and the recipe over all; sections are merged, everything else is
replaced, and a section that is null is taken away. ``key.sub=value`` from the command line is set
above them all. Which settings there are is not this file's business.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml

from forage.errors import UserError

Tree = dict[str, Any]
BASE = "base"


def read_tree(path: Path, based_on_it: tuple[Path, ...] = ()) -> Tree:
    """The settings of a recipe with those of its bases beneath; raises ``UserError``.

    ``based_on_it`` are the files that asked for this one, to find a circle by.
    """
    tree = _read(path)
    bases = tree.pop(BASE, [])
    names = [bases] if isinstance(bases, str) else bases
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        raise UserError(f"{path}: {BASE} is {bases!r}; name a file, or a list of files")
    chain = (*based_on_it, path.resolve())
    merged: Tree = {}
    for name in names:
        base = path.parent / name
        if base.resolve() in chain:
            raise UserError(f"{path}: {BASE} names {name}, which is based on it in turn")
        merged = merge(merged, read_tree(base, chain))
    return merge(merged, tree)


def merge(below: Tree, above: Tree) -> Tree:
    """Both trees in one; where both have a value, that of ``above``.

    ``{"a": {"b": 1, "c": 2}, "d": {"e": 3}}`` below ``{"a": {"c": 4}, "d": None}`` gives
    ``{"a": {"b": 1, "c": 4}}``.
    """
    merged = dict(below)
    for key, value in above.items():
        old = merged.get(key)
        if not isinstance(old, dict):
            merged[key] = value
        elif value is None:
            del merged[key]
        else:
            merged[key] = merge(old, value) if isinstance(value, dict) else value
    return merged


def _read(path: Path) -> Tree:
    try:
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        raise UserError(f"cannot read the config {path}: {error.strerror}") from error
    try:
        tree = yaml.safe_load(text) or {}
    except yaml.YAMLError as error:
        raise UserError(f"{path} is not valid YAML: {error}") from error
    if not isinstance(tree, dict):
        raise UserError(f"{path} holds a {type(tree).__name__}; a mapping of settings is needed")
    return tree


def apply_override(tree: Tree, override: str) -> None:
    """Set one ``key.sub=value`` in the tree, in place; raises ``UserError``."""
    key, equals, value = override.partition("=")
    if not equals or not key:
        raise UserError(
            f"override {override!r} is not of the form key.sub=value, "
            "for example trainer.learning_rate=1e-5"
        )
    *parents, last = key.split(".")
    node = tree
    for name in parents:
        if node.get(name) is None:  # absent, or null: an optional section that is off
            node[name] = {}
        child = node[name]
        if not isinstance(child, dict):
            raise UserError(f"override {override!r}: {name} is a value, it has no keys below it")
        node = child
    node[last] = _parse_value(value)


def _parse_value(value: str) -> Any:
    try:
        parsed = yaml.safe_load(value)
    except yaml.YAMLError:
        return value
    # YAML 1.1 reads 1e-5 as a string: numbers without a dot are common on a command line.
    if isinstance(parsed, str):
        try:
            return float(parsed)
        except ValueError:
            return parsed
    return parsed
