"""``forage data corpus``: downloads the published corpora and indexes from the hub or a URL.

The hub lists a repository's files with lengths and hashes, at one recorded revision;
``download.py`` downloads them. ``forage index`` reads the corpus as published (gzip too).
"""

from __future__ import annotations

import json
import logging
import re
import urllib.error
import urllib.parse
import urllib.request
from dataclasses import dataclass
from http.client import HTTPException
from pathlib import Path
from typing import Any

from forage.data.published.download import Piece, download
from forage.errors import UserError
from forage.progress import progress_bar
from forage.records import write_whole_text

LOG = logging.getLogger(__name__)

HUB = "https://huggingface.co"
SOURCE_FILE = "source.json"

_TIMEOUT_S = 30.0
_BYTES_PER_STEP = 10**6
# Pieces of one file, named like those of `split`: part_aa, part_ab, ... or name.part_aa.
_PIECE = re.compile(r"^(?P<whole>.*?)[._-]?part[._-]?[a-z]{2}$")
_NO_DATA = (".gitattributes", ".gitignore", "README.md")


@dataclass(frozen=True, slots=True)
class Published:
    """A hub repository, and the name of the file to join its pieces into, if it has pieces.

    ``gigabytes`` is the published size, for plans, which contact no server; None if unknown.
    """

    hub_id: str
    whole: str = ""
    gigabytes: float | None = None


CORPORA = {
    "wiki-18": Published("PeterJinGo/wiki-18-corpus", gigabytes=14.0),
    "wiki-18-e5": Published("PeterJinGo/wiki-18-e5-index", "e5_Flat.index", gigabytes=64.6),
    "wiki-18-e5-hnsw64": Published("PeterJinGo/wiki-18-e5-index-HNSW64", "e5_HNSW64.index"),
    "wiki-18-bm25": Published("PeterJinGo/wiki-18-bm25-index"),
    "asearcher": Published("inclusionAI/ASearcher-Local-Knowledge"),
}


def fetch(
    name: str, out: Path, hub: str | None, revision: str | None, sha256: str | None
) -> list[Path]:
    """Downloads every file of a published corpus, or the file at a URL, into ``out``.

    The commit of ``revision`` is written to ``source.json``, and a resumed download reuses it, so
    that a change on the hub cannot mix two versions. Raises ``UserError``.
    """
    if name.startswith(("http://", "https://")):
        if hub or revision:
            raise UserError("--hub and --revision apply to a corpus by name, not to an address")
        files = _file_at(name, sha256 or "")
    else:
        if sha256:
            raise UserError("--sha256 is for an address; a corpus by name has its own checksums")
        corpus = CORPORA.get(name)
        if corpus is None:
            raise UserError(f"there is no corpus {name!r}; choose one of {', '.join(CORPORA)}")
        hub = (hub or HUB).rstrip("/")
        try:
            commit = _commit(corpus.hub_id, out, hub, revision or "main")
            files = _listing(corpus, hub, commit)
        except (KeyError, TypeError, AttributeError) as error:  # from the replies: see _ask
            raise UserError(
                f"{hub} does not answer like the hub ({error!r}); name another mirror with --hub"
            ) from error
    paths = _fetch(files, out, Path(name).name)
    LOG.info("complete and verified: %s", ", ".join(map(str, paths)))
    return paths


def _file_at(address: str, sha256: str) -> dict[str, list[Piece]]:
    if not re.fullmatch(r"[0-9a-f]{64}", sha256):
        raise UserError(f"--sha256 is {sha256!r}; the 64 hexadecimal digits of the file are needed")
    try:
        name = Path(urllib.parse.urlsplit(address).path).name
    except ValueError:
        name = ""
    if not name:
        raise UserError(f"{address} is not the address of a file; write http(s)://host/path/name")
    return {name: [Piece(address, _length(address), sha256)]}


