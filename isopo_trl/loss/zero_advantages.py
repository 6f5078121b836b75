"""
Leaving out the sequences that carry no advantage: they are dropped before the forward pass, and what remains of an
optimizer step is packed into fewer or smaller microbatches. A microbatch that is left empty costs no pass.

What a sequence adds to the gradient stays the same, since the loss of a smaller microbatch is weighted so that it is
normalised as in the whole batch.
"""

import math
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
from transformers import TrainerCallback

from ..token_weights import Weighting
from ..trl_seam.batch import Batch, joined_batches, rows_of_batch
from ..trl_seam.generation import Progress
from ..trl_seam.loans import intercepted
from .sampler import is_own


# Losses that are divided by a number of the whole generation; bnpo is divided by the microbatch's scored tokens, and
# all others by its sequences
_OF_THE_GENERATION = ("dapo", "cispo", "vespo")
# What is logged of coefficients: 0 for a step in which no sequence has an advantage
_COEFFICIENTS = (*(f"isopo/multiplier_{name}" for name in ("mean", "min", "max")), "isopo/effective_sequences")


def what_needs_all(args: Any, terms: Sequence[str], ntk: bool, weighting: Weighting) -> list[str]:
    """
    The settings with which a sequence without an advantage is computed, or has a gradient all the same: of the `args`,
    those that add `terms` without an advantage to the loss, and a rule that asks for the `ntk`.
    """
    found, skips = [*terms], args.skip_zero_advantage
    if skips is False:
        found.append("skip_zero_advantage=False")
    if ntk:
        also = ["group_microbatches=True"] * args.group_microbatches
        also += [f"token_weights={args.token_weights!r}"] * weighting.looks_across_sequences
        if not skips or also:
            found.append(" and ".join([f"rule={args.rule!r}", *(also if skips else ["skip_zero_advantage=None"])]))
    if weighting.goes_back_twice:
        found.append(f"token_weights={args.token_weights!r}")
    if args.top_entropy_quantile < 1:
        found.append(f"top_entropy_quantile={args.top_entropy_quantile}")
    return found


def are_left_out(args: Any, terms: Sequence[str], ntk: bool, has_own_loss: bool) -> bool:
    """
    Whether sequences without an advantage are left out: where that is asked for, or nobody would miss them, as a
    trainer may that has a loss or microbatches of its own.
    """
    if args.skip_zero_advantage and terms:
        raise ValueError(
            f"skip_zero_advantage=True leaves out sequences that {', '.join(terms)} acts on even "
            "without an advantage: set skip_zero_advantage=False, or leave the term out of the loss (beta can go "
            "into the reward, with kl_in_reward=True)."
        )
    if args.skip_zero_advantage is not None:
        return args.skip_zero_advantage
    return not (terms or ntk or args.top_entropy_quantile < 1 or has_own_loss)


def without_rounding(
    advantages: torch.Tensor, rewards: torch.Tensor, weights: torch.Tensor, group: int, rank: int
) -> torch.Tensor:
    """The advantages `[B]` of a rank, 0 where a group's rewards `[N, functions]` are [equal][equal_rewards]."""
    equal = equal_rewards(rewards, weights, group)[rank * len(advantages) : (rank + 1) * len(advantages)]
    return advantages.masked_fill(equal, 0)


def equal_rewards(rewards: torch.Tensor, weights: torch.Tensor, group: int) -> torch.Tensor:
    """
    Which completions, `[N]`, are of a group whose completions all have the same reward. TRL subtracts the group's
    mean, which can be off by a rounding, and divides by 1e-4, so that their advantages are not always 0.

    Args:
        rewards (`torch.Tensor`): `[N, functions]`, NaN where a function gave none.
        weights (`torch.Tensor`): `[functions]`.
        group (`int`): completions per prompt, which follow each other.
    """
    total = (rewards * weights.to(rewards)).nansum(dim=1)
    unscored = torch.isnan(rewards).all(dim=1)  # which have no part in the mean, and no advantage
    largest, smallest = (total.masked_fill(unscored, x).view(-1, group) for x in (-torch.inf, torch.inf))
    return (largest.amax(1) <= smallest.amin(1)).repeat_interleave(group)


