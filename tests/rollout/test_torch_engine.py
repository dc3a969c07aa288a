"""The in-process engine says what a plain forward says, whatever else it is doing (promise 7)."""

import asyncio
import threading
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import PreTrainedModel

from forage.config import EngineConfig
from forage.rollout.sampling import noise_key, uniform_noise
from forage.rollout.torch_engine import TorchEngine
from forage.training.model import new_model
from forage.types import EngineError, FinishReason
from tests.rollout.engines import (
    LETTERS,
    MAX_TOKENS,
    Plan,
    play,
    running_engine,
    sampling,
    tokens,
)
from tests.rollout.tiny_models import (
    ARCHITECTURES,
    VOCABULARY,
    Architecture,
    make_model,
    plain_logprobs,
    twin,
)

PLAN = Plan()


# --- what is sampled ------------------------------------------------------------------------------


@pytest.mark.parametrize("architecture", ARCHITECTURES)
@pytest.mark.parametrize("temperature", [1.0, 0.7])
async def test_log_probabilities_are_those_of_a_plain_forward_of_the_same_tokens(
    architecture: Architecture, temperature: float
):
    model = make_model(architecture)
    plain = twin(model)
    plan = replace(PLAN, temperature=temperature, turns=((9, 40), (12, 70), (20, 0)))
    async with running_engine(model) as engine:
        played = await play(engine, plan)
    expected_TV = plain_logprobs(plain, played.token_ids, temperature)
    for start, completion in played.completions:
        for index, (token, logprob) in enumerate(
            zip(completion.token_ids_T, completion.logprobs_T, strict=True)
        ):
            assert abs(expected_TV[start + index - 1, token].item() - logprob) <= 1e-5


@pytest.mark.parametrize("architecture", ARCHITECTURES)
async def test_greedy_tokens_are_the_most_likely_of_a_plain_forward(architecture: Architecture):
    model = make_model(architecture)
    plain = twin(model)
    async with running_engine(model) as engine:
        played = await play(engine, replace(PLAN, temperature=0.0, turns=((25, 33), (25, 0))))
    expected_TV = plain_logprobs(plain, played.token_ids, 1.0)
    for start, completion in played.completions:
        rows_MV = expected_TV[start - 1 : start - 1 + len(completion.token_ids_T)]
        assert list(completion.token_ids_T) == rows_MV.argmax(dim=-1).tolist()
        given = torch.tensor(completion.logprobs_T)
        torch.testing.assert_close(given, rows_MV.max(dim=-1).values, atol=1e-5, rtol=0)


async def test_sampled_tokens_are_the_plain_distribution_read_at_the_noise_of_their_position():
    model = make_model()
    plain = twin(model)
    async with running_engine(model) as engine:
        played = await play(engine, replace(PLAN, turns=((30, 20), (30, 0))))
    cumulative_TV = plain_logprobs(plain, played.token_ids, 1.0).double().exp().cumsum(dim=-1)
    key = np.array([noise_key(7, PLAN.key)], dtype=np.uint64)
    for start, completion in played.completions:
        for position, token in enumerate(completion.token_ids_T, start):
            noise = uniform_noise(key, np.array([position], dtype=np.uint64))[0]
            assert token == int((cumulative_TV[position - 1] <= noise).sum())


async def test_the_seed_the_episode_and_the_position_each_change_what_is_sampled():
    prompt = tokens(1, 9)
    async with running_engine() as engine:
        first = await engine.generate(prompt, sampling("a", max_tokens=30))
        other_episode = await engine.generate(prompt, sampling("b", max_tokens=30))
        engine.release("a")
        again = await engine.generate(prompt, sampling("a", max_tokens=30))
        engine.release("a")
        other_seed = await engine.generate(prompt, sampling("a", max_tokens=30, seed=8))
    assert again == first
    assert len({c.token_ids_T for c in (first, other_episode, other_seed)}) == 3


