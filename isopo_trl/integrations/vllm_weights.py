"""
One copy of the weights for the trainer and for vLLM in its process, where vLLM's memory has them as they are.

vLLM puts some matrices of a checkpoint one above the other (those of queries, keys and values; of gate and input), and
rounds the rows of the embedding up. So each parameter of the model is a range of rows of one of vLLM's. Where type and
device are the same as well, the parameter can be these rows: its own memory is given back, an optimizer's step writes
what vLLM reads, and nothing is sent.

Names say where a parameter is to be. Whether it is there, vLLM decides: it loads the parameter with its sign turned,
and as it is, and either must be read there, to the last bit. So vLLM has what it would have been sent.
"""

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch

from ..trl_seam.vllm import ColocatedVLLM


logger = logging.getLogger(__name__)

_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


class Apart(Exception):
    """Why weights cannot be shared, in words."""


def views(
    own: Mapping[str, torch.Tensor], theirs: Mapping[str, torch.Tensor], stacked: Mapping[str, Sequence[str]]
) -> dict[str, torch.Tensor]:
    """
    The part of vLLM's memory for each parameter: a tensor of its shape and type on its device, with a storage of its
    own (one for several would be taken for tied weights when a model is saved).

    Raises [`Apart`] unless each has one, and nothing of vLLM's is left over but rows at the end of a matrix.

    Args:
        own, theirs (`dict[str, torch.Tensor]`): parameters of the trainer's model and of vLLM's, by name.
        stacked (`dict[str, list[str]]`): vLLM's names of modules, and the modules whose matrices lie there, in order.
    """
    found, left = {}, set(theirs)
    for name, p in own.items():
        whole, start, end = _rows(name, own, theirs, stacked)
        matrix = theirs[whole]
        if not (p.ndim and matrix.ndim):
            raise Apart(f"{name} is a single number")
        for what, mine, others in (
            ("type", p.dtype, matrix.dtype),
            ("device", p.device, matrix.device),
            ("shape", tuple(p.shape), (end - start, *matrix.shape[1:])),
        ):
            if mine != others:
                raise Apart(f"the {what} of {name} is {mine}, and {others} in vLLM")
        if not (p.is_contiguous() and matrix.is_contiguous()) or matrix.is_inference():
            raise Apart(f"{name} lies in another order in memory")
        left.discard(whole)
        found[name] = torch.from_dlpack(matrix.detach()[start:end])
    if left:
        raise Apart(f"the model has no {min(left)}, which vLLM has")
    return found


def _rows(
    name: str,
    own: Mapping[str, torch.Tensor],
    theirs: Mapping[str, torch.Tensor],
    stacked: Mapping[str, Sequence[str]],
) -> tuple[str, int, int]:
    """Which of vLLM's parameters holds one of the model's, and from which row to which."""
    if name in theirs:
        return name, 0, min(own[name].shape[:1] + theirs[name].shape[:1], default=0)
    path, _, leaf = name.rpartition(".")
    parent, _, module = path.rpartition(".")
    for whole, parts in stacked.items():
        of_parts = [f"{parent}.{part}.{leaf}" for part in parts]
        place = f"{parent}.{whole}.{leaf}"
        if module not in parts or place not in theirs or any(part not in own for part in of_parts):
            continue
        sizes = [len(own[part]) for part in of_parts]
        if sum(sizes) != len(theirs[place]):
            raise Apart(f"{place} has {len(theirs[place])} rows in vLLM, and {' + '.join(map(str, sizes))} here")
        start = sum(sizes[: of_parts.index(name)])
        return place, start, start + len(own[name])
    raise Apart(f"vLLM has no {name}")


