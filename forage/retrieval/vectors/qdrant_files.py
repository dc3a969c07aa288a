"""Checks the files of an embedded Qdrant collection before Qdrant's client opens them.

The client stores each point as a pickle in a SQLite database and unpickles all of them when it
opens a directory, so an index from someone else could run any code.
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

# The class of the points that the client pickles.
_POINT = {"qdrant_client.http.models.models.PointStruct"}
_META, _DATABASE = "meta.json", "storage.sqlite"
_TABLE = "CREATE TABLE points (id TEXT PRIMARY KEY, point BLOB)"


def refuse_foreign(where: Path, name: str) -> None:
    """Raises ``UserError`` unless Qdrant's client would read only points from the directory.

    The client unpickles every row of every collection in ``meta.json``, wherever that is stored.
    """
    if not (where / _META).exists():
        return  # a new build has no files yet
    meta = read_json(where / _META, 2**20)
    collections = meta.get("collections") if isinstance(meta, dict) else None
    if not isinstance(collections, dict) or not {*collections} <= {name}:
        found = json.dumps([*collections] if isinstance(collections, dict) else collections)
        raise UserError(
            f"{where} must contain the Qdrant collection {name!r} and no other, but {_META} names "
            f"{found[:80]}; build the index again"
        )
    path = where / "collection" / name / _DATABASE
    if not path.resolve().is_relative_to(where.resolve()):
        raise UserError(f"{path} is outside {where}; build the index again")
    if not path.exists():
        return
    try:
        with closing(sqlite3.connect(f"{path.resolve().as_uri()}?mode=ro", uri=True)) as database:
            # A view or trigger could show the client other rows than this check sees.
            tables = database.execute("SELECT sql FROM sqlite_master WHERE sql NOT NULL").fetchall()
            if tables != [(_TABLE,)]:
                raise UserError(f"{path} has other tables than Qdrant's; build the index again")
            for (point,) in database.execute("SELECT point FROM points"):
                ListedUnpickler(io.BytesIO(point), _POINT, path).load()
    except (sqlite3.Error, pickle.UnpicklingError, EOFError, TypeError, ValueError) as error:
        raise UserError(f"{where} cannot be read ({error}); build the index again") from error
