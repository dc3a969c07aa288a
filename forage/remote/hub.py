"""Whether the hub of models answers: asked once, for seconds, before a library asks for a minute.

``transformers`` and ``huggingface_hub`` try again and again, with two lines of warning each time.
Where nobody answers, what was downloaded before is still used.
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
    """Whether ``model`` is an id of the hub, and the hub cannot be asked for it."""
    if Path(model).is_dir():
        return False
    from huggingface_hub import constants

    return constants.HF_HUB_OFFLINE or not _answers(constants.ENDPOINT)


def refuse_unreachable(model: str, what: str, revision: str | None = None) -> None:
    """Raise ``UserError`` for an id that was not downloaded, where the hub cannot be asked.

    ``what`` the model is to be, for the message: "the cross-encoder".
    """
    if not only_downloaded(model):
        return
    from huggingface_hub import constants, try_to_load_from_cache
    from huggingface_hub.errors import HFValidationError

    try:
        if isinstance(try_to_load_from_cache(model, "config.json", revision=revision), str):
            return
    except HFValidationError:  # no id of the hub either
        pass
    at = f" at {revision}" if revision else ""
    why = (
        "HF_HUB_OFFLINE forbids to ask the hub"
        if constants.HF_HUB_OFFLINE
        else f"the hub ({constants.ENDPOINT}) cannot be reached"
    )
    raise UserError(
        f"cannot load {what} {model!r}{at}: it is no directory here, it has not been downloaded, "
        f"and {why}; name a directory, or download it first where there is a network"
    )


@cache
def _answers(url: str) -> bool:
    """Whether a server answers at ``url`` in time, whatever it says; says so where it does not."""
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

    # A thread, since no deadline of ours ends the search for a name.
    asking = Thread(target=ask, daemon=True)
    asking.start()
    asking.join(_PATIENCE_S)
    said = list(failures)  # the thread may still write
    if said:
        text = "%s cannot be reached (%s): only models that were downloaded before are found"
        LOG.warning(text, url, said[0])
    return not said
