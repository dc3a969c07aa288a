"""Computes the resources a run needs, whether a cluster has them, and which settings would fit.

A bundle is a set of resources on one machine: the CPUs and GPUs of one rank or one server. Servers
that share the trainer's GPUs need no bundle: they run where the ranks are.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby

from forage.config.placement_config import PlacementConfig, RayCluster


@dataclass(frozen=True, slots=True)
class Bundle:
    """CPUs and GPUs that are needed or available on one machine."""

    cpus: float
    gpus: float

    def __str__(self) -> str:
        return f"{self.cpus:g} CPUs and {self.gpus:g} GPUs"


def shares_places(placement: PlacementConfig, on_gpus: bool) -> bool:
    """Whether servers run on the ranks' machines and GPUs."""
    return placement.num_servers > 0 and (
        placement.engine.offload or (on_gpus and not placement.own_gpus)
    )


def bundles_of(placement: PlacementConfig, on_gpus: bool) -> list[Bundle]:
    """Lists a bundle per rank, then a bundle per server unless servers share the ranks' places."""
    assert isinstance(placement.cluster, RayCluster), "only Ray places actors"
    cpus = placement.cluster.cpus_each
    bundles = [Bundle(cpus, float(on_gpus))] * (placement.num_ranks or 0)
    if not shares_places(placement, on_gpus):
        gpus = placement.engine.tensor_parallel * on_gpus
        bundles += [Bundle(cpus, float(gpus))] * placement.num_servers
    return bundles


def fit(bundles: Sequence[Bundle], machines: Sequence[Bundle]) -> bool:
    """Whether all bundles fit on the machines, placing the largest first."""
    return _place(bundles, machines) is not None


def gpu_groups(machine_of_R: Sequence[Hashable], size: int) -> list[range]:
    """Groups ranks whose GPUs a shared server of ``size`` GPUs can use, all on one machine.

    Ranks are numbered machine by machine. For two machines with six ranks each and ``size`` 4, the
    groups are ranks 0 to 3 and 6 to 9.
    """
    groups: list[range] = []
    first = 0
    for _, ranks in groupby(machine_of_R):
        end = first + len(list(ranks))
        groups += [range(at, at + size) for at in range(first, end - size + 1, size)]
        first = end
    return groups


def nearest_fit(placement: PlacementConfig, on_gpus: bool, machines: Sequence[Bundle]) -> list[str]:
    """The smallest overrides that make the placement fit; empty if none do.

    It tries fewer CPUs per bundle first, which only slows the run down, then fewer ranks, and then
    fewer servers.
    """
    bundles = bundles_of(placement, on_gpus)

    def fits_with(cpus: float) -> bool:
        smaller = [Bundle(cpus, each.gpus) for each in bundles]
        return _have_room(placement, on_gpus, smaller, machines)

    if fits_with(0.0):
        share = int(100 * sum(each.cpus for each in machines) / len(bundles)) / 100
        while share >= 0.05:
            if fits_with(share):
                return [f"placement.cluster.cpus_each={share:g}"]
            share = int(50 * share) / 100
    for num_servers, num_ranks in _fewer(placement):
        smaller = _resized(placement, num_ranks, num_servers)
        if _have_room(smaller, on_gpus, bundles_of(smaller, on_gpus), machines):
            changes = [f"placement.trainer.num_ranks={num_ranks}"]
            if num_servers:
                changes.append(f"placement.engine.num_servers={num_servers}")
            return changes
    return []


def _have_room(
    placement: PlacementConfig,
    on_gpus: bool,
    bundles: Sequence[Bundle],
    machines: Sequence[Bundle],
) -> bool:
    """Whether all bundles fit, and each shared server finds its GPUs on one machine."""
    places = _place(bundles, machines)
    if places is None:
        return False
    if not (on_gpus and shares_places(placement, on_gpus)):
        return True
    groups = gpu_groups(sorted(places), placement.engine.tensor_parallel)
    return placement.num_servers <= len(groups)


def _place(bundles: Sequence[Bundle], machines: Sequence[Bundle]) -> list[int] | None:
    """The index of each bundle's machine; None if they do not fit."""
    free, places = list(machines), [0] * len(bundles)
    largest_first = sorted(
        range(len(bundles)), key=lambda i: (bundles[i].gpus, bundles[i].cpus), reverse=True
    )
    for index in largest_first:
        bundle = bundles[index]
        for number, machine in enumerate(free):
            if machine.gpus >= bundle.gpus and machine.cpus >= bundle.cpus:
                free[number] = Bundle(machine.cpus - bundle.cpus, machine.gpus - bundle.gpus)
                places[index] = number
                break
        else:
            return None
    return places


def _fewer(placement: PlacementConfig) -> Iterator[tuple[int, int]]:
    """Yields smaller (servers, ranks) that the placement's other keys allow, largest first."""
    trainer, most = placement.learning, placement.num_ranks or 0
    for num_servers in range(placement.num_servers, min(1, placement.num_servers) - 1, -1):
        for num_ranks in range(most, 0, -1):
            tensor = trainer.tensor_parallel
            is_cut = not any(
                num_ranks % (each * tensor)
                for each in (trainer.replicas, trainer.sequence_parallel)
            )
            if is_cut:
                yield num_servers, num_ranks


def _resized(placement: PlacementConfig, num_ranks: int, num_servers: int) -> PlacementConfig:
    trainer = placement.learning.model_copy(update={"num_ranks": num_ranks})
    engine = placement.engine
    if engine.kind != "torch" and num_servers:
        engine = engine.model_copy(update={"num_servers": num_servers})
    return placement.model_copy(update={"trainer": trainer, "engine": engine})
