"""Forage: reinforcement learning for language models that reason and search.

In a script or a notebook, ``forage.Run`` is a run (docs/library.md); its names are imported when
they are asked for, so that ``import forage`` costs nothing.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from forage.library import Episode as Episode
    from forage.library import Passage as Passage
    from forage.library import Question as Question
    from forage.library import Reward as Reward
    from forage.library import Run as Run
    from forage.library import Step as Step
    from forage.library import Trained as Trained

__version__ = "0.1.0"
_OF_THE_LIBRARY = ("Episode", "Passage", "Question", "Reward", "Run", "Step", "Trained")


def __getattr__(name: str) -> Any:
    if name in _OF_THE_LIBRARY:
        from forage import library

        return getattr(library, name)
    raise AttributeError(f"module 'forage' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted([*globals(), *_OF_THE_LIBRARY])
