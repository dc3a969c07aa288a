"""Against a real vLLM server: what it samples, and what new weights do to it.

Each trap that once killed a server, or was wrong without a word, has a test here.
"""

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedModel, PreTrainedTokenizerFast

from forage.config.model_config import LoraConfig, ModelConfig
from forage.environment.codec import Codec
from forage.errors import UserError
from forage.publish import open_updates
from forage.rollout.engines.engine_server import Addresses, ServerFailed, Tensors
from forage.rollout.engines.open_engine import open_engine
from forage.rollout.engines.served_engine import ServedEngine
from forage.rollout.engines.server_pool import ServerPool
from forage.rollout.engines.torch.stopping import StopTable
from forage.rollout.engines.vllm_probe import find_faults
from forage.rollout.engines.vllm_server import VllmServer, _is_unknown
from forage.rollout.engines.vllm_sizes import sizes_of
from forage.rollout.engines.weight_sender import WeightSender, in_buckets, tensors_of
from forage.rollout.engines.weight_transports import (
    DiskTransport,
    GroupTransport,
    check_base,
    load_adapters,
)
from forage.rollout.engines.weight_update import ServerUpdates
from forage.training import lora
from forage.training.model import load_tokenizer, shapes_by_name, weights_by_name
from forage.training.saved_weights import write_merged
from forage.types import Completion, ContextOverflow, FinishReason, Sampling
from tests.fakes import tiny_codec
from tests.rollout.loop_with_delays import LoopWithDelays, check_bound
from tests.tiny_runs import MAX_TOKENS, random_model
from tests.vllm_server import needs_vllm, real_server, served_config

pytestmark = needs_vllm

CPU = torch.device("cpu")
PROMPT = list(range(20, 60))


def tokenizer() -> PreTrainedTokenizerFast:
    return load_tokenizer(ModelConfig(path=str(random_model())))


def ask(key: str = "0/q/0", **changes: Any) -> Sampling:
    fields: dict[str, Any] = {
        "max_tokens": 24,
        "stop": (),
        "stop_ids": (0,),
        "episode_key": key,
        "seed": 7,
    }
    return Sampling(**{**fields, **changes})


class Served:
    """The real server with the weights of ``model``, which ``change`` makes other ones."""

    def __init__(self, timeout_s: float = 20.0) -> None:
        self.model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(random_model())
        self.server = VllmServer(real_server(), 120.0, timeout_s, 64)
        self.pool = ServerPool([self.server], 60.0)
        self.engine = ServedEngine(self.pool)
        self.sender = WeightSender(lambda: weights_by_name(self.model), CPU)
        self.transport = GroupTransport(self.sender, timeout_s)
        self.updates = ServerUpdates(self.pool, self.transport, recomputes=True)
        self.version = 0
        self.models: dict[int, PreTrainedModel] = {}

    def change(self, scale: float = 0.3) -> None:
        """Other weights, so large that each token matters; the old ones are kept by version."""
        torch.manual_seed(self.version)
        with torch.no_grad():
            for weight in self.model.parameters():
                weight += (
                    scale * weight.std().nan_to_num(1.0).clamp(min=0.1) * torch.randn_like(weight)
                )
        self.version += 1

    async def publish(self) -> None:
        async with self.updates.updating(lambda: self.version):
            pass
        copy = AutoModelForCausalLM.from_config(self.model.config)
        copy.load_state_dict(self.model.state_dict())
        self.models[self.version] = copy.eval()

    def logprobs(
        self, prompt: Sequence[int], completion: Completion, temperature: float = 1.0
    ) -> Tensor:
        """What the policy of the last version says of the sampled tokens."""
        return logprobs_of(self.model, prompt, completion.token_ids_T, temperature)


def logprobs_of(
    model: PreTrainedModel, prompt: Sequence[int], sampled: Sequence[int], temperature: float = 1.0
) -> Tensor:
    with torch.no_grad():
        logits = model(torch.tensor([[*prompt, *sampled]])).logits[0].double() / temperature
    return torch.log_softmax(logits, -1)[len(prompt) - 1 : -1].gather(
        1, torch.tensor(sampled)[:, None]
    )[:, 0]


def difference(completion: Completion, expected: Tensor) -> float:
    return (torch.tensor(completion.logprobs_T).double() - expected).abs().max().item()


