"""Checks once, within seconds, whether the model hub answers, before libraries retry for a minute.

``transformers`` and ``huggingface_hub`` retry many times and log two warnings each time. If the hub
is unreachable, models downloaded earlier are still used.
"""

from __future__ import annotations

import logging
import urllib.error
import urllib.request
from functools import cache
from pathlib import Path
from threading import Thread

from forage.errors import UserError

LOG = logging.getLogger(__name__)

_PATIENCE_S = 5.0


def only_downloaded(model: str) -> bool:
    """Whether ``model`` is a hub id and the hub is offline or unreachable."""
    if Path(model).is_dir():
        return False
    from huggingface_hub import constants

    return constants.HF_HUB_OFFLINE or not _answers(constants.ENDPOINT)


def refuse_unreachable(model: str, what: str, revision: str | None = None) -> None:
    """Raises ``UserError`` if ``model`` is not downloaded and the hub is offline or unreachable.

    ``what``: the role of the model, for the message: "the cross-encoder".
    """
    if not only_downloaded(model):
        return
    from huggingface_hub import constants, try_to_load_from_cache
    from huggingface_hub.errors import HFValidationError

    try:
        if isinstance(try_to_load_from_cache(model, "config.json", revision=revision), str):
            return
    except HFValidationError:  # neither a directory nor a hub id
        pass
    at = f" at {revision}" if revision else ""
    why = (
        "HF_HUB_OFFLINE forbids downloads"
        if constants.HF_HUB_OFFLINE
        else f"the hub ({constants.ENDPOINT}) cannot be reached"
    )
    raise UserError(
        f"cannot load {what} {model!r}{at}: there is no such directory, it has not been "
        f"downloaded, and {why}; name a directory, or download the model first on a machine with "
        "a network"
    )


@cache
def _answers(url: str) -> bool:
    """Whether a server answers at ``url`` in time, whatever it replies; logs a warning if not."""
    failures = [f"no answer within {_PATIENCE_S:g} s"]

    def ask() -> None:
        try:
            with urllib.request.urlopen(
                urllib.request.Request(url, method="HEAD"), timeout=_PATIENCE_S
            ):
                failures.clear()
        except urllib.error.HTTPError:
            failures.clear()  # it answered
        except OSError as error:
            failures.insert(0, str(getattr(error, "reason", error)))

    # Requests run in a thread, because name resolution has no timeout.
    asking = Thread(target=ask, daemon=True)
    asking.start()
    asking.join(_PATIENCE_S)
    reasons = list(failures)  # the thread may still write
    if reasons:
        text = "%s cannot be reached (%s): only downloaded models can be used"
        LOG.warning(text, url, reasons[0])
    return not reasons
