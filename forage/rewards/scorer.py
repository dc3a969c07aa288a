"""A run's rewards in one object: rules, custom functions and the judge.

The scheduler and the evaluation call ``Scorer`` on each finished episode (``Score``). It computes
nothing itself: ``scoring.py`` has the rules and the sum, ``judge.py`` the verdicts. An error in a
custom function is a bug there; it ends the run and names the function and the episode.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Self, SupportsFloat

from forage.errors import UserError
from forage.remote.request import RemoteFailure
from forage.rewards.format import ProtocolName
from forage.rewards.judge import Judge
from forage.rewards.reward_config import RewardConfig, RewardFunction
from forage.rewards.scoring import rule_parts, score_episode
from forage.settings import load_by_path, written
from forage.types import Episode, FailureKind, Reward, Status


class Scorer:
    """Scores an episode; an async context, because a judge keeps a connection."""

    def __init__(self, config: RewardConfig, protocol: ProtocolName) -> None:
        """Finds the functions, and reads the judge's key and template; raises ``UserError``."""
        self._config = config
        self._protocol: ProtocolName = protocol
        self._functions = [LoadedFunction.load(setting) for setting in config.functions]
        self._judge = Judge(config.judge) if config.needs_judge else None

    async def __aenter__(self) -> Self:
        """Checks that the judge answers; raises ``UserError``."""
        if self._judge is not None:
            try:
                await self._judge.check()
            except BaseException:
                await self._judge.close()
                raise
        return self

    async def __aexit__(self, *_: object) -> None:
        if self._judge is not None:
            await self._judge.close()

    async def __call__(self, episode: Episode) -> Reward:
        """The reward of a finished episode; raises ``RewardFunctionError``.

        Neither custom functions nor the judge see an episode that the engine did not finish.
        """
        config = self._config
        if episode.status is Status.ENGINE_FAILED:
            return score_episode(episode, config, protocol=self._protocol)
        parts: dict[str, float] = {}
        failure: FailureKind | None = None
        for function in self._functions:
            name = function.setting.name
            reward = await function.score(episode)
            failure = failure or reward.failure
            parts[name] = reward.value
            parts |= {f"{name}/{part}": value for part, value in reward.parts.items()}
        if self._judge is not None:
            question, verdict = episode.question, False
            if (answer := episode.answer) is not None:
                verdict = await self._judge.is_correct(
                    question.text, question.golden_answers, answer
                )
            if isinstance(verdict, RemoteFailure):
                failure = failure or verdict.kind
            else:
                parts["judge"] = float(verdict)
        if failure is not None:
            return Reward(0.0, rule_parts(episode, config, self._protocol) | parts, failure)
        return score_episode(episode, config, parts, self._protocol)


class RewardFunctionError(RuntimeError):
    """A reward function raised, or returned something that is not a reward, for this episode."""


@dataclass(frozen=True, slots=True)
class LoadedFunction:
    """A custom function with its name, sync or async: ``Episode -> float | Reward``."""

    setting: RewardFunction
    call: Callable[[Episode], Any]

    @classmethod
    def load(cls, setting: RewardFunction) -> Self:
        """Imports ``module:function``, also from the current directory; raises ``UserError``."""
        function, path = load_by_path(setting.path, "reward.functions"), written(setting.path)
        if not callable(function):
            raise UserError(f"reward.functions: {path} is {function!r}, not a function")
        try:
            inspect.signature(function).bind(None)
        except TypeError as error:
            raise UserError(
                f"reward.functions: {path} cannot be called with just an episode ({error}); write "
                f"it as `def {setting.name}(episode: Episode) -> float`"
            ) from error
        return cls(setting, function)

    async def score(self, episode: Episode) -> Reward:
        """The function's value as a Reward; raises ``RewardFunctionError``.

        A sync function runs on the event loop, so a function that waits should be async.
        """
        try:
            value = self.call(episode)
            if inspect.isawaitable(value):
                value = await value
            if isinstance(value, SupportsFloat):  # an array of several numbers raises here
                value = Reward(float(value))
        except Exception as error:
            raise self._error(episode, f"raised {type(error).__name__}: {error}") from error
        if not isinstance(value, Reward):
            needed = "a float or a forage.types.Reward is needed"
            raise self._error(episode, f"gave {value!r}; {needed}")
        for number in (value.value, *value.parts.values()):
            if not math.isfinite(number):
                raise self._error(episode, f"returned {number}; a finite number is needed")
        return value

    def _error(self, episode: Episode, what: str) -> RewardFunctionError:
        question = episode.question
        return RewardFunctionError(
            f"the reward function {written(self.setting.path)} {what} "
            f"(question {question.id!r}, member {episode.member}, answer {episode.answer!r})"
        )
