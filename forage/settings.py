"""What every section of settings is: frozen, without unknown keys, and without dead ones.

The sections themselves are in ``forage/config``, a file each, and ``config/run_config.py`` makes a
tree of them.
"""

from __future__ import annotations

from typing import ClassVar, Self

from pydantic import BaseModel, ConfigDict, model_validator


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
