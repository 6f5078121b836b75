"""
Forward passes by CUDA graphs. A pass over few sequences keeps the host busy for longer than the GPU; one that was
recorded takes the host next to no time.

A graph reads its inputs, the model's parameters and its buffers where they lay when it was recorded, and makes the
choices that were made then. So there is one for each shape of the inputs, they are dropped when a tensor of the model
has moved or other adapters are in use, and what waits for the device, to choose by what it finds there, is not
recorded at all. A pass that is not replayed is made as usual, whatever the reason.

This file is long because nothing may go wrong in it: whatever a model does that a graph cannot follow (a tensor that
moves, an adapter that is switched, a wait for the device, memory that is short) must end in an ordinary pass, and
never in other numbers or in a broken stream.
"""

import logging
import warnings
from collections import Counter, OrderedDict
from collections.abc import Callable, Hashable, Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from peft.tuners.tuners_utils import BaseTunerLayer
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel
from torch.distributed.tensor import DTensor

from ..trl_seam.loans import borrowed


logger = logging.getLogger(__name__)


# Graphs that are there at a time, and that are recorded in all
MOST_AT_A_TIME = 8
MOST_RECORDED = 32
# Passes of a kind that are made as usual
SEEN_BEFORE = 2
# How often the model's tensors may move
MOST_MOVES = 3
# Bytes that no pass has needed so far, without which nothing is recorded, and those of them that graphs may keep for
# good: a pass that takes more keeps the GPU busy for longer than the host
ROOM = 2**32
MOST_KEPT = 2**31
# By how much a replayed output may differ, relative to the largest
TOLERANCE = 1e-3
# Elements that are compared at a time
COMPARED_AT_A_TIME = 2**24

Pass = Callable[..., torch.Tensor]


