"""What all kinds of layers share: putting a forward in place, and finding the microbatch under way."""

import contextlib
import functools
import inspect
from collections.abc import Callable, Iterable, Iterator
from typing import Any, ClassVar

import torch
from torch import nn

from ..microbatch import CurrentMicrobatch, Microbatch
from ..rules.rule import Rule


# What a module's forward may raise when it is tried on inputs it was not made for
PROBE_ERRORS = (RuntimeError, TypeError, ValueError, LookupError, AttributeError, AssertionError)


# A module, and the name of one of its own parameters
Place = tuple[nn.Module, str]


class Unsupported(Exception):
    """Why a module that looks like a supported one is not."""


class Inseparable(Unsupported):
    """Why no kind of layer can take a module."""


class Layer:
    """
    One use of one module's parameters in the forward pass.

    Args:
        current ([`CurrentMicrobatch`]): where to find the microbatch under way.
        module (`nn.Module`): the module whose parameters are trained.
        name (`str`): its name in the model.
        index (`int`): its entry in the running statistics.
    """

    kind: ClassVar[str]
    # Whether its forward takes what the module is called with, whatever it is; else the input, and what follows it
    takes_anything: ClassVar[bool] = False
    # How its statistics are computed, for the coverage table
    way: ClassVar[str] = "its own"
    # Whether its parameters are those of layers inside of its module as well, so that it need not be reached
    is_alias: bool = False

    def __init__(self, current: CurrentMicrobatch, module: nn.Module, name: str, index: int):
        self.current = current
        self.module = module
        self.name = name
        self.index = index
        # Names of the trained parameters, relative to the module
        self.parameters = [name for name, p in module.named_parameters(recurse=False) if p.requires_grad]

    @classmethod
    def accepts(cls, module: nn.Module, trainable: dict[str, nn.Parameter]) -> bool:
        """Whether this kind handles the module; raises [`Unsupported`] if only another setting of it is handled."""
        raise NotImplementedError

    @property
    def indices(self) -> range:
        """Its entries in the running statistics: one, or for a stack of matrices one for each."""
        return range(self.index, self.index + 1)

    def entry_names(self) -> list[str]:
        """What each of these entries is called."""
        return [f"{self.name}.{self.parameters[0]}" if self.name else self.parameters[0]]

    def forward(self, module: Any, microbatch: Microbatch, *args: Any, **kwargs: Any) -> Any:
        """The module's forward while a microbatch is under way and gradients are recorded."""
        raise NotImplementedError

    def forward_apart(self, module: Any, *args: Any, **kwargs: Any) -> Any:
        """The module's forward everywhere else."""
        return self.own_forward(module)(*args, **kwargs)

    def strategy(self, sequences: int, length: int, samples: int, rule: Rule) -> str:
        """
        How the statistics are computed for a microbatch of this size: `"ghost"`, `"whole"` or `"blocks"` (see
        [`~geometry.cost.choose_strategy`]), or `"no statistics"` where the rule needs none. For the coverage table.
        """
        return self.way if any(rule.needs) else "no statistics"

    @property
    def places(self) -> list[Place]:
        """Where its trained parameters are held, in the order of `parameters`."""
        return [(self.module, name) for name in self.parameters]

    @property
    def entered(self) -> list[int]:
        """The layers, by their index, whose parameters its forward takes."""
        return [self.index]

    @property
    def modules(self) -> list[nn.Module]:
        """The modules whose parameters its forward reads."""
        return [self.module]

    @property
    def microbatch(self) -> Microbatch | None:
        """The microbatch under way, if the layer takes part in it."""
        microbatch = self.current.microbatch
        return None if microbatch is None or not torch.is_grad_enabled() or not self.takes_part() else microbatch

    def takes_part(self) -> bool:
        """Whether its forward is to be in place of the module's at present: where a parameter is trained."""
        # Read through the module: FSDP and PEFT swap parameters after the layer was planned
        for p in self.module._parameters.values():
            if p is not None and p.requires_grad:
                return True
        return False

    def attach(self) -> None:
        if has_own_forward(self.module) and "_isopo_layer" not in self.module.__dict__:  # stacks share a forward
            self.module.__dict__["_isopo_own_forward"] = self.module.__dict__["forward"]
        self.module._isopo_layer = self  # type: ignore[assignment]
        # A partial, not a closure: a deep copy of the model then has its own module behind it, and it can be pickled
        self.module.forward = functools.partial(_forward, self.module)

    def detach(self) -> None:
        self.module.__dict__.pop("forward", None)
        self.module.__dict__.pop("_isopo_layer", None)
        own = self.module.__dict__.pop("_isopo_own_forward", None)
        if own is not None:
            self.module.forward = own

    @staticmethod
    def own_forward(module: nn.Module) -> Callable:
        """The module's own forward, that of its class or what somebody has put in its place."""
        own: Any = module.__dict__.get("_isopo_own_forward")
        return functools.partial(type(module).forward, module) if own is None else own

    def __deepcopy__(self, memo: dict) -> "Layer":
        return self

    def __getstate__(self) -> dict[str, Any]:
        return {}


