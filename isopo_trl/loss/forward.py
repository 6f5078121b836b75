"""What the loss's forward pass is good for, before the loss is computed: tokens are weighed, and broken ones found."""

from dataclasses import dataclass

import torch

from ..token_weights import Weighted, Weighting
from ..trl_seam.batch import Batch
from ..trl_seam.head import HeadFigures
from ..trl_seam.loss import Outputs
from .sampler import PROMPT_NUMBERS


def broken_sequences(logps: torch.Tensor, batch: Batch) -> torch.Tensor:
    """Number of sequences whose log-probabilities `[B, C]` are not finite, on the device."""
    return (~torch.isfinite(logps.detach()) & batch.scored.bool()).any(dim=1).sum()


@dataclass(frozen=True)
class Weighed:
    """
    A forward pass whose tokens have been weighed.

    Args:
        weighted ([`Weighted`]): what the weighting has said.
        batch ([`Batch`]): what TRL's loss is to be computed of, with the weights in it.
        outputs ([`Outputs`]): what TRL's loss is to take for the outputs of the forward pass: those, or in place of
            log-probabilities log-ratios, which TRL clips.
        weights (`torch.Tensor`, *optional*): `[B, C]`, the weights as a leaf, where a term without an advantage has
            to know what the loss multiplies a token by.
    """

    weighted: Weighted
    batch: Batch
    outputs: Outputs
    weights: torch.Tensor | None = None


def weigh(
    weighting: Weighting,
    batch: Batch,
    outputs: Outputs,
    behaviour: torch.Tensor | None,
    advantages: torch.Tensor,
    head: HeadFigures | None = None,
    learning_rate: float | None = None,
) -> Weighed:
    """
    Weigh the tokens of a batch.

    Args:
        weighting, batch, outputs: who says by how much, of what, and the forward pass.
        behaviour (`torch.Tensor`, *optional*): `[B, C]`, log-probabilities under the policy that drew the tokens, NaN
            where nobody knows; `None` where nobody asks.
        advantages (`torch.Tensor`): `[B]`, where the loss may have the signs alone.
        head, learning_rate (*optional*): as in [`Tokens`].
    """
    if behaviour is None:
        return Weighed(Weighted(), batch, outputs)
    if not weighting.needs_behaviour:  # it is asked for, but not for a ratio in the policy's part of the loss
        return Weighed(Weighted(), batch.weighed(), outputs)
    logps = outputs.logps
    known = {"ids": batch.get("completion_ids"), "prompts": batch.get(PROMPT_NUMBERS), "head": head}
    weighted = weighting(logps, behaviour, batch.counted, advantages, **known, learning_rate=learning_rate)
    if weighted.old_logps is not None:
        old = weighted.old_logps
        return Weighed(weighted, batch.weighed(old_logps=old, sampler_logps=old), outputs)
    if weighted.log_ratio is not None:
        # TRL subtracts the old log-probabilities from the ratios
        ratio = weighted.log_ratio
        weighed = batch.weighed(weighted.weights, old_logps=ratio.new_zeros(ratio.shape), sampler_logps=behaviour)
        return Weighed(weighted, weighed, outputs._replace(logps=ratio))
    weights, leaf = weighted.weights, None
    if weighted.unscaled is not None and torch.is_grad_enabled():
        leaf = torch.ones_like(logps) if weights is None else weights.expand_as(logps)
        weights = leaf = leaf.detach().requires_grad_()
    return Weighed(weighted, batch.weighed(weights, sampler_logps=behaviour), outputs, leaf)
