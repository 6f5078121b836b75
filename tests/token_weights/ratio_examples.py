"""Log-ratios for property tests, and the figures of a batch as numbers."""

import torch
from hypothesis import strategies as st

from isopo_trl.token_weights import batch_figures, ratio_sums


LOG_RATIOS = st.lists(st.tuples(st.floats(-8, 8), st.booleans()), min_size=1, max_size=12)


def tensors(pairs):
    """Log-ratios and mask, `[1, C]`, of a list of pairs."""
    z, mask = zip(*pairs, strict=True)
    return torch.tensor([z], dtype=torch.float64), torch.tensor([mask]).long()


def figures(z, mask):
    return {name: value.item() for name, value in batch_figures(ratio_sums(z, mask)).items()}