async def test_a_turn_ends_after_the_token_that_completes_a_stop_string_and_keeps_it():
    prompt = tokens(1, 9)
    async with running_engine() as engine:
        free = await engine.generate(prompt, sampling("a", max_tokens=12))
        stop = LETTERS.text_bytes(free.token_ids_T[3:5]).decode()
        engine.release("a")
        stopped = await engine.generate(prompt, sampling("a", max_tokens=12, stop=(stop,)))
    assert stopped.token_ids_T == free.token_ids_T[:5]
    assert stopped.logprobs_T == free.logprobs_T[:5]
    assert (stopped.finish_reason, free.finish_reason) == (FinishReason.STOP, FinishReason.LENGTH)


async def test_a_turn_ends_with_a_stop_id():
    prompt = tokens(1, 9)
    async with running_engine() as engine:
        free = await engine.generate(prompt, sampling("a", max_tokens=12))
        engine.release("a")
        stopped = await engine.generate(
            prompt, sampling("a", max_tokens=12, stop_ids=(free.token_ids_T[2],))
        )
    last = free.token_ids_T.index(free.token_ids_T[2])
    assert stopped.token_ids_T == free.token_ids_T[: last + 1]
    assert stopped.finish_reason is FinishReason.STOP


async def test_a_turn_that_cannot_fit_is_refused_with_the_setting_to_raise():
    async with running_engine(max_tokens=64) as engine:
        with pytest.raises(
            EngineError, match="60 tokens and a turn of 5 .* environment.max_tokens"
        ):
            await engine.generate(tokens(1, 60), sampling(max_tokens=5))
        fits = await engine.generate(tokens(1, 60), sampling(max_tokens=4))
    assert len(fits.token_ids_T) == 4


async def test_an_episode_may_fill_its_last_position():
    model = make_model()
    plain = twin(model)
    async with running_engine(model, max_tokens=128) as engine:
        played = await play(engine, Plan(num_prompt=60, turns=((4, 61), (3, 0))))
    assert len(played.token_ids) == 128
    expected_TV = plain_logprobs(plain, played.token_ids, 1.0)
    assert (
        abs(
            expected_TV[126, played.token_ids[127]].item() - played.completions[1][1].logprobs_T[-1]
        )
        <= 1e-5
    )


# --- what is computed, and what is reused ---------------------------------------------------------


async def test_a_turn_costs_its_new_tokens_alone():
    async with running_engine() as engine:
        first = await engine.generate(tokens(1, 50), sampling(max_tokens=6))
        assert engine.counters.prefilled_tokens == 50
        assert engine.counters.sampled_tokens == 6
        transcript = [*tokens(1, 50), *first.token_ids_T, *tokens(2, 30)]
        await engine.generate(transcript, sampling(max_tokens=4))
    counters = engine.counters
    # The last sampled token of a turn has no keys yet: it is computed with the observation.
    assert counters.prefilled_tokens == 50 + 1 + 30
    assert counters.reused_tokens == 50 + 5
    assert counters.sampled_tokens == 10
    assert counters.transcript_violations == 0


async def test_a_groups_prompt_is_computed_once():
    async with running_engine() as engine:
        together = await asyncio.gather(
            *(play(engine, replace(PLAN, key=str(i), turns=((5, 0),))) for i in range(6))
        )
        assert engine.counters.prefilled_tokens == PLAN.num_prompt
        late = await play(engine, replace(PLAN, key="0", turns=((5, 0),)))
    assert engine.counters.prefilled_tokens == PLAN.num_prompt
    assert late == together[0]
    assert len({played.token_ids for played in together}) == 6


async def test_a_transcript_that_was_edited_is_counted_and_still_answered_rightly():
    model = make_model()
    plain = twin(model)
    async with running_engine(model) as engine:
        first = await engine.generate(tokens(1, 20), sampling(max_tokens=5))
        edited = [*tokens(1, 20), *first.token_ids_T, *tokens(3, 7)]
        edited[4] = (edited[4] + 1) % VOCABULARY
        second = await engine.generate(edited, sampling(max_tokens=5))
    assert engine.counters.transcript_violations == 1
    expected_TV = plain_logprobs(plain, [*edited, *second.token_ids_T], 1.0)
    for index, token in enumerate(second.token_ids_T):
        expected = expected_TV[len(edited) + index - 1, token].item()
        assert abs(expected - second.logprobs_T[index]) <= 1e-5


