"""The files of a model, in a directory or on the hub: found, read and fingerprinted.

``forage.retrieval.vectors.sentence_encoder`` asks here what a model says about itself. Files of the
hub are downloaded once into its own cache; with ``HF_HUB_OFFLINE=1`` nothing is asked for. No model
is loaded here.
"""

from __future__ import annotations

import json
from hashlib import sha256
from pathlib import Path
from typing import Any

from transformers.utils.hub import cached_file

from forage.errors import UserError

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
            config = cached_file(model, "config.json", revision=revision)
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
        """The local path of a file of the model (downloaded first), or None where it has none."""
        found = cached_file(
            self.model,
            name,
            revision=self._revision,
            _raise_exceptions_for_missing_entries=False,
            _raise_exceptions_for_connection_errors=False,
        )
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
