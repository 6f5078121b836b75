"""
How large is a gradient that is zero but for rounding? In units of rounding of float32 (2^-23).

    python benchmarks/questions/rounding_noise.py                 # fused attention, on the GPU if there is one
    python benchmarks/questions/rounding_noise.py --model DIR     # also at the layers of a model

A position that attends to itself alone has no gradient at its query and key: the two terms of the attention score's
gradient are equal. First, attention by itself: what is left, in units of the terms that cancel. Then a model, on
sequences of two tokens beside longer ones: the norm of their gradients at `q_proj` and `k_proj`, in units of the root
mean square of the longer ones' norms there. `isopo_trl.geometry.guarded.NOISE` is the bound that the package sets.
"""

import argparse

import torch
import torch.nn.functional as F
from transformers import AutoModelForCausalLM


EPS = torch.finfo(torch.float32).eps
SHORT = 12  # sequences of two tokens


def attention(dtype: torch.dtype, device: str) -> tuple[float, float]:
    """Root mean square and largest of what is left of the gradient of `q`, over sequences and heads."""
    generator = torch.Generator(device).manual_seed(0)
    q, k, v, g = (torch.randn(256, 16, 1, 64, generator=generator, device=device).to(dtype) for _ in range(4))
    q.requires_grad_()
    F.scaled_dot_product_attention(q, k, v, is_causal=True).backward(g)
    assert q.grad is not None
    k, v, g = k.double(), v.double(), g.double()
    terms = (g * v).sum(-1).abs() * k.norm(dim=-1) / k.shape[-1] ** 0.5  # each of the two that cancel
    left = q.grad.double().norm(dim=-1) / terms.clamp(min=terms.mean() / 10) / EPS
    return left.square().mean().sqrt().item(), left.max().item()


def model_layers(folder: str, dtype: torch.dtype, device: str) -> float:
    """The largest norm of a two-token sequence's gradient at a query or key projection."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, attn_implementation="sdpa").to(device)
    names = [name for name, _ in model.named_parameters() if "q_proj.weight" in name or "k_proj.weight" in name]
    weights = [model.get_parameter(name) for name in names]
    generator = torch.Generator().manual_seed(0)
    lengths = torch.tensor([2] * SHORT + [16, 24, 32, 40])
    size = int(lengths.max())
    ids = torch.randint(model.config.vocab_size, (len(lengths), size), generator=generator).to(device)
    mask = (torch.arange(size) >= size - lengths[:, None]).long().to(device)  # padded on the left, as TRL does
    logits = model(ids, attention_mask=mask).logits[:, :-1].float()
    logps = logits.log_softmax(-1).gather(-1, ids[:, 1:, None]).squeeze(-1)
    norms = []
    for row, length in enumerate(lengths.tolist()):
        scored = logps[row, -max(length // 2, 1) :].sum()
        gradients = torch.autograd.grad(scored, weights, retain_graph=True)
        norms.append(torch.stack([gradient.double().norm() for gradient in gradients]))
    table = torch.stack(norms)
    return (table[:SHORT] / table[SHORT:].square().mean(0).sqrt() / EPS).max().item()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="folder of a causal language model")
    options = parser.parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    name = torch.cuda.get_device_name() if device == "cuda" else "CPU"
    for dtype in (torch.bfloat16, torch.float16, torch.float32):
        rms, largest = attention(dtype, device)
        print(f"attention, {name}, {dtype}: root mean square {rms:.1f}, largest {largest:.0f}")
        if options.model and (device == "cuda" or dtype == torch.float32):  # the others take long on a CPU
            largest = model_layers(options.model, dtype, device)
            print(f"layers of {options.model}, {name}, {dtype}: largest {largest:.0f}")


if __name__ == "__main__":
    main()
