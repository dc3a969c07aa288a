"""A policy behind ``/v1/completions``: token ids out, the sampled token ids back.

For servers that return ids (vLLM and SGLang with ``return_token_ids``), so a turn is what the model
sampled, token by token, with the log-probabilities it was sampled at, and what the model saw is the
transcript to the token. A server that returns none, or reads the prompt otherwise, is refused.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

from forage.environment.codec import Codec
from forage.environment.vocabulary import num_token_ids
from forage.errors import UserError
from forage.remote.openai_replies import read_completion
from forage.remote.request import BadReply
from forage.rollout.engines.endpoint_client import EndpointClient
from forage.rollout.engines.engine import EngineCounters
from forage.rollout.engines.servers.engine_http import refuse_impossible
from forage.rollout.engines.torch.sampling import noise_key
from forage.types import Completion, EngineError, Sampling, Tag

PROBE = "The capital of France is Paris, and the capital of Italy is"
PROBE_TOKENS = 8


class CompletionsEngine:
    """Samples turns over HTTP; the server holds the weights, which are never replaced."""

    counters = EngineCounters()  # nothing is counted here

    def __init__(self, client: EndpointClient, codec: Codec) -> None:
        self._client = client
        self._codec = codec
        self._num_ids = num_token_ids(codec.tokenizer)

    async def generate(self, token_ids: Sequence[int], sampling: Sampling) -> Completion:
        """Sample one turn; raises ``EngineError``."""
        completion, _ = await self._ask(token_ids, sampling)
        return completion

    def release(self, episode_key: str) -> None:
        """Nothing is kept here; the server manages its prefix cache itself."""

    async def check(self, max_tokens: int) -> None:
        """Ask for a few tokens before anything depends on it; raises ``UserError``.

        The server must be there, return ids, have the tokenizer of ``model.path``, and hold
        episodes of ``max_tokens`` tokens.
        """
        models = await self._client.list_models()
        name = self._client.settings.served_model
        longest = models.max_tokens_of(name) if models is not None else None
        if longest is not None and longest < max_tokens:
            raise UserError(
                f"the endpoint serves {name} with a context of {longest} tokens, and "
                f"environment.max_tokens is {max_tokens}; lower it"
            )
        prompt_ids = self._codec.encode_trusted(PROBE)
        probe = Sampling(PROBE_TOKENS, (Tag.ANSWER.closing,), self._codec.eos_ids, "probe", 0, 0.0)
        try:
            completion, text = await self._ask(prompt_ids, probe)
        except EngineError as failure:
            raise await self._client.explain(failure) from failure
        decoded = self._codec.decode(completion.token_ids_T)
        if not reads_alike(decoded, text):
            raise UserError(
                f"the tokens of the endpoint's {name} read {decoded!r} in the tokenizer of "
                f"model.path, and the endpoint reads {text!r}: name the served model's own "
                "tokenizer with model.path"
            )

    async def close(self) -> None:
        """End the session."""
        await self._client.close()

    async def _ask(self, token_ids: Sequence[int], sampling: Sampling) -> tuple[Completion, str]:
        body = self._body(list(token_ids), sampling)
        limits = {"max_tokens": sampling.max_tokens, "num_ids": self._num_ids}
        read = partial(_read_turn, sent=list(token_ids), **limits)
        return await self._client.ask("/completions", body, read)

    def _body(self, token_ids: list[int], sampling: Sampling) -> dict[str, Any]:
        """The request. Every knob of the distribution is named.

        Left out, vLLM would take the defaults of the model's generation_config.json. The stop
        strings stay in the text (``include_stop_str_in_output`` is vLLM's word, ``no_stop_trim``
        SGLang's).
        """
        return {
            "model": self._client.settings.served_model,
            "prompt": token_ids,
            **common_knobs(sampling),
            "max_tokens": sampling.max_tokens,
            "top_k": -1,
            "seed": request_seed(sampling, len(token_ids)),
            "include_stop_str_in_output": True,
            "no_stop_trim": True,
            "logprobs": 1,
            "return_token_ids": True,
            **self._client.settings.extra,
        }


def reads_alike(mine: str, theirs: str) -> bool:
    """Whether two tokenizers read the same; an end within a character each shows in its own way."""
    return mine.rstrip("\ufffd").strip() == theirs.rstrip("\ufffd").strip()


def common_knobs(sampling: Sampling) -> dict[str, Any]:
    """What a turn is sampled with, where all servers spell it alike."""
    return {
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "min_p": 0.0,
        "repetition_penalty": 1.0,
        "stop": list(sampling.stop),
        "stop_token_ids": list(sampling.stop_ids),
        "skip_special_tokens": False,
    }


def request_seed(sampling: Sampling, position: int) -> int:
    """A seed for one request, of the run's seed, the episode and the position: 0 to 2**31 - 1."""
    return (noise_key(sampling.seed, sampling.episode_key) + position) % 2**31


def _read_turn(
    document: dict[str, Any], sent: list[int], max_tokens: int, num_ids: int
) -> tuple[Completion, str]:
    """The turn and its text, if it is whole and follows what was sent; raises ``BadReply``."""
    choice = read_completion(document)
    end = choice.end
    if choice.token_ids is None:
        raise BadReply(
            "the server returns no token ids (return_token_ids: vLLM and SGLang of 2026 do); with "
            "model.endpoint.form: chat its texts are enough",
            may_pass=False,
        )
    if choice.prompt_token_ids is not None and choice.prompt_token_ids != sent:
        raise BadReply("the server changed the prompt's tokens", may_pass=False)
    if len(choice.token_ids) > max_tokens:
        raise BadReply(f"{len(choice.token_ids)} tokens came where {max_tokens} were asked for")
    told = choice.logprobs.token_logprobs if choice.logprobs is not None else []
    logprobs = tuple(logprob for logprob in told if logprob is not None)
    if len(logprobs) != len(choice.token_ids):
        raise BadReply(f"{len(choice.token_ids)} tokens came with {len(logprobs)} probabilities")
    if wrong := [token_id for token_id in choice.token_ids if not 0 <= token_id < num_ids]:
        raise BadReply(f"the id {wrong[0]} came, and the ids of model.path end at {num_ids - 1}")
    try:
        refuse_impossible(logprobs)
    except ValueError as error:
        raise BadReply(str(error)) from None
    # The server's weights are one version, as those of any evaluation.
    versions = (0,) * len(logprobs)
    return Completion(tuple(choice.token_ids), logprobs, versions, end), choice.text
