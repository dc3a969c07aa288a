"""How the script and the process of a side talk: lines of JSON over two pipes.

The process says that it is ready, or that a package is missing. Then each request is one round of
work, and each reply its figures by name. Between rounds the process waits and computes nothing.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import IO, Any


@dataclass(slots=True)
class Talk:
    """The process's end of the pipes."""

    requests_in: IO[str]
    replies_out: IO[str]
    is_ready: bool = False

    def ready(self, **found: object) -> None:
        """Ends the preparation; ``found`` are choices that the page names, such as threads."""
        self.is_ready = True
        self._say({"ready": {name: str(value) for name, value in found.items()}})

    def missing(self, what: str) -> None:
        """Says that ``what`` is not installed or not possible here, instead of being ready."""
        self._say({"missing": what})

    def versions(self, versions: Mapping[str, str]) -> None:
        self._say({"versions": dict(versions)})

    def next_request(self) -> dict[str, Any] | None:
        """Waits for the next round's request; None at the end."""
        line = self.requests_in.readline()
        return json.loads(line) if line else None

    def requests(self) -> Iterator[dict[str, Any]]:
        while (request := self.next_request()) is not None:
            yield request

    def reply(self, **values: float) -> None:
        """A round's figures: seconds, or a rate per second, by name."""
        self._say({"values": values})

    def _say(self, message: dict[str, Any]) -> None:
        self.replies_out.write(json.dumps(message) + "\n")
        self.replies_out.flush()
