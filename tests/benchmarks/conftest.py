"""Scripts in `benchmarks` import one another by name, as they do when they are run."""

import sys
from pathlib import Path

import pytest


BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
FOLDERS = [str(BENCHMARKS / name) for name in ("learning", "speed", "questions")]


@pytest.fixture(scope="session", autouse=True)
def importable():
    sys.path[:0] = FOLDERS
    yield
    for folder in FOLDERS:
        sys.path.remove(folder)
