"""The process of a side: ``python -m benchmarks.anchors.child WORK PACKAGES ARGUMENTS IN OUT``.

WORK names a function as ``module:function``, which gets the talk and the arguments (JSON). Nothing
heavy is imported before it: the function decides what is set before torch is loaded.
"""

from __future__ import annotations

import importlib
import json
import os
import sys
from importlib.metadata import PackageNotFoundError, version

from benchmarks.anchors.talk import Talk


def main() -> None:
    work, packages, arguments, requests, replies = sys.argv[1:]
    talk = Talk(os.fdopen(int(requests)), os.fdopen(int(replies), "w"))
    versions: dict[str, str] = {"python": sys.version.split()[0]}
    for package in json.loads(packages):
        try:
            versions[package] = version(package)
        except PackageNotFoundError:
            talk.missing(f"{package} is not installed: `make anchors`")
            return
    talk.versions(versions)
    module, _, function = work.partition(":")
    getattr(importlib.import_module(module), function)(talk, **json.loads(arguments))


if __name__ == "__main__":
    main()
