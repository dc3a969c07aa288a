"""Every family is computed as transformers computes it, or refused: sampler, trainer, gradients."""

import asyncio
import copy
from collections.abc import Sequence

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedModel

from forage.algorithms.packing import lay_end_to_end
from forage.models import attention
from forage.rollout.engines.torch import forward
from forage.training.logprobs import token_logprobs
from tests.models.families import FAMILIES, VOCABULARY, make_family
from tests.rollout.running_engines import Plan, play, running_engine

BOUND = 1e-4
PLANS = [
    Plan("0/a/0", 11, ((6, 9), (1, 20), (5, 0))),
    Plan("0/a/1", 1, ((3, 1), (4, 2), (9, 0))),
    Plan("0/b/0", 30, ((1, 3), (7, 33), (4, 0))),
    Plan("0/b/1", 30, ((2, 7), (2, 7), (12, 0)), temperature=0.7),
]
SEQUENCES = [
    torch.randint(3, VOCABULARY, (length,), generator=torch.Generator().manual_seed(length))
    for length in (11, 2, 30, 7)
]


def eager_twin(model: PreTrainedModel) -> PreTrainedModel:
    twin = copy.deepcopy(model)
    twin.set_attn_implementation("eager")
    return twin


def plain_logprobs(twin: PreTrainedModel, ids_T: Tensor | Sequence[int], temperature: float = 1.0):
    """[T - 1]: of each token after the first, by transformers' forward of that sequence alone."""
    ids_T = torch.as_tensor(ids_T)
    logits_TV = twin(input_ids=ids_T[None]).logits[0, :-1] / temperature
    return logits_TV.log_softmax(dim=-1).gather(1, ids_T[1:, None])[:, 0]


@pytest.fixture(params=["packed", "fixed"])
def _both_passes(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if request.param == "fixed":
        monkeypatch.setattr(forward, "rows_are_independent", lambda *_: False)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.usefixtures("_both_passes")
async def test_four_episodes_in_flight_are_sampled_as_transformers_scores_them(family: str):
    model = make_family(family)
    twin = eager_twin(model)
    async with running_engine(model) as engine:
        together = await asyncio.gather(*(play(engine, plan) for plan in PLANS))
    for plan, played in zip(PLANS, together, strict=True):
        with torch.no_grad():
            expected_T = plain_logprobs(twin, played.token_ids, plan.temperature)
        for start, completion in played.completions:
            seen_T = torch.tensor(completion.logprobs_T)
            wanted_T = expected_T[start - 1 : start - 1 + len(seen_T)]
            torch.testing.assert_close(seen_T, wanted_T, atol=BOUND, rtol=0)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.usefixtures("_both_passes")
async def test_an_episode_has_the_same_bits_alone_and_in_company(family: str):
    model = make_family(family)
    async with running_engine(model) as engine:
        together = await asyncio.gather(*(play(engine, plan) for plan in PLANS))
    async with running_engine(model) as engine:
        alone = [await play(engine, plan) for plan in PLANS]
    assert together == alone


@pytest.mark.parametrize("family", FAMILIES)
def test_packed_rows_have_the_log_probabilities_and_gradients_of_each_sequence_alone(family: str):
    model = make_family(family)
    twin = eager_twin(model)
    expected_M = torch.cat([plain_logprobs(twin, ids_T) for ids_T in SEQUENCES])
    attention.install(model)
    packed = lay_end_to_end([tuple(ids_T.tolist()) for ids_T in SEQUENCES])
    seen_M, _ = token_logprobs(model, packed, packed.positions_N > 0, 1.0)
    torch.testing.assert_close(seen_M, expected_M, atol=BOUND, rtol=0)
    weights_M = torch.linspace(-1, 1, len(seen_M))
    (weights_M * seen_M).sum().backward()
    (weights_M * expected_M).sum().backward()
    pairs = list(zip(model.parameters(), twin.parameters(), strict=True))
    assert all((a.grad is None) == (b.grad is None) for a, b in pairs)
    gradients = [(a.grad, b.grad) for a, b in pairs if a.grad is not None and b.grad is not None]
    seen, expected = (
        torch.cat([each.flatten() for each in side]) for side in zip(*gradients, strict=True)
    )
    assert (seen - expected).norm() < BOUND * expected.norm()


@pytest.mark.parametrize("family", FAMILIES)
def test_an_exported_model_is_read_back_with_the_same_values(family: str, tmp_path):
    model = make_family(family)
    twin = eager_twin(model)
    attention.install(model)
    model.save_pretrained(tmp_path)
    read = AutoModelForCausalLM.from_pretrained(tmp_path, attn_implementation="eager")
    with torch.no_grad():
        for ids_T in SEQUENCES:
            torch.testing.assert_close(
                plain_logprobs(read, ids_T), plain_logprobs(twin, ids_T), atol=1e-6, rtol=0
            )
