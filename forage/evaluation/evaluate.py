"""Plays questions greedily, arm by arm, and writes down what came of it.

``forage eval`` calls ``run_evaluation``; the training loop and the demo call ``play_arms`` with
the engine they already have. All arms of all questions are in flight together: no arm waits for
another. Scoring is ``rewards``'s, summing up ``summary.py``'s.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from rich.console import Console

from forage.config import RunConfig
from forage.data.corpus import CorpusStore
from forage.data.questions import read_questions
from forage.errors import UserError
from forage.evaluation.arms import Arm, ClosedBookSearch, Passages, search_for_arm
from forage.evaluation.summary import EvaluationSummary, summarise, summary_table
from forage.hardware import choose_matmul_kernel
from forage.progress import progress_bar
from forage.records import write_episode_file
from forage.retrieval.client import SearchClient
from forage.retrieval.index import open_index
from forage.rewards.scoring import score_episode
from forage.rollout.player import Player
from forage.rollout.scheduler import Job, Scheduler
from forage.rollout.stopping import StopTable
from forage.rollout.torch_engine import TorchEngine
from forage.training.model import load_model, load_tokenizer
from forage.types import Episode, Generate, Question, Search, TokenizerId


@dataclass(frozen=True, slots=True)
class Evaluator:
    """Plays arms with whatever engine and retriever it is given."""

    config: RunConfig
    player: Player
    engine: Generate
    search: Search
    passages: Passages | None

    async def play_arms(
        self,
        questions: Sequence[Question],
        arms: Sequence[Arm],
        on_done: Callable[[Episode], None] = lambda _: None,
    ) -> dict[str, list[Episode]]:
        """Every question once in every arm, greedily: scored episodes in the questions' order."""
        played = await asyncio.gather(*(self._play_arm(questions, arm, on_done) for arm in arms))
        return dict(zip(arms, played, strict=True))

    async def _play_arm(
        self, questions: Sequence[Question], arm: Arm, on_done: Callable[[Episode], None]
    ) -> list[Episode]:
        config = self.config
        scheduler = Scheduler(
            lambda job: self._play(job, arm),
            partial(score_episode, config=config.reward),
            config.rollout.max_concurrent_episodes,
        )
        jobs = [Job(question, 0, f"eval/{arm}/{question.id}") for question in questions]
        return await scheduler.play_all(jobs, on_done)

    async def _play(self, job: Job, arm: Arm) -> Episode:
        search = self._search(job.question, arm)
        return await self.player.play(job, self.engine, search, temperature=0.0)

    def _search(self, question: Question, arm: Arm) -> Search:
        if arm == "normal":
            return self.search
        if arm == "closed_book":
            return ClosedBookSearch()
        if self.passages is None:
            raise UserError(
                f"the arm {arm} needs the corpus: set data.index to a directory of `forage index`"
            )
        topk, seed = self.config.search.topk, self.config.seed
        return search_for_arm(arm, question, self.search, self.passages, topk, seed)


@dataclass(frozen=True, slots=True)
class Evaluation:
    """What an evaluation gives: the episodes by arm, their tokenizer, and the figures."""

    summary: EvaluationSummary
    episodes_by_arm: dict[str, list[Episode]] = field(default_factory=dict)
    tokenizer: TokenizerId | None = None


async def evaluate(
    evaluator: Evaluator, questions: Sequence[Question], arms: Sequence[Arm], label: str
) -> Evaluation:
    """Play the arms under a progress bar and sum them up."""
    with progress_bar(label, len(questions) * len(arms)) as bar:
        episodes_by_arm = await evaluator.play_arms(questions, arms, lambda _: bar.advance())
    config = evaluator.config
    summary = summarise(episodes_by_arm, config.evaluation.num_bootstrap, config.seed)
    return Evaluation(summary, episodes_by_arm, evaluator.player.codec.identity())


def questions_to_evaluate(config: RunConfig) -> list[Question]:
    """The first ``evaluation.num_questions`` of ``data.test``; raises ``UserError``."""
    if config.data.test is None:
        raise UserError("data.test is missing: name a file of questions to evaluate on")
    questions = read_questions(config.data.test, config.data.test_form)
    return questions[: config.evaluation.num_questions]


def open_passages(config: RunConfig) -> CorpusStore | None:
    """The passages that the arms gold and random show, where ``data.index`` names an index."""
    if config.data.index is None:
        return None
    return open_index(config.data.index).store


def run_evaluation(config: RunConfig, out: Path | None) -> None:
    """``forage eval``: load the model, play, print a table, write ``out`` and the episodes."""
    questions = questions_to_evaluate(config)
    evaluation = asyncio.run(evaluate_model(config, questions, config.name))
    console = Console()
    console.print(summary_table(evaluation.summary))
    if config.note:
        console.print(config.note)
    out = out or config.output_dir / "evaluation" / "eval.json"
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text(json.dumps(evaluation.summary.to_json(), indent=1), encoding="utf-8")
    played = evaluation.episodes_by_arm
    write_episode_file(out.with_suffix(".jsonl"), 0, played, evaluation.tokenizer)
    console.print(f"figures: {out}   episodes: {out.with_suffix('.jsonl')}")


async def evaluate_model(
    config: RunConfig, questions: Sequence[Question], label: str
) -> Evaluation:
    """Evaluate ``model.path`` with the retriever at ``search.url``, under a progress bar."""
    choose_matmul_kernel()
    tokenizer = load_tokenizer(config.model)
    player = Player(config.environment, config.rollout, tokenizer, config.seed)
    player.check_prompts(questions)
    model = load_model(config.model)
    async with SearchClient(config.search) as client:
        if "normal" in config.evaluation.arms:
            await client.wait_until_ready()
        stop_table = StopTable.of(tokenizer)
        engine = TorchEngine(
            model, stop_table, config.rollout.engine, config.environment.max_tokens
        )
        try:
            evaluator = Evaluator(config, player, engine, client, open_passages(config))
            return await evaluate(evaluator, questions, config.evaluation.arms, label)
        finally:
            await engine.close()
