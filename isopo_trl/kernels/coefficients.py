"""
Coefficients inside a kernel: the formulas of [`~rules.power`], [`~rules.interacting`], [`~rules.spring`] and
[`~rules.proma`] for all sequences of a layer.

In each kernel that makes a statistic, programs write what they have summed to a scratch tensor, and the last one to
finish, which a counter finds, adds it all up in a fixed order and goes on to the coefficients. So results do not
depend on the order of execution.
"""

from functools import lru_cache
from typing import Any, NamedTuple

import torch

from ..geometry.cost import Needs
from ..geometry.guarded import noise_level
from ..rules.ledger import HISTORY, Ledger
from ..rules.proma import RIDGE
from ..rules.rule import Coefficients, KernelForm, Rule
from .launch import Fixed, Scratch, constant, jit, part_of, power_of_two, takes, tl


# Largest tile of [sequences, samples], or of the partial sums of these, that a program holds
LARGEST_TILE = 2**13
MAX_SAMPLE_BLOCK = 128
# Counters of a microbatch: one for a layer, and one for each block of features of an elementwise parameter
COUNTERS = 1024
# Bytes of scaled rows up to which all layers share their memory; more would be missed elsewhere in the backward pass
MOST_SHARED = 2**23

# What a kernel is compiled for, one bit each; the last: whether there is a direction
OVERLAP, NORM, NTK, P, Q, R, REGULARIZED, KEEP_SMALL, PAPER, PROMA, DIRECTION = (
    constant(1 << bit) for bit in range(11)
)
# Places of the rule's numbers, as `_settings` has them
AT_P, AT_Q, AT_R, AT_LAMBDA, AT_UNSCALE, AT_FACTOR, AT_LAYERS = map(constant, range(7))
AT_UNIT, AT_DECAY, AT_STRENGTH, AT_BOUND = map(constant, range(7, 11))
# Places in a layer's row of the history
HISTORY_COLUMNS = constant(len(HISTORY))
AT_FISHER_SQUARE, AT_NORM_SQUARE, AT_RELATIVE_SQUARE, AT_SCALE, AT_MULTIPLIER, AT_KNOWN = (
    constant(HISTORY.index(name)) for name in ("fisher^2", "norm^2", "relative^2", "scale", "multiplier", "known")
)
# Rows of a layer's part of the table, `m` numbers each
TABLE_ROWS = constant(len(Coefficients._fields))
ROW_FISHER, ROW_NORM, ROW_RAW, ROW_NOISE = (
    constant(Coefficients._fields.index(name)) for name in ("fisher", "norm", "raw", "noise")
)

# Squares of what `below_noise` compares with, by the type of the sums
NOISE_FLOAT32 = constant(noise_level(torch.float32) ** 2)
NOISE_FLOAT64 = constant(noise_level(torch.float64) ** 2)
# What PROMA adds to eigenvalues
PROMA_RIDGE = constant(RIDGE)


def statistics_are_in_kernels(x: torch.Tensor, sequences: int, samples: int, needs: Needs) -> bool:
    """Whether the kernels take a tensor like `x` and so many sequences and samples, where a rule has these needs."""
    if not takes(x):
        return False
    if power_of_two(sequences) * min(power_of_two(samples), MAX_SAMPLE_BLOCK) > LARGEST_TILE:
        return False
    return sequences <= (64 if needs.ntk else 1024)


def rule_is_in_kernels(x: torch.Tensor, sequences: int, samples: int, rule: Rule) -> bool:
    """The same, and whether they make the rule's coefficients of them."""
    return rule.kernel_form is not None and statistics_are_in_kernels(x, sequences, samples, rule.needs)


def variant_of(rule: Rule, direction: bool = False) -> int:
    """
    What the kernels are compiled for, bit by bit, with a `direction` or without one; of a rule that they do not know,
    its statistics.
    """
    if rule.kernel_form is None:  # it may have settings that cannot be hashed
        return _bits(rule.needs.overlap, rule.needs.norm, rule.needs.ntk)
    return _variant_of(rule, direction)


@lru_cache(maxsize=256)
def _variant_of(rule: Rule, direction: bool) -> int:
    needs, form = rule.needs, _form_of(rule)
    others = (form.regularization > 0, form.keep_small, rule.scale == "paper", form.proma is not None, direction)
    return _bits(needs.overlap, needs.norm, needs.ntk, *form.exponents, *others)


def _bits(*traits: Any) -> int:
    return sum(bool(trait) << bit for bit, trait in enumerate(traits))


