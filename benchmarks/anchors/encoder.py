"""Int8 encoders on a CPU, compared with torch; and how much of recall@3 int8 loses.

Forage computes with an ONNX file of the model (``forage index --onnx FILE``); the file is made here
with ONNX Runtime's dynamic quantisation.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks.anchors.bench import Bench, Task
from benchmarks.anchors.encoders import DIMENSIONS, encoder
from benchmarks.anchors.machine import has_bfloat16
from benchmarks.anchors.passages import real_passages
from benchmarks.anchors.recall import recall_lost
from benchmarks.anchors.side import Side
from benchmarks.anchors.talk import Talk
from benchmarks.anchors.torch_settings import in_words, recommended

if TYPE_CHECKING:
    import numpy as np

AIM, MOST_LOST = 1.8, 0.005
ONNX_FILE = "onnx/model_int8.onnx"
Encode = Callable[[Sequence[str]], "np.ndarray"]


def measure(bench: Bench) -> None:
    for name in DIMENSIONS:
        model = str(encoder(bench.folder, name))
        arguments = {"model": model, "int8": str(bench.folder / f"int8-{name}")}
        arguments |= {"num_texts": str(bench.pick(128, 512) // (1 if name == "MiniLM" else 4))}
        ours = Side(
            f"forage int8 {name}",
            "benchmarks.anchors.encoder:encode_with_forage",
            f"`--onnx {ONNX_FILE}` (dynamic int8, per channel), ONNX Runtime; real passages sorted "
            "by length",
            arguments,
            ("onnx", "onnxruntime", "sentence-transformers"),
        )
        dtype = "bfloat16" if has_bfloat16() else "float32"
        torch = Side(
            f"torch {dtype} {name}",
            "benchmarks.anchors.encoder:encode_with_torch",
            f"sentence-transformers, sdpa attention, {dtype} (the fastest type of this processor), "
            f"batches of 32; {in_words()}",
            {**arguments, "dtype": dtype},
            ("torch", "sentence-transformers"),
            recommended(),
        )
        bench.race(ours, [torch], [Task(f"{name}, passages", "texts/s", {torch.name: AIM})])
    bench.figures.append(recall_lost(bench, MOST_LOST))


def encode_with_forage(talk: Talk, model: str, int8: str, num_texts: str) -> None:
    from forage.hardware import quiet_openmp

    quiet_openmp()
    from forage.retrieval.vectors.encoder import EncoderChoice
    from forage.retrieval.vectors.sentence_encoder import open_encoder

    quantised = quantised_model(Path(model), Path(int8))
    opened = open_encoder(EncoderChoice(str(quantised), onnx_file=ONNX_FILE))
    _answer(talk, opened.encode_passages, int(num_texts))


def encode_with_torch(talk: Talk, model: str, int8: str, num_texts: str, dtype: str) -> None:
    import torch
    from sentence_transformers import SentenceTransformer

    del int8
    loaded = SentenceTransformer(model, device="cpu", model_kwargs={"dtype": getattr(torch, dtype)})

    def encode(texts: Sequence[str]) -> Any:
        return loaded.encode(list(texts), normalize_embeddings=True, show_progress_bar=False)

    _answer(talk, encode, int(num_texts), threads=torch.get_num_threads())


def _answer(talk: Talk, encode: Encode, num_texts: int, **found: object) -> None:
    texts = [f"{each.title} {each.text}" for each in real_passages()[:num_texts]]
    encode(texts[:8])
    talk.ready(**found)
    for _ in talk.requests():
        started = time.perf_counter()
        encode(texts)
        talk.reply(value=num_texts / (time.perf_counter() - started))


def quantised_model(model: Path, out: Path) -> Path:
    """A copy of the model with an int8 ONNX file; kept for the next run."""
    import shutil

    import torch
    from onnxruntime.quantization import QuantType, quantize_dynamic
    from transformers import AutoModel, AutoTokenizer

    file = out / ONNX_FILE
    if file.exists():
        return out
    shutil.copytree(model, out, dirs_exist_ok=True)
    file.parent.mkdir(exist_ok=True)
    loaded = AutoModel.from_pretrained(str(model), attn_implementation="eager").eval()

    class Hidden(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.model = loaded

        def forward(self, *values: torch.Tensor) -> torch.Tensor:
            return self.model(**dict(zip(names, values, strict=True))).last_hidden_state

    inputs = AutoTokenizer.from_pretrained(str(model))(["two words"] * 2, return_tensors="pt")
    names = list(inputs)
    whole = file.with_name("model.onnx")
    axes = {0: "batch", 1: "tokens"}
    torch.onnx.export(
        Hidden().eval(),
        tuple(inputs[name] for name in names),
        str(whole),
        input_names=names,
        output_names=["last_hidden_state"],
        dynamic_axes=dict.fromkeys([*names, "last_hidden_state"], axes),
        dynamo=False,
    )
    quantize_dynamic(whole, file, per_channel=True, weight_type=QuantType.QInt8)
    whole.unlink()
    return out
