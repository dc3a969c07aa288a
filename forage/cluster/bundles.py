"""What ranks and servers ask of a cluster, whether machines have it, and which setting would fit.

A bundle is what one machine must have at once: the CPUs and GPUs of one rank or of one server.
Servers that share the trainer's GPUs ask for nothing: they stand where the ranks are.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from forage.config.placement_config import PlacementConfig, RayCluster


@dataclass(frozen=True, slots=True)
class Bundle:
    """CPUs and GPUs, asked for or there on one machine."""

    cpus: float
    gpus: float

    def __str__(self) -> str:
        return f"{self.cpus:g} CPUs and {self.gpus:g} GPUs"


def shares_places(placement: PlacementConfig, on_gpus: bool) -> bool:
    """Whether servers stand where the ranks are."""
    return placement.num_servers > 0 and (
        placement.engine.offload or (on_gpus and not placement.own_gpus)
    )


def bundles_of(placement: PlacementConfig, on_gpus: bool) -> list[Bundle]:
    """A bundle for each rank, then one for each server that has a place of its own."""
    assert isinstance(placement.cluster, RayCluster), "only Ray places actors"
    cpus = placement.cluster.cpus_each
    bundles = [Bundle(cpus, float(on_gpus))] * (placement.num_ranks or 0)
    if not shares_places(placement, on_gpus):
        gpus = placement.engine.tensor_parallel * on_gpus
        bundles += [Bundle(cpus, float(gpus))] * placement.num_servers
    return bundles


def fit(bundles: Sequence[Bundle], machines: Sequence[Bundle]) -> bool:
    """Whether the machines hold all bundles, the largest placed first."""
    free = list(machines)
    for bundle in sorted(bundles, key=lambda each: (each.gpus, each.cpus), reverse=True):
        for index, machine in enumerate(free):
            if machine.gpus >= bundle.gpus and machine.cpus >= bundle.cpus:
                free[index] = Bundle(machine.cpus - bundle.cpus, machine.gpus - bundle.gpus)
                break
        else:
            return False
    return True


def nearest_fit(placement: PlacementConfig, on_gpus: bool, machines: Sequence[Bundle]) -> list[str]:
    """Overrides after which the placement fits, the least change first; none where nothing does.

    First fewer CPUs for each, which slows them alone; then fewer ranks, then fewer servers.
    """
    bundles = bundles_of(placement, on_gpus)
    if fit([Bundle(0.0, each.gpus) for each in bundles], machines):
        share = int(100 * sum(each.cpus for each in machines) / len(bundles)) / 100
        while share >= 0.05:
            if fit([Bundle(share, each.gpus) for each in bundles], machines):
                return [f"placement.cluster.cpus_each={share:g}"]
            share = int(50 * share) / 100
    for num_servers, num_ranks in _fewer(placement):
        smaller = _resized(placement, num_ranks, num_servers)
        if fit(bundles_of(smaller, on_gpus), machines):
            changes = [f"placement.trainer.num_ranks={num_ranks}"]
            if num_servers:
                changes.append(f"placement.engine.num_servers={num_servers}")
            return changes
    return []


def _fewer(placement: PlacementConfig) -> Iterator[tuple[int, int]]:
    """(servers, ranks) that the placement's other keys allow, the most first."""
    trainer, most = placement.trainer, placement.num_ranks or 0
    for num_servers in range(placement.num_servers, min(1, placement.num_servers) - 1, -1):
        for num_ranks in range(most, 0, -1):
            tensor = trainer.tensor_parallel
            is_cut = not any(
                num_ranks % (each * tensor)
                for each in (trainer.replicas, trainer.sequence_parallel)
            )
            has_place = num_servers * placement.engine.tensor_parallel <= num_ranks
            if is_cut and (has_place or placement.own_gpus or placement.num_gpus == 1):
                yield num_servers, num_ranks


def _resized(placement: PlacementConfig, num_ranks: int, num_servers: int) -> PlacementConfig:
    trainer = placement.trainer.model_copy(update={"num_ranks": num_ranks})
    engine = placement.engine
    if engine.kind == "vllm" and num_servers:
        engine = engine.model_copy(update={"num_servers": num_servers})
    return placement.model_copy(update={"trainer": trainer, "engine": engine})
