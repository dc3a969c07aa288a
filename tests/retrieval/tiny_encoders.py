"""Encoders of a few thousand random weights, written as real model directories."""

import json
from pathlib import Path
from typing import Any

import torch
import transformers
from sentence_transformers import SentenceTransformer
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, processors

LETTERS = "abcdefghijklmnopqrstuvwxyz0123456789?!.,:;'\"-"
SPECIALS = ("[PAD]", "[UNK]", "[CLS]", "[SEP]")
WIDTH = 16


def write_tokenizer(path: Path) -> None:
    """One token per letter, lower case."""
    vocabulary = {token: number for number, token in enumerate((*SPECIALS, *LETTERS))}
    tokenizer = Tokenizer(models.WordPiece(vocabulary, unk_token="[UNK]"))
    tokenizer.normalizer = normalizers.Lowercase()
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.WhitespaceSplit(), pre_tokenizers.Split("", "isolated")]
    )
    tokenizer.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]", special_tokens=[("[CLS]", 2), ("[SEP]", 3)]
    )
    wrapped = transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token="[PAD]",
        unk_token="[UNK]",
        cls_token="[CLS]",
        sep_token="[SEP]",
        model_max_length=64,
    )
    wrapped.save_pretrained(path)


def bert_config() -> transformers.BertConfig:
    return transformers.BertConfig(
        vocab_size=len(SPECIALS) + len(LETTERS),
        hidden_size=WIDTH,
        num_hidden_layers=1,
        num_attention_heads=2,
        intermediate_size=32,
        max_position_embeddings=64,
        initializer_range=0.5,
    )


def write_plain(path: Path, seed: int = 0) -> Path:
    """A BERT without pooling settings, as Contriever is published."""
    torch.manual_seed(seed)
    transformers.BertModel(bert_config()).save_pretrained(path)
    write_tokenizer(path)
    return path


def write_encoder(
    path: Path,
    pooling: str = "mean",
    normalise: bool = True,
    prompts: dict[str, str] | None = None,
    similarity: str | None = None,
    seed: int = 0,
) -> Path:
    """A model with files that define pooling, prompts and normalisation."""
    write_plain(path, seed)
    model = SentenceTransformer(str(path), device="cpu")
    model[1].pooling_mode = pooling  # type: ignore[assignment] # a property of the module
    model.save(str(path), create_model_card=False)
    _write_json(path / "config_sentence_transformers.json", prompts or {}, similarity)
    if normalise:
        modules = json.loads((path / "modules.json").read_text())
        kind = "sentence_transformers.models.Normalize"
        modules.append({"idx": 2, "name": "2", "path": "2_Normalize", "type": kind})
        (path / "modules.json").write_text(json.dumps(modules))
        (path / "2_Normalize").mkdir()
    return path


def _write_json(path: Path, prompts: dict[str, str], similarity: str | None) -> None:
    tree: dict[str, Any] = {"prompts": prompts, "model_type": "SentenceTransformer"}
    if similarity is not None:
        tree["similarity_fn_name"] = similarity
    path.write_text(json.dumps(tree))


def token_states(path: Path, text: str) -> torch.Tensor:
    """The last hidden states of a text, [T, D], from transformers itself."""
    tokens = transformers.AutoTokenizer.from_pretrained(path)([text], return_tensors="pt")
    model = transformers.AutoModel.from_pretrained(path, dtype=torch.float32).eval()
    with torch.no_grad():
        return model(**tokens).last_hidden_state[0]
