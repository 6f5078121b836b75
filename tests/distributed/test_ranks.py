"""Two ranks, real processes over gloo, make the step that one rank makes."""

import importlib.util
import os

import pytest
import torch
from filelock import FileLock

from tests.distributed import worker
from tests.distributed.process_group import launch, load_runs


pytestmark = pytest.mark.distributed

RUNS = ["trainer-fisher-full", "trainer-interacting-lora", "fsdp2-fisher-full", "fsdp2-fig4-lora"]
RUNS += ["trainer-fisher-experts", "fsdp2-fig4-experts", "fsdp2-fisher-expertslora"]
RUNS += ["trainer-fisher-dora", "fsdp2-fisher-dora"]  # gradients per sequence
RUNS += ["resumed-fisher-full", "overflow-fisher-full", "overflow-none-lora", "overflowfsdp-fisher-full"]
if importlib.util.find_spec("deepspeed") is not None:
    RUNS += ["zero2-fisher-full", "zero3-fisher-full", "overflow2-fisher-full", "overflow3-fisher-full"]
    # After a run under ZeRO-3, which leaves a function of its own in the place of PyTorch's
    RUNS += ["zero2-fisher-experts", "zero2-fisher-expertslora", "zero2-fisher-dora", "zero3-fisher-experts"]


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    """What each run left on each of two ranks; one launch for all of them, most of which is spent on imports."""
    folder = tmp_path_factory.getbasetemp()
    if "PYTEST_XDIST_WORKER" in os.environ:
        folder = folder.parent  # which the workers share
    output = folder / "ranks.pt"
    with FileLock(f"{output}.lock"):
        if not output.exists():
            launch((2, "worker.py", output, *RUNS))
    return load_runs(output)


def ranks(results, name):
    for result in results[name]:
        assert "error" not in result, result["error"]
    return results[name]


def assert_same(one, first, second, tolerance):
    assert one["weights"].keys() == first["weights"].keys()
    for name, expected in one["weights"].items():
        error = (first["weights"][name] - expected).norm() / expected.norm()
        assert error < tolerance, f"{name}: {error}"
        assert torch.equal(first["weights"][name], second["weights"][name]), f"{name} differs between ranks"
    assert torch.equal(first["mean"], second["mean"]), "running statistics differ between ranks"


# One rank is this process


@pytest.mark.parametrize(
    "rule,weights", [("fisher", "full"), ("interacting", "lora"), ("fisher", "experts"), ("fisher", "dora")]
)
def test_ddp_trains_to_the_weights_of_one_rank(rule, weights, results, tmp_path):
    one, two = worker.run(tmp_path, "trainer", rule, weights), ranks(results, f"trainer-{rule}-{weights}")
    assert two[0]["wrapped"] == "DistributedDataParallel"
    assert_same(one, *two, 1e-5)
    for left, right in zip(one["logs"], two[0]["logs"], strict=True):
        for name in [name for name in left if name.startswith("isopo/")] + ["grad_norm"]:
            assert left[name] == pytest.approx(right[name], rel=1e-4), name


@pytest.mark.parametrize(
    "rule,weights",
    [("fisher", "full"), ("fig4", "lora"), ("fig4", "experts"), ("fisher", "expertslora"), ("fisher", "dora")],
)
def test_fsdp2_trains_to_the_weights_of_one_rank(rule, weights, results, tmp_path):
    one, two = worker.run(tmp_path, "loop", rule, weights), ranks(results, f"fsdp2-{rule}-{weights}")
    assert two[0]["wrapped"].startswith("FSDP")
    assert_same(one, *two, 1e-5)


@pytest.mark.skipif(importlib.util.find_spec("deepspeed") is None, reason="needs deepspeed")
@pytest.mark.parametrize(
    "mode,weights",
    [
        *[("zero2", weights) for weights in ("full", "experts", "expertslora", "dora")],
        *[("zero3", weights) for weights in ("full", "experts")],
    ],
)
def test_deepspeed_trains_to_the_weights_of_one_rank(mode, weights, results, tmp_path):
    one, two = worker.run(tmp_path, "trainer", "fisher", weights), ranks(results, f"{mode}-fisher-{weights}")
    assert two[0]["wrapped"] == "DeepSpeedEngine"
    assert_same(one, *two, 1e-3)  # DeepSpeed clips and sums in an order of its own


def test_ranks_that_resume_inside_a_generation_end_with_the_weights_of_an_unbroken_run(results):
    first, second = ranks(results, "resumed-fisher-full")
    for name, expected in first["whole"].items():
        assert torch.equal(first["weights"][name], expected), name
        assert torch.equal(second["weights"][name], expected), name


@pytest.mark.parametrize("name", [name for name in RUNS if name.startswith("overflow")])
def test_a_gradient_that_overflows_on_one_rank_stops_all_of_them_before_the_optimizer(name, results):
    first, second = ranks(results, name)
    assert "The gradient of this step overflows" in first["said"] and "as they were" in first["said"]
    assert second["said"] == first["said"]
    for result in (first, second):
        assert result["step"] == 1
        for weight, before in result["before"].items():
            assert torch.equal(result["weights"][weight], before), weight
