"""The gradient of a batch from its micro-batches: one at a time on a GPU, some at once on a CPU.

A small model's operations are too short to be shared between cores, so by default each core
computes a whole micro-batch. A larger one may have fewer at once (``at_once``), which share the
cores. Gradients are added in the order of the micro-batches, so that with a core for each the
result does not depend on the number of cores.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import TypeVar

import torch
from torch import Tensor, nn

from forage.batch import Rows
from forage.hardware import (
    compute_with,
    give_back_freed_memory,
    keep_freed_memory,
    num_cores,
)
from forage.training.ranks.sharding import Ranks

T = TypeVar("T")

Loss = Callable[[], tuple[Tensor, T]]
"""Computes a micro-batch's share of the loss, and a report about it."""
_SMALL_MODEL = 10_000_000
"""Parameters up to which what a batch frees is kept for the next one: some hundred megabytes."""


def accumulate(
    model: nn.Module, losses: Sequence[Loss[T]], at_once: int | None = None
) -> list[tuple[float, T]]:
    """Set the parameters' ``grad`` to the gradient of the sum of ``losses``.

    Returns each loss's value and report, in order. Raises what a loss raises. ``at_once`` None
    is one for each core, or one on a GPU.
    """
    parameters = [p for p in model.parameters() if p.requires_grad]
    for parameter in parameters:
        parameter.grad = None
    if not losses:
        return []
    if parameters[0].device.type != "cpu":
        return [_added(loss_of) for loss_of in losses]
    keep_freed_memory()

    def differentiate(loss_of: Loss[T]) -> tuple[float, T, Sequence[Tensor]]:
        loss, report = loss_of()
        return loss.item(), report, torch.autograd.grad(loss, parameters)

    results: list[tuple[float, T]] = []
    with _pool(at_once) as pool:
        for value, report, gradients in pool.map(differentiate, losses):
            results.append((value, report))
            for parameter, gradient in zip(parameters, gradients, strict=True):
                if parameter.grad is None:
                    parameter.grad = gradient.clone()
                else:
                    parameter.grad += gradient
    if sum(parameter.numel() for parameter in model.parameters()) > _SMALL_MODEL:
        give_back_freed_memory()
    return results


def gradient(
    root: nn.Module,
    rows: Sequence[Rows],
    loss_of: Callable[[Rows], tuple[Tensor, T]],
    ranks: Ranks | None,
    at_once: int | None = None,
) -> list[tuple[float, T]]:
    """Set the parameters' ``grad`` to that of the micro-batches' sum, in one process or in ranks.

    Returns each micro-batch's value and report, in order.
    """
    if ranks is not None:
        return ranks.accumulate(root, rows, loss_of)
    return accumulate(root, [partial(loss_of, each) for each in rows], at_once)


def clip_gradient(root: nn.Module, max_norm: float, ranks: Ranks | None) -> float:
    """Scale the gradient to ``max_norm`` at most; returns its norm before, over all ranks."""
    if ranks is not None:
        return ranks.clip(root, max_norm)
    return nn.utils.clip_grad_norm_(root.parameters(), max_norm).item()


def evaluate(
    device: torch.device, functions: Sequence[Callable[[], T]], at_once: int | None = None
) -> list[T]:
    """The value of each function, without gradients, in order. Raises what a function raises."""

    def run(function: Callable[[], T]) -> T:
        with torch.no_grad():  # a setting of this thread alone
            return function()

    if device.type != "cpu":
        return [run(function) for function in functions]
    with _pool(at_once) as pool:
        return list(pool.map(run, functions))


def means(reports: Sequence[Mapping[str, Tensor]], num_tokens: int) -> dict[str, float]:
    """Means over the batch's tokens of what each micro-batch reports about its own [M]."""
    totals: dict[str, float] = {}
    for report in reports:
        for name, values_M in report.items():
            totals[name] = totals.get(name, 0.0) + values_M.sum().item() / num_tokens
    return totals


def _added(loss_of: Loss[T]) -> tuple[float, T]:
    """Add the gradient of one loss to the parameters' ``grad``; returns its value and report.

    Each parameter's share is let go of once it is added: there is no second set of gradients.
    """
    loss, report = loss_of()
    loss.backward()
    return loss.item(), report


def _pool(at_once: int | None) -> ThreadPoolExecutor:
    """As many threads as micro-batches are learnt at once, each with its share of the cores."""
    at_once = at_once or num_cores()
    share = max(1, num_cores() // at_once)
    return ThreadPoolExecutor(at_once, initializer=compute_with, initargs=(share,))
