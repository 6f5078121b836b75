"""
The terms of the loss that carry no advantage, and that no rule may rescale: the KL divergence to the reference model,
the entropy bonus, and the load-balancing loss of mixtures of experts.

TRL's own loss computes them, since with advantages of zero it consists of nothing else: it is called once more, on
what the one forward pass has returned. Only the load-balancing loss, which has no part in what policies are compared
by, can stay in the loss where it is alone, and its derivative is asked for by itself. From there they need a backward
pass of their own, or none where they vanish.
"""

from dataclasses import dataclass, field
from typing import Any

import torch

from ..token_weights.ratios import log_ratios
from ..trl_seam.batch import Batch
from ..trl_seam.loss import Figures, Outputs, TRLLoss


@dataclass(frozen=True)
class Derivative:
    """
    How a term depends on an output of the forward pass.

    Args:
        output (`torch.Tensor`): log-probabilities or entropies `[B, C]`, or the load-balancing loss, with gradient.
        slope (`torch.Tensor`): of the same shape, the term's derivative with respect to it.
    """

    output: torch.Tensor
    slope: torch.Tensor

    @property
    def vanishes(self) -> torch.Tensor:
        """A bool, on the device."""
        return ~(self.slope != 0).any()

    @property
    def term(self) -> torch.Tensor:
        """Scalar with the term's gradient."""
        return (self.slope * self.output).sum()


@dataclass(frozen=True)
class LossTerms:
    """
    The terms of one microbatch: their `value`, a scalar without gradient, one of the `derivatives` for each output of
    the forward pass that they depend on, and what TRL logs of them.
    """

    value: torch.Tensor
    derivatives: list[Derivative] = field(default_factory=list)
    figures: Figures = field(default_factory=dict)


class Terms:
    """
    The terms that a trainer's settings ask for.

    Attributes:
        settings (`list[str]`): the settings, as `name=value`; empty where there are no terms.
        needs_behaviour (`bool`): whether the KL divergence is corrected by the ratio to the policy that drew the
            tokens, and this can be an older one.
        needs_reference (`bool`): whether there is a KL divergence to the reference model in the loss.
        has_bonus (`bool`): whether entropies have a gradient.
        are_balance (`bool`): whether there is the load-balancing loss alone: it is left in the policy's then, and
            TRL's loss need not be called again.
        chosen (`dict[str, Any]`): the settings by which a checkpoint knows them again.
    """

    def __init__(self, trainer: Any):
        args, adaptive = trainer.args, trainer.use_adaptive_entropy
        coefficients = {
            "beta": 0.0 if args.kl_in_reward else trainer.beta,
            "use_adaptive_entropy": adaptive,
            "entropy_coef": 0.0 if adaptive else trainer.entropy_coef,
            "router_aux_loss_coef": trainer.router_aux_loss_coef if trainer.aux_loss_enabled else 0.0,
        }
        self.settings = [f"{name}={value}" for name, value in coefficients.items() if value]
        self.needs_reference = bool(coefficients["beta"])
        self.are_balance = [name for name, value in coefficients.items() if value] == ["router_aux_loss_coef"]
        self.has_bonus = bool(adaptive or coefficients["entropy_coef"])
        self.needs_behaviour = self.needs_reference and args.use_bias_correction_kl and args.uses_stale_data
        # Of the arguments, since an adaptive coefficient moves; but for the one that may be the model's
        names = ("beta", "kl_in_reward", "use_bias_correction_kl", "entropy_coef", "use_adaptive_entropy")
        balance = coefficients["router_aux_loss_coef"]
        self.chosen = {**{name: getattr(args, name) for name in names}, "router_aux_loss_coef": balance}

    def __bool__(self) -> bool:
        return bool(self.settings)

    def of_policy(
        self, loss: TRLLoss, batch: Batch, outputs: Outputs, advantages: torch.Tensor
    ) -> tuple[torch.Tensor, Figures]:
        """
        The rest of TRL's `loss` of a batch, and what TRL logs of it; `advantages` `[B]`, where those of the batch are
        only their signs.
        """
        value, figures = loss.of_policy(batch, outputs, self.are_balance)
        if self.has_bonus:
            figures["policy_loss"] = loss.policy_loss_figure(batch.with_advantages(advantages), outputs)
        return value, figures

    def __call__(self, loss: TRLLoss, batch: Batch, outputs: Outputs, behaviour: torch.Tensor | None) -> LossTerms:
        """
        The terms of a microbatch, by TRL's `loss`; `behaviour` `[B, C]` are log-probabilities under an older policy
        that drew the tokens, NaN where nobody knows, and `None` where the policy itself drew them.
        """
        if not self:
            return LossTerms(outputs.logps.new_zeros(()))
        alone = batch.with_advantages(torch.zeros_like(batch.advantages))
        logps = outputs.logps.detach()
        alone.old_logps = None if behaviour is None else logps - log_ratios(logps, behaviour)
        terms, figures = loss.of_terms(alone, outputs)
        derivatives = []
        if terms.requires_grad:
            taken_from = [output for output in outputs if output is not None]
            slopes = torch.autograd.grad(terms, taken_from, retain_graph=True, allow_unused=True)
            both = zip(taken_from, slopes, strict=True)
            derivatives = [Derivative(output, slope) for output, slope in both if slope is not None]
        return LossTerms(terms.detach(), derivatives, figures)

    def within(self, loss: torch.Tensor, aux_loss: torch.Tensor | None, outputs: Outputs) -> LossTerms:
        """
        The terms of a microbatch that are in the policy's `loss` (scalar): the load-balancing loss, of which it has
        the leaf `aux_loss`.
        """
        derivatives = []
        if aux_loss is not None and aux_loss.requires_grad:
            assert outputs.aux_loss is not None
            (slope,) = torch.autograd.grad(loss, [aux_loss], retain_graph=True)
            derivatives = [Derivative(outputs.aux_loss, slope)]
        return LossTerms(loss.new_zeros(()), derivatives)

    def figures(self, of_policy: Figures, terms: LossTerms) -> Figures:
        """What TRL would have logged of the whole loss."""
        figures = {**terms.figures, **of_policy}
        if self.has_bonus:  # TRL has the KL divergence in it
            both = zip(terms.figures["policy_loss"], of_policy["policy_loss"], strict=True)
            figures["policy_loss"] = [sum(parts) for parts in both]
        return figures
