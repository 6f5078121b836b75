"""
The LM head where it is not trained, as with adapters: its backward pass needs no vocabulary.

The gradient of the hidden state `h_t` is `slope_t (w_y - sum_v p_tv w_v)`, `slope_t` being that of the token's
log-probability, so that all but the slope is known once the logits are there (`layers/head_gradients.py`). TRL's
function makes the logits again in its backward pass; its version for devices without Triton goes over them some twenty
times in all, so that on a CPU the usual case has a loop of its own.
"""

from typing import Any

import torch

from ..layers.head_gradients import are_exact, forward_with_gradients
from ..trl_seam.head import ChunkedLogProbFunction


# Elements of a tile of logits: two of them in float32 stay in a core's cache
_TILE = 2**19
_OUTPUTS = {"log_probs", "entropy"}


def frozen_head(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    targets: torch.Tensor,
    temperature: float,
    chunk_size: int,
    softcap: float | None = None,
    logit_scale: float = 1.0,
    outputs: tuple[str, ...] = (),
    entropy_counts: bool = False,
) -> Any:
    """
    What TRL's chunked log-probabilities return for the same arguments; unless on a CPU, bit for bit.

    Where the `entropy_counts`, in the same backward as the log-probabilities, that makes the logits again anyway.
    """
    args = (hidden, weight, bias, targets, temperature, chunk_size, softcap, logit_scale, outputs)
    is_usual = softcap is None and set(outputs) <= _OUTPUTS
    is_wide = hidden.dtype == weight.dtype and hidden.dtype in (torch.float32, torch.float64)
    if hidden.device.type == "cpu" and is_usual and is_wide and not torch.is_autocast_enabled("cpu"):
        function: Any = _OnCPU
    elif hidden.requires_grad and torch.is_grad_enabled() and not entropy_counts and are_exact(args):
        function = _FrozenHead
    else:
        function = ChunkedLogProbFunction
    return function.apply(*args)


class _FrozenHead(torch.autograd.Function):
    @staticmethod
    def forward(ctx, *args):
        return forward_with_gradients(ctx, args)

    @staticmethod
    def backward(ctx, grad, grad_entropy, *_):
        if grad_entropy is not None:
            return ChunkedLogProbFunction.backward(ctx, grad, grad_entropy)
        return None if grad is None else ctx.unit * grad.unsqueeze(1), *(None,) * 8


class _OnCPU(_FrozenHead):
    @staticmethod
    def forward(ctx, hidden, weight, bias, targets, temperature, chunk_size, softcap, logit_scale, outputs):
        ctx.set_materialize_grads(False)
        N, scale = len(hidden), logit_scale / temperature
        largest = hidden.new_full((N,), -torch.inf)
        total, of_logits, of_target = hidden.new_zeros(3, N)  # sums of e^z and of z e^z, and the target's z
        mean = torch.zeros_like(hidden) if ctx.needs_input_grad[0] else None  # of the weight's rows
        width = max(1, min(len(weight), _TILE // max(N, 1)))
        for start in range(0, len(weight) if N else 0, width):
            part = weight[start : start + width]
            z = hidden @ part.t()
            if bias is not None:
                z += bias[start : start + width]
            z *= scale
            place = targets - start
            inside = (place >= 0) & (place < len(part))
            at_place = z.gather(1, place.clamp(0, len(part) - 1).unsqueeze(1)).squeeze(1)
            of_target = torch.where(inside, at_place, of_target)
            before, largest = largest, torch.maximum(largest, z.amax(1))
            shrunk = torch.exp(before - largest)
            e = z.sub_(largest.unsqueeze(1)).exp()
            sums = e.sum(1)
            total = total * shrunk + sums
            of_logits = of_logits * shrunk + torch.linalg.vecdot(e, z) + largest * sums
            if mean is not None:
                mean.mul_(shrunk.unsqueeze(1)).addmm_(e, part)
        log_z = largest + total.log()
        entropy = log_z - of_logits / total
        ctx.unit = None if mean is None else (weight[targets] - mean.div_(total.unsqueeze(1))).mul_(scale)
        # What TRL's backward takes
        ctx.save_for_backward(hidden, weight, bias, targets, log_z, entropy)
        ctx.compute_dtype, ctx.chunk_size = hidden.dtype, chunk_size
        ctx.kernel_args = {"logit_scale": logit_scale, "softcap": 1.0, "inv_t": 1 / temperature, "HAS_SOFTCAP": False}
        return of_target - log_z, entropy if "entropy" in outputs else None, None, None, None
