"""Who takes which trained parameter: a layer for every module that has one, refusals by name, the coverage table."""

from collections.abc import Collection
from typing import Any

from peft import PeftModel
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel
from transformers.modeling_layers import GradientCheckpointingLayer

from ..microbatch import CurrentMicrobatch
from ..rules.rule import Rule
from .any_module import AnyModuleLayer, SequenceGroup
from .elementwise import ElementwiseLayer
from .embedding import EmbeddingLayer
from .experts import ExpertsForward, is_experts, verify_experts
from .functional_linear import FunctionalLinearLayer, FunctionalLoRA, calls_linear_once
from .gated import gated_mlps
from .layer import Inseparable, Layer, Place, Unsupported, full_shape, has_own_forward
from .layer_norm import LayerNormLayer
from .linear import LinearLayer
from .lm_head import LMHeadLayer
from .lora import lora_linears
from .parameter_lora import Factor, parameter_factors, trained_adapters
from .registry import registered_kinds
from .rms_norm import RMSNormLayer, frozen_norms
from .rotary import rotary_attentions


# In the order in which kinds are asked, behind the registered ones: the first that accepts a module takes it.
# `AnyModuleLayer` takes what is left
KINDS: list[type[Layer]] = [
    LinearLayer,
    EmbeddingLayer,
    FunctionalLinearLayer,
    LayerNormLayer,
    RMSNormLayer,
    ElementwiseLayer,
]

_ADVICE = "freeze them (`parameter.requires_grad_(False)`), or train with LoRA (`peft_config=LoraConfig({})`)."
ADVICE = _ADVICE.format("target_modules='all-linear'")
_ADVICE_FOR_EXPERTS = _ADVICE.format("target_modules=['q_proj', 'k_proj', 'v_proj', 'o_proj']")


def plan(current: CurrentMicrobatch, model: nn.Module) -> list[Layer]:
    """A layer for every module that has trained parameters of its own; refuses the others by name."""
    _refuse_model(model)
    head = _output_embeddings(model)
    of_parameters = parameter_factors(model)
    forwards: dict[nn.Module, ExpertsForward | FunctionalLoRA] = {}  # by the modules that have stacks or such adapters
    beside = _beside_the_text(model, head)
    layers: list[Layer] = []
    refused: list[str] = []
    experts = False
    for name, module in model.named_modules():
        places = _places(module)
        if not places:
            continue
        trainable = {n: holder.get_parameter(own) for n, (holder, own) in places.items()}
        index = layers[-1].indices.stop if layers else 0  # of the next entry in the running statistics
        try:
            if module in of_parameters:
                factor = of_parameters[module]
                layers.append(_forward_around(current, model, factor, forwards).add_factor(factor, name, index))
            elif is_experts(module):
                layers += _experts_forward(current, module, name, forwards).add_stacks(index)
            elif head is not None and module is head:
                LMHeadLayer.accepts(module, trainable)
                layers.append(LMHeadLayer(current, module, name, index))
            elif (kind := None if module in beside else _kind_of(module, places, trainable)) is not None:
                layers.append(kind(current, module, name, index))
            elif AnyModuleLayer.accepts(module, trainable):
                layers.append(AnyModuleLayer(current, module, name, index, places))
        except Unsupported as error:
            refused += [f"{full_name(name, parameter)} ({error})" for parameter in trainable]
            # PEFT's 'all-linear' includes stacks of experts
            experts = experts or module in of_parameters or any(p.dim() > 2 for p in trainable.values())
    if refused:
        more = f"; and {len(refused) - 8} more" if len(refused) > 8 else ""
        advice = _ADVICE_FOR_EXPERTS if experts else ADVICE
        raise ValueError("ISOPO cannot train " + "; ".join(refused[:8]) + more + ": " + advice)
    if not layers:
        raise ValueError("The model has no trainable parameter: ISOPO has nothing to do.")
    return layers


def _experts_forward(current: CurrentMicrobatch, module: nn.Module, name: str, forwards: dict) -> ExpertsForward:
    """The forward of an experts module, made when first asked for."""
    if module not in forwards:
        verify_experts(module)
        forwards[module] = ExpertsForward(current, module, name)
    return forwards[module]