class Shortcut(Layer):
    """A layer for speed alone, inside of a microbatch: outputs and gradients are those of its module's own forward."""

    def __init__(self, current: CurrentMicrobatch, module: nn.Module):
        super().__init__(current, module, "", -1)

    @property
    def entered(self) -> list[int]:
        return []

    def takes_part(self) -> bool:
        return True


class ForwardElsewhere(Layer):
    """
    A layer whose module is never called: the forward of another module works for it.

    Args:
        forward_of ([`Layer`]): the layer that has that forward.
        module, name, index: see [`Layer`].
    """

    def __init__(self, forward_of: Layer, module: nn.Module, name: str, index: int):
        super().__init__(forward_of.current, module, name, index)
        self.forward_of = forward_of

    def attach(self) -> None:
        self.forward_of.attach()

    def detach(self) -> None:
        self.forward_of.detach()


@contextlib.contextmanager
def exchanged(places: list[Place], values: Iterable[Any]) -> Iterator[None]:
    """Context with other tensors in place of parameters."""
    own = [holder._parameters[name] for holder, name in places]
    try:
        for (holder, name), value in zip(places, values, strict=True):
            holder._parameters[name] = value
        yield
    finally:
        for (holder, name), value in zip(places, own, strict=True):
            holder._parameters[name] = value


def _forward(module: Any, *args: Any, **kwargs: Any) -> Any:
    layer = module.__dict__.get("_isopo_layer")
    # A deep copy of the model carries the layer along but is not the model that is trained
    if layer is None or getattr(layer, "module", None) is not module:
        return Layer.own_forward(module)(*args, **kwargs)
    microbatch = layer.microbatch
    if microbatch is None:
        return layer.forward_apart(module, *args, **kwargs)
    if not args and not layer.takes_anything:  # the input given by name
        kind: Any = type(module)
        args = (kwargs.pop(list(inspect.signature(kind.forward).parameters)[1]),)
    if not microbatch.lends:
        microbatch.add_to_graph(layer.module)
        return layer.forward(module, microbatch, *args, **kwargs)
    microbatch.entered += layer.entered
    with _own_parameters(layer.modules):
        microbatch.add_to_graph(layer.module)
        return layer.forward(module, microbatch, *args, **kwargs)


# Where a module keeps its parameters while a view of them stands in their place (`layers.any_module`)
LENT = "_isopo_lent"


def _own_parameters(modules: list[nn.Module]) -> contextlib.AbstractContextManager[None]:
    """Context in which a layer's forward takes the parameters themselves, also where views of them are lent."""
    lent = {(module, name): p for module in modules for name, p in module.__dict__.get(LENT, {}).items()}
    return exchanged(list(lent), lent.values())


class LayerFunction(torch.autograd.Function):
    """An autograd function that is called for every layer."""

    @classmethod
    def apply(cls, *args: Any) -> Any:
        if torch._C._are_functorch_transforms_active():
            return super().apply(*args)
        # Past what PyTorch does for `torch.func` even where nobody uses it, which is a third of a call's time
        return super(torch.autograd.Function, cls).apply(*args)  # type: ignore[misc]


def once(backward: Callable) -> Callable:
    """Mark a backward that cannot be differentiated again (as `once_differentiable` does, at a tenth of its time)."""

    @functools.wraps(backward)
    def run(ctx, *gradients):
        if torch.is_grad_enabled():
            raise RuntimeError("ISOPO's gradients cannot be differentiated again: backward without `create_graph`.")
        if torch._C._is_any_autocast_enabled():
            with _without_autocast(gradients):
                return backward(ctx, *gradients)
        return backward(ctx, *gradients)

    return run


