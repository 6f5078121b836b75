"""
Each Triton kernel of the package alone, beside what the hardware allows; and the cost model beside the clock.

First part (GPUs only). A kernel's bound is the time that the bytes it must move take at the memory's bandwidth, or its
arithmetic at the peak rate, whichever is longer; `bound/us` is the fraction of it that is reached. Beside it are the
time of the same in plain PyTorch and the ratio to the product that makes the layer's weight gradient. Kernels and that
product are timed as replays of a CUDA graph, plain PyTorch from a queue of launches that is filled before it starts,
so that no figure contains the CPU's time; a launch that does nothing, which is printed first, is contained in each.
Operands rotate over copies that do not fit in the cache together, unless they are too small for that: then they are
read from the cache, as they are in training, where they have just been written, and `bound/us` has no meaning.

Second part. Each strategy of `isopo_trl.geometry.cost` in plain PyTorch: what statistics and weight gradient take
together beyond the plain weight gradient, in units of that, beside what the cost model says; and the time with the
strategy that it chooses over the time with the fastest one.

With `--interacting` neither of them, but what that rule costs: the gradients of the sequences, the kernel between
sequences by ways to cut it into programs, each held against float64, and the part of its last program, which adds up
what the others have and solves. The fastest way is named for each number of sequences.

    python benchmarks/speed/kernel_time.py --output kernels.json   # both parts on a GPU; on a CPU the second alone
    python benchmarks/speed/kernel_time.py --quick                 # a third of the shapes
    python benchmarks/speed/kernel_time.py --interacting           # under a minute
"""

from __future__ import annotations

import argparse
import functools
import json
import math
import statistics
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, replace
from typing import Any, NamedTuple

import torch
from setting import DEVICE, environment

from isopo_trl.geometry import cost
from isopo_trl.geometry.sequences import Sequences, draw_samples
from isopo_trl.geometry.statistics import (
    Statistics,
    VStatistics,
    elementwise_statistics,
    linear_statistics,
    sequence_gradients,
)
from isopo_trl.kernels import elementwise, linear, rms_norm, v
from isopo_trl.kernels.coefficients import Entry, KernelLedger
from isopo_trl.kernels.launch import INTERPRET, shared_memory
from isopo_trl.layers.linear import linear_strategy
from isopo_trl.rules import Rule, make_rule
from isopo_trl.rules.running import RunningStatistics


FLAVOUR = rms_norm.Flavour(eps=1e-6, offset=0.0, early=True)  # Qwen3's RMSNorm

# m, T, p, d: sequences, their length, outputs and inputs of a linear layer. Every third is the quick selection
LINEAR = (
    (8, 1024, 2048, 1024),  # Qwen3-0.6B: q
    (8, 1024, 1024, 1024),  # k, v
    (8, 1024, 1024, 2048),  # o
    (8, 1024, 3072, 1024),  # gate, up
    (8, 1024, 1024, 3072),  # down
    (16, 512, 2048, 1024),
    (4, 2048, 12288, 4096),  # Qwen3-8B: gate, up
    (4, 2048, 4096, 4096),  # q, o
    (4, 2048, 1024, 4096),  # k, v
    (8, 1024, 16, 1024),  # LoRA's A
    (8, 1024, 2048, 16),  # LoRA's B
    (4, 2048, 4096, 12288),  # Qwen3-8B: down
    (16, 512, 3072, 1024),
    (32, 448, 896, 896),  # Qwen2.5-0.5B, microbatches of the learning benchmark: q, o
    (32, 448, 896, 4864),  # down
    (32, 448, 4864, 896),  # gate, up
)
# m, T, heads, d
# The same for `--interacting`; and on a CPU, under Triton's interpreter
INTERACTING = ((32, 64, 8, 16), (448, 1024), ((896, 896), (896, 4864), (4864, 896), (1024, 3072)))
SMALL_INTERACTING = ((3, 17), (5,), ((20, 33),))
NORMS = ((8, 1024, 1, 1024), (8, 1024, 16, 128), (4, 2048, 1, 4096))
SMALL = ((4, 256, 768, 256), (8, 128, 512, 512), (4, 256, 256, 768), (4, 256, 8, 512), (4, 256, 512, 8))
SAMPLES = 64
SMALL_SAMPLES = 16

# Of one replay, and how many replays
LAUNCHES = 20
REPEATS = 7
CYCLES_PER_SECOND = 2e9
# Largest time that plain PyTorch is given for the launches of one repeat
MOST_SECONDS = 5e-3


