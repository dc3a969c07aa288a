"""Answer matching by the published SQuAD rules: normalise, exact match, cover match, token F1.

Pure functions of strings; nothing here knows about episodes, tags or passages.
"""

from __future__ import annotations

import re
import string
from collections import Counter
from collections.abc import Sequence

_ARTICLE = re.compile(r"\b(?:a|an|the)\b")
_WHOLE = frozenset({"yes", "no", "noanswer"})
_WITHOUT_PUNCTUATION = str.maketrans("", "", string.punctuation)


def normalize_answer(text: str) -> str:
    """Lower-case, delete ASCII punctuation, drop a, an, the, squeeze white space.

    The rule of SQuAD's evaluation script (https://arxiv.org/abs/1606.05250):
    ``"The  Beatles!"`` becomes ``"beatles"``.
    """
    bare = text.lower().translate(_WITHOUT_PUNCTUATION)
    return " ".join(_ARTICLE.sub(" ", bare).split())


def exact_match(prediction: str, golden_answers: Sequence[str]) -> bool:
    """Whether the prediction equals some golden answer once both are normalised.

    A golden answer that normalises to nothing ("The", "...") matches by raw equality alone;
    otherwise an empty prediction would win. Raises ``TypeError`` for a bare string.
    """
    normal = normalize_answer(prediction)
    return any(
        normal == golden if golden else prediction == raw
        for raw, golden in _normalised(golden_answers)
    )


def cover_match(prediction: str, golden_answers: Sequence[str]) -> bool:
    """Whether some golden answer is a substring of the prediction, both normalised (sub-EM).

    Golden answers that normalise to nothing match as in ``exact_match``. Raises ``TypeError``
    for a bare string.
    """
    normal = normalize_answer(prediction)
    return any(
        golden in normal if golden else prediction == raw
        for raw, golden in _normalised(golden_answers)
    )


def f1_score(prediction: str, golden_answers: Sequence[str]) -> float:
    """The best token-overlap F1 over the golden answers, 0 to 1 (SQuAD, arXiv:1606.05250).

    "big red dog" against "red cat": one common word, precision 1/3, recall 1/2, F1 0.4.
    "yes", "no" and "noanswer", predicted or golden, count only whole: "yes it is" for "yes" is 0
    (HotpotQA's evaluation script, https://arxiv.org/abs/1809.09600). Golden answers that normalise
    to nothing give 1 by raw equality, else 0. Raises ``TypeError`` for a bare string.
    """
    normal = normalize_answer(prediction)
    return max(
        (
            _overlap(normal, golden) if golden else float(prediction == raw)
            for raw, golden in _normalised(golden_answers)
        ),
        default=0.0,
    )


def _overlap(predicted: str, golden: str) -> float:
    if predicted != golden and not _WHOLE.isdisjoint((predicted, golden)):
        return 0.0
    words, golden_words = predicted.split(), golden.split()
    common = (Counter(words) & Counter(golden_words)).total()
    if not common:
        return 0.0
    precision, recall = common / len(words), common / len(golden_words)
    return 2 * precision * recall / (precision + recall)


def _normalised(golden_answers: Sequence[str]) -> list[tuple[str, str]]:
    """Each golden answer as given and as normalised; raises ``TypeError``."""
    # A str is a Sequence[str] to the type checker, and would be compared letter by letter.
    if isinstance(golden_answers, str):
        raise TypeError(
            f"golden_answers is the string {golden_answers!r}; give a sequence of answers, "
            f"for example [{golden_answers!r}]"
        )
    return [(raw, normalize_answer(raw)) for raw in golden_answers]
