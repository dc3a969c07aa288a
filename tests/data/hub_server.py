"""A small hub over real HTTP: the two replies of its API, and files with byte ranges.

It can cut connections short, ignore ranges and reply with errors, like real hubs.
"""

from __future__ import annotations

import json
import threading
from dataclasses import dataclass, field
from hashlib import sha1, sha256
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, Self

COMMIT = "0123abcd" * 5


@dataclass
class Hub:
    """The files of one repository, faults for the next requests, and the requests received."""

    files: dict[str, bytes]
    plain: tuple[str, ...] = ()
    """Files without a SHA-256, identified by git's hash of their content."""
    knows_ranges: bool = True
    cut_after: list[int] = field(default_factory=list)
    """For each coming file request, the bytes after which the connection is dropped."""
    statuses: list[int] = field(default_factory=list)
    """For each coming file request, a status to refuse it with (200: serve it)."""
    published: dict[str, bytes] = field(default_factory=dict)
    """Contents described in the listing if they differ from those that are sent."""
    page_size: int = 1000
    ranges: list[str | None] = field(default_factory=list)
    tokens: set[str | None] = field(default_factory=set)
    """The ``Authorization`` headers of the requests for datasets."""

    def __enter__(self) -> Self:
        hub = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_GET(self) -> None:
                hub.answer(self)

            do_HEAD = do_GET

            def log_message(self, format: str, *args: object) -> None:
                del format, args

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        threading.Thread(target=self._server.serve_forever, daemon=True).start()
        self.url = f"http://127.0.0.1:{self._server.server_address[1]}"
        return self

    def __exit__(self, *_: object) -> None:
        self._server.shutdown()
        self._server.server_close()

    def answer(self, request: BaseHTTPRequestHandler) -> None:
        path, _, query = request.path.partition("?")
        if "/datasets/" in path:
            self.tokens.add(request.headers.get("Authorization"))
        if path.startswith("/api/datasets/"):
            self._answer_api(request, path, query)
        elif path.startswith("/datasets/") or path.startswith("/file/"):
            self._answer_file(request, path.rpartition("/")[2])
        else:
            _send(request, 404, b"nothing here")

    def _answer_api(self, request: BaseHTTPRequestHandler, path: str, query: str) -> None:
        if "/revision/" in path:
            _send_json(request, {"id": "owner/name", "sha": COMMIT})
            return
        entries = [{"type": "directory", "path": "folder", "oid": "0"}]
        entries += [self._entry(name, content) for name, content in self.files.items()]
        start = int(query.partition("from=")[2] or 0)
        end = start + self.page_size
        headers = {}
        if end < len(entries):
            headers["Link"] = f'<{self.url}{path}?recursive=true&from={end}>; rel="next"'
        _send_json(request, entries[start:end], headers)

    def _entry(self, name: str, content: bytes) -> dict[str, Any]:
        content = self.published.get(name, content)
        oid = sha1(b"blob %d\0" % len(content) + content).hexdigest()
        entry: dict[str, Any] = {"type": "file", "path": name, "size": len(content), "oid": oid}
        if name not in self.plain:
            entry["lfs"] = {
                "oid": sha256(content).hexdigest(),
                "size": len(content),
                "pointerSize": 100,
            }
        return entry

    def _answer_file(self, request: BaseHTTPRequestHandler, name: str) -> None:
        content = self.files[name]
        if request.command == "HEAD":
            etag = self._entry(name, content)["oid"]
            _send(request, 200, content, {"ETag": f'"{etag}"', "X-Repo-Commit": COMMIT})
            return
        asked = request.headers.get("Range")
        self.ranges.append(asked)
        status = self.statuses.pop(0) if self.statuses else 200
        if status != 200:
            _send(request, status, b"no")
            return
        start = int(asked.removeprefix("bytes=").rstrip("-")) if asked and self.knows_ranges else 0
        body = content[start:]
        headers = {}
        if asked and self.knows_ranges:
            status = 206
            headers["Content-Range"] = f"bytes {start}-{len(content) - 1}/{len(content)}"
        cut = self.cut_after.pop(0) if self.cut_after else len(body)
        _send(request, status, body, headers, cut)


def _send_json(
    request: BaseHTTPRequestHandler, value: object, headers: dict[str, str] | None = None
) -> None:
    _send(request, 200, json.dumps(value).encode(), headers)


def _send(
    request: BaseHTTPRequestHandler,
    status: int,
    body: bytes,
    headers: dict[str, str] | None = None,
    cut: int | None = None,
) -> None:
    """Sends the reply; announces its full length even if it is cut short."""
    request.send_response(status)
    request.send_header("Content-Length", str(len(body)))
    for name, value in (headers or {}).items():
        request.send_header(name, value)
    request.end_headers()
    if request.command != "HEAD":
        request.wfile.write(body if cut is None else body[:cut])
    if cut is not None and cut < len(body):
        request.close_connection = True
