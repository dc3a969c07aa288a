"""From a text to the words that BM25 counts: the same for a passage and for a query.

``plain`` is how words were cut before there were languages: runs of letters and digits. Every other
language cuts by script (``forage.retrieval.words.scripts``), leaves out the stop words of its list
and takes each word's stem, by Snowball (https://snowballstem.org). The manifest of an index keeps
the language and the list of stop words, so a query is cut as its passages were, whatever list a
later package has.
"""

from __future__ import annotations

import logging
import re
import unicodedata
from collections.abc import Callable
from copy import copy
from typing import Self

import Stemmer
from pydantic import BaseModel, ConfigDict

from forage.retrieval.words.languages import LANGUAGES, PLAIN, require_language, stop_words
from forage.retrieval.words.scripts import words_by_script

logger = logging.getLogger(__name__)

PLAIN_TOKENIZER, SCRIPT_TOKENIZER = "nfkc-lower-words", "nfkc-lower-words-by-script"

_WORD = re.compile(r"[^\W_]+")
# What Snowball leaves in Arabic: "and" before the article (والقاهرة, and Cairo), which light10
# takes off (Larkey et al. 2007, https://doi.org/10.1007/978-1-4020-6046-5_12), and an ending
# typed without its dots (القاهره), which after the article can be no pronoun.
_ARABIC_AND_THE = re.compile(r"^[وف]ال(?=...)")
_ARABIC_ENDING = re.compile(r"^([بك]?ال|لل)(.{2,})ه$")
_TURKISH_CAPITALS = str.maketrans("Iİ", "ıi")
# Stems are kept for this many distinct words of at most this length.
_MAX_STEMS, _MAX_STEMMED_CHARS = 2**17, 64


class AnalyzerSpec(BaseModel):
    """What the words of an index depend on; an index from before there were languages is plain."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    language: str = PLAIN
    stemmer: str | None = None
    stemmer_version: str | None = None
    stop_words: tuple[str, ...] = ()

    @classmethod
    def of(cls, language: str) -> Self:
        """By today's packages; raises ``UserError`` for a language that is not known."""
        require_language(language)
        known = LANGUAGES.get(language)
        if known is None or known.stemmer is None:
            return cls(language=language)
        return cls(
            language=language,
            stemmer=known.stemmer,
            stemmer_version=Stemmer.version(),
            stop_words=tuple(sorted(stop_words(language))),
        )

    @property
    def tokenizer(self) -> str:
        """The name of the rule that cuts texts, before stop words and stems."""
        return PLAIN_TOKENIZER if self.language == PLAIN else SCRIPT_TOKENIZER


PLAIN_SPEC = AnalyzerSpec()


class Analyzer:
    """Cuts texts as its spec says; used by one thread at a time, as Snowball's stemmers are."""

    def __init__(self, spec: AnalyzerSpec) -> None:
        """Logs a warning where the stemmer here is of another version than the spec's."""
        self.spec = spec
        self._stems = _Stems(spec) if spec.stemmer else None
        if spec.stemmer and spec.stemmer_version != Stemmer.version():
            logger.warning(
                "the index has stems of Snowball %s and queries get those of %s; build the index "
                "again if known words are not found",
                spec.stemmer_version,
                Stemmer.version(),
            )

    def of_stop_words(self) -> Analyzer | None:
        """The analyzer for texts of stop words alone, "The Who"; None without stop words.

        It leaves out all other words, and its terms are none of this one's.
        """
        if not self.spec.stop_words:
            return None
        other = copy(self)
        other._stems = _StopWords(self.spec)
        return other

    def words(self, text: str) -> list[str]:
        """The words of a text that count, in its order."""
        words = self.cut(text)
        return words if self._stems is None else [term for term in self.terms(words) if term]

    def cut(self, text: str) -> list[str]:
        """The words of a text before stop words and stems."""
        if self.spec.language == PLAIN:
            return tokenize(text)
        if self.spec.language == "tr":
            text = text.translate(_TURKISH_CAPITALS)
        return words_by_script(text)

    def terms(self, words: list[str]) -> list[str]:
        """What words that were cut count as, one by one; empty for a stop word."""
        if self._stems is None:
            return words
        stems = self._stems
        return [stems[word] for word in words]

    def cuts_as_ascii(self, text: str) -> bool:
        """Whether the words of this text are its runs of ASCII letters and digits, made small."""
        return text.isascii() and self.spec.language != "tr"


def tokenize(text: str) -> list[str]:
    """Lower-case words (runs of letters and digits) after Unicode NFKC: the analyzer ``plain``.

    ``"Newton's 3rd LAW"`` gives ``["newton", "s", "3rd", "law"]``.
    """
    if not text.isascii():
        text = unicodedata.normalize("NFKC", text)
    return _WORD.findall(text.lower())


class _Stems(dict[str, str]):
    """The stem of each word that was asked for; empty for a stop word."""

    def __init__(self, spec: AnalyzerSpec) -> None:
        super().__init__()
        self._stop_words = frozenset(spec.stop_words)
        self._stem: Callable[[str], str] = Stemmer.Stemmer(spec.stemmer, 0).stemWord
        self._is_arabic = spec.stemmer == "arabic"

    def __missing__(self, word: str) -> str:
        if word in self._stop_words:
            stem = ""
        elif len(word) > _MAX_STEMMED_CHARS:
            return word
        else:
            stem = self._stem(_mend_arabic(word) if self._is_arabic else word)
        if len(self) >= _MAX_STEMS:
            self.clear()
        self[word] = stem
        return stem


class _StopWords(dict[str, str]):
    """Each stop word behind a space, which no stem has; empty for any other word."""

    def __init__(self, spec: AnalyzerSpec) -> None:
        super().__init__({word: f" {word}" for word in spec.stop_words})

    def __missing__(self, word: str) -> str:
        return ""


def _mend_arabic(word: str) -> str:
    return _ARABIC_ENDING.sub(r"\1\2ة", _ARABIC_AND_THE.sub("ال", word))
