"""``forage data corpus``: downloads published corpora and indexes, from the hub or by address.

``huggingface_hub`` downloads them at one commit, which ``source.json`` records. Every file is
compared with its published checksum, and split files are joined. ``forage index`` reads the corpus
in its published form, including gzip.
"""

from __future__ import annotations

import glob
import hashlib
import json
import logging
import os
import re
import shutil
import urllib.parse
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from typing import TYPE_CHECKING

from forage.disk.disk_failures import remedy_for
from forage.disk.whole_writes import write_whole_text
from forage.errors import UserError

if TYPE_CHECKING:
    from hashlib import _Hash as Hash

    from huggingface_hub import HfApi
    from huggingface_hub.hf_api import RepoFile

LOG = logging.getLogger(__name__)

SOURCE_FILE = "source.json"

_BLOCK_BYTES = 2**24
_UNFINISHED = ".download"
# Pieces of one file as `split` names them: part_aa, part_ab, ... or name.part_aa.
_PIECE = re.compile(r"^(?P<whole>.*?)[._-]?part[._-]?[a-z]{2}$")
_NO_DATA = (".gitattributes", ".gitignore", "README.md")


@dataclass(frozen=True, slots=True)
class Published:
    """A hub repository; ``whole`` names the file that its pieces form, if it has pieces.

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
    """Downloads all files of a published corpus, or the file at an address, to ``out``.

    ``source.json`` records the commit of ``revision``, and a resumed download uses it again, so
    that a change on the hub cannot mix two versions. Raises ``UserError``.
    """
    if name.startswith(("http://", "https://")):
        if hub or revision:
            raise UserError("--hub and --revision are for a corpus by name, not for an address")
        paths = [_fetch_address(name, out, sha256 or "")]
    else:
        if sha256:
            raise UserError("--sha256 is for an address; a corpus by name has its own checksums")
        corpus = CORPORA.get(name)
        if corpus is None:
            raise UserError(f"unknown corpus {name!r}; choose from: {', '.join(CORPORA)}")
        paths = _fetch_corpus(corpus, out, hub, revision or "main")
    LOG.info("complete and verified: %s", ", ".join(map(str, paths)))
    return paths


def _fetch_address(address: str, out: Path, sha256: str) -> Path:
    if not re.fullmatch(r"[0-9a-f]{64}", sha256):
        raise UserError(f"--sha256 is {sha256!r}; the 64 hexadecimal digits of the file are needed")
    try:
        parts = urllib.parse.urlsplit(address)
        name = "" if parts.port == 0 else Path(parts.path).name  # an invalid port raises
    except ValueError:
        name = ""
    if not name:
        raise UserError(f"{address} is not the address of a file; write http(s)://host/path/name")
    from huggingface_hub.file_download import http_get

    target, partial = out / name, out / f"{name}.partial"
    if target.exists():
        if _digest(target, hashlib.sha256()) != sha256:
            raise UserError(f"{target} is another file; move it away, or choose another --out")
        return target
    with _download_failures(address, partial):
        out.mkdir(parents=True, exist_ok=True)
        if not (partial.exists() and _digest(partial, hashlib.sha256()) == sha256):
            with partial.open("ab") as file:
                http_get(address, file, resume_size=file.tell())
    _verify(partial, hashlib.sha256(), sha256, address)
    partial.replace(target)
    return target


def _fetch_corpus(corpus: Published, out: Path, hub: str | None, revision: str) -> list[Path]:
    from huggingface_hub import HfApi, snapshot_download

    api, unfinished = HfApi(endpoint=hub), out / _UNFINISHED
    where = f"{api.endpoint}/datasets/{corpus.hub_id}"
    with _download_failures(where, unfinished):
        commit = _commit(corpus.hub_id, out, api, revision)
        files = _listing(corpus, api, commit)
        absent = {
            name: pieces for name, pieces in files.items() if not _is_complete(out / name, pieces)
        }
        wanted = [
            piece
            for name, pieces in absent.items()
            for piece, end in zip(pieces, accumulate(each.size for each in pieces), strict=True)
            if _size(unfinished / f"{name}.joined") < end
        ]
        _check_room(out, sum(piece.size for piece in wanted))
        if wanted:
            snapshot_download(
                corpus.hub_id,
                repo_type="dataset",
                revision=commit,
                local_dir=unfinished,
                allow_patterns=[glob.escape(piece.path) for piece in wanted],
                endpoint=hub,
            )
        for piece in wanted:
            digest, published = hashlib.sha1(b"blob %d\0" % piece.size), piece.blob_id
            if piece.lfs is not None:
                digest, published = hashlib.sha256(), piece.lfs.sha256
            _verify(unfinished / piece.path, digest, published, f"{where}: {piece.path}")
        for name, pieces in absent.items():
            (out / name).parent.mkdir(parents=True, exist_ok=True)
            _join(pieces, unfinished, name).replace(out / name)
    shutil.rmtree(unfinished, ignore_errors=True)
    return [out / name for name in files]


def _join(pieces: Sequence[RepoFile], folder: Path, name: str) -> Path:
    """Joins verified pieces and deletes each; after a kill it continues with the same piece."""
    if len(pieces) == 1:
        return folder / pieces[0].path
    joined, start = folder / f"{name}.joined", 0
    with joined.open("ab") as file:
        for piece in pieces:
            if file.tell() < start + piece.size:
                file.truncate(start)
                with (folder / piece.path).open("rb") as part:
                    shutil.copyfileobj(part, file, _BLOCK_BYTES)
                file.flush()
                os.fsync(file.fileno())
                (folder / piece.path).unlink()
            start += piece.size
    return joined


def _commit(hub_id: str, out: Path, api: HfApi, revision: str) -> str:
    """The commit to download: that of an earlier, unfinished download, or the hub's answer."""
    source_file = out / SOURCE_FILE
    if source_file.exists():
        try:
            source = json.loads(source_file.read_text(encoding="utf-8"))
            there, its_revision, commit = (source[key] for key in ("hub_id", "revision", "commit"))
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise UserError(
                f"{source_file} does not identify the contents of {out} ({error}); choose another "
                "--out, or remove that file to compare the contents with the newest commit"
            ) from error
        if (there, its_revision) != (hub_id, revision):
            raise UserError(
                f"{out} contains {there} at {its_revision}, not {hub_id} at {revision}; choose "
                "another --out"
            )
        LOG.info("%s at commit %s, as before", hub_id, commit)
        return commit
    commit = api.dataset_info(hub_id, revision=revision).sha
    if commit is None:
        raise UserError(f"{api.endpoint} does not answer like the hub; name another one with --hub")
    source = {"hub": api.endpoint, "hub_id": hub_id, "revision": revision, "commit": commit}
    write_whole_text(source_file, json.dumps(source, indent=1) + "\n")
    return commit


