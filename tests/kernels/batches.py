"""
What tests of the Triton kernels share: random batches, and the comparison of a ledger with plain PyTorch in float64.

On a CPU the kernels run under Triton's interpreter (`TRITON_INTERPRET=1`, see `test_interpreted.py`); with a GPU
the same tests take them as they are compiled there.
"""

import dataclasses
import itertools
import math
from dataclasses import dataclass

import pytest
import torch

from isopo_trl.geometry.sequences import Samples, Sequences, draw_samples
from isopo_trl.geometry.statistics import elementwise_statistics, linear_statistics, sequence_gradients
from isopo_trl.kernels import elementwise, linear, v
from isopo_trl.kernels.coefficients import Entry, KernelLedger
from isopo_trl.kernels.launch import ENABLED, INTERPRET
from isopo_trl.rules import Coefficients, make_rule
from isopo_trl.rules.ledger import Ledger
from isopo_trl.rules.running import EXPECTATIONS, RunningStatistics


needs_kernels = pytest.mark.skipif(
    not (ENABLED and (INTERPRET or torch.cuda.is_available())),
    reason="Triton's kernels need a CUDA device, or TRITON_INTERPRET=1",
)
# Of a file that runs kernels (see `conftest.py` for the fixture)
of_kernels = [needs_kernels, pytest.mark.usefixtures("poisoned_memory")]

DEVICE = torch.device("cpu" if INTERPRET else "cuda")
DTYPES = [torch.float64, torch.float32] if INTERPRET else [torch.float32, torch.bfloat16, torch.float16]
EXACT = DTYPES[0]
# Under the interpreter the others differ by their rounding alone, and by what tests of single types look at
EACH_DTYPE = [EXACT, *(pytest.param(dtype, marks=pytest.mark.slow) if INTERPRET else dtype for dtype in DTYPES[1:])]


def thinned(number, *lists, names=str):
    """
    The product of `lists`, as parameters with an id. Under the interpreter all but one in `number` are slow; of lists
    at least as long as that, each value stays, beside several of the others.
    """
    return [
        pytest.param(
            *(value for _, value in case),
            marks=pytest.mark.slow if INTERPRET and sum(place for place, _ in case) % number else [],
            id="-".join(names(value) for _, value in case),
        )
        for case in itertools.product(*(list(enumerate(values)) for values in lists))
    ]


# Of statistics, which are accumulated in float32 or better, and of gradients in the type itself
STATISTIC = {torch.float64: 1e-10, torch.float32: 3e-5, torch.bfloat16: 2e-4, torch.float16: 2e-4}
GRADIENT = {torch.float64: 1e-10, torch.float32: 3e-5, torch.bfloat16: 1e-2, torch.float16: 2e-3}

LAYERS = 3
KNOWN, UNKNOWN = 2, 1  # layers with a history, and without one
HISTORY = (3.0, 40.0, 0.05, 0.7, 1.9)  # in the order of EXPECTATIONS

FISHER, FIG4, EUCLIDEAN, INTERACTING = map(make_rule, ("fisher", "fig4", "euclidean", "interacting"))


def poison_memory(monkeypatch):
    """Every buffer that is not written to is seen: memory comes filled with NaN."""
    empty, empty_like = torch.empty, torch.empty_like

    def poisoned(x):
        return x.fill_(math.nan) if x.is_floating_point() else x

    monkeypatch.setattr(torch, "empty", lambda *args, **kwargs: poisoned(empty(*args, **kwargs)))
    monkeypatch.setattr(torch, "empty_like", lambda *args, **kwargs: poisoned(empty_like(*args, **kwargs)))


@dataclass
class Batch:
    """
    A linear layer's rows: `g` `[N, p]`, zero on padding, and `a` `[N, d]`; `g` is also the gradient of an elementwise
    parameter at each position.
    """

    g: torch.Tensor
    a: torch.Tensor
    bias: bool
    sequences: Sequences
    samples: Samples
    advantages: torch.Tensor


