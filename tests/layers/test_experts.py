"""Mixtures of experts against the oracle: every expert's matrices and the router, in float64."""

import functools

import pytest
import torch
from peft import LoraConfig, get_peft_model

from isopo_trl import ISOPO
from tests import mixtures, oracle, tiny


pytestmark = pytest.mark.usefixtures("float64_throughout")
BATCH = functools.partial(oracle.random_batch, [3, 1, 5, 4], [6, 8, 1, 4], 100)
TOLERANCE = 1e-9


def build(family, lora=None):
    model = tiny.model(family, dtype=torch.float64)
    if lora is not None:
        model = get_peft_model(model, LoraConfig(r=2, lora_alpha=8, **lora)).to(torch.float64)
        generator = torch.Generator().manual_seed(1)
        with torch.no_grad():
            for name, p in model.named_parameters():
                if "lora_" in name:  # B starts at zero; here both factors have a gradient
                    p.copy_(torch.randn(p.shape, generator=generator, dtype=torch.float64) * 0.3)
        return model
    for name, p in model.named_parameters():
        if "sinks" in name:  # another kind of layer
            p.requires_grad_(False)
    return model


@functools.cache
def reference(family, *targets):
    lora = {"target_modules": ["q_proj"], "target_parameters": list(targets)} if targets else None
    model, batch = build(family, lora), BATCH()
    return mixtures.position_gradients(model, batch, oracle.token_weights(batch))


def backward(model, batch, isopo):
    """A microbatch without the trainer; returns the sampled rows."""
    weights = oracle.token_weights(batch)
    with isopo.microbatch(batch.advantages, attention_mask=batch.attention_mask) as microbatch:
        positions = torch.arange(batch.input_ids.shape[1]).unsqueeze(0)
        output = model(batch.input_ids, attention_mask=batch.attention_mask, position_ids=positions, use_cache=False)
        logps = output.logits[:, :-1].log_softmax(-1).gather(-1, batch.input_ids[:, 1:, None]).squeeze(-1)
        (-(logps[:, -weights.shape[1] :] * weights).sum()).backward()
    samples = microbatch.samples
    return None if samples is None else samples.rows[~samples.absent]


def check(model, expected):
    error, where = mixtures.worst_error(model, expected)
    assert error < TOLERANCE, f"{where}: {error}"


@pytest.mark.parametrize("rule", ["fisher", "fig4", "interacting", "none"])
@pytest.mark.parametrize("family", ["mixtral", "qwen3_moe", "gpt_oss", "glm4_moe", "deepseek_v3"])
def test_every_expert_and_router_has_the_gradient_of_the_definition(family, rule):
    model, batch = build(family), BATCH()
    rows = backward(model, batch, ISOPO(model, rule, fisher_samples=7))
    check(model, mixtures.expected_gradients(model, reference(family), batch, rows, rule))


@pytest.mark.parametrize("rule", ["fisher", "fig4", "interacting", "none"])
@pytest.mark.parametrize(
    "family,targets",
    [
        ("mixtral", ("mlp.experts.gate_up_proj", "mlp.experts.down_proj", "mlp.gate.weight")),
        ("gpt_oss", ("mlp.experts.gate_up_proj", "mlp.experts.down_proj", "mlp.router.weight")),
        ("deepseek_v3", ("mlp.experts.down_proj", "mlp.gate.weight")),
    ],
    ids=lambda x: x if isinstance(x, str) else "",
)
def test_lora_on_every_expert_and_router_has_the_gradient_of_the_definition(family, targets, rule):
    batch = BATCH()
    model = build(family, {"target_modules": ["q_proj"], "target_parameters": list(targets)})
    rows = backward(model, batch, ISOPO(model, rule, fisher_samples=7))
    check(model, mixtures.expected_gradients(model, reference(family, *targets), batch, rows, rule))


def test_an_implementation_that_is_not_known_is_refused_by_the_names_of_the_parameters():
    model = build("qwen3_moe")
    model.config._experts_implementation = "sonicmoe"
    with pytest.raises(ValueError, match=r"layers\.0\.mlp\.experts\.gate_up_proj \(.*'sonicmoe'.*'grouped_mm'"):
        ISOPO(model)


def test_experts_that_compute_something_else_are_refused(monkeypatch):
    """What is recognised is what the module does, not what it is called."""
    model = build("mixtral")
    experts = type(model.model.layers[0].mlp.experts)
    monkeypatch.setattr(experts, "_apply_gate", lambda self, x: x.chunk(2, dim=-1)[0])  # without the other half
    with pytest.raises(ValueError, match=r"experts\.down_proj \(MixtralExperts does not compute"):
        ISOPO(model)
