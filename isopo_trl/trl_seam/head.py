"""TRL's LM head: the chunked log-probabilities, and who takes their calls."""

import importlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any
from weakref import WeakSet

import torch
from torch.distributed.tensor import DTensor

from .loans import borrowed
from .required import require


# TRL's loss multiplies by the head's weight inside this autograd function and never calls the module
_PLACE = "_ChunkedLogProbFunction"  # where TRL's model forward looks it up, in trl.trainer.utils
_HEAD_ARGUMENTS = (
    *("ctx", "hidden", "weight", "bias", "targets", "temperature", "chunk_size", "final_logit_softcapping"),
    *("logit_scale", "outputs"),
)
HEAD_WEIGHT = _HEAD_ARGUMENTS.index("weight") - 1  # among the arguments of `apply`
_TEMPERATURE, _OUTPUTS = (_HEAD_ARGUMENTS.index(name) - 1 for name in ("temperature", "outputs"))
_SQUARES = "log_sum_sq_probs"  # an output, and its place behind the log-probabilities and the entropies

ChunkedLogProbFunction = require("trl.kernels.ChunkedLogProbFunction")
_FOLDS = ("_forward_tile", "_forward_kernel")  # which its forward looks up as it comes to a tile
require("trl.kernels.ChunkedLogProbFunction.forward", *_HEAD_ARGUMENTS, mentions=(_SQUARES, *_FOLDS))
require(f"trl.trainer.utils.{_PLACE}")
gathered_head = require("trl.trainer.utils.maybe_gather_lm_head_ctx")
head_uses_triton = require("trl.kernels.chunked_logprob._use_triton", "device")
require("trl.trainer.utils._use_triton", "device")
require("trl.trainer.utils.add_fused_lm_head", "model", "temperature", "cast_lm_head_to_fp32", "outputs")
_BLOCK_SIZE = require("trl.kernels.chunked_logprob._BLOCK_SIZE")
_forward_tile = require(
    "trl.kernels.chunked_logprob._forward_tile",
    *("tile", "tile_stride", "targets", "running_max", "sum_exp", "x_sum_exp", "sq_sum_exp", "z_sum"),
    *("max_before_target", "target_logit", "vocab_start", "n_cols"),
)
_forward_kernel = require("trl.kernels.chunked_logprob._forward_kernel")  # takes the same, as pointers
add_product = require("trl.kernels.chunked_logprob._addmm_fp32", "acc", "a", "b")
_backward_tile = require(
    "trl.kernels.chunked_logprob._backward_tile",
    *("tile", "tile_stride", "targets", "log_z", "entropy", "grad_logprobs", "grad_entropy", "vocab_start", "n_cols"),
    *("logit_scale", "softcap", "inv_t", "HAS_SOFTCAP", "HAS_LOGPROB_GRAD", "HAS_ENTROPY_GRAD", "BLOCK_SIZE"),
)
_backward_kernel = require("trl.kernels.chunked_logprob._backward_kernel")  # takes the same, as pointers


@dataclass(frozen=True)
class HeadFigures:
    """
    What a head's forward says of each token beside its log-probability, without gradient: `[N]` in the rows that it
    works on, `[B, C]` in completions.

    Args:
        hidden (`torch.Tensor`): `|h|^2`, of the last hidden state.
        squares, cubes (`torch.Tensor`): `sum_v pi_v^2` and `sum_v pi_v^3` over the vocabulary, at the loss's
            temperature.
    """

    hidden: torch.Tensor
    squares: torch.Tensor
    cubes: torch.Tensor

    def of_completions(self, mask: torch.Tensor, positions: int) -> "HeadFigures":
        """
        The same for the tokens of completions, `[B, C]`, 0 where there is none in rows of real tokens alone.

        Args:
            mask (`torch.Tensor`): `[B, C]`, nonzero at tokens of the completions.
            positions (`int`): `P + C`, the width of the batch.
        """
        B, C = mask.shape

        def placed(rows: torch.Tensor) -> torch.Tensor:
            if len(rows) >= B * (positions - 1):  # every prediction, and of virtual tokens before them
                return rows.view(B, -1)[:, -C:]
            return rows.new_zeros(B, C).masked_scatter(mask.bool(), rows)

        return HeadFigures(placed(self.hidden), placed(self.squares), placed(self.cubes))