@asynccontextmanager
async def served(**settings: Any) -> AsyncIterator[Served]:
    """With its first, changed weights published."""
    it = Served(**settings)
    it.change()
    await it.publish()
    try:
        yield it
    finally:
        await it.engine.close()


async def test_log_probabilities_are_those_of_the_weights_that_were_pushed():
    """Tied heads on a CPU once gave the logits of the old head after every reload."""
    async with served() as it:
        assert it.model.config.tie_word_embeddings
        for _ in range(2):
            completion = await it.engine.generate(PROMPT, ask(f"{it.version}"))
            assert completion.versions_T == (it.version,) * len(completion.token_ids_T)
            assert difference(completion, it.logprobs(PROMPT, completion)) < 1e-4
            before = completion
            it.change()
            await it.publish()
            assert difference(before, it.logprobs(PROMPT, before)) > 0.05, "the weights are others"


async def test_alternatives_are_the_likeliest_tokens_of_the_weights_that_were_pushed():
    async with served() as it:
        completion = await it.engine.generate(PROMPT, ask(num_alternatives=3))
        assert len(completion.alternatives_T) == len(completion.token_ids_T)
        with torch.no_grad():
            ids = torch.tensor([[*PROMPT, *completion.token_ids_T]])
            logprobs_TV = torch.log_softmax(it.model(ids).logits[0].double(), -1)
        for place, others in enumerate(completion.alternatives_T):
            expected = logprobs_TV[len(PROMPT) - 1 + place].topk(3)
            assert [token for token, _ in others] == expected.indices.tolist()
            given = torch.tensor([logprob for _, logprob in others]).double()
            assert (given - expected.values).abs().max().item() < 1e-3


async def test_log_probabilities_are_those_that_were_sampled_from_also_when_it_is_cold():
    """Raw ones, before the temperature, would be a constant bias of the probability ratio."""
    async with served() as it:
        completion = await it.engine.generate(PROMPT, ask(temperature=0.6))
        assert difference(completion, it.logprobs(PROMPT, completion, 0.6)) < 1e-4
        assert difference(completion, it.logprobs(PROMPT, completion)) > 0.05


async def test_a_seed_gives_the_same_turn_alone_and_among_sixteen():
    async with served() as it:
        alone = await it.engine.generate(PROMPT, ask("0/q/3"))
        keys = [f"0/q/{number}" for number in range(16)]
        turns = await asyncio.gather(*(it.engine.generate(PROMPT, ask(key)) for key in keys))
    assert turns[3] == alone
    assert len({turn.token_ids_T for turn in turns}) == 16


async def test_a_turn_ends_with_the_token_that_completes_a_stop_string():
    table = StopTable.of(tokenizer())
    async with served() as it:
        whole = await it.engine.generate(PROMPT, ask())
        text = table.text_bytes(whole.token_ids_T[6:9]).decode("utf-8", "ignore")
        stop = text.strip("\ufffd")[-2:]
        assert stop
        cut = await it.engine.generate(PROMPT, ask(stop=(stop,)))
    number = len(cut.token_ids_T)
    assert cut.token_ids_T == whole.token_ids_T[:number]
    assert cut.finish_reason is FinishReason.STOP
    assert [table.completes(cut.token_ids_T[:n], (stop,)) for n in range(1, number + 1)] == [
        *[False] * (number - 1),
        True,
    ]


async def test_a_prompt_beyond_the_context_is_a_typed_failure():
    async with served() as it:
        with pytest.raises(ContextOverflow):
            await it.engine.generate([5] * (MAX_TOKENS + 1), ask())
        assert it.pool.serving


async def test_turns_in_flight_go_on_under_the_new_weights_over_keys_computed_anew():
    """Each token bears the version that sampled it, and has that version's log-probability."""
    async with served() as it:
        completions: list[Completion] = []
        while not completions:  # on a busy machine turns may end before the update comes
            completions = await completions_across_an_update(it)
        for completion in completions:
            first, second = it.version - 1, it.version
            versions = torch.tensor(completion.versions_T)
            for version in (first, second):
                expected = logprobs_of(it.models[version], PROMPT, completion.token_ids_T)
                differing = (torch.tensor(completion.logprobs_T).double() - expected).abs()
                assert differing[versions == version].max() < 5e-4
                assert differing[versions != version].max() > 0.05


