"""Every token weighting with every rule: the gradient is what the definition says, in float64."""

import pytest
import torch
import trl.trainer.utils

from tests import oracle, tiny
from tests.gradients.test_oracle import RULES, build, check, everything_in_float64, trainer_for  # noqa: F401
from tests.token_weights.definition import (
    ALL,
    FAMILIES,
    WEIGHTS,
    backward,
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


def crossed():
    """Every weighting with every rule, on all weights or with LoRA, each with either; the other way round is slow."""
    return [
        pytest.param(
            name,
            lora,
            rule,
            marks=[] if lora == (number + place // 2 + 1) % 2 else pytest.mark.slow,
            id=f"{name}-{'lora' if lora else 'full'}-{rule}",
        )
        for number, name in enumerate(WEIGHTS)
        for lora in (False, True)
        for place, rule in enumerate(RULES)
    ]


@pytest.mark.parametrize(("name", "lora", "rule"), crossed())
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


@pytest.mark.parametrize("scale", ["relative", "paper"])
@pytest.mark.parametrize("name", ["sampler", "p3o", "kpo", "kpo wide"])
@pytest.mark.parametrize(
    "settings",
    [
        {"rule": "fisher", "regularization": 0.3, "fisher_samples": ALL},
        {"rule": "fig4", "regularization": 0.3, "keep_small": True},
        {"rule": "interacting", "regularization": 0.1},
    ],
    ids=lambda settings: settings["rule"],
)
def test_settings_of_the_rule_enter_as_ever(settings, name, scale, tmp_path):
    model = build("llama")
    trainer = trainer_for(model, tmp_path, scale=scale, **settings, **WEIGHTS[name])
    formula = {key: value for key, value in settings.items() if key in ("regularization", "keep_small")}
    compare(model, trainer, reference("llama", False, name), settings["rule"], scale=scale, **formula)


@pytest.mark.parametrize(
    ("name", "loss_type"),
    [
        pytest.param(name, loss_type, marks=[] if name == "p3o" or place % 2 == number // 2 else pytest.mark.slow)
        for number, name in enumerate(("sampler", "p3o", "kpo"))
        for place, loss_type in enumerate(("grpo", "bnpo", "dr_grpo", "luspo"))
    ],
)
def test_every_normalisation(name, loss_type, tmp_path):
    model = build("llama", lora=True)
    trainer = trainer_for(model, tmp_path, loss_type=loss_type, scale="paper", **WEIGHTS[name])
    expected = reference("llama", True, name, loss_type=loss_type)
    compare(model, trainer, expected, "fisher", scale="paper")


@pytest.mark.parametrize(
    ("family", "name", "lora"),
    [
        pytest.param(
            family,
            name,
            lora,
            marks=[] if lora == (number + place) % 2 else pytest.mark.slow,
            id=f"{family}-{name}-{'lora' if lora else 'full'}",
        )
        for number, family in enumerate(FAMILIES[1:])
        for place, name in enumerate(("p3o", "kpo wide"))
        for lora in (False, True)
    ],
)
def test_every_family(family, name, lora, tmp_path):
    model = build(family, lora)
    trainer = trainer_for(model, tmp_path, **WEIGHTS[name])
    compare(model, trainer, reference(family, lora, name), "fisher")


@pytest.mark.parametrize("trained", ["lm_head", "embed_tokens", "norm", "layers.1"])
def test_pull_where_only_some_parameters_are_trained(trained, tmp_path):
    model = build("llama")
    for name, p in model.named_parameters():
        p.requires_grad_(trained in name)
    batch = ragged_batch(model)
    expected = refer(model, batch, "p3o", normalisation(batch))
    compare(model, trainer_for(model, tmp_path, **WEIGHTS["p3o"]), expected, "fisher")


@pytest.mark.parametrize("rule", ["fisher", "interacting", "none"])
@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_pull_reaches_both_uses_of_tied_weights(family, rule, tmp_path):
    model = build(family, tie=True)
    compare(
        model, trainer_for(model, tmp_path, rule=rule, **WEIGHTS["p3o"]), reference(family, False, "p3o", True), rule
    )


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


@pytest.mark.parametrize("mode", ["token_truncate", "token_mask", "sequence_truncate", "sequence_mask"])
def test_every_mode_of_the_sampler_correction(mode, tmp_path):
    model = build("llama")
    low, high = 0.7, 1.5
    settings = {"vllm_importance_sampling_clip_min": low, "vllm_importance_sampling_clip_max": high}
    trainer = trainer_for(
        model, tmp_path, token_weights="sampler", vllm_importance_sampling_mode=mode, rule="fig4", **settings
    )
    batch = ragged_batch(model)
    z = log_ratios(forward(model, batch)[0], batch)
    r = z.sum(1, keepdim=True).exp().expand_as(z) if mode.startswith("sequence") else z.exp()
    inside = (low <= r) & (r <= high)
    bounded = r.clamp(low, high) if mode.endswith("truncate") else torch.where(inside, r, 0.0)
    assert inside[scored_tokens(batch).bool()].any() and not inside[scored_tokens(batch).bool()].all()
    G = oracle.position_gradients(model, batch, normalisation(batch) * bounded)
    model.zero_grad()
    _, rows = backward(trainer, batch)
    check(model, oracle.expected_gradients(model, G, batch, rows, "fig4"))


@pytest.mark.parametrize("name", ["p3o", "kpo wide"])
def test_temperature(name, tmp_path):
    model = build("llama")
    batch = oracle.random_batch([3, 1, 4], [5, 2, 4], 100)
    batch = off_policy(model, batch, temperature=0.6)
    expected = refer(model, batch, name, normalisation(batch), temperature=0.6)
    compare(model, trainer_for(model, tmp_path, temperature=0.6, **WEIGHTS[name]), expected, "fisher")


@pytest.mark.parametrize("name", ["p3o", "kpo"])
def test_scored_rows_alone_give_the_same_gradient_at_the_head(name, tmp_path, monkeypatch):
    """With Triton, TRL hands its head only the scored rows."""
    monkeypatch.setattr(trl.trainer.utils, "_use_triton", lambda device: True)
    model = build("llama")
    compare(model, trainer_for(model, tmp_path, **WEIGHTS[name]), reference("llama", False, name), "fisher")


@pytest.mark.parametrize("rule", ["fisher", "interacting", "none"])
@pytest.mark.parametrize("lora", [False, True], ids=["full", "lora"])
@pytest.mark.parametrize("name", ["p3o", "kpo"])
def test_gradient_checkpointing_changes_nothing(name, lora, rule, tmp_path):
    model = build("llama", lora)
    checkpointing = {"use_reentrant": False}
    trainer = trainer_for(
        model,
        tmp_path,
        rule=rule,
        gradient_checkpointing=True,
        gradient_checkpointing_kwargs=checkpointing,
        **WEIGHTS[name],
    )
    trainer.model.gradient_checkpointing_enable(checkpointing)
    if not lora:
        trainer.model.enable_input_require_grads()
    compare(model, trainer, reference("llama", lora, name), rule)


@pytest.mark.parametrize("rule", ["fisher", "none"])
@pytest.mark.parametrize("name", ["sampler", "p3o", "kpo wide"])
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


@pytest.mark.parametrize("name", ["p3o", "kpo"])
@pytest.mark.parametrize(
    "prompts, completions, advantages",
    [([4], [5], [-0.7]), ([2, 7, 3], [1, 1, 1], [1.0, -1.0, 0.5]), ([3, 4], [3, 5], [0.0, 0.0])],
    ids=["one sequence", "one token each", "all zero"],
)
@pytest.mark.parametrize("rule", ["fisher", "interacting", "none"])
def test_degenerate_microbatches(rule, prompts, completions, advantages, name, tmp_path):
    """With advantages of zero the pull is all there is."""
    model = build("llama")
    batch = oracle.random_batch(prompts, completions, 100, advantages=torch.tensor(advantages, dtype=torch.float64))
    batch = off_policy(model, batch)
    expected = refer(model, batch, name, normalisation(batch))
    compare(model, trainer_for(model, tmp_path, rule=rule, **WEIGHTS[name]), expected, rule)


def test_reentrant_checkpointing_is_refused(tmp_path):
    settings = {"gradient_checkpointing": True, "gradient_checkpointing_kwargs": {"use_reentrant": True}}
    with pytest.raises(ValueError, match="reentrant"):
        trainer_for(build("llama"), tmp_path, token_weights="p3o", **settings)
    # Without a rule both parts go back together
    trainer_for(tiny.model("llama"), tmp_path, token_weights="p3o", rule="none", **settings)
