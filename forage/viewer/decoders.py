"""Turns a run's token ids into text with the tokenizer that a record names, or the run's own.

A record names its tokenizer with a hash of the vocabulary, and only a tokenizer with this hash is
used. It may come from the path in the record, from the run, or from the hub's cache.
"""

from __future__ import annotations

import hashlib
import json
import logging
import threading
from collections.abc import Iterator
from pathlib import Path

from tokenizers import Tokenizer

from forage.remote.plain_file import read_plain
from forage.types import TokenizerId
from forage.viewer.library import ShownRun
from forage.viewer.token_views import Decode

LOG = logging.getLogger(__name__)

_FILE = "tokenizer.json"
_MAX_BYTES = 2**28


class Decoders:
    """Decoders for each run and tokenizer; reads each tokenizer once."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._by_mark: dict[tuple[Path, str], Decode | None] = {}

    def of(self, run: ShownRun, tokenizer: TokenizerId | None) -> Decode | None:
        """The decoder for a record of ``run``; None if its tokenizer is not found."""
        key = (run.directory, "" if tokenizer is None else tokenizer.sha256)
        with self._lock:
            if self._by_mark.get(key) is None:
                self._by_mark[key] = load_decoder(run, tokenizer)
            return self._by_mark[key]


def load_decoder(run: ShownRun, wanted: TokenizerId | None = None) -> Decode | None:
    """A decoder with the tokenizer that a record names; None if it is not found.

    If the record names none, the tokenizer comes from ``model/``, from the newest checkpoint, or
    from ``model.path`` in the run's config.
    """
    for path in _places(run, wanted):
        try:
            tokenizer = Tokenizer.from_buffer(read_plain(path, _MAX_BYTES))
        except Exception as error:  # tokenizers has no error class; a run may be writing the file
            LOG.warning("cannot read %s as a tokenizer: %s", path, error)
            continue
        if wanted is None or _mark(tokenizer) == wanted.sha256:
            return lambda ids: tokenizer.decode(list(ids), skip_special_tokens=False)
    named = "" if wanted is None else f" {wanted.name} ({wanted.sha256})"
    LOG.warning("no tokenizer%s for %s: episodes are shown as text, not tokens", named, run.key)
    return None


def _mark(tokenizer: Tokenizer) -> str:
    """The hash of the vocabulary that names a tokenizer in records (``codec.identity``)."""
    pieces = sorted(tokenizer.get_vocab().items(), key=lambda piece: (piece[1], piece[0]))
    return hashlib.sha256(json.dumps(pieces).encode()).hexdigest()[:16]


def _places(run: ShownRun, wanted: TokenizerId | None) -> Iterator[Path]:
    """Existing tokenizer files, the most likely first."""
    names = [] if wanted is None else [wanted.name]
    model = run.config().get("model")
    of_config = model.get("path") if isinstance(model, dict) else None
    candidates = [Path(name) / _FILE for name in names]
    candidates.append(run.directory / "model" / _FILE)
    candidates += sorted(run.directory.glob(f"checkpoints/**/{_FILE}"), reverse=True)
    candidates += sorted(run.directory.glob(f"models/*/{_FILE}"))
    if isinstance(of_config, str):
        names.append(of_config)
        candidates.append(Path(of_config) / _FILE)
    seen = set()
    for place in candidates:
        if place.is_file() and place not in seen:
            seen.add(place)
            yield place
    for name in names:
        if (cached := _in_hub_cache(name)) is not None:
            yield cached


def _in_hub_cache(name: str) -> Path | None:
    """The path of a model's tokenizer in the hub's cache; downloads nothing."""
    from huggingface_hub import try_to_load_from_cache
    from huggingface_hub.errors import HFValidationError

    try:
        path = try_to_load_from_cache(name, _FILE)
    except HFValidationError:  # the name is a path, not a model's
        return None
    return Path(path) if isinstance(path, str) else None
