"""What ``pip install forage`` brings: a wheel is built, and installed where torch is not."""

import json
import os
import re
import subprocess
import sys
import urllib.request
import zipfile
from email import message_from_bytes
from importlib import metadata
from pathlib import Path
from shutil import copy, copytree, ignore_patterns

import pytest
from packaging.requirements import Requirement

from forage.retrieval.serve.child_server import ServerProcess

ROOT = Path(__file__).parent.parent

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Built of a copy, since a build writes into the folder that it builds."""
    source, out = tmp_path_factory.mktemp("source"), tmp_path_factory.mktemp("wheel")
    for folder in ("forage", "configs", "examples", "plugins"):
        copytree(ROOT / folder, source / folder, ignore=ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "setup.py", "MANIFEST.in", "README.md", "LICENSE"):
        copy(ROOT / name, source)
    run(
        *(sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation"),
        *("--wheel-dir", out, source),
    )
    [built] = out.glob("*.whl")
    return built


@pytest.fixture(scope="module")
def retriever_only(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An environment of the wheel and of what it requires without extras; its ``forage``."""
    home = tmp_path_factory.mktemp("environment")
    run(sys.executable, "-m", "venv", "--without-pip", home)
    python = home / "bin" / "python"
    [site] = home.glob("lib/python*/site-packages")
    for name in closure(stated_in(wheel)):
        for file in metadata.files(name) or []:
            top = file.parts[0]
            if top not in ("..", "__pycache__") and not (site / top).is_symlink():
                (site / top).symlink_to(str(metadata.distribution(name).locate_file(top)))
    run(
        *(sys.executable, "-m", "pip", "--python", python, "install", "--quiet", "--no-deps"),
        *("--no-index", wheel),
    )
    return home / "bin" / "forage"


def stated_in(wheel: Path) -> list[str]:
    """The lines of what a wheel requires."""
    with zipfile.ZipFile(wheel) as archive:
        [about] = [name for name in archive.namelist() if name.endswith(".dist-info/METADATA")]
        message = message_from_bytes(archive.read(about))
    return message.get_all("Requires-Dist") or []


def closure(lines: list[str]) -> set[str]:
    """The distributions that these lines need on this machine, without extras, and theirs."""
    found: set[str] = set()
    left = list(lines)
    while left:
        needed = Requirement(left.pop())
        name = needed.name.lower().replace("_", "-")
        is_wanted = needed.marker is None or needed.marker.evaluate({"extra": ""})
        if is_wanted and name not in found:
            found.add(name)
            left += metadata.requires(name) or []
    return found


def run(*words: str | Path) -> str:
    """The output of a program that must succeed, with no path of this checkout."""
    done = subprocess.run(
        [str(word) for word in words], capture_output=True, text=True, env=clean(), check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def clean() -> dict[str, str]:
    return {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}


def test_a_wheel_brings_recipes_examples_and_types(wheel: Path):
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
    recipes = {f"forage/{path.relative_to(ROOT)}" for path in (ROOT / "configs").rglob("*.yaml")}
    assert recipes | {"forage/py.typed", "forage/examples/rewards.py"} <= names
    assert "forage/plugins/forage_receiver.py" in names
    assert {name.split("/")[0].split("-")[0] for name in names} == {"forage"}


def test_without_torch_an_index_of_words_is_built_and_served(
    retriever_only: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("PYTHONPATH", raising=False)
    python = retriever_only.with_name("python")
    tried = "import importlib.util as i; print(i.find_spec('torch'), i.find_spec('transformers'))"
    assert run(python, "-c", tried).split() == ["None", "None"]
    assert "usage: forage" in run(retriever_only, "--help")
    assert "search-r1-grpo-v0.2" in run(retriever_only, "recipes")
    run(retriever_only, "recipes", "--out", "mine")
    assert (tmp_path / "mine" / "plugins" / "forage_receiver.py").is_file()
    (tmp_path / "notes").mkdir()
    (tmp_path / "notes" / "a.md").write_text("# Printer\n\nIt listens on port 9100.\n")
    run(retriever_only, "index", "--corpus", "notes", "--out", "index")
    with ServerProcess(Path("index"), command=(str(retriever_only), "serve")) as server:
        body = json.dumps({"queries": ["printer port"], "topk": 1}).encode()
        request = urllib.request.Request(
            f"{server.url}/retrieve", body, {"Content-Type": "application/json"}
        )
        with urllib.request.urlopen(request, timeout=60) as reply:
            [[found]] = json.load(reply)["result"]
    assert (found["id"], found["file"]) == ("a.md#1", "a.md")
    trained = subprocess.run(
        [retriever_only, "train", "xquad", "--dry-run"], capture_output=True, text=True, check=False
    )
    assert trained.returncode == 2
    assert re.search(r"package \w+ is missing; run: pip install 'forage\[train\]'", trained.stderr)
