"""
Where a model drops activations at random. Of two passes that drop different ones, the log-probabilities differ without
any change of the policy: a ratio between them is noise.
"""

from typing import Any

from torch import nn
from torch.nn.modules.dropout import _DropoutNd


def noise_of_ratios(model: nn.Module) -> str | None:
    """What to say where ratios are taken to what tokens were drawn with; `None` where nothing is dropped."""
    named = list(model.named_modules())
    modules = [(name, module.p) for name, module in named if isinstance(module, _DropoutNd) and module.p > 0]
    # Probabilities that modules hand to a function in their forward, such as `attention_dropout`
    attributes = [
        (f"{name}.{attribute}" if name else attribute, value)
        for name, module in named
        for attribute, value in vars(module).items()
        if "dropout" in attribute and isinstance(value, float) and value > 0
    ]
    if not modules and not attributes:
        return None
    remedies = []
    if modules:
        lora = any("lora_dropout" in name for name, _ in modules)
        remedies.append("disable_dropout=True" + " (or lora_dropout=0.0 in the peft_config)" * lora)
    if attributes:
        names = dict.fromkeys(name.rpartition(".")[2] for name, _ in attributes)
        settings = ", ".join(f"{name!r}: 0.0" for name in names)
        remedies.append(f"model_init_kwargs={{{settings}}}, which disable_dropout does not reach")
    return (
        f"The model drops activations at random while it is trained ({_listed(modules + attributes)}), others than "
        "when its tokens were drawn, so that their ratio to the sampler is noise before the policy has moved: set "
        f"{', and '.join(remedies)}."
    )


def _listed(found: list[tuple[str, Any]], most: int = 3) -> str:
    shown = ", ".join(f"{name} with p={p:g}" for name, p in found[:most])
    return f"{shown} and {len(found) - most} more" if len(found) > most else shown
