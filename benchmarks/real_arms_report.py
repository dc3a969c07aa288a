"""Reports what the arms of ``real_arms.py`` have done: tables on the terminal, and small files."""

from __future__ import annotations

import tarfile
from collections.abc import Sequence
from pathlib import Path

from forage.evaluation.comparison import compare
from forage.evaluation.result import read_result
from forage.records import read_metrics

MAX_BYTES = 15 << 20


def arms_of(out: Path) -> list[Path]:
    return sorted(folder for folder in (out / "arms").glob("*") if folder.is_dir())


def print_arms(out: Path) -> None:
    """Prints what each arm has done so far, one line each."""
    print(f"{'arm':16} steps  exact match of the played episodes, step by step")
    for folder in arms_of(out):
        rows = read_metrics(folder) if (folder / "metrics.jsonl").exists() else []
        ems = " ".join(f"{row['em/mean']:.2f}" for row in rows)
        print(f"{folder.name:16} {len(rows):5}  {ems}")
        for name in ("seconds/rollout", "seconds/train", "searches/mean", "policy/entropy"):
            values = [row[name] for row in rows if name in row]
            if values:
                print(f"{'':24}{name}: {values[0]:.3g} first, {values[-1]:.3g} last")
        differing = [row.get("policy/logprob_diff_max", 0.0) for row in rows]
        if differing:
            print(f"{'':24}sampler and trainer: {max(differing):.2g} at most", flush=True)


def print_evaluations(out: Path) -> None:
    """Prints each evaluation, and its gain over the warm start, paired by question."""
    results = {
        path.stem: read_result(path)
        for path in sorted((out / "evaluation").glob("*.json"))
        if "fingerprint" not in path.name
    }
    warm = results.get("warm")
    print(f"{'model':32} {'exact match':20} searches  found  by source; gain over the warm start")
    for name, result in results.items():
        summary = result.summary.arms["normal"]
        em, found = summary.overall.em, summary.overall.gold_recall
        sources = " ".join(f"{k} {v.em.mean:.2f}" for k, v in summary.by_source.items())
        text = f"{name:32} {em.mean:.3f} [{em.low:.2f}, {em.high:.2f}]   "
        text += f"{summary.overall.searches.mean:.2f}      "
        text += f"{'-' if found is None else f'{found.mean:.2f}'}   {sources}"
        if warm is not None and name != "warm":
            compared = compare(warm, result, ("warm", name)).arms[0].overall.figure("em")
            gain = compared.difference.interval
            text += f"; {gain.mean:+.3f} [{gain.low:+.3f}, {gain.high:+.3f}]"
        print(text, flush=True)


def is_small_record(path: Path) -> bool:
    """Whether a file contains no weights, no episodes and no text that ships with Forage."""
    if {"index", "base", "warm", "checkpoints"} & set(path.parts):
        return False
    names = ("metrics.jsonl", "warm_start.jsonl")
    return path.suffix in (".json", ".md", ".log", ".yaml") or path.name in names


def pack(target: Path, root: Path, paths: Sequence[Path]) -> None:
    with tarfile.open(target, "w:xz") as tar:
        for path in paths:
            tar.add(path, arcname=str(path.relative_to(root)))
    size = target.stat().st_size
    print(f"{target.name}: {len(paths)} files, {size / 1e6:.1f} MB", flush=True)
    if size > MAX_BYTES:
        print(f"{target.name} is larger than {MAX_BYTES / 1e6:.0f} MB and was left out")
        target.unlink()
