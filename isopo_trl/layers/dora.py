"""
What DoRA needs beside its magnitudes, which [`~layers.any_module`] takes.

PEFT multiplies the two factors by calling them on the identity matrix, whose rows are no positions. The product is
only for the norm of the weights, which DoRA treats as a constant, so it needs no gradient.

PEFT takes the bias out of the base layer's output before it scales that. Where the bias is trained, a gradient would
reach it past its own layer, and no rule would see it. Without the base layer's output, DoRA's module makes the product
itself, without the bias.
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


def without_bias(module: nn.Module, kwargs: dict[str, Any]) -> dict[str, Any]:
    """What DoRA's module is called with, by name, so that it does not read a bias that is trained."""
    bias = getattr(kwargs.get("base_layer"), "bias", None)
    if not isinstance(module, DoraLinearLayer) or bias is None or not bias.requires_grad:
        return kwargs
    if kwargs["base_layer"].weight.requires_grad:
        raise RuntimeError(
            "DoRA reads both the weight and the bias of a base layer that are trained, past the layer itself: freeze "
            "one of the two, or use LoRA without use_dora."
        )
    return {**kwargs, "base_result": None}


@torch.no_grad()
def _product(module: Any, *args: Any, **kwargs: Any) -> torch.Tensor:
    return type(module).get_lora_weight(module, *args, **kwargs)
