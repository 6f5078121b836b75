"""
The gradients of each token's log-probability at the head, taken on the forward's way over the vocabulary.

With respect to its logits, that of token t is `e_t`, `e_tv = 1[v = target_t] - p_tv`, and knows nothing of advantages
and losses, which come as one factor per token in the backward. So sums over the vocabulary, such as the gradient of
the hidden state, `sum_v e_tv w_v`, can be made where the logits are at hand, as flash attention makes its output:
`sum_v e^(z_v - m) w_v` is scaled down whenever the largest logit m grows.
"""

import math
from collections.abc import Sequence
from typing import Any

import torch

from ..geometry.statistics import accumulation_dtype
from ..trl_seam.head import FoldedTile, add_product, forward_by_tiles, head_uses_triton, logits_gradient_tile


def are_exact(args: Sequence[Any]) -> bool:
    """
    Whether gradients on the way have the precision of those that a backward makes, for the arguments of `apply`.

    `w_target - sum_v p_v w_v` nearly cancels where a token is nearly certain. Its `e^(z - m)` is exactly 1 then, in
    any dtype, so that nothing is lost. It would be where a soft cap has a factor of its own for every logit, or where
    a product rounds `w` once more, as TF32 does.
    """
    hidden, _, _, _, _, _, softcap, *_ = args
    return softcap is None and (hidden.device.type == "cpu" or _computed_in(hidden) != torch.float32)


def _computed_in(hidden: torch.Tensor) -> torch.dtype:
    """In what TRL multiplies."""
    device = hidden.device.type
    return torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else hidden.dtype


def forward_with_gradients(ctx: Any, args: Sequence[Any], samples: torch.Tensor | None = None) -> tuple[Any, ...]:
    """
    What TRL's forward returns for the arguments of `apply`, bit for bit. It leaves in `ctx`:

    - `unit` `[N, d]`, the gradients of the log-probabilities with respect to the hidden states, if these have one;
    - `products` `[N, n]`, those with respect to the logits times the rows of `samples` `[n, vocabulary]`, if given.
    """
    hidden, weight, _, targets, temperature, _, _, logit_scale, *_ = args
    N, scale = len(hidden), logit_scale / temperature
    settings = {"logit_scale": logit_scale, "softcap": 1.0, "inv_t": 1 / temperature, "HAS_SOFTCAP": False}
    nowhere = torch.full_like(targets, -1)
    factors: dict[str, torch.Tensor] = {"unit": weight} if ctx.needs_input_grad[0] else {}
    if samples is not None:
        factors["products"] = samples.t()
    dtype = accumulation_dtype(_computed_in(hidden))
    sums = {name: hidden.new_zeros(N, x.shape[1], dtype=dtype) for name, x in factors.items()}

    def see(tile: FoldedTile) -> None:
        once = torch.full_like(tile.largest, 1 / scale)
        start, count = tile.part.start, len(once)
        e = logits_gradient(tile.logits, nowhere[:count], tile.largest, once, None, start, settings)  # -e^(z - m)
        shrunk = torch.exp(tile.before - tile.largest).unsqueeze(1)
        for name, x in factors.items():
            total = sums[name][tile.rows].mul_(shrunk)
            if e.dtype == dtype:
                total.addmm_(e, x[tile.part].to(dtype))
            else:
                add_product(total, e, x[tile.part].to(e.dtype))
            if tile.part.stop == len(weight):
                total.div_(tile.total.unsqueeze(1))

    outputs = forward_by_tiles(ctx, args, see)
    for name, x in factors.items():
        # Rounded as in the products, so that both cancel
        sums[name].add_(x[targets].to(ctx.compute_dtype)).mul_(scale)
    ctx.unit, ctx.products = sums.get("unit"), sums.get("products")
    return outputs


def logits_gradient(tile, targets, log_z, grad, of_entropy, start, settings):
    """
    Turn logits `[rows, width]` into the gradient there, in place: `grad_t (1[v = target_t] - p_tv)`, and that of the
    entropies where `of_entropy` has them and their gradient, taken back through the temperature, the soft cap and the
    scale of the logits, as TRL's backward does.
    """
    width = tile.shape[1]
    triton = head_uses_triton(tile.device)
    only_logps = grad is not None and of_entropy is None
    if only_logps and not triton and not settings["HAS_SOFTCAP"] and tile.dtype == log_z.dtype:
        # In place, in a third of the passes over memory that TRL's version for devices without Triton makes
        factors = settings["logit_scale"], settings["inv_t"]
        for factor in factors:
            if factor != 1:
                tile.mul_(factor)  # one after the other, as TRL does: `log_z` may be one of these very numbers
        slope = grad * math.prod(factors)
        tile.sub_(log_z.unsqueeze(1)).exp_().mul_(-slope.unsqueeze(1))
        place = targets - start
        hit = torch.where((place >= 0) & (place < width), slope, 0)
        return tile.scatter_add_(1, place.clamp(0, width - 1).unsqueeze(1), hit.unsqueeze(1))
    return logits_gradient_tile(tile, targets, log_z, grad, of_entropy, start, settings)