class Peaks(NamedTuple):
    """Bytes and operations per second."""

    bandwidth: float
    bfloat16: float
    tf32: float
    float32: float


# By the data sheets, dense
PEAKS = {
    "NVIDIA H200": Peaks(4.8e12, 989e12, 494e12, 67e12),
    "NVIDIA H100 80GB HBM3": Peaks(3.35e12, 989e12, 494e12, 67e12),
    "NVIDIA A100-SXM4-80GB": Peaks(2.0e12, 312e12, 156e12, 19.5e12),
    "NVIDIA A100 80GB PCIe": Peaks(1.94e12, 312e12, 156e12, 19.5e12),
}


# Timing


def captured(call: Callable, inputs: list[tuple]) -> float:
    """Microseconds of one call, from replays of a CUDA graph of many, over each of `inputs` in turn."""
    arguments = [inputs[launch % len(inputs)] for launch in range(LAUNCHES)]
    for given in inputs[:2]:  # compiles
        call(*given)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        # All are kept until the end: memory that is used again would be written to in the cache
        outputs = [call(*given) for given in arguments]
    graph.replay()
    events = [[torch.cuda.Event(enable_timing=True) for _ in range(2)] for _ in range(REPEATS)]
    torch.cuda._sleep(int(1e-3 * CYCLES_PER_SECOND))
    for start, end in events:
        start.record()
        graph.replay()
        end.record()
    torch.cuda.synchronize()
    del outputs
    return 1e3 * statistics.median(start.elapsed_time(end) for start, end in events) / LAUNCHES


