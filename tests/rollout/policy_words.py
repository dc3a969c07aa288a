"""The protocol of the stand-in for a vLLM server: what it accepts, refuses and returns.

It is vLLM 0.32's, as far as Forage reads it: ``test_vllm_contract.py`` tests both. The server's
state is in ``policy_server.py``.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import fields
from typing import Annotated, Any, Literal

from fastapi import HTTPException, Request, Response
from fastapi.responses import JSONResponse
from pydantic import BaseModel, Field

from forage.rollout.engines.servers.engine_server import JoinInfo, Tensors

VOCABULARY = 50
JOIN = {each.name for each in fields(JoinInfo)}
BUCKET = {*(each.name for each in fields(Tensors)), "starts", "num_bytes"}
METHODS: dict[str, set[str]] = {
    "receiver_version": set(),
    "name_gpu": set(),
    "check_weights": {"names", "shapes"},
    "first_columns": {"names"},
    "load_from_disk": {"folder"},
    "load_adapters": {"folder"},
    "abandon_weight_update": set(),
    "reload_weights": {"weights_path", "weights_iterator"},
    "get_model_inspection": set(),
}
"""Methods of its workers, and the arguments of each."""


class Knobs(BaseModel):
    """Those of vLLM's sampling parameters that the stand-in implements."""

    max_tokens: int = Field(16, ge=1)
    temperature: float = Field(1.0, ge=0)
    top_p: float = Field(1.0, gt=0, le=1)
    logprobs: int = 0
    prompt_logprobs: int | None = None
    stop_token_ids: list[int] = []


class Turn(BaseModel):
    """The request of ``/inference/v1/generate``."""

    token_ids: list[Annotated[int, Field(ge=0)]] = Field(min_length=1)
    sampling_params: Knobs
    cache_salt: str | None = Field(None, pattern=r"^[^@/\\\x00]{1,128}$")
    model: str = "policy"
    output_mode: Literal["tokens", "text"] = "tokens"


def refuse(turn: Turn, models: Collection[str], room: int, num_ids: int | None, most: int) -> None:
    """Raises ``HTTPException`` for what vLLM refuses once it has read the turn.

    ``room`` is its context in tokens, ``num_ids`` its vocabulary (None if unknown), and ``most``
    its maximum number of log-probabilities.
    """
    if turn.model not in models:
        raise HTTPException(404, f"The model `{turn.model}` does not exist.")
    if turn.sampling_params.logprobs > most:
        said = f"Requested sample logprobs of {turn.sampling_params.logprobs}"
        raise HTTPException(400, f"{said}, which is greater than max allowed: {most}")
    for token_id in _unknown([*turn.token_ids, *turn.sampling_params.stop_token_ids], num_ids):
        raise HTTPException(400, f"Token id {token_id} is out of vocabulary")
    if (length := len(turn.token_ids)) >= room:
        more = "" if length > room else " plus the number of requested output tokens (at least 1)"
        said = f"The decoder prompt (length {length}){more} is longer than the maximum model length"
        raise HTTPException(400, f"{said} of {room}.")


def _unknown(token_ids: Sequence[int], num_ids: int | None) -> Iterator[int]:
    return (each for each in token_ids if num_ids is not None and each >= num_ids)


def choice_of(turn: Turn, version: str, room: int) -> dict[str, Any]:
    """The model's turn: ``last id + 1`` and so on, up to a stop token or the end of a limit."""
    knobs, last = turn.sampling_params, turn.token_ids[-1]
    ids: list[int] = []
    reason = "length"
    for index in range(min(knobs.max_tokens, room - len(turn.token_ids))):
        ids.append((last + 1 + index) % VOCABULARY)
        if ids[-1] in knobs.stop_token_ids:
            reason = "stop"
            break
    content = [
        {"logprob": -0.5 - index, "top_logprobs": _candidates(knobs.logprobs, index, token_id)}
        for index, token_id in enumerate(ids)
    ]
    return {
        "token_ids": ids,
        "finish_reason": reason,
        "logprobs": {"content": content},
        "weight_versions": [{"version": version, "start": 0, "end": len(ids)}],
    }


ABORTED: dict[str, Any] = {
    "token_ids": [],
    "finish_reason": "abort",
    "logprobs": {"content": []},
    "weight_versions": [],
}
"""The choice of a turn that was aborted before its first token."""


def _candidates(number: int, index: int, sampled: int) -> list[dict[str, float]]:
    """Like vLLM: the sampled token first, even if none is requested, and the total number.

    Tokens 0 and 1 are the likeliest, and all others but the sampled one were cut off.
    """
    others = [(0, -0.0 - index), (1, -0.25 - index), *((40 + k, -9999.0) for k in range(number))]
    said = [(sampled, -0.5 - index), *others][: max(1, number)]
    return [{"token_id": token_id, "logprob": logprob} for token_id, logprob in said]


def said_of_text(token_ids: Sequence[int], logprobs: Sequence[float]) -> list[Any]:
    """The log-probabilities of a prompt's tokens: by token id, none for the first."""
    rows = zip(token_ids[1:], logprobs, strict=True)
    return [None, *({str(token_id): {"logprob": logprob}} for token_id, logprob in rows)]


def refused(request: Request, why: Any) -> Response:
    """The document of an ``HTTPException``."""
    status = why.status_code
    return JSONResponse({"error": {"message": why.detail, "code": status}}, status)


def misunderstood(request: Request, why: Any) -> Response:
    """The document for a body or a parameter of the wrong type: 400, where FastAPI returns 422."""
    return JSONResponse({"error": {"message": str(why.errors()), "code": 400}}, 400)
