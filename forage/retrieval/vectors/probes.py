"""Whether an encoder still gives the vectors that an index was built with.

An index keeps the vectors of a few probe texts. The encoder that serves it is opened as the
manifest states it, and has to give the same vectors for them.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np

from forage.data.corpus import CorpusStore
from forage.errors import UserError
from forage.retrieval.backend import OpenOptions
from forage.retrieval.index.manifest import require_same
from forage.retrieval.vectors.encoder import Encoder, EncoderSpec, choice_of, require_finite
from forage.retrieval.vectors.precision import closeness

PROBES_FILE = "probes.npy"
NUM_PROBES = 4

_PROBE_CHARS = 300
# Two number formats of one encoder agree to 0.999; another pooling or prefix gives less than this.
_MIN_PROBE_COSINE = 0.98


def probe_texts(store: CorpusStore) -> list[str]:
    """The beginnings of a few passages, spread over the corpus, as queries."""
    rows = np.linspace(0, len(store) - 1, NUM_PROBES).astype(int).tolist()
    return [store.passage(row).text[:_PROBE_CHARS] for row in rows]


def write_probes(store: CorpusStore, encoder: Encoder, directory: Path) -> None:
    """Keep the vectors of ``probe_texts``: an encoder that serves the index has to give them."""
    texts = probe_texts(store)
    vectors = encoder.encode_queries(texts)
    require_finite(vectors, texts, encoder.spec)
    np.save(directory / PROBES_FILE, vectors)


def open_same_encoder(
    directory: Path, stated: EncoderSpec, library: str, store: CorpusStore, options: OpenOptions
) -> Encoder:
    """The encoder that a manifest states, in the numbers that suit this machine.

    ``library`` names the packages that built the index. Raises ``UserError`` where the encoder
    cannot be opened or gives other vectors.
    """
    try:
        from forage.retrieval.vectors.sentence_encoder import open_encoder
    except ModuleNotFoundError as error:
        raise missing_extra(error) from error
    if stated.trust_remote_code and not options.trust_remote_code:
        raise UserError(
            f"{directory}: its encoder {stated.model} runs code of its own; "
            "read it, then serve with --trust-remote-code"
        )
    choice = replace(choice_of(stated), dtype=options.dtype)
    if options.encoder is not None:
        field = "model" if stated.query_model is None else "query_model"
        choice = replace(choice, **{field: options.encoder, "revision": None})
    encoder = open_encoder(choice, options.device, is_for_queries_only=True)
    for name in ("fingerprint", "query_fingerprint", "pooling", "dimension", "max_length"):
        require_same(
            directory,
            f"encoder {name}",
            getattr(stated, name),
            f"{encoder.spec.query_model or encoder.spec.model} has",
            getattr(encoder.spec, name),
        )
    _check_probes(directory, stated, library, store, encoder)
    return encoder


def _check_probes(
    directory: Path, stated: EncoderSpec, library: str, store: CorpusStore, encoder: Encoder
) -> None:
    """Compare the encoder's vectors of a few texts with those from when the index was built."""
    path = directory / PROBES_FILE
    try:
        kept = np.load(path)
    except (OSError, EOFError, ValueError) as error:
        raise UserError(f"{path} cannot be read ({error}); build the index again") from error
    found = encoder.encode_queries(probe_texts(store))
    cosine = closeness(kept, found) if kept.shape == found.shape else 0.0
    if not cosine >= _MIN_PROBE_COSINE:  # NaN too
        raise UserError(
            f"{directory}: built with {stated.model} in {stated.dtype} and "
            f"{library}, but the encoder here gives other vectors for the same texts "
            f"(lowest cosine {cosine:.3f}); check the model's files and the versions"
        )


def missing_extra(error: ModuleNotFoundError) -> UserError:
    """The error for a machine without the packages of dense indexes; our own bugs pass through."""
    if error.name is None or error.name.partition(".")[0] == "forage":
        raise error
    return UserError(
        f"a dense index needs the package {error.name}; run: pip install 'forage[dense]'"
    )