async def completions_across_an_update(it: Served) -> list[Completion]:
    """Turns that were in flight when new weights came, those that ended before left out."""
    samplings = [ask(f"{it.version}/{n}", max_tokens=300, stop_ids=()) for n in range(3)]
    turns = [asyncio.create_task(it.engine.generate(PROMPT, each)) for each in samplings]
    turns.append(await in_flight(it.engine, it.server, f"{it.version}/last"))
    it.change()
    await it.publish()
    return [each for each in await asyncio.gather(*turns) if len(set(each.versions_T)) == 2]


async def test_no_episode_reads_the_keys_of_one_that_began_under_older_weights():
    """Blocks of 128 tokens stay cached where keys are kept; the salt keeps others off them."""
    prompt = [20 + index % 300 for index in range(200)]
    async with served() as it:
        it.updates = ServerUpdates(it.pool, it.transport, recomputes=False)
        await it.engine.generate(prompt, ask("old"))
        it.change()
        await it.publish()
        new = await it.engine.generate(prompt, ask("new"))
        assert difference(new, it.logprobs(prompt, new)) < 1e-4
        old = await it.engine.generate(prompt, ask("old"))
        assert difference(old, it.logprobs(prompt, old)) > 1e-2, "it goes on over its own old keys"


async def test_another_model_is_refused_before_the_first_byte_and_the_server_lives_on():
    """After a wrong shape only a restart helped."""
    async with served() as it:
        wrong = [
            *list(weights_by_name(it.model))[1:],
            ("model.norm.weight", torch.zeros(7)),
            ("model.other.weight", torch.zeros(3)),
        ]
        it.transport = GroupTransport(WeightSender(lambda: wrong, CPU), 20.0)
        updates = ServerUpdates(it.pool, it.transport, recomputes=True)
        with pytest.raises(UserError, match="serves another model than model.path") as error:
            async with updates.updating(lambda: 9):
                pass
        for part in ("embed_tokens.weight is missing", "norm.weight has the shape", "other.weight"):
            assert part in str(error.value)
        completion = await it.engine.generate(PROMPT, ask("after"))
        assert difference(completion, it.logprobs(PROMPT, completion)) < 1e-4


async def half_an_update(it: Served) -> None:
    """The first weights come, and no others."""
    await it.server.start_update()
    it.sender._buckets = in_buckets(weights_by_name(it.model), max_bytes=60_000)
    bucket = it.sender.next_bucket()
    assert bucket is not None
    await asyncio.gather(asyncio.to_thread(it.sender.send), it.server.receive(bucket))


async def test_an_update_that_ends_half_way_leaves_a_server_that_takes_the_next_one():
    """The next request after a half-failed update once ended the server."""
    async with served() as it:
        it.change()
        await half_an_update(it)
        await it.server.abandon_update()
        await it.engine.generate(PROMPT, ask("between"))  # of half new weights, but it lives
        await it.publish()
        completion = await it.engine.generate(PROMPT, ask("after"))
        assert difference(completion, it.logprobs(PROMPT, completion)) < 1e-4


async def test_a_trainer_that_vanishes_in_a_broadcast_is_an_error_in_time_and_no_hang():
    async with served(timeout_s=8.0) as it:
        await it.server.pause()
        await it.server.start_update()
        it.sender.begin()
        bucket = it.sender.next_bucket()
        assert bucket is not None
        started = asyncio.get_running_loop().time()
        with pytest.raises(Exception, match="failed to receive weights"):
            await it.server.receive(bucket)  # and nothing is sent
        assert asyncio.get_running_loop().time() - started < 20
        await it.server.abandon_update()
        await it.server.resume()
        it.transport._joined = []
        it.change()
        await it.publish()
        completion = await it.engine.generate(PROMPT, ask("after"))
        assert difference(completion, it.logprobs(PROMPT, completion)) < 1e-4


async def test_an_update_that_a_killed_run_left_open_does_not_end_the_server_of_the_next():
    """The next run asked it to sample, and the turn met layers without weights."""
    async with served() as it:
        await it.server.pause()
        await half_an_update(it)
        it.sender.leave()  # the trainer is gone
    config = served_config(Path("none"), real_server())
    model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(random_model())
    async with (
        open_engine(config, tokenizer(), model, Addresses((real_server(),))) as engine,
        open_updates(config, engine, model) as updates,
    ):
        async with updates.updating(lambda: 1):
            pass
        completion = await engine.generate(PROMPT, ask("next"))
    expected = logprobs_of(model, PROMPT, completion.token_ids_T)
    assert difference(completion, expected) < 1e-4


