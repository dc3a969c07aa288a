"""Detects the end of a turn in token ids.

A stop string may span several tokens, and the token that completes it may contain further text
(``>\\n``). That token is kept as sampled: the turn ends after it, without truncation.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

from transformers import PreTrainedTokenizerFast

from forage.environment.vocabulary import num_token_ids


class StopTable:
    """The bytes of every token, to find the tokens that complete a stop string."""

    def __init__(self, token_bytes_V: Sequence[bytes]) -> None:
        self._bytes_V = tuple(token_bytes_V)

    @classmethod
    def of(cls, tokenizer: PreTrainedTokenizerFast) -> StopTable:
        """Reads the vocabulary of a byte-level or SentencePiece tokenizer."""
        added = {index: text for text, index in tokenizer.get_added_vocab().items()}
        ids = range(num_token_ids(tokenizer))
        pieces = [str(tokenizer.convert_ids_to_tokens(i) or "") for i in ids]
        is_byte_level = "ByteLevel" in repr(tokenizer.backend_tokenizer.decoder)
        to_bytes = _byte_level_bytes if is_byte_level else _sentencepiece_bytes
        table = [
            added[i].encode() if i in added else to_bytes(piece) for i, piece in enumerate(pieces)
        ]
        return cls(table)

    def text_bytes(self, token_ids: Sequence[int]) -> bytes:
        """The bytes of a token sequence; an id beyond the vocabulary has none."""
        table = self._bytes_V
        return b"".join(table[i] if i < len(table) else b"" for i in token_ids)

    def completes(self, token_ids: Sequence[int], stop: Sequence[str]) -> bool:
        """Whether the last of ``token_ids``, the tokens of one turn, completes a stop string."""
        if not token_ids or token_ids[-1] >= len(self._bytes_V):
            return False
        last = self._bytes_V[token_ids[-1]]
        for text in stop:
            target = text.encode()
            if target[-1] not in last:
                continue
            num_bytes = len(target) + len(last) - 1
            if target in self._tail(token_ids, num_bytes):
                return True
        return False

    def _tail(self, token_ids: Sequence[int], num_bytes: int) -> bytes:
        tail = b""
        for token_id in reversed(token_ids):
            tail = self.text_bytes((token_id,)) + tail
            if len(tail) >= num_bytes:
                break
        return tail[-num_bytes:]


@lru_cache(maxsize=1)
def _byte_of_letter() -> dict[str, int]:
    """Maps byte-level BPE's letters to the bytes they represent (GPT-2's table)."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    table = {chr(byte): byte for byte in printable}
    rest = [byte for byte in range(256) if byte not in set(printable)]
    return table | {chr(256 + index): byte for index, byte in enumerate(rest)}


def _byte_level_bytes(piece: str) -> bytes:
    letters = _byte_of_letter()
    return b"".join(
        bytes([letters[letter]]) if letter in letters else letter.encode() for letter in piece
    )


def _sentencepiece_bytes(piece: str) -> bytes:
    if len(piece) == 6 and piece.startswith("<0x") and piece.endswith(">"):
        return bytes([int(piece[3:5], 16)])
    return piece.replace("▁", " ").encode()
