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

LOG = logging.getLogger(__name__)

_PATIENCE_S = 5.0


def only_downloaded(model: str) -> bool:
    """Whether ``model`` is an id of the hub, and the hub cannot be asked for it."""
    if Path(model).is_dir():
        return False
    from huggingface_hub import constants

    return constants.HF_HUB_OFFLINE or not _answers(constants.ENDPOINT)


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