def _forward_around(
    current: CurrentMicrobatch, model: nn.Module, factor: Factor, forwards: dict
) -> ExpertsForward | FunctionalLoRA:
    """The forward of the module whose bare parameter `factor` adapts, made when first asked for."""
    wrapper = factor.wrapper
    base = wrapper.get_base_layer()
    if trained_adapters(wrapper) != [factor.adapter]:
        raise Unsupported("one of several trained adapters of a bare parameter: one at a time can be trained")
    name = next(name for name, module in model.named_modules() if module is base)
    if is_experts(base):
        return _experts_forward(current, base, name, forwards)
    if wrapper.parameter_name != "weight" or isinstance(base, nn.Linear) or not calls_linear_once(base):
        raise Unsupported("an adapter of a bare parameter that is neither a stack of experts nor a router's")
    if base not in forwards:
        forwards[base] = FunctionalLoRA(current, base, name, wrapper, factor.adapter)
    return forwards[base]


def _places(module: nn.Module) -> dict[str, Place]:
    """
    Where the parameters are that the module's forward uses itself and that are trained, by their names relative to the
    module: its own, and those of containers without a forward.
    """
    if not _has_forward(module):
        return {}
    found = {}
    containers = [("", module)]
    while containers:
        prefix, holder = containers.pop(0)
        for name, p in holder._parameters.items():
            if p is not None and p.requires_grad:
                found[prefix + name] = (holder, name)
        for name, child in holder._modules.items():
            if child is not None and not _has_forward(child):
                containers.append((f"{prefix}{name}.", child))
    return found


def _has_forward(module: nn.Module) -> bool:
    return type(module).forward is not nn.Module.forward or has_own_forward(module)


def _kind_of(module: nn.Module, places: dict[str, Place], trainable: dict[str, nn.Parameter]) -> type[Layer] | None:
    """The kind that the module has of its own, if it has one; raises [`Inseparable`] where there can be none."""
    if any(holder is not module for holder, _ in places.values()):
        return None
    for kind in (*registered_kinds(), *KINDS):
        try:
            if kind.accepts(module, trainable):
                return kind
        except Inseparable:
            raise
        except Unsupported:
            continue  # another may take it: a router that is an nn.Linear, but goes on from its product
    return None


def _beside_the_text(model: nn.Module, head: nn.Module | None) -> dict[nn.Module, nn.Module]:
    """
    Modules whose rows are no positions of the text, and for each the module around it and the text's: vision towers
    and their projections beside the decoder, PEFT's virtual tokens beside the model.
    """
    whole: Any = getattr(model, "get_base_model", lambda: model)()
    decoder: Any = getattr(whole, "get_decoder", lambda: None)()
    if decoder is head:  # which some families call their `decoder`; the text's modules are not beside it
        decoder = None
    around = next((m for m in model.modules() if any(child is decoder for child in m.children())), None)
    found: dict[nn.Module, nn.Module] = {}
    if decoder is not None and decoder is not whole and around is not None:
        # The head stands beside the decoder, too
        beside = [m for m in around.children() if m is not decoder and all(part is not head for part in m.modules())]
        found = {part: around for m in beside for part in m.modules()}
    virtual_tokens = model._modules.get("prompt_encoder") if isinstance(model, PeftModel) else None
    if virtual_tokens is not None:
        found |= {part: model for part in virtual_tokens.modules()}
    return found


def groups(current: CurrentMicrobatch, model: nn.Module, layers: list[Layer]) -> list[SequenceGroup]:
    """The modules that are run again in the backward, for the `layers` whose gradients are taken per sequence."""
    members = {layer.module: layer for layer in layers if isinstance(layer, AnyModuleLayer)}
    if not members:
        return []
    names = {module: name for name, module in model.named_modules()}
    parent = {child: module for module in model.modules() for child in module.children()}
    beside = _beside_the_text(model, _output_embeddings(model))
    # A convolution's weights are often read by the module around it, which does not call it
    starts = {
        module: parent[module]
        if isinstance(module, nn.Conv1d) and module in parent and _has_forward(parent[module])
        else module
        for module in members
        if module not in beside
    }
    around_others = set(starts.values())
    roots: dict[nn.Module, list[Layer]] = {}
    for module, layer in members.items():
        root = beside.get(module, module)
        if module in starts:
            root = module = starts[module]
            # What is checkpointed by itself may be run when the module around it is over
            while not isinstance(module, GradientCheckpointingLayer) and module in parent:
                module = parent[module]
                root = module if module in around_others else root
        roots.setdefault(root, []).append(layer)
    found = []
    for root, own in roots.items():
        inside = set(_run_with(root)) if root not in beside.values() else set()
        watched = [layer for layer in layers if layer.module in inside and layer.module not in members]
        found.append(SequenceGroup(current, root, names[root], own, watched))
    return found


