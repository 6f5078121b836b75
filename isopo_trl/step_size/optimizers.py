"""
Which optimizers have steps that can be measured, and taken back along themselves: all but the ones listed here,
by the names that transformers has for them and, where an optimizer is given as an object, by its type.
"""

from typing import Any

import torch

from ..settings.optim_args import sgd_settings


_IN_BACKWARD = "it moves each weight during the backward pass, so that there is no step to measure or take back"
_BETWEEN = "its weights lie between two other points that it keeps, and would not if they were moved"
_OF_ITS_OWN = "it keeps a copy of the weights, from which it would go on as if they had not been moved"

_LAYERWISE = ("galore_adamw_layerwise", "galore_adamw_8bit_layerwise", "galore_adafactor_layerwise")
# Names of `optim` whose steps cannot be measured
UNMEASURED = dict.fromkeys(("lomo", "adalomo", *_LAYERWISE, "apollo_adamw_layerwise"), _IN_BACKWARD)
# Names of `optim` that `target_kl` does not work with
REFUSED = {
    **UNMEASURED,
    **dict.fromkeys(("schedule_free_radam", "schedule_free_adamw", "schedule_free_sgd"), _BETWEEN),
}

# The same by the names of classes, which may not be installed
_CLASSES_IN_BACKWARD = {"Lomo", "AdaLomo", "LayerWiseDummyOptimizer"}
_CLASSES_WITH_COPIES = {"CPUOffloadOptimizer"}


def is_plain(optimizer: Any, args: Any = None) -> bool:
    """Whether steps go along the gradient: by SGD without momentum, given as an object or else by `args.optim`."""
    if optimizer is not None:
        return isinstance(optimizer, torch.optim.SGD) and not any(g["momentum"] for g in optimizer.param_groups)
    is_sgd = str(getattr(args.optim, "value", args.optim)) == "sgd"
    return is_sgd and not sgd_settings(args.optim_args)["momentum"]


def largest_rate(optimizer: Any, args: Any) -> float:
    """The largest learning rate of the groups of parameters, or that of the settings."""
    groups = [] if optimizer is None else optimizer.param_groups
    rates = [float(group["lr"]) for group in groups if group["lr"] is not None]
    return max(rates, default=float(args.learning_rate))


def refusal_by_name(optim: str, given: str, has_target: bool) -> str | None:
    """
    Why the optimizer of a name of `optim` is refused, if it is, by settings `given` that ask for steps to be measured.
    """
    reason = (REFUSED if has_target else UNMEASURED).get(optim)
    if reason is None:
        return None
    return (
        f"{given} does not work with optim={optim!r}: {reason}. Take another optimizer, such as 'adamw_torch_fused', "
        "or leave that out."
    )


def refuse(optimizer: Any, target_kl: float | str | None) -> None:
    """
    Raise for an optimizer whose steps cannot be measured or, where they have a target, not be made longer or shorter.

    Args:
        optimizer (`torch.optim.Optimizer`): the optimizer itself, without accelerate's wrapper.
        target_kl (`float` or `"auto"`, *optional*): what steps are to have; `None` where they are only measured.
    """
    classes = {base.__name__ for base in type(optimizer).__mro__}
    name = type(optimizer).__name__
    if classes & _CLASSES_IN_BACKWARD:
        raise ValueError(
            f"The steps of {name} cannot be measured: {_IN_BACKWARD}. Take another optimizer, such as AdamW, or leave "
            "target_kl, behaviour_kl and log_step_kl out."
        )
    if target_kl is None:
        return
    # As transformers knows schedule-free optimizers
    is_between = all(callable(getattr(optimizer, mode, None)) for mode in ("train", "eval"))
    reason = _BETWEEN if is_between else _OF_ITS_OWN if classes & _CLASSES_WITH_COPIES else None
    if reason is not None:
        raise ValueError(
            f"target_kl={target_kl} does not work with {name}: {reason}. Take another optimizer, such as AdamW, or "
            "leave target_kl out."
        )
    rates = [group.get("initial_lr", group["lr"]) for group in optimizer.param_groups]
    if any(rate is None for rate in rates) or not any(rates):
        raise ValueError(
            f"target_kl={target_kl} needs a learning rate that it can multiply, but {name} has none, or chooses its "
            "own: give it one, or leave target_kl out."
        )


def refuse_by_state(optimizer: Any) -> None:
    """Raise for an optimizer that, as its state shows after a step, moves weights of its own and copies them."""
    state = getattr(optimizer, "state", {})
    keys = {str(key) for of in state.values() if isinstance(of, dict) for key in of}
    copies = sorted(key for key in keys if "master" in key)
    if copies:
        raise ValueError(
            f"target_kl does not work with {type(optimizer).__name__} as it is set: {_OF_ITS_OWN} ({copies[0]!r} in "
            "its state). Let it go without, or leave target_kl out."
        )