@lru_cache(maxsize=256)
def _settings(
    rule: Rule, loss_scale: float, unit: float, layers: int, device: torch.device, dtype: torch.dtype
) -> torch.Tensor:
    """
    The rule's numbers, in the order of their places; two of them undo, and carry, the loss's constant, and `unit` is
    that of the direction.
    """
    form = _form_of(rule)
    numbers = (*form.exponents, form.regularization, 1 / loss_scale, loss_scale**rule.degree, layers)
    of_direction = (unit, form.decay, *(form.proma or (0.0, 0.0)))
    return torch.tensor((*numbers, *of_direction), device=device, dtype=dtype)


def _form_of(rule: Rule) -> KernelForm:
    form = rule.kernel_form
    assert form is not None, f"the kernels do not know {rule}"
    return form


class KernelLedger(Scratch):
    """
    A microbatch's [`~rules.ledger.Ledger`] as the kernels take it.

    Args:
        ledger ([`Ledger`]): where coefficients go.
        names (`torch.Tensor`, *optional*): `[n + m]`, names of the sequences that samples from before are of, and of
            the microbatch's; where there are such samples.
        unit (`float`): what the direction's tensors are multiplied by, where there is one.

    Attributes:
        needs ([`Needs`]): the statistics that the rule asks for.
        variant (`int`): what the kernels are compiled for at a layer without a direction.
        variant_along (`int`): the same at one with a direction.
        named (`bool`): whether samples from before have names.
        counter (`torch.Tensor`): zeros, with which the programs of a kernel find out which of them is the last.
        fixed ([`Fixed`]): counter, table, advantages, history, the rule's numbers, and names: the last tensors of each
            kernel.
    """

    def __init__(self, ledger: Ledger, names: torch.Tensor | None = None, unit: float = 1.0):
        super().__init__()
        rule, table, advantages, history = ledger.rule, ledger.table, ledger.advantages, ledger.history
        self.table = table
        self.needs, self.named = rule.needs, names is not None
        self.variant, self.variant_along = variant_of(rule), variant_of(rule, direction=True)
        self.counter = torch.zeros(COUNTERS, device=advantages.device, dtype=torch.int32)
        # Nothing looks at what is given in place of settings and names
        settings = history
        if rule.kernel_form is not None:
            settings = _settings(rule, ledger.loss_scale, unit, len(table), advantages.device, advantages.dtype)
        names = self.counter if names is None else names
        self.fixed = Fixed((self.counter, table, advantages, history, settings, names))

    def rows_like(self, x: torch.Tensor) -> torch.Tensor:
        """
        Memory of the shape and type of `x` `[N, d]`, which a layer has until another one asks: not for what is
        returned to autograd or kept. Not initialised.
        """
        key = ("rows", x.shape, x.dtype, x.device)
        found = self._scratch.get(key)
        if found is None:
            found = torch.empty_like(x, memory_format=torch.contiguous_format)
            if found.nbytes <= MOST_SHARED:
                self._scratch[key] = found
        return found


class Entry(NamedTuple):
    """
    The coefficients `[m]` of a layer, or `[E, m]` of the experts of a stack, in a microbatch's table on the device. A
    kernel that finds them writes them there, and one that multiplies by them reads them there.
    """

    ledger: KernelLedger
    first: int  # the layer, or the first expert


class Overlaps(NamedTuple):
    """What a kernel has found of a layer's overlaps, for one that goes on to the coefficients."""

    # Squared norms of the samples' gradients, `[n]`, and behind them the overlaps by blocks of positions,
    # `[m, blocks, n]`
    sums: torch.Tensor
    samples: int  # n
    named: bool = False  # whether these are rows of the step before, with names

    def statistics(self, sequences: int) -> tuple[torch.Tensor, torch.Tensor]:
        """The overlaps `[n, m]` and the samples' squared norms `[n]`, for a rule that the kernels do not know."""
        norms, blocks = self.sums[: self.samples], self.sums[self.samples :]
        # What a rule keeps of them is not to change with the next layer
        return blocks.view(sequences, -1, self.samples).sum(1).t(), norms.clone()


def tiles(m: int, n: int, blocks: int) -> tuple[int, int, int]:
    """Tile of the last program's sum: sequences, samples, blocks."""
    BM, BN = power_of_two(m), min(max(16, power_of_two(n)), MAX_SAMPLE_BLOCK)
    return BM, BN, part_of(LARGEST_TILE, BM * BN, blocks)


@jit()
def _is_last(counter, total):
    """Whether all `total` programs but this one have passed here; then their stores can be read."""
    tl.debug_barrier()
    before = tl.atomic_add(counter, 1, sem="acq_rel")
    if before == total - 1:
        tl.store(counter, 0)
    return before == total - 1


