"""The runs under the paths that a viewer was given: their records, settings and evaluations.

A run is a directory that holds metrics, episodes or the figures of an evaluation; its folder
``evaluation/`` belongs to it. Folders are walked anew every few seconds, so a run that begins
later appears. Files are only read.
"""

from __future__ import annotations

import functools
import math
import os
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from forage.errors import UserError
from forage.records import EPISODES_FILE, METRICS_FILE, read_metrics

_EVALUATIONS = "evaluation"
_SKIPPED = {"checkpoints", "tensorboard", "node_modules", "__pycache__", _EVALUATIONS}
_MAX_DEPTH = 6
_SECONDS_BETWEEN_WALKS = 3.0
_HEAD_BYTES = 65_536


@dataclass(frozen=True, slots=True)
class ShownRun:
    """A directory with records, under the name that addresses use."""

    key: str
    directory: Path

    def episode_files(self) -> list[str]:
        """Paths of its episode files, relative to the run: the one of training first."""
        found = [*self.directory.glob("*.jsonl"), *self.directory.glob(f"{_EVALUATIONS}/*.jsonl")]
        names = [p.relative_to(self.directory).as_posix() for p in found if _holds_episodes(p)]
        return sorted(names, key=lambda name: (name != EPISODES_FILE, name))

    def figures_files(self) -> list[str]:
        """Paths of the files of figures of its evaluations, relative to the run."""
        found = [*self.directory.glob("*.json"), *self.directory.glob(f"{_EVALUATIONS}/*.json")]
        return sorted(p.relative_to(self.directory).as_posix() for p in found if _has_figures(p))

    def config_text(self) -> str:
        """Its settings as YAML, "" where it has none."""
        path = self.directory / "config.yaml"
        return path.read_text(encoding="utf-8", errors="replace") if path.exists() else ""

    def config(self) -> dict[str, Any]:
        """Its settings as a tree, empty where it has none that can be read."""
        return _tree(self.config_text())


class Library:
    """Every run under the given paths; several threads may use it."""

    def __init__(self, paths: Sequence[Path]) -> None:
        """Raises ``UserError`` where a path is missing or holds no records."""
        self._paths = [_run_directory_of(path) for path in paths]
        self._lock = threading.Lock()
        self._runs: dict[str, ShownRun] = {}
        self._walked_at = -1.0
        self._metrics: dict[Path, tuple[tuple[int, int], list[dict[str, float]]]] = {}
        for path in self._paths:
            if not any(True for _ in _directories_with_records(path)):
                raise UserError(
                    f"{path} holds no records ({METRICS_FILE}, {EPISODES_FILE}, or the figures of "
                    "an evaluation): name the output_dir of a run, or a folder of runs"
                )

    def runs(self) -> list[ShownRun]:
        with self._lock:
            if time.monotonic() - self._walked_at > _SECONDS_BETWEEN_WALKS or not self._runs:
                self._runs = {run.key: run for run in self._walk()}
                self._walked_at = time.monotonic()
            return list(self._runs.values())

    def run(self, key: str) -> ShownRun:
        """The run of that name, the first for ""; raises ``UserError``."""
        runs = self.runs()
        found = runs[0] if not key else next((run for run in runs if run.key == key), None)
        if found is None:
            raise UserError(f"no run is called {key!r}; there are {', '.join(r.key for r in runs)}")
        return found

    def metrics(self, run: ShownRun) -> list[dict[str, float]]:
        """The metric rows of a run, oldest first, read again when the file has changed.

        A file of this name that another program wrote may hold words, and rows of no step: these
        are left out. Raises ``UserError`` for a damaged line.
        """
        path = run.directory / METRICS_FILE
        try:
            status = path.stat()
        except OSError:
            return []
        mark = (status.st_mtime_ns, status.st_size)
        known = self._metrics.get(path)
        if known is None or known[0] != mark:
            rows = [_numbers(row) for row in read_metrics(run.directory)]
            rows = [row for row in rows if math.isfinite(row.get("step", math.nan))]
            known = self._metrics[path] = (mark, rows)
        return known[1]

    def _walk(self) -> Iterator[ShownRun]:
        seen: dict[str, Path] = {}
        for root in self._paths:
            for directory in _directories_with_records(root):
                if directory in seen.values():
                    continue
                below = directory.relative_to(root).as_posix()
                key = root.name if below == "." else below
                if len(self._paths) > 1 and below != ".":
                    key = f"{root.name}/{below}"
                if key in seen:
                    key = str(directory)
                seen[key] = directory
        yield from (ShownRun(key, directory) for key, directory in sorted(seen.items()))


def _numbers(row: Mapping[str, Any]) -> dict[str, float]:
    # Each line brings its own copies of the names, which are half of what a row takes.
    return {sys.intern(name): v for name, v in row.items() if isinstance(v, int | float)}


@functools.lru_cache(maxsize=1_024)
def _tree(text: str) -> dict[str, Any]:
    """A config as a tree; kept, since a table of runs is made anew every few seconds."""
    try:
        tree = yaml.safe_load(text)
    except yaml.YAMLError:
        return {}
    return tree if isinstance(tree, dict) else {}


def _run_directory_of(path: Path) -> Path:
    """The directory whose records a path names: its own, or that of a file of an evaluation."""
    if not path.exists():
        raise UserError(f"{path} does not exist: name the output_dir of a run, or a folder of runs")
    is_known = path.is_dir() or path.name == METRICS_FILE
    if not (is_known or _holds_episodes(path) or _has_figures(path)):
        raise UserError(
            f"{path} is a file without records: name the output_dir of a run, a folder of runs, or "
            "the .json or .jsonl of an evaluation"
        )
    directory = path.resolve() if path.is_dir() else path.resolve().parent
    is_part = directory.name == _EVALUATIONS and _has_records(directory.parent)
    return directory.parent if is_part else directory


def _directories_with_records(root: Path) -> Iterator[Path]:
    for place, names, _ in os.walk(root):
        directory = Path(place)
        if _has_records(directory):
            yield directory
        depth = len(directory.relative_to(root).parts)
        names[:] = sorted(
            name
            for name in names
            if depth < _MAX_DEPTH and name not in _SKIPPED and not name.startswith(".")
        )


def _has_records(directory: Path) -> bool:
    run = ShownRun("", directory)
    has_metrics = (directory / METRICS_FILE).exists()
    return has_metrics or bool(run.episode_files()) or bool(run.figures_files())


def _holds_episodes(path: Path) -> bool:
    """Whether the first line looks like an episode's; training's own file may still be empty."""
    head = _head(path)
    is_training = path.name == EPISODES_FILE
    return (is_training and not head) or (head.startswith(b'{"step":') and b'"question":' in head)


def _has_figures(path: Path) -> bool:
    head = _head(path)
    return b'"protocol":' in head and b'"fingerprint":' in head


def _head(path: Path) -> bytes:
    try:
        with path.open("rb") as file:
            return file.read(_HEAD_BYTES)
    except OSError:
        return b""
