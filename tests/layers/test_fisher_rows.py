"""Every kind of layer under `fisher_scope="step"`: measured with the rows of the step before, in whichever pieces."""

import copy
import functools

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import nn

from isopo_trl import ISOPO
from tests import oracle, tiny
from tests.fisher_rows.test_step_scope import WEIGHTS, log_likelihood, parts_of, sampled_positions, sequence_order
from tests.gradients import mixtures
from tests.layers import harness
from tests.layers.harness import ADVANTAGES, LAYERS, MASK, PACKED, B, Holder, T


# Without regularisation and by the formula to the letter, coefficients depend on F and N alone, and on no mean
FORMULA = {"scale": "paper", "regularization": 0.0}
SCOPE = {"fisher_scope": "step", "seed": 42}


def sampled(ids, mask, number, step=0):
    """Rows of the positions sampled in the step, where each position belongs to the sequence `ids` `[B, T]` says."""
    m = int(ids.max()) + 1
    width = max(int(((ids == s) & (mask != 0)).sum()) for s in range(m))
    rows = torch.zeros(m, width, dtype=torch.long)
    there = torch.zeros(m, width, dtype=torch.long)
    for s in range(m):
        own = ((ids == s) & (mask != 0)).flatten().nonzero().squeeze(1)
        rows[s, : len(own)], there[s, : len(own)] = own, 1
    batch = oracle.Batch(rows, there, rows[:, :0], there[:, :0], torch.zeros(m))
    return rows.flatten()[sampled_positions(batch, step, number, lambda s, _: s)]


def run(layer, x, cotangent, rule, cut, samples, packed=False):
    """
    The layer's gradients in the third step, which is cut, as those before. All are of the same sequences, whose
    own rows do not count for them.
    """
    model = Holder(layer)
    isopo = ISOPO(model, rule, fisher_samples=samples, **SCOPE, **FORMULA)
    for _ in range(3):
        model.zero_grad()
        start = 0
        for size in cut:
            part = slice(start, start + size)
            where = {"sequence_ids": PACKED} if packed else {"attention_mask": MASK[part]}
            advantages = ADVANTAGES if packed else ADVANTAGES[part]
            keys = torch.arange(len(ADVANTAGES)) if packed else torch.arange(start, start + size)
            with isopo.microbatch(advantages, sequence_keys=keys, **where):
                model(x[part]).backward(cotangent[part])
            start += size
        isopo.step()
    return [p.grad for p in layer.parameters() if p.requires_grad]


