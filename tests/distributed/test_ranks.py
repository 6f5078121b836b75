"""Two ranks, real processes over gloo, make the step that one rank makes."""

import importlib.util

import pytest
import torch

from tests.distributed.process_group import finish, start


pytestmark = pytest.mark.distributed


def run(folder, ranks, mode, rule, weights):
    """What each rank ends with."""
    output = folder / f"{mode}-{ranks}.pt"
    finish(start(ranks, "worker.py", output, mode, rule, weights))
    return torch.load(output)


def assert_same(one, first, second, tolerance):
    assert one["weights"].keys() == first["weights"].keys()
    for name, expected in one["weights"].items():
        error = (first["weights"][name] - expected).norm() / expected.norm()
        assert error < tolerance, f"{name}: {error}"
        assert torch.equal(first["weights"][name], second["weights"][name]), f"{name} differs between ranks"
    assert torch.equal(first["mean"], second["mean"]), "running statistics differ between ranks"


@pytest.mark.parametrize("rule,weights", [("fisher", "full"), ("interacting", "lora")])
def test_ddp_trains_to_the_weights_of_one_rank(rule, weights, tmp_path):
    (one,), two = (run(tmp_path, ranks, "trainer", rule, weights) for ranks in (1, 2))
    assert two[0]["wrapped"] == "DistributedDataParallel"
    assert_same(one, *two, 1e-5)
    for left, right in zip(one["logs"], two[0]["logs"], strict=True):
        for name in [name for name in left if name.startswith("isopo/")] + ["grad_norm"]:
            assert left[name] == pytest.approx(right[name], rel=1e-4), name


@pytest.mark.parametrize("rule,weights", [("fisher", "full"), ("fig4", "lora")])
def test_fsdp2_trains_to_the_weights_of_one_rank(rule, weights, tmp_path):
    (one,), two = run(tmp_path, 1, "loop", rule, weights), run(tmp_path, 2, "fsdp2", rule, weights)
    assert two[0]["wrapped"].startswith("FSDP")
    assert_same(one, *two, 1e-5)


@pytest.mark.skipif(importlib.util.find_spec("deepspeed") is None, reason="needs deepspeed")
@pytest.mark.parametrize("mode", ["zero2", "zero3"])
def test_deepspeed_trains_to_the_weights_of_one_rank(mode, tmp_path):
    (one,), two = run(tmp_path, 1, "trainer", "fisher", "full"), run(tmp_path, 2, mode, "fisher", "full")
    assert two[0]["wrapped"] == "DeepSpeedEngine"
    assert_same(one, *two, 1e-3)  # DeepSpeed clips and sums in an order of its own
