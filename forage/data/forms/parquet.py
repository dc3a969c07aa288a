"""Parquet in and out, a batch of rows at a time; the one file that imports pyarrow."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

from forage.errors import UserError

if TYPE_CHECKING:
    import pyarrow

_ROWS_PER_BATCH = 1000


def is_parquet(path: Path) -> bool:
    return path.suffix == ".parquet"


def parquet_rows(path: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    """Each row as plain Python values, with its place; raises ``UserError``."""
    import pyarrow
    import pyarrow.parquet

    try:
        with pyarrow.parquet.ParquetFile(path) as file:
            number = 0
            for batch in file.iter_batches(batch_size=_ROWS_PER_BATCH):
                for row in batch.to_pylist():
                    number += 1
                    yield f"{path}: row {number}", row
    except (OSError, pyarrow.ArrowException) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise UserError(f"cannot read the parquet file {path}: {reason}") from error


def write_search_r1_rows(path: Path, rows: Iterable[dict[str, Any]]) -> None:
    """Write rows of Search-R1's form, replacing the file in one move, or not at all."""
    import pyarrow
    import pyarrow.parquet

    schema = _search_r1_schema()
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(path.name + ".partial")
    left = iter(rows)
    try:
        with pyarrow.parquet.ParquetWriter(partial, schema) as writer:
            while batch := list(islice(left, _ROWS_PER_BATCH)):
                writer.write_table(pyarrow.Table.from_pylist(batch, schema=schema))
        partial.replace(path)
    except BaseException:
        partial.unlink(missing_ok=True)
        raise


def _search_r1_schema() -> pyarrow.Schema:
    """The columns of the published files, and ``metadata``, which carries hops and gold ids."""
    import pyarrow

    text = pyarrow.string()
    texts = pyarrow.list_(text)
    struct = pyarrow.struct
    hop = struct([(name, text) for name in ("subject", "relation", "value", "passage_id")])
    truth = struct([("target", texts)])
    return pyarrow.schema(
        [
            ("id", text),
            ("question", text),
            ("golden_answers", texts),
            ("data_source", text),
            ("prompt", pyarrow.list_(struct([("role", text), ("content", text)]))),
            ("ability", text),
            ("reward_model", struct([("style", text), ("ground_truth", truth)])),
            (
                "extra_info",
                struct([("split", text), ("index", pyarrow.int64()), ("question_id", text)]),
            ),
            ("metadata", struct([("gold_passage_ids", texts), ("hops", pyarrow.list_(hop))])),
        ]
    )
