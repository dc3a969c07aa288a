"""A row's measurement: opens its sides, alternates them round by round, and keeps the figures."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from benchmarks.anchors.figure import Figure, SideRecord
from benchmarks.anchors.side import MissingSideError, OpenSide, Side, opened

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Task:
    """One request to all sides, and what of the replies is compared.

    ``aims`` are the ratios to reach, by the anchor's name; an anchor without one is shown only.
    """

    what: str
    unit: str
    aims: Mapping[str, float]
    request: Mapping[str, Any] = field(default_factory=dict)
    value: str = "value"
    """The name of the figure in the reply."""
    is_most: bool = False
    """Whether a ratio must not exceed the aim."""


@dataclass(slots=True)
class Bench:
    """Sizes, folder and results of one row."""

    folder: Path
    is_quick: bool
    num_rounds: int
    figures: list[Figure] = field(default_factory=list)
    sides: list[SideRecord] = field(default_factory=list)

    def pick(self, quick: T, full: T) -> T:
        return quick if self.is_quick else full

    def race(
        self, ours: Side, anchors: Sequence[Side], tasks: Sequence[Task], warms_up: bool = True
    ) -> None:
        """Has all sides do all tasks in each round, after one round that does not count.

        Sides that warm themselves up before they are ready need no such round.
        The order of the sides is reversed from round to round. An anchor that is missing costs only
        its own figures. Tasks with the same request are one piece of work with several figures.
        """
        with ExitStack() as stack:
            own = self._open(stack, ours)
            if isinstance(own, str):
                raise MissingSideError(own)
            rivals = {each.name: self._open(stack, each) for each in anchors}
            here = [own, *(side for side in rivals.values() if isinstance(side, OpenSide))]
            replies = self._alternate(here, _distinct(tasks), warms_up)
        for task in tasks:
            for name, rival in rivals.items():
                values: dict[str, Any] = {"missing": rival} if isinstance(rival, str) else {}
                if not values:
                    values["ours"] = [reply[task.value] for reply in replies[ours.name, _key(task)]]
                    found = replies[name, _key(task)]
                    if any(task.value not in reply for reply in found):
                        continue  # this anchor has no such figure
                    values["theirs"] = [reply[task.value] for reply in found]
                aim = task.aims.get(name)
                values["is_most"] = task.is_most
                self.figures.append(Figure(task.what, name, task.unit, aim, **values))

    def _open(self, stack: ExitStack, side: Side) -> OpenSide | str:
        """The side, or why it is missing."""
        print(f"  starting {side.name}", flush=True)
        try:
            found = stack.enter_context(opened(side, self.folder))
        except MissingSideError as missing:
            print(f"  {side.name}: {missing}", flush=True)
            return str(missing)
        self.sides.append(found.record)
        return found

    def _alternate(
        self, sides: Sequence[OpenSide], tasks: Sequence[Task], warms_up: bool
    ) -> dict[tuple[str, str], list[dict[str, float]]]:
        replies: dict[tuple[str, str], list[dict[str, float]]] = {}
        for number in range(0 if warms_up else 1, self.num_rounds + 1):
            for task in tasks:
                for side in sides if number % 2 else reversed(sides):
                    reply = side.round(task.request)
                    shown = ", ".join(f"{name} {value:.4g}" for name, value in reply.items())
                    print(f"  round {number}: {task.what}: {side.side.name}: {shown}", flush=True)
                    if number:
                        replies.setdefault((side.side.name, _key(task)), []).append(reply)
        return replies


def _key(task: Task) -> str:
    return repr(sorted(task.request.items()))


def _distinct(tasks: Sequence[Task]) -> list[Task]:
    """The first task of each request."""
    return list({_key(task): task for task in reversed(tasks)}.values())[::-1]