def remaining_units(advantages: torch.Tensor, group: int = 1) -> list[list[int]]:
    """
    The sequences that remain, as lists of rows that stay together: `group` rows that follow each other, all of them
    if one has an advantage. What is not a number remains, so that it is noticed.

    Args:
        advantages (`torch.Tensor`): `[B]`, with `B` a multiple of `group`.
        group (`int`): how many rows stay together.
    """
    carries = (advantages != 0).reshape(len(advantages) // group, -1).any(dim=1)
    return [list(range(group * unit, group * unit + group)) for unit in carries.nonzero().flatten().tolist()]


def in_equal_parts(units: list[list[int]], count: int) -> list[list[int]]:
    """The rows of `units`, in order, in `count` parts that differ by one unit at most."""
    bounds = [len(units) * part // count for part in range(count + 1)]
    parts = [units[start:end] for start, end in zip(bounds, bounds[1:], strict=False)]
    return [[row for unit in part for row in unit] for part in parts]


def divisor(batch: Batch, loss_type: str) -> torch.Tensor:
    """What TRL's loss of a microbatch is divided by, but for what is the same for all microbatches; a scalar."""
    if loss_type == "bnpo":
        number = batch.scored.sum().clamp(min=1)
    else:
        number = torch.tensor(1 if loss_type in _OF_THE_GENERATION else len(batch.advantages))
    return number.to(batch.advantages)


class Skipping(TrainerCallback):
    """
    The microbatches of a trainer's optimizer steps, without the sequences that carry no advantage.

    TRL's own microbatches stay as they are, so that they can be used again, and saved. Those of them that are in the
    same optimizer step and generation are packed together when the first is asked for; the empty ones come first,
    so that the last, in which ranks exchange gradients, is not empty unless all are.

    All ranks make the same number of passes, as DDP, FSDP2 and DeepSpeed need. A rank that has too few sequences for
    that takes one without an advantage, with weight 0: it has no gradient, and counts in nothing but figures of TRL's
    own, such as the entropy. Texts that were among images take one with an image along in the same way: models take a
    list of images, but not an empty one, and the vision tower is to have a gradient, if of zero, as in the whole
    batch.

    Args:
        progress ([`Progress`]): the run's, which has the microbatches.
        accelerator (`Accelerator`): the ranks.
        loss_type (`str`): by which it is known what the loss is divided by.
        group (`int`): how many sequences that follow each other stay together.
        looks_across_sequences (`bool`): whether token weights look at every sequence, unless all ratios are 1.
        always_makes_a_pass (`bool`): whether a step needs one even if nobody has an advantage, as DeepSpeed's does.

    Attributes:
        is_empty (`bool`): whether the microbatch under way is.
    """

    def __init__(
        self,
        progress: Progress,
        accelerator: Any,
        loss_type: str,
        group: int = 1,
        looks_across_sequences: bool = False,
        always_makes_a_pass: bool = False,
    ):
        self._progress, self._accelerator, self._loss_type, self._group = progress, accelerator, loss_type, group
        self._looks_across, self._always = looks_across_sequences, always_makes_a_pass
        self.reset()

    def reset(self) -> None:
        """Forget the optimizer step."""
        self._gone = 0  # microbatches of the step up to now, empty ones included
        self._passes = 0  # microbatches of the step, as packed so far, that are not empty; the same on all ranks
        self._sequences = self._remaining = 0  # of the step so far, on all ranks
        self._needs_all = False  # whether the step's token weights look at every sequence
        self._waiting: list[dict[str, Any]] = []
        self.is_empty = False

    def on_step_begin(self, args, state, control, **kwargs):
        # What came before without an optimizer step, at the end of a stream of data, has its gradients in this one
        self._gone = 0

    @property
    def is_idle(self) -> bool:
        """Whether no pass is made in this step, on any rank, as far as it has been packed."""
        return self._gone > 0 and self._passes == 0

    def next_microbatch(self, microbatches: int, optimizer_steps: int) -> dict[str, Any]:
        """The next of the step's microbatches for the loss, as TRL has generated it; `{}` if it is empty."""
        if not self._waiting:
            left = microbatches - self._gone
            self._waiting = self._packed(self._progress.coming(left), left, optimizer_steps)
        self._gone += 1
        microbatch = self._waiting.pop(0)
        self.is_empty = not microbatch
        return microbatch

    def without_empty_passes(self) -> AbstractContextManager[None]:
        """Context for a training step, in which an empty microbatch has no backward pass."""

        def stand_in(backward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
            return None if self.is_empty else backward(*args, **kwargs)

        return intercepted(self._accelerator, "backward", stand_in)

    def fill_gradients(self, parameters: Iterable[torch.Tensor]) -> None:
        """In a step without a pass, give parameters the gradients of one: the optimizer steps, by its momentum."""
        for p in parameters if self.is_idle else ():
            if p.requires_grad and p.grad is None:
                p.grad = torch.zeros_like(p, dtype=p.grad_dtype)

    def close(self) -> dict[str, float]:
        """Close the optimizer step, and return what is logged of it."""
        skipped = 1 - self._remaining / self._sequences if self._sequences else 0.0
        figures = {"isopo/skipped_fraction": skipped, **(dict.fromkeys(_COEFFICIENTS, 0.0) if self.is_idle else {})}
        self.reset()
        return figures

    def _packed(self, microbatches: list[dict[str, Any]], left: int, optimizer_steps: int) -> list[dict[str, Any]]:
        """The microbatches, packed: as many as before, the first ones empty; `left` are missing to the step's end."""
        size = len(microbatches[0]["advantages"])
        whole = Batch(joined_batches(microbatches))
        total = len(whole.advantages)
        if self._looks_across and not is_own(whole, optimizer_steps):
            self._needs_all = True  # where ratios are 1, none has anything to say
        units = remaining_units(torch.ones(total) if self._needs_all else whole.advantages, self._group)
        remaining = sum(map(len, units))
        own = torch.tensor([[math.ceil(remaining / size), remaining, total]], device=self._accelerator.device)
        needed, remaining_everywhere, sequences = zip(*self._accelerator.gather(own).tolist(), strict=True)
        passes = max(needed)
        self._remaining += sum(remaining_everywhere)
        self._sequences += sum(sequences)
        if passes == 0 and len(microbatches) == left and (self._passes or self._always):
            passes = 1  # gradients wait for the last backward pass of the step
        self._passes += passes
        if remaining == total and passes == len(microbatches):
            return list(microbatches)
        divisors = torch.stack([divisor(Batch(batch), self._loss_type) for batch in microbatches])
        divisors = divisors.repeat_interleave(size)
        parts = [self._part(whole, rows, divisors) for rows in in_equal_parts(units, passes)] if passes else []
        return [{} for _ in range(len(microbatches) - passes)] + parts

    def _part(self, whole: Batch, rows: list[int], divisors: torch.Tensor) -> dict[str, Any]:
        """
        A microbatch of some `rows` of the `whole`; of none, one without an advantage that does not count. `divisors`
        `[B]` are what the sequences' parts of the loss are to be divided by.
        """
        chosen = rows + self._filling(whole, rows)
        part = Batch(rows_of_batch(whole, chosen))
        weights = divisor(part, self._loss_type) / divisors[chosen]
        weights[len(rows) :] = part.advantages[len(rows) :] = 0
        part.loss_weights = weights
        return part

    @staticmethod
    def _filling(whole: Batch, rows: list[int]) -> list[int]:
        """Which sequence fills in, if one has to: there are none, or none of them has an image as others have."""
        with_image = [row for row, images in enumerate(whole.get("num_images") or []) if images]
        if with_image and not set(with_image).intersection(rows):
            return with_image[:1]
        return [] if rows else (whole.advantages == 0).nonzero()[0].tolist()
