"""Binds a port, and explains why one cannot be bound."""

from __future__ import annotations

import errno
import ipaddress
import socket
from functools import lru_cache

from forage.errors import UserError


def bind_port(host: str, port: int) -> socket.socket:
    """Returns a socket bound to ``host:port`` (0: any), not listening; raises ``UserError``."""
    if not 0 <= port <= 65_535:
        raise UserError(f"port {port} does not exist; choose one from 1024 to 65535, or 0 for any")
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
    except socket.gaierror as error:
        raise UserError(f"cannot serve on host {host!r}: {error.strerror}") from error
    sock = socket.socket(family, kind, protocol)
    # A port whose last owner just exited may be reused at once.
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        sock.bind(address)
    except OSError as error:
        sock.close()
        raise explain_bind_error(error, host, port) from error
    return sock


@lru_cache(maxsize=64)
def is_loopback(host: str) -> bool:
    """Whether a name or numeric address is reachable only from this machine."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def explain_bind_error(error: OSError, host: str, port: int) -> UserError:
    """The error that tells the user why a port could not be bound."""
    if error.errno == errno.EADDRINUSE:
        return UserError(
            f"port {port} on {host} is in use: stop the program that listens there, or "
            "choose another --port (0 picks a free one)"
        )
    if error.errno == errno.EACCES:
        return UserError(f"port {port} needs root privileges; choose one above 1023 with --port")
    if error.errno == errno.EADDRNOTAVAIL:
        return UserError(
            f"host {host!r} is not an address of this machine; use 127.0.0.1 (this machine only) "
            "or 0.0.0.0 (every address)"
        )
    return UserError(f"cannot serve on {host}:{port}: {error.strerror}")
