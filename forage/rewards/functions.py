"""Rewards of the user's own: found by import path, called with the Episode, checked.

``scorer.py`` calls them after the rules. An error in one is neither a score nor the user's mistake
in the settings: it is a bug in the function, and ends the run with its name and the episode's.
"""

from __future__ import annotations

import importlib
import inspect
import math
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self, SupportsFloat

from forage.config.reward_config import RewardFunction
from forage.errors import UserError
from forage.types import Episode, Reward


class RewardFunctionError(RuntimeError):
    """A reward function raised, or gave something that is no reward: which, and for what."""


@dataclass(frozen=True, slots=True)
class LoadedFunction:
    """A function of the user's under its name, sync or async: ``Episode -> float | Reward``."""

    setting: RewardFunction
    call: Callable[[Episode], Any]

    @classmethod
    def load(cls, setting: RewardFunction) -> Self:
        """Import ``module:function``, from the current directory too; raises ``UserError``."""
        module_name, _, name = setting.path.partition(":")
        function = getattr(_import(module_name, setting.path), name, None)
        if function is None:
            raise UserError(f"reward.functions: {module_name} has no {name}; check {setting.path}")
        if not callable(function):
            raise UserError(f"reward.functions: {setting.path} is no function, but {function!r}")
        try:
            inspect.signature(function).bind(None)
        except TypeError as error:
            raise UserError(
                f"reward.functions: {setting.path} cannot be called with an episode alone "
                f"({error}); write it as `def {name}(episode: Episode) -> float`"
            ) from error
        return cls(setting, function)

    async def score(self, episode: Episode) -> Reward:
        """What the function gives, as a Reward; raises ``RewardFunctionError``.

        A sync function runs on the event loop: what waits for something should be async.
        """
        try:
            value = self.call(episode)
            if inspect.isawaitable(value):
                value = await value
        except Exception as error:
            raise self._error(episode, f"raised {type(error).__name__}: {error}") from error
        if isinstance(value, Reward):
            reward = value
        elif isinstance(value, SupportsFloat):
            reward = Reward(float(value))
        else:
            raise self._error(
                episode, f"gave {value!r}; a float or a forage.types.Reward is needed"
            )
        for number in (reward.value, *reward.parts.values()):
            if not math.isfinite(number):
                raise self._error(episode, f"gave {number}; a finite number is needed")
        return reward

    def _error(self, episode: Episode, what: str) -> RewardFunctionError:
        question = episode.question
        return RewardFunctionError(
            f"the reward function {self.setting.path} {what} (question {question.id!r}, member "
            f"{episode.member}, answer {episode.answer!r})"
        )


def _import(module_name: str, path: str) -> Any:
    """The module; what goes wrong while it runs is raised as it is, with a note."""
    here = str(Path.cwd())
    if here not in sys.path:
        sys.path.append(here)  # last, so that a file of the user's hides no package
    try:
        return importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{module_name}.".startswith(f"{error.name}."):
            raise  # a package that the user's module needs
        raise UserError(
            f"reward.functions: there is no module {error.name} for {path}, neither installed nor "
            f"in the current directory {here}"
        ) from error
    except Exception as error:
        error.add_note(f"while importing reward.functions: {path}")
        raise
