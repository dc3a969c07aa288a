"""The commands of ``forage``: the arguments of each, and the one function that each calls.

``forage.commands.cli`` reads the arguments and turns errors into exit codes; a command below holds
no logic beyond passing them on. Its imports stand inside it, so that the others start without them,
and a recipe is read before torch is imported, so that a misspelt key is told at once.
"""

from __future__ import annotations

from argparse import ArgumentParser, Namespace
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from forage.commands.arguments import add_address, count, port, positive, seconds
from forage.commands.data_command import add_data_arguments, run_world
from forage.commands.index_command import add_index_arguments, run_index
from forage.commands.serve_command import add_serve_arguments, run_serve
from forage.commands.shards_command import add_shards_arguments, run_shards


@dataclass(frozen=True, slots=True)
class Command:
    """A command: its name, one line of help, its arguments, and what runs (gives the exit code)."""

    name: str
    summary: str
    add_arguments: Callable[[ArgumentParser], None]
    run: Callable[[Namespace], int]


def _demo_arguments(parser: ArgumentParser) -> None:
    parser.add_argument("--out", type=Path, metavar="DIR", help="runs/demo, or the next free name")
    parser.add_argument("--seed", type=count, default=0)
    parser.add_argument("--steps", type=positive, help="of reinforcement learning")
    parser.add_argument("--port", type=port, default=0, help="of the search service; 0: any free")
    parser.add_argument(
        "--from-scratch", action="store_true", help="make the warm start anew, from random weights"
    )
    parser.add_argument("--warm-start-steps", type=positive, help="with --from-scratch")
    parser.add_argument("--questions", type=positive, help="to evaluate in each arm")
    parser.add_argument("--size", type=positive, default=40_000, help="articles of the world")


def _demo(args: Namespace) -> int:
    from forage.commands.demo_command import DemoSettings, run_demo

    run_demo(
        DemoSettings(
            out=args.out,
            seed=args.seed,
            steps=args.steps,
            port=args.port,
            from_scratch=args.from_scratch,
            size=args.size,
            warm_start_steps=args.warm_start_steps,
            num_questions=args.questions,
        )
    )
    return 0


def _train_arguments(parser: ArgumentParser) -> None:
    _add_config(parser)
    how = parser.add_mutually_exclusive_group()
    how.add_argument("--resume", action="store_true", help="go on from the last checkpoint")
    text = "check everything and print the plan: memory, steps, places, downloads; start nothing"
    how.add_argument("--dry-run", action="store_true", help=text)


def _train(args: Namespace) -> int:
    from forage.config.run_config import load_config

    config = load_config(args.config, args.overrides)
    if args.dry_run:
        from forage.plan.page import print_plan
        from forage.plan.plan import make_plan

        print_plan(make_plan(config))
        return 0
    from forage.train import run_training

    run_training(config, resume=args.resume)
    if config.evaluation.at_end:
        from forage.evaluation.along_training import final_figures
        from forage.evaluation.result import read_result
        from forage.viewer.evaluation_page import write_evaluation_page

        figures = final_figures(config)
        write_evaluation_page(figures.with_suffix(".html"), read_result(figures))
    return 0


def _new_arguments(parser: ArgumentParser) -> None:
    parser.add_argument("--corpus", type=Path, required=True, metavar="FILE")
    parser.add_argument("--questions", type=Path, metavar="FILE", help="for the tokenizer, too")
    parser.add_argument("--out", type=Path, required=True, metavar="DIR")
    parser.add_argument("--seed", type=count, default=0)
    parser.add_argument("--vocabulary", type=positive, default=640, metavar="N", help="tokens")
    parser.add_argument("--hidden-size", type=positive, default=128, metavar="N")
    parser.add_argument("--layers", type=positive, default=4, metavar="N")
    parser.add_argument("--max-tokens", type=positive, default=1024, metavar="N")


def _new(args: Namespace) -> int:
    from forage.commands.new_command import ModelShape, make_model

    shape = ModelShape(args.vocabulary, args.hidden_size, args.layers, args.max_tokens)
    make_model(args.corpus, args.questions, args.out, shape, args.seed)
    return 0


def _sft_arguments(parser: ArgumentParser) -> None:
    _add_config(parser)
    parser.add_argument("--out", type=Path, required=True, metavar="DIR", help="the model learnt")
    parser.add_argument("--adapter", action="store_true", help="the adapters alone, not merged")


def _sft(args: Namespace) -> int:
    from forage.config.run_config import load_config

    config = load_config(args.config, args.overrides)
    from forage.commands.sft_command import run_sft

    run_sft(config, args.out, adapter_only=args.adapter)
    return 0


def _eval_arguments(parser: ArgumentParser) -> None:
    _add_config(parser)
    text = "figures; beside it .jsonl (episodes), .md and .html; OUTPUT_DIR/evaluation/eval.json"
    parser.add_argument("--out", type=Path, metavar="FILE.json", help=text)
    parser.add_argument("--fresh", action="store_true", help="play what is there already again")
    parser.add_argument(
        "--retry-failed", action="store_true", help="play again where a search or the engine failed"
    )


def _eval(args: Namespace) -> int:
    from forage.config.run_config import load_config

    config = load_config(args.config, args.overrides)
    from forage.evaluation.evaluate import run_evaluation
    from forage.viewer.evaluation_page import write_evaluation_page

    result, out = run_evaluation(config, args.out, args.fresh, args.retry_failed)
    write_evaluation_page(out.with_suffix(".html"), result)
    return 0


