"""The files of an encoder, in a directory or on the hub: found, read and fingerprinted.

``forage.retrieval.vectors.encoder`` asks here what a model says about itself. Files of the
hub are downloaded once into its own cache; with ``HF_HUB_OFFLINE=1`` nothing is asked for. Many
published encoders carry ``onnx/model.onnx``, which can take the place of the torch model: tokens,
pooling and prefixes stay what they are. Nothing is exported or optimised here.
"""

from __future__ import annotations

import json
from hashlib import sha256
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers.utils.hub import cached_file

from forage.errors import UserError, install_command
from forage.hardware import num_cores
from forage.remote.hub import only_downloaded

_SETTINGS = ("config.json", "modules.json", "tokenizer.json", "vocab.txt", "spiece.model")
_WEIGHTS = ("model.safetensors", "model.safetensors.index.json", "pytorch_model.bin")
_HASHED_WHOLE_BYTES = 32 * 2**20
_BLOCK_BYTES, _NUM_BLOCKS = 2**16, 64


class ModelFiles:
    """One model at one revision."""

    def __init__(self, model: str, revision: str | None = None) -> None:
        """``model``: a directory or a hub id; raises ``UserError`` where there is none."""
        self.model, self._revision = model, revision
        reason = "it is a directory without config.json"
        config = None
        try:
            config = cached_file(
                model,
                "config.json",
                revision=revision,
                local_files_only=only_downloaded(model),
            )
        except OSError as error:
            if not Path(model).is_dir():
                reason = f"it is no directory here, and the hub gave: {_first_line(error)}"
        if config is None:
            raise UserError(f"cannot load the encoder {model}: {reason}; check the name")
        self._config_path = Path(config)

    @property
    def commit(self) -> str | None:
        """The hub's commit; None for a directory of the user's."""
        if Path(self.model).is_dir():
            return None
        return self._config_path.parent.name

    def find(self, name: str) -> Path | None:
        """The local path of a file of the model (downloaded first), or None where it has none.

        Raises ``UserError`` where the hub does not say whether it has one.
        """
        is_alone = only_downloaded(self.model)
        try:
            found = cached_file(
                self.model, name, revision=self._revision, local_files_only=is_alone
            )
        except OSError as error:
            # Without a cause it says that the model has none; alone nobody can ask.
            if is_alone or error.__cause__ is None:
                return None
            raise UserError(
                f"the hub does not say whether {self.model} has {name}, without which its vectors "
                f"may be others: {_first_line(error)}; run the same command again"
            ) from error
        return None if found is None else Path(found)

    def read_json(self, name: str) -> Any:
        """What a JSON file of the model holds, or None where it has none."""
        path = self.find(name)
        return None if path is None else json.loads(path.read_text(encoding="utf-8"))

    def fingerprint(self) -> str:
        """A digest of configuration, vocabulary and weights; of large files, of samples of them."""
        digest = sha256()
        for name in _SETTINGS:
            self._digest(digest, name)
        for name in _WEIGHTS:
            if self._digest(digest, name):
                break  # the same weights may lie beside in an older format, on this machine only
        return digest.hexdigest()[:16]

    def _digest(self, digest: Any, name: str) -> bool:
        path = self.find(name)
        if path is None:
            return False
        shards = sorted(path.parent.glob("model-*.safetensors")) if "index" in name else []
        for file in (path, *shards):
            digest.update(f"{file.name} {file.stat().st_size} ".encode())
            for block in _sample(file):
                digest.update(block)
        return True


class OnnxModel(torch.nn.Module):
    """Token ids to ``last_hidden_state``, as the torch model that it stands for."""

    def __init__(self, path: Path, config: Any) -> None:
        """``config`` is the torch model's; raises ``UserError`` for a file that is no model."""
        super().__init__()
        try:
            import onnxruntime
        except ModuleNotFoundError as error:
            raise UserError(f"onnxruntime is missing; run: {install_command('onnx')}") from error
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


def _sample(path: Path) -> list[bytes]:
    """The whole of a small file; blocks spread evenly over a large one, its end included."""
    size = path.stat().st_size
    if size <= _HASHED_WHOLE_BYTES:
        return [path.read_bytes()]
    blocks: list[bytes] = []
    with path.open("rb") as file:
        for number in range(_NUM_BLOCKS):
            file.seek((size - _BLOCK_BYTES) * number // (_NUM_BLOCKS - 1))
            blocks.append(file.read(_BLOCK_BYTES))
    return blocks


def _first_line(error: Exception) -> str:
    return str(error).strip().partition("\n")[0][:200]


def unwrap_dpr(files: ModelFiles, directory: Path) -> str:
    """A copy, in ``directory``, of the plain BERT inside a DPR encoder.

    Loaded as they are, DPR's passage encoders get random weights: the library's automatic class
    for them is that of the question encoder.
    """
    [architecture] = files.read_json("config.json")["architectures"]
    if architecture not in ("DPRContextEncoder", "DPRQuestionEncoder"):
        raise UserError(f"{files.model} is a {architecture!r}; a DPR encoder is needed")
    dpr = getattr(transformers, architecture).from_pretrained(files.model, revision=files.commit)
    inner = dpr.ctx_encoder if hasattr(dpr, "ctx_encoder") else dpr.question_encoder
    if dpr.config.projection_dim:
        raise UserError(f"{files.model} projects its vectors; only DPR without it can be loaded")
    bert = inner.bert_model
    values = dpr.config.to_dict() | {"model_type": "bert", "architectures": ["BertModel"]}
    bert.config = transformers.BertConfig.from_dict(values)
    bert.save_pretrained(directory)
    transformers.AutoTokenizer.from_pretrained(
        files.model, revision=files.commit, trust_remote_code=False
    ).save_pretrained(directory)
    return str(directory)