async def test_a_transcript_that_got_shorter_is_counted():
    async with running_engine() as engine:
        await engine.generate(tokens(1, 20), sampling(max_tokens=5))
        await engine.generate(tokens(1, 20), sampling(max_tokens=5))
    assert engine.counters.transcript_violations == 1


# --- promise 7: nothing but the episode itself changes its tokens ---------------------------------


async def _alone(plan: Plan = PLAN):
    async with running_engine() as engine:
        return await play(engine, plan)


@pytest.mark.parametrize("num_ahead", [1, 3, 5, 7])
async def test_the_slot_an_episode_sits_in_changes_no_bit(num_ahead: int):
    async with running_engine() as engine:
        for index in range(num_ahead):
            ahead = Plan(f"ahead-{index}", 3 + 29 * index, ((2, 0),))
            await play(engine, ahead, release=False)
        played = await play(engine, PLAN)
    assert played == await _alone()


async def test_what_the_slot_held_before_changes_no_bit():
    async with running_engine(num_slots=4) as engine:
        await asyncio.gather(
            *(play(engine, Plan(f"{i}", 300 + i, ((40, 50), (9, 0)))) for i in range(4))
        )
        played = await play(engine, PLAN)
    assert played == await _alone()


@pytest.mark.parametrize(("num_slots", "bits"), [(4, "fewer slots"), (12, "more"), (32, "many")])
async def test_how_many_slots_there_are_changes_no_bit(num_slots: int, bits: str):
    async with running_engine(num_slots=num_slots) as engine:
        played = await play(engine, PLAN)
    assert played == await _alone(), bits


async def test_the_moment_of_admission_changes_no_bit():
    alone = await _alone()
    async with running_engine(num_slots=4) as engine:
        others = [
            asyncio.create_task(play(engine, Plan(f"{i}", 20 + 60 * i, ((120, 0),))))
            for i in range(4)
        ]
        while engine.counters.decode_steps < 10:
            await asyncio.sleep(0)
        # All slots are taken: the episode is admitted when the first of the others ends.
        played = await play(engine, PLAN)
        await asyncio.gather(*others)
    assert played == alone


@st.composite
def _company(draw: st.DrawFn) -> list[Plan]:
    """Other episodes, short and long, of few and many turns, on both sides of a length bucket."""
    turn = st.tuples(st.integers(1, 12), st.integers(0, 90))
    return [
        Plan(
            f"company-{index}",
            draw(st.integers(1, 260)),
            tuple(draw(st.lists(turn, min_size=1, max_size=3))),
            draw(st.sampled_from([0.0, 0.5, 1.0])),
        )
        for index in range(draw(st.integers(1, 9)))
    ]


@settings(max_examples=20)
@given(company=_company(), num_prompt=st.integers(1, 200), position=st.integers(0, 9))
def test_the_company_an_episode_keeps_changes_no_bit(
    company: list[Plan], num_prompt: int, position: int
):
    plan = replace(PLAN, num_prompt=num_prompt)

    async def both() -> None:
        async with running_engine() as engine:
            plans = [*company[:position], plan, *company[position:]]
            played = await asyncio.gather(*(play(engine, each) for each in plans))
        assert played[plans.index(plan)] == await _alone(plan)

    asyncio.run(both())


@pytest.mark.parametrize("architecture", ARCHITECTURES)
async def test_a_full_engine_gives_each_architecture_the_bits_it_gives_alone(
    architecture: Architecture,
):
    model = make_model(architecture)
    plans = [Plan(f"{i}", 5 + 47 * i, ((30, 60 + i), (30, 0))) for i in range(8)]
    async with running_engine(model) as engine:
        together = await asyncio.gather(*(play(engine, plan) for plan in plans))
    for plan, played in zip(plans, together, strict=True):
        async with running_engine(model) as engine:
            assert await play(engine, plan) == played


