"""The manifest of a checkpoint: its files with their lengths and checksums, written last.

A directory without one was never finished, and a file that differs from it was damaged later.
"""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

from forage.errors import UserError

MANIFEST = "manifest.json"
_FORMAT = 1


class DamagedCheckpointError(UserError):
    """A checkpoint that is not as it was written; the one before it may serve."""


def write_manifest(folder: Path) -> None:
    """List the files that are in ``folder`` now."""
    files = {name: _entry(folder / name) for name in _names(folder)}
    text = json.dumps({"format": _FORMAT, "files": files}, indent=1)
    (folder / MANIFEST).write_text(text, encoding="utf-8")


def check_manifest(folder: Path) -> None:
    """Raise ``DamagedCheckpointError``, or ``UserError`` for a checkpoint of a newer Forage."""
    try:
        manifest = json.loads((folder / MANIFEST).read_text(encoding="utf-8"))
        number = manifest["format"]
        files = dict(manifest["files"]) if number == _FORMAT else {}  # a newer one may have none
    except Exception as error:
        raise damaged(folder, error) from error
    if number != _FORMAT:
        raise UserError(
            f"the checkpoint {folder} has format {number}, this Forage reads {_FORMAT}: go on with "
            "the version that wrote it"
        )
    for name, entry in files.items():
        try:
            is_same = _entry(folder / name) == entry
        except OSError as error:
            raise damaged(folder, error) from error
        if not is_same:
            raise damaged(folder, ValueError(f"{name} is not as it was written"))


def damaged(folder: Path, error: Exception) -> DamagedCheckpointError:
    """The error of a checkpoint that cannot be read, to raise."""
    reason = str(error).partition("\n")[0]
    return DamagedCheckpointError(
        f"the checkpoint {folder} cannot be read ({type(error).__name__}: {reason}); "
        "remove it, and --resume takes the one before it"
    )


def _names(folder: Path) -> list[str]:
    files = [path for path in folder.rglob("*") if path.is_file() and path.name != MANIFEST]
    return sorted(path.relative_to(folder).as_posix() for path in files)


def _entry(path: Path) -> dict[str, object]:
    with path.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    return {"bytes": path.stat().st_size, "sha256": digest}
