"""Real collapses of a small model, in the real loop: the sentinel says so before exact match falls.

The model that ships searches too little at first, learns that in a few steps, and is then taken
apart: by a reward that can be had without right answers, and by steps that are too large. A fall is
plain: the mean exact match of three steps is below half of the best such mean before.
"""

import shutil
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

import pytest

import forage
from forage.config import RunConfig, build_config
from forage.data.world import write_world
from forage.records import read_metrics
from forage.retrieval.index import build_index
from forage.retrieval.process import ServerProcess
from forage.train import run_training
from forage.training.checkpoint import checkpoints
from forage.training.guard import ROLLBACKS_FILE, Collapsed
from forage.types import Episode
from tests.tiny_runs import scratch

pytestmark = pytest.mark.slow

NUM_AVERAGED = 3
PAID = {"functions": [{"path": "tests.test_collapse:searches", "weight": 2.0}]}
TOO_LARGE = {"learning_rate": 6e-3, "warmup_steps": 12}


def searches(episode: Episode) -> float:
    """A reward that was meant to encourage searching, and is earned best by never answering."""
    return float(episode.num_searches)
