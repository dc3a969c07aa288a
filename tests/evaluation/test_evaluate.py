"""Every question once in every arm, greedily, all in flight together; figures and episodes kept."""

import asyncio
import json
from collections.abc import Sequence
from pathlib import Path

import pytest

from forage.config import RunConfig, build_config
from forage.data.corpus import write_corpus
from forage.data.questions import write_questions
from forage.errors import UserError
from forage.evaluation.evaluate import (
    Evaluator,
    evaluate,
    evaluate_model,
    open_passages,
    questions_to_evaluate,
    run_evaluation,
)
from forage.evaluation.summary import EvaluationSummary
from forage.records import read_episodes
from forage.retrieval.index import build_index
from forage.rewards.scorer import Scorer
from forage.rollout.player import Player
from forage.types import Completion, FinishReason, Passage, Question, Sampling, Search, Status
from tests.fakes import ScriptedSearch, failure, reply_with, tiny_codec, tiny_tokenizer
from tests.tiny_runs import make_config

PASSAGES = [Passage(f"p{index}", f"Town {index}", f"Town {index} is old.") for index in range(8)]
QUESTIONS = [
    Question(
        f"q{index}", f"Which town is number {index}?", (f"Town {index}",), "test", (f"p{index}",)
    )
    for index in range(3)
]


class Reader:
    """Searches once, then answers with the title of the first passage that it was shown."""

    def __init__(self, num_together: int = 0) -> None:
        self.keys: list[str] = []
        self.samplings: list[Sampling] = []
        self._num_together = num_together
        self._are_together = asyncio.Event()

    async def generate(self, token_ids: Sequence[int], sampling: Sampling) -> Completion:
        self.samplings.append(sampling)
        text = tiny_codec().decode(token_ids)
        if "Title: " not in text and sampling.episode_key not in self.keys:
            self.keys.append(sampling.episode_key)
            if len(self.keys) >= self._num_together:
                self._are_together.set()
            await self._are_together.wait()
            turn = "<search>town</search>"
        else:
            title = text.partition("Title: ")[2].partition(")")[0]
            turn = f"<answer>{title}</answer>"
        ids = tuple(tiny_codec().encode_trusted(turn))
        return Completion(ids, (-1.0,) * len(ids), (0,) * len(ids), FinishReason.STOP)

    def release(self, episode_key: str) -> None:
        """Nothing is kept."""


class FirstTown:
    """A retriever that always finds town 0."""

    async def search(self, query: str):
        return reply_with(PASSAGES[0])


