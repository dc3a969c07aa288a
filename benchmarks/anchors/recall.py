"""Recall@3 of MiniLM on XQuAD's paragraphs, in torch and in int8: what quantisation loses."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.anchors.bench import Bench
from benchmarks.anchors.encoders import encoder
from benchmarks.anchors.figure import Figure
from benchmarks.anchors.passages import SHARED
from benchmarks.anchors.side import MissingSideError, Side, opened
from benchmarks.anchors.talk import Talk

NUM_BEST = 3


def recall_lost(bench: Bench, most: float) -> Figure:
    """The share of questions whose paragraph is among the best three: torch minus int8."""
    model = str(encoder(bench.folder, "MiniLM"))
    side = Side(
        "recall MiniLM",
        "benchmarks.anchors.recall:compare",
        "1,190 questions over 240 paragraphs (XQuAD), torch float32 and int8",
        {"model": model, "int8": str(bench.folder / "int8-MiniLM")},
        ("onnx", "onnxruntime", "sentence-transformers"),
    )
    what, anchor = "MiniLM, recall@3 lost", "torch float32"
    try:
        with opened(side, bench.folder) as process:
            found = process.round({})
    except MissingSideError as missing:
        return Figure(what, anchor, "", most, is_most=True, missing=str(missing))
    bench.sides.append(process.record)
    values = [found["int8"]], [found["torch"]]
    return Figure(what, anchor, "recall", most, *values, is_most=True, is_difference=True)


def compare(talk: Talk, model: str, int8: str) -> None:
    from benchmarks.anchors.encoder import ONNX_FILE, quantised_model
    from forage.retrieval.vectors.encoder import EncoderChoice
    from forage.retrieval.vectors.sentence_encoder import open_encoder

    file = SHARED / "xquad.en.json"
    if not file.exists():
        talk.missing("../shared/data/xquad.en.json is not there")
        return
    quantised = str(quantised_model(Path(model), Path(int8)))
    choices = {
        "torch": EncoderChoice(model, dtype="float32"),
        "int8": EncoderChoice(quantised, onnx_file=ONNX_FILE),
    }
    paragraphs: list[str] = []
    asked: list[tuple[str, int]] = []
    for article in json.loads(file.read_text(encoding="utf-8"))["data"]:
        for paragraph in article["paragraphs"]:
            asked += [(each["question"], len(paragraphs)) for each in paragraph["qas"]]
            paragraphs.append(paragraph["context"])
    encoders = {name: open_encoder(choice) for name, choice in choices.items()}
    talk.ready()
    for _ in talk.requests():
        talk.reply(**{name: _recall(each, paragraphs, asked) for name, each in encoders.items()})


def _recall(encoder: Any, paragraphs: Sequence[str], asked: Sequence[tuple[str, int]]) -> float:
    scores_QK = encoder.encode_queries([text for text, _ in asked])
    scores_QK = scores_QK @ encoder.encode_passages(paragraphs).T
    best = scores_QK.argpartition(-NUM_BEST, axis=1)[:, -NUM_BEST:]
    return sum(gold in row for (_, gold), row in zip(asked, best, strict=True)) / len(asked)