class _HeadDispatcher:
    """
    Stands, for good, in the place where TRL looks up its chunked log-probabilities. Each call goes to the LM head that
    owns the weight, if one does whose microbatch is under way; else to `frozen`, where somebody has put it for calls
    without a gradient of the head; and else to TRL's own function.
    """

    def __init__(self) -> None:
        self.heads: WeakSet[Any] = WeakSet()
        self.noted: list[HeadFigures] | None = None
        self.frozen: Callable[..., Any] | None = None

    def apply(self, *args: Any) -> Any:
        if self.noted is None:
            return self._applied(*args)
        args, wanted = _with_squares(args)
        logps, entropy, squares, *others = self._applied(*args)
        self.noted.append(_figures(args, logps.detach(), squares))
        return logps, entropy, squares if wanted else None, *others

    def _applied(self, *args: Any) -> Any:
        weight = _parameter_behind(args[HEAD_WEIGHT])
        for head in self.heads:
            if head.module.weight is weight and head.microbatch is not None:
                return head.chunked_logps(*args)
        trained = any(x is not None and x.requires_grad for x in args[HEAD_WEIGHT : HEAD_WEIGHT + 2])
        if self.frozen is not None and not (trained and torch.is_grad_enabled()):
            return self.frozen(*args)
        return ChunkedLogProbFunction.apply(*args)


def _parameter_behind(weight: torch.Tensor) -> torch.Tensor:
    """The parameter that `weight` is, or that it was gathered from: FSDP2's shards arrive here as a whole."""
    node: Any = weight.grad_fn
    while node is not None:
        variable = getattr(node, "variable", None)
        if variable is not None:
            return variable if isinstance(variable, DTensor) else weight
        node = next((following for following, _ in node.next_functions if following is not None), None)
    return weight


def _with_squares(args: tuple[Any, ...]) -> tuple[tuple[Any, ...], bool]:
    """The arguments of `apply` that ask for `log sum_v pi_v^2`, and whether they did."""
    outputs = args[_OUTPUTS]
    wanted = _SQUARES in outputs
    return args if wanted else (*args[:_OUTPUTS], (*outputs, _SQUARES)), wanted


@torch.no_grad()
def _figures(args: tuple[Any, ...], logps: torch.Tensor, squares: torch.Tensor) -> HeadFigures:
    """
    Those of a call with the arguments `args`, that has returned `logps` and the logarithms of `squares`, `[N]`.

    With `Z(T)` the normalisation at a temperature T, `sum_v pi_v^3 = Z(T / 3) / Z(T)^3`, and a token's
    log-probability has the one logarithm or the other in it: `3 log pi_T - log pi_{T / 3}`. So the cubes are one
    more call, by the same kernel.
    """
    cold = (*args[:_TEMPERATURE], args[_TEMPERATURE] / 3, *args[_TEMPERATURE + 1 : _OUTPUTS], ("log_probs",))
    coldest, *_ = ChunkedLogProbFunction.apply(*cold)
    hidden = args[0].detach().float().square().sum(1)
    return HeadFigures(hidden, squares.exp(), (3 * logps - coldest).exp())


_dispatcher = _HeadDispatcher()


@contextmanager
def head_figures_noted() -> Iterator[list[HeadFigures]]:
    """Context in which each call of TRL's chunked log-probabilities leaves its [`HeadFigures`]."""
    noted: list[HeadFigures] = []
    _dispatcher.noted = noted
    try:
        yield noted
    finally:
        _dispatcher.noted = None


def add_head(head: Any) -> None:
    """Let `head`, a layer with `module`, `microbatch` and `chunked_logps`, take the calls with its weight."""
    _dispatcher.heads.add(head)


def remove_head(head: Any) -> None:
    """Leave calls with the weight of `head` to TRL again."""
    _dispatcher.heads.discard(head)


