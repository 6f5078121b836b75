"""
Rotary embeddings: here for speed alone, like the norms of frozen weights.

Model code turns queries and keys by a function of its own, `apply_rotary_pos_emb`, in ten small operations whose
backward takes eighteen; no other part of a block has as many launches. While an attention module runs, a fused one
stands in that function's place, with the same roundings.
"""

import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from ..kernels import rotary as kernel
from ..kernels.launch import is_here, takes
from ..microbatch import CurrentMicrobatch, Microbatch
from .layer import PROBE_ERRORS, LayerFunction, Shortcut, has_own_forward, once


# What the families' modules call it
NAME = "apply_rotary_pos_emb"


class RotaryAttention(Shortcut):
    """
    An attention module whose forward calls [`definition`] by the name of its family.

    Args:
        current ([`CurrentMicrobatch`]): where to find the microbatch under way.
        module (`nn.Module`): the module.
        names (`dict`): the names that its forward finds.
    """

    kind = "rotary"
    takes_anything = True

    def __init__(self, current: CurrentMicrobatch, module: nn.Module, names: dict[str, Any]):
        super().__init__(current, module)
        self.names, self.own = names, names[NAME]

    def forward(self, module: Any, microbatch: Microbatch, *args: Any, **kwargs: Any) -> Any:
        if self.names[NAME] is not self.own:  # somebody else's is in place, such as Liger's
            return type(module).forward(module, *args, **kwargs)
        try:
            self.names[NAME] = self._rotated
            return type(module).forward(module, *args, **kwargs)
        finally:
            self.names[NAME] = self.own

    def _rotated(self, *args: Any, **kwargs: Any) -> Any:
        if len(args) != 4 or kwargs or args[1] is None or not _kernel_takes(*args):  # some turn queries alone
            return self.own(*args, **kwargs)
        q, k, cos, sin = args
        return _Rotary.apply(q, k, cos.contiguous(), sin.contiguous())


def _kernel_takes(q: torch.Tensor, k: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> bool:
    if q.dim() != 4 or q.dtype != k.dtype or cos.dtype != sin.dtype or not (takes(q) and takes(cos) and is_here(q)):
        return False
    B, _, T, D = q.shape
    if (k.shape[0], k.shape[2], k.shape[3]) != (B, T, D) or D % 2 or D > kernel.MOST_FEATURES or B >= 2**16:
        return False
    if cos.requires_grad or sin.requires_grad or max(q.numel(), k.numel()) >= 2**31:
        return False
    return cos.shape == sin.shape and cos.shape in ((B, T, D), (1, T, D))


class _Rotary(LayerFunction):
    @staticmethod
    def forward(ctx, q, k, cos, sin):
        ctx.save_for_backward(cos, sin)
        ctx.dtype = q.dtype
        return kernel.rotated(q, k, cos, sin, torch.promote_types(q.dtype, cos.dtype))

    @staticmethod
    @once
    def backward(ctx, of_q, of_k):
        cos, sin = ctx.saved_tensors
        return *kernel.rotated(of_q, of_k, cos, sin, ctx.dtype, back=True), None, None


def definition(q: torch.Tensor, k: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> list[torch.Tensor]:
    """The usual formula, in plain PyTorch: `x cos + rotate_half(x) sin`."""
    cos, sin = cos.unsqueeze(1), sin.unsqueeze(1)
    halves = [x.chunk(2, dim=-1) for x in (q, k)]
    return [x * cos + torch.cat((-x2, x1), dim=-1) * sin for x, (x1, x2) in zip((q, k), halves, strict=True)]


def rotary_attentions(current: CurrentMicrobatch, model: nn.Module, taken: set[nn.Module]) -> list[RotaryAttention]:
    """The modules of `model`, but for those `taken`, that turn queries and keys by the usual formula."""
    usual: dict[Callable, bool] = {}
    found = []
    for module in model.modules():
        forward: Any = inspect.unwrap(type(module).forward)
        names = getattr(forward, "__globals__", {})
        if NAME not in getattr(getattr(forward, "__code__", None), "co_names", ()) or NAME not in names:
            continue
        own = names[NAME]
        if own not in usual:
            usual[own] = _is_usual(own)
        if usual[own] and module not in taken and not has_own_forward(module):
            found.append(RotaryAttention(current, module, names))
    return found


def _is_usual(function: Callable) -> bool:
    """Whether it is the usual formula, found by trying."""
    numbers = torch.linspace(-1.5, 2, 2 * 5 * 3 * 8, device="cpu").view(2, 5, 3, 8).sin()
    for dtype in (torch.float32, torch.bfloat16):
        x = numbers.to(dtype)
        given = (x[:, :4], x[:, :2], x[:, 4].cos(), x[:, 4])
        try:
            found = function(*given)
        except PROBE_ERRORS:
            return False
        if len(found) != 2 or not all(map(torch.equal, found, definition(*given))):
            return False
    return True
