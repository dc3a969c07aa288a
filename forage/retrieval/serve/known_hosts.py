"""Who may call: programs, and web pages of this very server, under a name that is known to be its.

A browser lets any page send requests to a server on its user's machine, and lets a page that moves
its own name to that machine's address (DNS rebinding) read the replies too. A page elsewhere gives
itself away by ``Origin``, a moved name by ``Host``. Who calls, a bearer token says; this is for
servers without one.
"""

from __future__ import annotations

import ipaddress
import socket
from collections.abc import Sequence

from starlette.datastructures import Headers

from forage.retrieval.serve.port import is_loopback


class KnownHosts:
    """The names under which a server may be called."""

    def __init__(self, listens_on: str = "127.0.0.1", added: Sequence[str] = ()) -> None:
        """``listens_on``: the server's host; ``added``: further names, without a port.

        On the loopback interface these, and the names of loopback, are all there are. On another
        one a machine has names that it does not know of, so that programs may use any, unless
        names are added; web pages still need one that is known, or a number, which nobody can move.
        """
        self._is_loopback = is_loopback(listens_on)
        self._added = frozenset(name.lower() for name in added)
        self._own = frozenset({listens_on.lower(), socket.gethostname().lower()})

    def refusal(self, headers: Headers) -> str | None:
        """Why a request with these headers is refused, or None."""
        host, origin = headers.get("host"), headers.get("origin")
        if origin is not None and not self._is_own_page(origin, host):
            return f"a web page of {origin[:200]!r} may not use this server"
        if host is None:  # an old program: browsers always say it
            return None
        is_open = not self._is_loopback and not self._added and origin is None
        if is_open or self._is_known(_name(host)):
            return None
        return (
            f"this server is not called {_name(host)[:200]!r}; start it with --allow-host NAME if "
            "it may be"
        )

    def _is_own_page(self, origin: str, host: str | None) -> bool:
        """Whether a page was loaded from here, or from an added name (a proxy's, say)."""
        _, _, place = origin.lower().partition("://")
        return bool(place) and (place == (host or "").lower() or _name(place) in self._added)

    def _is_known(self, name: str) -> bool:
        if name in self._added or is_loopback(name):
            return True
        return not self._is_loopback and (name in self._own or _is_number(name))


def _name(host: str) -> str:
    """``localhost:8000`` is ``localhost``, ``[::1]:8000`` is ``::1``."""
    if host.startswith("["):
        return host[1:].partition("]")[0].lower()
    return host.partition(":")[0].lower()


def _is_number(name: str) -> bool:
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True
