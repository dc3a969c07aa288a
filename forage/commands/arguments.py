"""What arguments of the command line may be: whole numbers, ports, seconds; and an address to bind.

Each is a ``type=`` of argparse: a text in, a value out, or an error that says what is allowed.
"""

from __future__ import annotations

import argparse
import math
from argparse import ArgumentParser


def positive(text: str) -> int:
    """A whole number from 1 up."""
    return _whole_number(text, lowest=1)


def count(text: str) -> int:
    """A whole number from 0 up."""
    return _whole_number(text, lowest=0)


def port(text: str) -> int:
    """A TCP port; 0 stands for any that is free."""
    return _whole_number(text, lowest=0, highest=65_535)


def seconds(text: str) -> float:
    """A time above 0."""
    value = _number(text)
    if not 0 < value < math.inf:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of seconds above 0")
    return value


def not_negative(text: str) -> float:
    """A number from 0 up."""
    value = _number(text)
    if not 0 <= value < math.inf:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number from 0 up")
    return value


def add_address(parser: ArgumentParser, default_port: int) -> None:
    """Where a server listens: on this machine alone unless told otherwise."""
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=port, default=default_port)


def _number(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        return math.nan


def _whole_number(text: str, lowest: int, highest: int = 2**63 - 1) -> int:
    if not (text.isdecimal() and lowest <= int(text) <= highest):
        raise argparse.ArgumentTypeError(
            f"{text!r} is not a whole number from {lowest}"
            + (f" to {highest}" if highest < 2**63 - 1 else " up")
        )
    return int(text)
