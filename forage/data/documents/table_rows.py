"""Your own rows as documents: a .csv, .tsv, .parquet or .jsonl file with named columns.

A row becomes an ``OwnDocument``: one or more columns are its text, one its title, one its id; other
columns with plain values go onto the corpus line. A wrong column is an error that shows the file's
columns and what a row must look like.
"""

from __future__ import annotations

import csv
import json
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TextIO

from forage.data.corpus import file_lines, parse_object
from forage.data.documents.document_files import OwnDocument
from forage.data.forms.rows import parquet_rows
from forage.errors import UserError

TABLES = (".csv", ".tsv", ".parquet", ".jsonl", ".jsonl.gz")

# Keys of a corpus line; a column with one of these names is text, title or id, or is dropped.
_RESERVED = frozenset(("id", "contents", "text", "title", "file", "row", "start", "end", "url"))
_MAX_CELL_CHARS = 2**27


@dataclass(frozen=True, slots=True)
class NamedColumns:
    """The names of the columns of a table with the text, the title and the id.

    If ``title`` or ``id`` is None, the column of that name is used, if the table has one.
    """

    text: tuple[str, ...] = ("text",)
    title: str | None = None
    id: str | None = None


def is_table(path: Path) -> bool:
    """Whether a file's name says that it contains rows."""
    return path.name.lower().endswith(TABLES)


def read_table(path: Path, columns: NamedColumns) -> Iterator[OwnDocument]:
    """One document per row with text, numbered from 1; raises ``UserError``."""
    num_read = 0
    for number, (place, row) in enumerate(_rows(path), start=1):
        if number == 1:
            _refuse_missing(path, row, columns)
        cells = [_cell(place, row, name) for name in columns.text]
        text = "\n".join(cell for cell in cells if cell)
        if not text:
            continue
        num_read += 1
        title = _cell(place, row, columns.title or "title")
        identity = _cell(place, row, columns.id or "id")
        if columns.id and not identity:
            raise UserError(f"{place}: its {columns.id!r} is empty; each row needs an id")
        yield OwnDocument(
            id=identity or f"{path.name}#{number}",
            title=" ".join(title.split()),
            text=text,
            fields={"file": path.name, "row": number} | _others(row, columns),
        )
    if not num_read:
        raise UserError(f"{path} contains no row with text in {', '.join(columns.text)}")


def _rows(path: Path) -> Iterator[tuple[str, Mapping[str, Any]]]:
    name = path.name.lower()
    if name.endswith(".parquet"):
        yield from parquet_rows(path)
    elif name.endswith((".csv", ".tsv")):
        yield from _csv_rows(path, "\t" if name.endswith(".tsv") else ",")
    else:
        for number, line in file_lines(path):
            yield f"{path}:{number}", parse_object(line, path, number)


def _csv_rows(path: Path, delimiter: str) -> Iterator[tuple[str, Mapping[str, Any]]]:
    csv.field_size_limit(_MAX_CELL_CHARS)
    try:
        with path.open(encoding="utf-8-sig", newline="") as file:
            reader = csv.DictReader(_lines(file, path), delimiter=delimiter)
            for row in reader:
                if None in row or None in row.values():
                    names = reader.fieldnames or []
                    raise UserError(
                        f"{path}:{reader.line_num}: this row does not have as many cells as the "
                        f"first line has columns ({len(names)}: {', '.join(names)}); put cells "
                        "that contain the separator or a line break in double quotes"
                    )
                yield f"{path}:{reader.line_num}", row
    except OSError as error:
        raise UserError(f"cannot read {path}: {error.strerror}; check the path") from error
    except UnicodeDecodeError as error:
        raise UserError(f"{path} is not UTF-8; convert the file to UTF-8") from error
    except csv.Error as error:
        raise UserError(f"{path}: {error}") from error


def _lines(file: TextIO, path: Path) -> Iterator[str]:
    for line in iter(lambda: file.readline(_MAX_CELL_CHARS), ""):
        if len(line) == _MAX_CELL_CHARS:
            raise UserError(f"{path}: a line of more than {_MAX_CELL_CHARS:,} characters")
        yield line


def _refuse_missing(path: Path, row: Mapping[str, Any], columns: NamedColumns) -> None:
    named = [*columns.text, *(name for name in (columns.title, columns.id) if name is not None)]
    for name in named:
        if name not in row:
            like = {columns.id or "id": "a1", columns.title or "title": "Ada"}
            like |= dict.fromkeys(columns.text, "Born in 1815 ...")
            raise UserError(
                f"{path} has no column {name!r}; it has {', '.join(map(str, row)) or 'none'}. "
                "Name its columns with --text-column, --title-column and --id-column: a row "
                f"looks like {json.dumps(like, ensure_ascii=False)}, and only the text is required"
            )


def _cell(place: str, row: Mapping[str, Any], name: str) -> str:
    """A cell as text, "" if it is missing; raises ``UserError`` for a list or an object."""
    value = row.get(name)
    if value is None:
        return ""
    if isinstance(value, str | int | float):
        return str(value).strip()
    raise UserError(f"{place}: {name!r} is {str(value)[:40]!r}; a string or a number is needed")


def _others(row: Mapping[str, Any], columns: NamedColumns) -> dict[str, Any]:
    """The other columns whose values JSON can represent; ``url`` only if it is a string."""
    used = {*columns.text, columns.title, columns.id}
    return {
        name: value
        for name, value in row.items()
        if name not in used
        and (name not in _RESERVED or (name == "url" and isinstance(value, str)))
        and isinstance(value, str | int | float)
        and not (isinstance(value, float) and not math.isfinite(value))
    }