@pytest.mark.slow
async def test_long_and_wide_episodes_keep_their_bits_in_company():
    """Sizes of the demo, where matrix kernels split their sums in other ways than in tiny ones."""
    model = new_model(VOCABULARY, 128, 2, 4, 2, MAX_TOKENS, seed=0).eval()
    plans = [Plan(f"{i}", 10 + 60 * i, ((20, 200), (20, 200), (20, 0))) for i in range(8)]
    options = {"num_slots": 32, "tile_rows": 32, "prefill_bucket": 32}
    async with running_engine(model, **options) as engine:
        together = await asyncio.gather(*(play(engine, plan) for plan in plans))
    for plan, played in list(zip(plans, together, strict=True))[::3]:
        async with running_engine(model, **options) as engine:
            assert await play(engine, plan) == played


# --- weights --------------------------------------------------------------------------------------


async def test_each_token_carries_the_version_that_sampled_it():
    async with running_engine() as engine:
        await engine.receive_weights(3)
        first = await engine.generate(tokens(1, 9), sampling("a", max_tokens=4))
        await engine.receive_weights(4)
        transcript = [*tokens(1, 9), *first.token_ids_T, *tokens(2, 5)]
        second = await engine.generate(transcript, sampling("a", max_tokens=3))
    assert first.versions_T == (3, 3, 3, 3)
    assert second.versions_T == (4, 4, 4)


async def test_new_weights_between_two_turns_recompute_the_whole_transcript():
    model, other = make_model(), make_model(seed=1)
    plain = twin(other)
    async with running_engine(model) as engine:
        first = await engine.generate(tokens(1, 40), sampling(max_tokens=4))
        with engine.weights_lock:
            model.load_state_dict(other.state_dict())
        await engine.receive_weights(1)
        transcript = [*tokens(1, 40), *first.token_ids_T, *tokens(2, 5)]
        before = engine.counters
        second = await engine.generate(transcript, sampling(max_tokens=4))
    assert engine.counters.prefilled_tokens - before.prefilled_tokens == len(transcript)
    assert engine.counters.reused_tokens == before.reused_tokens
    assert engine.counters.transcript_violations == 0
    expected_TV = plain_logprobs(plain, [*transcript, *second.token_ids_T], 1.0)
    for index, (token, logprob) in enumerate(
        zip(second.token_ids_T, second.logprobs_T, strict=True)
    ):
        assert abs(expected_TV[len(transcript) + index - 1, token].item() - logprob) <= 1e-5


async def test_a_groups_prompt_is_computed_again_after_new_weights():
    model, other = make_model(), make_model(seed=1)
    async with running_engine(model) as engine:
        old = await play(engine, replace(PLAN, turns=((5, 0),)))
        with engine.weights_lock:
            model.load_state_dict(other.state_dict())
        await engine.receive_weights(1)
        new = await play(engine, replace(PLAN, turns=((5, 0),)))
    async with running_engine(make_model(seed=1)) as engine:
        expected = await play(engine, replace(PLAN, turns=((5, 0),)))
    assert engine.counters.prefilled_tokens == PLAN.num_prompt
    assert new.token_ids == expected.token_ids
    assert new.completions[0][1].logprobs_T == expected.completions[0][1].logprobs_T
    assert new.token_ids != old.token_ids


