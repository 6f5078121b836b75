r"""
Any module that has no kind of its own: its parameters' gradient is taken once per sequence.

The module runs its own forward, once, on the whole microbatch, with views of its parameters; layers inside of it work
as everywhere. In the backward, when the gradient of its outputs is known, its forward is run again by itself, and the
gradient of the outputs is taken back to the parameters once for each sequence, with that of all other sequences set to
zero:

    V_s = J^T g^(s),    g^(s) = gradient of the outputs at sequence s, zero elsewhere

That is exact by linearity, and asks nothing of the module but that its outputs are laid out by sequence: it may mix
positions as it likes. What differs from other kinds is where the Fisher metric is sampled. There is no gradient per
position here, so the samples are the gradients of the microbatch's sequences themselves, all of them:

    F_s^2 = sum_s' <V_s', V_s>^2 / sum_s' |V_s'|^2

It is slower: one more forward of the module, and a backward from its outputs to the parameters per sequence. For a
rule without statistics one backward is enough, of `sum_s c_s g^(s)`.

Modules of this kind inside one another are run again together, as a [`SequenceGroup`], each with its own coefficients.
That includes layers of other kinds inside of it that are not called, but whose weights are read by the module around
them, as a Mamba mixer does with the weights of its convolution.

This file is long because it promises to be exact for modules that nobody has seen: it asks nothing of their insides,
so it must notice by itself what they call, share, checkpoint, draw at random and return.
"""

import contextlib
import functools
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.nn.modules.batchnorm import _BatchNorm
from torch.utils import _pytree as pytree
from transformers.cache_utils import Cache
from transformers.modeling_layers import GradientCheckpointingLayer

from ..geometry.sequences import Sequences
from ..geometry.statistics import Statistics, accumulation_dtype, sequence_sample_statistics
from ..microbatch import CurrentMicrobatch, Microbatch
from ..trl_seam.loans import borrowed
from .dora import constant_norms, without_bias
from .layer import LENT, Inseparable, Layer, Place, exchanged, layer_backward, put_aside, with_aside


class AnyModuleLayer(Layer):
    """
    Parameters of one module, or of containers of it that have no forward of their own (`nn.ParameterDict`).

    Args:
        current, module, name, index: see [`Layer`].
        places (`dict[str, Place]`): where each trained parameter is held, by its name relative to the module.
    """

    kind = "any module"
    way = "per sequence"

    def __init__(self, current: CurrentMicrobatch, module: nn.Module, name: str, index: int, places: dict[str, Place]):
        super().__init__(current, module, name, index)
        self.parameters = list(places)
        self._places = list(places.values())
        of_children = {p for child in module.children() for p in child.parameters()}
        # Second names of what a module inside has, as BERT's head has for its bias: the layer in there works for them
        self.is_alias = of_children.issuperset(holder.get_parameter(own) for holder, own in self._places)

    @property
    def places(self) -> list[Place]:
        return self._places

    @classmethod
    def accepts(cls, module: nn.Module, trainable: dict[str, nn.Parameter]) -> bool:
        if any(isinstance(child, _BatchNorm) for child in module.modules()):
            raise Inseparable("a batch norm mixes the sequences of a batch")
        counts = {getattr(module, name, None) for name in ("num_experts", "num_local_experts", "n_routed_experts")}
        if any(p.dim() > 2 and p.shape[0] in counts for p in trainable.values()):
            raise Inseparable(f"{type(module).__name__} is a stack of experts")
        if any(hasattr(p, "ds_id") for p in trainable.values()):
            raise Inseparable(
                "under DeepSpeed ZeRO-3 it is not whole when its module is run again in the backward; with FSDP2 it is"
            )
        return True

    # The group that it is part of has the forward

    def attach(self) -> None:
        pass

    def detach(self) -> None:
        pass


