"""An index of words: its manifest, how it is built (by bm25s), cut into shards and opened.

bm25s computes every term's share of every passage's score when the index is built (a sparse matrix,
one column a term). The score is ``sum_t ln(1 + (N - df + 0.5) / (df + 0.5)) * tf /
(tf + k1 (1 - b + b len / mean_len))`` (Kamphuis et al. 2020,
https://cs.uwaterloo.ca/~jimmylin/publications/Kamphuis_etal_ECIR2020_preprint.pdf).
``forage.retrieval.words.bm25`` searches it, so a server starts without bm25s and its compiler.
"""

from __future__ import annotations

import json
import logging
import shutil
from array import array
from importlib.metadata import version
from pathlib import Path
from typing import Literal

import numpy as np
from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    SerializerFunctionWrapHandler,
    model_serializer,
)

from forage.data.corpus import build_store, format_contents
from forage.errors import UserError
from forage.retrieval.index.atomic_directory import built_beside, refuse_other_contents
from forage.retrieval.index.build_progress import build_progress
from forage.retrieval.index.manifest import (
    CommonManifest,
    common_fields,
    require_same,
    write_manifest,
)
from forage.retrieval.words.analyzer import PLAIN_SPEC, Analyzer, AnalyzerSpec
from forage.retrieval.words.bm25 import (
    BM25,
    MAXIMA_FILE,
    PARAMS_FILE,
    ROWS_FILE,
    STARTS_FILE,
    VALUES_FILE,
    WORDS_FILE,
)
from forage.retrieval.words.languages import AUTO, PLAIN, main_language, misfit
from forage.types import Passage

logger = logging.getLogger(__name__)

_BLOCK_PAIRS = 2**24
# The first passages choose the language; some spread over the corpus are held against it.
_NUM_CHOOSING, _NUM_COMPARED = 256, 512


