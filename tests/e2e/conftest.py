"""Real runs of the toy job, shared by the tests that look at them."""

import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))


@pytest.fixture(scope="session", autouse=True)
def _workers_find_the_toy() -> Iterator[None]:
    """Ray's workers import `toy:fondness` by name."""
    former = os.environ.get("PYTHONPATH")
    os.environ["PYTHONPATH"] = str(Path(__file__).parent)
    yield
    if former is None:
        del os.environ["PYTHONPATH"]
    else:
        os.environ["PYTHONPATH"] = former