class SequenceGroup(Layer):
    """
    A module that is run again in the backward, for the layers in it whose gradients are taken per sequence.

    Args:
        current ([`CurrentMicrobatch`]): where to find the microbatch under way.
        module (`nn.Module`): the module around all of them, whose outputs are laid out by sequence.
        name (`str`): its name in the model.
        members (`list[Layer]`): layers of this kind.
        watched (`list[Layer]`): layers of other kinds inside of it, which are members if they are not called.
    """

    kind = "group"
    takes_anything = True

    def __init__(
        self, current: CurrentMicrobatch, module: nn.Module, name: str, members: list[Layer], watched: list[Layer]
    ):
        super().__init__(current, module, name, -1)
        self.members, self.watched = members, watched
        self.is_verified = False
        self.has_no_rows = False  # of sequences, in its output

    def takes_part(self) -> bool:
        return bool(self._trained(self.members))

    def _trained(self, layers: list[Layer]) -> list[tuple[Layer, Place]]:
        """The places of the layers' parameters that are trained now."""
        found = []
        for layer in layers:
            for holder, name in layer.places:
                p = holder._parameters[name]
                if p is not None and p.requires_grad:
                    found.append((layer, (holder, name)))
        return found

    def forward(self, module: Any, microbatch: Microbatch, *args: Any, **kwargs: Any) -> Any:
        taking = self._trained([*self.members, *self.watched])
        own = [holder._parameters[name] for _, (holder, name) in taking]
        for layer in {layer.index: layer for layer, _ in taking}.values():
            parameters = [p for (other, _), p in zip(taking, own, strict=True) if other is layer]
            microbatch.note_parameters(layer.index, *parameters)
        self._verify_whole(taking)
        if not self.is_verified:
            self._refuse_reentrant_checkpointing()
        use = _Use(self, microbatch, taking, *_conditions(own[0]))  # type: ignore[arg-type]
        kwargs = without_bias(module, kwargs)
        leaves, use.form = pytree.tree_flatten((args, kwargs))
        inputs = [leaf.detach() for leaf in leaves if isinstance(leaf, torch.Tensor)]
        # A cache has been filled by the time that the module is run again, and is not needed for it
        use.leaves = [None if isinstance(leaf, (torch.Tensor, Cache)) else leaf for leaf in leaves]
        use.is_tensor = [isinstance(leaf, torch.Tensor) for leaf in leaves]
        microbatch.in_graph.append(own[0])  # type: ignore[arg-type]
        microbatch.lends = microbatch.lends or bool(self.watched)
        entered = len(microbatch.entered)
        handed_out = _HandOut.apply(use, len(own), *own, *inputs)
        with (
            exchanged([place for _, place in taking], handed_out),
            _lent([layer.module for layer in self.watched], taking, own),
            constant_norms(module),
        ):
            output = self._with_rows(self.own_forward(module)(*args, **kwargs), microbatch.shape)
        use.called = set(microbatch.entered[entered:])
        leaves, form = pytree.tree_flatten(output)
        use.outputs = [i for i, leaf in enumerate(leaves) if isinstance(leaf, torch.Tensor) and leaf.requires_grad]
        for i in use.outputs:
            if len(use.outputs) > 1:
                # Apart from what the module itself goes on to do with this output: that is not the outputs' gradient
                leaves[i] = leaves[i].clone()
            leaves[i].register_hook(functools.partial(use.note, i))
        return pytree.tree_unflatten(leaves, form)

    def _with_rows(self, output: Any, shape: tuple[int, int]) -> Any:
        """
        Learned positions are often looked up once for the whole batch, `[1, T, d]` or `[T, d]`: with one row a
        sequence their gradients stay apart, and the sum with the tokens is the same.
        """
        B, T = shape
        if B == 1 or not isinstance(self.module, nn.Embedding):
            return output

        def with_rows(y: Any) -> Any:
            leading = tuple(y.shape[:-1]) if isinstance(y, torch.Tensor) and y.is_floating_point() else ()
            if leading == (T,) and T != B:
                self.has_no_rows = True
            return y.expand(B, T, -1) if leading == (1, T) or (leading == (T,) and self.has_no_rows) else y

        return pytree.tree_map(with_rows, output)

    def _verify_whole(self, taking: list[tuple[Layer, Place]]) -> None:
        for layer, (holder, name) in taking:
            p = holder._parameters[name]
            if isinstance(p, DTensor) or hasattr(p, "ds_id"):
                raise RuntimeError(
                    f"{layer.name}.{name} is not whole when {self.name or 'the model'} begins, around which ISOPO "
                    "takes its gradient per sequence: shard the model by its decoder layers with FSDP2 (DeepSpeed "
                    "ZeRO-3 cannot do it), or freeze this parameter."
                )

    def _refuse_reentrant_checkpointing(self) -> None:
        """It cannot be asked for the gradient of single parameters, and finds other ones when it runs again."""
        for module in self.module.modules():
            if isinstance(module, GradientCheckpointingLayer) and module.gradient_checkpointing and module.training:
                function: Any = getattr(module, "_gradient_checkpointing_func", None)
                if getattr(function, "keywords", {}).get("use_reentrant"):
                    names = ", ".join(layer.name for layer in self.members[:4])
                    raise RuntimeError(
                        f"{names}: their gradient is taken per sequence, through layers that are checkpointed in the "
                        "reentrant way, which does not allow it: set gradient_checkpointing_kwargs="
                        "{'use_reentrant': False}, or freeze them."
                    )

    def gradients(
        self, use: "_Use", microbatch: Microbatch, totals: list[torch.Tensor | None], inputs: tuple[torch.Tensor, ...]
    ) -> list[torch.Tensor | None]:
        """
        What the parameters get.

        Args:
            use ([`_Use`]): the forward.
            microbatch ([`Microbatch`]): the one that the backward is for.
            totals (`list`): gradient of each parameter that was handed out, as autograd adds it up; none for layers
                that were called, which took the parameters themselves.
            inputs (`tuple[torch.Tensor, ...]`): the tensors among the module's arguments.
        """
        cotangents, use.cotangents = use.cotangents, {}
        result = list(totals)
        for (layer, (_, name)), total in zip(use.taking, totals, strict=True):
            if total is not None and layer.index in use.called:
                raise RuntimeError(
                    f"{layer.name} is called, and its {name} is read by {self.name or 'the model'} as well: ISOPO "
                    "cannot take both uses together. Freeze its parameters."
                )
        numbers = [k for k, (layer, _) in enumerate(use.taking) if layer.index not in use.called]
        layers = {use.taking[k][0].index: use.taking[k][0] for k in numbers if totals[k] is not None}
        if not layers:
            return result
        numbers = [k for k in numbers if use.taking[k][0].index in layers]
        for layer in layers.values():
            if layer in self.watched:
                layer.kind = AnyModuleLayer.kind  # type: ignore[misc]
        if microbatch.in_term:
            microbatch.visit_in_term(*layers)
            return result
        m = microbatch.sequences.count
        if m == 1 and microbatch.sequences.ids is None:  # all that there is belongs to the one sequence
            parameters = [holder.get_parameter(name) for _, (holder, name) in (use.taking[k] for k in numbers)]
            own_totals = zip((totals[k] for k in numbers), parameters, strict=True)
            per_sequence = [[torch.zeros_like(p) if total is None else total for total, p in own_totals]]
        else:
            again = _Again(self, use, [use.taking[k][1] for k in numbers], inputs, cotangents)
            if not self.is_verified:
                self._verify(again, [totals[k] for k in numbers])
                self.is_verified = True
            separated = [_Separated(self.name or "The model", g, microbatch) for g in again.cotangents]
            if not any(microbatch.needs):
                c = [microbatch.coefficients(index, Statistics()) for index in layers][0]
                gradients = again.gradients([g.scaled(c) for g in separated], last=True)
                for k, gradient in zip(numbers, gradients, strict=True):
                    result[k] = gradient
                return result
            per_sequence = [again.gradients([g.only(s) for g in separated], last=s == m - 1) for s in range(m)]
        for index in layers:
            own = [(k, i) for i, k in enumerate(numbers) if use.taking[k][0].index == index]
            dtype = accumulation_dtype(per_sequence[0][own[0][1]].dtype)
            V = torch.stack([torch.cat([of_s[i].reshape(-1).to(dtype) for _, i in own]) for of_s in per_sequence])
            microbatch.collect_sequences(index, V)
            samples, direction = microbatch.held(index), microbatch.direction_of(index)
            statistics = sequence_sample_statistics(V, microbatch.needs, samples, direction)
            c = microbatch.coefficients(index, statistics)
            flat = (c.to(dtype) @ V).split([per_sequence[0][i].numel() for _, i in own])
            for (k, i), gradient in zip(own, flat, strict=True):
                result[k] = gradient.view_as(per_sequence[0][i]).to(per_sequence[0][i].dtype)
        return result

    def _verify(self, again: "_Again", totals: list[torch.Tensor | None]) -> None:
        """Raise unless the second run has the gradients of the first: all there is must be in its outputs."""
        found = again.gradients(again.cotangents, last=False)
        pairs = [(x, y) for x, y in zip(found, totals, strict=True) if y is not None]
        dtype = torch.float32 if pairs[0][0].device.type == "mps" else torch.float64
        difference = torch.stack([(x.to(dtype) - y.to(dtype)).norm() for x, y in pairs]).norm()
        size = torch.stack([y.to(dtype).norm() for _, y in pairs]).norm()
        if difference > 4 * torch.finfo(pairs[0][0].dtype).eps ** 0.5 * size:
            raise RuntimeError(
                f"{self.name or 'The model'} has another gradient when it is run again by itself (by "
                f"{(difference / size).item():.1e} of its size), so that it cannot be separated by sequence: "
                "something other than its inputs, outputs and the random stream connects it with the rest of the "
                "model. Freeze its parameters, or train with LoRA on the linear layers."
            )


