"""What a script of examples/ trains in is what the machine has."""

import sys
from pathlib import Path

import pytest
import torch


@pytest.fixture(scope="module")
def preflight():
    examples = str(Path(__file__).parents[2] / "examples")
    sys.path.insert(0, examples)
    try:
        import preflight

        yield preflight
    finally:
        sys.path.remove(examples)


@pytest.mark.parametrize(
    ("kind", "capability", "settings", "word"),
    [
        ("cpu", None, {"use_cpu": True, "bf16": False}, "CPU"),
        ("cuda", (7, 5), {"bf16": False}, "no bf16"),  # a T4
        ("cuda", (7, 0), {"bf16": False}, "no bf16"),
        ("cuda", (8, 0), {}, "in bf16"),
        ("cuda", (12, 0), {}, "in bf16"),
        ("cuda", None, {}, "in bf16"),  # AMD's
        ("mps", None, {}, "in bf16"),
    ],
)
def test_precision_is_that_of_the_device(preflight, kind, capability, settings, word):
    chosen, in_words = preflight.precision(kind, capability)
    assert chosen == settings and word in in_words


def test_a_gpu_without_bf16_is_told_by_its_capability(preflight):
    kind, capability = preflight.device()
    assert (kind == "cpu") == (not torch.accelerator.is_available())
    if kind == "cuda" and torch.version.hip is None:
        assert capability == torch.cuda.get_device_capability()
    else:
        assert capability is None


def test_a_script_trains_in_what_the_device_has_unless_told_otherwise(preflight, monkeypatch, capsys):
    import example_run

    monkeypatch.setattr(example_run, "device", lambda: ("cuda", (7, 5)))
    assert example_run.completed({}, "run", None)["bf16"] is False
    assert "no bf16" in capsys.readouterr().out
    assert example_run.completed({"bf16": True}, "run", None)["bf16"] is True
    assert not capsys.readouterr().out
    monkeypatch.setattr(example_run, "device", lambda: ("cuda", (8, 0)))
    assert "bf16" not in example_run.completed({}, "run", None)
    assert not capsys.readouterr().out
