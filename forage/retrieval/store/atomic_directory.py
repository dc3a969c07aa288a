"""A directory that appears whole or not at all: built beside its place, then renamed.

``built_beside`` starts from nothing and leaves nothing behind. ``resumable_beside`` keeps its
directory when a build ends early, so that the same command goes on; one build at a time may have
it. What is built is not known here.
"""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from psutil import pid_exists

from forage.errors import UserError
from forage.records import lock_alone
from forage.retrieval.store.manifest import MANIFEST_FILE, seal

LOCK_FILE = "lock"


def refuse_other_contents(out: Path) -> None:
    """Only an index, an empty directory or nothing may be built over."""
    if not out.exists() or (out / MANIFEST_FILE).is_file():
        return
    if not out.is_dir() or any(out.iterdir()):
        raise UserError(
            f"{out} exists and is not an index; nothing was touched: choose another --out"
        )


def refuse_an_index(out: Path) -> None:
    """Raise ``UserError`` where ``out`` holds an index, which nobody asked to replace."""
    if (out / MANIFEST_FILE).is_file():
        raise UserError(
            f"{out} holds an index already; nothing was touched: --overwrite replaces it, or "
            "choose another --out"
        )


@contextmanager
def built_beside(out: Path) -> Iterator[Path]:
    """A directory to build in, renamed to ``out`` if the body ends well, else removed."""
    out = out.resolve()  # beside what a link leads to: that is the disk that was meant
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        _remove_leftovers(out)
        name = f"{_prefix(out)}{os.getpid()}-"
        directory = Path(tempfile.mkdtemp(prefix=name, dir=out.parent))
    except OSError as error:
        raise UserError(f"cannot write beside {out}: {error.strerror}") from error
    try:
        yield directory
        seal(directory)
        _put_in_place(directory, out)
    except OSError as error:
        raise UserError(f"cannot write the index {out}: {error.strerror or error}") from error
    finally:
        shutil.rmtree(directory, ignore_errors=True)


def partial_directory(out: Path) -> Path:
    """Where the unfinished build of ``out`` lies."""
    return out.with_name(f".{out.name}.partial")


@contextmanager
def resumable_beside(out: Path, is_restart: bool) -> Iterator[Path]:
    """The directory of the unfinished build, as it was left, renamed to ``out`` in the end.

    ``is_restart`` empties it first. The body seals it, since it knows what goes before the end.
    Raises ``UserError`` while another process builds ``out``.
    """
    directory = partial_directory(out)
    try:
        directory.mkdir(parents=True, exist_ok=True)
        with (directory / LOCK_FILE).open("w") as lock:
            try:
                lock_alone(lock.fileno(), directory)
            except BlockingIOError as error:
                raise UserError(f"another process is building {out}; wait for it") from error
            if is_restart:
                _empty(directory)
            yield directory
            (directory / LOCK_FILE).unlink()
            _put_in_place(directory, out)
    except OSError as error:
        raise UserError(
            f"cannot write the index {out}: {error.strerror or error}; what is finished stays in "
            f"{directory}, and the same command goes on from there"
        ) from error


def _empty(directory: Path) -> None:
    for path in directory.iterdir():
        if path.is_dir():
            shutil.rmtree(path)
        elif path.name != LOCK_FILE:
            path.unlink()


def _put_in_place(directory: Path, out: Path) -> None:
    directory.chmod(0o755)
    if out.exists():
        retired = out.with_name(f"{_prefix(out)}{os.getpid()}-retired")
        out.rename(retired)
        directory.rename(out)
        shutil.rmtree(retired)
    else:
        directory.rename(out)


def _prefix(out: Path) -> str:
    return f".{out.name}.building-"


def _remove_leftovers(out: Path) -> None:
    """Remove the directories of killed builds of ``out``."""
    for left in list(out.parent.iterdir()):
        owner = left.name.removeprefix(_prefix(out)).split("-")[0]
        if left.name.startswith(_prefix(out)) and owner.isdigit() and not pid_exists(int(owner)):
            shutil.rmtree(left, ignore_errors=True)
