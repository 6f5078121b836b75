"""
Terms of the loss that carry no advantage: no rule rescales them, and all that TRL says of them stays as it is.

Gradients are compared in float64 with those of the formulas, which know nothing of TRL; runs and figures with TRL's.
"""

import pytest
import torch
from peft import LoraConfig, get_peft_model
from transformers import TrainerCallback
from trl import GRPOTrainer

from isopo_trl import ISOPOTrainer
from tests import oracle, tiny, training
from tests.gradients.test_oracle import BATCH, TOLERANCE, build, reference, trainer_for


LOSS_TYPES = ["grpo", "bnpo", "dr_grpo", "dapo", "luspo"]
BETA, ENTROPY = {"beta": 0.3}, {"entropy_coef": 0.2}
ADAPTIVE = {"use_adaptive_entropy": True, "entropy_coef": 0.1, "entropy_target": 5.0}
LORA = {"peft_config": LoraConfig(r=4, target_modules=["q_proj", "v_proj"])}


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """Where TRL finds the reference model of a model with full weights."""
    return tiny.save(tmp_path_factory.mktemp("terms") / "qwen3", "qwen3")


def counted(trainer):
    """The list to which each backward pass of terms will add an entry."""
    passes = []
    unscaled = trainer.isopo.unscaled
    trainer.isopo.unscaled = lambda term: (passes.append(term), unscaled(term))[1]
    return passes


# Gradients, in float64


