"""Settings shared by all tests; OpenMP is quieted before anything imports torch."""

import logging
import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import settings

from forage.hardware import quiet_openmp

quiet_openmp()
# Ray would write a token to the home, and keeps the first mode that a process has used.
os.environ["RAY_AUTH_MODE"] = "disabled"

settings.register_profile("forage", derandomize=True, deadline=None)
settings.load_profile("forage")


@pytest.fixture(autouse=True)
def _default_matmul_kernel() -> Iterator[None]:
    """A run chooses a kernel for its process; this restores torch's own for the next test.

    Without it a test compared weights with those of a new process, which had not chosen a kernel.
    """
    import torch

    yield
    flags = torch.backends.mkldnn.matmul  # pyright: ignore[reportAttributeAccessIssue]
    flags.fp32_precision = "none"  # even if a module's fixture chose before the test began


@pytest.fixture(autouse=True)
def _shared_tokenizer_stays_as_it_was() -> Iterator[None]:
    """A test that adds a token to the tokenizer of all tests fails here, not the later ones."""
    yield
    fakes = sys.modules.get("tests.fakes")  # not imported for tests that do without
    if fakes is not None and fakes.tiny_tokenizer.cache_info().currsize:
        assert len(fakes.tiny_tokenizer()) == 300, "change a copy of tiny_tokenizer()"


@pytest.fixture(autouse=True)
def _logging_stays_as_it_was() -> Iterator[None]:
    """A command sets up the logging of its process; this restores it for the next test."""
    root, own = logging.getLogger(), logging.getLogger("forage")
    before = (root.handlers, root.level, own.level)
    yield
    root.handlers = before[0]
    root.setLevel(before[1])
    own.setLevel(before[2])


@pytest.fixture
def shared_data() -> Path:
    """Real text outside the repository; tests that need it are skipped if it is missing."""
    path = Path(__file__).parents[2] / "shared" / "data"
    if not path.is_dir():
        pytest.skip("../shared/data not found")
    return path
