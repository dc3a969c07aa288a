"""The languages that an index of words knows, and which of them a corpus is in.

A language is told by its script where the script settles it, else by py3langid over the beginning
of each passage of a sample. What is done with a language's words is
``forage.retrieval.words.analyzer``'s.
"""

from __future__ import annotations

import unicodedata
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache

from forage.errors import UserError

# The words of every language as they stand; and words as they were cut before there were languages.
ANY, PLAIN = "any", "plain"
AUTO = "auto"

_HEAD_CHARS = 500
# A language is taken for the corpus's where this share of the passages is in it, and a corpus is
# said not to fit where this share is in others.
_SHARE_TAKEN, _SHARE_SAID = 0.6, 0.2


@dataclass(frozen=True, slots=True)
class Language:
    """A script as Unicode names it, a Snowball stemmer, and a list of bm25s' stop words."""

    script: str
    stemmer: str | None = None
    stop_words: str | None = None


LANGUAGES = {
    "ar": Language("ARABIC", "arabic"),
    "ca": Language("LATIN", "catalan"),
    "cs": Language("LATIN", "czech"),
    "da": Language("LATIN", "danish", "DANISH"),
    "de": Language("LATIN", "german", "GERMAN"),
    "el": Language("GREEK", "greek"),
    "en": Language("LATIN", "english", "EN_PLUS"),
    "es": Language("LATIN", "spanish", "SPANISH"),
    "et": Language("LATIN", "estonian"),
    "eu": Language("LATIN", "basque"),
    "fa": Language("ARABIC"),
    "fi": Language("LATIN", "finnish"),
    "fr": Language("LATIN", "french", "FRENCH"),
    "ga": Language("LATIN", "irish"),
    "hi": Language("DEVANAGARI"),
    "hu": Language("LATIN", "hungarian"),
    "hy": Language("ARMENIAN", "armenian"),
    "id": Language("LATIN", "indonesian"),
    "it": Language("LATIN", "italian", "ITALIAN"),
    "ja": Language("CJK"),
    "km": Language("KHMER"),
    "ko": Language("HANGUL"),
    "lo": Language("LAO"),
    "lt": Language("LATIN", "lithuanian"),
    "my": Language("MYANMAR"),
    "nl": Language("LATIN", "dutch", "DUTCH"),
    "no": Language("LATIN", "norwegian", "NORWEGIAN"),
    "pl": Language("LATIN", "polish"),
    "pt": Language("LATIN", "portuguese", "PORTUGUESE"),
    "ro": Language("LATIN", "romanian"),
    "ru": Language("CYRILLIC", "russian", "RUSSIAN"),
    "sr": Language("CYRILLIC", "serbian"),
    "sv": Language("LATIN", "swedish", "SWEDISH"),
    "ta": Language("TAMIL", "tamil"),
    "th": Language("THAI"),
    "tr": Language("LATIN", "turkish", "TURKISH"),
    "zh": Language("CJK"),
}
CHOICES = (AUTO, ANY, PLAIN, *LANGUAGES)

_KANA = frozenset({"HIRAGANA", "KATAKANA", "KATAKANA-HIRAGANA"})
# Scripts of one language here. Devanagari is not: Marathi and Nepali are written in it too.
_ONLY_LANGUAGE = {LANGUAGES[code].script: code for code in "zh el hy km ko lo my ta th".split()}
_OTHER_NAMES = {"nb": "no", "nn": "no"}


def require_language(name: str) -> None:
    """Raise ``UserError`` for a name that is none of ``CHOICES``."""
    if name not in CHOICES:
        raise UserError(f"--language {name!r} is not known; it is one of {', '.join(CHOICES)}")


def language_of(text: str) -> str:
    """The language of the beginning of a text, ``""`` where none is told.

    It may be a code that is not in ``LANGUAGES``.
    """
    script = script_of(text)
    if script in ("", "KANA"):
        return "ja" if script else ""
    if script in _ONLY_LANGUAGE:
        return _ONLY_LANGUAGE[script]
    import py3langid  # loads a model of some megabytes, for corpora that need it

    code = py3langid.classify(text[:_HEAD_CHARS])[0]
    code = _OTHER_NAMES.get(code, code)
    known = LANGUAGES.get(code)
    return code if known is None or known.script == script else ""


def script_of(text: str) -> str:
    """The script of most letters at the beginning of a text; KANA where CJK holds some kana."""
    letters = [character for character in text[:_HEAD_CHARS] if character.isalpha()]
    if not letters:
        return ""
    scripts = Counter(map(_script, letters))
    num_kana = sum(scripts.pop(kana, 0) for kana in _KANA)
    scripts["CJK"] += num_kana
    script = scripts.most_common(1)[0][0]
    return "KANA" if script == "CJK" and num_kana * 10 > scripts["CJK"] else script


def shares(texts: Iterable[str], kind_of: Callable[[str], str] = language_of) -> dict[str, float]:
    """The part of the texts in each language (or script), the largest first, where one is told."""
    kinds = Counter(map(kind_of, texts))
    del kinds[""]
    total = kinds.total()
    return {kind: num / total for kind, num in kinds.most_common()}


def main_language(texts: Iterable[str]) -> str:
    """The language that most of a corpus is in; ``any`` where none is, or none that is known."""
    found = shares(texts)
    code = next(iter(found), "")
    return code if code in LANGUAGES and found[code] >= _SHARE_TAKEN else ANY


def misfit(language: str, texts: Sequence[str]) -> str | None:
    """A sentence about texts that ``language`` does not fit; None where it fits most of them."""
    found = shares(texts, script_of if language == PLAIN else language_of)
    if sum(share for code, share in found.items() if not _fits(language, code)) < _SHARE_SAID:
        return None
    said = ", ".join(f"{code} {share:.0%}" for code, share in found.items() if share >= 0.01)
    best = main_language(texts)
    advice = f"--language {best} fits it better"
    if best == language:
        advice = "an index for each of them finds more"
    return f"words are cut for --language {language}, but the corpus is {said} ({advice})"


def stop_words(language: str) -> Sequence[str]:
    """The language's words that are left out: articles, pronouns, prepositions."""
    name = LANGUAGES[language].stop_words if language in LANGUAGES else None
    if name is None:
        return ()
    from bm25s import stopwords  # pulls in a compiler: a second that only building pays

    return getattr(stopwords, f"STOPWORDS_{name}")


def _fits(language: str, found: str) -> bool:
    """Whether words of the language (for ``plain``: the script) found are cut as its own would."""
    if language == PLAIN:
        return found == "LATIN"
    if language == found:
        return True
    own, known = LANGUAGES.get(language), LANGUAGES.get(found)
    if own is None or own.stemmer is None:
        return known is None or known.stemmer is None
    return known is not None and known.stemmer is None and known.script != own.script


@lru_cache(maxsize=4096)
def _script(letter: str) -> str:
    """The first word of its Unicode name: LATIN, CYRILLIC, CJK."""
    return unicodedata.name(letter, "").partition(" ")[0]