@torch.no_grad()
def verify(
    own: Mapping[str, torch.Tensor],
    views: Mapping[str, torch.Tensor],
    load: Callable[[str, torch.Tensor], None],
) -> None:
    """
    Raise [`Apart`] unless what vLLM loads of each parameter is what its view reads; vLLM has the model's weights then.

    Args:
        own, views (`dict[str, torch.Tensor]`): parameters, and the parts of vLLM's memory for them.
        load (`Callable`): lets vLLM load a parameter of this name.
    """
    for name, p in own.items():
        for values in (-p.detach(), p.detach()):  # every bit pattern changes, that of 0 as well
            load(name, values)
            if not _are_equal(views[name], values):
                raise Apart(f"vLLM loads {name} in an order of its own")
    for name, p in own.items():  # none has been written over
        if not _are_equal(views[name], p.detach()):
            raise Apart(f"vLLM loads another parameter where {name} is")


def _are_equal(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether all bits are the same."""
    integers = _INTEGERS[one.element_size()]
    return torch.equal(one.view(integers), other.view(integers))


class OneCopy:
    """
    The weights of a trainer's model as parts of vLLM's memory. Where they cannot be, [`Apart`] is raised, and the
    model is as it was.
    """

    def __init__(self, vllm: ColocatedVLLM):
        self._vllm = vllm
        own = vllm.own()
        parts = views(own, vllm.theirs(), vllm.stacked())
        verify(own, parts, vllm.load)
        for name, p in own.items():
            p.data = parts[name]  # the parameter stays the object that it was
        self._places = self._found()
        self._is_broken = False
        vllm.send_by(self._send)

    def _send(self, send: Callable[[], None]) -> None:
        """Stands in for TRL's sending: vLLM has the weights already, unless somebody has put them elsewhere."""
        moved = [name for name, place in self._found().items() if self._places.get(name) != place]
        if moved:
            if not self._is_broken:
                logger.warning(
                    f"{len(moved)} parameters have been given other memory than vLLM's ({moved[0]} among them): from "
                    "now on weights are copied to vLLM after each step, and those parameters are held twice. What "
                    "writes into parameters in place, as PyTorch's optimizers and load_state_dict do, leaves one copy."
                )
            self._is_broken = True
            send()
            return
        if torch.cuda.is_available():
            torch.cuda.synchronize()  # vLLM may read on another stream than the optimizer has written on
        self._vllm.weights_have_changed()

    def _found(self) -> dict[str, int]:
        return {name: p.data_ptr() for name, p in self._vllm.own().items()}


def share(trainer: Any, vllm: ColocatedVLLM) -> OneCopy | None:
    """Let a trainer's model and its vLLM have one copy of the weights; where that is not possible, say once why."""
    say = logger.log if trainer.accelerator.is_main_process else lambda *said: None
    try:
        for reason in _reasons(trainer):
            raise Apart(reason)
        shared = OneCopy(vllm)
    except Apart as reason:
        # Who trains in float32 has no reason to expect it
        level = logging.INFO if trainer.args.bf16_updates is None else logging.WARNING
        say(level, f"vLLM has a copy of the weights of its own, which they are sent to after each step: {reason}.")
        return None
    if torch.cuda.is_available():
        torch.cuda.empty_cache()  # what the model had before, for vLLM and whoever is not PyTorch
    say(logging.INFO, "The model's weights are vLLM's: there is one copy of them, and nothing is sent after a step.")
    return shared


def _reasons(trainer: Any) -> Iterator[str]:
    """What of the settings keeps weights apart, whatever their layout."""
    args = trainer.args
    if args.vllm_enable_sleep_mode:
        yield "vllm_enable_sleep_mode=True lets vLLM drop its weights while the trainer needs them"
    if args.vllm_tensor_parallel_size > 1:
        yield f"with vllm_tensor_parallel_size={args.vllm_tensor_parallel_size} it has a part of each matrix"
    if hasattr(trainer.model, "peft_config"):
        yield "adapters are merged into it"
    if trainer.is_fsdp_enabled or trainer.is_deepspeed_enabled:
        yield "FSDP and DeepSpeed keep weights in memory of their own"