def batch(m, T, p, d, n, bias=False, dtype=EXACT, seed=0):
    """
    Ragged sequences, padded left and right, of gradients of different size. A few samples are absent though their row
    has a gradient, which must not be seen.
    """
    generator = torch.Generator().manual_seed(seed)
    starts = torch.randint(0, max(1, T // 4), (m, 1), generator=generator)
    lengths = torch.randint(1, T + 1, (m, 1), generator=generator)
    t = torch.arange(T)
    real = ((t >= starts) & (t < starts + lengths)).reshape(-1)
    sizes = torch.linspace(0.5, 2, m).repeat_interleave(T).unsqueeze(1)
    g = torch.randn(m * T, p, generator=generator) * sizes * real.unsqueeze(1)
    a = torch.randn(m * T, d, generator=generator) + 0.3
    samples = draw_samples(real, n, seed)
    absent = samples.absent | (torch.rand(len(samples.rows), generator=generator) < 0.2)
    absent[0] = samples.absent[0]
    advantages = torch.randn(m, generator=generator)
    advantages[m // 2] *= m == 1  # among several sequences, one with an advantage of zero
    return Batch(
        g.to(DEVICE, dtype),
        a.to(DEVICE, dtype),
        bias,
        Sequences.regular(m, T),
        Samples(samples.rows.to(DEVICE), absent.to(DEVICE)),
        advantages.to(DEVICE),
    )


def running_with_history(rule):
    running = RunningStatistics(LAYERS, 0.9, rule, DEVICE)
    mean = torch.tensor(HISTORY, dtype=torch.float64).repeat(LAYERS, 1)
    assert mean.shape[1] == len(EXPECTATIONS)
    mean[UNKNOWN] = 0
    known = [layer != UNKNOWN for layer in range(LAYERS)]
    running.load_state_dict({**running.state_dict(), "mean": mean, "known": known})
    return running


@dataclass
class Run:
    """What one call of the kernels has to agree on with plain PyTorch."""

    running: RunningStatistics
    ledger: KernelLedger
    index: int
    loss_scale: float
    book: Ledger
    unit: float  # of a direction

    @classmethod
    def of(cls, given, rule, index=UNKNOWN, loss_scale=1.0, names=None, unit=1.0):
        running = running_with_history(rule)
        ledger = running.open(given.advantages, loss_scale)
        return cls(running, KernelLedger(ledger, names, unit), index, loss_scale, ledger, unit)

    @property
    def entry(self):
        return Entry(self.ledger, self.index)

    def plain(self, statistics):
        history = self.running.expectations(self.index)
        assert (history is None) == (self.index == UNKNOWN)
        if self.running.rule.needs.direction:
            statistics = dataclasses.replace(statistics, projection=self.projection(statistics))
        return self.running.rule.coefficients(statistics, self.book.advantages, history, self.loss_scale)

    def projection(self, statistics):
        """In its unit, and zero where there is no direction."""
        found = statistics.projection
        return torch.zeros_like(self.book.advantages) if found is None else found * self.unit

    def check(self, statistics, tolerance):
        """The layer's row of the table is what plain PyTorch makes of `statistics`; nothing else has changed."""
        expected = self.plain(statistics)
        fresh = self.running.open(self.book.advantages, self.loss_scale)
        fresh.record(self.index, expected)
        table = fresh.table.clone()
        whole = torch.isfinite(table[self.index, :3].sum(0))
        ours = self.ledger.table
        # The sequences that the running means would count as broken are the same, the others agree
        assert torch.equal(torch.isfinite(ours[self.index, :3].sum(0)), whole), (ours[self.index], table[self.index])
        others = [layer for layer in range(LAYERS) if layer != self.index]
        assert torch.equal(ours[others], table[others])
        for name, mine, theirs in zip(Coefficients._fields, ours[self.index], table[self.index], strict=True):
            mine, theirs = mine[whole], theirs[whole]
            close(mine, theirs, tolerance, name)
            assert torch.equal(mine == 0, theirs == 0), name
        if self.book.ntk is not None:
            assert not self.book.ntk[others].any()
            close(self.book.ntk[self.index] * self.loss_scale**2, statistics.ntk, tolerance, "ntk")
        if self.book.projection is not None:
            assert not self.book.projection[others].any()
            close(self.book.projection[self.index], self.projection(statistics), tolerance, "projection")
        # The kernels' counters are ready for the next layer
        assert not self.ledger.counter.any()
        return expected


def names_of(n, m):
    """Names of `n` samples and of `m` sequences, two of which have the same; and which samples are whose own."""
    names = torch.arange(m) * 10**12
    names[-1] = names[0]
    samples = torch.arange(n) % (m + 1) * 10**12  # some are of none of the sequences
    own = samples.unsqueeze(1) == names
    return torch.cat([samples, names]).to(DEVICE), own.to(DEVICE)


def close(x, expected, tolerance, name=""):
    """Equal to within `tolerance` of the largest element, and not finite in the same places."""
    x, expected = x.detach().double(), expected.detach().double()
    assert x.shape == expected.shape, name
    finite = torch.isfinite(expected)
    assert torch.equal(torch.isfinite(x), finite), f"{name}: {x}, expected {expected}"
    x, expected = x[finite], expected[finite]
    if x.numel():
        error = (x - expected).abs().max().item()
        assert error <= tolerance * max(expected.abs().max().item(), 1e-30), f"{name}: off by {error}"


def named(rule):
    """The settings of a rule that are not the default, as the name of a case."""
    return "-".join(str(x) for x in dataclasses.astuple(rule) if x not in (None, False, "relative"))


def filled_ledger(m, layers=LAYERS):
    """A ledger with different coefficients in every layer."""
    ledger = KernelLedger(RunningStatistics(layers, 0.9, FISHER, DEVICE).open(torch.ones(m, device=DEVICE)))
    ledger.table[:] = torch.randn(ledger.table.shape, generator=torch.Generator().manual_seed(5), dtype=torch.float64)
    return ledger


# A layer by the kernels, and by plain PyTorch


def run_linear(given, run, rows=None, direction=None):
    """A linear layer's statistics and coefficients from kernels alone; returns `V` where it was formed as a whole."""
    rule = run.running.rule
    explicit = rule.needs.norm or rule.needs.ntk
    overlap = V = None
    if rule.needs.overlap:
        arguments = (given.g, given.a, given.bias, given.sequences, given.samples, run.entry)
        overlap = linear.overlaps(*arguments, finish=not explicit)
    if explicit:
        p, d = given.g.shape[1], given.a.shape[1] + given.bias
        rows = rows or p
        sizes = [min(rows, p - start) * d for start in range(0, p, rows)]
        sums = v.VBlocks(sizes, run.entry, overlap)
        for block, V in sequence_gradients(given.g, given.a, given.bias, given.sequences, rows):
            sums.add(V, None if direction is None else tuple(D[block] for D in direction))
    return V


def plain_statistics(given, needs, strategy="whole", direction=None):
    """The same layer's statistics in plain PyTorch, from the same numbers in float64."""
    g, a = given.g.double(), given.a.double()
    return linear_statistics(g, a, given.bias, given.sequences, given.samples, needs, strategy, direction)


def run_elementwise(given, run, dtype=None, direction=None):
    """The gradient `[p]` of an elementwise parameter from the kernels."""
    samples = given.samples if run.running.rule.needs.overlap else None
    arguments = (given.g, given.sequences, samples, run.entry, dtype or given.g.dtype)
    return elementwise.elementwise_gradient(*arguments, direction=direction)


def check_elementwise(given, run, direction=None):
    """Coefficients and gradient of an elementwise parameter are those of plain PyTorch."""
    dtype = given.g.dtype
    result = run_elementwise(given, run, direction=direction)
    needs = run.running.rule.needs
    statistics, V = elementwise_statistics(given.g.double(), given.sequences, given.samples, needs, direction)
    run.check(statistics, STATISTIC[dtype])
    # With the kernel's own coefficients: those of a broken sequence need not be the same ones
    close(result, run.ledger.table[run.index, 0] @ V, GRADIENT[dtype])
    assert result.dtype == dtype
