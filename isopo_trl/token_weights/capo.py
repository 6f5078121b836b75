r"""
CAPO ([Stabilizing Policy Gradients for Sample-Efficient Reinforcement Learning in LLM
Reasoning](https://huggingface.co/papers/2510.00819)), for plain gradient steps: `w_t = r_t`, and 0 for tokens by which
a step at the LM head would change the objective or the policy too much.

With `h` the last hidden state, `pi` the policy's probabilities, `v = onehot(y_t) - pi` and `eta` the learning rate, a
token by itself has the gradient `A v h^T` at the head, and a step along it moves the logits by `eta u`, `u = A |h|^2
v`. Objective and policy then change, to second order, by

    m_H = eta A^2 |v|^2 |h|^2 + eta^2/2 A [(v.u)^2 - (sum pi u^2 - (sum pi u)^2)]
    m_F = eta^2/2 (v.u)^2

and a token passes where `|m_H| < tau_H` and `m_F < tau_F`. Of `pi` both need no more than the token's own probability
`p` and the sums of squares and cubes: `|v|^2 = 1 - 2 p + sum pi^2`, `v.u = A |h|^2 |v|^2`, and the variance in the
bracket is `A^2 |h|^4 [sum pi^3 + p - 2 p^2 - (p - sum pi^2)^2]`.

The formulas and `tau_H = 0.01`, `tau_F = 1e-4` are those of the authors' code (luckeciano/stable-pg-llm) for SGD; it
takes the `top_k` most likely tokens for the vocabulary, which is whole here, as in the loss. Its Adam's moments in the
formulas, and its clipping of `r`, are not part of this.
"""

import torch

from ..geometry.statistics import scalar_dtype
from ..settings.ranges import GIVE_ABOVE_0
from ..trl_seam.head import HeadFigures
from .gates import Gated, advantage_of_tokens
from .weighting import Tokens, register


@register("capo")
class CAPO(Gated):
    """Ratios, gated by what a plain step at the LM head does to the objective and to the policy."""

    title = "CAPO"
    credit = "Tokens were weighted by [CAPO](https://huggingface.co/papers/2510.00819), in its form for SGD."
    settings = kept_on_resume = ("capo_tau_h", "capo_tau_f")
    ranges = {
        "capo_tau_h": (GIVE_ABOVE_0, "is the change of the objective from which on a token is gated"),
        "capo_tau_f": (GIVE_ABOVE_0, "is the change of the policy from which on a token is gated"),
    }
    of_plain_steps = True

    def gated(self, tokens: Tokens) -> torch.Tensor:
        advantages = advantage_of_tokens(tokens)
        if tokens.head is None or tokens.learning_rate is None:
            raise ValueError(
                "Tokens are weighted by what a step does at the LM head, and nobody has asked it: pass `head` and "
                "`learning_rate`."
            )
        of_objective, of_policy = changes(tokens.logps.detach(), tokens.head, advantages, tokens.learning_rate)
        passes = (of_objective.abs() < self.args.capo_tau_h) & (of_policy < self.args.capo_tau_f)
        return tokens.log_ratio.detach().exp().masked_fill(~passes, 0)


def changes(
    logps: torch.Tensor, head: HeadFigures, advantages: torch.Tensor, rate: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """
    `m_H` and `m_F` of tokens with the log-probabilities `logps` `[B, C]`; `[B, C]` each.

    Args:
        logps (`torch.Tensor`): `[B, C]`.
        head ([`HeadFigures`]): `[B, C]`.
        advantages (`torch.Tensor`): `[B, 1]`.
        rate (`float`): the learning rate.
    """
    dtype = scalar_dtype(logps.device)
    p, A = logps.to(dtype).exp(), advantages.to(dtype)
    hidden, squares, cubes = (x.to(dtype) for x in (head.hidden, head.squares, head.cubes))
    error = (1 - 2 * p + squares).clamp(min=0)
    along = (A * hidden * error).square()
    variance = (A * hidden).square() * (cubes + p - 2 * p.square() - (p - squares).square())
    of_objective = rate * A.square() * error * hidden + rate**2 / 2 * A * (along - variance)
    return of_objective, rate**2 / 2 * along
