"""What this machine has for a run: GPUs, memory, disk, and the packages of the engines.

It looks and changes nothing. What a run needs is ``memory.py``'s and ``downloads.py``'s business;
``plan.py`` holds the two against each other.
"""

from __future__ import annotations

import importlib.util
import shutil
from dataclasses import dataclass
from pathlib import Path

from forage.hardware import num_cores


@dataclass(frozen=True, slots=True)
class Machine:
    """Bytes and counts; ``gpu_bytes`` is the memory of each GPU, the smallest first."""

    num_cores: int
    memory_bytes: int
    disk_bytes: int
    gpu_bytes: tuple[int, ...] = ()
    gpu_name: str = ""
    packages: frozenset[str] = frozenset()

    def describe(self) -> str:
        """One line for people."""
        gpus = f"{len(self.gpu_bytes)} x {self.gpu_name}" if self.gpu_bytes else "no GPU"
        gb = f"{self.memory_bytes / 1e9:.1f} GB of memory, {self.disk_bytes / 1e9:.1f} GB of disk"
        return f"{self.num_cores} cores, {gb}, {gpus}"


def look_at_machine(directory: Path) -> Machine:
    """This machine as it is now; free disk is that of ``directory``."""
    import psutil
    import torch

    gpus = [torch.cuda.get_device_properties(i) for i in range(torch.cuda.device_count())]
    return Machine(
        num_cores=num_cores(),
        memory_bytes=psutil.virtual_memory().available,
        disk_bytes=shutil.disk_usage(directory).free,
        gpu_bytes=tuple(sorted(gpu.total_memory for gpu in gpus)),
        gpu_name=gpus[0].name if gpus else "",
        packages=frozenset(n for n in ("vllm", "sglang") if importlib.util.find_spec(n)),
    )
