"""``forage data`` from the user's view: arguments that cannot be written or keep nothing."""

from pathlib import Path

import pytest

from forage.commands.cli import main


def test_questions_are_written_only_where_the_ending_says_the_form(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    """JSON lines were written into a file called .csv."""
    questions = tmp_path / "q.jsonl"
    questions.write_text('{"question": "Which town?", "answers": ["Rome"]}\n')
    assert main(f"data convert {questions} --out {tmp_path}/q.csv".split()) == 2
    assert "must end in .jsonl (Forage) or .parquet (Search-R1)" in capsys.readouterr().err
    assert not (tmp_path / "q.csv").exists()


@pytest.mark.parametrize("bound", ["nan", "x"])
def test_a_lowest_reward_that_is_no_number_is_refused(
    bound: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    """With a bound of nan, every episode passed."""
    assert main(f"data select {tmp_path}/e.jsonl --min-reward {bound}".split()) == 2
    assert f"'{bound}' is not a number" in capsys.readouterr().err
