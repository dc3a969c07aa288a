"""The checkpoints of a run at an address that fsspec opens, so that a lost disk loses no run.

Each checkpoint goes there once it is whole on the disk, its manifest last: a directory without one
was never finished. The records go in parts, each named by the bytes it holds, since a store of
objects appends to nothing::

    URL/step_000100/...            the files of the checkpoint
    URL/records/metrics.jsonl/000000000000-000000004711
"""

from __future__ import annotations

import logging
import shutil
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path, PurePosixPath

import fsspec

from forage.errors import UserError
from forage.training.checkpoint import (
    checkpoint_path,
    checkpoints,
    read_state,
    set_damaged_aside,
    step_of,
)
from forage.training.checkpoint_manifest import MANIFEST, DamagedCheckpointError, check_manifest

LOG = logging.getLogger(__name__)

_RECORDS = "records"
_DOWNLOAD = ".download.partial"


class CheckpointsElsewhere:
    """The checkpoints at one address; every method raises ``UserError`` where that fails."""

    def __init__(self, url: str) -> None:
        """Open the address, and make its directory."""
        self._url = url
        with self._failures():
            self._files, self._root = fsspec.core.url_to_fs(url, use_listings_cache=False)
            self._files.makedirs(self._root, exist_ok=True)

    def steps(self) -> list[int]:
        """The whole checkpoints by the steps done, oldest first."""
        with self._failures():
            found = [PurePosixPath(path).parent for path in self._glob(f"step_*/{MANIFEST}")]
        return sorted(step for path in found if (step := step_of(path.name)) is not None)

    def put(self, checkpoint: Path, num_kept: int) -> None:
        """Copy a checkpoint and the records until then; remove the oldest beyond ``num_kept``."""
        state, target = read_state(checkpoint), f"{self._root}/{checkpoint.name}"
        with self._failures():
            for name, length in state.record_offsets.items():
                self._put_record(checkpoint.parents[1] / name, length)
            self._remove([target])
            files = [path for path in checkpoint.rglob("*") if path.is_file()]
            for path in sorted(files, key=lambda path: path.name == MANIFEST):
                place = f"{target}/{path.relative_to(checkpoint).as_posix()}"
                self._files.makedirs(str(PurePosixPath(place).parent), exist_ok=True)
                self._files.put_file(str(path), place)
        self._keep(self.steps()[-num_kept:])

    def go_back(self, num_steps_done: int, record_offsets: Mapping[str, int]) -> None:
        """Forget what came after so many steps: the run takes the later ones again."""
        self._keep([step for step in self.steps() if step <= num_steps_done])
        with self._failures():
            for folder in self._glob(f"{_RECORDS}/*"):
                name = PurePosixPath(folder).name
                parts, offset = self._parts(name), record_offsets.get(name, 0)
                self._remove([path for path, _, end in parts if end > offset])

    def bring_back(self, run_dir: Path) -> None:
        """Fetch the newest checkpoint, with its records, if none as new is whole in ``run_dir``.

        One that is damaged is passed over, loudly, for the one before it.
        """
        newest_here = _newest_whole(run_dir)
        for step in reversed(self.steps()):
            if step <= newest_here:
                return
            try:
                self._fetch(step, run_dir)
            except DamagedCheckpointError as error:
                LOG.error("%s, in %s. Taking the one before it", error, self._url)
            else:
                LOG.info("fetched the checkpoint after step %d from %s", step, self._url)
                return

    def _fetch(self, step: int, run_dir: Path) -> None:
        final = checkpoint_path(run_dir, step)
        unfinished = final.with_name(final.name + _DOWNLOAD)
        shutil.rmtree(unfinished, ignore_errors=True)
        with self._failures():
            source = f"{self._root}/{final.name}"
            for path in self._files.find(source):
                place = unfinished / PurePosixPath(path).relative_to(source)
                place.parent.mkdir(parents=True, exist_ok=True)
                self._files.get_file(path, str(place))
            check_manifest(unfinished)
            for name, length in read_state(unfinished).record_offsets.items():
                self._fetch_record(name, length, run_dir / name)
            if final.exists():
                LOG.error("%s is damaged, and its copy in %s takes its place", final, self._url)
                set_damaged_aside(final)
            unfinished.rename(final)

    def _fetch_record(self, name: str, length: int, out: Path) -> None:
        """Put the parts together, beside a file that may be there and shorter or longer."""
        unfinished = out.with_name(out.name + ".download")
        with unfinished.open("wb") as file:
            for path, start, end in self._parts(name):
                if start == file.tell() and end <= length:
                    file.write(self._files.cat_file(path))
            if file.tell() != length:
                raise DamagedCheckpointError(
                    f"{self._url}/{_RECORDS}/{name} has {file.tell()} of {length} bytes"
                )
        unfinished.replace(out)

    def _put_record(self, path: Path, length: int) -> None:
        """The bytes that are not there yet."""
        start = max((end for _, _, end in self._parts(path.name)), default=0)
        if start >= length:
            return
        with path.open("rb") as file:
            file.seek(start)
            part = file.read(length - start)
        folder = f"{self._root}/{_RECORDS}/{path.name}"
        self._files.makedirs(folder, exist_ok=True)
        self._files.pipe_file(f"{folder}/{start:012d}-{length:012d}", part)

    def _parts(self, name: str) -> list[tuple[str, int, int]]:
        """The whole parts of a record: path, first byte, byte after the last."""
        parts: list[tuple[str, int, int]] = []
        for path in self._glob(f"{_RECORDS}/{name}/*-*"):
            start, end = map(int, PurePosixPath(path).name.split("-"))
            if self._files.size(path) == end - start:  # else a killed run was writing it
                parts.append((path, start, end))
        return sorted(parts, key=lambda part: part[1])

    def _keep(self, steps: Iterable[int]) -> None:
        """Remove all other checkpoints, unfinished ones too; the manifest goes first."""
        kept = {*steps, None}  # None: a copy that somebody made under a name of his own
        with self._failures():
            found = self._glob("step_*")
            self._remove([p for p in found if step_of(PurePosixPath(p).name) not in kept])

    def _remove(self, paths: Iterable[str]) -> None:
        for path in paths:
            if self._files.exists(f"{path}/{MANIFEST}"):
                self._files.rm_file(f"{path}/{MANIFEST}")
            if self._files.exists(path):
                self._files.rm(path, recursive=True)

    def _glob(self, pattern: str) -> list[str]:
        return [str(path) for path in self._files.glob(f"{self._root}/{pattern}")]

    @contextmanager
    def _failures(self) -> Iterator[None]:
        try:
            yield
        except UserError:
            raise
        except ImportError as error:  # fsspec's, for a kind of store that it opens by a package
            raise UserError(
                f"trainer.checkpoint_url is {self._url}, for which a package is missing ({error}); "
                "install it with pip, for example: pip install s3fs for S3, gcsfs for Google"
            ) from error
        except Exception as error:  # every kind of store has exceptions of its own
            reason = str(error).partition("\n")[0]
            raise UserError(
                f"trainer.checkpoint_url is {self._url}, and that fails: "
                f"{type(error).__name__}: {reason}; what is in output_dir is intact. Mend the "
                "address or its rights, and go on with --resume"
            ) from error


def _newest_whole(run_dir: Path) -> int:
    """The steps done at the newest checkpoint that is as it was written; -1 where there is none."""
    for step, path in reversed(checkpoints(run_dir).items()):
        with suppress(DamagedCheckpointError):
            check_manifest(path)
            return step
    return -1
