"""What every section of settings is: frozen, without unknown keys, and without dead ones.

The sections themselves are in ``forage/config``, a file each, and ``config/run_config.py`` makes a
tree of them.
"""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from typing import Any, ClassVar, Self

from pydantic import BaseModel, ConfigDict, model_validator

from forage.errors import UserError

IMPORT_PATH = r"^[A-Za-z_][\w.]*:[A-Za-z_]\w*$"
"""How a recipe names something of the user's own: ``module:name``."""


class Frozen(BaseModel):
    """Settings that never change once read; an unknown key is an error."""

    model_config = ConfigDict(frozen=True, extra="forbid", validate_default=True)


class Settings(Frozen):
    """A section whose keys may depend on one another."""

    section: ClassVar[str]

    def dead_keys(self) -> dict[str, str]:
        """Keys that nothing reads beside the values of the others, and what would wake them."""
        return {}

    @model_validator(mode="after")
    def _no_dead_keys(self) -> Self:
        for name, remedy in self.dead_keys().items():
            if name in self.model_fields_set:
                raise ValueError(f"{self.section}.{name} does nothing: {remedy}, or remove it")
        return self


def load_by_path(path: str, key: str) -> Any:
    """What ``module:name`` stands for, from the current directory too; raises ``UserError``.

    ``key`` is the setting that names it. What goes wrong while the module runs is raised as it is,
    with a note.
    """
    module_name, _, name = path.partition(":")
    found = getattr(_import(module_name, path, key), name, None)
    if found is None:
        raise UserError(f"{key}: {module_name} has no {name}; check {path}")
    return found


def _import(module_name: str, path: str, key: str) -> Any:
    here = str(Path.cwd())
    if here not in sys.path:
        sys.path.append(here)  # last, so that a file of the user's hides no package
    try:
        return importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{module_name}.".startswith(f"{error.name}."):
            raise  # a package that the user's module needs
        raise UserError(
            f"{key}: there is no module {error.name} for {path}, neither installed nor in the "
            f"current directory {here}"
        ) from error
    except Exception as error:
        error.add_note(f"while importing {key}: {path}")
        raise