class Replayed:
    """
    Passes of a model without gradient, which are replayed from the third of their kind on: a step has two of a kind,
    and a recording takes as long as several.

    Args:
        model (`torch.nn.Module`): the model, all of whose parameters and buffers the passes may read.
    """

    def __init__(self, model: torch.nn.Module):
        self.model = model
        self._given_up = False
        self._moves = self._recorded = 0
        self._drop()

    def _drop(self) -> None:
        """Free what graphs hold."""
        self._recordings: OrderedDict[Hashable, Any] = OrderedDict()  # that was used last comes last
        self._seen: Counter[Hashable] = Counter()
        self._state: State | None = None
        self._can_be_recorded: bool | None = None
        self._pool: Any = None
        self._output: torch.Tensor | None = None  # where all of them write what they return

    def __getstate__(self) -> dict[str, Any]:
        copy = Replayed(self.model)  # a graph cannot be copied
        return {**copy.__dict__, "_given_up": self._given_up}

    @property
    def is_usable(self) -> bool:
        """Whether passes of the model are replayed, as far as is known."""
        if self._can_be_recorded is None:
            self._can_be_recorded = self._is_recordable()
        return self._can_be_recorded and not self._given_up

    @property
    def has_recorded(self) -> bool:
        """Whether there is a pass that is replayed."""
        return bool(self._recordings)

    def versions(self) -> list[int] | None:
        """How often PyTorch has seen each of the model's tensors change; `None` where no pass has looked at them."""
        return None if self._state is None else [x._version for x in self._state.tensors]

    def __call__(
        self, function: Pass, inputs: tuple[torch.Tensor, ...], setting: Hashable = None, again: bool = False
    ) -> torch.Tensor:
        """
        `function(*inputs)`. Where it is replayed, the next call writes over what it returns: see [`own`].

        Args:
            function (`Callable`): a pass, of nothing but the inputs, the setting, and the model as it is.
            inputs (`tuple[torch.Tensor, ...]`): on the model's device.
            setting (`Hashable`): on what else the pass depends.
            again (`bool`): whether nothing but an optimizer has touched the model since the last pass.
        """
        if not self.is_usable or not self._has_stayed(again):
            return function(*inputs)
        key = (setting, *((x.shape, x.dtype, x.device) for x in inputs))
        if key not in self._recordings and not (self._may_record(key) and self._record(key, function, inputs)):
            with as_recorded():  # the pass that it is compared with may be
                return function(*inputs)
        self._recordings.move_to_end(key)
        return self._recordings[key].replay(inputs)

    def own(self, output: torch.Tensor) -> torch.Tensor:
        """A pass's output, or a copy where another pass would write over it."""
        shared = self._output is not None and output.data_ptr() == self._output.data_ptr()
        return output.clone() if shared else output

    def _has_stayed(self, again: bool) -> bool:
        """Whether passes can still be replayed; graphs that cannot be are dropped."""
        state = self._state.anew() if again and self._state is not None else State.of(self.model)
        if self._state is not None and not state.is_that(self._state):
            self._moves += 1
            self._drop()
            if self._moves >= MOST_MOVES:
                self._give_up("the model's tensors do not stay where they are")
        self._state = state
        return self.is_usable

    def _may_record(self, key: Hashable) -> bool:
        self._seen[key] += 1
        return self._seen[key] > SEEN_BEFORE and self._recorded < MOST_RECORDED and self._has_room()

    def _record(self, key: Hashable, function: Pass, inputs: tuple[torch.Tensor, ...]) -> bool:
        self._recorded += 1
        try:
            problem = self._recording_problem(key, function, tuple(x.clone() for x in inputs))
        except Exception as error:  # whatever a model does that cannot be recorded
            self._give_up(str(error))
        else:
            if problem is None:
                return True
            self._give_up(problem, logging.WARNING)
        self._free()
        return False

    def _recording_problem(self, key: Hashable, function: Pass, inputs: tuple[torch.Tensor, ...]) -> str | None:
        """Record a pass; returns what is wrong with it, if anything is."""
        expected = self._tried(function, inputs)
        if self._output is None or self._output.numel() < expected.numel() or self._output.dtype != expected.dtype:
            self._recordings.clear()
            self._output = expected.new_empty(expected.numel())
        while len(self._recordings) >= MOST_AT_A_TIME:
            self._recordings.popitem(last=False)
        if not self._recordings:
            self._pool = self._new_pool()
        output = self._output[: expected.numel()].view(expected.shape)
        recording = self._new_recording(function, inputs, output)
        if self._state is None or not State.of(self.model).is_that(self._state):
            raise RuntimeError("a pass changes the model's buffers")
        if self._kept() > MOST_KEPT:
            raise RuntimeError("a pass takes more memory than is kept for it")
        if not are_close(recording.replay(inputs), expected):
            return "a pass that is replayed differs from one that is not"
        self._recordings[key] = recording
        return None

    def _give_up(self, problem: str, level: int = logging.INFO) -> None:
        self._drop()
        self._given_up = True
        logger.log(level, f"The passes that measure a step are not replayed, which takes longer: {problem}.")

    # What there is on a GPU alone

    def _is_recordable(self) -> bool:
        return is_recordable(self.model)

    def _has_room(self) -> bool:
        free, _ = torch.cuda.mem_get_info()
        return free + torch.cuda.memory_reserved() - torch.cuda.max_memory_reserved() >= ROOM

    def _tried(self, function: Pass, inputs: tuple[torch.Tensor, ...]) -> torch.Tensor:
        with refused_to_wait():
            return function(*inputs)

    def _new_pool(self) -> Any:
        return torch.cuda.graph_pool_handle(), torch.cuda.Stream()

    def _new_recording(self, function: Pass, inputs: tuple[torch.Tensor, ...], output: torch.Tensor) -> Any:
        return Recording(function, inputs, output, *self._pool)

    def _kept(self) -> int:
        pool, _ = self._pool
        segments = torch.cuda.memory_snapshot()
        return sum(segment["total_size"] for segment in segments if segment.get("segment_pool_id") == pool)

    def _free(self) -> None:
        torch.cuda.empty_cache()


class State(NamedTuple):
    """
    What of a model a graph takes for granted: its parameters and buffers, where they lie, and their types, and which
    adapters are in use, layer by layer, and what LoRA's are multiplied by.
    """

    tensors: list[torch.Tensor]
    places: list[tuple[int, torch.dtype]]
    adapters: list[Any]

    @classmethod
    def of(cls, model: torch.nn.Module) -> "State":
        tensors, adapters = [], []
        module: Any
        kind: Any
        for module in each_module(model):
            for own in (module._parameters, module._buffers):
                if own:
                    tensors += [x for x in own.values() if x is not None]
            kind = type(module)
            if _is_tuner(kind):
                in_use = (*module.active_adapters, module.disable_adapters, module.merged)
                scaling: Any = getattr(module, "scaling", None)
                factors = scaling.items() if isinstance(scaling, dict) else ()
                adapters.append((in_use, [each for each in factors if isinstance(each[1], (int, float))]))
        return cls(tensors, [], adapters).anew()

    def anew(self) -> "State":
        """Of the same tensors."""
        return self._replace(places=[(x.data_ptr(), x.dtype) for x in self.tensors])

    def is_that(self, other: "State") -> bool:
        return self.places == other.places and self.adapters == other.adapters


