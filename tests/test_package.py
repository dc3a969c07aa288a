"""The distribution on PyPI: its metadata, its archive, and the files that describe it."""

import re
import tarfile
import tomllib
from pathlib import Path

import pytest
import yaml

from forage import __version__
from forage.errors import DISTRIBUTION
from tests.wheel_environments import ROOT, build_sdist

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
_INSTALL = re.compile(r"""pip install[^\n`]*?["' ]([\w.-]*)\[[a-z,]+\]""")


def texts() -> list[Path]:
    """Files in which users read how to install an extra."""
    folders = ("forage", "docs", "examples", "configs", "benchmarks")
    found = [path for name in folders for path in (ROOT / name).rglob("*")]
    pages = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", ROOT / "Makefile"]
    return [path for path in (*found, *pages) if path.suffix in (".py", ".md", ".yaml", ".sh", "")]


def test_every_command_that_installs_an_extra_names_our_distribution():
    """``forage`` on PyPI is another project: six messages once told users to install that one."""
    named = {
        (name, path.name)
        for path in texts()
        if path.is_file()
        for name in _INSTALL.findall(path.read_text(encoding="utf-8", errors="replace"))
    }
    assert {name for name, _ in named} == {DISTRIBUTION, "."}, named
    assert PROJECT["name"] == DISTRIBUTION


def test_the_citation_and_the_package_agree():
    cited = yaml.safe_load((ROOT / "CITATION.cff").read_text(encoding="utf-8"))
    assert cited["version"] == __version__
    assert cited["license"] == PROJECT["license"]
    assert cited["authors"] == PROJECT["authors"]
    assert cited["url"] == PROJECT["urls"]["Homepage"]


@pytest.mark.slow
def test_the_sdist_has_no_tests_and_everything_that_a_wheel_needs(tmp_path: Path):
    """It once had those tests that lie directly in ``tests/``, and not what they import."""
    with tarfile.open(build_sdist(tmp_path / "source", tmp_path)) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    assert not {name for name in names if name.startswith("tests")}
    needed = {path.relative_to(ROOT) for path in (ROOT / "configs").rglob("*.yaml")}
    assert {str(path) for path in needed} <= names
    assert {"README.md", "LICENSE", "CITATION.cff", "CHANGELOG.md", "setup.py"} <= names
    assert {"forage/commands/cli.py", "plugins/forage_receiver.py", "examples/rewards.py"} <= names
