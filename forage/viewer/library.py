"""The runs under the paths that a viewer was given: their records, settings and evaluations.

A run is a directory that holds metrics, episodes or the figures of an evaluation; its folder
``evaluation/`` belongs to it. Folders are walked anew every few seconds, so a run that begins
later appears. Files are only read, and may be anybody's: what is wrong with one run is that run's
error.
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
from itertools import islice
from pathlib import Path
from typing import Any

import yaml

from forage.config.config_file import MAX_YAML_BYTES, parse_yaml
from forage.errors import UserError
from forage.records import EPISODES_FILE, METRICS_FILE, metric_rows
from forage.remote.plain_file import open_plain, read_plain

_EVALUATIONS = "evaluation"
_SKIPPED = {"checkpoints", "tensorboard", "node_modules", "__pycache__", _EVALUATIONS}
_MAX_DEPTH = 6
_SECONDS_BETWEEN_WALKS = 3.0
_HEAD_BYTES = 65_536
_MAX_FOLDERS, _MAX_FILES = 20_000, 1_000
"""Folders under a path, and files in a folder, beyond which the viewer does not look."""
_MAX_NUMBERS, _MAX_METRICS = 20_000_000, 5_000
"""Of all rows of a run (some 2 GB in memory), and of one row."""
_MAX_STEP, _MAX_SIZE = 2**53, 1e300


@dataclass(frozen=True, slots=True)
class ShownRun:
    """A directory with records, under the name that addresses use."""

    key: str
    directory: Path

    def episode_files(self) -> list[str]:
        """Paths of its episode files, relative to the run: the one of training first."""
        names = [name for name in self._files(".jsonl") if _holds_episodes(self.directory / name)]
        return sorted(names, key=lambda name: (name != EPISODES_FILE, name))

    def figures_files(self) -> list[str]:
        """Paths of the files of figures of its evaluations, relative to the run."""
        return sorted(name for name in self._files(".json") if _has_figures(self.directory / name))

    def config_text(self) -> str:
        """Its settings as YAML, "" where it has none; raises ``UserError``."""
        path = self.directory / "config.yaml"
        if not os.path.lexists(path):
            return ""
        return read_plain(path, MAX_YAML_BYTES).decode("utf-8", "replace")

    def config(self) -> dict[str, Any]:
        """Its settings as a tree, empty where it has none that can be read."""
        return self._read_config()[0]

    def config_error(self) -> str:
        """Why its settings cannot be read, "" where they can, or where it has none."""
        return self._read_config()[1]

    def _read_config(self) -> tuple[dict[str, Any], str]:
        try:
            tree, error = _tree(self.config_text())
        except UserError as refused:
            return {}, str(refused)
        return tree, error and f"{self.directory / 'config.yaml'}: {error}"

    def _files(self, suffix: str) -> Iterator[str]:
        """Files with this ending in the run and its evaluations, relative to the run."""
        for pattern in (f"*{suffix}", f"{_EVALUATIONS}/*{suffix}"):
            for path in islice(self.directory.glob(pattern), _MAX_FILES):
                name = path.relative_to(self.directory).as_posix()
                if name == _text(name):  # an address can name it
                    yield name


class Library:
    """Every run under the given paths; several threads may use it."""

    def __init__(self, paths: Sequence[Path]) -> None:
        """Raises ``UserError`` where a path is missing or holds no records."""
        self._paths = [_run_directory_of(path) for path in paths]
        self._lock = threading.Lock()
        self._runs: dict[str, ShownRun] = {}
        self._walked_at = -1.0
        self._metrics: dict[Path, tuple[tuple[int, int], list[dict[str, float]] | UserError]] = {}
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
        are left out. Raises ``UserError`` for a damaged line, and for more than can be shown.
        """
        path = run.directory / METRICS_FILE
        try:
            status = path.stat()
        except OSError:
            return []
        mark = (status.st_mtime_ns, status.st_size)
        known = self._metrics.get(path)
        if known is None or known[0] != mark:
            try:
                rows = _rows(run.directory)
            except UserError as error:
                rows = error
            known = self._metrics[path] = (mark, rows)
        if isinstance(known[1], UserError):
            raise known[1]
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
                key = _text(key)
                if key in seen:
                    key = _text(str(directory))
                seen[key] = directory
        yield from (ShownRun(key, directory) for key, directory in sorted(seen.items()))


def _rows(directory: Path) -> list[dict[str, float]]:
    rows: list[dict[str, float]] = []
    num_numbers = 0
    for written in metric_rows(directory):
        step = written.get("step")
        if isinstance(step, int | float) and abs(step) > _MAX_STEP:
            raise UserError(
                f"{directory / METRICS_FILE} has a row of step {str(step)[:40]}; a step is a whole "
                "number below 2^53"
            )
        row = _numbers(written)
        num_numbers += 1 + len(row)
        if num_numbers > _MAX_NUMBERS or len(row) > _MAX_METRICS:
            raise UserError(
                f"{directory / METRICS_FILE} holds more than {_MAX_NUMBERS:,} numbers, or more "
                f"than {_MAX_METRICS:,} in a row; the viewer shows no more"
            )
        if math.isfinite(row.get("step", math.nan)):
            rows.append(row)
    return rows


def _numbers(row: Mapping[str, Any]) -> dict[str, float]:
    # Each line brings its own copies of the names, which are half of what a row takes.
    return {sys.intern(name): _shown(v) for name, v in row.items() if isinstance(v, int | float)}


def _shown(value: float) -> float:
    """The value, infinite or 0 where a chart could not compute with it."""
    if abs(value) > _MAX_SIZE:
        return math.inf if value > 0 else -math.inf
    return value if abs(value) > 1 / _MAX_SIZE or value != value else 0.0


def _text(name: str) -> str:
    """A file's name as text that can be encoded: other bytes are replaced."""
    return os.fsencode(name).decode("utf-8", "replace")


@functools.lru_cache(maxsize=1_024)
def _tree(text: str) -> tuple[dict[str, Any], str]:
    """A config as a tree, and its error; kept: a table of runs is made anew every few seconds."""
    try:
        tree = parse_yaml(text)
    except yaml.YAMLError as error:
        return {}, f"not valid YAML: {error}"
    return (tree, "") if isinstance(tree, dict) else ({}, "no mapping of settings" if text else "")


def _run_directory_of(path: Path) -> Path:
    """The directory whose records a path names: its own, or that of a file of an evaluation."""
    if not os.path.exists(path):
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
    for place, names, _ in islice(os.walk(root), _MAX_FOLDERS):
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
    has_metrics = os.path.exists(directory / METRICS_FILE)
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
        with open_plain(path) as file:
            return file.read(_HEAD_BYTES)
    except (UserError, OSError):
        return b""