class BM25Settings(BaseModel):
    """The formula's free parameters; the defaults are those of the published runs (Pyserini's)."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    k1: float = Field(default=0.9, description="how soon repetitions of a word stop counting")
    b: float = Field(default=0.4, description="how much a passage's length counts")
    language: str = Field(
        default=AUTO,
        description="whose words, stems and stop words: a code such as en, de or zh; auto asks the "
        "passages, any cuts by script alone, plain at all that is no letter or digit",
    )


class BM25Manifest(CommonManifest):
    """An index of words."""

    backend: Literal["bm25"] = "bm25"
    k1: float
    b: float
    tokenizer: str
    analyzer: AnalyzerSpec = PLAIN_SPEC

    @model_serializer(mode="wrap")
    def _without_plain(self, dump: SerializerFunctionWrapHandler) -> dict[str, object]:
        """A plain index says what indexes said before there were languages, to the letter."""
        fields: dict[str, object] = dump(self)
        if self.analyzer == PLAIN_SPEC:
            del fields["analyzer"]
        return fields


def build_index(
    corpus: Path,
    out: Path,
    backend: str = "bm25",
    k1: float = 0.9,
    b: float = 0.4,
    language: str = PLAIN,
    show_progress: bool = True,
) -> BM25Manifest:
    """Build a BM25 index of ``corpus`` in ``out`` (an older index there is replaced).

    k1 0.9 and b 0.4 are those of the published BM25 runs (Pyserini's). ``language`` is one of
    ``forage.retrieval.words.languages.CHOICES``. Raises ``UserError`` for a wrong corpus line,
    another backend or language, or an ``out`` that holds something else.
    """
    if backend != "bm25":
        raise UserError(
            f"unknown backend {backend!r}; available: bm25 (vectors: build_dense_index)"
        )
    out = out.absolute()
    refuse_other_contents(out)
    builder = BM25Builder(k1, b, language)
    with built_beside(out) as directory:
        with build_progress(f"reading {corpus.name}", None, show_progress) as advance:

            def add(passage: Passage) -> None:
                builder.add(format_contents(passage))
                advance(1)

            stored = build_store(corpus, directory, add)
        with build_progress("scoring terms", None, show_progress):
            builder.write(directory)
        manifest = BM25Manifest.model_validate(
            common_fields(stored)
            | {
                "k1": k1,
                "b": b,
                "tokenizer": builder.analyzer.tokenizer,
                "analyzer": builder.analyzer,
                "library": f"bm25s {version('bm25s')}",
            }
        )
        write_manifest(directory, manifest)
    if complaint := builder.misfit():
        logger.warning("%s: %s", corpus, complaint)
    logger.info(
        "indexed %d passages of %s in %s, language %s",
        manifest.num_passages,
        corpus,
        out,
        builder.analyzer.language,
    )
    return manifest


def open_bm25(directory: Path, manifest: BM25Manifest) -> BM25:
    """The backend of an index directory; raises ``UserError``."""
    tokenizer = manifest.analyzer.tokenizer
    require_same(directory, "tokenizer", manifest.tokenizer, "this Forage has", tokenizer)
    return BM25(directory, manifest.analyzer)


class BM25Builder:
    """Collects texts in the order of their rows, then writes the index."""

    def __init__(self, k1: float, b: float, language: str = PLAIN) -> None:
        """Free parameters of the formula; raises ``UserError`` outside k1 >= 0, 0 <= b <= 1.

        The language ``auto`` is chosen by the first texts, which wait until there are enough.
        """
        if not k1 >= 0:
            raise UserError(f"k1 is {k1}; it must be 0 or more (0.9 and 1.2 are common)")
        if not 0 <= b <= 1:
            raise UserError(f"b is {b}; it must lie between 0 and 1 (0.4 and 0.75 are common)")
        self._k1, self._b = k1, b
        self._analyzer = None if language == AUTO else Analyzer(AnalyzerSpec.of(language))
        self._waiting: list[str] = []
        self._sample = _Sample()
        self._words: dict[str, int] = {}
        self._word_ids: list[array[int]] = []

    @property
    def analyzer(self) -> AnalyzerSpec:
        """How texts are cut; a choice of ``auto`` is made now, by the texts so far."""
        return self._chosen().spec

    def add(self, text: str) -> None:
        """Add the text of the next row."""
        self._sample.add(text)
        if self._analyzer is None:
            self._waiting.append(text)
            if len(self._waiting) >= _NUM_CHOOSING:
                self._chosen()
        else:
            self._add_words(self._analyzer.words(text))

    def misfit(self) -> str | None:
        """A sentence about the texts so far where the language does not fit them."""
        return misfit(self.analyzer.language, self._sample.texts)

    def _chosen(self) -> Analyzer:
        if self._analyzer is None:
            self._analyzer = Analyzer(AnalyzerSpec.of(main_language(self._waiting)))
            for text in self._waiting:
                self._add_words(self._analyzer.words(text))
            self._waiting.clear()
        return self._analyzer

    def _add_words(self, found: list[str]) -> None:
        words = self._words
        self._word_ids.append(array("i", [words.setdefault(word, len(words)) for word in found]))

    def write(self, directory: Path) -> None:
        """Score every term of every text and save the matrix into ``directory``."""
        import bm25s  # pulls in a compiler: a second that only building pays

        self._chosen()
        engine = bm25s.BM25(method="lucene", k1=self._k1, b=self._b, backend="numpy")
        if not self._words:
            # Texts without a single word: one word that occurs nowhere keeps the matrix legal.
            self._words[""] = 0
        with np.errstate(invalid="ignore"):  # texts without any word have a mean length of 0
            engine.index(
                (self._word_ids, self._words), create_empty_token=False, show_progress=False
            )
        engine.save(directory, show_progress=False)
        _save_maxima(directory)


class _Sample:
    """Texts spread evenly over however many come: every one, then every second, fourth ..."""

    def __init__(self) -> None:
        self.texts: list[str] = []
        self._step, self._num_seen = 1, 0

    def add(self, text: str) -> None:
        if self._num_seen % self._step == 0:
            self.texts.append(text)
            if len(self.texts) > _NUM_COMPARED:
                self.texts = self.texts[::2]
                self._step *= 2
        self._num_seen += 1


def cut_rows(directory: Path, rows: range, out: Path) -> None:
    """Save into ``out`` the index of ``rows`` alone, with the scores that they have in the whole.

    An index of those texts alone would score them by their own word counts. Memory is that of a
    block of pairs, whatever the size of the index. The directory has been opened without error.
    """
    values = np.load(directory / VALUES_FILE, mmap_mode="r")
    pair_rows = np.load(directory / ROWS_FILE, mmap_mode="r")
    starts = np.load(directory / STARTS_FILE)
    firsts = range(0, len(pair_rows), _BLOCK_PAIRS)
    blocks = [slice(first, first + _BLOCK_PAIRS) for first in firsts]
    num_kept = sum(int(_lies_in(pair_rows[block], rows).sum()) for block in blocks)
    save = np.lib.format.open_memmap
    new_values = save(out / VALUES_FILE, "w+", values.dtype, (num_kept,))
    new_rows = save(out / ROWS_FILE, "w+", pair_rows.dtype, (num_kept,))
    new_starts = np.full_like(starts, num_kept)
    done = 0
    for block in blocks:
        is_kept = _lies_in(pair_rows[block], rows)
        kept_before = done + np.concatenate(([0], np.cumsum(is_kept)))
        # The columns that begin in this block begin where the kept pairs before them end.
        first, last = np.searchsorted(starts, (block.start, block.stop))
        new_starts[first:last] = kept_before[starts[first:last] - block.start]
        end = int(kept_before[-1])
        new_values[done:end] = values[block][is_kept]
        new_rows[done:end] = pair_rows[block][is_kept] - rows.start
        done = end
    np.save(out / STARTS_FILE, new_starts)
    del new_values, new_rows
    _save_maxima(out)
    shutil.copyfile(directory / WORDS_FILE, out / WORDS_FILE)
    params = json.loads((directory / PARAMS_FILE).read_text(encoding="utf-8"))
    params["num_docs"] = len(rows)
    (out / PARAMS_FILE).write_text(json.dumps(params), encoding="utf-8")


def _save_maxima(directory: Path) -> None:
    """The highest score of each column, float32 [V], beside the columns; 0 for an empty one."""
    values = np.load(directory / VALUES_FILE, mmap_mode="r")
    starts = np.load(directory / STARTS_FILE)
    maxima = np.zeros(len(starts) - 1, dtype=np.float32)
    # reduceat gives the next column's first score for an empty one: leave those out.
    is_filled = starts[1:] > starts[:-1]
    if is_filled.any():
        maxima[is_filled] = np.maximum.reduceat(values, starts[:-1][is_filled])
    np.save(directory / MAXIMA_FILE, maxima)


def _lies_in(pair_rows: np.ndarray, rows: range) -> np.ndarray:
    return (pair_rows >= rows.start) & (pair_rows < rows.stop)
