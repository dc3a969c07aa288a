"""Raw rows out of a file, each with its place, whatever the file is: the first step of reading.

Files are JSON lines, a list of objects, one object (SQuAD), all of them gzipped or not, or
parquet. What the keys of a row mean is decided in ``forms.py``.
"""

from __future__ import annotations

import gzip
import json
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from forage.data.forms.parquet import is_parquet, parquet_rows
from forage.errors import UserError

Row = dict[str, Any]


def read_rows(path: Path) -> Iterator[tuple[str, Row]]:
    """Each row with its place, ``path:line`` or ``path: record n``; raises ``UserError``."""
    for place, value in parquet_rows(path) if is_parquet(path) else _json_values(path):
        if not isinstance(value, dict):
            raise UserError(f"{place}: a JSON object is needed, not {shorten(value)}")
        yield place, value


def stem(path: Path) -> str:
    """The file's name without what says how it is written: ``xquad.en.json`` is ``xquad.en``."""
    name = path.name.removesuffix(".gz")
    for suffix in (".jsonl", ".json", ".parquet"):
        name = name.removesuffix(suffix)
    return name


def shorten(value: object) -> str:
    """A value as it may stand in a message."""
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."


def _json_values(path: Path) -> Iterator[tuple[str, object]]:
    text = _read_text(path)
    try:
        tree = json.loads(text)
    except (json.JSONDecodeError, RecursionError) as error:
        if text.lstrip().startswith("["):
            line = getattr(error, "lineno", 1)
            raise UserError(f"{path}:{line}: this is no JSON ({error})") from error
        yield from _json_lines(path, text)
        return
    if isinstance(tree, list):
        yield from ((f"{path}: record {n}", value) for n, value in enumerate(tree, start=1))
    else:
        yield (str(path) if "\n" in text.strip() else f"{path}:1"), tree


def _json_lines(path: Path, text: str) -> Iterator[tuple[str, object]]:
    # Not splitlines(): JSON strings may hold U+2028 and its like unescaped.
    for number, line in enumerate(text.split("\n"), start=1):
        if not line.strip():
            continue
        try:
            yield f"{path}:{number}", json.loads(line)
        except (json.JSONDecodeError, RecursionError) as error:
            raise UserError(f"{path}:{number}: this line is no JSON ({error})") from error


def _read_text(path: Path) -> str:
    try:
        data = path.read_bytes()
        return (gzip.decompress(data) if path.suffix == ".gz" else data).decode("utf-8-sig")
    except (OSError, EOFError, zlib.error) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise UserError(f"cannot read the questions {path}: {reason}") from error
    except UnicodeDecodeError as error:
        raise UserError(f"{path} is not UTF-8 text (byte {error.start})") from error