def _fetch(files: dict[str, list[Piece]], out: Path, label: str) -> list[Path]:
    total = sum(piece.num_bytes for pieces in files.values() for piece in pieces)
    done = 0
    with progress_bar(f"{label} (MB)", -(-total // _BYTES_PER_STEP)) as bar:

        def on_bytes(count: int) -> None:
            nonlocal done
            done += count
            bar.progress.update(bar.task, completed=done / _BYTES_PER_STEP)

        for name, pieces in files.items():
            bar.progress.update(bar.task, note=name)
            download(pieces, out / name, on_bytes)
    return [out / name for name in files]


def _commit(hub_id: str, out: Path, hub: str, revision: str) -> str:
    """The commit to download: that of an earlier, unfinished download, or else the hub's answer."""
    source_file = out / SOURCE_FILE
    if source_file.exists():
        try:
            source = json.loads(source_file.read_text(encoding="utf-8"))
            there, its_revision, commit = (source[key] for key in ("hub_id", "revision", "commit"))
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise UserError(
                f"{source_file} does not say what {out} contains ({error}); choose another --out, "
                "or remove that file: the existing files are then compared with the newest commit"
            ) from error
        if (there, its_revision) != (hub_id, revision):
            raise UserError(
                f"{out} contains {there} at {its_revision}, not {hub_id} at {revision}; choose "
                "another --out"
            )
        LOG.info("%s at commit %s, as before", hub_id, commit)
        return commit
    answer, _ = _ask(f"{hub}/api/datasets/{hub_id}/revision/{revision}")
    commit = answer["sha"]
    source = {"hub": hub, "hub_id": hub_id, "revision": revision, "commit": commit}
    write_whole_text(source_file, json.dumps(source, indent=1) + "\n")
    return commit


def _listing(corpus: Published, hub: str, commit: str) -> dict[str, list[Piece]]:
    """The pieces of each file, from the hub's file list of the repository."""
    hub_id = corpus.hub_id
    entries: list[dict[str, Any]] = []
    page: str | None = f"{hub}/api/datasets/{hub_id}/tree/{commit}?recursive=true"
    while page:
        rows, page = _ask(page)
        entries += rows
    files: dict[str, list[Piece]] = {}
    for entry in sorted(entries, key=lambda entry: entry["path"]):
        path = entry["path"]
        if entry["type"] != "file" or path in _NO_DATA:
            continue
        if ".." in Path(path).parts or path.startswith("/"):
            raise UserError(f"{hub_id} lists a file outside its own folder: {path!r}")
        url = f"{hub}/datasets/{hub_id}/resolve/{commit}/{urllib.parse.quote(path)}"
        checksum = {"sha256": entry["lfs"]["oid"]} if "lfs" in entry else {"sha1": entry["oid"]}
        files.setdefault(_whole(path, corpus), []).append(Piece(url, entry["size"], **checksum))
    if not files:
        raise UserError(f"{hub_id} at {commit} contains no files; check --revision")
    return files


def _whole(path: str, corpus: Published) -> str:
    """The file that ``path`` is a piece of; ``path`` itself if it is a whole file."""
    piece = _PIECE.match(path)
    return path if piece is None else piece["whole"] or corpus.whole or "whole"


def _ask(url: str) -> tuple[Any, str | None]:
    """The hub's parsed answer, unchecked, and the URL of its next page if there is one."""
    try:
        with urllib.request.urlopen(url, timeout=_TIMEOUT_S) as reply:
            more = re.search(r'<([^>]+)>;\s*rel="next"', reply.headers.get("Link") or "")
            return json.load(reply), more[1] if more else None
    except urllib.error.HTTPError as error:
        raise UserError(f"{url}: the hub answers {error.code} {error.reason}") from error
    except (OSError, ValueError, HTTPException) as error:
        reason = getattr(error, "reason", None) or error
        raise UserError(
            f"cannot query {url}: {reason}; if the hub cannot be reached, name a mirror with "
            "--hub, or fetch the files otherwise and run: forage index --corpus FILE"
        ) from error


def _length(address: str) -> int:
    try:
        request = urllib.request.Request(address, method="HEAD")
        with urllib.request.urlopen(request, timeout=_TIMEOUT_S) as reply:
            length = reply.headers.get("Content-Length")
    except (OSError, ValueError, HTTPException) as error:
        raise UserError(f"cannot reach {address}: {error}") from error
    if length is None:
        raise UserError(f"{address}: the server does not report the file's length")
    return int(length)
