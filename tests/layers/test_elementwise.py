"""Parameters that act feature by feature: where their positions are. Their gradients are in `test_layer.py`."""

import torch
from transformers.models.llama.modeling_llama import LlamaRMSNorm

from isopo_trl import ISOPO
from tests.layers.harness import Holder


def test_where_positions_are_is_remembered_for_as_many_heads_as_positions():
    """`[B, H, T, d]`, laid out in memory as it reads: with H = T nothing in the tensor tells the two apart."""
    gradients = []
    for earlier in (False, True):
        model = Holder(LlamaRMSNorm(5)).double()
        isopo = ISOPO(model, "fisher", scale="paper", fisher_samples=10_000)
        for length in (6, 3) if earlier else (3,):
            model.zero_grad()
            generator = torch.Generator().manual_seed(0)
            x = torch.randn(2, 3, length, 5, generator=generator, dtype=torch.float64)
            weight = torch.randn(x.shape, generator=generator, dtype=torch.float64)
            x = x if earlier else x.transpose(1, 2).contiguous().transpose(1, 2)  # the stride tells
            with isopo.microbatch(torch.ones(2), attention_mask=torch.ones(2, length)):
                (model(x) * weight).sum().backward()
        gradients.append(model.layer.weight.grad)
    torch.testing.assert_close(*gradients)
