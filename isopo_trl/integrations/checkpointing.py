"""Gradient checkpointing, where a forward pass that is made again would be another one, or cannot be made."""

from typing import Any

from accelerate.utils import is_peft_model
from peft import PeftType


def refuse_prefix(args: Any, model: Any) -> None:
    """Raise for virtual tokens that come as a cache."""
    prefix = is_peft_model(model) and model.active_peft_config.peft_type == PeftType.PREFIX_TUNING
    if prefix and args.gradient_checkpointing:
        raise ValueError(
            "Prefix tuning hands its virtual tokens to the model as a cache, which transformers drops under "
            "gradient checkpointing: set gradient_checkpointing=False, or use LoRA."
        )


def refuse_reentrant(args: Any, settings: str) -> None:
    """Raise for the kind that cannot go back through the model twice, as these `settings` ask for."""
    checkpointing: Any = args.gradient_checkpointing_kwargs or {}
    if args.gradient_checkpointing and checkpointing.get("use_reentrant"):
        raise ValueError(
            f"{settings} needs to go back through the model twice, which reentrant checkpointing cannot do: set "
            "gradient_checkpointing_kwargs={'use_reentrant': False}, or (with LoRA under ZeRO-3, where TRL "
            "insists on it) gradient_checkpointing=False."
        )
