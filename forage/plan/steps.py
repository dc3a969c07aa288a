"""How much work a run is: steps, episodes, tokens and searches, as the settings say.

Plain arithmetic on the config; what it costs in memory is in ``memory.py``.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil

from forage.config.run_config import RunConfig
from forage.environment.tools import MAX_QUERIES
from forage.rollout.play.refill import num_oversampled


@dataclass(frozen=True, slots=True)
class Work:
    """Counts of one step of the loop and of the run; tokens and searches are upper bounds."""

    num_steps: int
    questions_per_step: int
    group_size: int
    episodes_per_step: int
    tokens_per_step: int
    searches_per_step: int
    updates_per_step: int
    questions_in_epoch: int | None

    @property
    def num_updates(self) -> int:
        """Optimizer steps of the run."""
        return self.num_steps * self.updates_per_step

    @property
    def steps_per_epoch(self) -> int | None:
        """Whole steps in one pass over the questions; None where their number is not known."""
        if self.questions_in_epoch is None:
            return None
        return self.questions_in_epoch // self.questions_per_step


def count_work(config: RunConfig, num_questions: int | None) -> Work:
    """The work of a run whose training file holds ``num_questions``; None where nobody knows."""
    trainer, environment = config.trainer, config.environment
    num_played = trainer.questions_per_step + num_oversampled(
        config.algorithm.dynamic_sampling, trainer.questions_per_step
    )
    greedy = config.algorithm.advantage == "remax"
    episodes = num_played * (trainer.group_size + greedy)
    queries = MAX_QUERIES if environment.protocol == "tools" else 1
    # In the last turn of an episode no search is run.
    searches = environment.max_turns - (not environment.has_final_turn)
    return Work(
        num_steps=trainer.num_steps,
        questions_per_step=trainer.questions_per_step,
        group_size=trainer.group_size,
        episodes_per_step=episodes,
        tokens_per_step=episodes * environment.max_tokens,
        searches_per_step=episodes * searches * queries,
        updates_per_step=trainer.num_mini_batches * trainer.num_epochs,
        questions_in_epoch=num_questions,
    )


def num_micro_batches(config: RunConfig, work: Work) -> int:
    """How many micro-batches an optimizer step takes at most."""
    tokens = ceil(work.tokens_per_step / config.trainer.num_mini_batches)
    return ceil(tokens / config.trainer.max_tokens_per_micro_batch)
