"""The test that decides: every parameter's gradient is what the definition says, in float64."""

import functools

import pytest
import torch
import trl.trainer.utils
from peft import LoraConfig, get_peft_model

import isopo_trl.layers.linear
import isopo_trl.layers.lm_head
from isopo_trl import ISOPO, ISOPOConfig, ISOPOTrainer
from isopo_trl.rules.running import EXPECTATIONS
from tests import oracle, tiny


FAMILIES = ["llama", "qwen2", "qwen3", "gemma2", "gemma3", "gpt2", "mistral", "phi3"]
RULES = ["fisher", "npg", "fig4", "euclidean", "interacting", "none"]
TOLERANCE = 1e-9


@pytest.fixture(autouse=True)
def everything_in_float64(monkeypatch):
    """Models and TRL's fused head go to float32 in places, whatever the model is in; here they cannot."""
    monkeypatch.setattr(torch.Tensor, "float", torch.Tensor.double)
    for name in ("float", "float32"):  # both names are in use
        monkeypatch.setattr(torch, name, torch.float64)


def build(family, lora=False, tie=None, **lora_settings):
    model = tiny.model(family, tie=tie, dtype=torch.float64)
    if lora or lora_settings:
        settings = {"r": 2, "lora_alpha": 8, "target_modules": "all-linear", **lora_settings}
        model = get_peft_model(model, LoraConfig(**settings)).to(torch.float64)
        generator = torch.Generator().manual_seed(1)
        with torch.no_grad():
            for name, p in model.named_parameters():
                if "lora_" in name:  # B starts at zero; here both factors have a gradient
                    p.copy_(torch.randn(p.shape, generator=generator, dtype=torch.float64) * 0.3)
    return model


def trainer_for(model, tmp_path, **settings):
    settings = {"gradient_checkpointing": False, "fisher_samples": 7, "bf16": False, **settings}
    args = ISOPOConfig(
        str(tmp_path),
        use_cpu=True,
        report_to=[],
        per_device_train_batch_size=4,
        num_generations=4,
        max_completion_length=8,
        **settings,
    )
    trainer = ISOPOTrainer(model, tiny.reward, args, tiny.prompts(4), processing_class=tiny.tokenizer())
    trainer.current_gradient_accumulation_steps = 1
    trainer.model.train()
    return trainer


def backward(trainer, batch):
    """Gradients as the trainer makes them, added to those there are; returns the sampled rows."""
    trainer.compute_loss(trainer.model, batch.for_trl()).backward()
    samples = trainer.isopo.current.samples
    trainer.isopo.end()
    return None if samples is None else samples.rows[~samples.absent]


def check(model, expected, tolerance=TOLERANCE):
    error, name = oracle.worst_error(model, expected)
    assert error < tolerance, f"{name}: {error}"


BATCH = functools.partial(oracle.random_batch, [3, 1, 5, 4], [6, 8, 1, 4], 100)


@functools.cache
def reference(family, lora, tie=None):
    """The oracle's per-position gradients, the same for all rules."""
    batch = BATCH()
    return oracle.position_gradients(build(family, lora, tie), batch, oracle.token_weights(batch))


def crossed():
    """Every family with every rule; with LoRA, every family with half of the rules, and the other half is slow."""
    return [
        pytest.param(
            family,
            lora,
            rule,
            marks=pytest.mark.slow if lora and (number + place) % 2 else [],
            id=f"{family}-{'lora' if lora else 'full'}-{rule}",
        )
        for number, family in enumerate(FAMILIES)
        for lora in (False, True)
        for place, rule in enumerate(RULES)
    ]


@pytest.mark.parametrize(("family", "lora", "rule"), crossed())
def test_gradient_is_the_definition(family, lora, rule, tmp_path):
    model = build(family, lora)
    rows = backward(trainer_for(model, tmp_path, rule=rule), BATCH())
    check(model, oracle.expected_gradients(model, reference(family, lora), BATCH(), rows, rule))


