"""Environments in which ``pip install 'forage-rl[...]'`` installed exactly what it declares.

Packages are linked from the environment of the tests, so that nothing is downloaded.
"""

from __future__ import annotations

import os
import subprocess
import sys
import zipfile
from collections.abc import Sequence
from email import message_from_bytes
from importlib import metadata
from pathlib import Path
from shutil import copy, copytree, ignore_patterns

from packaging.requirements import Requirement

from forage.errors import DISTRIBUTION

ROOT = Path(__file__).parent.parent


_FILES = ("pyproject.toml", "setup.py", "MANIFEST.in", "README.md", "LICENSE", "CHANGELOG.md")


def build_sdist(source: Path, out: Path) -> Path:
    """An sdist in ``out``, built from a copy that also contains tests."""
    _copy_sources(source, ("forage", "configs", "examples", "plugins", "tests"))
    code = "from setuptools.build_meta import build_sdist; import sys; build_sdist(sys.argv[1])"
    subprocess.run(
        [sys.executable, "-c", code, out], cwd=source, capture_output=True, env=clean(), check=True
    )
    [built] = out.glob("*.tar.gz")
    return built


def build_wheel(source: Path, out: Path) -> Path:
    """A wheel in ``out``, built from a copy, because a build writes into its source folder."""
    _copy_sources(source, ("forage", "configs", "examples", "plugins"))
    run(
        *(sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation"),
        *("--wheel-dir", out, source),
    )
    [built] = out.glob("*.whl")
    return built


def _copy_sources(source: Path, folders: Sequence[str]) -> None:
    for folder in folders:
        copytree(ROOT / folder, source / folder, ignore=ignore_patterns("__pycache__"))
    for name in (*_FILES, "CITATION.cff"):
        copy(ROOT / name, source)


def make_environment(wheel: Path, home: Path, extras: Sequence[str] = ()) -> Path:
    """An environment with the wheel and its requirements for these extras; its ``forage``."""
    run(sys.executable, "-m", "venv", "--without-pip", home)
    python = home / "bin" / "python"
    [site] = home.glob("lib/python*/site-packages")
    for name in closure(stated_in(wheel), extras):
        for file in metadata.files(name) or []:
            top = file.parts[0]
            if top not in ("..", "__pycache__") and not (site / top).is_symlink():
                (site / top).symlink_to(str(metadata.distribution(name).locate_file(top)))
    run(
        *(sys.executable, "-m", "pip", "--python", python, "install", "--quiet", "--no-deps"),
        *("--no-index", "--no-compile", wheel),  # a test imports little of it
    )
    return home / "bin" / "forage"


def stated_in(wheel: Path) -> list[str]:
    """The requirement lines of a wheel."""
    with zipfile.ZipFile(wheel) as archive:
        [about] = [name for name in archive.namelist() if name.endswith(".dist-info/METADATA")]
        message = message_from_bytes(archive.read(about))
    return message.get_all("Requires-Dist") or []


def closure(lines: list[str], extras: Sequence[str] = ()) -> set[str]:
    """The distributions that these lines require on this machine with the extras, recursively."""
    left: list[tuple[str, frozenset[str]]] = [(DISTRIBUTION, frozenset(extras))]
    seen: set[tuple[str, frozenset[str]]] = set()
    while left:
        if (wanted := left.pop()) in seen:
            continue
        seen.add(wanted)
        name, own_extras = wanted
        for line in lines if name == DISTRIBUTION else metadata.requires(name) or []:
            needed = Requirement(line)
            marker = needed.marker
            if marker is None or any(marker.evaluate({"extra": e}) for e in ("", *own_extras)):
                left.append((needed.name.lower().replace("_", "-"), frozenset(needed.extras)))
    return {name for name, _ in seen} - {DISTRIBUTION}


def run(*words: str | Path) -> str:
    """The output of a program that must succeed, without a path of this checkout."""
    done = subprocess.run(
        [str(word) for word in words], capture_output=True, text=True, env=clean(), check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def clean() -> dict[str, str]:
    return {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
