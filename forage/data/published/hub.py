"""Rows of a data set on the Hugging Face hub, or of a directory of ``datasets``, streamed.

The one file that imports ``datasets``. Nothing is downloaded whole: rows arrive as they are read.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from forage.errors import UserError

if TYPE_CHECKING:
    from datasets import IterableDataset


def stream_rows(
    source: str, config: str | None, split: str, num_skipped: int
) -> Iterator[dict[str, Any]]:
    """The rows of a split from row ``num_skipped`` on; raises ``UserError`` where it cannot be.

    ``source`` is a hub id, a copy of a hub repository in a local directory, or what
    ``save_to_disk`` wrote there.
    """
    from datasets.exceptions import DatasetGenerationError

    try:
        data = _open(source, config, split)
        yield from data.skip(num_skipped) if num_skipped else data
    except (OSError, ValueError, DatasetGenerationError) as error:
        what = source if config is None else f"{source} ({config})"
        raise UserError(
            f"cannot read the split {split} of {what}: {error}; run the same command again to go "
            "on, or, without a way to the hub, copy the data set here and name it with --source"
        ) from error


def _open(source: str, config: str | None, split: str) -> IterableDataset:
    from datasets import Dataset, DatasetDict, IterableDataset, load_dataset, load_from_disk

    saved = _saved_directory(source, config)
    if saved is None:
        data = load_dataset(source, config, split=split, streaming=True)
        assert isinstance(data, IterableDataset), "one split, streamed"
        return data
    data = load_from_disk(str(saved))
    if isinstance(data, DatasetDict):
        if split not in data:
            raise ValueError(f"it has the splits {', '.join(map(str, data))}")
        data = data[split]
    assert isinstance(data, Dataset), "a saved split is a data set"
    return data.to_iterable_dataset()


def _saved_directory(source: str, config: str | None) -> Path | None:
    """Where ``save_to_disk`` wrote, in ``source`` itself or in a folder for each set."""
    for folder in (Path(source), Path(source) / (config or "")):
        if any((folder / name).is_file() for name in ("dataset_dict.json", "state.json")):
            return folder
    return None
