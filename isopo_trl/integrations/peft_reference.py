"""
The reference model of an adapter that begins as a part of the weights (PiSSA, OLoRA and the like).

PEFT takes that part out of the base model's weights, so that the base model with its adapter switched off, which is
TRL's reference for an adapter of its own making, is not the model that training begins with. Of a model that PEFT has
wrapped before, TRL's reference is a copy of the adapter: made from the same configuration, it would take the same part
out of the base model once more, and the policy itself would be another one.
"""

from contextlib import AbstractContextManager, nullcontext
from typing import Any

from peft import PeftModel

from ..trl_seam.loans import borrowed


# Beginnings of PEFT's names of such initialisations
_OUT_OF_THE_WEIGHTS = ("pissa", "olora", "corda", "loftq", "lora_ga")


def is_part_of_the_weights(config: Any) -> bool:
    """Whether an adapter of this configuration begins as a part of the base model's weights."""
    name = getattr(config, "init_lora_weights", None)
    return isinstance(name, str) and name.lower().startswith(_OUT_OF_THE_WEIGHTS)


def base_weights_kept(model: Any) -> AbstractContextManager[None]:
    """
    Context in which a copy of the model's adapter can be made without a change of the base model: the copy begins like
    any LoRA, and is then filled with the values of the first.
    """
    config: Any = model.peft_config.get("default") if isinstance(model, PeftModel) else None
    return borrowed(config, init_lora_weights=True) if is_part_of_the_weights(config) else nullcontext()


def freeze_copy(model: Any) -> None:
    """Freeze TRL's copy of a trained adapter; PEFT leaves virtual tokens trainable that are not in use."""
    if isinstance(model, PeftModel) and "ref" in model.peft_config:
        for name, p in model.named_parameters():
            if ".ref." in name:
                p.requires_grad_(False)


def refuse_lost_part(model: Any, beta: float) -> None:
    """Raise if the divergence (weight `beta`) would be measured from a model without what its adapter began as."""
    if beta == 0.0 or not isinstance(model, PeftModel) or "ref" in model.peft_config:
        return
    configs: list[Any] = list(model.peft_config.values())
    for config in configs:
        if is_part_of_the_weights(config):
            raise ValueError(
                f"With init_lora_weights={config.init_lora_weights!r} the adapter begins as a part of the weights: "
                f"beta={beta} would measure the divergence from a model without that part. Wrap the model with "
                "`peft.get_peft_model` and give the trainer that, without `peft_config`, so that the reference is a "
                "copy of the adapter; or set beta=0."
            )
