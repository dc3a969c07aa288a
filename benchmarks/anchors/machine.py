"""The conditions of a measurement: the machine, and what other programs took of it."""

from __future__ import annotations

import os
import platform
import resource
import subprocess
import time
from dataclasses import dataclass, field
from pathlib import Path

from benchmarks.anchors.side import ROOT

_TICKS = os.sysconf("SC_CLK_TCK")


@dataclass(slots=True)
class Conditions:
    """Watches the machine from its creation to ``ended``."""

    size: str
    _started: float = field(default_factory=time.monotonic)
    _busy: float = field(default_factory=lambda: busy_s())
    _own: float = field(default_factory=lambda: own_s())
    _load: float = field(default_factory=lambda: os.getloadavg()[0])

    def ended(self) -> dict[str, str]:
        """The conditions in words, by name.

        ``others`` is the share of all cores that other programs used: processor time of the machine
        (also what its host took) minus that of this script and its processes.
        """
        elapsed = time.monotonic() - self._started
        others = busy_s() - self._busy - (own_s() - self._own)
        share = max(0.0, others / elapsed / num_cores())
        return {
            "date": time.strftime("%Y-%m-%d %H:%M", time.gmtime()),
            "commit": _commit(),
            "size": self.size,
            "machine": machine(),
            "load": f"{self._load:.1f} to {os.getloadavg()[0]:.1f}",
            "others": f"{share:.2f}",
            "minutes": f"{elapsed / 60:.1f}",
        }


def busy_s() -> float:
    """Seconds for which the cores were not idle, since the machine started."""
    first = Path("/proc/stat").read_text(encoding="utf-8").partition("\n")[0]
    user, nice, system, _, _, irq, softirq, steal = map(int, first.split()[1:9])
    return (user + nice + system + irq + softirq + steal) / _TICKS


def own_s() -> float:
    """Processor seconds of this process and of its children that ended."""
    used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(each.ru_utime + each.ru_stime for each in used)


def num_cores() -> int:
    return len(os.sched_getaffinity(0))


def machine() -> str:
    """Processor, cores, memory, and the instructions that decide the speed of products."""
    about = Path("/proc/cpuinfo").read_text(encoding="utf-8")
    pairs = (line.partition(":") for line in about.splitlines())
    lines = {name.strip(): value.strip() for name, _, value in pairs}
    name = lines.get("model name", platform.processor())
    flags = lines.get("flags", "").split()
    has = [each for each in ("avx2", "avx512f", "avx512_bf16", "amx_bf16") if each in flags]
    memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") / 2**30
    return f"{num_cores()} cores of {name} ({', '.join(has)}), {memory:.0f} GB"


def has_bfloat16() -> bool:
    """Whether the processor multiplies bfloat16 in hardware."""
    about = Path("/proc/cpuinfo").read_text(encoding="utf-8")
    return "avx512_bf16" in about or "amx_bf16" in about


def _commit() -> str:
    """The last commit that changed ``forage/``."""
    command = ["git", "-C", str(ROOT), "log", "-1", "--format=%h", "--", "forage"]
    found = subprocess.run(command, capture_output=True, text=True, check=False)
    return found.stdout.strip() or "unknown"