@pytest.mark.parametrize("strategy", ["ghost", "whole", "blocks"])
@pytest.mark.parametrize("rule", ["fisher", "fig4", "interacting"])
@pytest.mark.parametrize("family", ["qwen2", "gemma3", "gpt2"])  # biases, soft caps and scales, Conv1D
def test_every_strategy_gives_the_same_gradient(family, rule, strategy, tmp_path, monkeypatch):
    for module in (isopo_trl.layers.linear, isopo_trl.layers.lm_head):
        monkeypatch.setattr(module, "choose_strategy", lambda *_: strategy)
    monkeypatch.setattr(isopo_trl.layers.lm_head, "_TILE", 23 * 10)  # several tiles, the last one narrower
    monkeypatch.setattr(isopo_trl.geometry.cost, "WHOLE_LIMIT", 4 * 17 * 5)
    model = build(family)
    rows = backward(trainer_for(model, tmp_path, rule=rule, scale="paper"), BATCH())
    check(model, oracle.expected_gradients(model, reference(family, False), BATCH(), rows, rule, scale="paper"))


@pytest.mark.parametrize("scale", ["relative", "paper"])
@pytest.mark.parametrize(
    "settings",
    [
        {"rule": "fisher", "regularization": 0.3},
        {"rule": "fig4", "regularization": 0.3, "keep_small": True},
        {"rule": "interacting", "regularization": 0.1},
        {"rule": "npg", "fisher_power": -0.5, "norm_power": 0.25, "regularization": 2.0},
        {"rule": "fisher", "fisher_samples": 10_000},
        {"rule": "fisher", "fisher_samples": 3},
    ],
    ids=lambda settings: "-".join(str(value) for value in settings.values()),
)
def test_every_setting_enters_as_the_formula_says(settings, scale, tmp_path):
    model = build("qwen2")
    rows = backward(trainer_for(model, tmp_path, scale=scale, **settings), BATCH())
    if settings.get("fisher_samples") == 10_000:
        rows = None  # the oracle takes all real positions
    formula = {name: value for name, value in settings.items() if name in ("regularization", "keep_small")}
    rule = (-0.5, 0.25, -2) if settings["rule"] == "npg" else settings["rule"]
    check(
        model, oracle.expected_gradients(model, reference("qwen2", False), BATCH(), rows, rule, scale=scale, **formula)
    )


@pytest.mark.parametrize("rule", ["fisher", "interacting"])
@pytest.mark.parametrize("lora", [False, True], ids=["full", "lora"])
@pytest.mark.parametrize("reentrant", [False, True])
def test_gradient_checkpointing_changes_nothing(reentrant, lora, rule, tmp_path):
    model = build("qwen3", lora)
    trainer = trainer_for(
        model,
        tmp_path,
        rule=rule,
        gradient_checkpointing=True,
        gradient_checkpointing_kwargs={"use_reentrant": reentrant},
    )
    trainer.model.gradient_checkpointing_enable({"use_reentrant": reentrant})
    if not lora:
        trainer.model.enable_input_require_grads()
    rows = backward(trainer, BATCH())
    check(model, oracle.expected_gradients(model, reference("qwen3", lora), BATCH(), rows, rule))


@pytest.mark.parametrize("rule", ["fisher", "fig4", "interacting"])
def test_scored_rows_alone_give_the_same_gradient_at_the_head(rule, tmp_path, monkeypatch):
    """With Triton, TRL hands its head only the scored rows."""
    monkeypatch.setattr(trl.trainer.utils, "_use_triton", lambda device: True)
    model = build("gemma2")
    rows = backward(trainer_for(model, tmp_path, rule=rule), BATCH())
    check(model, oracle.expected_gradients(model, reference("gemma2", False), BATCH(), rows, rule))


@pytest.mark.parametrize("rule", ["fisher", "euclidean", "interacting"])
@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_tied_embedding_and_head_are_two_uses(family, rule, tmp_path):
    model = build(family, tie=True)
    trainer = trainer_for(model, tmp_path, rule=rule)
    kinds = [row["kind"] for row in trainer.isopo.coverage() if row["shape"][0] == model.config.vocab_size]
    assert kinds == ["embedding", "lm head"]
    rows = backward(trainer, BATCH())
    check(model, oracle.expected_gradients(model, reference(family, False, True), BATCH(), rows, rule))


