import pytest

from tests.kernels import batches


@pytest.fixture
def poisoned_memory(monkeypatch):
    batches.poison_memory(monkeypatch)