async def test_new_weights_in_the_middle_of_a_turn_sample_its_later_tokens():
    """Between the change of the weights and its announcement nothing may be sampled: tokens were
    drawn there from new weights over old keys, and stamped with the old version."""
    model, other = make_model(), make_model(seed=1)
    plain_old, plain_new = twin(model), twin(other)
    prompt = tokens(1, 30)
    async with running_engine(model) as engine:
        turn = asyncio.create_task(engine.generate(prompt, sampling(max_tokens=900)))
        while engine.counters.sampled_tokens < 5:
            await asyncio.sleep(0)
        with engine.weights_lock:
            model.load_state_dict(other.state_dict())
            num_old = engine.counters.sampled_tokens
        await asyncio.sleep(0.05)
        await engine.receive_weights(1)
        completion = await turn
    assert completion.versions_T == (0,) * num_old + (1,) * (900 - num_old)
    transcript = [*prompt, *completion.token_ids_T]
    old_TV = plain_logprobs(plain_old, transcript, 1.0)
    new_TV = plain_logprobs(plain_new, transcript, 1.0)
    for index, token in enumerate(completion.token_ids_T):
        expected_TV = new_TV if index >= num_old else old_TV
        expected = expected_TV[len(prompt) + index - 1, token].item()
        assert abs(expected - completion.logprobs_T[index]) <= 1e-5


# --- slots, and how a turn can end otherwise ------------------------------------------------------


async def test_more_episodes_than_slots_all_end():
    plans = [Plan(f"{i}", 5 + i, ((4, 3), (4, 3), (4, 0))) for i in range(12)]
    async with running_engine(num_slots=2, tile_rows=2) as engine:
        crowded = await asyncio.gather(*(play(engine, plan) for plan in plans))
    async with running_engine(num_slots=16, tile_rows=2) as engine:
        roomy = await asyncio.gather(*(play(engine, plan) for plan in plans))
    assert crowded == roomy
    assert engine.counters.transcript_violations == 0


async def test_an_episode_that_waits_for_its_search_keeps_its_slot_until_it_is_released():
    async with running_engine(num_slots=1, tile_rows=1) as engine:
        first = await engine.generate(tokens(1, 9), sampling("holder", max_tokens=3))
        waiting = asyncio.create_task(engine.generate(tokens(2, 9), sampling("other")))
        transcript = [*tokens(1, 9), *first.token_ids_T, *tokens(3, 4)]
        await engine.generate(transcript, sampling("holder", max_tokens=3))
        assert not waiting.done()
        engine.release("holder")
        assert len((await waiting).token_ids_T) == 8


async def test_cancelling_a_turn_frees_its_slot():
    async with running_engine(num_slots=1, tile_rows=1) as engine:
        turn = asyncio.create_task(engine.generate(tokens(1, 9), sampling("a", max_tokens=900)))
        while engine.counters.sampled_tokens < 3:
            await asyncio.sleep(0)
        turn.cancel()
        with pytest.raises(asyncio.CancelledError):
            await turn
        after = await engine.generate(tokens(2, 9), sampling("b"))
        num_sampled = engine.counters.sampled_tokens
    assert len(after.token_ids_T) == 8
    assert num_sampled < 900


async def test_cancelling_a_turn_that_waits_for_a_slot_takes_it_out_of_the_line():
    async with running_engine(num_slots=1, tile_rows=1) as engine:
        await engine.generate(tokens(1, 9), sampling("holder", max_tokens=2))
        waiting = asyncio.create_task(engine.generate(tokens(2, 9), sampling("waits")))
        await asyncio.sleep(0)
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting
        engine.release("holder")
        after = await engine.generate(tokens(3, 9), sampling("b"))
    assert len(after.token_ids_T) == 8
    assert engine.counters.sampled_tokens == 2 + 8


async def test_closing_ends_turns_that_run_and_turns_that_wait_with_an_engine_error():
    async with running_engine(num_slots=1, tile_rows=1) as engine:
        running = asyncio.create_task(engine.generate(tokens(1, 9), sampling("a", max_tokens=1000)))
        waiting = asyncio.create_task(engine.generate(tokens(2, 9), sampling("b")))
        while engine.counters.sampled_tokens < 3:
            await asyncio.sleep(0)
        await engine.close()
        ended = await asyncio.gather(running, waiting, return_exceptions=True)
        assert [type(error) for error in ended] == [EngineError, EngineError]
        with pytest.raises(EngineError, match="closed"):
            await engine.generate(tokens(1, 9), sampling())
        with pytest.raises(EngineError, match="closed"):
            await engine.receive_weights(1)
        await engine.close()


