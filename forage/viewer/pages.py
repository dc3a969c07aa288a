"""Renders the pages of report and viewer, so that nothing which a passage holds can run.

Every text that a template writes is made visible and escaped. A content security policy allows only
this project's one script, by its hash, so that markup which slipped through would still not run.
Pages load nothing from outside.
"""

from __future__ import annotations

import base64
import functools
import hashlib
import unicodedata
from pathlib import Path
from typing import Any

import jinja2
from markupsafe import Markup

from forage.viewer.axes import number_text

_TEMPLATES = Path(__file__).parent / "templates"


def render_page(template: str, **values: Any) -> str:
    """A whole page; ``values`` are escaped where the template writes them."""
    return _environment().get_template(template).render(**values)


def content_security_policy(has_server: bool = False) -> str:
    """The policy: nothing is loaded, inline style is allowed, and one script, by its hash.

    Pages of the viewer (``has_server``) load the viewer's own scripts, styles and figures too.
    """
    digest = hashlib.sha256(_read("page.js").encode()).digest()
    script = base64.b64encode(digest).decode()
    own = " 'self'" if has_server else ""
    connect = "connect-src 'self'; " if has_server else ""
    return (
        f"default-src 'none'; style-src 'unsafe-inline'{own}; img-src data:; {connect}"
        f"script-src 'sha256-{script}'{own}; base-uri 'none'; form-action 'self'"
    )


def visible(text: str) -> str:
    """Text that is safe to show and to encode.

    Control characters become visible symbols. Characters that reorder or hide text become U+FFFD,
    as do lone surrogates, which UTF-8 cannot encode.
    """
    return "".join(_visible_character(character) for character in text)


@functools.cache
def _environment() -> jinja2.Environment:
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(_TEMPLATES),
        autoescape=True,
        finalize=_made_visible,
        trim_blocks=True,
        lstrip_blocks=True,
        undefined=jinja2.StrictUndefined,
    )
    environment.filters["number"] = number_text
    # The only texts that are not escaped: two files of this project.
    environment.globals["style"] = Markup(_read("page.css"))
    environment.globals["script"] = Markup(_read("page.js"))
    environment.globals["policy"] = content_security_policy()
    return environment


@functools.cache
def _read(name: str) -> str:
    return (_TEMPLATES / name).read_text(encoding="utf-8")


def _made_visible(value: object) -> object:
    # Templates make Markup; data is never Markup.
    return visible(value) if isinstance(value, str) and not isinstance(value, Markup) else value


def _visible_character(character: str) -> str:
    code = ord(character)
    if character in "\n\t" or 0x20 <= code < 0x7F:
        return character
    if code < 0x20:
        return chr(0x2400 + code)
    # Cc and Cs: control characters, surrogates. Bidirectional controls can make a line read as
    # something else. Joiners stay, because some scripts need them.
    if unicodedata.category(character) in ("Cc", "Cs"):
        return "\ufffd"
    if code in (0x061C, 0x200E, 0x200F) or 0x202A <= code <= 0x202E or 0x2066 <= code <= 0x2069:
        return "\ufffd"
    return character