@dataclass
class _Use:
    """One forward of a group, as far as its backward must know it."""

    group: SequenceGroup
    microbatch: Microbatch
    taking: list[tuple[Layer, Place]]  # layer and place of each parameter that was handed out
    autocast: tuple[str, torch.dtype, bool]
    random: list[torch.Tensor]
    form: Any = None  # of the arguments, whose leaves are below, None for tensors
    leaves: list[Any] = field(default_factory=list)
    is_tensor: list[bool] = field(default_factory=list)
    called: set[int] = field(default_factory=set)  # layers inside that took their parameters themselves
    outputs: list[int] = field(default_factory=list)  # which leaves of the output have a gradient
    cotangents: dict[int, torch.Tensor] = field(default_factory=dict)

    def note(self, i: int, gradient: torch.Tensor) -> None:
        """Keep the gradient of output `i`."""
        self.cotangents[i] = gradient


def _backward_of_term(ctx: Any, *totals: torch.Tensor | None) -> None:
    put_aside(ctx, *ctx.use.group.gradients(ctx.use, ctx.microbatch, list(totals), ctx.saved_tensors))


class _HandOut(torch.autograd.Function):
    """Give the module views of its parameters, and take back their gradients."""

    @staticmethod
    def forward(ctx, use, number, *tensors):
        ctx.use, ctx.microbatch = use, use.microbatch
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(*tensors[number:])
        return tuple(p.view_as(p) for p in tensors[:number])

    @staticmethod
    @layer_backward(_backward_of_term)
    def backward(ctx, *totals):
        inputs = ctx.saved_tensors
        gradients = ctx.use.group.gradients(ctx.use, ctx.microbatch, list(totals), inputs)
        return None, None, *with_aside(ctx, *gradients), *(None,) * len(inputs)


