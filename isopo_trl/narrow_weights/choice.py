"""Which optimizer `bf16_updates` makes of the one that `optim` names, and what is refused."""

from typing import Any

import torch
from transformers.training_args import OptimizerNames

from .optimizers import Narrow, NarrowAdamW, NarrowSGD


# Names of `optim`
KINDS: dict[str, type[Narrow]] = {
    OptimizerNames.SGD.value: NarrowSGD,
    OptimizerNames.ADAMW_TORCH.value: NarrowAdamW,
    OptimizerNames.ADAMW_TORCH_FUSED.value: NarrowAdamW,
}
UPDATES = ("stochastic", "exact")


def refusals(args: Any) -> list[tuple[bool, str]]:
    """Settings that contradict `bf16_updates`, in pairs: whether they do, and what to say."""
    updates, optim = args.bf16_updates, str(getattr(args.optim, "value", args.optim))
    if updates is None:
        alone = "float32_gradients=True is about weights in bf16, with bf16_updates: set that, or leave it out."
        return [(args.float32_gradients, alone)]
    return [
        (
            updates not in UPDATES,
            f"bf16_updates={updates!r} says how steps are kept in weights in bf16: give 'stochastic', 'exact' or "
            "None.",
        ),
        (
            optim not in KINDS,
            f"bf16_updates={updates!r} does not work with optim={optim!r}, whose steps are rounded where they are "
            f"made: take one of {', '.join(map(repr, KINDS))}, or leave bf16_updates out.",
        ),
    ]


def refuse(args: Any, model: torch.nn.Module, optimizer: Any, accelerator: Any) -> None:
    """Raise where the model, an optimizer that was given, or the engine of accelerate has no use for the settings."""
    updates = args.bf16_updates
    if updates is None:
        return
    if optimizer is not None:
        raise ValueError(
            f"bf16_updates={updates!r} makes an optimizer of its own, but one was given ({type(optimizer).__name__}): "
            "name it with `optim` instead, or leave bf16_updates out."
        )
    narrow = [p for p in model.parameters() if p.requires_grad and p.dtype == torch.bfloat16]
    if not narrow:
        raise ValueError(
            f"bf16_updates={updates!r} is about trained weights in bf16, of which this model has none: leave it out, "
            "or load the model with model_init_kwargs={'dtype': 'bfloat16'}."
        )
    if accelerator.state.deepspeed_plugin is not None:
        raise ValueError(
            f"bf16_updates={updates!r} does not work under DeepSpeed, whose optimizers keep float32 weights of their "
            "own and copy them to the model: leave it out, or use DDP or FSDP2."
        )
    if args.float32_gradients and accelerator.num_processes > 1:
        raise ValueError(
            "float32_gradients=True works in one process alone: between processes gradients travel in the type of "
            "their weights. Leave it out, or use fewer and larger microbatches, within which sums are in float32."
        )
    plugin = getattr(accelerator.state, "fsdp_plugin", None)
    if plugin is None:
        return
    if plugin.fsdp_version != 2:
        raise ValueError(
            f"bf16_updates={updates!r} does not work under FSDP1, which flattens weights: set fsdp_version to 2."
        )
    if accelerator.mixed_precision != "no":
        raise ValueError(
            f"bf16_updates={updates!r} is of no use under FSDP2 with mixed precision, where accelerate makes the "
            "trained weights float32: set bf16=False to train them as they are, in bf16, or leave it out."
        )


def chosen(args: Any, kind: Any, settings: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    """The class of an optimizer and its settings, where transformers would take `kind` and `settings`."""
    if args.bf16_updates is None:
        return kind, settings
    settings = {name: value for name, value in settings.items() if name not in ("fused", "foreach")}
    optim, wide = str(getattr(args.optim, "value", args.optim)), {"float32_gradients": args.float32_gradients}
    return KINDS[optim], {**settings, "updates": args.bf16_updates, "seed": args.seed, **wide}
