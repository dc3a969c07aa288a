"""Writes docs/models.md: the measured difference of each family from transformers' own passes.

    python benchmarks/models.py

Uses tiny random models (tests/models/families.py); takes a few minutes on two cores.
"""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path

import torch
import transformers

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT))

from tests.models.families import FAMILIES, REFUSED, make_family  # noqa: E402
from tests.models.measures import (  # noqa: E402
    packing_differences,
    sampled_alone,
    sampled_together,
    sampling_difference,
)

PAGE = ROOT / "docs" / "models.md"
START = "<!-- written by benchmarks/models.py -->"


def measured_row(family: str) -> str:
    """A line of the table, with everything measured now."""
    sampled = max(asyncio.run(sampling_difference(family, packed)) for packed in (True, False))
    packed, gradients = packing_differences(family)
    model = make_family(family)
    together = asyncio.run(sampled_together(model, is_packed=True))
    same = "same" if together == asyncio.run(sampled_alone(model)) else "differ"
    layers = ", ".join(dict.fromkeys(_layers(family)))
    return f"| {family} | {layers} | {sampled:.0e} | {packed:.0e} | {gradients:.0e} | {same} |"


def _layers(family: str) -> list[str]:
    config = make_family(family).config
    return getattr(config, "layer_types", None) or ["attention"]


def main() -> None:
    lines = [
        START,
        "",
        f"Measured with transformers {transformers.__version__} and torch "
        f"{torch.__version__.partition('+')[0]}, float32, on a CPU.",
        "",
        "| family | layers | sampled | packed | gradient | bits in company |",
        "|---|---|---|---|---|---|",
    ]
    for family in FAMILIES:
        lines.append(measured_row(family))
        print(lines[-1], flush=True)
    lines += ["", "| refused | why |", "|---|---|"]
    lines += [f"| {family} | {why} |" for family, (_, _, why) in REFUSED.items()]
    text = PAGE.read_text(encoding="utf-8").partition(START)[0]
    PAGE.write_text(text + "\n".join(lines) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
