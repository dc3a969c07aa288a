"""Whether an encoder's tokenizer knows words of the scripts that a corpus is in.

An encoder of English cuts Arabic into single letters and Chinese into unknown tokens; its vectors
then say next to nothing (MiniLM's recall@3 on Arabic paragraphs is 0.02). That shows in the tokens
before anything is encoded.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence

from forage.retrieval.words.languages import script_of

# Letters a token: encoders that know a script have 2 to 4, those that do not 1 or less. Where a
# letter is a syllable or a word, one a token is much, and bytes of one are little.
_LEAST_LETTERS, _LEAST_SYLLABLES = 1.3, 0.6
_SYLLABLES = frozenset({"CJK", "KANA", "HANGUL"})
_MOST_UNKNOWN = 0.1
# A script in fewer of the passages is left to chance.
_SHARE_SAID = 0.1


def unread_scripts(
    texts: Sequence[str], count_tokens: Callable[[Sequence[str]], tuple[int, int]]
) -> str | None:
    """A sentence about scripts that the tokenizer cannot read; None where there are none.

    ``count_tokens`` gives the tokens of texts and how many of them are unknown. Latin letters are
    not asked about: every encoder reads them, however it cuts them.
    """
    by_script: defaultdict[str, list[str]] = defaultdict(list)
    for text in texts:
        by_script[script_of(text)].append(text)
    said: list[str] = []
    for script, its_texts in by_script.items():
        if script in ("", "LATIN") or len(its_texts) < _SHARE_SAID * len(texts):
            continue
        num_letters = sum(letter.isalpha() for text in its_texts for letter in text)
        num_tokens, num_unknown = count_tokens(its_texts)
        letters, unknown = num_letters / max(num_tokens, 1), num_unknown / max(num_tokens, 1)
        if letters < (_LEAST_SYLLABLES if script in _SYLLABLES else _LEAST_LETTERS) or (
            unknown > _MOST_UNKNOWN
        ):
            said.append(f"{script} ({letters:.1f} letters a token, {unknown:.0%} unknown)")
    if not said:
        return None
    return (
        f"the encoder's tokenizer hardly knows {', '.join(said)}, which the corpus is in; it will "
        "find little there: take an encoder that was trained on the language, or BM25"
    )
