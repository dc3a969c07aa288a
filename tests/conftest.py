"""Settings that every test shares; OpenMP is quietened before anything imports torch."""

from pathlib import Path

import pytest
from hypothesis import settings

from forage.hardware import quiet_openmp

quiet_openmp()

settings.register_profile("forage", derandomize=True, deadline=None)
settings.load_profile("forage")


@pytest.fixture
def shared_data() -> Path:
    """Real text kept beside the repository; tests that need it are skipped where it is not."""
    path = Path(__file__).parents[2] / "shared" / "data"
    if not path.is_dir():
        pytest.skip("../shared/data not found")
    return path