@jit()
def _sum_of_parts(sums, first, count, place, BM, BC):
    """The sum of `count` tiles `[BM, BM]` that programs have written, from `first` on, in their order."""
    total = tl.zeros((BM, BM), tl.float64)
    for start in range(0, count, BC):
        part = start + tl.arange(0, BC)
        at = (first + part)[:, None, None] * BM * BM + place[None, :, :]
        inside = (part < count)[:, None, None] & (place >= 0)[None, :, :]
        values = tl.load(sums + at, mask=inside, other=0.0, cache_modifier=".cg")
        total += tl.sum(values.to(tl.float64), 0)
    return total


@jit()
def _sum_of_rows(sums, first, count, BM, BC):
    """The same of rows `[BM]`."""
    s = tl.arange(0, BM)
    total = tl.zeros((BM,), tl.float64)
    for start in range(0, count, BC):
        part = start + tl.arange(0, BC)
        at = (first + part)[:, None] * BM + s[None, :]
        values = tl.load(sums + at, mask=(part < count)[:, None] & (s >= 0)[None, :], other=0.0, cache_modifier=".cg")
        total += tl.sum(values.to(tl.float64), 0)
    return total


@jit()
def _fisher_square(partial, norms, names, m, n, blocks, NAMED, BM, BB, BN):
    """
    `F_s^2` `[BM]` from overlaps `partial` `[m, blocks, n]`, to be added over the blocks, and the squared norms of the
    samples' gradients, `norms` `[n]`; and whether any sample has a gradient. If `NAMED`, samples with a sequence's own
    name are left out; `names` `[n + m]` are those of the samples and of the sequences.
    """
    s = tl.arange(0, BM)
    square = tl.zeros((BM,), tl.float64)
    total = tl.zeros((BM,), tl.float64)
    for first in range(0, n, BN):
        j = first + tl.arange(0, BN)
        overlap = tl.zeros((BM, BN), tl.float64)
        for start in range(0, blocks, BB):
            b = start + tl.arange(0, BB)
            at = (s[:, None, None] * blocks + b[None, :, None]) * n + j[None, None, :]
            inside = (s < m)[:, None, None] & (b < blocks)[None, :, None] & (j < n)[None, None, :]
            overlap += tl.sum(tl.load(partial + at, mask=inside, other=0.0, cache_modifier=".cg"), 1)
        weight = tl.load(norms + j, mask=j < n, other=0.0, cache_modifier=".cg").to(tl.float64)
        counted = _counted(names, names + n, j, s, n, m, NAMED)
        square += tl.sum(tl.where(counted, overlap * overlap, 0.0), 1)
        total += tl.sum(tl.where(counted, weight[None, :], 0.0), 1)
    return square / tl.where(total == 0, 1.0, total), total != 0


@jit()
def _counted(of_samples, of_sequences, j, s, n, m, NAMED):
    """`[BM, BN]`, whether samples `j` count in the norms of sequences `s`: where their names are not the same."""
    if NAMED:
        sample = tl.load(of_samples + j, mask=j < n, other=0)
        sequence = tl.load(of_sequences + s, mask=s < m, other=0)
        return sequence[:, None] != sample[None, :]
    else:
        return (s >= 0)[:, None] & (j >= 0)[None, :]


@jit()
def _mean_over(x, alive):
    count = tl.sum(alive.to(tl.float64), 0)
    return tl.sum(tl.where(alive, x, 0.0), 0) / tl.maximum(count, 1.0)


@jit()
def _part(x, exponent, level, VARIANT):
    """`reg2(x)^exponent`, and 0 where `reg2(x)` is 0."""
    if VARIANT & REGULARIZED:
        if VARIANT & KEEP_SMALL:
            x = tl.where(level == 0, 0.0, tl.sqrt(x * x / tl.where(level == 0, 1.0, level) + 1.0))
        else:
            x = tl.sqrt(x * x + level)
    return tl.where(x == 0, 0.0, tl.exp(tl.log(tl.where(x == 0, 1.0, x)) * exponent))


@jit()
def _known_or(known, history, own):
    return tl.where(known, tl.load(history), own)


@jit()
def _below_noise(x, m, known, history, ACC):
    """Which of the norms `x` `[BM]` of m sequences cannot be told from rounding, see [`~geometry.guarded`]."""
    square = x * x
    level = tl.sum(tl.where(square < float("inf"), square, 0.0), 0) / m
    level = tl.where(known, tl.maximum(level, tl.load(history)), level)
    if ACC == tl.float64:
        return square < level * NOISE_FLOAT64
    else:
        return square < level * NOISE_FLOAT32


