import pytest

from isopo_trl.validation import callback


@pytest.fixture(autouse=True)
def undrawn(monkeypatch):
    """A picture takes longer than a validation: the scripts draw one at the end, and the callback none in passing."""
    monkeypatch.setattr(callback, "is_matplotlib_available", lambda: False)
