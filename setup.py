"""Puts recipes, examples and plugins into a wheel; everything else stands in pyproject.toml."""

import shutil
from pathlib import Path

from setuptools import setup
from setuptools.command.build_py import build_py


class BuildWithRecipes(build_py):
    """Three folders are beside the package here, and inside it in a wheel."""

    def run(self) -> None:
        super().run()
        if self.editable_mode:
            return  # they are read where they are
        for folder in ("configs", "examples", "plugins"):
            shutil.copytree(
                folder,
                Path(self.build_lib, "forage", folder),
                dirs_exist_ok=True,
                ignore=shutil.ignore_patterns("__pycache__"),
            )


setup(cmdclass={"build_py": BuildWithRecipes})
