"""
Launching: which tensors the kernels can take, and how a kernel is started without Triton's inspection of arguments.

`TRITON_INTERPRET=1` runs the kernels on the CPU; `ISOPO_DISABLE_TRITON=1` turns them off.
"""

import inspect
import math
import os
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import lru_cache
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
from transformers.utils import is_triton_available

from ..geometry.statistics import accumulation_dtype


if is_triton_available():
    import triton
    import triton.language as tl
else:  # where kernels are nothing but functions with signatures
    tl = SimpleNamespace(constexpr=None)

ENABLED = is_triton_available() and os.environ.get("ISOPO_DISABLE_TRITON", "0") != "1"
INTERPRET = os.environ.get("TRITON_INTERPRET", "0") == "1"

_COMPILED = (torch.bfloat16, torch.float16, torch.float32)
# Triton's interpreter has no products of bf16
_INTERPRETED = (torch.float16, torch.float32, torch.float64) if INTERPRET else ()


def takes(x: torch.Tensor) -> bool:
    """Whether the kernels can read `x`: on NVIDIA GPUs from Ampere on."""
    if not ENABLED or x.numel() == 0:
        return False
    return x.dtype in _COMPILED and _is_new_enough(x.device) if x.is_cuda else x.dtype in _INTERPRETED


def is_here(x: torch.Tensor) -> bool:
    """Whether `x` is on the device that kernels run on; a model may be spread over several."""
    return not x.is_cuda or x.get_device() == torch.cuda.current_device()


@lru_cache
def _is_new_enough(device: torch.device) -> bool:
    return torch.version.hip is None and torch.cuda.get_device_capability(device) >= (8, 0)


def shared_memory(device: torch.device) -> int:
    """Bytes of shared memory that a program may have; 0 where there is none."""
    if device.type != "cuda":
        return 0
    return getattr(torch.cuda.get_device_properties(device), "shared_memory_per_block_optin", 2**16)


def processors(device: torch.device) -> float:
    """How many programs run side by side, at least; more than there can be, where one runs after the other."""
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else math.inf


def has_warp_groups(device: torch.device) -> bool:
    """Whether four warps multiply large matrices together: on data-centre GPUs from Hopper on."""
    return device.type == "cuda" and torch.cuda.get_device_properties(device).major in (9, 10)


def power_of_two(x: int) -> int:
    """The power of two that a tile of at least `x` needs."""
    return 1 << max(x - 1, 0).bit_length()


