"""The script that measures the code: its stories name what is there, and its counts are right."""

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import pytest
import yaml

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "benchmarks" / "house.py"


@pytest.fixture(scope="module")
def house() -> ModuleType:
    spec = importlib.util.spec_from_file_location("house", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["house"] = module  # its dataclasses look their module up
    spec.loader.exec_module(module)
    return module


def test_every_function_of_every_story_is_there(house: ModuleType):
    modules = house.read_modules(ROOT / "forage")
    known = {
        f"{f.file}:{f.name}" for m, (_, tree) in modules.items() for f in house.functions(m, tree)
    }
    stories = yaml.safe_load(SCRIPT.with_suffix(".yaml").read_text(encoding="utf-8"))["stories"]
    assert len(stories) == 3
    assert {step for steps in stories.values() for step in steps} - known == set()


def test_functions_and_callers_are_counted_as_they_stand_in_a_toy_package(
    house: ModuleType, tmp_path: Path
):
    package = tmp_path / "forage"
    package.mkdir()
    (package / "a.py").write_text(
        "class A:\n    def f(self):\n        return 1\n", encoding="utf-8"
    )
    (package / "b.py").write_text("from forage.a import A\n\nprint(A)\n", encoding="utf-8")
    (package / "c.py").write_text("def g():\n    import forage.a\n", encoding="utf-8")
    modules = house.read_modules(package)
    found = [each for file, (_, tree) in modules.items() for each in house.functions(file, tree)]
    assert [(each.file, each.name, each.num_lines) for each in found] == [
        ("a.py", "A.f", 2),
        ("c.py", "g", 2),
    ]
    assert house.callers(modules) == {"a.py": {"b.py", "c.py"}, "b.py": set(), "c.py": set()}
