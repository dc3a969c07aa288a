"""An export keeps one tensor in memory at a time, whatever the size of the model."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from transformers import Qwen2Config, Qwen2ForCausalLM

from tests.fakes import tiny_tokenizer
from tests.training.layouts import written

MEASURE = """
import sys
from pathlib import Path
from forage.training.export import import_checkpoint

def peak():
    # ru_maxrss would be that of the process that started this one.
    lines = Path("/proc/self/status").read_text().splitlines()
    return int(next(line for line in lines if line.startswith("VmHWM")).split()[1]) * 1024

small, large, base_of_small, base_of_large, out = map(Path, sys.argv[1:])
import_checkpoint(small, out / "small", str(base_of_small))  # whatever is imported on the way
before = peak()
import_checkpoint(large, out / "large", str(base_of_large))
print(peak() - before)
"""


@pytest.mark.slow
def test_the_peak_is_that_of_the_largest_tensor_and_not_of_the_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    sizes = {"NUM_LAYERS": 12, "HEADS": 8, "GROUPS": 2, "HEAD_DIM": 64, "HIDDEN": 512}
    small = written.write_megatron_ranks(written.tiny("qwen2"), tmp_path / "iter_0000001", 2, [3])
    base_of_small = written.model_dir("qwen2")
    for name, value in sizes.items():
        monkeypatch.setattr(written, name, value)
    config = Qwen2Config(
        vocab_size=len(tiny_tokenizer()),
        hidden_size=512,
        intermediate_size=2048,
        num_hidden_layers=12,
        num_attention_heads=8,
        num_key_value_heads=2,
        tie_word_embeddings=True,
    )
    model = Qwen2ForCausalLM(config)
    config.save_pretrained(tmp_path / "base")
    tiny_tokenizer().save_pretrained(tmp_path / "base")
    large = written.write_megatron_ranks(model, tmp_path / "iter_0000002", 2, [12])
    of_model = sum(weight.nbytes for weight in model.parameters())
    largest = max(weight.nbytes for weight in model.parameters())
    del model
    arguments = [small, large, base_of_small, tmp_path / "base", tmp_path / "out"]
    # Freed tensors are returned at once: otherwise the peak includes the allocator's reserve.
    environment = os.environ | {"MALLOC_MMAP_THRESHOLD_": str(64 * 1024)}
    measured = subprocess.run(
        [sys.executable, "-c", MEASURE, *map(str, arguments)],
        capture_output=True,
        text=True,
        env=environment,
    )
    assert measured.returncode == 0, measured.stderr
    grown = int(measured.stdout)
    assert of_model > 40 * largest
    # The tensor as it was read, its parts, and the one read back.
    assert grown < 5 * largest, f"{grown} bytes for a largest tensor of {largest}"
