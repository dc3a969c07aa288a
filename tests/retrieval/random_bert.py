"""Models of a few thousand random weights that read single characters, as ordinary directories."""

from pathlib import Path

import torch
from transformers import BertConfig, BertForSequenceClassification, BertModel, BertTokenizer

WIDTH = 32
MAX_TOKENS = 64

_LETTERS = "abcdefghijklmnopqrstuvwxyz0123456789"
_WORDS = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *_LETTERS, *(f"##{c}" for c in _LETTERS))


def save_cross_encoder(directory: Path, num_labels: int = 1) -> Path:
    """A model that returns ``num_labels`` numbers for a pair of texts."""
    config = _start(directory)
    config.num_labels = num_labels
    BertForSequenceClassification(config).save_pretrained(directory)
    return directory


def save_encoder(directory: Path) -> Path:
    """A model whose files do not define pooling."""
    BertModel(_start(directory)).save_pretrained(directory)
    return directory


def _start(directory: Path) -> BertConfig:
    """Saves the tokenizer and seeds the random numbers."""
    directory.mkdir()
    vocabulary = directory / "vocab.txt"
    vocabulary.write_text("\n".join(_WORDS))
    BertTokenizer(str(vocabulary), model_max_length=MAX_TOKENS).save_pretrained(directory)
    torch.manual_seed(0)
    return BertConfig(
        vocab_size=len(_WORDS),
        hidden_size=WIDTH,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=64,
        max_position_embeddings=MAX_TOKENS,
        initializer_range=0.5,
    )
