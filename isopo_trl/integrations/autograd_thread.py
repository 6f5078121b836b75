"""
In which thread a backward pass runs.

PyTorch keeps a thread for each device and hands the backward pass to it. What ISOPO's layers do there in Python takes
longer than in the thread that has run the forward. With one device, that one has nothing to do but to wait, and can as
well do the work itself: every operation is the same, in the same order and on the same stream.
"""

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import nn


def is_on_one_device(model: nn.Module) -> bool:
    """Whether all parameters are on one device; over several, their threads launch work side by side."""
    return len({p.device for p in model.parameters()}) <= 1


def calling_thread(allowed: bool = True) -> AbstractContextManager[Any]:
    """Context in which backward passes run in the thread that asks for them, if that is `allowed`."""
    return torch.autograd.set_multithreading_enabled(False) if allowed else nullcontext()
