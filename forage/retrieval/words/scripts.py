"""Splits text into words by script, and scripts without spaces into pairs and triples.

Marks (vowel signs, required points) belong to the word they appear in. Chinese, Japanese and Korean
are split into overlapping pairs of characters, as in Lucene's CJKAnalyzer
(https://lucene.apache.org/core/9_11_0/analysis/common/org/apache/lucene/analysis/cjk/CJKAnalyzer.html);
Thai, Lao, Khmer and Burmese, whose characters carry less, are split into triples. Optional points
of Arabic and Hebrew and invisible characters are dropped. The text's language does not matter here:
``forage.retrieval.words.analyzer`` adds stems and stop words.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Iterable

_PLAIN_WORD = re.compile(r"[^\W_]+")
BETWEEN_WORDS = re.compile(r"[^\w\0-\x7f]+")
"""What separates words, except for the characters of ASCII that do."""

# Kana, ideographs and Hangul, without the dot between Katakana words.
_PAIRED = (
    "\u3005-\u3007\u3040-\u30fa\u30fc-\u30ff\u31f0-\u31ff\u3400-\u4dbf\u4e00-\u9fff"
    "\uac00-\ud7a3\uf900-\ufaff"
)
_SOUTH_EAST_ASIAN = (
    *(range(0x0E01, 0x0E50), range(0x0E80, 0x0ED0), range(0x0EDC, 0x0EE0)),  # Thai, Lao
    *(range(0x1000, 0x1040), range(0x1050, 0x10A0), range(0xA9E0, 0xAA00), range(0xAA60, 0xAA80)),
    range(0x1780, 0x17E0),  # Khmer; Burmese is above
)
# Invisible: soft hyphens, joiners, direction marks and variation selectors.
_UNSEEN = (
    *(range(0x00AD, 0x00AE), range(0x034F, 0x0350), range(0x061C, 0x061D), range(0x180B, 0x180F)),
    *(range(0x200C, 0x2010), range(0x202A, 0x202F), range(0x2060, 0x2065), range(0x2066, 0x206A)),
    *(range(0xFE00, 0xFE10), range(0xFEFF, 0xFF00), range(0xE0100, 0xE01F0)),
)
# Hebrew vowels and accents; Arabic vowels and the bar that widens a word.
_POINTS = (
    *(range(0x0591, 0x05BE), range(0x05BF, 0x05C0), range(0x05C1, 0x05C3), range(0x05C4, 0x05C6)),
    *(range(0x05C7, 0x05C8), range(0x0610, 0x061B), range(0x0640, 0x0641), range(0x064B, 0x0660)),
    *(range(0x0670, 0x0671), range(0x06D6, 0x06DD), range(0x06DF, 0x06E5), range(0x06E7, 0x06E9)),
    *(range(0x06EA, 0x06EE), range(0x08D3, 0x08E2), range(0x08E3, 0x0900)),
)
# Variants of one letter on Arabic, Persian and Urdu keyboards.
_ONE_LETTER = {"ى": "ي", "ی": "ي", "ک": "ك", "ہ": "ه", "ە": "ه"}


def _class(characters: Iterable[int]) -> str:
    """The code points as a regular-expression character class: ``\\u0e01-\\u0e3a``."""
    runs: list[list[int]] = []
    for code in sorted(characters):
        if runs and code == runs[-1][1] + 1:
            runs[-1][1] = code
        else:
            runs.append([code, code])
    return "".join(f"\\U{first:08x}-\\U{last:08x}" for first, last in runs)


def _of_kind(kinds: str, codes: Iterable[int]) -> set[int]:
    """The code points whose Unicode category starts with one of these letters."""
    return {code for code in codes if unicodedata.category(chr(code))[0] in kinds}


def _codes(ranges: Iterable[range]) -> set[int]:
    return {code for part in ranges for code in part}


# The letters and marks of these scripts, without digits and punctuation.
_LETTERS_TRIPLED = _of_kind("LM", _codes(_SOUTH_EAST_ASIAN))
_TRIPLED = _class(_LETTERS_TRIPLED)
_MARKS = _class(_of_kind("M", range(0x10000)) - _LETTERS_TRIPLED - {0x3099, 0x309A})
_FAR_PAIRED = "\U00020000-\U0002fa1f\U00030000-\U000323af"
_FAR_MARKS = _class(_of_kind("M", range(0x10000, 0x1F000)))


def _runs(paired: str, tripled: str, marks: str) -> re.Pattern[str]:
    """A pattern for the runs of a text: split into pairs, split into triples, and whole words."""
    letter = rf"[^\W_{paired}{tripled}]"
    return re.compile(rf"([{paired}]+)|([{tripled}]+)|({letter}+(?:[{marks}]+{letter}*)*)")


_TRANSLATION = dict.fromkeys(_codes(_UNSEEN) | _codes(_POINTS)) | str.maketrans(_ONE_LETTER)
# Texts of only Latin letters, typographic quotes, dashes and spaces need none of the steps below.
_BEYOND_LATIN = re.compile("[^\0-\u00ac\u00ae-\u02ff\u1e00-\u1eff\u2010-\u2027\u2030-\u205f]")
# `re` looks up a character class in a table unless it reaches beyond U+FFFF; then it tries each
# range in turn, about a hundred times slower. Such characters therefore have separate patterns.
_IS_FAR = re.compile("[\U00010000-\U0010ffff]")
_IS_TRANSLATED = re.compile(f"[{_class(code for code in _TRANSLATION if code < 0x10000)}]")
_IS_CUT = re.compile(f"[{_PAIRED}{_TRIPLED}{_MARKS}]")
_RUNS = _runs(_PAIRED, _TRIPLED, _MARKS)
_FAR_RUNS = _runs(_PAIRED + _FAR_PAIRED, _TRIPLED, _MARKS + _FAR_MARKS)


def spaced_by_script(text: str) -> str:
    """The words of ``words_by_script`` with only ASCII characters between them."""
    normal = unicodedata.normalize("NFKC", text).lower()
    if _BEYOND_LATIN.search(normal):
        return " ".join(words_by_script(text))
    return BETWEEN_WORDS.sub(" ", normal)


def words_by_script(text: str) -> list[str]:
    """The lower-case words, pairs and triples of a text, in order, after Unicode NFKC.

    ``"iPhone 手机壳 हिन्दी"`` gives ``["iphone", "手机", "机壳", "हिन्दी"]``.
    """
    if text.isascii():
        return _PLAIN_WORD.findall(text.lower())
    text = unicodedata.normalize("NFKC", text).lower()
    if not _BEYOND_LATIN.search(text):
        return _PLAIN_WORD.findall(text)
    # Lower-casing a Turkish capital leaves a combining dot, which is part of the letter.
    text = text.replace("i\u0307", "i")
    is_far = _IS_FAR.search(text) is not None
    if is_far or _IS_TRANSLATED.search(text):
        text = text.translate(_TRANSLATION)
    if not is_far and not _IS_CUT.search(text):
        return _PLAIN_WORD.findall(text)
    words: list[str] = []
    for paired, tripled, word in (_FAR_RUNS if is_far else _RUNS).findall(text):
        if word:
            words.append(word)
        elif len(paired or tripled) <= (2 if paired else 3):
            words.append(paired or tripled)
        elif paired:
            words += [paired[at : at + 2] for at in range(len(paired) - 1)]
        else:
            words += [tripled[at : at + 3] for at in range(len(tripled) - 2)]
    return words
