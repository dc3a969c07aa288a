"""The manifest of a checkpoint: its files with lengths and checksums, written last.

A directory without a manifest was never finished; a file that differs from it was damaged later.
"""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

from forage.errors import UserError

MANIFEST = "manifest.json"
_FORMAT = 1


class DamagedCheckpointError(UserError):
    """A checkpoint is damaged; the previous one may be usable."""


def write_manifest(folder: Path) -> None:
    """Writes the manifest of the files in ``folder``."""
    files = {name: _entry(folder / name) for name in _names(folder)}
    text = json.dumps({"format": _FORMAT, "files": files}, indent=1)
    (folder / MANIFEST).write_text(text, encoding="utf-8")


def check_manifest(folder: Path) -> None:
    """Raises ``DamagedCheckpointError``, or ``UserError`` for a checkpoint of a newer Forage."""
    try:
        manifest = json.loads((folder / MANIFEST).read_text(encoding="utf-8"))
        number = manifest["format"]
        files = (
            dict(manifest["files"]) if number == _FORMAT else {}
        )  # a newer format may have no files
    except Exception as error:
        raise damaged(folder, error) from error
    if number != _FORMAT:
        raise UserError(
            f"the checkpoint {folder} has format {number}, but this Forage reads {_FORMAT}: use "
            "the version that wrote it"
        )
    for name, entry in files.items():
        try:
            is_same = _entry(folder / name) == entry
        except OSError as error:
            raise damaged(folder, error) from error
        if not is_same:
            raise damaged(folder, ValueError(f"{name} has changed since it was written"))


def damaged(folder: Path, error: Exception) -> DamagedCheckpointError:
    """Returns the error to raise for a checkpoint that cannot be read."""
    reason = str(error).partition("\n")[0]
    return DamagedCheckpointError(
        f"the checkpoint {folder} cannot be read ({type(error).__name__}: {reason}); "
        "remove it, and --resume uses the previous one"
    )


def _names(folder: Path) -> list[str]:
    files = [path for path in folder.rglob("*") if path.is_file() and path.name != MANIFEST]
    return sorted(path.relative_to(folder).as_posix() for path in files)


def _entry(path: Path) -> dict[str, object]:
    with path.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    return {"bytes": path.stat().st_size, "sha256": digest}
