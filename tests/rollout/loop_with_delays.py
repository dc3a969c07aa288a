"""The loop's groups, engine and weights, with random delays of play, training and publish.

The trainer changes weights at random instead of learning; everything between it and the sampled
tokens is real. Every set of weights is kept, so that each token can be checked against it.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import cast

import torch
from torch import Tensor
from transformers import PreTrainedModel

from forage.publish import Publisher, Updated
from forage.rollout.engines.engine import Engine
from forage.rollout.play.player import Job
from forage.training.trainer import Trainer
from forage.types import Episode, Group, Origin, Sampling, Segment
from tests.rollout.play.stage import episode_of
from tests.rollout.play.test_groups import config_of, groups_of
from tests.rollout.tiny_models import change_weights, twin

NUM_TURNS = 2


@dataclass(frozen=True)
class Token:
    """A sampled token: the step that learns from it, its weights' version, and its
    probabilities.
    """

    step: int
    version: int
    logprob: float
    expected: float
    """The log-probability under the weights of ``version``, with keys and values of the same
    version.
    """
    is_after_update: bool
    """Whether an earlier token of the episode was sampled with older weights."""


def check_bound(tokens: Sequence[Token], max_staleness: int) -> None:
    """Checks that no token is more than ``max_staleness`` steps old or from a later version."""
    ages = [token.step - token.version for token in tokens]
    assert min(ages) >= 0
    assert max(ages) <= max_staleness


class LoopWithDelays:
    """A run of ``num_steps``; each pause is drawn from ``seed`` and lasts up to ``longest_s``."""

    def __init__(
        self,
        engine: Engine,
        updated: Updated,
        model: PreTrainedModel,
        max_staleness: int,
        seed: int,
        longest_s: float = 0.01,
        num_tokens: int = 10,
    ) -> None:
        self.model, self.version = model, 0
        self._plain = twin(model)
        self._engine = engine
        self._publisher = Publisher(updated, cast(Trainer, self))
        self._max_staleness = max_staleness
        self._random = random.Random(seed)
        self._longest_s, self._num_tokens = longest_s, num_tokens
        self._weights: dict[int, dict[str, Tensor]] = {}
        self._vocabulary: int = model.config.vocab_size

    async def run(self, num_steps: int) -> list[list[Group]]:
        """The groups of each step."""
        groups = groups_of(self._play, config_of(self._max_staleness, num_steps))
        steps: list[list[Group]] = []
        await self._publish()
        for step in range(num_steps):
            steps.append(list((await groups.next_groups(step)).chosen))
            await self._pause()  # gradients, while the engine continues to sample
            await asyncio.to_thread(self._change_weights)
            await self._pause()
            await self._publish()
        await groups.close()
        return steps

    def tokens(self, steps: list[list[Group]]) -> Iterator[Token]:
        """Every sampled token, with its log-probability under its version's weights."""
        for step, groups in enumerate(steps):
            for episode in (episode for group in groups for episode in group.episodes_G):
                yield from self._tokens(step, episode)

    def _tokens(self, step: int, episode: Episode) -> Iterator[Token]:
        ids = [token for segment in episode.segments for token in segment.token_ids_T]
        versions = {v for segment in episode.segments for v in segment.versions_T}
        expected = {version: self._logprobs(version, ids) for version in versions}
        position = 0
        for segment in episode.segments:
            for index in range(len(segment.token_ids_T)):
                if segment.origin is Origin.SAMPLED:
                    version = segment.versions_T[index]
                    yield Token(
                        step,
                        version,
                        segment.logprobs_T[index],
                        expected[version][position + index - 1].item(),
                        version > min(versions),
                    )
            position += len(segment.token_ids_T)

    @torch.no_grad()
    def _logprobs(self, version: int, ids: list[int]) -> Tensor:
        self._plain.load_state_dict(self._weights[version])
        logits_TV = self._plain(input_ids=torch.tensor([ids])).logits[0].double()
        following = torch.tensor(ids[1:])[:, None]
        return torch.log_softmax(logits_TV[:-1], -1).gather(1, following)[:, 0]

    async def _pause(self) -> None:
        """Waits not at all, a moment, or a long while."""
        await asyncio.sleep(self._longest_s * self._random.choice((0.0, 0.1, 1.0)))

    def _change_weights(self) -> None:
        with self._publisher:
            change_weights(self.model, self.version)
        self.version += 1

    async def _publish(self) -> None:
        await self._publisher.publish()
        state = self.model.state_dict()
        self._weights[self.version] = {name: weight.clone() for name, weight in state.items()}

    async def _play(self, job: Job) -> Episode:
        """Two turns with a pause before, between and after them."""
        await self._pause()
        number = int(job.question.id.removeprefix("q"))
        ids = [(number * 31 + index * 17) % (self._vocabulary - 20) + 10 for index in range(20)]
        segments = [Segment(Origin.PROMPT, tuple(ids))]
        for turn in range(NUM_TURNS):
            sampling = Sampling(self._num_tokens, (), (), job.key, 7, 1.0)
            completion = await self._engine.generate(ids, sampling)
            observation = (5, 6 + turn, 7)
            segments += [
                Segment(
                    Origin.SAMPLED,
                    completion.token_ids_T,
                    completion.logprobs_T,
                    completion.versions_T,
                ),
                Segment(Origin.OBSERVATION, observation),
            ]
            ids = [token for segment in segments for token in segment.token_ids_T]
            await self._pause()  # the search
        self._engine.release(job.key)
        return episode_of(job, tuple(segments))
