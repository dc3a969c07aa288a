"""The shape of the code, measured: sizes, callers, and what one opens to follow a thing through.

    python benchmarks/house.py [--repo DIR]

Reads the source of ``forage/`` as text and runs nothing of it, so any commit can be measured.
``house.yaml`` beside it names the stories, each a list of functions in the order they are called,
and the names by which the files that one must touch are counted. The figures are in ``house.md``.
"""

from __future__ import annotations

import argparse
import ast
import re
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from statistics import median

import yaml

STORIES_FILE = Path(__file__).with_suffix(".yaml")
LONG_FUNCTION_LINES = 60


@dataclass(frozen=True, slots=True)
class Function:
    """A function or method: ``name`` is ``Class.method`` for methods."""

    file: str
    name: str
    num_lines: int


def read_modules(package: Path) -> dict[str, tuple[str, ast.Module]]:
    """Source and syntax tree of each module, by its path below the package."""
    modules: dict[str, tuple[str, ast.Module]] = {}
    for path in sorted(package.rglob("*.py")):
        text = path.read_text(encoding="utf-8")
        modules[path.relative_to(package).as_posix()] = (text, ast.parse(text))
    return modules


def functions(file: str, tree: ast.AST, prefix: str = "") -> Iterator[Function]:
    """Every function of a module, those inside classes and functions too."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            name = f"{prefix}{node.name}"
            if not isinstance(node, ast.ClassDef):
                assert node.end_lineno is not None, "a parsed function ends somewhere"
                yield Function(file, name, node.end_lineno - node.lineno + 1)
            yield from functions(file, node, f"{name}.")
        else:
            yield from functions(file, node, prefix)


def callers(modules: dict[str, tuple[str, ast.Module]]) -> dict[str, set[str]]:
    """The modules that import each module, ``__init__`` files apart."""
    names = {
        ".".join(("forage", *Path(file).with_suffix("").parts)): file
        for file in modules
        if Path(file).stem != "__init__"
    }
    importers: dict[str, set[str]] = {file: set() for file in names.values()}
    for importer, (_, tree) in modules.items():
        for node in ast.walk(tree):
            targets: list[str] = []
            if isinstance(node, ast.Import):
                targets = [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom) and node.module:
                targets = [f"{node.module}.{alias.name}" for alias in node.names] + [node.module]
            for target in targets:
                if target in names:
                    importers[names[target]].add(importer)
    return importers


def print_sizes(modules: dict[str, tuple[str, ast.Module]]) -> None:
    all_functions = [f for file, (_, tree) in modules.items() for f in functions(file, tree)]
    lengths = [function.num_lines for function in all_functions]
    long = [f for f in all_functions if f.num_lines > LONG_FUNCTION_LINES]
    single = sorted(file for file, who in callers(modules).items() if len(who) == 1)
    by_stem: dict[str, list[str]] = defaultdict(list)
    for file in modules:
        if Path(file).stem != "__init__":
            by_stem[Path(file).stem].append(file)
    print(f"lines                         {sum(len(t.splitlines()) for t, _ in modules.values())}")
    print(f"files                         {len(modules)}")
    print(f"files at the root             {sum('/' not in file for file in modules)}")
    print(f"files with one caller         {len(single)}")
    print(f"files of one name             {sum(len(f) > 1 for f in by_stem.values())}")
    print(f"functions, lines (median)     {len(lengths)}, {median(lengths):.0f}")
    print(f"functions over {LONG_FUNCTION_LINES} lines       {len(long)}")
    for room, files in sorted(_rooms(single).items()):
        print(f"    one caller, {room}: {', '.join(files)}")


def _rooms(files: list[str]) -> dict[str, list[str]]:
    rooms: dict[str, list[str]] = defaultdict(list)
    for file in files:
        room, _, name = file.rpartition("/")
        rooms[room or "the root"].append(name)
    return rooms


def print_story(title: str, steps: list[str], known: dict[str, Function]) -> None:
    """One line of a story's size, or what it names that is not there."""
    missing = [step for step in steps if step not in known]
    if missing:
        print(f"{title}: not here: {', '.join(missing)}")
        return
    told = [known[step] for step in steps]
    num_lines = sum(function.num_lines for function in told)
    num_files = len({function.file for function in told})
    print(f"{title}: {num_lines} lines, {num_files} files, {len(told)} functions")


def print_touched(title: str, pattern: str, modules: dict[str, tuple[str, ast.Module]]) -> None:
    """The files that name a thing that is there already, as another one would have to be named."""
    files = [file for file, (text, _) in modules.items() if re.search(pattern, text)]
    print(f"{title}: {len(files)} ({', '.join(files)})")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repo", type=Path, default=Path(__file__).parents[1])
    package = parser.parse_args().repo / "forage"
    modules = read_modules(package)
    known = {
        f"{f.file}:{f.name}": f
        for file, (_, tree) in modules.items()
        for f in functions(file, tree)
    }
    plan = yaml.safe_load(STORIES_FILE.read_text(encoding="utf-8"))
    print_sizes(modules)
    for title, steps in plan["stories"].items():
        print_story(title, steps, known)
    for title, pattern in plan["touched"].items():
        print_touched(title, pattern, modules)


if __name__ == "__main__":
    main()
