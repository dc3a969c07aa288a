"""One question in the terminal: what the policy wrote, what it was shown, and how it ended."""

from pathlib import Path

import pytest
from rich.console import Console

from forage.commands.play_command import episode_panel, play_one
from forage.errors import UserError
from forage.types import ActionKind, Episode, Status, Turn
from tests.fakes import make_question
from tests.tiny_runs import make_config


def shown(episode: Episode) -> str:
    console = Console(width=100, record=True, quiet=False)
    with console.capture() as capture:
        console.print(episode_panel(episode))
    return capture.get()


def episode(*turns: Turn, status: Status = Status.ANSWERED) -> Episode:
    return Episode(make_question("Which river?"), 0, (), turns, status)


def test_an_episode_is_shown_turn_by_turn_with_its_answer():
    text = shown(
        episode(
            Turn("<search>Rome</search>", ActionKind.SEARCH, "Rome", "Doc 1(Title: Rome) old"),
            Turn("<answer>Tiber</answer>", ActionKind.ANSWER, "Tiber"),
        )
    )
    places = [text.index(part) for part in ("Which river?", "<search>", "Doc 1", "<answer>")]
    assert places == sorted(places)
    assert "Tiber · answered · 1 searches" in text


def test_an_episode_without_an_answer_says_why():
    turn = Turn("hmm", ActionKind.INVALID, "no tag")
    text = shown(episode(turn, status=Status.OUT_OF_TURNS))
    assert "no answer · out_of_turns · 0 searches" in text


def test_what_looks_like_markup_is_shown_as_it_is():
    turn = Turn("<answer>[bold]x[/bold] [red]</answer>", ActionKind.ANSWER, "[/nonsense]")
    text = shown(episode(turn))
    assert "[bold]x[/bold] [red]" in text
    assert "[/nonsense] · answered" in text


@pytest.mark.slow
def test_a_question_is_played_greedily_with_the_real_retriever(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    config = make_config(tmp_path / "run")
    play_one(config, "Who founded it")
    first = capsys.readouterr().out
    play_one(config, "Who founded it")
    assert capsys.readouterr().out == first
    assert "Who founded it" in first
    assert " searches" in first
    assert not (tmp_path / "run").exists()


def test_a_question_that_cannot_be_played_is_an_error(tmp_path: Path):
    config = make_config(tmp_path)
    with pytest.raises(UserError, match="prompt of question asked has .* tokens"):
        play_one(config, "why " * 500)
    away = {"url": "http://127.0.0.1:9", "startup_timeout_s": 0.1}
    with pytest.raises(UserError, match="no search server answers"):
        play_one(make_config(tmp_path, search=away), "why?")
