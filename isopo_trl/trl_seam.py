"""
All that is private to TRL and that this package relies on, in one place, checked when it is imported.
"""

import inspect
from collections.abc import Callable
from typing import Any
from weakref import WeakSet

import torch
import trl
import trl.trainer.utils as trl_utils
from torch.distributed.tensor import DTensor
from trl.kernels import ChunkedLogProbFunction, chunked_logprob
from trl.trainer.utils import maybe_gather_lm_head_ctx


# The LM head: TRL's loss multiplies by its weight inside a chunked autograd function and never calls the module

_PLACE = "_ChunkedLogProbFunction"  # where TRL's model forward looks the function up
HEAD_WEIGHT = 1  # its place among the function's arguments

gathered_head = maybe_gather_lm_head_ctx
head_uses_triton = chunked_logprob._use_triton


class _HeadDispatcher:
    """
    Stands, for good, in the place where TRL looks up its chunked log-probabilities. Each call goes to the LM head that
    owns the weight, if one does whose microbatch is under way, and else to TRL's own function.
    """

    def __init__(self) -> None:
        self.heads: WeakSet[Any] = WeakSet()

    def apply(self, *args: Any) -> Any:
        weight = _parameter_behind(args[HEAD_WEIGHT])
        for head in self.heads:
            if head.module.weight is weight and head.microbatch is not None:
                return head.chunked_logps(*args)
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


_dispatcher = _HeadDispatcher()


def add_head(head: Any) -> None:
    """Let `head`, a layer with `module`, `microbatch` and `chunked_logps`, take the calls with its weight."""
    _dispatcher.heads.add(head)


def remove_head(head: Any) -> None:
    """Leave calls with the weight of `head` to TRL again."""
    _dispatcher.heads.discard(head)


def logits_gradient_tile(
    tile: torch.Tensor,
    targets: torch.Tensor,
    log_z: torch.Tensor,
    grad: torch.Tensor,
    start: int,
    settings: dict[str, Any],
) -> torch.Tensor:
    """TRL's own step from logits `[rows, width]` to their gradient, in place, by its kernel where it has one."""
    rows, width = tile.shape
    block = chunked_logprob._BLOCK_SIZE
    function: Callable = chunked_logprob._backward_tile
    if head_uses_triton(tile.device):
        function = chunked_logprob._backward_kernel[(rows, -(-width // block))]
    arguments = (tile, tile.stride(0), targets, log_z, log_z, grad, log_z, start, width)
    function(*arguments, HAS_LOGPROB_GRAD=True, HAS_ENTROPY_GRAD=False, BLOCK_SIZE=block, **settings)
    return tile


def _check_head() -> None:
    found = getattr(trl_utils, _PLACE, None)
    if found is not ChunkedLogProbFunction and not isinstance(found, _HeadDispatcher):
        raise ImportError(
            f"TRL {trl.__version__} has no trl.trainer.utils.{_PLACE}, through which isopo_trl reaches the LM head: "
            "install trl 1.16, or a newer isopo_trl."
        )
    names = list(inspect.signature(ChunkedLogProbFunction.forward).parameters)[1:]
    expected = ["hidden", "weight", "bias"]
    if names[:3] != expected:
        raise ImportError(
            f"TRL {trl.__version__}'s ChunkedLogProbFunction takes {', '.join(names[:3])}, where isopo_trl expects "
            f"{', '.join(expected)}: install trl 1.16, or a newer isopo_trl."
        )


_check_head()
setattr(trl_utils, _PLACE, _dispatcher)
