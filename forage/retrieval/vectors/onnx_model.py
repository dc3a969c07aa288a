"""A transformer computed by ONNX Runtime instead of torch, inside an encoder's other modules.

Many published encoders carry ``onnx/model.onnx``. It takes the place of the torch model; tokens,
pooling and prefixes stay what they are (``forage.retrieval.vectors.sentence_encoder``). Nothing is
exported or optimised here.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from forage.errors import UserError
from forage.hardware import num_cores


class OnnxModel(torch.nn.Module):
    """Token ids to ``last_hidden_state``, as the torch model that it stands for."""

    def __init__(self, path: Path, config: Any) -> None:
        """``config`` is the torch model's; raises ``UserError`` for a file that is no model."""
        super().__init__()
        try:
            import onnxruntime
        except ModuleNotFoundError as error:
            raise UserError("onnxruntime is missing; run: pip install 'forage[onnx]'") from error
        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = num_cores()
        try:
            self._session = onnxruntime.InferenceSession(
                str(path), options, providers=["CPUExecutionProvider"]
            )
        except Exception as error:  # the library's own classes, one for each way to be broken
            raise UserError(f"cannot load the ONNX model {path}: {error}") from error
        self._inputs = {value.name for value in self._session.get_inputs()}
        self._output = self._session.get_outputs()[0].name
        self.config = config

    def forward(self, **features: Any) -> dict[str, torch.Tensor]:
        """The features that the model takes; float32 [B, T, D] under ``last_hidden_state``."""
        given = {
            name: value.numpy()
            for name, value in features.items()
            if name in self._inputs and isinstance(value, torch.Tensor)
        }
        if "token_type_ids" in self._inputs and "token_type_ids" not in given:
            given["token_type_ids"] = torch.zeros_like(features["input_ids"]).numpy()
        [states] = self._session.run([self._output], given)
        return {"last_hidden_state": torch.from_numpy(states)}
