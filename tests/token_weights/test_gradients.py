"""Every token weighting with every rule: the gradient is what the definition says, in float64."""

from contextlib import nullcontext

import pytest
import torch

import isopo_trl.trainer
from tests import oracle
from tests.gradients.test_oracle import RULES, build, trainer_for
from tests.token_weights.definition import (
    METHODS,
    WEIGHTS,
    compare,
    definition,
    effective_sample_size,
    forward,
    kpo_objective,
    log_ratios,
    normalisation,
    off_policy,
    ragged_batch,
    refer,
    reference,
    scored_tokens,
)


pytestmark = pytest.mark.usefixtures("float64_throughout")


def crossed():
    """
    P3O with every rule, the others with one each, with full weights or with LoRA; the field's methods without a rule
    as well, with the other of the two.
    """
    for number, name in enumerate(WEIGHTS):
        for place, rule in enumerate(RULES):
            if name == "p3o" or place == number % len(RULES):
                lora = (number + place // 2) % 2 == 1
                yield pytest.param(name, lora, rule, id=f"{name}-{'lora' if lora else 'full'}-{rule}")
                if name in METHODS and rule != "none":
                    yield pytest.param(name, not lora, "none", id=f"{name}-{'full' if lora else 'lora'}-none")


@pytest.mark.parametrize(("name", "lora", "rule"), list(crossed()))
def test_gradient_is_the_definition(name, lora, rule, tmp_path):
    model = build("llama", lora)
    trainer = trainer_for(model, tmp_path, rule=rule, **WEIGHTS[name])
    compare(model, trainer, reference("llama", lora, name), rule)


def test_the_examples_are_not_trivial():
    """Ratios are cut off by the sample size and by either side of the clips, but not all of them."""
    model = build("llama")
    batch = ragged_batch(model)
    logps, _ = forward(model, batch)
    scored = scored_tokens(batch).bool()
    r, ess = log_ratios(logps, batch).exp(), effective_sample_size([logps], [batch])
    assert 0.5 < ess < 0.9 and (r[scored] < ess).sum() > 3 and (r[scored] > 1.5).sum() > 3
    assert scored.any(1).tolist() == [True, True, True, True, False, True]
    negative = batch.advantages < 0
    n = normalisation(batch)
    for low, high in ((0.0003, 0.0004), (0.15, 0.3)):
        leaf = logps.clone().requires_grad_()
        sign = torch.where(negative, -1.0, 1.0)
        objective = kpo_objective(leaf, batch, n, sign, low, high, stop=True)
        clipped = scored & (torch.autograd.grad(objective, leaf)[0] == 0)
        for of_sign in (negative, ~negative):
            assert 0 < clipped[of_sign].sum() < scored[of_sign].sum()
    for name in list(WEIGHTS)[1:]:
        weights = definition(logps, batch, n, name).weights
        assert not weights[~scored].any() and ((weights - n).abs() > 0.05 * n)[scored].sum() > 10


@pytest.mark.parametrize(
    ("name", "loss_type"),
    [
        ("p3o", "dr_grpo"),
        ("kpo", "luspo"),
        ("sampler", "bnpo"),
    ],
)
def test_every_normalisation(name, loss_type, tmp_path):
    model = build("llama", lora=True)
    trainer = trainer_for(model, tmp_path, loss_type=loss_type, scale="paper", **WEIGHTS[name])
    expected = reference("llama", True, name, loss_type=loss_type)
    compare(model, trainer, expected, "fisher", scale="paper")


@pytest.mark.parametrize(("family", "rule"), [("llama", "fisher"), ("gpt2", "interacting")])
def test_pull_reaches_both_uses_of_tied_weights(family, rule, tmp_path):
    model, expected = build(family, tie=True), reference(family, False, "p3o", True)
    compare(model, trainer_for(model, tmp_path, rule=rule, **WEIGHTS["p3o"]), expected, rule)


@pytest.mark.parametrize("name", ["p3o", "kpo"])
def test_ratios_close_to_one(name, tmp_path):
    """Filtered ratios that mostly lie inside of KPO's narrow clip, and sample sizes of nearly one."""
    model = build("llama")
    expected = reference("llama", False, name, spread=1e-3)
    if name == "kpo":
        logps, n = forward(model, expected.batch)[0], normalisation(expected.batch)
        unclipped = definition(logps, expected.batch, n, "kpo wide").weights
        differs = (expected.expected.weights - unclipped).abs() > 1e-3 * n
        assert 0 < differs.sum() < (n > 0).sum()
    compare(model, trainer_for(model, tmp_path, **WEIGHTS[name]), expected, "fisher")


@pytest.mark.parametrize("name", ["p3o", "kpo wide"])
def test_temperature(name, tmp_path):
    model = build("llama")
    batch = oracle.random_batch([3, 1, 4], [5, 2, 4], 100)
    batch = off_policy(model, batch, temperature=0.6)
    expected = refer(model, batch, name, normalisation(batch), temperature=0.6)
    compare(model, trainer_for(model, tmp_path, temperature=0.6, **WEIGHTS[name]), expected, "fisher")


def test_all_rows_give_the_same_gradient_at_the_head(tmp_path, monkeypatch):
    """Where there is neither Triton nor a CPU, TRL hands its head every row, scored or not."""
    monkeypatch.setattr(isopo_trl.trainer, "scored_rows_alone", lambda head: nullcontext())
    monkeypatch.setattr(isopo_trl.integrations.attention, "scores_rows_alone", lambda device: False)
    model = build("llama")
    compare(model, trainer_for(model, tmp_path, **WEIGHTS["p3o"]), reference("llama", False, "p3o"), "fisher")


@pytest.mark.parametrize(
    ("name", "lora", "rule"), [("p3o", False, "fisher"), ("p3o", True, "interacting"), ("kpo", True, "fisher")]
)
def test_gradient_checkpointing_changes_nothing(name, lora, rule, tmp_path):
    model, kwargs = build("llama", lora), {"use_reentrant": False}
    settings = {"gradient_checkpointing": True, "gradient_checkpointing_kwargs": kwargs, **WEIGHTS[name]}
    trainer = trainer_for(model, tmp_path, rule=rule, **settings)
    trainer.model.gradient_checkpointing_enable(kwargs)
    if not lora:
        trainer.model.enable_input_require_grads()
    compare(model, trainer, reference("llama", lora, name), rule)


@pytest.mark.parametrize(("name", "rule"), [("p3o", "none"), ("kpo wide", "fisher")])
def test_tokens_of_low_entropy_have_no_gradient_but_their_ratios_count(name, rule, tmp_path):
    model = build("llama")
    batch = ragged_batch(model)
    scored = scored_tokens(batch).bool()
    _, entropies = forward(model, batch)
    kept = scored & (entropies >= torch.quantile(entropies[scored], 0.4))
    assert 0 < kept.sum() < scored.sum()
    expected = refer(model, batch, name, normalisation(batch) * kept)
    compare(model, trainer_for(model, tmp_path, rule=rule, top_entropy_quantile=0.6, **WEIGHTS[name]), expected, rule)


@pytest.mark.parametrize("rule", ["fisher", "none"])
def test_sequences_that_are_masked_as_off_policy_are_not_pulled(rule, tmp_path):
    model = build("llama")
    batch = off_policy(model, oracle.random_batch([3, 1, 4, 2], [5, 2, 4, 3], 100, advantages=[-1.0, -0.5, -2.0, 1.0]))
    batch.advantages = batch.advantages.double()
    distance = -log_ratios(forward(model, batch)[0], batch).sum(1) / batch.completion_mask.sum(1)
    threshold = distance[:3].sort().values[:2].mean().item()
    kept = (batch.advantages >= 0) | (distance <= threshold)
    assert 1 < kept.sum() < 4
    expected = refer(model, batch, "p3o", normalisation(batch) * kept.unsqueeze(1))
    trainer = trainer_for(model, tmp_path, rule=rule, **WEIGHTS["p3o"])
    trainer.off_policy_mask_threshold = threshold
    compare(model, trainer, expected, rule)


@pytest.mark.parametrize(
    ("name", "rule", "case"),
    [
        ("p3o", "fisher", ([4], [5], [-0.7])),
        ("p3o", "none", ([3, 4], [3, 5], [0.0, 0.0])),
        ("kpo", "interacting", ([2, 7, 3], [1, 1, 1], [1.0, -1.0, 0.5])),
    ],
    ids=["one sequence", "all zero", "one token each"],
)
def test_degenerate_microbatches(name, rule, case, tmp_path):
    """With advantages of zero the pull is all there is."""
    prompts, completions, advantages = case
    model = build("llama")
    batch = oracle.random_batch(prompts, completions, 100, advantages=torch.tensor(advantages, dtype=torch.float64))
    batch = off_policy(model, batch)
    expected = refer(model, batch, name, normalisation(batch))
    compare(model, trainer_for(model, tmp_path, rule=rule, **WEIGHTS[name]), expected, rule)