class _Again:
    """
    The module, run again by itself, after its first run `use`: for the gradient of parameters at `places`, from the
    `cotangents` of its outputs, by their place among the leaves.
    """

    def __init__(
        self,
        group: SequenceGroup,
        use: _Use,
        places: list[Place],
        inputs: tuple[torch.Tensor, ...],
        cotangents: dict[int, torch.Tensor],
    ):
        self.current = group.current
        values = iter(inputs)
        leaves = [next(values) if tensor else leaf for leaf, tensor in zip(use.leaves, use.is_tensor, strict=True)]
        args, kwargs = pytree.tree_unflatten(leaves, use.form)
        own = [holder._parameters[name] for holder, name in places]
        self.parameters = [p.detach().requires_grad_() for p in own if p is not None]
        device, dtype, enabled = use.autocast
        with (
            torch.enable_grad(),
            _paused(group.current),
            torch.autocast(device, dtype=dtype, enabled=enabled, cache_enabled=False),
            _random_state(use.random, device),
            exchanged(places, self.parameters),
        ):
            output = group._with_rows(group.own_forward(group.module)(*args, **kwargs), use.microbatch.shape)
            outputs, _ = pytree.tree_flatten(output)
        reached = [i for i in use.outputs if i in cotangents and outputs[i].requires_grad]
        self.outputs = [outputs[i] for i in reached]
        self.cotangents = [cotangents[i] for i in reached]

    def gradients(self, cotangents: list[torch.Tensor], last: bool) -> list[torch.Tensor]:
        """Take a gradient of the outputs back to the parameters; zero where it does not reach one."""
        with _paused(self.current):  # for what is checkpointed inside, and run once more now
            found = torch.autograd.grad(
                self.outputs, self.parameters, cotangents, retain_graph=not last, allow_unused=True
            )
        return [torch.zeros_like(p) if g is None else g.detach() for g, p in zip(found, self.parameters, strict=True)]