@pytest.mark.usefixtures("float64_throughout")
@pytest.mark.parametrize(
    "cut,packed",
    [
        pytest.param([3], False, marks=pytest.mark.slow),
        ([1, 2], False),
        pytest.param([1, 1, 1], False, marks=pytest.mark.slow),
        ([3], True),
    ],
    ids=str,
)
@pytest.mark.parametrize("rule", ["fisher", "fig4"])
@pytest.mark.parametrize("name", LAYERS)
def test_gradient_is_the_definition_with_the_rows_of_the_step_before(name, rule, cut, packed):
    layer = harness.build(name)
    plain = copy.deepcopy(layer)
    x = harness.inputs_of(layer, B, T)
    shape = plain(x).shape
    cotangent = torch.randn(shape, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    if not packed:
        cotangent = cotangent * (MASK != 0).unsqueeze(2)
    ids = PACKED if packed else torch.arange(B).unsqueeze(1).expand(B, T)
    # Of the second step: from then on, a layer is measured with some rows and keeps others
    rows = sampled(ids, torch.ones_like(MASK) if packed else MASK, 9, step=1)
    advantages = ADVANTAGES if packed else ADVANTAGES[:B]
    own = ids.flatten()[rows].unsqueeze(1) == torch.arange(len(advantages))
    expected = harness.expected_gradients(plain, x, cotangent, ids, advantages, rows, rule, own=own, **FORMULA)
    for found, right in zip(run(layer, x, cotangent, rule, cut, 9, packed), expected, strict=True):
        torch.testing.assert_close(found, right, rtol=1e-9, atol=1e-11)


# Experts


@functools.cache
def of_mixture(family, lora):
    model, batch = mixture(family, lora), oracle.random_batch([3, 1, 5, 4, 2, 2], [4, 5, 1, 4, 3, 2], 100)
    return batch, mixtures.position_gradients(model, batch, WEIGHTS(batch))


def mixture(family, lora):
    model = tiny.model(family, dtype=torch.float64)
    if lora:
        targets = {"target_modules": ["o_proj"], "target_parameters": ["mlp.experts.gate_up_proj", "mlp.gate.weight"]}
        model = get_peft_model(model, LoraConfig(r=2, lora_alpha=8, **targets)).to(torch.float64)
        generator = torch.Generator().manual_seed(1)
        with torch.no_grad():
            for name, p in model.named_parameters():
                if "lora_" in name:
                    p.copy_(torch.randn(p.shape, generator=generator, dtype=torch.float64) * 0.3)
    return model


@pytest.mark.usefixtures("float64_throughout")
@pytest.mark.parametrize("cut", [pytest.param([6], marks=pytest.mark.slow), [2, 1, 3]], ids=str)
@pytest.mark.parametrize(
    "family,lora,rule", [("mixtral", False, "fisher"), ("mixtral", True, "fisher"), ("qwen3_moe", False, "fig4")]
)
def test_a_sampled_position_is_a_sample_at_every_expert_that_it_was_sent_to(family, lora, rule, cut):
    model = mixture(family, lora)
    batch, G = of_mixture(family, lora)
    isopo = ISOPO(model, rule, fisher_samples=30, **SCOPE, **FORMULA)
    for _ in range(2):
        model.zero_grad()
        for rows, part in parts_of(batch, cut):
            with isopo.microbatch(part.advantages, attention_mask=part.attention_mask):
                log_likelihood(model, part, WEIGHTS(batch)[rows]).backward()
        isopo.step()
    rows = sampled_positions(batch, 0, 30, lambda s, _: s)
    # Sequences are known again by their tokens
    owners = rows // batch.input_ids.shape[1]
    formula = {**FORMULA, "own": owners.unsqueeze(1) == torch.arange(len(batch.advantages))}
    error, where = mixtures.worst_error(model, mixtures.expected_gradients(model, G, batch, rows, rule, **formula))
    assert error < 1e-9, f"{where}: {error}"


# Gradients of whole sequences


class Recurrent(nn.Module):
    """Mixes positions, so that there is no gradient per position."""

    def __init__(self):
        super().__init__()
        self.decay, self.gate = nn.Parameter(torch.ones(harness.D)), nn.Parameter(torch.ones(2, harness.D))

    def forward(self, x):
        state, outputs = torch.zeros_like(x[:, 0]), []
        for t in range(x.shape[1]):
            state = torch.sigmoid(self.decay) * state + x[:, t] * self.gate[t % 2]
            outputs.append(torch.tanh(state))
        return torch.stack(outputs, 1)


@pytest.mark.parametrize("cut", [[6], [1] * 6, [2, 1, 3]], ids=str)
@pytest.mark.parametrize("kept", [4, 64])
@pytest.mark.parametrize("rule", ["fisher", "fig4"])
def test_gradients_of_whole_sequences_are_kept_where_there_are_none_of_positions(rule, kept, cut):
    generator = torch.Generator().manual_seed(3)
    layer = Recurrent().double()
    x, cotangent = (torch.randn(6, T, harness.D, generator=generator, dtype=torch.float64) for _ in range(2))
    advantages = torch.randn(6, generator=generator, dtype=torch.float64)
    V = []
    for s in range(6):
        own = torch.autograd.grad(layer(x[s : s + 1]), list(layer.parameters()), cotangent[s : s + 1])
        V.append(torch.cat([g.flatten() for g in own]))
    V = torch.stack(V)
    model = Holder(layer)
    isopo = ISOPO(model, rule, fisher_samples=kept, **SCOPE, **FORMULA)
    for _ in range(2):
        model.zero_grad()
        start = 0
        for size in cut:
            part = slice(start, start + size)
            keys = torch.arange(start, start + size)
            with isopo.microbatch(advantages[part], attention_mask=torch.ones(size, T), sequence_keys=keys):
                model(x[part]).backward(cotangent[part])
            start += size
        isopo.step()
    assert {row["kind"] for row in isopo.coverage()} == {"any module"}
    samples = torch.tensor(sequence_order(range(6), 0)[:kept])
    expected = (
        oracle.coefficients(V, V[samples], advantages, rule, own=samples.unsqueeze(1) == torch.arange(6), **FORMULA)
        @ V
    )
    found = torch.cat([p.grad.flatten() for p in layer.parameters()])
    torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-11)


def after_two_steps(layers, **settings):
    """Gradients of the second step of layers one behind the other, and the rows that are kept."""
    model = nn.Sequential(*(Holder(layer) for layer in layers))
    isopo = ISOPO(model, fisher_samples=64, **FORMULA, **settings)
    generator = torch.Generator().manual_seed(5)
    for _ in range(2):
        model.zero_grad()
        x, cotangent = (torch.randn(2, T, harness.D, generator=generator, dtype=torch.float64) for _ in range(2))
        with isopo.microbatch(ADVANTAGES[:2], attention_mask=torch.ones(2, T)):
            model(x).backward(cotangent)
        isopo.step()
    rows = isopo.state_dict()["rows"]
    return [p.grad for p in model.parameters()], {} if rows is None else rows["rows"]


@pytest.mark.parametrize("layers", [1, 2])
def test_large_gradients_of_sequences_are_kept_as_far_as_memory_allows(monkeypatch, layers):
    monkeypatch.setattr("isopo_trl.fisher_rows.rows.MOST_ELEMENTS", layers * 3 * harness.D * 9 + 1)
    _, rows = after_two_steps([Recurrent().double() for _ in range(layers)], **SCOPE)
    assert [own["g"].shape for own in rows.values()] == [(9, 3 * harness.D)] * layers


def test_a_layer_of_which_next_to_no_gradients_could_be_kept_goes_by_the_microbatch(monkeypatch):
    monkeypatch.setattr("isopo_trl.fisher_rows.rows.MOST_ELEMENTS", 3 * harness.D * 8 - 1)
    found, rows = after_two_steps([Recurrent().double()], **SCOPE)
    expected, _ = after_two_steps([Recurrent().double()], fisher_scope="microbatch")
    assert not rows
    torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-11)