def _run_with(module: nn.Module) -> list[nn.Module]:
    """Modules inside of `module` that are not checkpointed by themselves."""
    found = []
    for child in module.children():
        if not isinstance(child, GradientCheckpointingLayer):
            found += [child, *_run_with(child)]
    return found


def shortcuts(current: CurrentMicrobatch, model: nn.Module, layers: list[Layer]) -> list[Layer]:
    """
    Layers for speed alone: what they do for a trained parameter is what its own layer, one of `layers`, would do.
    """
    found: list[Layer] = [*lora_linears(current, model, layers), *frozen_norms(current, model, layers)]
    if any(isinstance(layer, AnyModuleLayer) for layer in layers):  # what is around these is run again, its own way
        return found
    taken = {layer.module for layer in layers}
    return [*found, *rotary_attentions(current, model, taken), *gated_mlps(current, model, taken)]


def _refuse_model(model: nn.Module) -> None:
    devices = {p.device for p in model.parameters() if p.requires_grad}
    if len(devices) > 1:
        raise ValueError(
            f"The trained parameters are split over {', '.join(sorted(map(str, devices)))}, which ISOPO does not "
            "support: load the model on one device (`device_map=None`), or shard it with FSDP2."
        )
    if any(isinstance(module, FullyShardedDataParallel) for module in model.modules()):
        raise ValueError(
            "The model is under FSDP1 (`FullyShardedDataParallel`), which flattens the weights of several layers into "
            "one: attach ISOPO to the plain model, and shard it with FSDP2 (`fully_shard`)."
        )
    if any(_is_compiled(module) for module in model.modules()):
        raise ValueError(
            "The model is compiled (`torch.compile`), which ISOPO does not support, since its layers decide at every "
            "backward what to compute: give the model uncompiled."
        )
    if any("_isopo_layer" in module.__dict__ for module in model.modules()):
        raise ValueError(
            "An ISOPO is attached to this model already: call its `detach` first (`trainer.isopo.detach()`, if it is "
            "a trainer's), or load the model anew."
        )


def _is_compiled(module: nn.Module) -> bool:
    # `torch.compile(model)` wraps, `model.compile()` replaces the call; the wrapper's class takes seconds to import
    return "_orig_mod" in module._modules or module._compiled_call_impl is not None


def _output_embeddings(model: nn.Module) -> nn.Module | None:
    head: Any = getattr(model, "get_output_embeddings", lambda: None)()
    if head is not None and hasattr(head, "modules_to_save"):  # PEFT's trained copy
        head = next((m for m in head.modules_to_save.values() if any(p.requires_grad for p in m.parameters())), head)
    return head


def trained_parameters(model: nn.Module, planned: Collection[Place] = ()) -> set[Place]:
    """The parameters of `model` that are trained now, as (module, name in the module), but for those `planned`."""
    # Through the modules: FSDP swaps parameters, PEFT adds modules. Without their names, which take longer to make
    modules: list[nn.Module | None] = [model]
    found = set()
    for module in modules:  # which grows on the way
        if module is None:
            continue
        children, own = module._modules, module._parameters
        if children:
            modules += children.values()
        if own:
            for name, p in own.items():
                if p is not None and p.requires_grad and (module, name) not in planned:
                    found.add((module, name))
    return found


def coverage(layers: list[Layer], rule: Rule, sequences: int, length: int, samples: int) -> list[dict[str, Any]]:
    """
    How each trained parameter is treated in microbatches of `sequences` sequences of `length` positions with so many
    `samples`: rows `parameter`, `shape`, `kind`, `strategy`.
    """
    samples = min(samples, sequences * length) if rule.needs.overlap else 0
    return [
        {
            "parameter": full_name(layer.name, name),
            "shape": full_shape(layer.module.get_parameter(name)),
            "kind": layer.kind,
            "strategy": layer.strategy(sequences, length, samples, rule),
        }
        for layer in layers
        for name in layer.parameters
    ]


def parameter_names(layer: Layer) -> list[str]:
    """The full names of the layer's trained parameters."""
    return [full_name(layer.name, parameter) for parameter in layer.parameters]


def full_name(module: str, parameter: str) -> str:
    return f"{module}.{parameter}" if module else parameter
