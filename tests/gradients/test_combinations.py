"""Settings that are tested one by one elsewhere, together: what goes wrong only in combination."""

import dataclasses
import functools

import pytest
import torch
from peft import LoraConfig
from trl import GRPOTrainer

from isopo_trl import ISOPO, ISOPOTrainer
from isopo_trl.layers.experts import is_experts
from tests import oracle, tiny, training
from tests.gradients import mixtures
from tests.gradients import test_peft as peft
from tests.gradients.test_oracle import TOLERANCE, build, trainer_for
from tests.layers import test_any_module as any_module
from tests.layers import test_experts as experts
from tests.token_weights import test_ratio_loss as ratio_loss
from tests.token_weights.definition import ALL, backward, ragged_batch, scored_tokens


TERMS = {"beta": 0.3, "entropy_coef": 0.2}
LORA = {"peft_config": LoraConfig(r=2, lora_alpha=8, target_modules="all-linear")}


# Losses of the ratio, and terms without an advantage


def with_reference(batch, model):
    """A reference model's log-probabilities of the tokens."""
    shape = batch.completion_ids.shape
    noise = torch.randn(shape, generator=torch.Generator().manual_seed(5), dtype=torch.float64)
    batch.extra["ref_per_token_logps"] = -4.5 + noise
    return batch


def terms_by_hand(model, batch, n, by_sequence=False, corrected=True, terms=TERMS, temperature=1.0):
    """
    Value and gradients of `beta` KL, corrected by the ratio to the policy that drew the tokens and normalised by `n`
    `[B, C]`, and of the entropy bonus.
    """
    C, scored = batch.completion_ids.shape[1], scored_tokens(batch)
    logits = model(batch.input_ids, attention_mask=batch.attention_mask, use_cache=False).logits[:, :-1][:, -C:]
    p = (logits / temperature).log_softmax(-1)
    logps, entropies = p.gather(-1, batch.completion_ids[..., None]).squeeze(-1), -(p.exp() * p).sum(-1)
    gap = batch.extra["ref_per_token_logps"] - logps
    kl = gap.exp() - gap - 1
    if corrected:
        sampler = batch.extra["sampling_per_token_logps"]
        z = torch.where(scored.bool(), logps - torch.where(sampler.isnan(), logps.detach(), sampler), 0)
        if by_sequence:
            z = z.sum(1, keepdim=True) / scored.sum(1, keepdim=True).clamp(min=1)
        kl = kl * z.exp()
    bonus = (entropies * scored).sum() / scored.sum().clamp(min=1)  # every completion may have been truncated
    term = terms["beta"] * (n * kl).sum() - terms["entropy_coef"] * bonus
    model.zero_grad()
    term.backward()
    gradients = {p: p.grad.clone() for p in model.parameters() if p.requires_grad}
    model.zero_grad()
    return term.item(), gradients


@pytest.mark.usefixtures("float64_throughout")
@pytest.mark.parametrize(
    ("name", "rule", "corrected"),
    [("clipped", "fisher", True), ("GSPO", "interacting", True), ("CISPO", "none", False), ("VESPO", "fisher", True)],
)
def test_terms_beside_a_loss_of_the_ratio_are_those_of_the_formula(name, rule, corrected, tmp_path):
    model = build("llama", lora=True)
    settings = {**ratio_loss.LOSSES[name], **TERMS, "use_bias_correction_kl": corrected, "num_iterations": 2}
    expected = ratio_loss.refer(model, with_reference(ragged_batch(model), model), ratio_loss.LOSSES[name])
    trainer = trainer_for(model, tmp_path, rule=rule, fisher_samples=ALL, **settings)
    by_sequence = settings.get("importance_sampling_level") == "sequence"
    n = ratio_loss.normalised(expected.batch, settings)
    value, gradients = terms_by_hand(model, expected.batch, n, by_sequence, corrected)
    loss, _ = backward(trainer, expected.batch)
    policy = expected.gradients(model, None, rule)
    error, where = oracle.worst_error(model, {p: policy[p] + gradients[p] for p in policy})
    assert error < TOLERANCE, f"{where}: {error}"
    assert loss == pytest.approx(expected.expected.loss + value, rel=1e-9, abs=1e-12)