async def test_a_folder_that_cannot_be_loaded_leaves_a_server_that_lives_on(tmp_path: Path):
    """Layers had no weights, and the next turn ended the server."""
    async with served() as it:
        with pytest.raises(ServerFailed, match="failed to load"):
            await it.server.load_from_disk(tmp_path, "9")
        completion = await it.engine.generate(PROMPT, ask("after"))
        assert difference(completion, it.logprobs(PROMPT, completion)) < 1e-4


async def test_vllms_own_words_are_understood():
    """What a server without the receiver is known by, and the sizes of its model."""
    server = VllmServer(real_server(), 20.0, 60.0, 4)
    with pytest.raises(ServerFailed) as failed:
        await server._call("no_such_method", {}, "do nothing")
    assert _is_unknown("no_such_method", failed.value)
    (drawing,) = await server._call("get_model_inspection", {}, "draw its model")
    await server.close()
    config = AutoModelForCausalLM.from_pretrained(random_model()).config.to_dict()
    sizes = sizes_of(drawing)
    assert sizes == {name: config[name] for name in sizes}
    assert {"vocab_size", "intermediate_size", "num_hidden_layers"} < sizes.keys()


async def test_a_worker_without_a_gpu_names_none():
    async with served() as it:
        assert await it.server.gpus() == [[]]


async def test_a_cancelled_turn_is_aborted_at_the_server():
    async with served() as it:
        turn = await in_flight(it.engine, it.server, "cancelled")
        turn.cancel()
        await asyncio.gather(turn, return_exceptions=True)
        async with asyncio.timeout(60):
            while await metric(it.server, "vllm:num_requests_running"):
                await asyncio.sleep(0.05)


async def in_flight(engine: ServedEngine, server: VllmServer, key: str) -> asyncio.Task[Completion]:
    """A long turn that the server samples at this moment; one that has ended is begun again."""
    while True:
        sampling = ask(key, max_tokens=300, stop_ids=())
        turn = asyncio.create_task(engine.generate(PROMPT, sampling))
        while not turn.done():
            if await metric(server, "vllm:num_requests_running"):
                return turn
            await asyncio.sleep(0.01)
        await turn


async def metric(server: VllmServer, name: str) -> float:
    """The sum of a metric over its labels."""
    import aiohttp

    async with aiohttp.ClientSession() as session, session.get(f"{server.url}/metrics") as reply:
        lines = (await reply.text()).splitlines()
    return sum(float(line.rsplit(" ", 1)[1]) for line in lines if line.startswith(name))


@pytest.mark.parametrize(("max_staleness", "seed"), [(0, 1), (1, 2), (2, 3)])
async def test_no_token_of_two_servers_is_older_than_the_bound(max_staleness: int, seed: int):
    """Under random delays of play, training and publish, while weights change in flight."""
    servers = [VllmServer(real_server(number), 120.0, 60.0, 64) for number in (0, 1)]
    pool = ServerPool(servers, 60.0)
    model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(random_model())
    transport = GroupTransport(WeightSender(lambda: weights_by_name(model), CPU), 60.0)
    updates, engine = ServerUpdates(pool, transport, recomputes=True), ServedEngine(pool)
    run = LoopWithDelays(engine, updates, model, max_staleness, seed, 0.5, num_tokens=100)
    try:
        steps = await run.run(5)
    finally:
        await engine.close()
    tokens = list(run.tokens(steps))
    check_bound(tokens, max_staleness)
    assert max(abs(token.logprob - token.expected) for token in tokens) < 1e-3


async def test_weights_also_travel_through_files_and_heads_are_the_new_ones(tmp_path: Path):
    async with served() as it:
        transport = DiskTransport(partial(write_merged, it.model), tmp_path)
        it.updates = ServerUpdates(it.pool, transport, recomputes=True)
        it.change()
        await it.publish()
        completion = await it.engine.generate(PROMPT, ask("disk"))
        assert completion.versions_T[0] == it.version
        assert difference(completion, it.logprobs(PROMPT, completion)) < 1e-4
    assert list(tmp_path.iterdir()) == []