def _compare_arguments(parser: ArgumentParser) -> None:
    parser.add_argument("first", type=Path, metavar="A.json", help="figures of `forage eval`")
    parser.add_argument("second", type=Path, metavar="B.json", help="figures on the same questions")
    text = "the comparison as a page, Markdown or JSON"
    parser.add_argument("--out", type=Path, metavar="FILE.html|.md|.json", help=text)


def _compare(args: Namespace) -> int:
    from forage.commands.compare_command import run_comparison

    run_comparison(args.first, args.second, args.out)
    return 0


def _rescore_arguments(parser: ArgumentParser) -> None:
    from forage.rewards.compat import RULES

    parser.add_argument("file", type=Path, metavar="FILE.jsonl")
    parser.add_argument("--rule", choices=RULES, required=True)
    text = "the original's settings, for example structure_format_score=0.2"
    parser.add_argument("overrides", nargs="*", default=[], metavar="name=value", help=text)
    parser.add_argument("--out", type=Path, metavar="FILE.jsonl", help="the scores, line by line")


def _rescore(args: Namespace) -> int:
    from forage.commands.rescore_command import parse_settings, run_rescore

    run_rescore(args.file, args.rule, parse_settings(args.rule, args.overrides), args.out)
    return 0


def _play_arguments(parser: ArgumentParser) -> None:
    parser.add_argument("config", type=Path, metavar="CONFIG.yaml")
    parser.add_argument("question")
    _add_overrides(parser)


def _play(args: Namespace) -> int:
    from forage.config.run_config import load_config

    config = load_config(args.config, args.overrides)
    from forage.commands.play_command import play_one

    play_one(config, args.question)
    return 0


def _view_arguments(parser: ArgumentParser) -> None:
    parser.add_argument("run_dir", type=Path, metavar="RUN_DIR")
    add_address(parser, 8100)


def _view(args: Namespace) -> int:
    from forage.viewer.viewer_app import view

    view(args.run_dir, args.host, args.port)
    return 0


def _export_arguments(parser: ArgumentParser) -> None:
    parser.add_argument("run_dir", type=Path, metavar="RUN_DIR")
    parser.add_argument("--out", type=Path, required=True, metavar="DIR")
    parser.add_argument("--step", type=count, help="the newest checkpoint if left out")
    parser.add_argument("--adapter", action="store_true", help="the adapters alone, not merged")


def _export(args: Namespace) -> int:
    from forage.training.checkpoint import export_model

    export_model(args.run_dir, args.out, args.step, adapter_only=args.adapter)
    return 0


def _bench_arguments(parser: ArgumentParser) -> None:
    parser.add_argument("url", metavar="URL", help="of a server that speaks POST /retrieve")
    parser.add_argument("--questions", type=Path, required=True, metavar="FILE", help="what to ask")
    parser.add_argument("--clients", type=positive, default=256, metavar="N", help="at once")
    parser.add_argument("--requests", type=positive, default=10_000, metavar="N", help="in all")
    parser.add_argument("--topk", type=positive, default=3, metavar="K")
    parser.add_argument("--timeout", type=seconds, default=30.0, metavar="S", help="of a request")
    parser.add_argument("--token-file", type=Path, metavar="FILE", help="or FORAGE_TOKEN")
    parser.add_argument("--out", type=Path, metavar="FILE.json", help="the figures")


def _bench(args: Namespace) -> int:
    from forage.commands.bench_command import BenchSettings, run_bench

    is_well = run_bench(
        BenchSettings(
            url=args.url,
            questions=args.questions,
            num_clients=args.clients,
            num_requests=args.requests,
            topk=args.topk,
            timeout_s=args.timeout,
            token_file=args.token_file,
            out=args.out,
        )
    )
    return 0 if is_well else 1


def _doctor_arguments(parser: ArgumentParser) -> None:
    del parser


def _doctor(args: Namespace) -> int:
    from forage.commands.doctor_command import run_doctor

    del args
    return 0 if run_doctor() else 1


def _add_config(parser: ArgumentParser) -> None:
    parser.add_argument("config", type=Path, metavar="CONFIG.yaml")
    _add_overrides(parser)


def _add_overrides(parser: ArgumentParser) -> None:
    text = "settings that replace the recipe's, for example trainer.learning_rate=1e-5"
    parser.add_argument("overrides", nargs="*", default=[], metavar="key.sub=value", help=text)


COMMANDS = (
    Command(
        "demo",
        "everything, from random weights to a model that searches, on this machine",
        _demo_arguments,
        _demo,
    ),
    Command("new", "a small model with random weights, and its tokenizer", _new_arguments, _new),
    Command("sft", "supervised start on episodes or demonstrations", _sft_arguments, _sft),
    Command("train", "reinforcement learning on a recipe", _train_arguments, _train),
    Command("eval", "evaluate a model on a recipe's questions, in arms", _eval_arguments, _eval),
    Command("compare", "two evaluations, question by question", _compare_arguments, _compare),
    Command("rescore", "score old logs as the originals did", _rescore_arguments, _rescore),
    Command("play", "play one question and show the episode", _play_arguments, _play),
    Command("index", "build a search index over a corpus", add_index_arguments, run_index),
    Command("serve", "answer POST /retrieve over HTTP", add_serve_arguments, run_serve),
    Command("shards", "an index on several machines", add_shards_arguments, run_shards),
    Command("bench", "measure a search server under load", _bench_arguments, _bench),
    Command("data", "write questions and a corpus", add_data_arguments, run_world),
    Command("view", "read-only web pages over a run's records", _view_arguments, _view),
    Command("export", "write a checkpoint for Hugging Face", _export_arguments, _export),
    Command("doctor", "check this machine, say what to install", _doctor_arguments, _doctor),
)
