import functools
import gc
import importlib
import importlib.metadata
import os


# Set before transformers is imported: a test that would need the network fails at once, and says so.
os.environ["HF_HUB_OFFLINE"] = "1"

import pytest
import torch


# What is imported from here on stays: there is no garbage in it, and it would be looked through again and again
gc.disable()

if "PYTEST_XDIST_WORKER" in os.environ:
    # Tiny tensors gain nothing from threads, and workers that each use every core slow one another down. So do the
    # processes that they start.
    torch.set_num_threads(1)
    os.environ["OMP_NUM_THREADS"] = "1"
    os.environ["OMP_WAIT_POLICY"] = "passive"  # where one asks for more, they wait without work


# Accelerate asks at every step which packages there are, and reads all that is known of them to find out: a seventh of
# a small run's time. What is installed stays the same.
importlib.metadata.metadata = functools.cache(importlib.metadata.metadata)

# A seed for devices that are not there is kept until they are, with all the lines of code that led to it: a tenth of a
# small run's time. They will not be there.
for device in (torch.cuda, torch.xpu, torch.mtia):
    if not device.is_available():
        device.manual_seed_all = lambda seed: None


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if not torch.cuda.is_available():
        for item in items:
            if item.get_closest_marker("gpu"):
                item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))


@pytest.fixture
def float64_throughout(monkeypatch: pytest.MonkeyPatch) -> None:
    """Models, norms and TRL's head go to float32 in places, whatever they are given; here they cannot."""
    monkeypatch.setattr(torch.Tensor, "float", torch.Tensor.double)
    for name in ("float", "float32"):  # both names are in use
        monkeypatch.setattr(torch, name, torch.float64)


def pytest_collection_finish() -> None:
    # Where packages are is asked as often; Accelerate has been imported by now
    if hasattr(imports := importlib.import_module("accelerate.utils.imports"), "_is_package_available"):
        imports._is_package_available = functools.cache(imports._is_package_available)
    # Accelerate collects garbage at the end of every run, which takes longer than the run: most of the time goes into
    # looking at what the libraries have made on import. It is here to stay, and need not be looked at.
    gc.freeze()
    gc.enable()


def pytest_unconfigure() -> None:
    gc.unfreeze()  # else there is something left when Python ends, and libraries complain of it