@pytest.fixture(scope="module")
def index(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("towns")
    write_corpus(folder / "corpus.jsonl", PASSAGES)
    build_index(folder / "corpus.jsonl", folder / "index", show_progress=False)
    return folder / "index"


def config_of(index: Path | None = None, questions: Path | None = None) -> RunConfig:
    return build_config(
        {
            "model": {"path": "unused"},
            "data": {"test": questions and str(questions), "index": index and str(index)},
            "environment": {
                "prompt": "brief",
                "max_tokens": 512,
                "max_turn_tokens": 60,
                "max_observation_tokens": 200,
            },
            "evaluation": {"num_bootstrap": 100},
        }
    )


def evaluator(config: RunConfig, engine: Reader, search: Search | None = None) -> Evaluator:
    player = Player(config.environment, config.rollout, tiny_tokenizer(), seed=0)
    scorer = Scorer(config.reward, config.environment.protocol)
    return Evaluator(config, player, engine, search or FirstTown(), open_passages(config), scorer)


async def test_each_arm_answers_the_searches_of_its_own_question(index: Path):
    engine = Reader()
    played = await evaluator(config_of(index), engine).play_arms(
        QUESTIONS, ("normal", "closed_book", "gold", "random")
    )
    assert list(played) == ["normal", "closed_book", "gold", "random"]
    shown = {
        arm: [episode.turns[0].passage_ids_K for episode in episodes]
        for arm, episodes in played.items()
    }
    assert shown["normal"] == [("p0",)] * 3
    assert shown["closed_book"] == [()] * 3
    assert shown["gold"] == [("p0",), ("p1",), ("p2",)]
    assert all(len(ids) == 3 for ids in shown["random"])
    ems = {
        arm: [episode.reward.parts["em"] for episode in episodes if episode.reward]
        for arm, episodes in played.items()
    }
    assert ems["gold"] == [1.0, 1.0, 1.0]
    assert ems["normal"] == [1.0, 0.0, 0.0]
    assert ems["closed_book"] == [0.0, 0.0, 0.0]


async def test_episodes_are_greedy_have_keys_of_their_own_and_come_in_the_questions_order(
    index: Path,
):
    engine = Reader()
    played = await evaluator(config_of(index), engine).play_arms(QUESTIONS, ("normal", "gold"))
    for episodes in played.values():
        assert [episode.question for episode in episodes] == QUESTIONS
    assert {sampling.temperature for sampling in engine.samplings} == {0.0}
    assert len(set(engine.keys)) == 6


async def test_no_arm_waits_for_another(index: Path):
    """No first turn ends before those of all arms have been asked for."""
    engine = Reader(num_together=6)
    async with asyncio.timeout(20):
        played = await evaluator(config_of(index), engine).play_arms(
            QUESTIONS, ("normal", "closed_book")
        )
    assert all(episode.status is Status.ANSWERED for e in played.values() for episode in e)


async def test_progress_counts_every_episode_of_every_arm(index: Path):
    seen: list[str] = []
    await evaluator(config_of(index), Reader()).play_arms(
        QUESTIONS, ("normal", "gold"), lambda episode: seen.append(episode.question.id)
    )
    assert sorted(seen) == ["q0", "q0", "q1", "q1", "q2", "q2"]


async def test_an_arm_that_needs_the_corpus_says_so_where_there_is_none():
    with pytest.raises(UserError, match="the arm gold needs the corpus: set data.index"):
        await evaluator(config_of(), Reader()).play_arms(QUESTIONS, ("gold",))


async def test_a_search_that_fails_is_counted_in_the_figures(index: Path):
    search = ScriptedSearch(failure(), failure(), failure())
    evaluation = await evaluate(
        evaluator(config_of(index), Reader(), search), QUESTIONS, ("normal",), "test"
    )
    assert evaluation.summary.arms["normal"].overall.failures == {"timeout": 3}
    episodes = evaluation.episodes_by_arm["normal"]
    assert [episode.status for episode in episodes] == [Status.SEARCH_FAILED] * 3


def test_the_first_questions_of_the_file_are_evaluated(tmp_path: Path):
    write_questions(tmp_path / "test.jsonl", QUESTIONS)
    config = config_of(questions=tmp_path / "test.jsonl")
    assert questions_to_evaluate(config) == QUESTIONS
    two = config.evaluation.model_copy(update={"num_questions": 2})
    assert questions_to_evaluate(config.model_copy(update={"evaluation": two})) == QUESTIONS[:2]
    with pytest.raises(UserError, match="data.test is missing"):
        questions_to_evaluate(config_of())


# --- with a real model and a real server ----------------------------------------------------------


@pytest.mark.slow
def test_an_evaluation_is_the_same_whatever_runs_beside_it(tmp_path: Path):
    played = []
    for slots, concurrent, arms in ((8, 2, ("normal",)), (16, 64, ("gold", "normal"))):
        rollout = {
            "max_concurrent_episodes": concurrent,
            "engine": {"num_slots": slots, "tile_rows": 8, "prefill_bucket": 16},
        }
        config = make_config(tmp_path, rollout=rollout, evaluation={"arms": arms})
        evaluation = asyncio.run(evaluate_model(config, questions_to_evaluate(config), "test"))
        played.append([episode.segments for episode in evaluation.episodes_by_arm["normal"]])
    assert played[0] == played[1]


@pytest.mark.slow
def test_the_figures_and_the_episodes_are_written_where_they_are_looked_for(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    config = make_config(
        tmp_path / "run",
        note="Do not expect much.",
        evaluation={"arms": ["normal", "closed_book"], "num_questions": 4},
    )
    run_evaluation(config, None)
    run_evaluation(config, tmp_path / "elsewhere" / "mine.json")
    out = capsys.readouterr().out
    assert "Evaluation" in out
    assert "Do not expect much." in out
    paths = (tmp_path / "run" / "evaluation" / "eval.json", tmp_path / "elsewhere" / "mine.json")
    figures = [json.loads(path.read_text()) for path in paths]
    assert figures[0] == figures[1]
    summary = EvaluationSummary.from_json(figures[0])
    assert {arm: part.overall.num_questions for arm, part in summary.arms.items()} == {
        "normal": 4,
        "closed_book": 4,
    }
    records = list(read_episodes(paths[0].with_suffix(".jsonl")))
    assert [record.arm for record in records] == ["normal"] * 4 + ["closed_book"] * 4


@pytest.mark.slow
def test_arms_without_a_search_server_need_none(tmp_path: Path):
    config = make_config(
        tmp_path,
        search={"url": "http://127.0.0.1:9", "startup_timeout_s": 0.1},
        evaluation={"arms": ["closed_book", "gold"]},
    )
    run_evaluation(config, None)
    normal = config.evaluation.model_copy(update={"arms": ("normal",)})
    with pytest.raises(UserError, match="no search server answers"):
        run_evaluation(config.model_copy(update={"evaluation": normal}), None)


def test_what_cannot_be_evaluated_is_refused(tmp_path: Path):
    config = make_config(
        tmp_path,
        environment={
            "prompt": "search-r1",
            "max_tokens": 100,
            "max_turn_tokens": 16,
            "max_observation_tokens": 40,
        },
    )
    with pytest.raises(UserError, match=r"prompt of question test-0 .* raise environment.max"):
        run_evaluation(config, None)
    with pytest.raises(UserError, match="model.path is 'no/such/model'"):
        run_evaluation(make_config(tmp_path, model={"path": "no/such/model"}), None)
    assert not list(tmp_path.iterdir())
