"""A layer of any kind, alone on a small module, against a loop over its positions in float64."""

import copy
import itertools

import torch
from torch import nn
from transformers.models.gemma3.modeling_gemma3 import Gemma3RMSNorm, Gemma3TextScaledWordEmbedding
from transformers.models.llama.modeling_llama import LlamaRMSNorm
from transformers.models.t5.modeling_t5 import T5LayerNorm
from transformers.pytorch_utils import Conv1D

from isopo_trl import ISOPO
from tests import oracle


B, T, D = 3, 4, 5
ADVANTAGES = torch.tensor([1.0, -0.5, 2.0, 0.0, -1.0], dtype=torch.float64)
# One sequence a row, with padding; or several a row, one of them in two rows and one without any position
MASK = torch.tensor([[0, 1, 1, 1], [1, 1, 1, 1], [1, 1, 0, 0]])
PACKED = torch.tensor([[0, 0, 1, 1], [2, 2, 2, -1], [3, 1, 1, 3]])


class Holder(nn.Module):
    """The least that ISOPO can be attached to."""

    def __init__(self, layer):
        super().__init__()
        self.layer = layer

    def forward(self, *args, **kwargs):
        return self.layer(*args, **kwargs)


class ScaleAndShift(nn.Module):
    def __init__(self, size):
        super().__init__()
        self.scale, self.shift = nn.Parameter(torch.ones(size)), nn.Parameter(torch.zeros(size))

    def forward(self, x):
        return torch.tanh(x) * self.scale + self.shift


class ScaledEmbedding(nn.Embedding):
    """The scale is a plain number here, a buffer in gemma."""

    embed_scale = 3.0

    def forward(self, ids):
        return super().forward(ids) * self.embed_scale


# Example layers, by kind
LINEAR = {
    "linear": lambda: nn.Linear(D, 3),
    "linear without bias": lambda: nn.Linear(D, 3, bias=False),
    "wide linear without bias": lambda: nn.Linear(D, 9, bias=False),
    "linear, only its weight": lambda: trained(nn.Linear(D, 3), "weight"),
    "linear, only its bias": lambda: trained(nn.Linear(D, 3), "bias"),
    "Conv1D": lambda: Conv1D(3, D),
}
LAYER_NORM = {
    "LayerNorm": lambda: nn.LayerNorm(D),
    "LayerNorm without bias": lambda: nn.LayerNorm(D, bias=False),
    "LayerNorm, only its bias": lambda: trained(nn.LayerNorm(D), "bias"),
}
RMS_NORM = {
    "llama's norm": lambda: LlamaRMSNorm(D),
    "gemma's norm": lambda: Gemma3RMSNorm(D),
}
ELEMENTWISE = {
    "T5's norm": lambda: T5LayerNorm(D),  # rounds in another place than an RMSNorm
    "scale and shift": lambda: ScaleAndShift(D),
    "scale and shift, only the shift": lambda: trained(ScaleAndShift(D), "shift"),
}
EMBEDDING = {
    "embedding": lambda: nn.Embedding(6, 3),
    "embedding with padding_idx": lambda: nn.Embedding(6, 3, padding_idx=2),
    "scaled embedding": lambda: ScaledEmbedding(6, 3),
    "gemma's embedding": lambda: Gemma3TextScaledWordEmbedding(6, 3, padding_idx=0, embed_scale=7.5),
}
LAYERS = {**LINEAR, **LAYER_NORM, **RMS_NORM, **ELEMENTWISE, **EMBEDDING}


def trained(layer, *names):
    """The layer with only the named parameters trained."""
    for name, p in layer.named_parameters():
        p.requires_grad_(name in names)
    return layer


def build(name, seed=0):
    """The layer in float64 with random parameters, near one where they are a vector."""
    layer = LAYERS[name]().double()
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for p in layer.parameters():
            p.copy_((p.dim() == 1) + 0.5 * torch.randn(p.shape, generator=generator, dtype=torch.float64))
    return layer


