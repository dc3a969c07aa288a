"""What is measured beside the ranks' gradient: the memory of a phase, however short."""

import importlib
import re
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


def test_a_phase_shorter_than_a_look_at_the_memory_has_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """It ended the script with a KeyError: nobody had looked yet."""
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    ranks = importlib.import_module("ranks")
    assert re.match(r"driver \d+\.\d\d GB", ranks.MostMemory().text())
