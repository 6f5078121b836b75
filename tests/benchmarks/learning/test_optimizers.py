"""Muon with AdamW beside it, as the learning benchmark trains with them, against PyTorch's own, one at a time."""

import copy

import pytest
import torch
from accelerate import Accelerator
from transformers import Qwen2Config, Qwen2ForCausalLM


pytestmark = pytest.mark.skipif(not hasattr(torch.optim, "Muon"), reason="PyTorch has Muon from 2.9 on")
RATE = 1e-2


@pytest.fixture
def model():
    torch.manual_seed(0)
    sizes = {"vocab_size": 16, "hidden_size": 8, "intermediate_size": 12, "num_hidden_layers": 2}
    return Qwen2ForCausalLM(Qwen2Config(**sizes, num_attention_heads=2, num_key_value_heads=1))


@pytest.mark.parametrize("tied", [False, True])
def test_muon_has_the_matrices_of_hidden_layers_and_adamw_everything_else(model, tied):
    from optimizers import muon_and_adamw

    if tied:
        model.lm_head.weight = model.model.embed_tokens.weight
    model.model.norm.weight.requires_grad_(False)
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    muon, adamw = (
        [names[id(parameter)] for group in optimizer.param_groups for parameter in group["params"]]
        for optimizer in muon_and_adamw(model, RATE).optimizers
    )
    assert len(muon) == 2 * 7 and all(name.endswith("_proj.weight") for name in muon)
    # The embedding, each layer's three biases and two norms, and a head of its own; the last norm is not trained
    assert len(adamw) == 1 + 2 * 5 + (not tied) and "model.embed_tokens.weight" in adamw
    assert sorted([*muon, *adamw]) == sorted(name for name, p in model.named_parameters() if p.requires_grad)


def test_steps_are_those_of_each_optimizer_alone_at_the_schedulers_rate(model):
    """Through accelerate, which gives the optimizer copies of its groups."""
    from optimizers import muon_and_adamw

    alone = copy.deepcopy(model)
    hidden = [p for name, p in alone.named_parameters() if name.endswith("_proj.weight")]
    others = [p for name, p in alone.named_parameters() if not name.endswith("_proj.weight")]
    separate = [
        torch.optim.Muon(hidden, lr=RATE, weight_decay=0.0, adjust_lr_fn="match_rms_adamw"),
        torch.optim.AdamW(others, lr=RATE, weight_decay=0.0),
    ]
    both = muon_and_adamw(model, RATE)
    scheduler = torch.optim.lr_scheduler.LambdaLR(both, lambda step: 0.5**step)
    both, scheduler = Accelerator(cpu=True).prepare(both, scheduler)
    for step in range(3):
        for parameter, other in zip(model.parameters(), alone.parameters(), strict=True):
            parameter.grad = torch.randn_like(parameter)
            other.grad = parameter.grad.clone()
        for optimizer in separate:
            for group in optimizer.param_groups:
                group["lr"] = RATE / 2**step
            optimizer.step()
        both.step()
        scheduler.step()
        assert [group["lr"] for group in both.param_groups] == [RATE / 2 ** (step + 1)] * 2
        for (name, parameter), expected in zip(model.named_parameters(), alone.parameters(), strict=True):
            # Muon multiplies in bfloat16; a step is up to RATE long, and that of another rate would be off by a tenth
            torch.testing.assert_close(parameter, expected, rtol=0, atol=RATE / 200, msg=name)
    both.zero_grad()
    assert all(parameter.grad is None for parameter in model.parameters())
