"""What a long command says about its progress where there is no terminal."""

import logging

import pytest

from forage import progress
from forage.progress import progress_bar


def test_without_a_terminal_the_log_says_now_and_then_how_far_it_is(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    now = 1000.0
    monkeypatch.setattr(progress.time, "monotonic", lambda: now)
    caplog.set_level(logging.INFO)
    with progress_bar("warm start", 2_000) as bar:
        for step in range(1, 7):
            now += 25
            bar.advance(f"loss {1 / step:.2f}")
    said = [record.getMessage().partition(";")[0] for record in caplog.records]
    assert said == ["warm start: 3 of 2,000, loss 0.33", "warm start: 6 of 2,000, loss 0.17"]


def test_a_terminal_shows_the_bar_alone(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setattr(progress, "LOG_EVERY_S", 0.0)
    caplog.set_level(logging.INFO)
    with progress_bar("warm start", 2) as bar:
        bar.advance()
    assert not caplog.records
