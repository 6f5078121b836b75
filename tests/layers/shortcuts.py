"""What tests of layers that are there for speed alone share: a microbatch, its gradients, and what was called."""

import torch

from tests.kernels.batches import DEVICE


IDS = torch.tensor([[0, 9, 11, 12], [13, 9, 12, 10]])
MASK = torch.tensor([[0, 1, 1, 1], [1, 1, 1, 1]])
ADVANTAGES = torch.tensor([1.0, -0.5])


def layers_of(isopo, kind):
    return [layer for layer in isopo._shortcuts if isinstance(layer, kind)]


def count_calls(monkeypatch, function):
    """The calls of an autograd function from now on, a list of their arguments."""
    seen, apply = [], function.apply

    def counting(*args):
        seen.append(args)
        return apply(*args)

    monkeypatch.setattr(function, "apply", counting)
    return seen


def gradients(model, isopo, term=False):
    """The gradients of one microbatch, with a term that carries no advantage if asked for, by parameter."""
    model.zero_grad()
    advantages, mask, ids = ADVANTAGES.to(DEVICE), MASK.to(DEVICE), IDS.to(DEVICE)
    with isopo.microbatch(advantages, attention_mask=mask):
        logits = model(ids, attention_mask=mask).logits
        loss = logits.log_softmax(-1)[:, :-1].gather(-1, ids[:, 1:, None]).sum()
        if term:
            isopo.unscaled(logits.square().mean())
        loss.backward()
    isopo.step()
    return {name: p.grad for name, p in model.named_parameters() if p.requires_grad}
