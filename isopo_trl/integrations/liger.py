"""Which of Liger's kernels a run with `use_liger_kernel=True` gets: those of layers that hold no trained parameter."""

from typing import Any

from torch import nn


# Where Liger replaces the forward of modules whose parameters may be trained
_NORMS = ("rms_norm", "layer_norm")
# Their backward writes over the activations that it was made from, so that a second one would find others
_GATES = ("swiglu", "geglu")


def kernels(model: nn.Module, config: dict[str, Any] | None, twice: str = "") -> dict[str, Any]:
    """
    The `liger_kernel_config` for a model whose gradients are rescaled: `config` without the kernels that stand in for
    ISOPO's own. Rotary embeddings and gated activations get Liger's; norms do not, and neither do experts, which have
    the activation's switch there. Where `twice` names settings for which a step goes back through the model twice,
    gated activations keep their own.

    Raises `ValueError` where `config` asks for one of these.
    """
    config = config or {}
    gates = [name for name in _GATES if config.get(name)] if twice else []
    if gates:
        raise ValueError(
            f"liger_kernel_config asks for {', '.join(gates)}, whose backward works in place and cannot run twice, as "
            f"it must with {twice}: leave it out, or the term."
        )
    off = [*_NORMS, *(_GATES if twice else ())]
    if not twice and any(name.rpartition(".")[2] == "experts" for name, _ in model.named_modules()):
        off.append("swiglu")
    asked = [name for name in off if config.get(name)]
    if asked:
        raise ValueError(
            f"liger_kernel_config asks for {', '.join(asked)}, which replaces layers whose gradients ISOPO rescales: "
            "leave it out (rotary embeddings and gated activations can stay, and norms have kernels of ISOPO's own)."
        )
    return {**config, **dict.fromkeys(off, False)}
