"""PyTorch's Muon for the matrices of hidden layers, with AdamW for everything else, as one optimizer."""

import itertools
from typing import Any

import torch


class Both(torch.optim.Optimizer):
    """Several optimizers that step together, each with parameters of its own. Their state is not saved with it."""

    def __init__(self, optimizers: list[torch.optim.Optimizer]):
        self.optimizers = optimizers
        super().__init__([group for optimizer in optimizers for group in optimizer.param_groups], {})

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        if closure is not None:
            raise ValueError("These optimizers step by the gradients that there are: no closure can be given.")
        groups = iter(self.param_groups)
        for optimizer in self.optimizers:
            # A scheduler sets the learning rate in the groups of this one, which accelerate has replaced by copies
            optimizer.param_groups = list(itertools.islice(groups, len(optimizer.param_groups)))
            optimizer.step()

    def zero_grad(self, set_to_none: bool = True) -> None:
        for optimizer in self.optimizers:
            optimizer.zero_grad(set_to_none)


def muon_and_adamw(model: torch.nn.Module, learning_rate: float) -> Both:
    """
    Muon, with updates of the root mean square that AdamW's have, for matrices of hidden layers; AdamW for embedding,
    head, norms and biases. No weight decay, as in the other runs.
    """
    apart = {
        id(p)
        for name in ("get_input_embeddings", "get_output_embeddings")
        for p in getattr(model, name)().parameters()
    }
    trained = [p for p in model.parameters() if p.requires_grad]
    matrices = [p for p in trained if p.ndim == 2 and id(p) not in apart]
    others = [p for p in trained if p.ndim != 2 or id(p) in apart]
    muon = torch.optim.Muon(matrices, lr=learning_rate, weight_decay=0.0, adjust_lr_fn="match_rms_adamw")
    return Both([muon, torch.optim.AdamW(others, lr=learning_rate, weight_decay=0.0)])
