"""
What DoRA needs beside its magnitudes, which [`~layers.any_module`] takes.

PEFT multiplies the two factors by calling them on the identity matrix, whose rows are no positions. The product is
only for the norm of the weights, which DoRA treats as a constant, so it needs no gradient.

PEFT takes the bias out of the base layer's output before it scales that. Where the bias is trained, a gradient would
reach it past its own layer, and no rule would see it. Without the base layer's output, DoRA's module makes the product
itself, without the bias.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from peft.tuners.lora.dora import DoraLinearLayer
from torch import nn

from ..trl_seam.loans import intercepted


def constant_norms(module: nn.Module) -> AbstractContextManager[None]:
    """Context in which DoRA's module computes the product of its factors without a gradient; no other changes."""
    is_dora = isinstance(module, DoraLinearLayer)
    return intercepted(module, "get_lora_weight", _without_gradient) if is_dora else nullcontext()


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
def _without_gradient(product: Callable[..., torch.Tensor], *args: Any, **kwargs: Any) -> torch.Tensor:
    return product(*args, **kwargs)
