"""Reads untrusted pickles, which may name any function for Python to call.

Only classes on the reader's list are found. The list must not contain a class that runs code when
an instance is created or given its state.
"""

from __future__ import annotations

import pickle
from collections.abc import Container
from typing import Any, BinaryIO

from forage.errors import UserError


class ListedUnpickler(pickle.Unpickler):
    """Finds the classes in ``listed`` (as ``module.name``) and no others."""

    def __init__(self, file: BinaryIO, listed: Container[str], where: object) -> None:
        """``where``: the pickle's location, for the ``UserError`` of ``load``."""
        super().__init__(file)
        self._listed, self._where = listed, where

    def find_class(self, module: str, name: str) -> Any:
        if f"{module}.{name}" in self._listed:
            return super().find_class(module, name)
        raise UserError(
            f"{self._where} is refused: its pickle names {module}.{name}, which such a file does "
            "not need. It may have been made to run code on your machine"
        )
