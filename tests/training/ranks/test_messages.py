"""Messages between the driver and its ranks are as large as what they say."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from contextlib import closing, nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from forage.batch import Credited
from forage.config.run_config import RunConfig, build_config
from forage.training.model import save_model
from forage.training.ranks import rank_processes
from forage.training.ranks.messages import to_bytes
from forage.training.ranks.trainer_ranks import TrainerRanks
from forage.training.trainer import open_trainer
from tests.fakes import tiny_tokenizer
from tests.rollout.tiny_models import make_model
from tests.training.sequences import credited, episode

DTYPES = (torch.float32, torch.bfloat16, torch.bool, torch.int64, torch.float64, torch.uint8)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    "made",
    [
        torch.arange(6),
        torch.arange(6).reshape(2, 3),
        torch.tensor(1),
        torch.zeros(0, 3),
        torch.arange(12).reshape(3, 4).T[1:, ::2],
        torch.arange(1).expand(4),
    ],
    ids=["vector", "matrix", "scalar", "nothing", "strided", "expanded"],
)
def test_a_tensor_arrives_as_it_was_sent(made: Tensor, dtype: torch.dtype) -> None:
    sent = made.to(dtype) if made.numel() > 1 and made.stride() != (0,) else made
    arrived = pickle.loads(to_bytes(sent))
    assert arrived.dtype == sent.dtype
    assert arrived.shape == sent.shape
    assert torch.equal(arrived, sent)


def test_a_tensor_that_is_sent_twice_arrives_once_and_can_be_written() -> None:
    sent = torch.ones(1000)
    message = to_bytes([sent, sent])
    first, second = pickle.loads(message)
    first += 1
    assert second.eq(2).all()
    assert sent.eq(1).all()
    assert len(message) < 1.2 * sent.nbytes


def test_a_view_is_sent_without_the_rest_of_its_storage() -> None:
    whole = torch.arange(100_000.0)
    assert len(to_bytes(list(whole.split(100)))) < 1.5 * whole.nbytes


ALGORITHMS: dict[str, dict[str, Any]] = {
    "a critic": {"advantage": {"kind": "gae", "critic": {"learning_rate": 1e-3}}},
    "observations": {"advantage": {"kind": "grpo"}, "train_observations": True},
}
EVERY = {
    "kl": {"coefficient": 0.1},
    "decoupled": True,
    "correction": {"weights": {"kind": "truncate"}},
}


def config_of(path: Path, algorithm: dict[str, Any]) -> RunConfig:
    return build_config(
        {
            "model": {"path": str(path)},
            "placement": {
                "engine": {"kind": "vllm", "urls": ["http://127.0.0.1:9"]},
                "trainer": {"num_ranks": 2},
            },
            "algorithm": algorithm | EVERY,
        }
    )


def played(count: int) -> list[list[Credited]]:
    """Groups of eight episodes."""
    episodes = [credited(episode(i % 16), 0.5 - i % 2) for i in range(count)]
    return [episodes[i : i + 8] for i in range(0, count, 8)]


@pytest.mark.parametrize("algorithm", ALGORITHMS.values(), ids=ALGORITHMS)
def test_bytes_per_episode_do_not_grow_with_the_episodes_of_a_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, algorithm: dict[str, Any]
) -> None:
    """Each episode's columns were views, each sent with all the others: 21 GB for 2,560."""
    save_model(make_model(vocabulary=300), tiny_tokenizer(), tmp_path)
    sizes: dict[str, int] = {}
    noting: list[str] = []

    def counted(direction: str, made: Callable[..., Any], *arguments: Any) -> Any:
        result = made(*arguments)
        name = f"{noting[-1]} {direction}"
        sizes[name] = sizes.get(name, 0) + len(result or b"")
        return result

    to_rank, from_rank = partial(counted, "out", to_bytes), rank_processes._received
    noting.append("start")
    monkeypatch.setattr(rank_processes, "to_bytes", to_rank)
    monkeypatch.setattr(rank_processes, "_received", partial(counted, "back", from_rank))
    per_episode: list[dict[str, float]] = []
    with closing(open_trainer(config_of(tmp_path, algorithm))) as trainer:
        assert isinstance(trainer, TrainerRanks)
        for count in (64, 512):
            sizes.clear()
            noting.append("prepare")
            prepared, _ = trainer.prepare(played(count))
            noting.append("pack")
            batches, _ = trainer.pack(prepared)
            noting.append("learn")
            trainer.learn(batches, nullcontext())
            per_episode.append({name: size / count for name, size in sizes.items()})
    few, many = per_episode
    assert few.keys() == many.keys()
    assert {"prepare out", "prepare back", "learn out", "learn back"} <= few.keys()
    assert ("pack back" in few) == algorithm.get("train_observations", False)
    assert {name for name, size in many.items() if size > 1.1 * few[name]} == set()
    assert many["prepare back"] < many["prepare out"], "episodes are not sent back"
