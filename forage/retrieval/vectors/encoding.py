"""Encodes a corpus shard by shard, with one encoder per device.

One thread per device takes shards from a queue. Within a shard, passages are encoded in order of
length, to reduce padding, and stored in order of their rows.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Sequence

import numpy as np

from forage.data.corpus_store import CorpusStore
from forage.retrieval.vectors.encoder import Encoder, passage_text, require_finite
from forage.retrieval.vectors.vector_shards import VectorShards

# Passages between two progress reports; a multiple of an encoder's batch.
_STEP_ROWS = 1024


def encode_corpus(
    store: CorpusStore,
    vectors: VectorShards,
    encoders: Sequence[Encoder],
    on_rows: Callable[[int], None] = lambda _: None,
) -> None:
    """Writes the missing shards, one thread per encoder; raises the first error of any thread.

    ``on_rows`` is called with the number of passages just encoded, from any thread.
    """
    todo: queue.SimpleQueue[int] = queue.SimpleQueue()
    for shard in vectors.missing():
        todo.put(shard)
    errors: list[BaseException] = []
    stop = threading.Event()

    def work(encoder: Encoder) -> None:
        try:
            while not stop.is_set():
                shard = todo.get_nowait()
                rows = vectors.layout.rows(shard)
                vectors.write(shard, _encode_rows(store, rows, encoder, on_rows, stop))
        except (queue.Empty, _Stopped):
            return
        except BaseException as error:  # raised again in the caller's thread
            errors.append(error)
            stop.set()

    threads = [threading.Thread(target=work, args=(encoder,)) for encoder in encoders[1:]]
    for thread in threads:
        thread.start()
    try:
        work(encoders[0])  # this thread works too, so that Ctrl-C arrives here
        for thread in threads:
            thread.join()
    finally:
        stop.set()
        for thread in threads:
            thread.join()
    if errors:
        raise errors[0]


class _Stopped(Exception):
    """Raised in a thread to stop it, because another thread failed."""


def _encode_rows(
    store: CorpusStore,
    rows: range,
    encoder: Encoder,
    on_rows: Callable[[int], None],
    stop: threading.Event,
) -> np.ndarray:
    """Encodes ``rows``, float32 [B, D]; raises ``UserError`` that names passages with NaN."""
    passages = [store.passage(row) for row in rows]
    texts = [passage_text(encoder.spec.passage_template, passage) for passage in passages]
    order = np.argsort([-len(text) for text in texts], kind="stable").tolist()
    vectors = np.empty((len(rows), encoder.dimension), dtype=np.float32)
    for start in range(0, len(order), _STEP_ROWS):
        if stop.is_set():
            raise _Stopped
        step = order[start : start + _STEP_ROWS]
        encoded = encoder.encode_passages([texts[place] for place in step])
        require_finite(encoded, [passages[place].id for place in step], encoder.spec)
        vectors[step] = encoded
        on_rows(len(step))
    return vectors
