"""Trains the demo's model on questions that ``forage questions`` made, and on labelled ones.

Both runs take the same steps from the same shipped warm start in the demo's world, and are compared
by sampled exact match on its test questions. The writer is a scripted chat server that knows the
facts of the world, and is wrong in a share of what it writes and reads (``questions_of_world.py``).
No question is made from a passage that a test question needs. Needs no network::

    python -m benchmarks.self_made_questions --seeds 0 1 2 --out runs/self-made
"""

from __future__ import annotations

import json
import shutil
from argparse import ArgumentParser
from importlib import resources
from pathlib import Path
from statistics import mean

from benchmarks.questions_of_world import Mistaken
from forage.commands.cli import main
from forage.commands.run_report import as_sampled, evaluate_as, shipped_tree, with_model
from forage.config.run_config import RunConfig, build_config
from forage.data.corpus import write_corpus
from forage.data.questions import read_questions
from forage.data.world.encyclopedia import World, write_world
from forage.evaluation.result import EvaluationResult
from forage.retrieval.index.index import build_index
from forage.retrieval.serve.child_server import ServerProcess
from forage.train import run_training
from forage.training.export import export_model
from tests.questions.chat_server import chat_server

SIZE = 10_000
NUM_QUESTIONS = 400
KINDS = "single multi_hop"


def make_questions(out: Path, world: World, seed: int, lies: tuple[float, float]) -> Path:
    """The file of self-made training questions; says how many are true."""
    needed = {passage for question in world.test for passage in question.gold_passage_ids}
    folder = out / f"questions-{seed}"
    if not (folder / "statistics.json").exists():
        corpus = out / f"without-test-{seed}.jsonl"
        write_corpus(corpus, [one for one in world.passages if one.id not in needed])
        writer = Mistaken(world, *lies)
        with chat_server(writer) as server:
            argv = f"questions {corpus} --out {folder} --endpoint {server.url} --seed {seed} "
            argv += f"--served-model scripted --train {NUM_QUESTIONS} --dev 0 --test 0 "
            assert main([*argv.split(), "--kinds", *KINDS.split()]) == 0
        (folder / "true.json").write_text(json.dumps(writer.answers))
    questions = read_questions(folder / "train.jsonl")
    answers = json.loads((folder / "true.json").read_text())
    num_true = sum(one.golden_answers == (answers[one.text],) for one in questions)
    print(f"seed {seed}: {len(questions)} questions, {num_true} of them true", flush=True)
    return folder / "train.jsonl"


def measure(config: RunConfig, start: Path, train: Path | None, name: str) -> EvaluationResult:
    """Sampled exact match on the test questions, after training on ``train`` (None: before)."""
    out = config.output_dir / name
    config = config.model_copy(update={"output_dir": out})
    model = start
    if train is not None:
        data = config.data.model_copy(update={"train": train})
        model = out / "trained"
        if not model.exists():
            run_training(with_model(config.model_copy(update={"data": data}), start), resume=False)
            export_model(out, model, step=None)
    return evaluate_as("sampled", as_sampled(with_model(config, model)))


def run() -> None:
    parser = ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--lies", type=float, nargs=2, default=(0.1, 0.1), help="written, read")
    parser.add_argument("--steps", type=int, default=24)
    parser.add_argument("--out", type=Path, default=Path("runs/self-made"))
    args = parser.parse_args()
    shares = []
    for seed in args.seeds:
        out = args.out / str(seed)
        world = write_world(out / "world", SIZE, seed)
        if not (out / "index").exists():
            build_index(out / "world" / "corpus.jsonl", out / "index", language="plain")
        start = out / "warm"
        if not start.exists():
            with resources.as_file(resources.files("forage") / "warm" / "model") as shipped:
                shutil.copytree(shipped, start)
        made = make_questions(out, world, seed, tuple(args.lies))
        # An evaluation is continued only at the same address.
        port = int((out / "port").read_text()) if (out / "port").exists() else 0
        with ServerProcess(out / "index", port, log_path=out / "server.log") as server:
            (out / "port").write_text(str(server.port))
            tree = shipped_tree("demo.yaml", out, seed)
            tree["search"]["url"] = server.url
            tree["model"] = {"path": str(start)}
            tree["trainer"]["num_steps"] = args.steps
            files = {name: str(out / "world" / f"{name}.jsonl") for name in ("train", "test")}
            tree["data"] |= files
            config = build_config(tree, "demo.yaml")
            ems = []
            for name, train in (
                ("before", None),
                ("labelled", Path(files["train"])),
                ("made", made),
            ):
                result = measure(config, start, train, name)
                ems.append(result.summary.arms["normal"].overall.em.mean)
                print(f"seed {seed}: {name}: sampled EM {ems[-1]:.3f}", flush=True)
        shares.append(ems[2] / ems[1])
        print(f"seed {seed}: self-made / labelled {shares[-1]:.3f}", flush=True)
    print(f"mean of {len(shares)} seeds: {mean(shares):.3f}")


if __name__ == "__main__":
    run()