@pytest.mark.parametrize(
    "settings",
    [
        {"use_rslora": True},
        {"lora_bias": True},
        {"modules_to_save": ["lm_head"]},
        {"modules_to_save": ["embed_tokens"]},
        {"target_modules": ["q_proj", "v_proj"], "bias": "lora_only"},
    ],
    ids=str,
)
def test_lora_variants(settings, tmp_path):
    model = build("qwen2", **settings)
    batch = BATCH()
    G = oracle.position_gradients(model, batch, oracle.token_weights(batch))
    model.zero_grad()
    rows = backward(trainer_for(model, tmp_path), batch)
    check(model, oracle.expected_gradients(model, G, batch, rows, "fisher"))


@pytest.mark.parametrize("loss_type", ["grpo", "bnpo", "dr_grpo", "dapo", "luspo"])
def test_every_normalisation(loss_type, tmp_path):
    model = build("llama")
    batch = BATCH()
    weights = oracle.token_weights(batch, loss_type, max_completion_length=8)
    G = oracle.position_gradients(model, batch, weights)
    model.zero_grad()
    rows = backward(trainer_for(model, tmp_path, loss_type=loss_type, scale="paper"), batch)
    check(model, oracle.expected_gradients(model, G, batch, rows, "fisher", scale="paper"))


@pytest.mark.parametrize(
    "prompts,completions,advantages",
    [
        ([4], [5], [-0.7]),
        ([2, 7, 3], [1, 1, 1], [1.0, -1.0, 0.5]),
        ([2, 5, 3, 4], [6, 0, 3, 2], [0.4, 1.0, -2.0, 0.0]),  # an empty completion, an advantage of zero
        ([3, 4], [3, 5], [0.0, 0.0]),
    ],
    ids=["one sequence", "one token each", "empty completion and zero advantage", "all zero"],
)
@pytest.mark.parametrize("rule", ["fisher", "fig4", "interacting"])
def test_degenerate_microbatches(rule, prompts, completions, advantages, tmp_path):
    model = build("qwen3")
    batch = oracle.random_batch(prompts, completions, 100, advantages=torch.tensor(advantages, dtype=torch.float64))
    G = oracle.position_gradients(model, batch, oracle.token_weights(batch))
    model.zero_grad()
    rows = backward(trainer_for(model, tmp_path, rule=rule), batch)
    check(model, oracle.expected_gradients(model, G, batch, rows, rule))


@pytest.mark.parametrize("rule", ["fisher", "fig4", "interacting"])
def test_running_means_over_microbatches_and_steps(rule, tmp_path):
    """Three steps of two microbatches each: the oracle keeps its own running means, 0.9 of the past."""
    model = build("llama")
    settings = {"regularization": 0.5}
    trainer = trainer_for(model, tmp_path, rule=rule, fisher_samples=10_000, **settings)
    trainer.current_gradient_accumulation_steps = 2
    means = None
    for step in range(3):
        model.zero_grad()
        expected, seen = {}, []
        for part in range(2):
            batch = oracle.random_batch([3, 4, 2], [4, 2, 5], 100, seed=10 * step + part)
            weights = oracle.token_weights(batch, "grpo", accumulation=2)
            G = oracle.position_gradients(model, batch, weights)
            seen.append((batch, G))
            share = oracle.expected_gradients(model, G, batch, None, rule, histories=means, **settings)
            expected = {p: expected.get(p, 0) + gradient for p, gradient in share.items()}
        model.zero_grad()
        trainer.args.loss_type = trainer.loss_type = "grpo"
        for batch, _ in seen:
            backward(trainer, batch)
        check(model, expected)
        trainer.isopo.step()
        means = updated_means(model, seen, rule, settings, means)
    # The package keeps its means without the accumulation's factor
    index = [layer.name for layer in trainer.isopo.layers].index("model.layers.0.mlp.up_proj")
    kept = trainer.isopo._running.mean[index, EXPECTATIONS.index("norm^2")].item()
    if rule != "fisher":
        assert kept == pytest.approx(4 * means["model.layers.0.mlp.up_proj"]["norm^2"], rel=1e-9)


