"""Joining a Ray that runs already, with the token that it may ask for."""

from __future__ import annotations

from typing import Any


def join_ray(address: str | None, **options: Any) -> None:
    """``ray.init`` at ``address``; raises what that raises.

    ``ray start`` asks for a token wherever this user has one (``~/.ray/auth_token``), and a Ray
    that a script began for itself writes one. ``ray.init`` with an address shows none unless it is
    told to. A Ray that asks for none takes no offence; a ``RAY_AUTH_MODE`` that is set decides.
    """
    import ray
    from ray._private.authentication.authentication_token_setup import (
        maybe_enable_token_auth_if_token_available,
    )

    maybe_enable_token_auth_if_token_available(warn_if_disabled=False)
    ray.init(address, **options)