class _Separated:
    """
    The gradient of one output, sequence by sequence: `[B, ...]`, or positions first, `[B, T, ...]`, `[B T, ...]` or
    `[1, B T, ...]`.
    """

    def __init__(self, name: str, gradient: torch.Tensor, microbatch: Microbatch):
        self.gradient, self.sequences = gradient, microbatch.sequences
        self.rows = _rows(gradient, microbatch.shape, microbatch.sequences)
        if self.rows is None:
            B, T = microbatch.shape
            raise RuntimeError(
                f"{name} has an output of shape {tuple(gradient.shape)}, but the microbatch has {B} x {T} positions: "
                "ISOPO cannot tell which sequence its parts belong to, so freeze its parameters, or leave it out of "
                "the LoRA targets."
            )

    def only(self, s: int) -> torch.Tensor:
        """Zero but for sequence `s`."""
        rows: Any = self.rows
        if self.sequences.ids is None:
            result = torch.zeros_like(rows)
            result[s] = rows[s]
        else:
            mine = (self.sequences.ids == s).view(-1, *[1] * (rows.dim() - 1))
            result = torch.where(mine, rows, 0)
        return result.view_as(self.gradient)

    def scaled(self, c: torch.Tensor) -> torch.Tensor:
        """Each sequence times its coefficient, `c` `[m]`."""
        rows: Any = self.rows
        dtype = accumulation_dtype(rows.dtype)
        if self.sequences.ids is None:
            result = rows.to(dtype) * c.to(dtype).unsqueeze(1)
        else:
            result = self.sequences.scaled(rows.to(dtype), c.to(dtype))
        return result.to(rows.dtype).view_as(self.gradient)


def _rows(gradient: torch.Tensor, shape: tuple[int, int], sequences: Sequences) -> torch.Tensor | None:
    """The gradient `[m, rest]` where rows of the batch are sequences, else `[N, ...]`; `None` if it is neither."""
    leading, N = tuple(gradient.shape), sequences.rows
    if sequences.ids is None:
        if leading[:1] in ((shape[0],), (N,)) or leading[:2] == (1, N):
            return gradient.reshape(shape[0], -1)
        return None
    if leading[:2] in (shape, (1, N)):
        return gradient.reshape(N, *leading[2:])
    return gradient if leading[:1] == (N,) else None


@contextlib.contextmanager
def _lent(modules: list[nn.Module], taking: list[tuple[Layer, Place]], own: list[Any]) -> Iterator[None]:
    """Tell the modules which of their parameters have views in their place, for their layers to find their own."""
    try:
        for (_, (holder, name)), p in zip(taking, own, strict=True):
            if holder in modules:
                holder.__dict__.setdefault(LENT, {})[name] = p
        yield
    finally:
        for module in modules:
            module.__dict__.pop(LENT, None)


def _paused(current: CurrentMicrobatch) -> contextlib.AbstractContextManager[None]:
    """Context without a microbatch for the layers inside: they run as they are."""
    return borrowed(current, microbatch=None)


def _conditions(parameter: torch.Tensor) -> tuple[tuple[str, torch.dtype, bool], list[torch.Tensor]]:
    """Autocast and the random streams, as they are now."""
    device = parameter.device.type
    autocast = (device, torch.get_autocast_dtype(device), torch.is_autocast_enabled(device))
    random = [torch.get_rng_state()]
    if device == "cuda":
        random.append(torch.cuda.get_rng_state(parameter.device))
    return autocast, random


@contextlib.contextmanager
def _random_state(states: list[torch.Tensor], device: str) -> Iterator[None]:
    """The random streams as they were; afterwards as they are now."""
    with torch.random.fork_rng(devices=[torch.cuda.current_device()] if device == "cuda" else []):
        torch.set_rng_state(states[0])
        if device == "cuda":
            torch.cuda.set_rng_state(states[1])
        yield