async def test_adapters_travel_alone_and_turns_in_flight_go_on_with_the_new_ones(tmp_path: Path):
    """vLLM's own load in place brings back old adapters with each turn that began under them."""
    rank = 4
    url = real_server(0, lora_rank=rank)
    assert await find_faults(url, True, MAX_TOKENS, lora_rank=8) == []
    (too_small,) = await find_faults(url, True, MAX_TOKENS, lora_rank=9)
    assert "room for adapters of rank 8" in str(too_small)
    model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(random_model())
    lora.add_adapters(model, LoraConfig(rank=rank, alpha=rank), str(random_model()), seed=0)
    server = VllmServer(url, 120.0, 20.0, 64)
    pool = ServerPool([server], 60.0)
    engine, version = ServedEngine(pool), 0
    write = partial(lora.save_adapters, model)
    transport = DiskTransport(write, tmp_path, load_adapters)
    updates = ServerUpdates(pool, transport, recomputes=True)
    expected: dict[int, PreTrainedModel] = {}

    async def publish() -> None:
        nonlocal version
        version += 1
        torch.manual_seed(version)
        with torch.no_grad():
            for name, weight in model.named_parameters():
                if ".lora_" in name:
                    weight += 0.2 * torch.randn_like(weight)
        async with updates.updating(lambda: version):
            pass
        expected[version] = AutoModelForCausalLM.from_config(model.config).eval()
        expected[version].load_state_dict(dict(lora.merged_weights(model)), strict=False)
        expected[version].tie_weights()

    async def turn() -> Completion:
        """One under new adapters, checked."""
        await publish()
        completion = await engine.generate(PROMPT, ask(f"adapters {version}"))
        assert {*completion.versions_T} == {version}
        now = logprobs_of(expected[version], PROMPT, completion.token_ids_T)
        assert difference(completion, now) < 1e-4
        if version > 1:
            before = logprobs_of(expected[version - 1], PROMPT, completion.token_ids_T)
            assert difference(completion, before) > 0.05, "the adapters are others"
        return completion

    try:
        await turn()
        completion = await turn()
        while len({*completion.versions_T}) == 1:  # it may end before the update comes
            begun = await in_flight(engine, server, f"in flight at {version}")
            await publish()
            completion = await begun
        late = torch.tensor(completion.versions_T) == version
        now = logprobs_of(expected[version], PROMPT, completion.token_ids_T)
        sampled = torch.tensor(completion.logprobs_T).double()
        assert (sampled - now)[late].abs().max() < 1e-4
    finally:
        await engine.close()
    assert list(tmp_path.iterdir()) == []


async def test_a_base_of_another_checkpoint_is_refused_before_its_adapters_come():
    """Its shapes are the same: training went on, with log-probabilities off by 0.78."""
    model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(random_model())
    lora.add_adapters(model, LoraConfig(rank=4, alpha=4), str(random_model()), seed=0)
    server = VllmServer(real_server(0, lora_rank=4), 120.0, 20.0, 4)
    columns = lora.first_columns(model)
    tensors = tensors_of(shapes_by_name(model))
    await check_base(server, tensors, lambda: columns)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if name == "model.layers.1.self_attn.o_proj.base_layer.weight":
                weight *= 1.05
    other = r"another model than model.path: model.layers.1.\w+.o_proj"
    with pytest.raises(UserError, match=other):
        await check_base(server, tensors, partial(lora.first_columns, model))
    asked = await server._call("first_columns", {"names": list(columns)}, "tell")
    kinds = {name.rpartition(".")[2] for name in asked[0]}
    assert kinds == {"q_proj", "o_proj", "gate_proj", "down_proj"}
    await server.close()


async def test_a_server_as_it_should_be_has_no_fault_and_others_are_told_apart():
    url = real_server()
    assert await find_faults(url, True, MAX_TOKENS, Codec(tokenizer())) == []
    (longer,) = await find_faults(url, True, MAX_TOKENS + 1)
    assert str(longer) == (
        "its context of 384 tokens holds no episode (start it with --max-model-len 385, or lower "
        "environment.max_tokens)"
    )
    (other,) = await find_faults(url, True, 0, tiny_codec())
    assert "with model.path" in str(other)


async def test_the_workers_compare_each_name_and_shape():
    server = VllmServer(real_server(), 20.0, 20.0, 4)
    model = AutoModelForCausalLM.from_pretrained(random_model())
    weights = list(weights_by_name(model))
    assert await server.misfits(tensors_of(weights)) == []
    tied = [*weights, ("lm_head.weight", model.lm_head.weight)]
    assert await server.misfits(tensors_of(tied)) == []
    assert len(await server.misfits(Tensors(("a",), ("float32",), ((1,),)))) == len(weights) + 1
    await server.close()