@jit()
def _non_interacting(fisher_square, informed, norm_square, m, index, book, BM, VARIANT, ACC):
    """
    The power rules for all sequences; writes the layer's row of the table.

    `VARIANT` is `variant_of` the rule, `ACC` the type in which the statistics were summed; `book` is the table,
    advantages, history and settings, laid out as the constants above say.
    """
    table, advantages, history, settings = book
    s = tl.arange(0, BM)
    present = s < m
    history += index * HISTORY_COLUMNS
    known = tl.load(history + AT_KNOWN) != 0
    strength = tl.load(settings + AT_LAMBDA)
    unscale = tl.load(settings + AT_UNSCALE)
    factor = tl.load(settings + AT_FACTOR)
    A = tl.load(advantages + s, mask=present, other=0.0)

    F = tl.sqrt(fisher_square) * unscale
    N = tl.sqrt(tl.maximum(norm_square, 0.0)) * unscale
    # `maximum` may drop a NaN
    N = tl.where(norm_square != norm_square, norm_square, N)
    noise = s < 0
    table += index * TABLE_ROWS * m
    tl.store(table + ROW_FISHER * m + s, F, mask=present)
    tl.store(table + ROW_NORM * m + s, N, mask=present)
    if VARIANT & OVERLAP:
        below = _below_noise(F, m, known, history + AT_FISHER_SQUARE, ACC)
        F = tl.where(below, 0.0, F)
        noise = noise | below
    if VARIANT & NORM:
        below = _below_noise(N, m, known, history + AT_NORM_SQUARE, ACC)
        N = tl.where(below, 0.0, N)
        noise = noise | below
    ratio = tl.where(N == 0, 0.0, F / tl.where(N == 0, 1.0, N))
    alive = present
    if VARIANT & OVERLAP:
        alive = alive & (F > 0) & (F < float("inf"))
    if VARIANT & NORM:
        alive = alive & (N > 0) & (N < float("inf"))

    raw = tl.full((BM,), 1.0, tl.float64)
    if VARIANT & P:
        level = strength * _known_or(known, history + AT_FISHER_SQUARE, _mean_over(F * F, alive))
        raw *= _part(F, tl.load(settings + AT_P), level, VARIANT)
    if VARIANT & Q:
        level = strength * _known_or(known, history + AT_NORM_SQUARE, _mean_over(N * N, alive))
        raw *= _part(N, tl.load(settings + AT_Q), level, VARIANT)
    if VARIANT & R:
        level = strength * _known_or(known, history + AT_RELATIVE_SQUARE, _mean_over(ratio * ratio, alive))
        raw *= _part(ratio, tl.load(settings + AT_R), level, VARIANT)

    if VARIANT & PAPER:
        multiplier = raw * factor
        mean = tl.where(known, tl.load(history + AT_MULTIPLIER) * factor, 0.0)
    else:
        x = F if VARIANT & OVERLAP else N
        weighted = _mean_over(raw * x, alive)
        own = tl.where(weighted == 0, 0.0, _mean_over(x, alive) / tl.where(weighted == 0, 1.0, weighted))
        multiplier = raw * _known_or(known, history + AT_SCALE, own)
        mean = 1.0
    if VARIANT & OVERLAP:
        multiplier = tl.where(informed, multiplier, mean)
    tl.store(table + s, A * multiplier, mask=present)
    tl.store(table + ROW_RAW * m + s, raw, mask=present)
    tl.store(table + ROW_NOISE * m + s, noise.to(tl.float64), mask=present)


@jit()
def _swept(matrix, m, BM):
    """
    The negative of the inverse of a `matrix` `[BM, BM]`, by sweeps without pivoting, which it does not need: it is
    positive definite. A sweep leaves the matrix symmetric, so that a step looks for a row and for no column.
    """
    s = tl.arange(0, BM)
    for k in range(m):
        at = s == k
        row = tl.sum(tl.where(at[:, None], matrix, 0.0), 0)
        inverse = 1.0 / tl.sum(tl.where(at, row, 0.0), 0)
        row = tl.where(at, -1.0, row)
        matrix = tl.where(at[:, None] | at[None, :], 0.0, matrix) - row[:, None] * (row * inverse)[None, :]
    return matrix