def _without_autocast(gradients: tuple[Any, ...]) -> Any:
    """
    Context of a backward that somebody runs inside of autocast, which PyTorch advises against: products of its own
    operations would be rounded there, and statistics are sums of them.
    """
    for g in gradients:
        if g is not None:
            return torch.autocast(g.device.type, enabled=False)
    return contextlib.nullcontext()


def layer_backward(backward_of_term: Callable) -> Callable[[Callable], Callable]:
    """
    Mark the backward of a layer's function, whose context knows the `microbatch`.

    In the backward of a term that carries no advantage ([`~microbatch.Microbatch.backward_of_term`]),
    `backward_of_term` runs in its place. It returns the gradient of the function's first input alone and leaves in the
    context what parameters get of the term, for the loss's own backward to add. So whoever waits for the parameters'
    gradients (DDP, FSDP2, DeepSpeed) sees them once.
    """

    def of_term(ctx, *gradients):
        return backward_of_term(ctx, *gradients), *(None,) * (len(ctx.needs_input_grad) - 1)

    def mark(backward: Callable) -> Callable:
        @functools.wraps(backward)
        def run(ctx, *gradients):
            return (of_term if ctx.microbatch.in_term else backward)(ctx, *gradients)

        return once(run)

    return mark


def put_aside(ctx: Any, *gradients: torch.Tensor | None) -> None:
    """Keep what parameters get of a term, beside what is there of others."""
    ctx.aside = with_aside(ctx, *gradients)


def with_aside(ctx: Any, *gradients: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
    """Add what was put aside, which is gone from the context then."""
    aside = take_aside(ctx)
    if aside is None:
        return gradients
    pairs = zip(gradients, aside, strict=True)
    return tuple([g if x is None else x if g is None else g + x for g, x in pairs])


def take_aside(ctx: Any) -> Any:
    """What was put aside, if anything was; it is gone from the context then."""
    if not ctx.microbatch.visits_of_terms:
        return None
    aside, ctx.aside = getattr(ctx, "aside", None), None
    return aside


def parameter_of(module: nn.Module, name: str) -> Any:
    """`module.name`, without the search of `nn.Module.__getattr__`, which takes ten times as long."""
    own = module._parameters
    return own[name] if name in own else getattr(module, name)


def full_shape(parameter: torch.Tensor) -> tuple[int, ...]:
    """Shape of the whole parameter, also where DeepSpeed ZeRO-3 has left only a part of it here."""
    return tuple(getattr(parameter, "ds_shape", parameter.shape))


def has_own_forward(module: nn.Module) -> bool:
    """Whether somebody has replaced the forward of this very instance."""
    return "forward" in module.__dict__


def is_hooked(module: nn.Module) -> bool:
    """Whether somebody wants to be told of the module's calls, or does something there."""
    before, after = module._forward_pre_hooks, module._forward_hooks
    return bool(before or after or module._backward_pre_hooks or module._backward_hooks)


def autocast(*tensors: Any) -> tuple[Any, ...]:
    """
    Cast as autocast would before a matrix product, so that a product inside an autograd function sees what the layer's
    own would have seen, and its gradient comes back through the cast.
    """
    first = tensors[0]
    device = "cuda" if first.is_cuda else first.device.type  # the type alone takes longer to ask for
    if not torch.is_autocast_enabled(device):
        return tensors
    dtype = torch.get_autocast_dtype(device)
    for x in tensors:
        if x is not None and x.dtype != dtype:
            break
    else:
        return tensors
    unchanged = (dtype, torch.float64)
    return tuple(
        [x if x is None or x.dtype in unchanged or not x.is_floating_point() else x.to(dtype) for x in tensors]
    )


def is_recomputing() -> bool:
    """Whether a backward pass is under way in this thread, so that a forward is one that checkpointing repeats."""
    return torch._C._current_graph_task_id() != -1 and not torch._C._are_functorch_transforms_active()


def apart(output: torch.Tensor) -> torch.Tensor:
    """
    The same numbers in the same memory, but no view of another tensor: autograd does not let a model go on in place
    (`add_`) with a view that an autograd function returns, and a product with a bias is one.
    """
    return torch.ops.aten._unsafe_view(output, output.shape) if output._is_view() else output
