"""Calls a Forage search server from another training loop: veRL, slime, or your own.

Copy this file; it only needs Python's standard library. The wire format is that of Search-R1's
retriever, so it also works with such servers. In a rollout worker::

    retriever = Retriever(["http://10.0.0.1:8000", "http://10.0.0.2:8000"])
    texts = retriever.as_information(retriever.retrieve(["who wrote the first program"]))

veRL's search tool sends ``return_scores: true`` and reads ``result[i][j]["document"]["contents"]``;
the tools of slime, RLinf and ASearcher send false and read ``result[i][j]["contents"]``, the latter
two ``["url"]`` as well. All of them work unchanged with a Forage server: set their retriever URL to
``http://HOST:PORT/retrieve``.
"""

from __future__ import annotations

import argparse
import http.client
import json
import os
import random
import time
import urllib.error
import urllib.request
from collections.abc import Sequence
from dataclasses import dataclass

_RETRIED_STATUSES = frozenset({408, 429, 500, 502, 503, 504})


class SearchFailed(Exception):
    """No server answered within the deadline. Treat it as missing, not as an empty result."""


@dataclass(frozen=True, slots=True)
class Document:
    """A passage; ``score`` is None if scores were not requested."""

    id: str
    contents: str
    score: float | None


class Retriever:
    """A blocking client, safe to share between threads; send many queries in one call."""

    def __init__(
        self,
        urls: Sequence[str],
        token: str | None = None,
        timeout_s: float = 30.0,
        deadline_s: float = 90.0,
    ) -> None:
        """``timeout_s`` limits one try, ``deadline_s`` all tries of a call."""
        self._urls = [url.rstrip("/").removesuffix("/retrieve") + "/retrieve" for url in urls]
        self._headers = {"Content-Type": "application/json"}
        if token:
            self._headers["Authorization"] = f"Bearer {token}"
        self._timeout_s, self._deadline_s = timeout_s, deadline_s

    def retrieve(
        self, queries: Sequence[str], topk: int = 3, return_scores: bool = True
    ) -> list[list[Document]]:
        """The passages of each query, best first; raises ``SearchFailed`` or ``ValueError``."""
        body = {"queries": list(queries), "topk": topk, "return_scores": return_scores}
        reply = self._post(json.dumps(body).encode())
        if len(reply["result"]) != len(queries):
            raise SearchFailed(f"{len(reply['result'])} results for {len(queries)} queries")
        return [[_document(found) for found in documents] for documents in reply["result"]]

    @staticmethod
    def as_information(results: Sequence[Sequence[Document]]) -> list[str]:
        """Passages as Search-R1's environments show them: ``Doc 1(Title: "Ada") Born 1815.``"""
        texts: list[str] = []
        for documents in results:
            lines: list[str] = []
            for number, document in enumerate(documents, start=1):
                title, _, text = document.contents.partition("\n")
                lines.append(f"Doc {number}(Title: {title}) {text}\n")
            texts.append("".join(lines))
        return texts

    def _post(self, body: bytes) -> dict:
        deadline = time.monotonic() + self._deadline_s
        first, pause_s, reason = random.randrange(len(self._urls)), 0.25, "nothing was tried"
        tries = 0
        while (left_s := deadline - time.monotonic()) > 0:
            url = self._urls[(first + tries) % len(self._urls)]
            try:
                request = urllib.request.Request(url, body, self._headers)
                timeout_s = min(self._timeout_s, left_s)
                with urllib.request.urlopen(request, timeout=timeout_s) as response:
                    return json.loads(response.read())
            except urllib.error.HTTPError as error:
                reason = f"{url}: HTTP {error.code}: {error.read(300).decode('utf-8', 'replace')}"
                if error.code not in _RETRIED_STATUSES:
                    raise ValueError(reason) from None  # the request is wrong; retrying cannot help
            except (OSError, http.client.HTTPException, json.JSONDecodeError) as error:
                reason = f"{url}: {error}"
            tries += 1
            if tries % len(self._urls) == 0:  # every server failed: wait before the next round
                time.sleep(min(pause_s * random.uniform(0.5, 1.5), max(0.0, left_s)))
                pause_s = min(2 * pause_s, 8.0)
        raise SearchFailed(f"no server answered within {self._deadline_s:g} s; last: {reason}")


def _document(found: dict) -> Document:
    """Reads either shape: ``{"document": {...}, "score": 1.5}`` or only the document."""
    document = found.get("document", found)
    return Document(str(document.get("id", "")), document["contents"], found.get("score"))


def main() -> None:
    parser = argparse.ArgumentParser(description="Search, with scores and without.")
    parser.add_argument("query", nargs="+")
    parser.add_argument("--url", action="append", default=[], help="repeat for several servers")
    parser.add_argument("--topk", type=int, default=3)
    args = parser.parse_args()
    urls = args.url or ["http://127.0.0.1:8000"]
    retriever = Retriever(urls, token=os.environ.get("FORAGE_TOKEN"), deadline_s=10.0)
    try:
        scored = retriever.retrieve(args.query, args.topk, return_scores=True)
        plain = retriever.retrieve(args.query, args.topk, return_scores=False)
    except (SearchFailed, ValueError) as error:
        raise SystemExit(str(error)) from None
    for query, with_scores, without in zip(args.query, scored, plain, strict=True):
        print(query)
        assert [d.id for d in with_scores] == [d.id for d in without]
        for document in with_scores:
            print(f"  {document.score:8.3f}  {document.contents!r}")


if __name__ == "__main__":
    main()
