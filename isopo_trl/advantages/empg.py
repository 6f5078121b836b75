"""
EMPG (entropy-modulated policy gradients, as ARLArena has it): confident steps of an agent count more. With the mean
entropy `H` of a step's tokens, scaled to 0..1 over the batch,

    g = exp(-k H) / mean of exp(-k H),   A' = A g + zeta exp(-k H of the next step)

and the mean of A' over all steps is subtracted. `k` is 1.

This is the case of one turn: a completion is one step, there is no next one, and the term with `zeta` (0.05 or 0.1 in
the sources) is not there. The batch is the generation, of all ranks. Since its mean is subtracted, a group in which
all rewards are the same has an advantage, too. A completion without scored tokens has no entropy: it keeps its
advantage, and is left out of the scale and of both means.
"""

import torch

from ..settings.ranges import GIVE_AT_LEAST_0
from .transform import Generation, Transform, register


@register("empg")
class EMPG(Transform):
    """Advantages, weighed by how certain a completion's tokens were. Costs a forward pass over the generation."""

    title = "EMPG"
    credit = "Advantages were modulated by entropy, as in EMPG."
    settings = ("empg_k",)
    ranges = {"empg_k": (GIVE_AT_LEAST_0, "is how much less uncertain completions count")}
    needs_one_turn = True

    def apply(self, generation: Generation) -> torch.Tensor:
        counted = generation.is_scored & generation.rollout.has_tokens
        if not counted.any():
            return generation.advantages
        weights = modulation(generation.rollout.entropies[counted], self.args.empg_k)
        modulated = generation.advantages[counted] * weights
        return generation.advantages.masked_scatter(counted, modulated - modulated.mean())


def modulation(entropies: torch.Tensor, k: float) -> torch.Tensor:
    """`g` `[N]`, of mean 1, of the mean entropies `[N]`."""
    least, largest = entropies.aminmax()
    scaled = (entropies - least) / (largest - least) if largest > least else torch.zeros_like(entropies)
    confidence = (-k * scaled).exp()
    return confidence / confidence.mean()
