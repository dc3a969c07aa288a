"""Values that were written as text: JSON, Python's own spelling, or numpy's.

A table that passed through CSV, pandas or a log holds a list of answers as ``'["Rome", "Roma"]'``,
``"['Rome' 'Roma']"`` or ``"array(['Rome', 'Roma'], dtype=object)"``. ``fields.py`` and
``chat_rows.py`` read them here, and refuse what looks like one and cannot be read.
"""

from __future__ import annotations

import ast
import json
import re

# How such a text begins: a list or object that is empty, or whose first item is a text or another.
_BEGINNING = re.compile(r"""\s*(?:array\(|[\[{]\s*(?:array\(|[\[{"']|[\]}]\s*\Z))""")
_TEXT = re.compile(r"""'(?:[^'\\]|\\.)*'|"(?:[^"\\]|\\.)*\"""", re.DOTALL)
_NUMPY_LIST = re.compile(r"\[\s*\0(?:\s+\0)*\s*\]")
_ARRAY = re.compile(r"array\(\s*(\[[^\[\]]*\])\s*(?:,\s*dtype=[\w<>.'\"\0]+\s*)?\)")
_NEIGHBOURS = re.compile(r"\0\s*\0")


class UnreadableError(ValueError):
    """A text that begins as a serialised value and cannot be read as one."""


def read_serialised(value: object) -> object:
    """The list or object that a text stands for; any other value as it is.

    Raises ``UnreadableError``. ``"[REC]"`` and ``"[1, 2]"`` are texts: nothing in them is quoted.
    """
    if not isinstance(value, str) or not _BEGINNING.match(value):
        return value
    try:
        return json.loads(value)
    except (ValueError, RecursionError):
        pass
    texts = iter(_TEXT.findall(value))
    outline = _NUMPY_LIST.sub(_with_commas, _TEXT.sub("\0", value.strip()))
    if _NEIGHBOURS.search(outline):  # Python would join them to one text
        raise UnreadableError("texts follow each other without a comma")
    try:
        outline = _ARRAY.sub(r"\1", outline)
        found = ast.literal_eval(re.sub("\0", lambda _: next(texts), outline))
    except (ValueError, SyntaxError, RecursionError, MemoryError, StopIteration) as error:
        raise UnreadableError("it is neither JSON nor Python's or numpy's spelling") from error
    return found


def _with_commas(found: re.Match[str]) -> str:
    """numpy writes the texts of a list with spaces between them."""
    return f"[{', '.join(found[0].count(chr(0)) * chr(0))}]"