def random_logps(seed):
    return -4.5 + torch.randn(4, 8, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def batch_with_reference(**extra):
    batch = BATCH()
    batch.extra.update(ref_per_token_logps=random_logps(5), **extra)
    return batch


def by_hand(model, batch, weights, *, beta=0.0, entropy_coef=0.0, older=None, corrected=True, share=None, heat=1.0):
    """Gradients of the terms alone: the KL divergence normalised as the loss is, the entropies' mean over `share`."""
    C = batch.completion_ids.shape[1]
    logits = model(batch.input_ids, attention_mask=batch.attention_mask, use_cache=False).logits[:, :-1][:, -C:]
    p = (logits / heat).log_softmax(-1)
    logps, entropies = p.gather(-1, batch.completion_ids[..., None]).squeeze(-1), -(p.exp() * p).sum(-1)
    gap = batch.extra["ref_per_token_logps"] - logps
    kl = gap.exp() - gap - 1
    if corrected:
        kl = kl * (logps - (logps.detach() if older is None else older)).exp()
    mask = batch.completion_mask * batch.extra.get("tool_mask", 1)
    if share is not None:  # of the tokens, those with the largest entropies
        mask = mask * (entropies >= entropies[mask.bool()].quantile(1 - share))
    term = beta * (weights * kl).sum() - entropy_coef * (entropies * mask).sum() / mask.sum()
    model.zero_grad()
    term.backward()
    gradients = {name: p.grad.clone() for name, p in model.named_parameters() if p.requires_grad}
    model.zero_grad()
    return term.item(), gradients


def check(actual, *parts):
    for name, gradient in actual.items():
        expected = sum(part[name] for part in parts)
        assert (gradient - expected).norm() < TOLERANCE * expected.norm(), name


@pytest.mark.usefixtures("float64_throughout")
@pytest.mark.parametrize(
    ("rule", "lora"), [("fisher", False), ("interacting", False), ("none", False), ("fig4", True), ("none", True)]
)
def test_rule_rescales_the_rest_of_the_loss_and_nothing_else(rule, lora, tmp_path):
    batch = batch_with_reference()
    weights = oracle.token_weights(batch)
    value, terms = by_hand(build("qwen3", lora), batch, weights, **BETA, **ENTROPY)
    model = build("qwen3", lora)
    if not lora:  # the reference model is loaded
        model.config._name_or_path = tiny.save(tmp_path / "model", "qwen3", dtype=torch.float64)
    trainer = trainer_for(model, tmp_path, rule=rule, fisher_samples=10_000, **BETA, **ENTROPY)
    passes = counted(trainer)
    loss, gradients = training.gradients(trainer, batch.for_trl())
    policy = oracle.expected_gradients(model, reference("qwen3", lora), batch, None, rule)
    check(gradients, terms, {name: policy[p] for name, p in model.named_parameters() if p in policy})
    assert len(passes) == (rule != "none")
    assert loss == pytest.approx(value - (weights.sum(1) * batch.advantages).sum().item(), abs=1e-12)


def difference(settings, terms, tmp_path, batch, accumulation=1, passes=1):
    """What the terms change in the gradients of a model with LoRA, for which they go back so many times."""
    results = []
    for added in ({}, terms):
        trainer = trainer_for(build("qwen3", lora=True), tmp_path, fisher_samples=10_000, **settings, **added)
        trainer.current_gradient_accumulation_steps = accumulation
        count = counted(trainer)
        inputs = batch.for_trl()
        if not added:
            inputs.pop("old_per_token_logps", None)
        results.append(training.gradients(trainer, inputs)[1])
    assert len(count) == passes
    without, with_terms = results
    return {name: with_terms[name] - without[name] for name in without}


@pytest.mark.usefixtures("float64_throughout")
@pytest.mark.parametrize("loss_type", LOSS_TYPES)
def test_terms_are_normalised_as_in_trl(loss_type, tmp_path):
    batch = batch_with_reference()
    # dapo's normaliser is the generation's, which is all of one step here
    settings = {"loss_type": loss_type, "gradient_accumulation_steps": 1 if loss_type == "dapo" else 3}
    accumulation = settings["gradient_accumulation_steps"]
    change = difference(settings, {**BETA, **ENTROPY}, tmp_path, batch, accumulation=accumulation)
    weights = oracle.token_weights(batch, loss_type, accumulation, max_completion_length=8)
    coefficients = {**BETA, "entropy_coef": ENTROPY["entropy_coef"] / accumulation}
    check(change, by_hand(build("qwen3", True), batch, weights, **coefficients)[1])


TOOLS = torch.tensor([[1, 0, 0, 1, 1, 1, 1, 1], [1, 1, 0, 1, 1, 1, 0, 1], [1] * 8, [1] * 8])


@pytest.mark.usefixtures("float64_throughout")
@pytest.mark.parametrize(
    "settings, formula",
    [
        ({"use_bias_correction_kl": False}, {"corrected": False}),
        ({"temperature": 0.7}, {"heat": 0.7}),
        ({"top_entropy_quantile": 0.4}, {"share": 0.4}),
        ({"gradient_checkpointing": True, "rule": "interacting"}, {}),
        ({"token_weights": "sampler", "vllm_importance_sampling_mode": "token_truncate"}, {}),
    ],
    ids=str,
)
def test_terms_are_those_of_the_formula_whatever_the_policy_has(settings, formula, tmp_path):
    batch = batch_with_reference(tool_mask=TOOLS, sampling_per_token_logps=random_logps(6))
    scored = batch.completion_mask * TOOLS
    change = difference(settings, {**BETA, **ENTROPY}, tmp_path, batch)
    weights = scored.double() / batch.completion_mask.sum()
    check(change, by_hand(build("qwen3", True), batch, weights, **BETA, **ENTROPY, **formula)[1])


@pytest.mark.usefixtures("float64_throughout")
@pytest.mark.parametrize("source", ["sampling_per_token_logps", "old_per_token_logps"])
def test_kl_of_stale_tokens_is_corrected_by_the_ratio_to_the_policy_that_drew_them(source, tmp_path):
    """As the sampler told it, or as TRL computed it for a silent one: there it is for the KL divergence alone."""
    older = random_logps(6)
    batch = batch_with_reference(**{source: older})
    change = difference({"num_iterations": 2}, BETA, tmp_path, batch)
    expected = by_hand(build("qwen3", True), batch, oracle.token_weights(batch), **BETA, older=older)[1]
    check(change, expected)
    if source == "old_per_token_logps":
        return
    # Those of the step's own generation have a ratio of 1 in TRL, whatever the sampler says
    batch.extra.update(generated_after=torch.tensor(0), drawn_by_policy=torch.tensor(False))
    fresh = difference({"num_iterations": 2}, BETA, tmp_path, batch)
    check(fresh, by_hand(build("qwen3", True), batch, oracle.token_weights(batch), **BETA)[1])


@pytest.mark.usefixtures("float64_throughout")
@pytest.mark.parametrize("rule", ["fisher", "none"])
def test_pull_of_p3o_and_terms_share_one_pass(rule, tmp_path):
    batch = batch_with_reference(sampling_per_token_logps=random_logps(6))
    settings = {"token_weights": "p3o", "rule": rule}
    change = difference(settings, {**BETA, **ENTROPY}, tmp_path, batch, passes=int(rule != "none"))
    check(change, by_hand(build("qwen3", True), batch, oracle.token_weights(batch), **BETA, **ENTROPY)[1])


@pytest.mark.usefixtures("float64_throughout")
@pytest.mark.parametrize("rule", ["fisher", "none"])
def test_load_balancing_loss_is_added_as_it_is(rule, tmp_path, monkeypatch):
    calls, compute = [], GRPOTrainer._compute_loss
    monkeypatch.setattr(GRPOTrainer, "_compute_loss", lambda *given: calls.append(given) or compute(*given))
    model = build("qwen3_moe", target_modules=["q_proj", "v_proj"])
    batch = BATCH()
    ids, mask = batch.input_ids, batch.attention_mask
    output = model(ids, attention_mask=mask, output_router_logits=True, use_cache=False)
    (0.7 * output.aux_loss).backward()
    expected = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    results = []
    for coefficient in (0.0, 0.7):
        trainer = trainer_for(model, tmp_path, rule=rule, router_aux_loss_coef=coefficient)
        passes = counted(trainer)
        results.append(training.gradients(trainer, batch.for_trl())[1])
        trainer.isopo.detach()
    assert len(passes) == (rule != "none")
    assert len(calls) == 2 * len(results)  # for the forward pass and the loss; beside other terms, once more
    without, with_term = results
    check({name: with_term[name] - without[name] for name in expected}, expected)


# Where there is nothing to go back for


@pytest.mark.parametrize(
    "settings, passes",
    [
        ({**ADAPTIVE, "entropy_target": 0.1}, [0, 0]),  # the bonus is for a policy with less entropy
        (ADAPTIVE, [0, 1]),  # from the second step on: the first has no measurement
        (BETA, [0, 1]),  # LoRA before its first step: B is zero, and the divergence with it
        (ENTROPY, [1, 1]),
    ],
    ids=str,
)
def test_pass_is_made_only_where_a_term_has_a_gradient(settings, passes, tmp_path):
    trainer = training.build(tmp_path, options=LORA, **settings)
    count, per_step = counted(trainer), []

    class Steps(TrainerCallback):
        def on_step_end(self, *args, **kwargs):
            per_step.append(len(count))
            count.clear()

    trainer.add_callback(Steps)
    training.train(trainer)
    assert per_step == passes


# Against TRL


def runs(model, tmp_path, options=None, **settings):
    """Three steps of TRL's trainer and of ours with rule `none`, generation included; the log lines of each."""
    settings = {"max_steps": 3, "optim": "sgd", "learning_rate": 0.3, **settings}
    trainers, lines = [], []
    for kind, rule in ((GRPOTrainer, {}), (ISOPOTrainer, {"rule": "none"})):
        own = model() if callable(model) else model
        trainers.append(training.build(tmp_path, own, kind, options=options, **settings, **rule))
        trainers[-1].train()
        log = trainers[-1].state.log_history
        lines.append([line for line in log if "loss" in line or "eval_loss" in line])
    return trainers, lines


def same_weights(plain, own):
    expected = dict(plain.named_parameters())
    for name, p in own.named_parameters():
        assert (p - expected[name]).norm() <= 1e-5 * expected[name].norm(), name


OF_TIME = ("_time", "runtime", "per_second")


def same_lines(expected, actual, needed):
    assert len(expected) == len(actual) > 2
    assert needed <= set().union(*expected)
    for left, right in zip(expected, actual, strict=True):
        right = {name: x for name, x in right.items() if not name.startswith("isopo/")}
        assert left.keys() == right.keys()
        for name, value in left.items():
            if not name.endswith(OF_TIME):
                assert right[name] == pytest.approx(value, abs=2e-5, rel=2e-5), name


def trained_adapter():
    """A PEFT model whose adapter was trained before: TRL keeps a copy of it, under the name `ref`."""
    model = get_peft_model(tiny.model("qwen3"), LORA["peft_config"])
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for name, p in model.named_parameters():
            if "lora_" in name:
                p.copy_(0.2 * torch.randn(p.shape, generator=generator))
    return model


@pytest.mark.parametrize(
    "model, options, settings, needed",
    [
        ("saved", None, {**BETA, "eval_strategy": "steps", "eval_steps": 2}, {"kl", "eval_kl"}),
        ("saved", None, {**BETA, "sync_ref_model": True, "ref_model_sync_steps": 2}, {"kl"}),
        (trained_adapter, None, {**BETA, **ENTROPY, "gradient_accumulation_steps": 2}, {"kl", "policy_loss"}),
        ("qwen3", LORA, {**BETA, **ADAPTIVE, "use_bias_correction_kl": False}, {"kl", "entropy_coef"}),
        ("qwen3_moe", LORA, {"router_aux_loss_coef": 0.5}, {"aux_loss"}),
    ],
    ids=["beta", "synced", "trained adapter", "adapter off, adaptive", "experts"],
)
def test_rule_none_trains_to_the_weights_of_trl(model, options, settings, needed, saved, tmp_path):
    model = saved if model == "saved" else model
    if "eval_steps" in settings:
        options = {"eval_dataset": tiny.prompts(3)}
        settings = {**settings, "per_device_eval_batch_size": 3}
    (plain, own), (expected, actual) = runs(model, tmp_path, options, **settings)
    same_weights(plain.model, own.model)
    same_lines(expected, actual, needed)
    if settings.get("sync_ref_model"):
        same_weights(plain.ref_model, own.ref_model)
        start = dict(tiny.model("qwen3").named_parameters())
        assert all(not torch.equal(p, start[name]) for name, p in own.ref_model.named_parameters())


def test_no_old_policy_is_scored_for_the_kl(tmp_path):
    """Three generations for six steps: a pass of the reference each, and one forward for each loss."""
    passes = []

    class Noting(ISOPOTrainer):
        def _get_per_token_logps_and_entropies(self, *args, **kwargs):
            passes.append("loss" if kwargs.get("compute_entropy") else "generation")
            return super()._get_per_token_logps_and_entropies(*args, **kwargs)

        def _compute_loss(self, model, inputs):  # which is told what tokens were drawn with, for the correction
            assert torch.isfinite(inputs["sampling_per_token_logps"]).all()
            return super()._compute_loss(model, inputs)

    training.build(tmp_path, kind=Noting, options=LORA, num_iterations=2, max_steps=6, **BETA).train()
    assert passes.count("generation") == 3 and passes.count("loss") == 6


def test_adaptive_bonus_goes_on_from_a_checkpoint(tmp_path):
    settings = {**ADAPTIVE, "save_strategy": "steps", "save_steps": 2, "rule": "fisher"}
    whole = training.build(tmp_path, max_steps=3, **settings)
    whole.train()
    resumed = training.build(tmp_path, max_steps=3, **settings)
    resumed.train(str(tmp_path / "checkpoint-2"))
    assert resumed.entropy_coef == whole.entropy_coef != ADAPTIVE["entropy_coef"]
    same_weights(whole.model, resumed.model)


# Refusals


@pytest.mark.parametrize("settings", [BETA, ENTROPY, {"token_weights": "p3o"}], ids=str)
def test_reentrant_checkpointing_cannot_go_back_twice(settings, tmp_path):
    settings = {**settings, "gradient_checkpointing_kwargs": {"use_reentrant": True}}
    with pytest.raises(ValueError, match=f"{next(iter(settings))}=.* back through the model twice"):
        training.build(tmp_path, options=LORA, **settings)
    training.build(tmp_path, options=LORA, rule="none", **settings)
