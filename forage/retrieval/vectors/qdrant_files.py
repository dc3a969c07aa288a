"""The files of an embedded Qdrant collection, checked before Qdrant's client opens them.

The client keeps each point as a pickle in a SQLite database and unpickles all of them when it
opens a directory, so an index that somebody else made could run any code.
"""

from __future__ import annotations

import io
import json
import pickle
import sqlite3
from contextlib import closing
from pathlib import Path

from forage.errors import UserError
from forage.remote.listed_pickle import ListedUnpickler
from forage.remote.plain_file import read_json

# Which classes a point of the client's is pickled with.
_POINT = {"qdrant_client.http.models.models.PointStruct"}
_META, _DATABASE = "meta.json", "storage.sqlite"
_TABLE = "CREATE TABLE points (id TEXT PRIMARY KEY, point BLOB)"


def refuse_foreign(where: Path, name: str) -> None:
    """Raise ``UserError`` unless opening the directory reads points, and nothing else.

    The client unpickles every row of every collection that ``meta.json`` names, wherever it lies.
    """
    if not (where / _META).exists():
        return  # a build begins
    meta = read_json(where / _META, 2**20)
    collections = meta.get("collections") if isinstance(meta, dict) else None
    if not isinstance(collections, dict) or not {*collections} <= {name}:
        found = json.dumps([*collections] if isinstance(collections, dict) else collections)
        raise UserError(
            f"{where} has no Qdrant collection {name!r}, or not that alone: {_META} names "
            f"{found[:80]}; build the index again"
        )
    path = where / "collection" / name / _DATABASE
    if not path.resolve().is_relative_to(where.resolve()):
        raise UserError(f"{path} lies outside of {where}; build the index again")
    if not path.exists():
        return
    try:
        with closing(sqlite3.connect(f"{path.resolve().as_uri()}?mode=ro", uri=True)) as database:
            # A view or a trigger may give other rows to the client than to us.
            tables = database.execute("SELECT sql FROM sqlite_master WHERE sql NOT NULL").fetchall()
            if tables != [(_TABLE,)]:
                raise UserError(f"{path} has other tables than Qdrant's; build the index again")
            for (point,) in database.execute("SELECT point FROM points"):
                ListedUnpickler(io.BytesIO(point), _POINT, path).load()
    except (sqlite3.Error, pickle.UnpicklingError, EOFError, TypeError, ValueError) as error:
        raise UserError(f"{where} cannot be read ({error}); build the index again") from error
