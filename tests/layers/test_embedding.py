"""Embeddings of positions, one row for the whole batch. Other embeddings are in `test_layer.py`."""

import copy

import torch

from isopo_trl import ISOPO
from tests.layers.harness import ADVANTAGES, B, Holder, T, build, expected_gradients


def test_one_row_of_position_ids_counts_for_every_sequence():
    """As in GPT-2: positions `[1, T]`, added to tokens `[B, T]`."""
    layer = build("embedding")
    plain = copy.deepcopy(layer)
    model, ids = Holder(layer), torch.arange(T).unsqueeze(0)
    cotangent = torch.randn(B, T, 3, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    with ISOPO(model, fisher_samples=7).microbatch(ADVANTAGES[:B], attention_mask=torch.ones(B, T)) as microbatch:
        (torch.zeros(B, T, 3, dtype=torch.float64) + model(ids)).backward(cotangent)
    sequence = torch.arange(B).unsqueeze(1).expand(B, T)
    rows = microbatch.samples.rows
    (expected,) = expected_gradients(plain, ids.expand(B, T), cotangent, sequence, ADVANTAGES[:B], rows, "fisher")
    torch.testing.assert_close(layer.weight.grad, expected)
