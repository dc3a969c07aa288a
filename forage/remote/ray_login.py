"""Joins a running Ray cluster, with its token if it needs one."""

from __future__ import annotations

from typing import Any


def join_ray(address: str | None, **options: Any) -> None:
    """Calls ``ray.init`` for ``address``, with the user's token; raises what ``ray.init`` raises.

    ``ray start`` requires a token if the user has one (``~/.ray/auth_token``), and a Ray started by
    a script writes one, but ``ray.init`` with an address sends it only on request. A cluster
    without authentication ignores the token; if ``RAY_AUTH_MODE`` is set, it decides.
    """
    import ray
    from ray._private.authentication.authentication_token_setup import (
        maybe_enable_token_auth_if_token_available,
    )

    maybe_enable_token_auth_if_token_available(warn_if_disabled=False)
    ray.init(address, **options)