class _Gate:
    """Stands in a model's way: the engine's worker waits in the next forward until it opens."""

    def __init__(self, model: PreTrainedModel, error: Exception | None = None) -> None:
        self.is_reached = threading.Event()
        self._is_open = threading.Event()
        self._forward = model.base_model.forward
        self._error = error
        model.base_model.forward = self._wait

    def open(self) -> None:
        self._is_open.set()

    def _wait(self, *args: Any, **kwargs: Any) -> Any:
        self.is_reached.set()
        assert self._is_open.wait(20), "the test opens the gate"
        if self._error is not None:
            raise self._error
        return self._forward(*args, **kwargs)


async def test_a_turn_that_arrives_while_the_engine_closes_ends_too():
    """It was put into the line behind the order to stop, which nobody read to its end."""
    model = make_model()
    async with running_engine(model) as engine:
        gate = _Gate(model)
        running = asyncio.create_task(engine.generate(tokens(1, 9), sampling("a")))
        await asyncio.to_thread(gate.is_reached.wait, 20)
        closing = asyncio.create_task(engine.close())
        await asyncio.sleep(0)
        late = asyncio.create_task(engine.generate(tokens(2, 9), sampling("b")))
        publishing = asyncio.create_task(engine.receive_weights(1))
        await asyncio.sleep(0)
        gate.open()
        async with asyncio.timeout(20):
            ended = await asyncio.gather(running, late, publishing, return_exceptions=True)
            await closing
    assert [type(error) for error in ended[:2]] == [EngineError, EngineError]


async def test_a_crash_in_the_worker_reaches_every_caller():
    """Also the one in line behind the turn that crashed it, which used to wait for ever."""
    model = make_model()
    async with running_engine(model, num_slots=1, tile_rows=1) as engine:
        gate = _Gate(model, ZeroDivisionError("a bug in the model"))
        running = asyncio.create_task(engine.generate(tokens(1, 9), sampling("a")))
        await asyncio.to_thread(gate.is_reached.wait, 20)
        waiting = asyncio.create_task(engine.generate(tokens(2, 9), sampling("b")))
        await asyncio.sleep(0)
        gate.open()
        async with asyncio.timeout(20):
            ended = await asyncio.gather(running, waiting, return_exceptions=True)
            assert [str(error) for error in ended] == ["a bug in the model"] * 2
            with pytest.raises(ZeroDivisionError, match="a bug in the model"):
                await engine.generate(tokens(1, 9), sampling())
            with pytest.raises(ZeroDivisionError, match="a bug in the model"):
                await engine.receive_weights(1)


async def test_two_turns_of_one_episode_at_a_time_are_a_bug_that_is_said():
    """The second took the slot from under the first, which then was never answered."""
    async with running_engine() as engine:
        first = asyncio.create_task(engine.generate(tokens(1, 9), sampling("a")))
        await asyncio.sleep(0)
        with pytest.raises(AssertionError, match="two turns of the episode a at once"):
            await engine.generate(tokens(1, 9), sampling("a"))
        assert len((await first).token_ids_T) == 8


async def test_the_number_of_threads_changes_no_bit():
    plan = replace(PLAN, num_prompt=150, turns=((30, 90), (30, 0)))
    played = []
    for num_threads in (1, 2):
        settings = EngineConfig(num_slots=8, tile_rows=8, prefill_bucket=32)
        model = new_model(VOCABULARY, 128, 2, 4, 2, MAX_TOKENS, seed=0).eval()
        engine = TorchEngine(model, LETTERS, settings, MAX_TOKENS, num_threads)
        played.append(await play(engine, plan))
        await engine.close()
    assert played[0] == played[1]
