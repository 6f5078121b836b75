"""
Losses of the ratio `r = pi_theta / pi_behaviour` itself, by TRL's own code: GRPO's clipped objective `min(r A, clip(r)
A)` (`epsilon`, `epsilon_high`, `delta`), CISPO, SAPO and VESPO, at the level of tokens or of sequences (GSPO).

TRL's old policy is here the behaviour policy, whose log-probabilities the sampler has noted, so that no pass is made
for them. Each of these losses looks at an advantage's sign and is proportional to its size, which is all that a rule
asks for: `V_s` is the gradient of the loss with the sign alone.
"""

from collections.abc import Iterator
from typing import Any

import torch
from trl import GRPOConfig

from ..trl_seam.generation import samples_at_temperature
from .sampler import SamplerCorrection
from .weighting import Tokens, Weighted, Weighting, named


# Clipped where a range is given; without one the ratio is 1, and they are normalisations of the log-probability
CLIPPED = ("grpo", "bnpo", "dr_grpo", "dapo", "luspo")
# Defined by what they do with the ratio, and by these settings
BY_RATIO = {
    "cispo": (),
    "sapo": ("sapo_temperature_neg", "sapo_temperature_pos"),
    "vespo": ("vespo_k_pos", "vespo_lambda_pos", "vespo_k_neg", "vespo_lambda_neg"),
}
LOSS_TYPES = (*CLIPPED, *BY_RATIO)
RANGE = ("epsilon", "epsilon_high", "delta")


def clipping(args: Any) -> list[str]:
    """What was given of a clipping range, as `name=value`, but for what the token weights take for themselves."""
    taken = named(args.token_weights or "none").defaults
    return args.given(*(name for name in RANGE if name not in taken))


def takes_ratio(args: Any) -> bool:
    """Whether the loss is one of the ratio to the behaviour policy."""
    return args.loss_type in BY_RATIO or bool(clipping(args))


def clipping_range(args: Any) -> tuple[float, float]:
    """`epsilon` and `epsilon_high` as TRL's loss reads them, with GRPO's defaults for what was not given."""
    low: float = GRPOConfig.epsilon if args.epsilon is None else args.epsilon
    return low, low if args.epsilon_high is None else args.epsilon_high


def of_loss(args: Any) -> dict[str, Any]:
    """The settings of the loss by which a checkpoint knows it again, whether it takes the ratio or not."""
    always = (*RANGE, "importance_sampling_level", "loss_type", "off_policy_mask_threshold")
    names = (*always, *BY_RATIO.get(args.loss_type, ()))
    return {name: getattr(args, name) for name in names}


def signs(advantages: torch.Tensor, loss_type: str) -> torch.Tensor:
    """The advantages `[B]` as the loss gets them, 1 or -1: all that its logic depends on."""
    # No advantage is as good as any, since nothing comes of it but TRL's count of clipped tokens, which for CISPO are
    # those above the cap of sequences with a positive advantage
    negative = advantages <= 0 if loss_type == "cispo" else advantages < 0
    return torch.where(negative, -1.0, 1.0).to(advantages.dtype)


def refusals(args: Any) -> Iterator[tuple[bool, str]]:
    """Pairs of whether a setting of the loss cannot be honoured, and the message that says so."""
    weights, given = named(args.token_weights), clipping(args)
    yield (
        args.loss_type not in LOSS_TYPES,
        f"loss_type={args.loss_type!r} is unknown: choose one of {', '.join(map(repr, LOSS_TYPES))}.",
    )
    yield (
        weights.needs_behaviour and args.loss_type in BY_RATIO,
        f"loss_type={args.loss_type!r} weighs tokens by their ratio to the behaviour policy, and so does "
        f"token_weights={weights.name!r}: set token_weights='none', or loss_type to one of "
        f"{', '.join(map(repr, CLIPPED))}.",
    )
    yield (
        weights.needs_behaviour and bool(given),
        f"{', '.join(given)} clips the ratio to the behaviour policy, by which token_weights={weights.name!r} weighs "
        "tokens already: remove it, or set token_weights='none' (token_weights='kpo' clips filtered ratios).",
    )
    yield (
        not all(x is None or x >= 0 for x in (args.epsilon, args.epsilon_high)),
        f"epsilon={args.epsilon} and epsilon_high={args.epsilon_high} are distances from 1 at which ratios are "
        "clipped: neither can be negative.",
    )
    cap = clipping_range(args)[1]
    yield (
        args.loss_type == "cispo" and not cap > 0,
        f"epsilon_high={cap} is the largest weight that a token can have with loss_type='cispo': give a number above "
        "0, such as 5.0.",
    )
    # Of VESPO's mode TRL has an opinion of its own
    bounds = args.given(*SamplerCorrection.settings[args.loss_type == "vespo" :])
    yield (
        args.use_vllm and args.vllm_importance_sampling_correction and takes_ratio(args) and bool(bounds),
        f"{', '.join(bounds)} is a setting of {SamplerCorrection.title}, but the ratio of "
        f"{', '.join(given) or f'loss_type={args.loss_type!r}'} is to the sampler already: remove the one or the "
        "other.",
    )


class RatioLoss(Weighting):
    """
    No weights, but an old policy for TRL's loss: the behaviour policy, where the loss asks for the ratio to one. The
    off-policy mask compares with the behaviour policy, too.
    """

    name = "none"
    settings = (*RANGE, "importance_sampling_level")
    looks_across_sequences = False

    @classmethod
    def refusals(cls, args: Any) -> Iterator[tuple[bool, str]]:
        yield from ()

    def warnings(self) -> list[str]:
        args, found = self.args, []
        low, high = clipping_range(args)
        if args.loss_type == "cispo" and high < 1:
            found.append(
                f"loss_type='cispo' caps ratios at epsilon_high, which is {high}: below 1 that makes nearly all "
                "weights equal. TRL recommends epsilon_high=5.0."
            )
        if args.loss_type in CLIPPED and takes_ratio(args) and not samples_at_temperature(args):
            found.append(
                "Tokens are not sampled from the distribution that is trained (top_p, top_k, min_p, "
                "repetition_penalty, generation_kwargs), so ratios to the sampler are not 1 from the first step, and "
                f"some may be clipped already (epsilon={low}, epsilon_high={high}): watch clip_ratio/region_mean, or "
                "sample at `temperature` alone."
            )
        return found

    def weigh(self, tokens: Tokens) -> Weighted:
        if not takes_ratio(self.args):
            return Weighted()
        own, z = tokens.logps.detach(), tokens.log_ratio.detach()
        # As they are, unless the ratio was cut: nothing is lost to rounding
        old = torch.where(own - tokens.behaviour == z, tokens.behaviour, own - z)
        if tokens.advantages is not None and self.args.loss_type != "vespo":
            # Without an advantage there is no side to clip, and TRL counts none as clipped. (VESPO has no clips, and
            # logs the weights of all)
            old = torch.where((tokens.advantages == 0).unsqueeze(1), own, old)
        return Weighted(old_logps=old)


def weighting_for(args: Any) -> type[Weighting]:
    """The weighting of the settings: that of their name, or, without one, the old policy of a loss of the ratio."""
    weighting = named(args.token_weights)
    compares = takes_ratio(args) or args.off_policy_mask_threshold is not None
    return RatioLoss if compares and not weighting.needs_behaviour else weighting
