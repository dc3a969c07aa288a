"""Ray as a run needs it: reached within a deadline, places kept free on it, objects put there.

What the objects do is their maker's. This is the only file of the room that imports ray.
"""

from __future__ import annotations

import logging
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from forage.cluster.bundles import Bundle
from forage.config.placement_config import RayCluster
from forage.errors import UserError, install_command
from forage.remote.ray_login import join_ray

LOG = logging.getLogger(__name__)

OWN = "local"
"""The address of a Ray of the run's own, on its machine."""
_ANSWER_S = 120.0
_START_S = 600.0
_MAX_STARTS = 3
_TRY = """
import logging, sys
from forage.remote.ray_login import join_ray
try:
    join_ray(sys.argv[1], logging_level=logging.ERROR, log_to_driver=False)
except Exception as error:
    print(error)
    sys.exit(1)
"""


class ActorLostError(RuntimeError):
    """The process of an actor is gone, or its machine is."""


@dataclass(frozen=True, slots=True)
class Spot:
    """Where an actor is: its machine, that machine's address, and the GPUs that it was given."""

    machine: str
    address: str
    gpus: tuple[str, ...]


class Reply:
    """What an actor will have answered."""

    def __init__(self, reference: Any) -> None:
        self.reference = reference

    def take(self, timeout_s: float | None = _ANSWER_S) -> Any:
        """Wait for it; raises ``ActorLostError``, ``TimeoutError`` and what the actor raised."""
        import ray
        from ray.exceptions import GetTimeoutError, RayActorError, RayTaskError

        try:
            return ray.get(self.reference, timeout=timeout_s)
        except GetTimeoutError:
            raise TimeoutError(f"no answer within {timeout_s:g} s") from None
        except RayTaskError as error:
            raise error.cause if isinstance(error.cause, Exception) else error from error
        except RayActorError as error:
            raise ActorLostError(str(error).strip()) from error

    @property
    def is_there(self) -> bool:
        return self in first_ready([self], 0.0)


def first_ready(replies: Sequence[Reply], timeout_s: float | None) -> list[Reply]:
    """The first of them that is there, or has failed; none after the time."""
    import ray

    ready, _ = ray.wait([reply.reference for reply in replies], timeout=timeout_s)
    return [reply for reply in replies if reply.reference in ready]


class Actor:
    """An object in a process of its own on some machine; its methods run one after another."""

    def __init__(self, kind: type, group: Any, index: int, bundle: Bundle) -> None:
        """An object of ``kind`` in the bundle ``index``, of which it takes ``bundle``."""
        import ray
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

        holder: Any = ray.remote(kind).options(
            num_cpus=bundle.cpus,
            num_gpus=bundle.gpus,
            scheduling_strategy=PlacementGroupSchedulingStrategy(group, index),
        )
        self._handle = holder.remote()

    def ask(self, method: str, *arguments: object) -> Reply:
        """Call a method there; an argument that ``shared`` gave travels once to each machine."""
        return Reply(getattr(self._handle, method).remote(*arguments))

    def spot(self) -> Spot:
        """Where it is, once it is there; raises ``UserError`` where it cannot be started."""
        try:
            return self.ask("spot").take(_START_S)
        except Exception as error:  # whatever its start raised, an import error for example
            raise UserError(
                f"Ray could not start an actor: {error}. Forage has to be installed on each "
                "machine, in the same version"
            ) from error

    def kill(self) -> None:
        """End its process, and what that has started."""
        import ray

        ray.kill(self._handle)


class OnRay:
    """What every actor can say."""

    def spot(self) -> Spot:
        """Where this process is."""
        import ray

        context = ray.get_runtime_context()
        gpus = tuple(context.get_accelerator_ids().get("GPU", ()))
        return Spot(context.get_node_id(), ray.util.get_node_ip_address(), gpus)


def shared(value: object) -> Any:
    """``value`` as an argument for several actors."""
    import ray

    return ray.put(value)


def address_of(cluster: RayCluster) -> str:
    """Where Ray is: as the recipe says, as the environment says, or ``OWN``."""
    return cluster.address or os.environ.get("RAY_ADDRESS") or OWN


def connect(cluster: RayCluster) -> str:
    """Reach Ray, or start it here; gives this machine's address. Raises ``UserError``.

    ``ray.init`` waits for ever for a server that is silent, and holds Python's lock meanwhile; so
    another process tries it first.
    """
    try:
        import ray
    except ImportError:
        raise UserError(
            f"placement.cluster is ray, but Ray is not installed; run: {install_command('ray')}"
        ) from None
    address = address_of(cluster)
    if address != OWN:
        setting = "RAY_ADDRESS" if cluster.address is None else "placement.cluster.address"
        _try(f"{setting} ({address})", address, cluster.startup_timeout_s)
    # Ray gives its own processes 30 s to start, which a busy machine does not always keep.
    for tries_left in reversed(range(_MAX_STARTS if address == OWN else 1)):
        try:
            quietly = {"logging_level": logging.ERROR, "log_to_driver": False}
            if address == OWN:
                ray.init(address, include_dashboard=False, **quietly)
            else:
                join_ray(address, **quietly)
            break
        except Exception as error:  # of several kinds, none of them documented
            ray.shutdown()
            if not tries_left:
                raise UserError(f"cannot use Ray at {address}: {error}") from error
    return ray.util.get_node_ip_address()


def disconnect() -> None:
    """Leave Ray; it ends where it was started for this run. Harmless when repeated."""
    import ray

    ray.shutdown()


def machines(are_free: bool) -> list[Bundle]:
    """What each machine has in all, or has free now."""
    from ray._private.state import available_resources_per_node, total_resources_per_node

    per_node = available_resources_per_node() if are_free else total_resources_per_node()
    return [_bundle(resources) for resources in per_node.values()]


def reserve(bundles: Sequence[Bundle], timeout_s: float) -> Any | None:
    """Places for all bundles, near each other, in a group; None where Ray finds none in time."""
    import ray

    asked = [{"CPU": each.cpus, "GPU": each.gpus} for each in bundles]
    asked = [{name: number for name, number in each.items() if number} for each in asked]
    group = ray.util.placement_group(asked, strategy="PACK")
    if group.wait(timeout_s):
        return group
    ray.util.remove_placement_group(group)
    return None


def _bundle(resources: Mapping[str, float]) -> Bundle:
    return Bundle(resources.get("CPU", 0.0), resources.get("GPU", 0.0))


def _try(setting: str, address: str, timeout_s: float) -> None:
    """Raise ``UserError`` where nobody answers at ``address``, or another version of Ray."""
    command = [sys.executable, "-P", "-c", _TRY, address]
    try:
        tried = subprocess.run(command, capture_output=True, text=True, timeout=timeout_s)
    except subprocess.TimeoutExpired:
        raise UserError(
            f"{setting}: Ray did not answer within {timeout_s:g} s "
            "(placement.cluster.startup_timeout_s); look whether it runs (ray status)"
        ) from None
    if tried.returncode:
        raise UserError(f"{setting}: {tried.stdout.strip() or tried.stderr.strip()[-1000:]}")
