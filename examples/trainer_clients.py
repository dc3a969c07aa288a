"""What veRL, slime and Search-R1 send to a Forage server, and what each makes of the reply.

Run it against your server before you run one of these trainers; it only needs Python's standard
library.

    python examples/trainer_clients.py "who wrote the first compiler" --url http://127.0.0.1:8000

It prints for each trainer the setting that names the server, and the text that its policy would
read. docs/serving.md lists the other clients that work unchanged.
"""

from __future__ import annotations

import argparse
import json
import urllib.error
import urllib.request
from typing import Any

SETTINGS = {
    "Search-R1": "retriever.url={url}/retrieve retriever.topk={topk}",
    "veRL": "retrieval_service_url: {url}/retrieve and topk: {topk}, in tool_config_path's file",
    "slime": '"search_url": "{url}/retrieve" and "topk": {topk}, in SEARCH_R1_CONFIGS',
}


def ask(url: str, query: str, topk: int, return_scores: bool) -> list[dict[str, Any]]:
    """The hits of one query. Raises ``urllib.error.URLError``: a failure is never an empty list."""
    body = {"queries": [query], "topk": topk, "return_scores": return_scores}
    headers = {"Content-Type": "application/json"}
    request = urllib.request.Request(f"{url}/retrieve", json.dumps(body).encode(), headers)
    with urllib.request.urlopen(request, timeout=30) as reply:
        return json.load(reply)["result"][0]


def search_r1(url: str, query: str, topk: int) -> str:
    """``Doc 1(Title: "T") text``; requests scores, so that contents are inside ``document``."""
    return lines([hit["document"] for hit in ask(url, query, topk, return_scores=True)])


def verl(url: str, query: str, topk: int) -> str:
    """A JSON object with one text, with an empty line between passages."""
    shown: list[str] = []
    for number, hit in enumerate(ask(url, query, topk, return_scores=True), start=1):
        title, _, text = hit["document"]["contents"].partition("\n")
        shown.append(f"Doc {number} (Title: {title})\n{text}")
    return json.dumps({"result": "\n\n".join(shown)}, ensure_ascii=False)


def slime(url: str, query: str, topk: int) -> str:
    """In Search-R1's format; requests no scores, and reads contents next to the id."""
    return lines(ask(url, query, topk, return_scores=False))


def lines(documents: list[dict[str, Any]]) -> str:
    """One line per passage; the first line of its contents is the title."""
    shown: list[str] = []
    for number, document in enumerate(documents, start=1):
        title, _, text = document["contents"].partition("\n")
        shown.append(f"Doc {number}(Title: {title}) {text}")
    return "\n".join(shown)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("query")
    parser.add_argument("--url", default="http://127.0.0.1:8000", help="without /retrieve")
    parser.add_argument("--topk", type=int, default=3)
    args = parser.parse_args()
    for (name, setting), client in zip(SETTINGS.items(), (search_r1, verl, slime), strict=True):
        print(f"# {name}: {setting.format(url=args.url, topk=args.topk)}")
        try:
            print(client(args.url, args.query, args.topk), end="\n\n")
        except urllib.error.URLError as error:
            raise SystemExit(f"{args.url}/retrieve does not answer: {error}") from None


if __name__ == "__main__":
    main()
