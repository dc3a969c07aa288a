"""Runs the demo for several seeds and tabulates the main figures.

    python benchmarks/demo.py --seeds 0 1 2 --out runs/seeds

A seed that has already been run is read, not run again.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from pathlib import Path

from forage.evaluation.summary import EvaluationSummary
from forage.records import read_metrics


def run(out: Path, seed: int) -> None:
    started = time.perf_counter()
    command = [sys.executable, "-m", "forage", "demo", "--out", str(out), "--seed", str(seed)]
    subprocess.run(command, check=True)
    (out / "seconds.json").write_text(json.dumps(time.perf_counter() - started))


def read(path: Path) -> EvaluationSummary:
    return EvaluationSummary.from_json(json.loads(path.read_text(encoding="utf-8")))


def row(out: Path, seed: int) -> str:
    before = read(out / "evaluation" / "before.json").arms
    after = read(out / "evaluation" / "after.json").arms
    seconds = json.loads((out / "seconds.json").read_text())
    largest = max(step["policy/logprob_diff_max"] for step in read_metrics(out))
    by_hops = after["normal"].by_hops
    cells = [
        str(seed),
        f"{seconds / 60:.1f}",
        f"{before['normal'].overall.em.mean:.3f}",
        "{0.mean:.3f} [{0.low:.3f}, {0.high:.3f}]".format(after["normal"].overall.em),
        " / ".join(f"{by_hops[hops].em.mean:.2f}" for hops in sorted(by_hops)),
        " / ".join(f"{by_hops[hops].searches.mean:.2f}" for hops in sorted(by_hops)),
        f"{after['closed_book'].overall.em.mean:.3f}",
        f"{after['gold'].overall.em.mean:.3f}",
        f"{after['random'].overall.em.mean:.3f}",
        f"{largest:.1e}",
        *sampled_cells(out),
    ]
    return "| " + " | ".join(cells) + " |"


def sampled_cells(out: Path) -> list[str]:
    """avg@4 and pass@4 of four episodes per question at temperature 1, before and after."""
    before, after = (
        read(out / "evaluation" / f"{label}-sampled.json").arms["normal"].overall
        for label in ("before", "after")
    )
    pairs = (before.em, after.em), (before.pass_at[4], after.pass_at[4])
    return [f"{a.mean:.3f} → {b.mean:.3f} [{b.low:.3f}, {b.high:.3f}]" for a, b in pairs]


def main() -> None:
    parser = argparse.ArgumentParser(description="The demo, for several seeds.")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--out", type=Path, default=Path("runs/seeds"))
    args = parser.parse_args()
    for seed in args.seeds:
        if not (args.out / str(seed) / "seconds.json").exists():
            run(args.out / str(seed), seed)
    print(
        "| seed | minutes | EM before | EM after [95 %] | EM by hops | searches by hops "
        "| closed book | gold | random | largest log-prob difference | avg@4 | pass@4 |"
    )
    print("|" + "---|" * 12)
    for seed in args.seeds:
        print(row(args.out / str(seed), seed))


if __name__ == "__main__":
    main()
