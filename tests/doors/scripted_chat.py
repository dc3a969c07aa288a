"""A stand-in for a model server: ``/v1/chat/completions`` from a script, streamed on request."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread
from typing import Any

Turn = Callable[[list[dict[str, Any]]], dict[str, Any]]
"""The messages of a request, and the assistant's message in reply."""


@contextmanager
def scripted_chat(turn: Turn) -> Iterator[tuple[str, list[dict[str, Any]]]]:
    """The base URL of the server, and the bodies of the requests it received."""
    seen: list[dict[str, Any]] = []

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            seen.append(body)
            message = {"role": "assistant", **turn(body["messages"])}
            end = "tool_calls" if message.get("tool_calls") else "stop"
            head = {"id": f"c{len(seen)}", "created": 0, "model": body["model"]}
            usage = {"prompt_tokens": 1, "completion_tokens": 1, "total_tokens": 2}
            if body.get("stream"):
                for number, call in enumerate(message.get("tool_calls") or ()):
                    call["index"] = number
                choice = {"index": 0, "delta": message, "finish_reason": end}
                chunk = {**head, "object": "chat.completion.chunk", "choices": [choice]}
                last = {**chunk, "choices": [], "usage": usage}
                text = "".join(f"data: {json.dumps(one)}\n\n" for one in (chunk, last))
                self._send(f"{text}data: [DONE]\n\n", "text/event-stream")
                return
            choice = {"index": 0, "message": message, "finish_reason": end}
            whole = {**head, "object": "chat.completion", "choices": [choice], "usage": usage}
            self._send(json.dumps(whole), "application/json")

        def _send(self, text: str, kind: str) -> None:
            data = text.encode()
            self.send_response(200)
            self.send_header("Content-Type", kind)
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        def do_GET(self) -> None:
            self._send(json.dumps({"object": "list", "data": []}), "application/json")

        def log_message(self, format: str, *args: Any) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}/v1", seen
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