def inputs_of(layer, *shape, seed=1):
    """Random token ids or activations whose dimensions before the features are `shape`."""
    generator = torch.Generator().manual_seed(seed)
    if isinstance(layer, nn.Embedding):
        return torch.randint(layer.num_embeddings, shape, generator=generator)
    return torch.randn(*shape, D, generator=generator, dtype=torch.float64)


# Where the position (b, t) is found in a layer's input
POSITION = {
    "B T": lambda b, t: (slice(b, b + 1), slice(t, t + 1)),
    "B H T": lambda b, t: (slice(b, b + 1), slice(None), slice(t, t + 1)),
    "N": lambda b, t: (slice(b * T + t, b * T + t + 1),),
    "1 N": lambda b, t: (slice(None), slice(b * T + t, b * T + t + 1)),
}


def position_gradients(layer, x, cotangent, at="B T"):
    """The gradient of all trained parameters at each position, `[N, parameters]`: the layer run on it alone."""
    parameters = [p for p in layer.parameters() if p.requires_grad]
    rows = []
    for b, t in itertools.product(range(B), range(T)):
        index = POSITION[at](b, t)
        gradients = torch.autograd.grad(layer(x[index].detach()), parameters, cotangent[index])
        rows.append(torch.cat([g.flatten() for g in gradients]))
    return torch.stack(rows)


def expected_gradients(layer, x, cotangent, ids, advantages, rows, rule, at="B T", **settings):
    """`sum_s c_s V_s` by the definition, and the `V` it is made of."""
    G = position_gradients(layer, x, cotangent, at)
    V = torch.stack([G[ids.flatten() == s].sum(0) for s in range(len(advantages))])
    c = oracle.coefficients(V, G[rows], advantages, rule, **settings)
    parameters = [p for p in layer.parameters() if p.requires_grad]
    flat = (c @ V).split([p.numel() for p in parameters])
    return [g.view_as(p) for g, p in zip(flat, parameters, strict=True)]


def check(layer, x, rule, packed=False, at="B T", samples=7):
    """Output, gradient of the input and gradients of the parameters of an attached layer."""
    plain, m = copy.deepcopy(layer), 5 if packed else B
    advantages = ADVANTAGES[:m]
    ids = PACKED if packed else torch.arange(B).unsqueeze(1).expand(B, T)
    where = {"sequence_ids": PACKED} if packed else {"attention_mask": MASK}
    model = Holder(layer)
    isopo = ISOPO(model, rule, fisher_samples=samples)
    mine, other = x.detach().clone(memory_format=torch.preserve_format), x.detach().clone()
    if x.is_floating_point():
        mine.requires_grad_(), other.requires_grad_()
    expected_output = plain(other)
    cotangent = torch.randn(expected_output.shape, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    if not packed:  # the loss does not look at padding
        for b, t in (MASK == 0).nonzero().tolist():
            cotangent[POSITION[at](b, t)] = 0

    with isopo.microbatch(advantages, **where) as microbatch:
        output = model(mine)
        output.backward(cotangent)
    torch.testing.assert_close(output, expected_output, rtol=1e-12, atol=1e-12)
    if x.is_floating_point():
        expected_output.backward(cotangent)
        torch.testing.assert_close(mine.grad, other.grad, rtol=1e-10, atol=1e-12)
    rows = torch.tensor([], dtype=torch.long)
    if microbatch.samples is not None:
        rows = microbatch.samples.rows[~microbatch.samples.absent]
        assert len(rows) == samples
    expected = expected_gradients(plain, x, cotangent, ids, advantages, rows, rule, at)
    for (name, p), gradient in zip(
        [(name, p) for name, p in layer.named_parameters() if p.requires_grad], expected, strict=True
    ):
        torch.testing.assert_close(p.grad, gradient, rtol=1e-9, atol=1e-11, msg=lambda m, n=name: f"{n}: {m}")
    assert all(p.grad is None for p in layer.parameters() if not p.requires_grad)
