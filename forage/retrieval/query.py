"""One spelling for a query: what is cached, joined, sent and searched, on both sides of the wire.

Case and punctuation stay, since encoders may read them. The spelling is also what is searched, so
an answer never depends on which of two spellings came first.
"""

from __future__ import annotations

import re
import unicodedata

_CONTROLS = re.compile(r"[\x00-\x1f\x7f-\x9f]")


def normalise_query(query: str) -> str:
    """NFC; runs of white space and control characters are one space, and none at the ends.

    ``"  who\\twrote\\x00 it "`` gives ``"who wrote it"``; lone surrogates become U+FFFD.
    """
    if query.isascii() and query.isprintable() and "  " not in query:
        return query.strip(" ")
    return " ".join(unicodedata.normalize("NFC", _CONTROLS.sub(" ", mended(query))).split())


def mended(text: str) -> str:
    """``text`` with lone surrogates (legal in JSON, not in UTF-8) replaced by U+FFFD."""
    return text.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace")