EVERYTHING = {**TERMS, "num_iterations": 2, "per_device_train_batch_size": 5, "num_generations": 5}
EVERYTHING["gradient_checkpointing"] = False
AS_IN_TRL = [
    {"epsilon": 0.2},
    {"epsilon": 0.05, "loss_type": "grpo", "importance_sampling_level": "sequence"},
    {"loss_type": "cispo", "epsilon_high": 1.2, "use_bias_correction_kl": False},
    {"epsilon": 0.2, "off_policy_mask_threshold": 0.05, "top_entropy_quantile": 0.6, "loss_type": "dr_grpo"},
    {"loss_type": "vespo", "off_policy_mask_threshold": 0.05},
    {"loss_type": "sapo", "top_entropy_quantile": 0.6, "importance_sampling_level": "sequence"},
    {"loss_type": "luspo", "epsilon": 0.05, "importance_sampling_level": "sequence", "delta": 1.2},
    {"loss_type": "bnpo", "epsilon": 0.2, "steps_per_generation": 4, "gradient_accumulation_steps": 2},
    {"epsilon": 0.2, "steps_per_generation": 4, "gradient_accumulation_steps": 2},
]


@pytest.mark.usefixtures("float64_throughout")
@pytest.mark.parametrize("settings", AS_IN_TRL, ids=str)
def test_rule_none_has_loss_gradient_and_metrics_of_grpo(settings, tmp_path):
    """One completion is as `mask_truncated_completions` leaves it, without a token that is scored."""
    results = []
    for kind, rule in ((GRPOTrainer, {}), (ISOPOTrainer, {"rule": "none"})):
        model = build("qwen3", lora=True)
        trainer = training.build(tmp_path, model, kind=kind, **EVERYTHING, **settings, **rule)
        training.prepared(trainer, settings.get("gradient_accumulation_steps", 1))
        batch = oracle.random_batch(
            [3, 1, 5, 4, 2], [6, 5, 1, 4, 3], 100, advantages=torch.tensor([1.3, -0.7, 0.4, 0.0, -0.3]).double()
        )
        batch.completion_mask[1] = 0
        with_reference(batch, trainer.model)
        logps = ratio_loss.scored(trainer, batch.for_trl())
        noise = torch.randn(logps.shape, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
        batch.extra["old_per_token_logps"] = logps - 0.5 * noise
        loss, gradients = training.gradients(trainer, batch.for_trl())
        trainer.model.eval()
        with torch.no_grad():
            evaluated = trainer.compute_loss(trainer.model, batch.for_trl()).item()
        results.append((loss, gradients, evaluated, trainer._metrics))
    (loss, gradients, evaluated, metrics), own = results
    assert training.distance(own[1], gradients) < TOLERANCE
    assert (own[0], own[2]) == pytest.approx((loss, evaluated), rel=1e-9)
    for mode, figures in metrics.items():
        assert {"kl", "policy_loss", "entropy"} <= figures.keys()
        for name, values in figures.items():
            assert own[3][mode][name] == pytest.approx(values, rel=1e-9, abs=1e-15, nan_ok=True), (mode, name)
        assert {name for name in own[3][mode] if "/" not in name} == {name for name in figures if "/" not in name}


# Resuming


CHECKPOINTS = {"save_strategy": "steps", "save_steps": 1, "max_completion_length": 3, "num_iterations": 2}


def resumed(folder, step, **settings):
    trainer = training.build(folder, data=tiny.prompts(4), **{**CHECKPOINTS, "max_steps": 3, **settings})
    trainer.train(resume_from_checkpoint=folder / f"checkpoint-{step}" if step else None)
    return trainer


def test_a_run_resumed_inside_a_generation_has_the_weights_of_an_unbroken_one(tmp_path):
    settings = {"epsilon": 0.01, **TERMS, "options": LORA}
    whole = resumed(tmp_path, None, **settings)
    expected = dict(whole.model.named_parameters())
    again = resumed(tmp_path, 1, **settings)
    assert all(torch.equal(p, expected[name]) for name, p in again.model.named_parameters())
    lines = [[line for line in trainer.state.log_history if "loss" in line] for trainer in (whole, again)]
    figures = [{k: v for k, v in of_run[-1].items() if "time" not in k} for of_run in lines]
    assert figures[0] == figures[1]


def test_a_loss_that_takes_the_ratio_since_is_reported(tmp_path, caplog):
    resumed(tmp_path, None, max_steps=2)
    resumed(tmp_path, 2, epsilon=0.2)
    assert "epsilon=None to 0.2" in caplog.text
    caplog.clear()
    resumed(tmp_path, 3, loss_type="cispo", max_steps=4)
    assert "0.2 to None" in caplog.text and "loss_type='dapo' to 'cispo'" in caplog.text


def test_completions_without_what_the_loss_asks_for_since_are_not_used(tmp_path, caplog):
    """A reference model, or what tokens were drawn with: neither is in a generation that was made without."""
    resumed(tmp_path, None, max_steps=1, options=LORA)
    for change in ({"beta": 0.1}, {"epsilon": 0.2}):
        caplog.clear()
        resumed(tmp_path, 1, options=LORA, **change)
        assert "the loss now asks for more than was noted" in caplog.text


# Mixtures of experts: the load-balancing loss as it is, the rest by the rule


BESIDE = {"alone": {}, "terms": TERMS, "p3o": {"token_weights": "p3o"}}


def outputs(model, batch):
    """Log-probabilities and entropies `[B, C]`, and the load-balancing loss where there is one."""
    C = batch.completion_ids.shape[1]
    extra = {"output_router_logits": True} if any(map(is_experts, model.modules())) else {}
    output = model(input_ids=batch.input_ids, attention_mask=batch.attention_mask, use_cache=False, **extra)
    p = output.logits[:, :-1][:, -C:].log_softmax(-1)
    logps = p.gather(-1, batch.completion_ids[..., None]).squeeze(-1)
    return logps, -(p.exp() * p).sum(-1), getattr(output, "aux_loss", None)


def plain_gradients(model, batch, term):
    """Gradients, by name, of a scalar made of the [`outputs`]."""
    model.zero_grad()
    term(*outputs(model, batch)).backward()
    gradients = {n: torch.zeros_like(p) if p.grad is None else p.grad.clone() for n, p in model.named_parameters()}
    model.zero_grad()
    return gradients


@pytest.mark.usefixtures("float64_throughout")
@pytest.mark.parametrize(
    ("family", "lora", "name", "checkpointing"),
    [("qwen3_moe", False, "alone", True), ("mixtral", True, "p3o", False), ("gpt_oss", True, "terms", True)],
)
def test_experts_and_routers_are_rescaled_but_not_for_the_load_balance(family, lora, name, checkpointing, tmp_path):
    router, settings = "router" if family == "gpt_oss" else "gate", BESIDE[name]
    targets = ("mlp.experts.gate_up_proj", "mlp.experts.down_proj", f"mlp.{router}.weight")
    model, plain = (experts.build(family, experts.adapted(*targets) if lora else None) for _ in range(2))
    batch = with_reference(experts.BATCH(), model)
    n, weights = oracle.token_weights(batch), oracle.token_weights(batch)
    pull = 0.0
    with torch.no_grad():
        logps = outputs(plain, batch)[0]
    noise = torch.randn(logps.shape, generator=torch.Generator().manual_seed(6), dtype=torch.float64)
    batch.extra["sampling_per_token_logps"] = logps - 0.5 * noise
    if settings.get("token_weights") == "p3o":
        z = 0.5 * noise
        r = z.exp()[batch.completion_mask.bool()]
        ess = r.sum() ** 2 / (len(r) * r.square().sum())
        weights, pull = n * z.exp().clamp(max=ess), (1 - ess) * n * z * z.exp()
    settings = {"fisher_samples": ALL, "gradient_checkpointing": checkpointing, **settings}
    trainer = trainer_for(model, tmp_path, **settings)
    if checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": False})
        model.enable_input_require_grads()
    coefficient = trainer.router_aux_loss_coef
    assert trainer.aux_loss_enabled and coefficient > 0 and model.is_gradient_checkpointing == checkpointing

    def terms(logps, entropies, aux_loss):
        gap = batch.extra["ref_per_token_logps"] - logps
        kl = (gap.exp() - gap - 1) * (logps - logps.detach()).exp()
        bonus = (entropies * batch.completion_mask).sum() / batch.completion_mask.sum()
        total = settings.get("beta", 0.0) * (n * kl).sum() - settings.get("entropy_coef", 0.0) * bonus
        return total + (pull * logps).sum() + coefficient * aux_loss

    unscaled = plain_gradients(plain, batch, terms)
    backward(trainer, batch)
    G = mixtures.position_gradients(plain, batch, weights)
    policy = mixtures.expected_gradients(plain, G, batch, None)
    error, where = mixtures.worst_error(model, {name: policy[name] + unscaled[name] for name in policy})
    assert error < TOLERANCE, f"{where}: {error}"


# Gradients per sequence


@pytest.mark.usefixtures("float64_throughout")
@pytest.mark.parametrize(("kind", "name", "checkpointing"), [("mamba2", "terms", False), ("DoRA", "p3o", True)])
def test_gradients_per_sequence_have_terms_as_they_are_over_two_microbatches(kind, name, checkpointing, tmp_path):
    def made():
        return any_module.build_model(kind) if kind in any_module.FAMILIES else peft.adapted(kind).double()

    plain, results = made(), []
    batches = [with_reference(oracle.random_batch([3, 1, 4], [5, 6, 1], 100, seed=seed), plain) for seed in (0, 1)]
    noise = torch.randn(2, 3, 6, generator=torch.Generator().manual_seed(6), dtype=torch.float64)
    for batch, z in zip(batches, noise, strict=True):
        with torch.no_grad():
            batch.extra["sampling_per_token_logps"] = outputs(plain, batch)[0] - 0.5 * z
    for added in (False, True):
        model = made()
        settings = BESIDE[name] if added or name == "p3o" else {}
        if "beta" in settings and kind in any_module.FAMILIES:
            model.save_pretrained(tmp_path / "model")
            tiny.tokenizer().save_pretrained(tmp_path / "model")
            model.config._name_or_path = str(tmp_path / "model")
        settings = {**settings, "loss_type": "grpo", "gradient_accumulation_steps": 2}
        trainer = trainer_for(model, tmp_path, fisher_samples=ALL, gradient_checkpointing=checkpointing, **settings)
        trainer.current_gradient_accumulation_steps = 2
        if checkpointing:
            model.gradient_checkpointing_enable({"use_reentrant": False})
            model.enable_input_require_grads()
        if name == "p3o" and not added:
            weigh = trainer.weighting.weigh
            trainer.weighting.weigh = lambda tokens, weigh=weigh: dataclasses.replace(weigh(tokens), unscaled=None)
        for batch in batches:
            backward(trainer, batch)
        results.append({n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None})

    def terms(logps, entropies, _, batch, z, ess):
        n, mask = oracle.token_weights(batch, "grpo", accumulation=2), batch.completion_mask
        if name == "p3o":
            return ((1 - ess) * n * z * z.exp() * logps).sum()
        gap = batch.extra["ref_per_token_logps"] - logps
        kl = (gap.exp() - gap - 1) * (logps - logps.detach()).exp()
        bonus = (entropies * mask).sum() / mask.sum()
        return TERMS["beta"] * (n * kl).sum() - TERMS["entropy_coef"] * bonus / 2

    expected, seen = [], []
    for batch, z in zip(batches, 0.5 * noise, strict=True):
        seen.append(z.exp()[batch.completion_mask.bool()])
        r = torch.cat(seen)  # the step's tokens so far
        ess = r.sum() ** 2 / (len(r) * r.square().sum())
        expected.append(plain_gradients(plain, batch, functools.partial(terms, batch=batch, z=z, ess=ess)))
    without, with_terms = results
    for n, gradient in with_terms.items():
        difference, right = gradient - without[n], expected[0][n] + expected[1][n]
        assert (difference - right).norm() <= TOLERANCE * (right.norm() + gradient.norm()), n
    assert with_terms.keys() == without.keys() == {n for n, p in plain.named_parameters() if p.requires_grad}


@pytest.mark.parametrize("copied", [False, True], ids=["adapter off", "trained before"])
def test_kl_in_the_reward_knows_the_reference_of_virtual_tokens(copied, tmp_path):
    options = {"options": {"peft_config": peft.METHODS["prompt tuning"]()}}
    given = {"model": peft.adapted("prompt tuning").float()} if copied else options
    trainer = training.build(tmp_path, gradient_checkpointing=False, beta=0.1, kl_in_reward=True, **given)
    (first, second) = training.train(trainer, still=(".ref.",))
    assert (abs(first["kl"]) < 1e-5) == copied and second["kl"] != 0


@pytest.mark.usefixtures("float64_throughout")
@pytest.mark.parametrize("rule", ["fisher", "interacting"])
def test_sequences_that_send_an_expert_a_single_token_have_the_gradient_of_the_definition(rule):
    model, plain = experts.build("qwen3_moe"), experts.build("qwen3_moe")
    batch = oracle.random_batch([1, 1, 5], [1, 2, 4], 100)
    experts.backward(model, batch, ISOPO(model, rule, fisher_samples=ALL))
    G = mixtures.position_gradients(plain, batch, oracle.token_weights(batch))
    experts.check(model, mixtures.expected_gradients(plain, G, batch, None, rule))
