"""Episode files in the format of an evaluation."""

from collections.abc import Iterable, Mapping
from pathlib import Path

from forage.episode_json import EpisodeRecord
from forage.records import write_records
from forage.types import Episode


def write_episode_file(
    path: Path, step: int, episodes_by_arm: Mapping[str, Iterable[Episode]]
) -> None:
    """Writes the episodes of every arm, replacing the file atomically."""
    write_records(
        path,
        (
            EpisodeRecord(step, arm, episode, None)
            for arm, episodes in episodes_by_arm.items()
            for episode in episodes
        ),
    )