def _listing(corpus: Published, api: HfApi, commit: str) -> dict[str, list[RepoFile]]:
    from huggingface_hub.hf_api import RepoFile

    hub_id = corpus.hub_id
    entries = api.list_repo_tree(hub_id, recursive=True, revision=commit, repo_type="dataset")
    listed = [entry for entry in entries if isinstance(entry, RepoFile)]
    files: dict[str, list[RepoFile]] = {}
    for entry in sorted(listed, key=lambda entry: entry.path):
        path = entry.path
        if path in _NO_DATA:
            continue
        if ".." in Path(path).parts or path.startswith("/"):
            raise UserError(f"{hub_id} lists a file outside its own folder: {path!r}")
        files.setdefault(_whole(path, corpus), []).append(entry)
    if not files:
        raise UserError(f"{hub_id} at {commit} has no files; check --revision")
    return files


def _whole(path: str, corpus: Published) -> str:
    """The file that ``path`` is a piece of; ``path`` itself if it is a whole file."""
    piece = _PIECE.match(path)
    return path if piece is None else piece["whole"] or corpus.whole or "whole"


def _is_complete(target: Path, pieces: Sequence[RepoFile]) -> bool:
    num_bytes = sum(piece.size for piece in pieces)
    if target.exists() and target.stat().st_size != num_bytes:
        raise UserError(
            f"{target} exists with {target.stat().st_size:,} bytes, but {num_bytes:,} are "
            "published; move it away, or choose another --out"
        )
    return target.exists()


def _size(path: Path) -> int:
    return path.stat().st_size if path.exists() else 0


def _check_room(out: Path, num_bytes: int) -> None:
    num_received = sum(path.stat().st_size for path in (out / _UNFINISHED).rglob("*.incomplete"))
    num_free = shutil.disk_usage(out).free
    if num_bytes - num_received > num_free:
        raise UserError(
            f"{out} has {num_free / 1e9:.1f} GB free, {(num_bytes - num_received) / 1e9:.1f} GB "
            "must still be downloaded; free some space, or choose another --out"
        )


def _digest(path: Path, digest: Hash) -> str:
    with path.open("rb") as file:
        while block := file.read(_BLOCK_BYTES):
            digest.update(block)
    return digest.hexdigest()


def _verify(path: Path, digest: Hash, published: str, source: str) -> None:
    found = _digest(path, digest)
    if found != published:
        path.unlink()
        raise UserError(
            f"{source}: its checksum is {found}, but {published} is published; the file was "
            "removed: run the same command again, or use another mirror"
        )


@contextmanager
def _download_failures(source: str, kept: Path) -> Iterator[None]:
    """Turns an error of the network, the hub or the disk into a ``UserError``."""
    try:
        yield
    except UserError:
        raise
    except Exception as error:  # the packages of the hub have no common base
        if isinstance(error, OSError) and error.filename is not None:
            raise UserError(
                f"cannot write {kept}: {error.strerror}; {remedy_for(error)}"
            ) from error
        reason = " ".join(str(error).split()) or type(error).__name__
        raise UserError(
            f"cannot download {source}: {reason}; received "
            f"bytes are kept in {kept}: run the same command again. If the hub cannot be reached, "
            "name a mirror with --hub, or download the files on another machine and give them to: "
            "forage index --corpus FILE"
        ) from error
