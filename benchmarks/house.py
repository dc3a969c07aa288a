"""The shape of the code: what a reader meets, sizes, callers, and files touched by an addition.

    python benchmarks/house.py              measure, and write the tables of house.md
    python benchmarks/house.py --check      measure, and exit with 1 if its stories differ
    python benchmarks/house.py --list step  print the functions of a story by file

``stories.py`` runs the stories; the sizes are read from the source of ``forage/``.
"""

from __future__ import annotations

import argparse
import ast
import re
import sys
from collections import defaultdict
from pathlib import Path
from statistics import median

from stories import PACKAGE, Function, functions, num_lines, run_stories

PAGE = Path(__file__).with_suffix(".md")
LONG_FUNCTION_LINES = 60
OTHER_SUBJECTS = ("rollout/engines/torch/", "models/", "retrieval/", "remote/")
"""The in-process engine, retrieval and HTTP, which a reader of a step or an episode can skip."""
CLIENT = ("retrieval/client/", "remote/")
TOUCHED = {
    "an estimator, as pass_at_k": (3, r"\bPassAtK\b", 2),
    "a loss, as gspo": (3, r"\bGspoLoss\b", 2),
    "a term of the reward, as format_valid": (2, r"\bformat_valid\b", 1),
    "a tool, as open_page": (12, r"\bmake_open_page\b", 2),
    "an engine, as chat": (8, r"\bChatEngine\b", 2),
    "an index backend, as qdrant": (7, r"\bQdrantManifest\b|\bQdrantOptions\b", 2),
    "a source of serve, as lucene": (3, r"\bLucene[(]|import Lucene\b|class Lucene\b", 2),
    "a web provider, as brave": (4, r"\bBrave\(|, Brave\b|import Brave\b", 2),
}
"""The number of files before, the names by which a built-in is found, and the target number.

A new built-in is written in a new file and named in the other files that name this one.
"""

Modules = dict[str, tuple[str, ast.Module]]
Story = set[Function]


def read_modules(package: Path) -> Modules:
    """Source and syntax tree of each module, by its path below the package."""
    modules: Modules = {}
    for path in sorted(package.rglob("*.py")):
        text = path.read_text(encoding="utf-8")
        modules[path.relative_to(package).as_posix()] = (text, ast.parse(text))
    return modules


def callers(modules: Modules) -> dict[str, set[str]]:
    """The modules that import each module, except ``__init__`` files."""
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


def sizes_table(modules: Modules) -> str:
    lengths = [f.num_lines for file, (_, tree) in modules.items() for f in functions(file, tree)]
    total = sum(len(text.splitlines()) for text, _ in modules.values())
    single = sum(len(importers) == 1 for importers in callers(modules).values())
    num_long = sum(length > LONG_FUNCTION_LINES for length in lengths)
    in_train = len(modules["train.py"][0].splitlines())
    rows = [
        ("lines of `forage/`", "33,362", f"{total:,}", "56,500"),
        ("files", "", f"{len(modules)}", ""),
        ("files at the root", "44", f"{sum('/' not in file for file in modules)}", "14"),
        ("files with one caller", "90", f"{single}", ""),
        ("functions, median of their lines", "", f"{len(lengths):,}, {median(lengths):.0f}", ""),
        (f"functions over {LONG_FUNCTION_LINES} lines", "3", f"{num_long}", "0"),
        ("lines of `train.py`", "319", f"{in_train}", "200"),
    ]
    return _table(("size", "before (692f6b1)", "now", "aim"), rows)


def touched_table(modules: Modules) -> str:
    rows: list[tuple[str, ...]] = []
    for title, (before, pattern, aim) in TOUCHED.items():
        files = [f"`{file}`" for file, (text, _) in modules.items() if re.search(pattern, text)]
        rows.append((title, f"{before}", f"{len(files)}", f"{aim}", ", ".join(files)))
    return _table(("to add", "before (692f6b1)", "now", "aim", "the files now"), rows)


def stories_table(stories: dict[str, Story]) -> str:
    step, query, evaluation = stories["step"], stories["query"], stories["evaluation"]
    client = {function for function in query if function.file.startswith(CLIENT)}
    rows = [
        ("a training step", *_size(step), ""),
        ("... without engine, retrieval and HTTP", *_size(_subject(step)), "150, 35, 1,700"),
        ("a query from the policy to BM25 and back", *_size(query), ""),
        ("... its client: `retrieval/client`, `remote`", *_size(client), "20 functions"),
        ("an evaluation episode", *_size(evaluation), ""),
        ("... without engine, retrieval and HTTP", *_size(_subject(evaluation)), ""),
    ]
    return _table(("story", "functions", "files", "lines", "aim"), rows)


def _subject(story: Story) -> Story:
    return {function for function in story if not function.file.startswith(OTHER_SUBJECTS)}


def _size(story: Story) -> tuple[str, str, str]:
    return f"{len(story)}", f"{len({f.file for f in story})}", f"{num_lines(story):,}"


def _table(head: tuple[str, ...], rows: list[tuple[str, ...]]) -> str:
    lines = [head, ("---",) * len(head), *rows]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines)


def table_on(page: str, name: str) -> str:
    """The table between the markers of that name."""
    found = _between(name).search(page)
    assert found is not None, f"the page has no markers named {name}"
    return found[2]


def with_table(page: str, name: str, table: str) -> str:
    """The page with ``table`` between the markers of that name."""
    page, number = _between(name).subn(lambda found: found[1] + table + found[3], page)
    assert number == 1, f"the page has {number} pairs of markers named {name}"
    return page


def _between(name: str) -> re.Pattern[str]:
    return re.compile(rf"(<!-- {name}: .*? -->\n\n)(.*?)(\n\n<!-- end of {name} -->)", re.DOTALL)


def listing(story: Story) -> str:
    """The functions of a story by file, the files with the most lines first."""
    by_file: dict[str, Story] = defaultdict(set)
    for function in story:
        by_file[function.file].add(function)
    lines: list[str] = []
    for file in sorted(by_file, key=lambda name: (-num_lines(by_file[name]), name)):
        lines.append(f"{num_lines(by_file[file]):5} {file}")
        lines += [f"{each.num_lines:9} {each.name}" for each in sorted(by_file[file])]
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    mode = parser.add_mutually_exclusive_group()
    mode.add_argument("--check", action="store_true", help="compare with house.md, write nothing")
    names = ("step", "query", "evaluation")
    mode.add_argument("--list", choices=names, help="print the functions of a story by file")
    args = parser.parse_args()
    stories = run_stories()
    if args.list:
        print(listing(stories[args.list]))
        return
    page, table = PAGE.read_text(encoding="utf-8"), stories_table(stories)
    if args.check:
        if table_on(page, "stories") != table:
            sys.exit(f"house.md differs; run python benchmarks/house.py. Measured:\n{table}")
        return
    modules = read_modules(PACKAGE)
    page = with_table(page, "stories", table)
    page = with_table(page, "sizes", sizes_table(modules))
    page = with_table(page, "touched", touched_table(modules))
    PAGE.write_text(page, encoding="utf-8")
    print(table)


if __name__ == "__main__":
    main()
