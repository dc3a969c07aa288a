"""Which addresses of the web may be fetched: http and https to public machines, nothing inside.

A page's address comes from strangers (a search provider, a page's redirect, a model), and this
process can reach machines that strangers cannot. The check stands where a socket is made, on the
very address that is then connected to, so that neither a second DNS answer, nor a redirect, nor an
odd spelling of an address goes around it.
"""

from __future__ import annotations

import socket
from collections.abc import Collection, Sequence
from ipaddress import (
    IPv4Address,
    IPv4Network,
    IPv6Address,
    IPv6Network,
    ip_address,
    ip_network,
)
from typing import Any

from yarl import URL

WEB_PORTS = frozenset({80, 443, 8000, 8080, 8443})

_MAX_URL_CHARS = 4096
_NAT64 = ip_network("64:ff9b::/96")

_AddressInfo = tuple[int, int, int, str, Sequence[Any]]


class RefusedAddressError(OSError):
    """An address that may not be connected to; an ``OSError``, so that HTTP libraries expect it."""


class AddressGuard:
    """Says which addresses may be fetched.

    ``allowed_networks`` are let through although they are not public, and ``allowed_ports`` None
    is any port: both are for tests and for closed networks whose operator knows what they do.
    """

    def __init__(
        self,
        allowed_networks: Sequence[str] = (),
        allowed_ports: Collection[int] | None = WEB_PORTS,
    ) -> None:
        self._allowed: list[IPv4Network | IPv6Network] = [ip_network(n) for n in allowed_networks]
        self._ports = allowed_ports

    def check_url(self, text: str) -> URL:
        """The address as a URL; raises ``ValueError`` with the reason it may not be fetched."""
        if len(text) > _MAX_URL_CHARS:
            raise ValueError(f"an address of {len(text)} characters")
        url = URL(text)
        if url.scheme not in ("http", "https"):
            raise ValueError(f"an address of the scheme {url.scheme[:20]!r}")
        if not url.host:
            raise ValueError("an address without a host")
        if url.user is not None or url.password is not None:
            raise ValueError("an address with a user name or a password")
        if self._ports is not None and url.port not in self._ports:
            raise ValueError(f"an address with the port {url.port}")
        return url

    def open_socket(self, info: _AddressInfo) -> socket.socket:
        """A socket for an address that was looked up; raises ``RefusedAddressError``."""
        family, kind, protocol, _, address = info
        if not self.allows(str(address[0])):
            raise RefusedAddressError(f"{address[0]} is not a public address")
        return socket.socket(family=family, type=kind, proto=protocol)

    def allows(self, host: str) -> bool:
        """Whether a numeric address is public (or let through)."""
        address = ip_address(host.partition("%")[0])
        inner = _inner(address)
        if any(inner in network for network in self._allowed if network.version == inner.version):
            return True
        return inner.is_global and not (
            inner.is_multicast
            or inner.is_reserved
            or inner.is_loopback
            or inner.is_link_local
            or inner.is_private
            or inner.is_unspecified
            or (isinstance(inner, IPv6Address) and inner.is_site_local)
        )


def _inner(address: IPv4Address | IPv6Address) -> IPv4Address | IPv6Address:
    """The IPv4 address that an IPv6 one stands for (mapped, 6to4, NAT64), else the address."""
    if isinstance(address, IPv4Address):
        return address
    if address.ipv4_mapped is not None:
        return address.ipv4_mapped
    if address.sixtofour is not None:
        return address.sixtofour
    if address in _NAT64:
        return IPv4Address(int(address) & 0xFFFFFFFF)
    return address