def queued(call: Callable, inputs: list[tuple]) -> float:
    """Microseconds of one call, from launches that wait behind a pause until all of them are in the queue."""
    for given in inputs[:2]:
        call(*given)
    torch.cuda.synchronize()
    begin = time.perf_counter()
    call(*inputs[0])
    issue = time.perf_counter() - begin
    torch.cuda.synchronize()
    number = max(2, min(LAUNCHES // 2, int(MOST_SECONDS / (time.perf_counter() - begin))))
    pause = 2 * number * issue + 1e-3
    times: list[float] = []
    while len(times) < REPEATS:
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda._sleep(int(pause * CYCLES_PER_SECOND))
        start.record()
        for launch in range(number):
            call(*inputs[launch % len(inputs)])
        late = start.query()
        end.record()
        end.synchronize()
        if late and number > 1:  # a longer pause, and fewer calls, as the queue may be full
            number, pause, times = number // 2, 2 * pause, []
        else:
            times.append(start.elapsed_time(end) / number)
    return 1e3 * statistics.median(times)


def on_cpu(call: Callable, inputs: list[tuple]) -> float:
    """Microseconds of one call."""

    def seconds(number: int) -> float:
        begin = time.perf_counter()
        for _ in range(number):
            call(*inputs[0])
        return (time.perf_counter() - begin) / number

    seconds(1)
    number = max(1, int(2e-2 / seconds(2)))
    return 1e6 * statistics.median(seconds(number) for _ in range(REPEATS))


def tensor_bytes(values: Any) -> int:
    values = values if isinstance(values, tuple) else (values,)
    return sum(x.numel() * x.element_size() for x in values if isinstance(x, torch.Tensor))


def copies(make: Callable[[], tuple]) -> list[tuple]:
    """As many different results of `make` as do not fit in a GPU's cache, one for each launch at most."""
    first = make()
    number = 1
    if DEVICE == "cuda":
        cache = torch.cuda.get_device_properties(DEVICE).L2_cache_size
        number = max(2, min(LAUNCHES, math.ceil(3 * cache / tensor_bytes(first))))
    return [first, *(make() for _ in range(number - 1))]


def hardware() -> tuple[Peaks, str]:
    """The peaks of this GPU and where they are from."""
    x, y = (torch.randn(2**28, device=DEVICE) for _ in range(2))
    bandwidth = 2e6 * tensor_bytes(x) / queued(x.copy_, [(y,)])
    if torch.cuda.get_device_name() in PEAKS:
        return PEAKS[torch.cuda.get_device_name()], f"data sheet; a copy reaches {bandwidth / 1e12:.2f} TB/s"
    rates = []
    for dtype, precision in ((torch.bfloat16, "high"), (torch.float32, "high"), (torch.float32, "highest")):
        torch.set_float32_matmul_precision(precision)
        square = x[: 2**26].view(2**13, 2**13).to(dtype)
        rates.append(2e6 * 2**39 / queued(torch.mm, [(square, square)]))
    return Peaks(bandwidth, *rates), "measured, a large copy and large products, as this GPU is not in the table"


# What is timed


class Batch:
    """`m` sequences of `T` positions, some of which are sampled."""

    def __init__(self, m: int, T: int, samples: int):
        self.sequences = Sequences.regular(m, T)
        self.samples = draw_samples(torch.ones(m * T, device=DEVICE), samples, seed=0)
        self.c = torch.rand(m, device=DEVICE, dtype=torch.float64) + 0.5

    def ledger(self, rule: Rule) -> KernelLedger:
        """A ledger of one layer, in which there are coefficients already."""
        ledger = RunningStatistics(1, 0.9, rule, torch.device(DEVICE)).open(self.c)
        ledger.table[0, 0] = self.c
        return KernelLedger(ledger)

    def coefficients(self, values: Statistics, rule: Rule) -> torch.Tensor:
        return rule.coefficients(values, self.c, None).c

    def scaled(self, x: torch.Tensor) -> torch.Tensor:
        return self.sequences.scaled(x, self.c.to(x.dtype))

    def combined(self, V: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        return torch.einsum("m,m...->...", self.c.to(V.dtype), V).to(dtype)


def random(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.randn(shape, device=DEVICE, dtype=dtype)


def weight_gradient(g: torch.Tensor, a: torch.Tensor) -> torch.Tensor:
    return g.t() @ a


@dataclass
class Kernel:
    """
    Args:
        name, shape (`str`): what the table calls it.
        call (`Callable`): one launch.
        inputs (`list[tuple]`): its arguments, several times over.
        operations (`float`) and rate (`str`): floating point operations, and the field of [`Peaks`] for them.
        plain (`Callable`, *optional*): the same in plain PyTorch.
        plain_inputs (`list[tuple]`, *optional*): its arguments, where they are different.
    """

    name: str
    shape: str
    call: Callable
    inputs: list[tuple]
    operations: float
    rate: str = "float32"
    plain: Callable | None = None
    plain_inputs: list[tuple] | None = None

    def figures(self, peaks: Peaks) -> dict[str, Any]:
        moved = tensor_bytes(self.inputs[0]) + tensor_bytes(self.call(*self.inputs[0]))
        bound = 1e6 * max(moved / peaks.bandwidth, self.operations / getattr(peaks, self.rate))
        us = captured(self.call, self.inputs)
        plain = queued(self.plain, self.plain_inputs or self.inputs) if self.plain else None
        return {
            "kernel": self.name,
            "shape": self.shape,
            "us": us,
            "bound_us": bound,
            "reached": bound / us,
            "plain_us": plain,
            "bytes": moved,
            "operations": self.operations,
        }


def linear_kernels(m: int, T: int, p: int, d: int) -> Iterator[Kernel]:
    """The weight gradient, then the kernels of a linear layer."""
    shape, size = f"{m} x {T}, {d} -> {p}", m * T * p * d
    batch = Batch(m, T, SAMPLES)
    both = copies(lambda: (random(m * T, p), random(m * T, d)))
    yield Kernel("weight gradient", shape, weight_gradient, both, 2 * size, "bfloat16")
    yield overlap_kernel(shape, batch, both)
    del both
    narrow = copies(lambda: (random(m * T, min(p, d)),))
    fisher = batch.ledger(make_rule("fisher", regularization=0))
    yield Kernel(
        "scaled",
        shape,
        lambda x: linear.scaled(x, batch.sequences, Entry(fisher, 0)),
        narrow,
        narrow[0][0].numel(),
        plain=batch.scaled,
    )
    del narrow
    yield from gradient_kernels(shape, batch, p, d)


def overlap_kernel(shape: str, batch: Batch, both: list[tuple]) -> Kernel:
    rule, sequences, samples = make_rule("fisher", regularization=0), batch.sequences, batch.samples
    ledger = batch.ledger(rule)
    g, a = both[0]

    def plain(g: torch.Tensor, a: torch.Tensor) -> torch.Tensor:
        values, _ = linear_statistics(g, a, False, sequences, samples, rule.needs, "ghost")
        return batch.coefficients(values, rule)

    return Kernel(
        "overlaps",
        shape,
        lambda g, a: linear.overlaps(g, a, False, sequences, samples, Entry(ledger, 0), finish=True),
        both,
        2 * SAMPLES * (g.numel() + a.numel()),
        "bfloat16",
        plain,
    )


def gradient_kernels(shape: str, batch: Batch, p: int, d: int) -> Iterator[Kernel]:
    """The kernels that read per-sequence gradients, as many outputs at once as the package forms."""
    m = batch.sequences.count
    rows = min(p, cost.block_rows(m, d))
    shape = shape if rows == p else f"{shape} ({rows})"
    V = copies(lambda: (random(m, rows, d, dtype=torch.float32),))
    size = m * rows * d
    fig4, interacting = make_rule("fig4", regularization=0), make_rule("interacting")
    ledgers = {rule: batch.ledger(rule) for rule in (fig4, interacting)}
    # The size of the layer that overlaps are from makes no difference here
    x = random(batch.sequences.rows, 16)
    layer = (x, x, False, batch.sequences, batch.samples)
    overlap = linear.overlaps(*layer, Entry(ledgers[fig4], 0))
    of_rows, _ = linear_statistics(*layer, cost.Needs(overlap=True), "ghost")

    def sums(rule: Rule, **given: Any) -> Callable:
        return lambda V: v.v_coefficients(V, Entry(ledgers[rule], 0), **given)

    def plain(rule: Rule, V: torch.Tensor) -> torch.Tensor:
        explicit = VStatistics(rule.needs._replace(overlap=False), None)
        explicit.add(V)
        values = replace(of_rows, norm=explicit.result.norm, ntk=explicit.result.ntk)
        return batch.coefficients(values, rule)

    norm = sums(fig4, overlaps=overlap)
    yield Kernel("v_coefficients, norm", shape, norm, V, 2 * size, plain=functools.partial(plain, fig4))
    arithmetic = (2 * m * size, "float32")
    yield Kernel(
        "v_coefficients, ntk", shape, sums(interacting), V, *arithmetic, functools.partial(plain, interacting)
    )
    if rows == p:
        ledger = batch.ledger(fig4)
        yield Kernel(
            "combined",
            shape,
            lambda V: v.combined(V, Entry(ledger, 0), torch.bfloat16),
            V,
            2 * size,
            plain=lambda V: batch.combined(V, torch.bfloat16),
        )


def norm_kernels(m: int, T: int, heads: int, d: int) -> Iterator[Kernel]:
    """The kernels of an RMSNorm of Qwen3, over features or over those of each head."""
    sizes = (m, T, d) if heads == 1 else (m, T, heads, d)
    shape, elements = str(list(sizes)), math.prod(sizes)
    batch, rule = Batch(m, T, SAMPLES), make_rule("fisher", regularization=0)
    sequences, samples, ledger = batch.sequences, batch.samples, batch.ledger(rule)
    weight = random(d).requires_grad_()

    def backward(x: torch.Tensor, g: torch.Tensor, scale: torch.Tensor) -> tuple:
        return rms_norm.backward(x, g, weight.detach(), scale, FLAVOUR, sequences, samples)

    def plain_backward(x: torch.Tensor, g: torch.Tensor, y: torch.Tensor) -> tuple:
        return torch.autograd.grad(y, (x, weight), g, retain_graph=True)

    inputs = copies(lambda: (random(*sizes),))
    yield Kernel(
        "rms_norm.forward",
        shape,
        lambda x: rms_norm.forward(x, weight.detach(), FLAVOUR),
        inputs,
        5 * elements,
        plain=lambda x: FLAVOUR(x, weight.detach()),
    )
    both = [(x, random(*sizes), rms_norm.forward(x, weight.detach(), FLAVOUR)[1]) for (x,) in inputs]
    leaves = [(x.detach().requires_grad_(), g) for x, g, _ in both]
    with_outputs = [(x, g, FLAVOUR(x, weight)) for x, g in leaves]
    yield Kernel("rms_norm.backward", shape, backward, both, 12 * elements, "float32", plain_backward, with_outputs)
    del leaves, with_outputs

    def from_sums(sums: torch.Tensor, of_samples: torch.Tensor) -> torch.Tensor:
        return elementwise.elementwise_gradient(of_samples, sequences, samples, Entry(ledger, 0), torch.bfloat16, sums)

    summed = [backward(*given)[1:] for given in both]
    yield Kernel("elementwise_gradient, summed", shape, from_sums, summed, summed[0][0].numel())
    del both, summed
    if heads == 1:
        yield Kernel(
            "elementwise_gradient",
            shape,
            lambda v: elementwise.elementwise_gradient(v, sequences, samples, Entry(ledger, 0), torch.bfloat16),
            [(x.view(m * T, d),) for (x,) in inputs],
            elements,
            plain=lambda v: plain_elementwise(v, batch, rule),
        )


def plain_elementwise(v: torch.Tensor, batch: Batch, rule: Rule) -> torch.Tensor:
    values, V = elementwise_statistics(v, batch.sequences, batch.samples, rule.needs)
    c = batch.coefficients(values, rule)
    return (c.to(V.dtype) @ V).to(v.dtype)


# First part


KERNELS_HEADER = (
    f"{'kernel':29} {'shape':29} {'us':>8} {'bound us':>8} {'bound/us':>8} {'plain us':>9} {'us/product':>10}"
)


def kernels_row(row: dict[str, Any]) -> str:
    plain = "-" if row["plain_us"] is None else f"{row['plain_us']:.1f}"
    ratio = "-" if row["of_product"] is None else f"{row['of_product']:.3f}"
    return (
        f"{row['kernel']:29} {row['shape']:29} {row['us']:8.1f} {row['bound_us']:8.1f} {row['reached']:8.2f} "
        f"{plain:>9} {ratio:>10}"
    )


def kernel_groups(quick: bool) -> list[Iterator[Kernel]]:
    step = 3 if quick else 1
    return [linear_kernels(*shape) for shape in LINEAR[::step]] + [norm_kernels(*shape) for shape in NORMS[::step]]


def compile_kernels(quick: bool) -> None:
    """Launch every kernel once, in threads: most of Triton's compiler runs without Python's lock."""

    def launch(group: Iterator[Kernel]) -> None:
        for kernel in group:
            if kernel.call is not weight_gradient:
                kernel.call(*kernel.inputs[0])

    rms_norm.forward(random(16, 16), random(16), FLAVOUR)  # so that Triton's driver is set up once
    with ThreadPoolExecutor() as pool:
        list(pool.map(launch, kernel_groups(quick)))


def time_kernels(quick: bool) -> dict[str, Any]:
    peaks, source = hardware()
    empty = captured(torch.neg, [(random(1),)])
    print(
        f"\n{peaks.bandwidth / 1e12:.2f} TB/s; {peaks.bfloat16 / 1e12:.0f}, {peaks.tf32 / 1e12:.0f} and "
        f"{peaks.float32 / 1e12:.0f} TFLOP/s in bf16, tf32 and float32 ({source}); an empty launch {empty:.1f} us\n"
    )
    print(KERNELS_HEADER)
    compile_kernels(quick)
    rows = []
    for group in kernel_groups(quick):
        product = None
        for kernel in group:
            row = kernel.figures(peaks)
            if kernel.call is weight_gradient:
                product = row["us"]
            row["of_product"] = row["us"] / product if product else None
            print(kernels_row(row), flush=True)
            rows.append(row)
    return {"peaks": peaks._asdict(), "source": source, "empty_us": empty, "rows": rows}


# Second part


@dataclass
class Comparison:
    """
    The strategies at one shape, in units of the product that makes the weight gradient.

    Args:
        shape, needs (`str`): the case.
        product_us (`float`): microseconds of the product.
        predicted, measured (`dict`): extra time of each strategy; those that take too much memory are not measured.
        chosen, fastest (`str`): strategies.
        slowdown (`float`): time with the chosen one over time with the fastest, weight gradient included.
    """

    shape: str
    needs: str
    product_us: float
    predicted: dict[str, float]
    measured: dict[str, float]
    chosen: str
    fastest: str
    slowdown: float


def gradient_by(strategy: str, needs: cost.Needs, batch: Batch, g: torch.Tensor, a: torch.Tensor) -> torch.Tensor:
    """Statistics and weight gradient of a linear layer, as the package makes them in plain PyTorch."""
    _, V = linear_statistics(g, a, False, batch.sequences, batch.samples, needs, strategy)
    if V is not None:
        return batch.combined(V, g.dtype)
    if g.shape[1] <= a.shape[1]:
        return weight_gradient(batch.scaled(g), a)
    return weight_gradient(g, batch.scaled(a))


def compare_strategies(m: int, T: int, p: int, d: int, n: int) -> Iterator[Comparison]:
    measure, dtype = (queued, torch.bfloat16) if DEVICE == "cuda" else (on_cpu, torch.float32)
    batch = Batch(m, T, n)
    both = copies(lambda: (random(m * T, p, dtype=dtype), random(m * T, d, dtype=dtype)))
    product = measure(weight_gradient, both)
    for rule in ("fisher", "euclidean", "fig4", "interacting"):
        needs = make_rule(rule).needs
        predicted = cost.relative_costs(m, T, p, d, n, needs, DEVICE)
        times = {
            strategy: measure(functools.partial(gradient_by, strategy, needs, batch), both) / product
            for strategy in predicted
            if strategy != "whole" or m * p * d <= cost.WHOLE_LIMIT
        }
        chosen, fastest = cost.choose_strategy(m, T, p, d, n, needs, DEVICE), min(times, key=times.__getitem__)
        yield Comparison(
            f"{m} x {T}, {d} -> {p}",
            " + ".join(name for name, needed in needs._asdict().items() if needed),
            product,
            dict(predicted),
            {strategy: value - 1 for strategy, value in times.items()},
            chosen,
            fastest,
            times[chosen] / times[fastest],
        )


def time_strategies(quick: bool) -> dict[str, Any]:
    shapes, n = (LINEAR, SAMPLES) if DEVICE == "cuda" else (SMALL, SMALL_SAMPLES)
    names = list(cost.relative_costs(*shapes[0], n, cost.Needs()))
    print(f"\nextra time over the weight gradient's, measured (predicted); {n} samples\n")
    print(f"{'shape':25} {'statistics':15}", *(f"{name:>15}" for name in names), f"{'chosen':>7} over fastest")
    rows = []
    for shape in shapes[:: 3 if quick else 1]:
        for row in compare_strategies(*shape, n):
            cells = [
                (f"{row.measured[name]:.2f}" if name in row.measured else "-") + f" ({row.predicted[name]:.2f})"
                for name in names
            ]
            line = f"{row.shape:25} {row.needs:15} " + " ".join(f"{cell:>15}" for cell in cells)
            other = "" if row.chosen == row.fastest else f" ({row.fastest})"
            print(f"{line} {row.chosen:>7} {row.slowdown:.2f}{other}", flush=True)
            rows.append(asdict(row))
    right = sum(row["chosen"] == row["fastest"] for row in rows)
    worst = max(row["slowdown"] for row in rows)
    print(f"\nthe fastest strategy is chosen in {right} of {len(rows)} cases; at worst {worst:.2f} times its time")
    return {"samples": n, "rows": rows}


# What `interacting` costs


def cuts(m: int) -> dict[str, v.Tiling]:
    """Ways to cut the kernel between `m` sequences, by what is different from the usual one."""
    usual = v.tiling(m, 4, shared_memory(torch.device(DEVICE)))
    if DEVICE == "cpu":  # where programs run one after the other
        usual = usual._replace(programs=40, width=16, least=16)
        return {"usual": usual, "product": usual._replace(pairs=False, rows=max(16, usual.rows), grouped=True)}
    many = {"programs": 528, "least": 2**11, "grouped": True}
    if usual.pairs:
        product = usual._replace(pairs=False, rows=16, width=64, warps=1, stages=4, **many)
        return {
            "usual": usual,
            "528 programs": usual._replace(**many),
            "528 programs, 4 warps": usual._replace(warps=4, **many),
            "product": product,
            "product, 128 wide": product._replace(width=128),
        }
    before = {"warps": 8, "stages": 3, "programs": 264, "least": 2**13, "part": 2**13, "grouped": False}
    return {
        "before": usual._replace(**before),
        "without groups": usual._replace(grouped=False, least=2**13),
        "usual": usual,
        "least 2^13": usual._replace(least=2**13),
        "twice the warps": usual._replace(warps=2 * usual.warps),
        "3 stages": usual._replace(stages=3),
        "128 wide, 2 stages": usual._replace(width=128, stages=2),
        "1056 programs": usual._replace(programs=1056),
    }


def solving(cut: v.Tiling) -> v.Tiling:
    """One program of as many warps, so that there is next to nothing but the solve."""
    rows = max(16, cut.rows)
    return v.Tiling(rows, False, 16, cut.warps, 1, programs=1, least=16, part=2**10, grouped=False)


class Interacting:
    """The kernel between `m` sequences."""

    def __init__(self, m: int):
        self.rule = make_rule("interacting")
        self.advantages = torch.linspace(-1, 1, m, device=DEVICE, dtype=torch.float64)
        self.book = RunningStatistics(1, 0.9, self.rule, torch.device(DEVICE)).open(self.advantages)
        self.ledger = KernelLedger(self.book)

    def launch(self, cut: v.Tiling, V: torch.Tensor) -> None:
        v.VBlocks([V.shape[1] * V.shape[2]], Entry(self.ledger, 0), cut=cut).add(V)

    def errors(self, cut: v.Tiling, V: torch.Tensor, ntk: torch.Tensor) -> tuple[float, float]:
        """Of the kernel and of the coefficients, over the largest; `ntk` is the kernel in float64."""
        assert self.book.ntk is not None
        self.book.table.zero_()
        self.book.ntk.zero_()
        self.launch(cut, V)
        c = self.rule.coefficients(Statistics(ntk=ntk), self.advantages, None).c
        pairs = ((self.book.ntk[0], ntk), (self.book.table[0, 0], c))
        of_ntk, of_c = (((x - exact).abs().max() / exact.abs().max()).item() for x, exact in pairs)
        return of_ntk, of_c


def related(m: int, rows: int, d: int) -> torch.Tensor:
    """Gradients `[m, rows, d]` that have something in common."""
    V = random(m, rows, d, dtype=torch.float32)
    return V.add_(0.2 * random(rows, d, dtype=torch.float32))


def rows_at_once(m: int, T: int, p: int, d: int) -> int:
    """Outputs whose gradients are formed at once, where the kernels take a layer."""
    strategy = linear_strategy(m, T, p, d, 0, make_rule("interacting").needs, "cuda", True)
    return p if strategy == "whole" else min(p, cost.block_rows(m, d))


def gradient_times(m: int, T: int, p: int, d: int, dtype: torch.dtype) -> dict[str, Any]:
    """The time of the sequences' gradients, and of the weight gradient."""
    measure = queued if DEVICE == "cuda" else on_cpu
    width, sequences = rows_at_once(m, T, p, d), Sequences.regular(m, T)

    def form(g: torch.Tensor, a: torch.Tensor) -> None:
        for _ in sequence_gradients(g, a, False, sequences, width):
            pass

    both = copies(lambda: (random(m * T, p, dtype=dtype), random(m * T, d, dtype=dtype)))
    of_v, of_weight = measure(form, both), measure(weight_gradient, both)
    text = "whole" if width == p else f"in {math.ceil(p / width)} blocks"
    print(f"{m} x {T}, {d} -> {p}: {of_v:8.1f} {text}; the weight gradient takes {of_weight:.1f}", flush=True)
    return {"sequences": m, "length": T, "shape": [p, d], "outputs": width, "us": of_v, "product_us": of_weight}


def cut_times(m: int, shapes: list[tuple[int, int]], bandwidth: float) -> Iterator[dict[str, Any]]:
    """The time of the kernel between `m` sequences, for gradients of each of the shapes, by ways to cut it."""
    measure = captured if DEVICE == "cuda" else on_cpu
    kernel, ways = Interacting(m), cuts(m)
    columns = [*(f"{rows} x {d}" for rows, d in shapes), "last program", "solve", "error of K", "of c"]
    print(f"\n{m} sequences: microseconds of the kernel between them (fraction of the memory's bound)\n")
    print(f"{'':24}" + "".join(f"{column:>15}" for column in columns), flush=True)
    given = [copies(functools.partial(lambda *shape: (related(*shape),), m, *shape)) for shape in shapes]
    exact = [
        sum(part.double().flatten(1) @ part.double().flatten(1).T for part in inputs[0][0].split(64, 1))
        for inputs in given
    ]
    totals: dict[str, float] = {}
    for name, cut in ways.items():
        call = functools.partial(kernel.launch, cut)
        errors = [kernel.errors(cut, inputs[0][0], ntk) for inputs, ntk in zip(given, exact, strict=True)]
        of_ntk, of_c = (max(values) for values in zip(*errors, strict=True))
        times = [measure(call, inputs) for inputs in given]
        # Each program takes one step
        last = measure(functools.partial(kernel.launch, cut._replace(least=cut.width)), [smallest(m, cut)])
        solve = measure(functools.partial(kernel.launch, solving(cut)), [smallest(m, solving(cut))])
        totals[name] = sum(times)
        bounds = [1e6 * tensor_bytes(inputs[0]) / bandwidth for inputs in given]
        cells = [f"{us:.1f} ({bound / us:.2f})" for us, bound in zip(times, bounds, strict=True)]
        cells += [f"{last:.1f}", f"{solve:.1f}", f"{of_ntk:.1e}", f"{of_c:.1e}"]
        print(f"{name:24}" + "".join(f"{cell:>15}" for cell in cells), flush=True)
        figures = {"us": times, "last_us": last, "solve_us": solve, "error_ntk": of_ntk, "error_c": of_c}
        yield {"sequences": m, "cut": name, **cut._asdict(), "shapes": shapes, **figures}
    best = min(totals, key=totals.__getitem__)
    gain = totals["usual"] / totals[best]
    print(
        f"\n{m} sequences: {best!r} is the fastest, {gain:.2f} times as fast as the usual way\n{ways[best]}",
        flush=True,
    )


def smallest(m: int, cut: v.Tiling) -> tuple[torch.Tensor]:
    """Gradients of one step for each program."""
    return (related(m, cut.programs, cut.width),)


def time_interacting(numbers: list[int] | None) -> dict[str, Any]:
    sequences, lengths, layers = INTERACTING if DEVICE == "cuda" else SMALL_INTERACTING
    dtype = torch.bfloat16 if DEVICE == "cuda" else torch.float32
    bandwidth = hardware()[0].bandwidth if DEVICE == "cuda" else math.inf
    numbers = numbers or list(sequences)
    begin = time.perf_counter()
    compile_cuts(numbers)
    print(f"\nkernels were compiled in {time.perf_counter() - begin:.0f} s")
    rows = []
    for m in numbers:
        print(f"\n{m} sequences: microseconds of their gradients\n")
        rows += [gradient_times(m, T, p, d, dtype) for T in lengths for p, d in layers]
        # One of each size, and as many outputs as are formed at once
        shapes = {p * d: (rows_at_once(m, lengths[0], p, d), d) for p, d in layers}
        rows += cut_times(m, list(shapes.values()), bandwidth)
    return {"bandwidth": bandwidth, "rows": rows}


def compile_cuts(numbers: list[int]) -> None:
    """Launch every way to cut once, in threads, as `compile_kernels` does."""

    def launch(case: tuple[int, v.Tiling]) -> None:
        m, cut = case
        Interacting(m).launch(cut, *smallest(m, cut))

    cases = {}
    for m in numbers:
        for cut in cuts(m).values():
            for way in (cut._replace(least=cut.width), solving(cut)):
                # The number of programs is not compiled in
                cases[m if way.pairs else 0, way._replace(programs=0, least=0)] = (m, way)

    if DEVICE == "cuda":
        rms_norm.forward(random(16, 16), random(16), FLAVOUR)  # so that Triton's driver is set up once
        with ThreadPoolExecutor() as pool:
            list(pool.map(launch, cases.values()))


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="a third of the shapes")
    parser.add_argument("--interacting", action="store_true", help="what rule='interacting' costs, and nothing else")
    parser.add_argument("--sequences", type=int, nargs="+", help="with --interacting: numbers of sequences")
    parser.add_argument("--output", help="JSON file for the figures")
    options = parser.parse_args()
    torch.manual_seed(0)
    if DEVICE == "cpu":  # where cores are shared, threads that wait for each other are most of what is measured
        torch.set_num_threads(1)
    report: dict[str, Any] = {"environment": environment()}
    print(", ".join(f"{name} {value}" for name, value in report["environment"].items()))
    parts: dict[str, Callable] = {"kernels": time_kernels, "strategies": time_strategies}
    if options.interacting:
        if DEVICE == "cpu" and not INTERPRET:
            parser.error("the kernels need a GPU; without one, TRITON_INTERPRET=1 runs small sizes")
        parts = {"interacting": lambda _: time_interacting(options.sequences)}
    elif DEVICE == "cpu":
        del parts["kernels"]
        print("The kernels need a GPU, and there is none: only the cost model is compared, on small shapes.")
    for name, part in parts.items():
        report[name] = part(options.quick)
        if options.output:  # after each part, so that a run that is cut short leaves something
            with open(options.output, "w") as file:
                json.dump(report, file, indent=2)


if __name__ == "__main__":
    main()
