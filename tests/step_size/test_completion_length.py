"""What `target_kl="auto"` is depends on whether steps add up."""

from types import SimpleNamespace

import torch

from isopo_trl.narrow_weights.optimizers import NarrowSGD
from isopo_trl.step_size.completion_length import AUTO, AUTO_PLAIN, automatic


def test_steps_without_momentum_are_longer():
    weights = [torch.zeros(2, dtype=torch.bfloat16, requires_grad=True)]
    plain = [torch.optim.SGD(weights), NarrowSGD(weights, updates="exact")]
    others = [torch.optim.SGD(weights, momentum=0.9), torch.optim.AdamW(weights), torch.optim.RMSprop(weights)]
    for optimizers, expected in ((plain, AUTO_PLAIN), (others, AUTO)):
        for optimizer in optimizers:
            assert automatic(optimizer) == expected
            assert automatic(SimpleNamespace(optimizer=optimizer)) == expected  # as DeepSpeed wraps it
            assert automatic(optimizer, goes_on=True) == AUTO  # as the rule `spring` does