def updated_means(model, seen, rule, settings, means):
    updated = {}
    for name in oracle.trained_modules(model):
        sums = dict.fromkeys(EXPECTATIONS, 0.0)
        for batch, G in seen:
            V = G[name].sum(1)
            samples = G[name].reshape(-1, V.shape[1])[batch.attention_mask.reshape(-1).bool()]
            history = None if means is None else means[name]
            raw_settings = {**settings, "scale": "paper", "history": history}
            f = oracle.coefficients(V, samples, torch.ones(len(V)), rule, **raw_settings)
            F = ((samples @ V.T).square().sum(0) / samples.square().sum()).sqrt()
            N = V.norm(dim=1)
            terms = {"fisher^2": F**2, "norm^2": N**2, "relative^2": (F / N) ** 2, "fx": f * F, "x": F}
            for term, values in terms.items():
                sums[term] += values.sum().item()
        count = sum(len(batch.advantages) for batch, _ in seen)
        now = {term: total / count for term, total in sums.items()}
        updated[name] = now if means is None else {t: 0.9 * means[name][t] + 0.1 * now[t] for t in now}
    return updated


def test_without_the_trainer_the_same_gradient(tmp_path):
    """A loop of one's own, on logits, with the advantages' signs in the coefficients."""
    model, batch = build("qwen2"), BATCH()
    isopo = ISOPO(model, "fisher", fisher_samples=10_000)
    weights = oracle.token_weights(batch)
    with isopo.microbatch(batch.advantages, attention_mask=batch.attention_mask):
        logits = model(batch.input_ids, attention_mask=batch.attention_mask).logits[:, :-1]
        logps = logits.log_softmax(-1).gather(-1, batch.input_ids[:, 1:, None]).squeeze(-1)
        (-(logps[:, -weights.shape[1] :] * weights).sum()).backward()
    check(model, oracle.expected_gradients(model, reference("qwen2", False), batch, None, "fisher"))


@pytest.mark.parametrize("rule", ["fisher", "interacting"])
def test_packed_sequences_give_the_same_gradient_as_padded_ones(rule):
    """Two sequences in one row, told apart by `sequence_ids`; the attention mask keeps them apart too."""
    model, batch = build("llama"), BATCH()
    weights = oracle.token_weights(batch)
    P = batch.prompt_ids.shape[1]
    rows, ids, positions, scored = [[], []], [[], []], [[], []], [[], []]
    for s in range(4):
        columns = batch.attention_mask[s].nonzero().squeeze(1)
        rows[s // 2] += batch.input_ids[s, columns].tolist()
        ids[s // 2] += [s] * len(columns)
        positions[s // 2] += columns.tolist()
        scored[s // 2] += [0.0 if c < P else weights[s, c - P].item() for c in columns.tolist()]
    T = max(map(len, rows))

    def pad(lists, fill):
        dtype = torch.float64 if isinstance(fill, float) else torch.long
        return torch.tensor([row + [fill] * (T - len(row)) for row in lists], dtype=dtype)

    input_ids, sequence_ids = pad(rows, 0), pad(ids, -1)
    same = sequence_ids.unsqueeze(2) == sequence_ids.unsqueeze(1)
    mask = (same & torch.ones(T, T).tril().bool()).unsqueeze(1)
    mask = torch.zeros(mask.shape, dtype=torch.float64).masked_fill(~mask, torch.finfo(torch.float64).min)
    isopo = ISOPO(model, rule, fisher_samples=10_000)
    with isopo.microbatch(batch.advantages, sequence_ids=sequence_ids):
        logits = model(input_ids, attention_mask=mask, position_ids=pad(positions, 0)).logits[:, :-1]
        logps = logits.log_softmax(-1).gather(-1, input_ids[:, 1:, None]).squeeze(-1)
        (-(logps * pad(scored, 0.0)[:, 1:]).sum()).backward()
    check(model, oracle.expected_gradients(model, reference("llama", False), batch, None, rule))
