"""A stranger's Qdrant index runs no code when it is opened."""

import json
import pickle
import shutil
import sqlite3
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import numpy as np
import pytest

from forage.errors import UserError
from forage.retrieval.vectors.qdrant_collection import QdrantCollection
from tests.remote.test_listed_pickle import Marks

VECTORS_BD = np.eye(4, dtype=np.float32)


def opened(where: Path) -> QdrantCollection:
    return QdrantCollection(where, "passages", 4)


@pytest.fixture
def store(tmp_path: Path) -> Path:
    with closing(opened(tmp_path / "qdrant")) as collection:
        collection.create_or_resume()
        collection.add(0, VECTORS_BD)
        collection.finish(len(VECTORS_BD))
    return tmp_path / "qdrant"


def database(store: Path) -> Path:
    return store / "collection" / "passages" / "storage.sqlite"


def change(path: Path, statement: str, *values: object) -> None:
    with closing(sqlite3.connect(path)) as connection, connection:
        connection.execute(statement, values)


def test_an_index_of_our_own_opens_and_searches(store: Path) -> None:
    with closing(opened(store)) as collection:
        assert [found[0].row for found in collection.search(VECTORS_BD, 1)] == [0, 1, 2, 3]


def test_a_row_that_would_run_code_is_refused(store: Path) -> None:
    """The client unpickles every row: ``forage serve`` on a stranger's index ran its code."""
    mark = store / "ran"
    change(
        database(store), "UPDATE points SET point = ? WHERE rowid = 3", pickle.dumps(Marks(mark))
    )
    with pytest.raises(UserError, match=r"storage\.sqlite is refused: its pickle names .*exec"):
        opened(store)
    assert not mark.exists()


def _view(store: Path) -> None:
    change(database(store), "ALTER TABLE points RENAME TO kept")
    change(database(store), "CREATE VIEW points AS SELECT rowid, id, point FROM kept")


def _trigger(store: Path) -> None:
    text = "CREATE TRIGGER t AFTER INSERT ON points BEGIN DELETE FROM points; END"
    change(database(store), text)


def _generated(store: Path) -> None:
    change(database(store), "ALTER TABLE points ADD COLUMN c TEXT AS (hex(point))")


def _another_collection(store: Path) -> None:
    meta = json.loads((store / "meta.json").read_text())
    meta["collections"]["../../elsewhere"] = meta["collections"]["passages"]
    (store / "meta.json").write_text(json.dumps(meta))


def _link_outside(store: Path) -> None:
    outside = store.parent / "outside"
    shutil.move(store / "collection" / "passages", outside)
    (store / "collection" / "passages").symlink_to(outside)


def _deep_meta(store: Path) -> None:
    (store / "meta.json").write_text("[" * 100_000)


def _no_point(store: Path) -> None:
    change(database(store), "UPDATE points SET point = NULL WHERE rowid = 3")


def _no_database(store: Path) -> None:
    database(store).write_bytes(b"no database" * 100)


@pytest.mark.parametrize(
    "spoil",
    [
        *(_view, _trigger, _generated, _another_collection, _link_outside, _deep_meta),
        *(_no_point, _no_database),
    ],
)
def test_what_the_client_would_read_otherwise_is_refused(
    store: Path, spoil: Callable[[Path], None]
) -> None:
    spoil(store)
    with pytest.raises(UserError, match=r"build the index again|is not JSON"):
        opened(store)
