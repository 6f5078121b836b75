"""Two ranks, real processes over gloo, make the step that one rank makes."""

import importlib.util
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import torch


ROOT = Path(__file__).parents[2]
WORKER = Path(__file__).with_name("worker.py")

pytestmark = pytest.mark.distributed


def run(folder, ranks, mode, rule, weights):
    output = folder / f"{mode}-{ranks}.pt"
    launcher = [sys.executable]
    if ranks > 1:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        launcher += ["-m", "torch.distributed.run", f"--nproc_per_node={ranks}", f"--master_port={port}"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    environment["DS_ACCELERATOR"] = "cpu"
    command = [*launcher, str(WORKER), str(output), mode, rule, weights]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    return torch.load(output)


def assert_same(one, two, tolerance):
    assert one["weights"].keys() == two["weights"].keys()
    for name, expected in one["weights"].items():
        error = (two["weights"][name] - expected).norm() / expected.norm()
        assert error < tolerance, f"{name}: {error}"
    assert torch.equal(two["means"][0], two["means"][1]), "running statistics differ between ranks"


@pytest.mark.parametrize("rule,weights", [("fisher", "full"), ("interacting", "lora")])
def test_ddp_trains_to_the_weights_of_one_rank(rule, weights, tmp_path):
    one, two = (run(tmp_path, ranks, "trainer", rule, weights) for ranks in (1, 2))
    assert two["wrapped"] == "DistributedDataParallel"
    assert_same(one, two, 1e-5)
    for left, right in zip(one["logs"], two["logs"], strict=True):
        for name in [name for name in left if name.startswith("isopo/")] + ["grad_norm"]:
            assert left[name] == pytest.approx(right[name], rel=1e-4), name


@pytest.mark.parametrize("rule,weights", [("fisher", "full"), ("fig4", "lora")])
def test_fsdp2_trains_to_the_weights_of_one_rank(rule, weights, tmp_path):
    one, two = run(tmp_path, 1, "loop", rule, weights), run(tmp_path, 2, "fsdp2", rule, weights)
    assert two["wrapped"].startswith("FSDP")
    assert_same(one, two, 1e-5)


@pytest.mark.skipif(importlib.util.find_spec("deepspeed") is None, reason="needs deepspeed")
@pytest.mark.parametrize("mode", ["zero2", "zero3"])
def test_deepspeed_trains_to_the_weights_of_one_rank(mode, tmp_path):
    one, two = run(tmp_path, 1, "trainer", "fisher", "full"), run(tmp_path, 2, mode, "fisher", "full")
    assert two["wrapped"] == "DeepSpeedEngine"
    assert_same(one, two, 1e-3)  # DeepSpeed clips and sums in an order of its own
