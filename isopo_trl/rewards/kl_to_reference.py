"""The KL divergence to the reference model, subtracted from the reward."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from accelerate.logging import get_logger

from ..trl_seam.scoring import Scoring


logger = get_logger(__name__)


class KLReward:
    """
    Reward function: an estimate of the KL divergence from the reference model, summed over each completion. It is the
    trainer's last reward, with weight `-beta`.

    The reference model's log-probabilities are those of the pass that TRL makes over a generation anyway. The policy's
    are the sampler's, where the policy itself drew the tokens, else they cost a pass.
    """

    name = "kl_to_reference"

    def __init__(self, scoring: Scoring, accelerator: Any, log: Callable[[dict[str, float]], None]):
        self._scoring, self._accelerator, self._log = scoring, accelerator, log
        self._forget()

    def _forget(self) -> None:
        # Of the generation under way: the reference model's pass and its arguments, and what `generated` was given
        self._reference: tuple[torch.Tensor, tuple[Any, ...], dict[str, Any]] | None = None
        self._tool_mask: list[list[int]] | None = None
        self._sampler_logps: list[list[float]] | None = None

    @contextmanager
    def listening(self) -> Iterator[None]:
        """Context of one generation, in which the reference model's pass is noted."""
        try:
            with self._scoring.passes_noted(self._scored):
                yield
        finally:
            self._forget()

    def _scored(self, logps: torch.Tensor, model: Any, *args: Any, **kwargs: Any) -> None:
        if self._scoring.is_reference(model):
            self._reference = logps, args, kwargs

    def generated(self, tool_mask: list[list[int]] | None, policy_logps: list[list[float]] | None) -> None:
        """
        Take what is known of the completions under way: masks that are 0 at tokens that a tool wrote, and the
        policy's own log-probabilities, if the sampler's are.
        """
        self._tool_mask, self._sampler_logps = tool_mask, policy_logps

    def __call__(self, **kwargs: Any) -> list[float]:
        if self._reference is None:
            raise RuntimeError(
                "TRL asked for the divergence from the reference model, but made no pass of the reference model over "
                "this generation: `kl_in_reward` needs `beta` of the trainer to stay different from 0."
            )
        reference_logps, arguments, keywords = self._reference
        _, attention_mask, logits_to_keep, *_ = arguments
        mask = attention_mask[:, -logits_to_keep:].float()
        mask = mask * _padded(self._tool_mask, mask, fill=1)
        if self._sampler_logps is not None:
            logps = _padded(self._sampler_logps, mask, fill=0)
        else:
            logps = self._scoring.score_without_gradient(*arguments, **keywords)
        # A token that the sampler could not score says nothing about the divergence
        kl = torch.nan_to_num(logps - reference_logps, nan=0.0) * mask
        totals = self._accelerator.reduce(torch.stack([kl.sum(), mask.sum()]), reduction="sum")
        self._log({"kl": (totals[0] / totals[1].clamp(min=1.0)).item()})
        return kl.sum(dim=1).tolist()

    def leave_out_unscored(self, rewards: torch.Tensor) -> None:
        """Take the divergence, the last of the `rewards` `[B, functions]`, from completions with no other reward."""
        unscored = torch.isnan(rewards[:, :-1]).all(dim=1)
        if unscored.any():
            logger.warning(
                f"All reward functions returned None for {int(unscored.sum())} of {len(unscored)} completions, "
                "which are left out: please ensure that at least one returns a valid reward."
            )
        rewards[:, -1] = rewards[:, -1].masked_fill(unscored, torch.nan)


def _padded(rows: list[list] | None, like: torch.Tensor, fill: float) -> torch.Tensor:
    """Lists of numbers (or `None` in place of one) as a tensor of the shape of `like`, filled up on the right."""
    padded = torch.full_like(like, fill)
    for row, values in enumerate(rows or []):
        values = [float("nan") if value is None else float(value) for value in values]
        padded[row, : len(values)] = torch.tensor(values, dtype=like.dtype)
    return padded
