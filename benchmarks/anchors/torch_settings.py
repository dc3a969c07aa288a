"""The variables that PyTorch's tuning guide recommends for a CPU, for sides that use torch alone.

Intel's OpenMP with a short block time, one thread per core. The guide also binds threads to cores,
which on a machine with other work makes every parallel region wait for the busier core. Without
``make anchors``, torch's own OpenMP with its defaults.
"""

from __future__ import annotations

from benchmarks.anchors.machine import num_cores
from benchmarks.anchors.side import ENVIRONMENT

_LIBRARY = ENVIRONMENT / "lib" / "libiomp5.so"


def recommended() -> dict[str, str]:
    cores = str(num_cores())
    if not _LIBRARY.exists():
        return {"OMP_NUM_THREADS": cores}
    return {
        "LD_PRELOAD": str(_LIBRARY),
        "OMP_NUM_THREADS": cores,
        "KMP_BLOCKTIME": "1",
    }


def in_words() -> str:
    """The variables for the page, without this machine's paths."""
    values = recommended()
    if "LD_PRELOAD" in values:
        values["LD_PRELOAD"] = _LIBRARY.name
    return " ".join(f"{name}={value}" for name, value in values.items())
