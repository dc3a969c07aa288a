"""The settings of ``placement``: machines, GPUs, what samples, and what rests in host memory.

``run_config.py`` hangs them under its root. ``forage train --dry-run`` plans with every key (see
``plan/``); training goes on in one process and on one device so far, and ``not_yet`` says what it
refuses. Engines and sharding themselves are not here.
"""

from __future__ import annotations

from typing import Literal, Self

from pydantic import Field, model_validator

from forage.settings import Settings


class PlacementConfig(Settings):
    """What a run is spread over; the default is one process on ``model.device``.

    Weights, gradients and optimizer states are sharded over all GPUs. ``engine`` is what samples:
    ``torch`` shares the trainer's weights, a server keeps a bfloat16 copy, cut over
    ``tensor_parallel`` GPUs. With ``offload`` the trainer's states rest in host memory meanwhile.
    """

    section = "placement"
    num_nodes: int = Field(default=1, ge=1)
    gpus_per_node: int = Field(default=1, ge=1)
    engine: Literal["torch", "vllm", "sglang"] = "torch"
    tensor_parallel: int = Field(default=1, ge=1)
    offload: bool = False

    @property
    def num_gpus(self) -> int:
        """Devices in all; 1 also stands for a CPU."""
        return self.num_nodes * self.gpus_per_node

    @property
    def has_server(self) -> bool:
        """Whether the engine is a server with weights of its own."""
        return self.engine != "torch"

    def not_yet(self) -> list[str]:
        """What this placement asks for that training cannot do, a sentence each."""
        missing: list[str] = []
        if self.num_gpus > 1:
            missing.append(
                f"placement asks for {self.num_nodes} x {self.gpus_per_node} GPUs: training is not "
                "sharded yet, it runs on one device (num_nodes: 1, gpus_per_node: 1)"
            )
        if self.has_server:
            missing.append(
                f"placement.engine is {self.engine}: training samples with the in-process engine "
                "alone so far (engine: torch)"
            )
        if self.offload:
            missing.append(
                "placement.offload is true: the trainer's states cannot be moved to host memory "
                "yet (offload: false)"
            )
        return missing

    def dead_keys(self) -> dict[str, str]:
        if self.has_server:
            return {}
        remedy = "set placement.engine to vllm or sglang"
        return dict.fromkeys(("tensor_parallel", "offload"), remedy)

    @model_validator(mode="after")
    def _engines_fit_a_node(self) -> Self:
        if self.gpus_per_node % self.tensor_parallel:
            raise ValueError(
                f"placement.tensor_parallel ({self.tensor_parallel}) does not divide "
                f"gpus_per_node ({self.gpus_per_node}): an engine would span two nodes"
            )
        return self