def each_module(model: torch.nn.Module) -> Iterator[torch.nn.Module]:
    """The modules of a model, in less time than `model.modules()` takes: with adapters it has thousands of them."""
    waiting: list[torch.nn.Module | None] = [model]
    seen = set()
    while waiting:
        module = waiting.pop()
        if module is not None and module not in seen:
            seen.add(module)
            yield module
            if module._modules:
                waiting += module._modules.values()


@lru_cache
def _is_tuner(kind: Any) -> bool:
    return issubclass(kind, BaseTunerLayer)


class Recording:
    """
    A pass as a CUDA graph, which reads `inputs` and writes `output`, for good. What it has in between is in `pool`, as
    that of other graphs is, whose `stream` is the same.
    """

    def __init__(
        self,
        function: Pass,
        inputs: tuple[torch.Tensor, ...],
        output: torch.Tensor,
        pool: Any,
        stream: torch.cuda.Stream,
    ):
        self._inputs, self._output = inputs, output
        self._graph = torch.cuda.CUDAGraph()
        before = torch.cuda.current_stream()
        torch.cuda.synchronize()
        try:
            # Without `torch.cuda.graph`, which first gives back all memory that is free: the next training step would
            # have to ask for it again
            with torch.cuda.stream(stream):
                self._graph.capture_begin(pool, capture_error_mode="thread_local")
                try:
                    output.copy_(function(*inputs))
                finally:
                    self._graph.capture_end()
        except BaseException:
            # Where a graph cannot be ended, PyTorch goes on with its stream and its pool, and some versions refuse
            # random numbers up to the end of the next
            torch.cuda.set_stream(before)
            with suppress(Exception):
                torch._C._cuda_endAllocateToPool(stream.device_index, pool)
                torch._C._cuda_releasePool(stream.device_index, pool)
            with suppress(Exception), torch.cuda.graph(torch.cuda.CUDAGraph(), stream=torch.cuda.Stream()):
                output.zero_()
            torch.cuda.set_stream(before)
            raise

    def replay(self, inputs: tuple[torch.Tensor, ...]) -> torch.Tensor:
        for own, given in zip(self._inputs, inputs, strict=True):
            own.copy_(given)
        self._graph.replay()
        return self._output


def as_recorded() -> AbstractContextManager[None]:
    """Context in which transformers makes a pass by the kernels of a recording, where it does not look at masks."""
    return borrowed(torch.cuda, is_current_stream_capturing=lambda: True)


@contextmanager
def refused_to_wait() -> Iterator[None]:
    """
    Context in which what waits for the GPU is an error: a recording that fails on its way is much harder to recover
    from.
    """
    mode = torch.cuda.get_sync_debug_mode()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # PyTorch's, that this may not find all
        torch.cuda.set_sync_debug_mode("error")
    try:
        with as_recorded():
            yield
    finally:
        torch.cuda.set_sync_debug_mode(mode)


def is_recordable(model: torch.nn.Module) -> bool:
    """Whether the model is one that may be recorded: whole, and on one NVIDIA GPU."""
    parameters, modules = list(model.parameters()), list(model.modules())
    if {p.device.type for p in parameters} != {"cuda"} or torch.version.hip is not None:
        return False
    if {p.device.index for p in parameters} != {torch.cuda.current_device()}:
        return False
    if getattr(model, "is_quantized", False) or any(isinstance(p, DTensor) or hasattr(p, "ds_id") for p in parameters):
        return False
    if any(isinstance(m, (FSDPModule, FullyShardedDataParallel)) or hasattr(m, "_hf_hook") for m in modules):
        return False
    configs = getattr(model, "peft_config", None)
    configs = configs.values() if isinstance(configs, dict) else ()
    return not any(getattr(config, "is_prompt_learning", False) for config in configs)


def are_close(found: torch.Tensor, expected: torch.Tensor) -> bool:
    """Whether two outputs differ by no more than kernels do."""
    parts = (x.flatten().split(COMPARED_AT_A_TIME) for x in (found, expected))
    for one, other in zip(*parts, strict=True):
        largest = other.abs().nan_to_num(nan=0.0, posinf=0.0).max().item()
        if not torch.allclose(one, other, rtol=TOLERANCE, atol=TOLERANCE * largest, equal_nan=True):
            return False
    return True
