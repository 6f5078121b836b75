"""The loss of a microbatch, in parts: the policy's, which a rule rescales, and the terms without an advantage."""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch

from ..token_weights import Weighting, ratio_loss
from ..trl_seam.batch import Batch
from ..trl_seam.head import HeadFigures, head_figures_noted
from ..trl_seam.loss import Figures, Outputs, TRLLoss, without_graph
from .forward import Weighed, broken_sequences, weigh
from .sampler import behaviour_logps, is_fresh
from .terms import Derivative, LossTerms, Terms


@dataclass(frozen=True)
class LossParts:
    """
    The parts of one microbatch's loss.

    Args:
        outputs ([`Outputs`]): of the forward pass.
        behaviour (`torch.Tensor`, *optional*): `[B, C]`, what the tokens were drawn with, where anybody asks.
        weighed ([`Weighed`]): the forward pass with its tokens weighed.
        logps (`torch.Tensor`): `[B, C]`, the leaf of which `policy` is computed.
        policy (`torch.Tensor`): scalar, the policy's loss.
        terms ([`LossTerms`]): those without an advantage.
        moving (`list[Derivative]`): of these, the ones that do not vanish on every rank.
        figures (`Figures`): what TRL would have logged of the whole loss.
    """

    outputs: Outputs
    behaviour: torch.Tensor | None
    weighed: Weighed
    logps: torch.Tensor
    policy: torch.Tensor
    terms: LossTerms
    moving: list[Derivative]
    figures: Figures

    def going_back(
        self, batch: Batch, signs: torch.Tensor, loss_type: str
    ) -> tuple[Derivative, list[Derivative], torch.Tensor]:
        """
        What goes back through the model of the policy's loss, which has the `signs` `[B]` for the advantages of the
        `batch`; what goes back of terms without an advantage, the weighting's among them; and the value of the whole
        loss, with the advantages in it.
        """
        weighed, moving = self.weighed, self.moving
        # The loss is proportional to each |A_s|, so its value with the advantages in it follows from the derivative
        by_weights = [] if weighed.weights is None else [weighed.weights]
        slope, by_logps, *by_weights = torch.autograd.grad(self.policy, [signs, self.logps, *by_weights])
        value = self.policy.detach() + ((batch.advantages * batch.loss_weights - signs.detach()) * slope).sum()
        value = value + self.terms.value
        pull = None if weighed.weighted.unscaled is None else weighed.weighted.unscaled()
        if pull is not None:
            # By what the loss multiplies a token: its normalisation, and TRL's masks
            share = -by_weights[0] * ratio_loss.signs(batch.advantages, loss_type).unsqueeze(1)
            value = value + (share * pull.value).sum()
            moving = [*moving, Derivative(self.outputs.logps, share * pull.slope)]
        return Derivative(weighed.outputs.logps, by_logps), moving, value


class LossInParts:
    """Takes TRL's loss apart."""

    def __init__(self, weighting: Weighting, terms: Terms, accelerator: Any, needs_behaviour: bool):
        self._weighting, self._terms, self._accelerator = weighting, terms, accelerator
        self._needs_behaviour = needs_behaviour

    def __call__(
        self,
        trl_loss: TRLLoss,
        batch: Batch,
        optimizer_steps: int,
        rate: Callable[[], float],
        signs: torch.Tensor | None = None,
        policy_in: AbstractContextManager[None] | None = None,
    ) -> LossParts:
        """
        The loss of a batch; raises where its log-probabilities are not finite.

        Args:
            trl_loss, batch, optimizer_steps: TRL's loss, the microbatch, and the number of optimizer steps up to now.
            rate (`Callable`): returns the learning rate of the step under way, where a weighting asks for it.
            signs (`torch.Tensor`, *optional*): `[B]`, in place of the advantages in the policy's loss.
            policy_in (`AbstractContextManager`, *optional*): in which that is computed.
        """
        advantages, of_policy = batch.advantages, batch if signs is None else batch.with_advantages(signs)
        outputs, head = self._forward(trl_loss, batch)
        behaviour = None
        if self._needs_behaviour:
            behaviour = behaviour_logps(of_policy, outputs.logps.detach(), optimizer_steps)
        learning_rate = rate() if self._weighting.of_plain_steps else None
        weighed = weigh(self._weighting, of_policy, outputs, behaviour, advantages, head, learning_rate)
        leaves = without_graph(weighed.outputs)
        with policy_in or nullcontext():
            policy, figures = self._terms.of_policy(trl_loss, weighed.batch, leaves, advantages)
        if self._terms.are_balance:
            terms = self._terms.within(policy, leaves.aux_loss, outputs)
        else:  # of an older policy, where they ask for it and there was one
            older = self._terms.needs_behaviour and not is_fresh(batch, optimizer_steps)
            terms = self._terms(trl_loss, weighed.batch, outputs, behaviour if older else None)
        moving = self._moving(outputs, batch, terms)
        figures = self._terms.figures(figures, terms)
        return LossParts(outputs, behaviour, weighed, leaves.logps, policy, terms, moving, figures)

    def _forward(self, trl_loss: TRLLoss, batch: Batch) -> tuple[Outputs, HeadFigures | None]:
        """The forward pass of the loss, and what the LM head says of tokens, `[B, C]`, where anybody asks."""
        if not self._weighting.of_plain_steps:
            return trl_loss.forward(batch), None
        with head_figures_noted() as noted:
            outputs = trl_loss.forward(batch)
        (figures,) = noted
        return outputs, figures.of_completions(batch.completion_mask, batch.attention_mask.size(1))

    def _moving(self, outputs: Outputs, batch: Batch, terms: LossTerms) -> list[Derivative]:
        broken = broken_sequences(outputs.logps, batch)
        # Here, where TRL has waited for the device already; over ranks, so that none is left waiting
        counts = torch.stack([broken, *(~derivative.vanishes for derivative in terms.derivatives)])
        broken, *moving = self._accelerator.reduce(counts, reduction="sum").tolist()
        if broken:
            raise FloatingPointError(
                f"The model's log-probabilities are not finite for {broken} sequences of this microbatch: lower the "
                "learning rate or max_grad_norm, or train in bf16 or fp32. The running statistics and the weights "
                "have not been touched by this step."
            )
        return [derivative for derivative, moves in zip(terms.derivatives, moving, strict=True) if moves]
