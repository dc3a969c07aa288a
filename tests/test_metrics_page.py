"""docs/metrics.md and the code name the same metrics: the page explains each logged one."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parent.parent
METRIC = re.compile(r"[a-z_]+/[a-z][a-z_0-9]*[a-z0-9]")
ROOMS = (
    *("algorithms", "training", "watch", "evaluation/along_training.py"),
    *("retrieval/client", "rollout/engines/engine.py"),
)
"""Files that create metrics; in others such strings are paths or model names."""
PATHS_OF_OTHERS = (
    ROOT / "forage" / "training" / "layouts",
    ROOT / "forage" / "watch" / "trackers",
)


def literals() -> Iterator[str]:
    for room in ROOMS:
        path = ROOT / "forage" / room
        for file in [path] if path.suffix else sorted(path.rglob("*.py")):
            if any(map(file.is_relative_to, PATHS_OF_OTHERS)):
                continue
            for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
                if isinstance(node, ast.Constant) and isinstance(node.value, str):
                    yield node.value
                if isinstance(node, ast.JoinedStr) and isinstance(node.values[0], ast.Constant):
                    yield f"{node.values[0].value}*"  # the rest is filled in


def logged() -> set[str]:
    return {text for text in literals() if METRIC.fullmatch(text)}


def logged_families() -> set[str]:
    """The prefixes of composed names, such as ``em/hops_``."""
    families = {text[:-1] for text in literals() if text.endswith("*")}
    return {text for text in families if re.fullmatch(r"[a-z_]+/[a-z_]*", text)}


def explained() -> set[str]:
    """The names in the first column; one cell may list several, as in `a`, `b`."""
    page = (ROOT / "docs" / "metrics.md").read_text(encoding="utf-8")
    cells = [line.split("|")[1] for line in page.splitlines() if line.startswith("| `")]
    return {name for cell in cells for name in re.findall(r"`([^`]+)`", cell)}


def test_each_logged_metric_is_explained() -> None:
    assert len(logged()) > 40
    assert logged() - explained() == set()
    prefixes = {re.split(r"[A-Z]", name)[0] for name in explained() if re.search("[A-Z]", name)}
    assert logged_families() - prefixes == set()


def test_each_explained_metric_is_logged() -> None:
    plain = {name for name in explained() if METRIC.fullmatch(name)}
    assert plain - logged() == set()
    named = {name for name in explained() if re.search("[A-Z]", name)}
    assert {re.split(r"[A-Z]", name)[0] for name in named} - logged_families() == set()