def part_of(tile: int, width: int, length: int) -> int:
    """How much of `length` to take at once, so that a tile with `width` does not outgrow `tile`."""
    return max(1, min(power_of_two(length), tile // width))


def types_of(dtype: torch.dtype) -> tuple[Any, str]:
    """Accumulation type and precision of products."""
    if dtype == torch.float64:
        return tl.float64, "ieee"
    return tl.float32, "ieee" if dtype == torch.float32 else "tf32"


def scratch(like: torch.Tensor, *shape: int) -> torch.Tensor:
    """Memory that is not initialised, in the type in which sums over `like` are made."""
    return torch.empty(shape, device=like.device, dtype=accumulation_dtype(like.dtype))


class Scratch:
    """Memory for what is over when a layer's backward is: on the device, layers follow one another."""

    def __init__(self):
        self._scratch: dict[tuple, torch.Tensor] = {}
        # What launches of one kind take beside their layer's own tensors, by shapes
        self.prepared: dict[tuple, Any] = {}

    def scratch(self, like: torch.Tensor, use: str, *shape: int) -> torch.Tensor:
        """
        Memory for one `use`, which has it until another layer asks for the same. Not initialised, in the type in which
        sums over `like` are made.
        """
        key = (use, shape, like.dtype, like.device)
        found = self._scratch.get(key)
        if found is None:
            found = self._scratch[key] = scratch(like, *shape)
        return found


def jit(**options: Any) -> Any:
    """
    `triton.jit`, or nothing where there is no Triton. What has a name in capitals is known when a kernel is compiled:
    in kernels by their signatures, in the functions that they call by what these are given.
    """
    return triton.jit(**options) if is_triton_available() else lambda function: function


def constant(value: float) -> Any:
    """A number that kernels may refer to by its name."""
    # The interpreter, which runs kernels as Python, has plain numbers only
    return tl.constexpr(value) if is_triton_available() and not INTERPRET else value


class Direct(NamedTuple):
    """A compiled kernel's own launcher, past what Triton asks and prepares at each launch."""

    run: Callable  # `run(*grid, stream, *behind, *arguments)`
    stream_of: Callable[[int], int]  # the stream of a device that work goes to now
    device: int  # that the kernel was compiled on
    behind: tuple  # function and metadata, and nothing for hooks

    @classmethod
    def of(cls, compiled: Any) -> "Direct | None":
        """The launcher of what Triton has compiled; `None` where it takes other arguments than are known."""
        try:
            run, active = compiled.run, triton.runtime.driver.active
            behind = (compiled.function, compiled.packed_metadata, None, None, None)
            if tuple(inspect.signature(run).parameters) not in _LAUNCHERS:
                return None
            hooks_are_set()
            kind: Any = type(run)
            if _only_makes_memory(kind) and not (run.global_scratch_size or run.profile_scratch_size):
                # What it calls in the end, with no memory
                function, *others = behind
                behind = (function, run.launch_cooperative_grid, run.launch_pdl, None, None, *others)
                run = run.launch
            return cls(run, active.get_current_stream, active.get_current_device(), behind)
        except (AttributeError, TypeError, ValueError):
            return None


# What launchers take. The first is that of Triton 3.6, where `args` begins with what the second names
_LAUNCHERS = (
    ("gridX", "gridY", "gridZ", "stream", "function", "args"),
    (
        *("gridX", "gridY", "gridZ", "stream", "function"),
        *("kernel_metadata", "launch_metadata", "launch_enter_hook", "launch_exit_hook", "args"),
    ),
)


@lru_cache
def _only_makes_memory(kind: Any) -> bool:
    """Whether launchers of a `kind` make memory for a kernel that asks for it and go on in C, as in Triton 3.6."""
    try:
        source = " ".join(inspect.getsource(kind.__call__).split())
    except (OSError, TypeError, AttributeError):
        return False
    settings = "self.launch_cooperative_grid, self.launch_pdl, global_scratch, profile_scratch"
    return f"self.launch(gridX, gridY, gridZ, stream, function, {settings}, *args)" in source


def hooks_are_set() -> bool:
    """Whether somebody, such as Triton's profiler, wants to be told of launches."""
    runtime = triton.knobs.runtime
    return bool(runtime.launch_enter_hook.calls or runtime.launch_exit_hook.calls)


@dataclass
class Plan:
    """All that a launch takes beside its tensors and numbers, worked out once for each shape."""

    grid: tuple[int, int, int]  # number of programs
    constants: tuple  # what the kernel is compiled for
    options: dict[str, int] = field(default_factory=lambda: {"num_warps": 4})
    run: Any = None  # launches the compiled kernel; there once it has been launched the usual way
    direct: Direct | None = None  # does the same in less time, but calls no hooks


class Fixed:
    """Tensors that many launches take, behind their own."""

    def __init__(self, tensors: tuple[torch.Tensor, ...] = ()):
        self.tensors = tensors
        self.pointers = [x.data_ptr() for x in tensors]
        self.aligned = all(pointer & 15 == 0 for pointer in self.pointers)


NOTHING = Fixed()


def launch(kernel: Any, plan: Plan, tensors: tuple, numbers: tuple, fixed: Fixed = NOTHING) -> None:
    """
    Launch `kernel(*tensors, *fixed.tensors, *numbers, *plan.constants)`. A tensor that the plan's kernel does not look
    at may be `None`; the kernel is compiled without it then.

    From the second time on without Triton's inspection of every argument, which takes most of a launch's time, and
    with addresses in place of tensors, about which Triton would ask the driver one by one. That is sound since numbers
    are declared not to be specialised on, a plan is made for one combination of types, and the pointers are aligned.
    """
    pointers = [None if x is None else x.data_ptr() for x in tensors]
    bits = 0
    for pointer in pointers:
        bits |= pointer or 0
    aligned = fixed.aligned and not bits & 15
    if aligned and plan.run is not None:
        direct = plan.direct
        if direct is None or hooks_are_set():
            plan.run(*pointers, *fixed.pointers, *numbers, *plan.constants)
            return
        run, stream_of, device, behind = direct
        run(*plan.grid, stream_of(device), *behind, *pointers, *fixed.pointers, *numbers, *plan.constants)
        return
    compiled = kernel[plan.grid](*tensors, *fixed.tensors, *numbers, *plan.constants, **plan.options)
    if aligned and hasattr(compiled, "__getitem__"):  # not so when interpreted
        plan.direct = Direct.of(compiled)
        plan.run = compiled[plan.grid]