@contextmanager
def scored_rows_alone(frozen: Callable[..., Any] | None = None) -> Iterator[None]:
    """
    Context in which the head gets no rows on a CPU but those whose predictions are scored, and where it is not
    trained, its calls go to `frozen`.

    TRL leaves the other rows out where it uses Triton. Elsewhere it hands over every position, prompts and padding
    included, for devices that compile a program for each number of rows.
    """
    utils: Any = importlib.import_module("trl.trainer.utils")
    own = utils._use_triton
    with (
        borrowed(utils, _use_triton=lambda device: device.type == "cpu" or own(device)),
        borrowed(_dispatcher, frozen=frozen),
    ):
        yield


def scores_rows_alone(device: torch.device) -> bool:
    """Whether, in [`scored_rows_alone`], the head gets no other rows there."""
    return device.type == "cpu" or head_uses_triton(device)


@dataclass(frozen=True)
class FoldedTile:
    """
    A tile of logits, once TRL's forward is done with it.

    Args:
        logits (`torch.Tensor`): `[rows, width]`, before scale and temperature; may be written over.
        rows, part (`slice`): which rows, and which part of the vocabulary.
        before, largest (`torch.Tensor`): `[rows]`, the largest logit before this tile and with it.
        total (`torch.Tensor`): `[rows]`, the sum of `e^(z - largest)` so far.
    """

    logits: torch.Tensor
    rows: slice
    part: slice
    before: torch.Tensor
    largest: torch.Tensor
    total: torch.Tensor


class _Launched:
    """Stands in for TRL's kernel, which is taken by its grid before it is called."""

    def __init__(self, seen: Callable):
        self.seen = seen

    def __getitem__(self, grid: Any) -> Callable:
        return self.seen(_forward_kernel[grid])


def forward_by_tiles(ctx: Any, args: Sequence[Any], see: Callable[[FoldedTile], None]) -> tuple[Any, ...]:
    """What TRL's forward returns for the arguments of `apply`; `see` is called for each tile on the way."""

    def seen(fold: Callable) -> Callable:
        def run(tile, stride, targets, largest, total, *others, **settings):
            before, first, (start, width) = largest.clone(), largest.storage_offset(), others[-2:]
            fold(tile, stride, targets, largest, total, *others, **settings)
            rows, part = slice(first, first + len(tile)), slice(start, start + width)
            see(FoldedTile(tile, rows, part, before, largest, total))

        return run

    module = importlib.import_module(ChunkedLogProbFunction.__module__)
    with borrowed(module, **dict(zip(_FOLDS, (seen(_forward_tile), _Launched(seen)), strict=True))):
        return ChunkedLogProbFunction.forward(ctx, *args)


def logits_gradient_tile(
    tile: torch.Tensor,
    targets: torch.Tensor,
    log_z: torch.Tensor,
    grad: torch.Tensor | None,
    of_entropy: tuple[torch.Tensor, torch.Tensor] | None,
    start: int,
    settings: dict[str, Any],
) -> torch.Tensor:
    """
    TRL's own step from logits `[rows, width]` to their gradient, in place, by its kernel where it has one: for the
    gradient of the log-probabilities, and for the entropies and their gradient; `[rows]` each.
    """
    rows, width = tile.shape
    block = _BLOCK_SIZE
    function: Callable = _backward_tile
    if head_uses_triton(tile.device):
        function = _backward_kernel[(rows, -(-width // block))]
    # What is not there has its place filled, and is not read
    entropy, grad_entropy = (log_z, log_z) if of_entropy is None else of_entropy
    grad_logps = log_z if grad is None else grad
    arguments = (tile, tile.stride(0), targets, log_z, entropy, grad_logps, grad_entropy, start, width)
    has = {"HAS_LOGPROB_GRAD": grad is not None, "HAS_ENTROPY_GRAD": of_entropy is not None}
    function(*arguments, **has, BLOCK_SIZE=block, **settings)
    return tile


def dispatch() -> None:
    """Let calls of TRL's chunked log-probabilities go to the heads that own the weight; for good."""
    importlib.import_module("trl.trainer.utils").__dict__[_PLACE] = _dispatcher
