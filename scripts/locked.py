"""Prints a pylock.toml as requirements with hashes, which both pip and uv install (``make venv``).

uv writes the locks (``make lock``). pip reads them only from version 26 on, and the addresses in a
lock would bypass a mirror of PyPI; names with hashes avoid both problems.
"""

from __future__ import annotations

import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any


def requirements(lock: dict[str, Any]) -> Iterator[str]:
    """One line per package: its version, its marker, and the hashes of all its files."""
    for package in lock["packages"]:
        files = [*package.get("wheels", ()), *([package["sdist"]] if "sdist" in package else ())]
        marker = f" ; {package['marker']}" if "marker" in package else ""
        hashes = (f"--hash=sha256:{file['hashes']['sha256']}" for file in files)
        yield f"{package['name']}=={package['version']}{marker} {' '.join(hashes)}"


if __name__ == "__main__":
    for line in requirements(tomllib.loads(Path(sys.argv[1]).read_text(encoding="utf-8"))):
        print(line)
