"""
Where the direction `D` comes from that a rule's [`~geometry.cost.Needs`] ask for: tensors of the parameters' shapes,
held from before the microbatch.
"""

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import nn


class GivenDirection:
    """
    A direction that was given by hand, of all or some of the parameters.

    Args:
        tensors (`dict`, *optional*): of the parameters' shapes, by the parameters.

    Attributes:
        unit (`float`): what the tensors are multiplied by, and with them the projections.
    """

    def __init__(self, tensors: Mapping[torch.Tensor, torch.Tensor] | None = None) -> None:
        self.unit = 1.0
        self._tensors = dict(tensors or {})

    @property
    def is_there(self) -> bool:
        """Whether any parameter has a direction."""
        return bool(self._tensors)

    def tensor_of(self, parameter: torch.Tensor) -> torch.Tensor | None:
        """That of a parameter, of its shape; `None` where it is zero."""
        return self._tensors.get(parameter)

    def seen_as(self, x: torch.Tensor) -> torch.Tensor | None:
        """That of `x`, a parameter or a view of one, in the shape of `x`."""
        base = x._base
        parameter = x if isinstance(x, nn.Parameter) or base is None else base
        if not parameter.is_leaf:
            raise RuntimeError(
                "A layer multiplies by a tensor that is no view of its parameter (but a cast or a product of it), so "
                "that ISOPO cannot tell how it would see a direction: give `rescaled_linear` the parameter or a view "
                "of it, or take a rule that asks for no direction."
            )
        D = self.tensor_of(parameter)
        if D is None or x is parameter:
            return D
        if D.stride() != parameter.stride():
            D = torch.empty_strided(parameter.shape, parameter.stride(), dtype=D.dtype, device=D.device).copy_(D)
        start = x.storage_offset() - parameter.storage_offset() + D.storage_offset()
        return D.as_strided(x.shape, x.stride(), start)


class GradientSoFar(GivenDirection):
    """The gradient that the optimizer step has accumulated in its earlier microbatches, on this rank: `p.grad`."""

    is_there = True

    def tensor_of(self, parameter: torch.Tensor) -> torch.Tensor | None:
        return parameter.grad

    @staticmethod
    def is_kept(parameters: Iterable[torch.Tensor]) -> bool:
        """Whether any parameter has it."""
        return any(p.grad is not None for p in parameters)


class LastStep(GivenDirection):
    """
    The direction of the step before: `phi <- decay phi + gradient`, which is the gradient that the optimizer gets.

    Tensors are the gradients as they were, with the loss's constant in them; `unit` takes it out.
    """

    def __init__(self, decay: float):
        super().__init__()
        self.decay = decay

    @torch.no_grad()
    def advance(self, parameters: Iterable[torch.Tensor], unit: float) -> None:
        """Add `mu phi` to the gradients of a step, whose direction in these units is theirs, and hold the sum."""
        stepped = []
        for p in parameters:
            if not p.requires_grad:  # frozen since, and to stay where it is
                self._tensors.pop(p, None)
                continue
            if p.grad is None and p in self._tensors:  # nothing has come to it in this step
                p.grad = torch.zeros_like(p, dtype=p.grad_dtype)
            if p.grad is not None:
                stepped.append(p)
        if not stepped:
            raise RuntimeError(
                "No parameter has a gradient to which the last step's direction could be added: call `add_momentum` "
                "or `step` after the backward passes and before `zero_grad`, and not under DeepSpeed, which keeps "
                "gradients elsewhere."
            )
        known = [p for p in stepped if p in self._tensors]
        if known:
            gradients: Any = [p.grad for p in known]
            held = [self._tensors[p] for p in known]
            torch._foreach_add_(gradients, held, alpha=self.decay * self.unit / unit)
            torch._foreach_copy_(held, gradients)
        for p in stepped:
            if p not in self._tensors and p.grad is not None:
                self._tensors[p] = p.grad.clone()
        self.unit = unit

    def forget(self) -> None:
        """Go on without a direction, as in a first step."""
        self._tensors = {}

    def state_dict(self, names: Mapping[torch.Tensor, str]) -> dict[str, Any] | None:
        """What is held, by the parameters' `names`."""
        if not self._tensors:
            return None
        return {"unit": self.unit, "tensors": {names[p]: D.cpu() for p, D in self._tensors.items()}}

    def load_state_dict(self, state: dict[str, Any] | None, names: Mapping[torch.Tensor, str]) -> None:
        """Hold what [`state_dict`] returned; refuses tensors of other shapes than the parameters'."""
        saved = {} if state is None else state["tensors"]
        wrong = [name for p, name in names.items() if name in saved and saved[name].shape != p.shape]
        if wrong:
            raise ValueError(
                f"The saved direction of {', '.join(wrong[:6])} has another shape than the parameter: resume with the "
                "same model, or start a new run from the saved weights."
            )
        self._tensors = {p: saved[name].to(p.device, copy=True) for p, name in names.items() if name in saved}
        self.unit = 1.0 if state is None else state["unit"]
