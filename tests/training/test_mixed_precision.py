"""Products in bfloat16 over float32 weights, in the trainer and in the engine of this process."""

import copy
from pathlib import Path

import pytest
import torch
from transformers import PreTrainedModel

from forage import attention
from forage.algorithms.packing import lay_end_to_end
from forage.config.run_config import build_config
from forage.errors import UserError
from forage.records import read_metrics
from forage.train import run_training
from forage.training.logprobs import hidden_states, token_logprobs
from forage.training.mixed_precision import compute_in
from tests.rollout.tiny_models import make_model
from tests.tiny_runs import make_config, random_model

PACKED = lay_end_to_end([list(range(5, 45)), list(range(60, 75))])
WANTED = PACKED.positions_N > 0


def models() -> tuple[PreTrainedModel, PreTrainedModel]:
    """A model, and its twin that multiplies in bfloat16."""
    plain = make_model(seed=3)
    attention.install(plain)
    mixed = copy.deepcopy(plain)
    compute_in(mixed, torch.bfloat16)
    return plain, mixed


def test_it_computes_what_autocast_computes_and_not_what_float32_does():
    plain, mixed = models()
    with torch.no_grad():
        with torch.autocast("cpu", torch.bfloat16):
            expected = hidden_states(plain, PACKED)
        assert torch.equal(hidden_states(mixed, PACKED), expected)
        assert not torch.equal(hidden_states(plain, PACKED), expected)


def test_weights_and_gradients_stay_float32_and_the_gradient_is_about_the_same():
    gradients: list[torch.Tensor] = []
    for model in models():
        logprobs_M, _ = token_logprobs(model, PACKED, WANTED, 1.0)
        assert logprobs_M.dtype == torch.float32
        logprobs_M.sum().backward()
        grads = [p.grad for p in model.parameters() if p.grad is not None]
        assert {grad.dtype for grad in grads} == {torch.float32}
        gradients.append(torch.cat([grad.flatten() for grad in grads]))
    plain, mixed = gradients
    assert 0 < (plain - mixed).norm() < 0.05 * plain.norm()


def test_a_changed_weight_is_cast_anew():
    """The copies that sampling keeps must not outlive an optimizer step."""
    _, mixed = models()
    with torch.no_grad():
        before, _ = token_logprobs(mixed, PACKED, WANTED, 1.0)
        for parameter in mixed.parameters():
            parameter.mul_(1.5)
        kept, _ = token_logprobs(mixed, PACKED, WANTED, 1.0)
    fresh, _ = token_logprobs(mixed, PACKED, WANTED, 1.0)  # with gradients nothing is kept
    assert not torch.equal(before, kept)
    assert torch.equal(kept, fresh.detach())


def test_a_run_trains_with_it_and_logs_how_far_sampler_and_trainer_differ(tmp_path: Path):
    model = {"path": str(random_model()), "arithmetic": "bfloat16"}
    run_training(make_config(tmp_path, model=model, trainer={"num_steps": 1}), resume=False)
    [row] = read_metrics(tmp_path)
    assert 0 <= row["policy/logprob_diff_mean"] <= row["policy/logprob_diff_max"] < 0.1


@pytest.mark.parametrize(
    ("model", "reason"),
    [({"dtype": "bfloat16"}, "in which all is computed"), ({}, "compute_dtype")],
)
def test_what_it_cannot_go_with_is_refused(model: dict[str, str], reason: str):
    settings = {"model": {"path": "m", "arithmetic": "bfloat16", **model}}
    if not model:
        settings["placement"] = {"trainer": {"num_ranks": 2}}
    with pytest.raises(UserError, match=reason):
        build_config(settings)
