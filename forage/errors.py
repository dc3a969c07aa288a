"""The one error that is the user's to mend; the command line prints it and exits with 2."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class UserError(ValueError):
    """What is wrong, which value, and what to do; shown without a traceback."""


def did_you_mean(word: str, valid: Iterable[str], cutoff: float = 0.5) -> str:
    """``; did you mean rloo?`` for what is nearest to ``word``, "" where nothing is near."""
    close = difflib.get_close_matches(word, list(valid), n=1, cutoff=cutoff)
    return f"; did you mean {close[0]}?" if close else ""
