"""
G2RL ([Can LLMs Guide Their Own Exploration?](https://huggingface.co/papers/2512.15687)): completions that would turn
the policy in another direction than the others of their group have larger rewards. With the rows `W` of the LM head,

    phi_t = W_y - sum_v p_v W_v,   Phi = mean of phi_t, of unit length,   S_ij = <Phi_i, Phi_j>
    w_ij = softmax of the others' rewards,   nu_i = max(1 - sum_j w_ij S_ij^2, 0)
    r' = r (1 + lambda r nu), within +-3

and advantages are made of `r'` as usual. Rewards are 1 and -1. `nu` is scaled to 0..1 in the group: the least becomes
0 and the largest 1, or all 0 if they are the same, to 1e-6.

For wrong answers the paper's text and its formula disagree. This is the formula: with `r = -1`, `r' = -1 + lambda nu`,
so that a wrong answer in a new direction is punished less. `lambda` is not given there, and has to be chosen.

A completion without scored tokens has no direction: it keeps its reward, and is none of the others.
"""

import torch

from ..settings.ranges import GIVE_AT_LEAST_0
from .transform import Generation, Transform, register


LARGEST = 3.0
SAME = 1e-6  # novelties that are no further apart differ by roundings of the model's


@register("g2rl")
class G2RL(Transform):
    """Rewards, scaled by the novelty of a completion's direction. Costs a forward pass for each completion."""

    title = "G2RL"
    credit = "Rewards were scaled by novelty, as in [G2RL](https://huggingface.co/papers/2512.15687)."
    stage = "rewards"
    settings = ("g2rl_lambda",)
    _meaning = "is how much novelty scales a reward, for which the paper has no number"
    ranges = {"g2rl_lambda": (GIVE_AT_LEAST_0, _meaning)}
    takes_rewards = (1, -1)
    gives_any_reward = True
    needs_head = True

    def apply(self, generation: Generation) -> torch.Tensor:
        rewards = generation.rewards
        shaped = rewards.clone()
        for places in generation.places():
            places = places[generation.rollout.has_tokens[places]]
            if len(places) > 1:
                nu = novelty(generation.rollout.sensitivities[places], rewards[places])
                factor = 1 + self.args.g2rl_lambda * rewards[places] * nu
                shaped[places] = (rewards[places] * factor).clamp(-LARGEST, LARGEST)
        return shaped


def novelty(directions: torch.Tensor, rewards: torch.Tensor) -> torch.Tensor:
    """`nu` `[G]`, scaled to 0..1, of a group's `directions` `[G, d]` of any length, and its `rewards` `[G]`."""
    cosines = torch.nn.functional.normalize(directions, dim=1)
    cosines = cosines @ cosines.T
    others = rewards.expand(len(rewards), -1).masked_fill(torch.eye(len(rewards), dtype=torch.bool), -torch.inf)
    nu = (1 - (others.softmax(1) * cosines.square()).sum(1)).clamp(min=0)
    least, largest = nu.aminmax()
    return (nu - least) / (largest - least) if largest - least > SAME else torch.zeros_like(nu)
