"""
How far an optimizer step moves the policy: the KL divergence KL(before || after), in nats per completion token, on a
few of the sequences that the step was computed from.

The sequences are scored twice, before the step and right after it, in the same way: in one batch, by the same
kernels, without dropout, and in float32. The log-probabilities of the training forward would not do: in bf16 large
logits are rounded to steps of an eighth, and passes over different batches differ by more than a small step does.

What is compared at a position is the distribution over the vocabulary, so that the divergence given the text before
it is exact. Where the logits do not fit into `LARGEST_LOGITS`, some of the positions are compared: all of the first
ones, at which a step often changes most, and others at equal distances, each of which stands for those around it.

The log-probabilities of the tokens that stand there are compared only where a model has no logits to give at chosen
positions. With `d = log pi_after - log pi_before`, the mean of `exp(d) - 1 - d` is the divergence if the tokens are
drawn by the policy before the step, and no term is negative. But the step was computed from these very tokens, and
moves them further than others that might have been drawn, so the mean is too large; and a rare token among them counts
as if it were frequent.

The divergence of the step is the sum over positions divided by their number. Its standard error is that of a ratio of
two sums over sequences: positions of one sequence are not independent.
"""

import logging
import math
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch.distributed.fsdp import FSDPModule

from ..kernels import divergence
from ..trl_seam.batch import Batch
from ..trl_seam.scoring import Scoring, distribution_inputs, distribution_size, most_positions
from .controller import Measurement
from .cuda_graphs import Replayed
from .precise_forward import PreciseForward


logger = logging.getLogger(__name__)


# Elements, in float32, that the logits of a rank's sequences may have, before and after the step each
LARGEST_LOGITS = 2**27
# Elements of them that are compared at a time, where there is no kernel for it
COMPARED_AT_A_TIME = 2**24
# Multiples of positions that batches are padded to where passes are replayed, so that their shapes come again
REPLAYED_WIDTH = 128


def drawn(count: int, share: float, step: int, seed: int) -> list[int]:
    """
    Which of `count` sequences of an optimizer step are measured, or of late positions: a share of them, at least one,
    at equal distances from a place that is drawn for each step. The global random stream is not touched.
    """
    number = max(1, min(count, math.ceil(count * share)))
    generator = torch.Generator().manual_seed((seed * 1_000_003 + step) % 2**63)
    start = torch.rand((), generator=generator, dtype=torch.float64).item()
    return [int((place + start) * count / number) for place in range(number)]


def columns(width: int, share: float, step: int, seed: int) -> tuple[list[int], list[float]]:
    """
    Which positions of completions of up to `width` tokens are compared, where a share of them can be, and how many
    each stands for: half of them are the first ones, the others are [`drawn`] from the rest.
    """
    number = math.ceil(width * share)
    if number >= width:
        return list(range(width)), [1.0] * width
    first = number // 2
    late = [first + place for place in drawn(width - first, (number - first) / (width - first), step, seed)]
    return [*range(first), *late], [1.0] * first + [(width - first) / len(late)] * len(late)


def padded_columns(places: list[int], weights: list[float], most: int) -> tuple[list[int], list[float]]:
    """[`columns`] up to a [`padded_width`], or as many as there may be: what is added stands for nothing."""
    more = min(padded_width(len(places)), most) - len(places)
    return places + places[-1:] * more, weights + [0.0] * more


