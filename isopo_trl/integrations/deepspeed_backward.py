"""
What DeepSpeed does in the backward pass of the loss, and must not do, or not yet.

A backward pass before that of the loss would be taken for the loss's: by hooks on what the engine's forward returned,
DeepSpeed divides the gradient and gets ready for the reduction; in ZeRO-3 counters say whether a module's parameters
are still to be fetched. And with the loss's own backward, accelerate makes the engine step.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch


_COUNTERS = ("applied_pre_backward_ref_cnt", "ds_grads_remaining")


@contextmanager
def caught_outputs(engine: Any, wanted: bool) -> Iterator[list[torch.Tensor]]:
    """Context that collects the tensors which forward passes of the engine return; none unless `wanted`."""
    outputs: list[torch.Tensor] = []

    def catch(module: Any, args: Any, output: Any) -> None:
        outputs.extend(x for x in output.values() if isinstance(x, torch.Tensor))

    if not wanted:
        yield outputs
        return
    hook = engine.register_forward_hook(catch)
    try:
        yield outputs
    finally:
        hook.remove()


@contextmanager
def unseen_by_deepspeed(engine: Any, outputs: list[torch.Tensor]) -> Iterator[None]:
    """
    Context for a backward pass that is not the loss's.

    Args:
        engine (`nn.Module`): what DeepSpeed made of the model.
        outputs (`list[torch.Tensor]`): what its forward returned; empty, without DeepSpeed.
    """
    hooks = [(x._backward_hooks, dict(x._backward_hooks)) for x in outputs if x._backward_hooks]
    modules = engine.modules() if outputs else ()
    counters = [
        (module, name, module.__dict__[name]) for module in modules for name in _COUNTERS if name in module.__dict__
    ]
    try:
        for own, _ in hooks:
            own.clear()
        yield
    finally:
        for own, kept in hooks:
            own.update(kept)
        for module, name, value in counters:
            setattr(module, name, value)


@contextmanager
def before_step(engine: Any, action: Callable[[], None]) -> Iterator[None]:
    """Context in which `action` runs before a step of the engine; where it raises, the engine does not step."""
    step = engine.step

    def acting(*args: Any, **kwargs: Any) -> Any:
        action()
        return step(*args, **kwargs)

    engine.step = acting
    try:
        yield
    finally:
        del engine.step
