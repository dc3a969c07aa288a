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

from forage.viewer.charts import SMOOTHING, number_text

_TEMPLATES = Path(__file__).parent / "templates"
_STATIC = Path(__file__).parent / "static"


def render_page(template: str, **values: Any) -> str:
    """A whole page; ``values`` are escaped where the template writes them."""
    return _environment().get_template(template).render(**values)


def content_security_policy(has_server: bool = False) -> str:
    """The policy: nothing is loaded, inline style is allowed, and one script, by its hash.

    Pages of the viewer (``has_server``) load the viewer's own scripts, styles and figures too.
    """
    digest = hashlib.sha256(_script().encode()).digest()
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
    # The only texts that are not escaped: files of this package.
    style = (_STATIC / "uPlot.min.css").read_text(encoding="utf-8") + _template("page.css")
    environment.globals["style"] = Markup(style)
    environment.globals["script"] = Markup(_script())
    environment.globals["smoothing"] = SMOOTHING
    environment.globals["policy"] = content_security_policy()
    return environment


@functools.cache
def _script() -> str:
    """uPlot under its licence, the charts drawn with it, and tooltips."""
    # Without its first line, a comment: pages name no address that they could load from.
    _, uplot = (_STATIC / "uPlot.iife.min.js").read_text(encoding="utf-8").split("\n", 1)
    licence = (_STATIC / "uPlot.LICENSE.txt").read_text(encoding="utf-8")
    return f"/* uPlot 1.6.32\n{licence}*/\n{uplot}{_template('charts.js')}{_template('page.js')}"


def _template(name: str) -> str:
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