def padded_width(width: int) -> int:
    """A multiple of `REPLAYED_WIDTH`, of which there are four up to the double of a large number."""
    step = max(REPLAYED_WIDTH, 1 << max(width - 1, 0).bit_length() >> 3)
    return -(-width // step) * step


def on_device(values: list[Any], device: torch.device) -> torch.Tensor:
    """A tensor of the values, for which the device is not waited for."""
    return torch.tensor(values, pin_memory=device.type == "cuda").to(device, non_blocking=True)


def divergences(before: torch.Tensor, after: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """
    Sums over a sequence's positions of their divergence, and numbers of positions: `[B, 2]`, in float64.

    Args:
        before, after (`torch.Tensor`): log-probabilities `[B, C]` of the tokens, or `[B, C, V]` of the vocabulary.
        weights (`torch.Tensor`): `[B, C]`, how many positions each of them stands for; 0 where it does not count.
    """
    if before.dim() == 3:
        each = of_distributions(before.flatten(0, 1), after.flatten(0, 1)).double().unflatten(0, before.shape[:2])
    else:
        change = after.double() - before.double()
        each = torch.expm1(change) - change
    weights = weights.double()
    each = torch.where(weights != 0, weights * each, 0.0)
    return torch.stack([each.sum(dim=1), weights.sum(dim=1)], dim=1)


def of_distributions(before: torch.Tensor, after: torch.Tensor) -> torch.Tensor:
    """
    `[N]`, from log-probabilities `[N, V]` up to a constant, in float32 or what is wider: sums of `q - p - p * d`, with
    `d = log q - log p`, in which no term is negative. A token that cannot occur before the step adds `q`; one that can
    no longer occur makes the divergence infinite.
    """
    if divergence.takes_both(before, after):
        return divergence.divergences(before, after)
    number = max(1, COMPARED_AT_A_TIME // before.size(-1))  # of positions at a time
    parts = zip(before.split(number), after.split(number), strict=True)
    return torch.cat([_of_some(*rows) for rows in parts])


def _of_some(before: torch.Tensor, after: torch.Tensor) -> torch.Tensor:
    dtype = torch.promote_types(before.dtype, torch.float32)
    p, q = before.log_softmax(-1, dtype=dtype), after.log_softmax(-1, dtype=dtype)
    d = q - p
    p.exp_()
    q.exp_()
    # Without cancellation where q is near p, and without overflow where it is far above
    near = torch.expm1(d).sub_(d).mul_(p)
    far = (q - p).addcmul_(p, d, value=-1)
    terms = torch.where(d < 1, near, far)
    return torch.where(p == 0, q, terms).sum(-1).clamp(min=0)


def sums(rows: torch.Tensor) -> torch.Tensor:
    """What of [`divergences`] `[B, 2]` adds up over ranks: `[6]`."""
    kl, tokens = rows.unbind(dim=1)
    present = (tokens > 0).double()
    parts = [kl, tokens, kl * kl, tokens * tokens, kl * tokens, present]
    return torch.stack([part.sum() for part in parts])


def measurement(totals: list[float]) -> Measurement:
    """
    The measurement that [`sums`] over all sequences make. One sequence alone has an error as large as its value; none
    say nothing, with an error that is infinite.
    """
    kl, tokens, kl_square, tokens_square, product, count = totals
    if tokens == 0:
        return Measurement(0.0, math.inf)
    mean = kl / tokens
    if count < 2:
        return Measurement(mean, mean)
    residual = max(0.0, kl_square - 2 * mean * product + mean**2 * tokens_square)
    return Measurement(mean, math.sqrt(count / (count - 1) * residual) / tokens)


class StepKL:
    """
    The sequences by which one optimizer step after the other is measured.

    Args:
        scoring, precise: make the trainer's scoring passes, and make them in float32.
        accelerator (`Accelerator`): the ranks.
        share (`float`): of the step's sequences, in (0, 1], drawn by `seed`.
        masks_truncated (`bool`): whether completions that were cut off are not scored.
        may_replay (`bool`): whether passes may be replayed, which takes memory and weights that stay where they are.
    """

    def __init__(
        self,
        scoring: Scoring,
        precise: PreciseForward,
        accelerator: Any,
        *,
        share: float,
        seed: int,
        masks_truncated: bool = False,
        may_replay: bool = True,
    ):
        self._scoring, self._precise, self._accelerator = scoring, precise, accelerator
        self._share, self._seed = share, seed
        self._masks_truncated, self._may_replay = masks_truncated, may_replay
        self._as_trained = False  # whether to score as the model is trained, because it cannot be run in float32
        self.reset()

    def reset(self) -> None:
        """Begin a new run, or end one."""
        self._replayed: Replayed | None = None
        self._base: torch.nn.Module | None = None
        self._own_rounding: float | None = None
        self.rounding = 0.0  # the KL divergence, in nats per token, below which a measurement says nothing
        self.forget()

    def forget(self) -> None:
        """Begin a new step."""
        self._seen, self._has_all = 0, False
        self._batches: list[Batch] = []
        self._tells = False  # whether a token is scored in them
        self._spare: Batch | None = None  # a sequence that was not drawn, with scored tokens
        self._before: list[torch.Tensor] = []
        self._early: list[int] | None = None  # versions of the model's tensors, where that was scored early
        self._weights: list[torch.Tensor] = []  # of the positions that are compared
        # What a model takes for the logits there, if it can be asked for them
        self._inputs: list[tuple[torch.Tensor, ...]] | None = None

    def begin(self) -> None:
        """Begin to count a step's sequences; those of an accumulation that an epoch has broken off are in it, too."""
        self._seen, self._has_all = 0, False

    def note(self, batch: Batch, step: int, microbatches: int) -> None:
        """Take the sequences by which `step`, of so many `microbatches`, is measured out of one of them."""
        size = len(batch.completion_mask)
        # The same on all ranks, so that they make as many passes
        places = drawn(size * microbatches, self._share, step, self._seed)
        rows = [place - self._seen for place in places if 0 <= place - self._seen < size]
        self._seen += size
        self._has_all = self._seen > places[-1]
        # A completion without a scored token (TRL masks those that were cut off, if asked to) would tell nothing
        may_be_masked = self._masks_truncated or batch.get("tool_mask") is not None
        if not rows and (self._tells or not may_be_masked):
            return
        full = batch.scored.any(dim=1).nonzero().flatten().tolist()
        if rows:
            among = full or list(range(size))
            taken = batch.rows(sorted({among[row * len(among) // size] for row in rows}))
            batches = self._scoring.together([*self._batches, taken])
            self._take(batches, tells=self._tells or bool(full))
        elif full and self._spare is None:
            counts = batch.get("num_images") or [0] * size
            (self._spare,) = self._scoring.together([batch.rows([max(full, key=counts.__getitem__)])])
        if self._batches and not self._tells and self._spare is not None:
            # In the place of another: ranks make as many passes
            self._take([*self._batches[:-1], self._spare], tells=True)

    def _take(self, batches: list[Batch], tells: bool) -> None:
        """Measure the step by these; whatever was scored early is out of date."""
        self._before, self._inputs, self._early = [], None, None
        self._batches, self._tells = batches, tells

    @property
    def may_score_early(self) -> bool:
        """
        Whether all sequences of the step are known and the pass before it is one that takes the host no time, which is
        busier than the GPU in many a training step, and catches up then.
        """
        alone = self._accelerator.num_processes == 1  # others may not replay, and ranks must not wait
        recorded = self._replayed is not None and self._replayed.has_recorded
        return alone and recorded and self._has_all and not self._before and self._replays()

    def score_early(self, step: int) -> None:
        """Before the step, between two of its microbatches."""
        self.score(step)
        self._early = self._tensor_versions()

    def score(self, step: int) -> None:
        """Before the step, unless that was done early and the weights are still the same."""
        accelerator, device = self._accelerator, self._accelerator.device
        if self._early is not None and self._early == self._tensor_versions():
            return
        self._before, self._inputs, self._early = [], None, None
        sizes = [distribution_size(self._base_model, batch) for batch in self._batches]
        extremes: list[list[float]] = [[min(sizes, default=0), sum(sizes)]]
        alone = accelerator.num_processes == 1  # then there is nothing to wait for
        if not alone:
            # On all ranks alike: sharded models are gathered in both cases, but not in the same way
            own = torch.tensor([[*extremes[0], self._rounding_here()]], dtype=torch.float64, device=device)
            ranks = accelerator.gather(own).tolist()
            extremes, self.rounding = [rank[:2] for rank in ranks], max(rank[2] for rank in ranks)
        least, most = min(least for least, _ in extremes), max(most for _, most in extremes)
        self._weights = [batch.scored for batch in self._batches]
        if least > 0:
            share = LARGEST_LOGITS / most
            chosen = [columns(scored.size(1), share, step, self._seed) for scored in self._weights]
            if self._replays():
                mosts = [
                    LARGEST_LOGITS * scored.size(1) // size for scored, size in zip(self._weights, sizes, strict=True)
                ]
                chosen = [padded_columns(*each, own) for each, own in zip(chosen, mosts, strict=True)]
            places = [on_device(places, device) for places, _ in chosen]
            self._weights = [
                scored[:, own] * on_device(weights, device)
                for scored, own, (_, weights) in zip(self._weights, places, chosen, strict=True)
            ]
            parts = zip(self._batches, places, strict=True)
            self._inputs = [distribution_inputs(batch, own, self._replayed_width(batch)) for batch, own in parts]
        self._before = [
            scores if self._replayed is None else self._replayed.own(scores) for scores in self._first_scores()
        ]
        if alone:
            self.rounding = self._rounding_here()

    def measure(self) -> Measurement:
        """After the step, as often as needed. The same on all ranks."""
        rows = [divergences(*part) for part in zip(self._before, self._scores(), self._weights, strict=True)]
        nothing = torch.zeros(6, dtype=torch.float64, device=self._accelerator.device)
        totals = sums(torch.cat(rows)) if rows else nothing
        return measurement(self._accelerator.reduce(totals, reduction="sum").tolist())

    def _rounding_here(self) -> float:
        """On this rank."""
        if self._own_rounding is None:
            quantized = getattr(self._base_model, "is_quantized", False)
            self._own_rounding = self._precise.rounding(self._scoring.model, quantized, self._as_trained)
        return self._own_rounding

    @property
    def _base_model(self) -> torch.nn.Module:
        """The model without wrappers and adapters."""
        if self._base is None:
            self._base = self._scoring.base_model()
        return self._base

    def _tensor_versions(self) -> list[int] | None:
        return None if self._replayed is None else self._replayed.versions()

    def _replays(self) -> bool:
        """Whether passes are replayed, if they can be."""
        if not self._may_replay:
            return False
        if self._replayed is None or self._replayed.model is not self._scoring.model:
            self._replayed = Replayed(self._scoring.model)
        alone = len(self._batches) == 1  # else the next pass would write over what this one returns
        return alone and not self._as_trained and self._replayed.is_usable

    def _replayed_width(self, batch: Batch) -> int:
        """What a batch is padded to on the right; 0 if not at all."""
        width = padded_width(batch.attention_mask.size(1))
        return width if self._replays() and width <= most_positions(self._base_model) else 0

    def _first_scores(self) -> list[torch.Tensor]:
        if not self._as_trained:
            try:
                return self._scores()
            except torch.OutOfMemoryError:
                raise
            except Exception as error:  # a kernel that is for bf16 alone, whatever it says of that
                self._as_trained, self._own_rounding = True, None
                logger.warning(
                    "The model cannot be run in float32, so the length of steps is measured in the precision it is "
                    f"trained in, which is good for steps of 1e-3 nats per token or more. The error was: {error}"
                )
        return self._scores()

    def _scores(self) -> list[torch.Tensor]:
        if self._inputs is not None:
            return [self._distributions(inputs) for inputs in self._inputs]
        with self._measuring():
            return [self._scoring.logps(batch) for batch in self._batches]

    def _distributions(self, inputs: tuple[torch.Tensor, ...]) -> torch.Tensor:
        def distributions(*inputs: torch.Tensor) -> torch.Tensor:
            with self._measuring():
                return self._scoring.log_distributions(*inputs)

        if not self._replays():
            return distributions(*inputs)
        assert self._replayed is not None
        return self._replayed(distributions, inputs, self._scoring.temperature, again=bool(self._before))

    @contextmanager
    def _measuring(self) -> Iterator[None]:
        """Context of passes: without gradient and dropout, in float32 if that is possible."""
        model = self._scoring.model
        precision = nullcontext() if self._as_trained else self._precise.passes(model)
        with torch.no_grad(), evaluating(model), precision:
            yield
        # Without a backward pass FSDP2 would keep what it has gathered, and go on with it after the step
        for module in model.modules():
            if isinstance(module, FSDPModule):
                module.reshard()


@contextmanager
def evaluating(model: torch.nn.Module) -> Iterator[None]:
    """Context in which every module is in evaluation mode."""
    training = [module for module in model.modules() if module.training]
    for module in training:
        module.training = False
    try:
        yield
    finally:
        for module in training:
            module.training = True
