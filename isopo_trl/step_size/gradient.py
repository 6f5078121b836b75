"""What is looked at in the gradient of a step, right before the optimizer gets it."""

import math
from typing import Any

from accelerate.logging import get_logger

from ..rules.rule import Rule


logger = get_logger(__name__)

# Multiple of max_grad_norm from which on clipping takes a gradient's length away
CUT_AWAY = 100


class GradientCheck:
    """Refuses gradients that are not finite, and says once where clipping leaves nothing of their length."""

    def __init__(self, rule: Rule, args: Any):
        self._rule, self._args = rule, args
        self._clipping_was_said = False

    def passed(self, figures: dict[str, float]) -> dict[str, float]:
        """The figures of a step, as [`ISOPO.step`] returned them, without the ones that it passes or fails by."""
        others = dict(figures)
        broken, by_rule = int(others.pop("broken_sequences")), int(others.pop("broken_by_rule", 0))
        if by_rule:
            raise FloatingPointError(
                f"rule={self._rule.name!r} returned coefficients that are not finite, at {by_rule} layers, "
                "though the gradients and their norms are: look at what it divides by and takes the root of, and "
                "return 0 for a sequence without a gradient. The weights have not been updated with them, and the "
                "running statistics do not contain them."
            )
        if broken:
            raise FloatingPointError(
                f"Gradients of this step are not finite (statistics of {broken} sequences are affected): lower the "
                "learning rate, or train in bf16 or fp32. The weights have not been updated with them, and the "
                "running statistics do not contain them."
            )
        norm = others.pop("grad_norm", 0.0)
        if not math.isfinite(norm):
            _refuse(norm, f", the largest multiplier is {figures['multiplier_max']:.3g} times the mean one")
        self._warn_of_clipping(norm)
        return others

    def of_deepspeed(self, norm: float, stepped: bool) -> None:
        """Take the norm that DeepSpeed has found, -1 in places for one that is not finite; `stepped`: it went on."""
        if not 0 <= norm < math.inf:
            _refuse(norm, stepped=stepped)
        self._warn_of_clipping(norm)

    def _warn_of_clipping(self, norm: float) -> None:
        """Say once that the units of a gradient to the letter of the paper are cut away, with its length in them."""
        args = self._args
        allowed = args.max_grad_norm or math.inf
        found = self._rule.scale == "paper" and args.target_kl is None and norm > CUT_AWAY * allowed
        if self._clipping_was_said or not found:
            return
        self._clipping_was_said = True
        letter, other = "scale='paper'", "set scale='relative', "
        if args.scale != "paper":  # and cannot be anything else
            letter, other = f"rule={args.rule!r}", ""
        logger.warning(
            f"{letter} leaves the gradient in the units of the rule, and max_grad_norm={allowed:g} cuts it to "
            f"{allowed / norm:.1g} of its length in this step (grad_norm={norm:,.4g}), so that every step has the "
            f"length of the bound: raise max_grad_norm to where grad_norm is, {other}or let target_kl find how long "
            "steps are. This is said once."
        )


def _refuse(norm: float, largest: str = "", stepped: bool = False) -> None:
    raise FloatingPointError(
        f"The gradient of this step overflows: its norm is {norm}{largest}, though each sequence's own gradient is "
        "finite. "
        + (
            "DeepSpeed has stepped all the same, so the weights are lost: go back to the last checkpoint. "
            if stepped
            else "The weights and the optimizer are as they were before the step. "
        )
        + "A lower learning rate does not help. Scale the rewards down (or set scale_rewards='group'), and where "
        "multipliers are large, raise `regularization`, take exponents nearer to 0, or set scale='relative'."
    )
