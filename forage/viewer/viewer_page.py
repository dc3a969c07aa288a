"""A page of the viewer as an answer over HTTP: rendered, with the headers that keep it harmless.

Unlike the report, the pages of the viewer load scripts and styles, from the viewer alone.
"""

from __future__ import annotations

from pathlib import Path

from fastapi.responses import HTMLResponse

from forage.viewer.pages import content_security_policy, render_page

STATIC = Path(__file__).parent / "static"

LOOPBACK_NAMES = ["127.0.0.1", "localhost", "[::1]"]

HEADERS = {
    "Cache-Control": "no-store",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "X-Frame-Options": "DENY",
}


def viewer_page(template: str, status_code: int = 200, **values: object) -> HTMLResponse:
    """The rendered page."""
    policy = content_security_policy(has_server=True)
    html = render_page(template, policy=policy, **values).encode("utf-8", "replace")
    headers = {"Content-Security-Policy": policy}
    return HTMLResponse(html, status_code=status_code, headers=headers)
