"""The rewards of a run, put together once: rules, the user's functions, the judge.

The scheduler and the evaluation call it on each finished episode (``Score``). It computes nothing
itself: ``scoring.py`` has the rules and the sum, ``functions.py`` and ``judge.py`` the rest.
"""

from __future__ import annotations

from typing import Self

from forage.config.reward_config import RewardConfig
from forage.rewards.format import ProtocolName
from forage.rewards.functions import LoadedFunction
from forage.rewards.judge import Judge, JudgeFailure
from forage.rewards.scoring import rule_parts, score_episode
from forage.types import Episode, FailureKind, Reward, Status


class Scorer:
    """``await scorer(episode)``; an async context, because a judge has a connection to close."""

    def __init__(self, config: RewardConfig, protocol: ProtocolName) -> None:
        """Find the functions, read the judge's key and template; raises ``UserError``."""
        self._config = config
        self._protocol: ProtocolName = protocol
        self._functions = [LoadedFunction.load(setting) for setting in config.functions]
        self._judge = Judge(config.judge) if config.needs_judge else None

    async def __aenter__(self) -> Self:
        """Make sure that the judge answers; raises ``UserError``."""
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

        Neither the user's functions nor the judge see an episode that the engine did not finish.
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
            verdict = await self._verdict(self._judge, episode)
            if isinstance(verdict, JudgeFailure):
                failure = failure or verdict.kind
            else:
                parts["judge"] = float(verdict)
        if failure is not None:
            return Reward(0.0, rule_parts(episode, config, self._protocol) | parts, failure)
        return score_episode(episode, config, parts, self._protocol)

    async def _verdict(self, judge: Judge, episode: Episode) -> bool | JudgeFailure:
        if episode.answer is None:
            return False
        question = episode.question
        return await judge.is_correct(question.text, question.golden_answers, episode.answer)
