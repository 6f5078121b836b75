"""
What DoRA needs beside its magnitudes, which [`~layers.any_module`] takes.

PEFT multiplies the two factors by calling them on the identity matrix, whose rows are no positions. The product is
only for the norm of the weights, which DoRA treats as a constant, so it needs no gradient.
"""

import contextlib
import functools
from collections.abc import Iterator
from typing import Any

import torch
from peft.tuners.lora.dora import DoraLinearLayer
from torch import nn


@contextlib.contextmanager
def constant_norms(module: nn.Module) -> Iterator[None]:
    """In here, DoRA's module computes the product of its factors without a gradient; any other is left alone."""
    if not isinstance(module, DoraLinearLayer) or "get_lora_weight" in module.__dict__:
        yield
        return
    module.__dict__["get_lora_weight"] = functools.partial(_product, module)
    try:
        yield
    finally:
        del module.__dict__["get_lora_weight"]


@torch.no_grad()
def _product(module: Any, *args: Any, **kwargs: Any) -> torch.Tensor:
    return type(module).get_lora_weight(module, *args, **kwargs)