@jit()
def _given_way(ntk, along, N, A, alive, settings, m, BM):
    """
    What PROMA takes from the advantages `A`, for the sequences that are `alive`; kernel, projections and N are of
    gradients in one unit.
    """
    s = tl.arange(0, BM)
    inverse = tl.where(alive, 1.0 / tl.where(alive, N, 1.0), 0.0)
    cosines = tl.where(alive[:, None] & alive[None, :], ntk * inverse[:, None] * inverse[None, :], 0.0)
    ridge = tl.zeros((BM, BM), tl.float64) + PROMA_RIDGE
    matrix = cosines + tl.where(s[:, None] == s[None, :], ridge, 0.0)
    x = -tl.sum(_swept(matrix, m, BM) * tl.where(alive, along * inverse, 0.0)[:, None], 0)
    square = tl.sum(x * tl.sum(cosines * x[:, None], 0), 0)
    bound = tl.load(settings + AT_BOUND)
    allowed = bound * bound * tl.sum(A * tl.sum(ntk * A[:, None], 0), 0)
    allowed = tl.where(allowed < 0, 0.0, allowed)
    shrunk = tl.sqrt(tl.where(square > allowed, allowed / tl.where(square > 0, square, 1.0), 1.0))
    return tl.load(settings + AT_STRENGTH) * shrunk * x * inverse


@jit()
def _interacting(ntk, along, m, index, book, BM, VARIANT, ACC):
    """
    The rules that go by the kernel between sequences: `ntk` `[BM, BM]` and, with a direction, the projections `along`
    `[BM]` on it. Writes the layer's row of the table, behind the table the kernel, and behind that the projections.
    """
    table, advantages, history, settings = book
    s = tl.arange(0, BM)
    present = s < m
    diagonal = s[:, None] == s[None, :]
    history += index * HISTORY_COLUMNS
    known = tl.load(history + AT_KNOWN) != 0
    unscale = tl.load(settings + AT_UNSCALE)
    A = tl.load(advantages + s, mask=present, other=0.0)

    ntk = ntk * unscale * unscale
    square = tl.sum(tl.where(diagonal, ntk, 0.0), 1)
    N = tl.where(square != square, square, tl.sqrt(tl.maximum(square, 0.0)))
    noise = _below_noise(N, m, known, history + AT_NORM_SQUARE, ACC)
    alive = present & (N > 0) & (N < float("inf")) & (noise == 0)
    if VARIANT & DIRECTION:
        along = along * tl.load(settings + AT_UNIT)
        layers = tl.load(settings + AT_LAYERS).to(tl.int64)
        tl.store(table + layers * (TABLE_ROWS + m) * m + index * m + s, along, mask=present)
    if VARIANT & PROMA:
        solution = A
        if VARIANT & DIRECTION:  # which is a gradient too
            solution -= _given_way(ntk, along * unscale * unscale, N, A, alive, settings, m, BM)
    else:
        c0 = tl.load(settings + AT_LAMBDA) * _known_or(known, history + AT_NORM_SQUARE, _mean_over(N * N, alive))
        keep = alive & (tl.zeros((BM,), tl.float64) + c0 > 0)
        unit = tl.where(c0 > 0, c0, 1.0)
        matrix = tl.where(keep[:, None] & keep[None, :], ntk / unit, 0.0) + tl.where(diagonal, 1.0, 0.0)
        if VARIANT & DIRECTION:
            A -= tl.load(settings + AT_DECAY) * along * unscale
        matrix = _swept(matrix, m, BM)
        solution = tl.where(keep, -tl.sum(matrix * tl.where(keep, A, 0.0)[:, None], 0), 0.0)
        if VARIANT & PAPER:
            solution = solution / unit * tl.load(settings + AT_FACTOR)
    kernels = table + tl.load(settings + AT_LAYERS).to(tl.int64) * TABLE_ROWS * m + index * m * m
    tl.store(kernels + s[:, None] * m + s[None, :], ntk, mask=present[:, None] & present[None, :])
    table += index * TABLE_ROWS * m
    tl.store(table + s, solution, mask=present)
    tl.store(table + ROW_FISHER * m + s, tl.zeros((BM,), tl.float64), mask=present)
    tl.store(table + ROW_NORM * m + s, N, mask=present)
    tl.store(table + ROW_RAW * m + s, tl.zeros((BM,), tl.float64), mask=present)
    tl.store(table + ROW_NOISE * m + s, noise.to(tl.float64), mask=present)


@jit()
def _finish(counter, programs, norms, names, m, n, blocks, index, book, NAMED, VARIANT, ACC, BM, BB, BN):
    """The last of so many programs makes the coefficients of the overlaps, which are behind the samples' `norms`."""
    if _is_last(counter, programs):
        fisher_square, informed = _fisher_square(norms + n, norms, names, m, n, blocks, NAMED, BM, BB, BN)
        _non_interacting(fisher_square, informed, tl.zeros((BM,), tl.float64), m, index, book, BM, VARIANT, ACC)
