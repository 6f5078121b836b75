"""
Gated activations, `silu(gate_proj(x)) * up_proj(x)`: here for speed alone, like the norms of frozen weights.

Model code makes two operations of it, which keep four tensors for a backward of three more. A fused one keeps what it
was given.
"""

from types import SimpleNamespace
from typing import Any

import torch
from torch import nn

from ..kernels import gated as kernel
from ..kernels.launch import is_here, takes
from ..microbatch import CurrentMicrobatch, Microbatch
from .layer import PROBE_ERRORS, LayerFunction, Shortcut, has_own_forward, is_hooked, once


_PARTS = ("gate_proj", "up_proj", "down_proj", "act_fn")


class GatedMLP(Shortcut):
    """A module whose forward is [`definition`]; its three products are made by the layers inside of it."""

    kind = "gated"

    def forward(self, module: Any, microbatch: Microbatch, x: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        gate_proj, up_proj, down_proj, act_fn = map(module._modules.__getitem__, _PARTS)
        if args or kwargs or is_hooked(act_fn) or has_own_forward(act_fn):
            return type(module).forward(module, x, *args, **kwargs)
        gate, up = gate_proj(x), up_proj(x)
        y = _Gated.apply(gate, up) if _kernel_takes(gate, up) else act_fn(gate) * up
        return down_proj(y)


def _kernel_takes(gate: torch.Tensor, up: torch.Tensor) -> bool:
    if gate.dtype != up.dtype or gate.shape != up.shape or not (takes(gate) and is_here(gate)):
        return False
    return gate.is_contiguous() and up.is_contiguous()


class _Gated(LayerFunction):
    @staticmethod
    def forward(ctx, gate, up):
        ctx.save_for_backward(gate, up)
        return kernel.forward(gate, up)

    @staticmethod
    @once
    def backward(ctx, grad):
        return kernel.backward(grad, *ctx.saved_tensors)


def definition(module: Any, x: torch.Tensor) -> torch.Tensor:
    """The usual formula, in plain PyTorch."""
    return module.down_proj(nn.functional.silu(module.gate_proj(x)) * module.up_proj(x))


def gated_mlps(current: CurrentMicrobatch, model: nn.Module, taken: set[nn.Module]) -> list[GatedMLP]:
    """The modules of `model`, but for those `taken`, that compute the usual formula."""
    return [
        GatedMLP(current, module)
        for module in model.modules()
        if module not in taken and not has_own_forward(module) and _is_usual(module)
    ]


def _is_usual(module: nn.Module) -> bool:
    """Whether it computes the usual formula, found by trying its forward and activation on products of its own."""
    if not all(isinstance(module._modules.get(part), nn.Module) for part in _PARTS):
        return False
    tried: Any = SimpleNamespace(
        gate_proj=lambda x: 4 * x, up_proj=lambda x: x.flip(-1), down_proj=lambda x: 1 - x, act_fn=module.act_fn
    )
    numbers = torch.linspace(-1.5, 2, 2 * 5 * 8, device="cpu").view(2, 5, 8)
    for dtype in (torch.float32, torch.bfloat16):
        x = numbers.to(dtype)
        try:
            with torch.no_grad():
                found, expected = type(module).forward(tried, x), definition(tried, x)
        except PROBE_ERRORS:
            return False
        if not isinstance(found, torch.Tensor) or found.dtype != dtype or not torch.equal(found, expected):
            return False
    return True
