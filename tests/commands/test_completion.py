"""What a shell completes, requested in the way of ``register-python-argcomplete``."""

import os
import subprocess
import sys

import pytest


def offered(line: str) -> list[str]:
    """The completions of a line with the cursor at its end."""
    asked = {"_ARGCOMPLETE": "1", "COMP_LINE": line, "COMP_POINT": str(len(line))}
    asked |= {"_ARGCOMPLETE_SUPPRESS_SPACE": "1", "_ARGCOMPLETE_STDOUT_FILENAME": "/dev/stdout"}
    command = [sys.executable, "-m", "forage"]
    environment = {**os.environ, **asked}
    done = subprocess.run(command, capture_output=True, text=True, check=True, env=environment)
    return done.stdout.split("\013")


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("forage ex", ["export"]),
        ("forage export --pu", ["--push"]),
        ("forage train xquad trainer.learning_r", ["trainer.learning_rate="]),
        ("forage data wor", ["world"]),
    ],
)
def test_commands_options_and_settings_are_completed(line: str, expected: list[str]):
    assert offered(line) == expected
