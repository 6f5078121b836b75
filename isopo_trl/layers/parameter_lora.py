"""
LoRA on a bare parameter (PEFT's `target_parameters`): of stacks of experts and of routers.

PEFT adds `scaling B A` to the parameter for the length of a call and never calls the factors, which look like linear
layers. So they are layers without a forward of their own; that of the module around the parameter works for them.
"""

from typing import Any, NamedTuple

from peft.tuners.lora.layer import ParamWrapper
from torch import nn


class Factor(NamedTuple):
    """
    A factor of LoRA on a bare parameter.

    Args:
        wrapper (`ParamWrapper`): PEFT's module around the one that has the parameter.
        adapter (`str`): the adapter's name.
        side (`str`): `"A"` or `"B"`.
        module (`nn.Module`): the factor.
    """

    wrapper: ParamWrapper
    adapter: str
    side: str
    module: nn.Module


def parameter_factors(model: nn.Module) -> dict[nn.Module, Factor]:
    """The factors of all adapters of bare parameters, by their modules."""
    wrappers: list[Any] = [module for module in model.modules() if isinstance(module, ParamWrapper)]
    return {
        module: Factor(wrapper, adapter, side, module)
        for wrapper in wrappers
        for side, modules in (("A", wrapper.lora_A), ("B", wrapper.lora_B))
        for adapter, module in modules.items()
    }


def trained_adapters(wrapper: Any) -> list[str]:
    """The adapters of a wrapper of which a factor is trained."""
    factors = (wrapper.lora_A, wrapper.lora_B)
    return [name for name in wrapper.lora_A if any(f[name].weight.requires_grad for f in factors)]


def verify_active(wrapper: Any, adapter: str, name: str) -> None:
    """Raise if another adapter than the one that was planned takes part in a forward of the module `name`."""
    if list(wrapper.active_adapters) != [adapter]:
        raise RuntimeError(
            f"The adapters {', '.join(wrapper.active_adapters)} of {name} are active, but ISOPO was attached to the "
            f"training of {adapter!r} alone: activate that one alone (`set_adapter`)."
        )
