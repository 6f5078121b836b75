"""
GTPO's weights ([winstonsmith1897/GTPO](https://github.com/winstonsmith1897/GTPO)): tokens that completions of a prompt
with either sign of the advantage begin or end with are not unlearned, and learned twice as much.

A token is in conflict where the same token stands at the same place in a completion with `A > 0` and in one with
`A < 0`, both of its prompt. Of these count the unbroken run from the left, and, with places counted from the end, the
one from the right. In each of the two a token gets the factor 2 if `A > 0` and 0 if `A < 0`; `w_t` is the product of
both factors. What a tool wrote inside of a completion ends a run.

The ratio takes no part. GTPO's advantages, less a part of the entropy, are `advantage_transform="gtpo"`; conflicts
then go by the signs of these, where the authors take those of `R - mean`. Its division of a completion's loss by the
number of its conflicts is not there.
"""

from collections.abc import Iterator
from typing import Any

import torch

from .gates import Gated, advantage_of_tokens
from .weighting import Tokens, Weighted, register


@register("gtpo")
class GTPO(Gated):
    """0, 2 or 4 where completions of a prompt are in conflict, else 1. In an evaluation, none."""

    title = "GTPO"
    credit = "Tokens were weighted by the conflicts of [GTPO](https://github.com/winstonsmith1897/GTPO)."
    looks_across_sequences = True
    needs_prompts = True

    @classmethod
    def refusals(cls, args: Any) -> Iterator[tuple[bool, str]]:
        yield (
            not args.group_microbatches,
            "token_weights='gtpo' compares the completions of a prompt with each other: set group_microbatches=True, "
            "so that they are in one microbatch.",
        )
        yield from super().refusals(args)

    def weigh(self, tokens: Tokens) -> Weighted:
        if torch.is_grad_enabled() or tokens.prompts is not None:
            return super().weigh(tokens)
        return Weighted(sums=self.observe(tokens, tokens.mask.new_zeros(())))

    def gated(self, tokens: Tokens) -> torch.Tensor:
        advantages = advantage_of_tokens(tokens)
        if tokens.ids is None or tokens.prompts is None:
            raise ValueError(
                "token_weights='gtpo' compares the tokens of a prompt's completions, and the batch does not say which "
                "those are: let `ISOPOTrainer` generate it, or pass `ids` and `prompts`."
            )
        present, places = tokens.mask.bool(), torch.arange(tokens.mask.shape[1], device=tokens.mask.device)
        from_left = initial_run(tokens.ids, present, advantages, tokens.prompts)
        # The completions turned round: turning them twice gives them back
        from_end = (present * (places + 1)).amax(1, keepdim=True) - 1 - places
        inside, from_end = from_end >= 0, from_end.clamp(min=0)
        turned = initial_run(
            tokens.ids.gather(1, from_end), present.gather(1, from_end) & inside, advantages, tokens.prompts
        )
        from_right = turned.gather(1, from_end) & inside
        factor = torch.where(advantages > 0, 2.0, 0.0).to(tokens.logps.dtype)
        return torch.where(from_left, factor, 1) * torch.where(from_right, factor, 1)


def initial_run(
    ids: torch.Tensor, present: torch.Tensor, advantages: torch.Tensor, prompts: torch.Tensor
) -> torch.Tensor:
    """
    Which tokens are in conflict, and so are all before them in their completion, `[B, C]`.

    Args:
        ids (`torch.Tensor`): `[B, C]`.
        present (`torch.Tensor`): `[B, C]`, where there is a token that counts.
        advantages (`torch.Tensor`): `[B, 1]`.
        prompts (`torch.Tensor`): `[B]`, numbers of the prompts.
    """
    liked, disliked = torch.zeros_like(present), torch.zeros_like(present)
    for other in range(len(ids)):
        same = present[other] & (ids == ids[other]) & (prompts == prompts[other]).unsqueeze(1)
        liked |= same & (advantages[other] > 0)
        disliked |= same & (advantages[other] < 0)
    in_conflict = present & (advantages != 0) & liked & disliked
    return in_conflict.cumprod(1).bool()
