"""
DeepSpeed, where it must be told of ISOPO: passes that it must not see, its steps, and the weights that it moves.

A backward pass before that of the loss would be taken for the loss's: by hooks on what the engine's forward returned,
DeepSpeed divides the gradient and gets ready for the reduction; in ZeRO-3 counters say whether a module's parameters
are still to be fetched. And with the loss's own backward, accelerate makes the engine step.

ZeRO's optimizers move flat partitions in float32, each rank its own, from which the model's weights are made after
every step: by copying them to the model's type, and gathering them from all ranks (ZeRO-3: what is to stay gathered).
Whoever moves a partition has to make the weights from it anew, as the optimizer's own step does.
"""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from typing import Any

import torch

from ..trl_seam.loans import intercepted


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
    """Context for a backward pass that is not the loss's; `outputs`: what the engine's forward returned, if any."""
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
        for own, hidden in hooks:
            own.update(hidden)
        for module, name, value in counters:
            setattr(module, name, value)


def before_step(engine: Any, action: Callable[[], None]) -> AbstractContextManager[None]:
    """Context in which `action` runs before a step of the engine; where it raises, the engine does not step."""

    def stand_in(step: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        action()
        return step(*args, **kwargs)

    return intercepted(engine, "step", stand_in)


def refuse_settings(config: dict[str, Any], given: str, has_target: bool) -> None:
    """
    Raise for settings of DeepSpeed's, in its `config`, with which steps cannot be measured, as those `given` ask for,
    or, where they have a target, not be taken back, or have no learning rate to find.
    """
    zero = config.get("zero_optimization") or {}
    optimizer, parameters = (zero.get(f"offload_{name}") or {} for name in ("optimizer", "param"))
    share = optimizer.get("ratio", 1.0)
    unmeasured = [
        (bool(optimizer.get("super_offload")), "'super_offload'", "it steps while the backward pass is under way"),
        (zero.get("zenflow") is not None, "'zenflow'", "it steps while the next forward pass is under way"),
    ]
    without_target = [
        ("scheduler" in config, "'scheduler'", "learning rates are not multiples of one, as lr_scheduler_type's are"),
        ("nvme" in (optimizer.get("device"), parameters.get("device")), "'nvme'", "weights are not in memory"),
        (share != 1.0, f"'ratio': {share}", "a second optimizer steps with learning rates of its own"),
        (zero.get("zero_hpz_partition_size", 1) > 1, "'zero_hpz_partition_size'", "weights have a second copy"),
    ]
    for is_set, name, reason in unmeasured + without_target * has_target:
        if is_set:
            raise ValueError(
                f"{given} does not work with {name} in DeepSpeed's settings, where {reason}: leave one of the two "
                "out, or use DDP or FSDP2."
            )


def refuse_optimizer(optimizer: Any) -> None:
    """Raise for an optimizer of the engine whose weights cannot be moved from outside."""
    if not isinstance(optimizer, torch.optim.Optimizer) and type(optimizer).__name__ not in _PARTITIONS:
        raise ValueError(
            f"target_kl does not work with DeepSpeed's {type(optimizer).__name__}, whose copies of the weights it "
            "cannot move: take ZeRO stage 1, 2 or 3, or DDP or FSDP2, or leave target_kl out."
        )


def moved_weights(optimizer: Any) -> tuple[list[torch.Tensor], Callable[[], None]]:
    """
    What this rank's part of the engine's optimizer moves, and what is to be called when somebody else has moved it.
    """
    if isinstance(optimizer, torch.optim.Optimizer):  # no ZeRO, in float32: the model's weights themselves
        return [p for group in optimizer.param_groups for p in group["params"]], lambda: None
    kind = type(optimizer).__name__
    refresh = partial(_refresh_stage_3, optimizer) if kind == _STAGE_3 else optimizer.update_lp_params
    return list(getattr(optimizer, _PARTITIONS[kind])), refresh


_STAGE_3 = "DeepSpeedZeroOptimizer_Stage3"
# Where the optimizers keep what they move
_PARTITIONS = {
    "DeepSpeedZeroOptimizer": "single_partition_of_fp32_groups",  # ZeRO-1 and ZeRO-2
    "BF16_Optimizer": "fp32_groups_flat_partition",  # ZeRO-1 in bf16 with gradients in float32
    _STAGE_3: "fp32_partitioned_groups_flat",
}


def _refresh_stage_3(optimizer: Any) -> None:
    """What ZeRO-3's step does when its partitions have moved."""
    optimizer._partition_all_parameters()
    for number in range(len(optimizer.fp16_groups)):
        optimizer._reassign_or_swap_out_partitioned_parameters(number)
    if optimizer.persistent_parameters:
        optimizer.persistent_parameters[0].all_gather(optimizer.persistent_parameters)
