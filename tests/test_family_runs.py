"""Whole short runs of many families; transformers computes the recorded log-probabilities again."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from forage.config.model_config import ModelConfig
from forage.train import run_training
from forage.training.export import export_model
from forage.training.model import save_model
from forage.training.tokenizer import load_tokenizer
from tests.models.families import make_family
from tests.tiny_runs import SETTINGS, make_config, metrics_of, random_model

RUNS = [
    ("mistral, window", None),
    ("gemma4", None),
    ("gpt_oss", None),
    ("gpt2", None),
    ("qwen3_5", None),
    ("nemotron_h", {"rank": 4}),
    ("deepseek_v3", {"rank": 4}),
    ("qwen3_next", {"rank": 4}),
]


@pytest.mark.slow
@pytest.mark.parametrize(("name", "lora"), RUNS)
def test_a_run_records_what_transformers_computes(
    name: str, lora: dict[str, int] | None, tmp_path: Path
):
    tokenizer = load_tokenizer(ModelConfig(path=str(random_model())))
    save_model(make_family(name, vocabulary=len(tokenizer)), tokenizer, tmp_path / "start")
    out, model = tmp_path / "run", {"path": str(tmp_path / "start"), "lora": lora}
    for num_steps in (2, 3):
        trainer = {"num_steps": num_steps, "checkpoint_every": 2}
        config = make_config(out, model=model, trainer=trainer)
        run_training(config, resume=num_steps > 2)
    assert max(row["policy/logprob_diff_max"] or 0.0 for row in metrics_of(out)) <= 1e-4
    export_model(out, tmp_path / "exported", step=2)
    plain = AutoModelForCausalLM.from_pretrained(
        tmp_path / "exported", attn_implementation="eager", dtype=torch.float32
    )
    lines = (out / "episodes.jsonl").read_text().splitlines()
    last = [row for row in map(json.loads, lines) if row["step"] == 2]
    assert last, "the resumed step played"
    for row in last:
        ids = [token for each in row["segments"] for token in each["token_ids"]]
        with torch.no_grad():
            logits_TV = plain(input_ids=torch.tensor([ids]), use_cache=False).logits[0]
        expected_TV = (logits_TV / SETTINGS["rollout"]["temperature"]).log_softmax(-1)
        start = 0
        for each in row["segments"]:
            for i, logprob in enumerate(each["logprobs"], start):
                assert float(expected_TV[i - 1, ids[i]]) == pytest.approx(logprob, abs=1e-4)
            start += len(each["token_ids"])
