"""Every token weighting with every rule: the gradient is what the definition says, in float64.

As in `tests/oracle.py`, nothing of the package is in what is expected: ratios, sample sizes and filters are written
out here, token by token, from log-probabilities of each sequence alone.
"""

import dataclasses
import functools
import math

import pytest
import torch
import trl.trainer.utils
from transformers import TrainerCallback

from isopo_trl import ISOPO, ISOPOTrainer
from tests import oracle, tiny, training
from tests.test_oracle import RULES, build, check, trainer_for, updated_means


# name: settings of the configuration
WEIGHTS = {
    "none": {},
    "sampler": {
        "token_weights": "sampler",
        "vllm_importance_sampling_mode": "token_truncate",
        "vllm_importance_sampling_clip_max": 1.5,
    },
    "p3o": {"token_weights": "p3o"},
    "p3o biased": {"token_weights": "p3o", "use_bias_correction_kl": False},
    "kpo": {"token_weights": "kpo"},
    "kpo wide": {"token_weights": "kpo", "epsilon": 0.15, "epsilon_high": 0.3},
    "kpo stopped": {"token_weights": "kpo", "epsilon": 0.15, "epsilon_high": 0.3, "kpo_stop_gradient": True},
    "kpo fixed": {"token_weights": "kpo", "epsilon": 0.15, "epsilon_high": 0.3, "kpo_gain": 0.3},
    "kpo published": {"token_weights": "kpo", "kpo_initial_variance": 0.0, "kpo_process_noise": 0.01},
}
FAMILIES = ["llama", "gpt2", "gemma3", "qwen2", "phi3"]
ALL = 10_000


@pytest.fixture(autouse=True)
def everything_in_float64(monkeypatch):
    """Models and TRL's fused head go to float32 in places, whatever the model is in; here they cannot."""
    monkeypatch.setattr(torch.Tensor, "float", torch.Tensor.double)
    for name in ("float", "float32"):  # both names are in use
        monkeypatch.setattr(torch, name, torch.float64)


# Off-policy data


def forward(model, batch, temperature=1.0):
    """Log-probabilities and entropies `[B, C]` of completion tokens; each sequence alone, without padding."""
    P, C = batch.prompt_ids.shape[1], batch.completion_ids.shape[1]
    logps, entropies = torch.zeros(2, len(batch.advantages), C, dtype=torch.float64)
    for s in range(len(logps)):
        columns = batch.attention_mask[s].nonzero().squeeze(1)
        ids = batch.input_ids[s : s + 1, columns]
        with torch.no_grad():
            logits = model(input_ids=ids, position_ids=columns.unsqueeze(0), use_cache=False).logits[0, :-1]
        logits = (logits / temperature).log_softmax(-1)
        places = columns[1:] - P
        scored = places >= 0
        logps[s, places[scored]] = logits.gather(1, ids[0, 1:, None]).squeeze(1)[scored]
        entropies[s, places[scored]] = -(logits.exp() * logits).sum(1)[scored]
    return logps, entropies


def scored_tokens(batch):
    return batch.completion_mask * batch.extra.get("tool_mask", 1)


def off_policy(model, batch, spread=0.6, seed=0, temperature=1.0):
    """Give the batch a sampler whose log-probabilities differ, and are nonsense where no token is scored."""
    logps, _ = forward(model, batch, temperature)
    noise = torch.randn(logps.shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    scored = scored_tokens(batch)
    batch.extra["sampling_per_token_logps"] = torch.where(scored.bool(), logps - spread * noise, -50.0)
    batch.extra["num_items_in_batch"] = scored.sum()
    return batch


def ragged_batch(model, spread=0.6):
    """
    Sequences of all lengths, one of them empty, one with an advantage of zero; a tool's tokens inside two completions,
    and tokens for which the sampler gave no log-probability.
    """
    advantages = torch.tensor([0.8, -1.1, -0.5, 0.0, 1.3, 0.7], dtype=torch.float64)
    batch = oracle.random_batch([3, 1, 5, 4, 2, 3], [6, 8, 1, 4, 0, 5], 100, advantages=advantages)
    tool_mask = torch.ones_like(batch.completion_mask)
    tool_mask[0, 2] = tool_mask[1, 0] = tool_mask[1, 4] = tool_mask[1, 5] = 0
    batch.extra["tool_mask"] = tool_mask
    batch = off_policy(model, batch, spread, seed=18)
    for place in ((0, 1), (1, 6), (3, 0), (0, 2), (4, 1)):  # the last two are not scored
        batch.extra["sampling_per_token_logps"][place] = math.nan
    return batch


# Token weights by their definition


def normalisation(batch, loss_type="dapo", accumulation=1, max_completion_length=8):
    scored = dataclasses.replace(batch, completion_mask=scored_tokens(batch))
    return oracle.token_weights(scored, loss_type, accumulation, max_completion_length)


def log_ratios(logps, batch):
    """`z` `[B, C]`, zero where nothing is scored, or nothing known."""
    z = logps - batch.extra["sampling_per_token_logps"]
    return torch.where(scored_tokens(batch).bool() & ~z.isnan(), z, 0.0)


def effective_sample_size(logps, batches):
    r = torch.cat([log_ratios(*pair)[scored_tokens(pair[1]).bool()] for pair in zip(logps, batches, strict=True)])
    r = r.exp()
    return r.sum() ** 2 / (len(r) * r.square().sum())


def kpo_objective(
    leaf, batch, n, advantages, low=0.0003, high=0.0004, gain=None, variance=1.0, noise=1e-6, stop=False
):
    """The clipped objective of filtered ratios, from the log-probabilities `leaf` `[B, C]`."""
    sampler, scored = batch.extra["sampling_per_token_logps"], scored_tokens(batch)
    objective = 0.0
    for s in range(len(leaf)):
        rho, P, A = 0.0, variance, advantages[s]
        for t in range(leaf.shape[1]):
            if not scored[s, t]:
                continue
            z = leaf[s, t] - (leaf[s, t].detach() if sampler[s, t].isnan() else sampler[s, t])
            P = P + noise
            K = P / (P + 1.0)
            P = (1.0 - K) * P
            K = K if gain is None else gain
            rho = (1.0 - K) * rho + K * z
            ratio = rho.exp()
            if stop:  # the filtered ratio as a number, times what has the gradient of this token alone
                ratio = ratio.detach() * (leaf[s, t] - leaf[s, t].detach()).exp()
            clipped = min(max(ratio, ratio.new_tensor(1 - low)), ratio.new_tensor(1 + high))
            objective = objective + n[s, t] * min(ratio * A, clipped * A)
    return objective


@dataclasses.dataclass
class Expected:
    """
    What `-log p` of each token is multiplied by in `V_s`, and, apart from the rules, in the pull; the advantages that
    the coefficients are made of; the value of the loss.
    """

    weights: torch.Tensor
    pull: torch.Tensor | None
    advantages: torch.Tensor
    loss: float


def definition(logps, batch, n, name, ess=None):
    A = batch.advantages
    method, _, variant = name.partition(" ")
    if method == "none":
        return Expected(n, None, A, -(n * A.unsqueeze(1)).sum().item())
    z = log_ratios(logps, batch)
    r = z.exp()
    if method == "sampler":
        weights = n * r.clamp(max=1.5)
        return Expected(weights, None, A, -(weights * A.unsqueeze(1)).sum().item())
    if method == "p3o":
        ess = effective_sample_size([logps], [batch]) if ess is None else ess
        weights = n * torch.where(r < ess, r, ess)
        slope, kl = (1 - 1 / r, 1 / r - 1 + z) if variant else (r * z, r * z - r + 1)
        loss = -(weights * A.unsqueeze(1)).sum() + (1 - ess) * (n * kl).sum()
        return Expected(weights, -n * (1 - ess) * slope, A, loss.item())
    wide = {"low": 0.15, "high": 0.3}
    settings = {
        "": {},
        "wide": wide,
        "stopped": {**wide, "stop": True},
        "fixed": {**wide, "gain": 0.3},
        "published": {"variance": 0.0, "noise": 0.01},
    }[variant]
    leaf = logps.clone().requires_grad_()
    sign = torch.where(A < 0, -1.0, 1.0).double()
    (weights,) = torch.autograd.grad(kpo_objective(leaf, batch, n, sign, **settings), leaf)
    return Expected(weights, None, A.abs(), -kpo_objective(leaf, batch, n, A, **settings).item())


@dataclasses.dataclass
class Reference:
    """The batch, what is expected of it, and the gradients of each position, of `V` and of the pull."""

    batch: oracle.Batch
    expected: Expected
    G: dict
    pull: dict | None

    def gradients(self, model, rows, rule, **settings):
        """`sum_s c_s V_s`, and the pull as it is."""
        batch = dataclasses.replace(self.batch, advantages=self.expected.advantages)
        total = oracle.expected_gradients(model, self.G, batch, rows, rule, **settings)
        if self.pull is not None:
            batch = dataclasses.replace(batch, advantages=torch.ones_like(batch.advantages))
            pull = oracle.expected_gradients(model, self.pull, batch, None, "none")
            total = {p: gradient + pull[p] for p, gradient in total.items()}
        return total


def refer(model, batch, name, n, ess=None, temperature=1.0):
    expected = definition(forward(model, batch, temperature)[0], batch, n, name, ess)
    G = oracle.position_gradients(model, batch, expected.weights, temperature)
    pull = None
    if expected.pull is not None:
        pull = oracle.position_gradients(model, batch, expected.pull, temperature)
    model.zero_grad()
    return Reference(batch, expected, G, pull)


@functools.cache
def reference(family, lora, name, tie=None, loss_type="dapo", spread=0.6):
    model = build(family, lora, tie)
    batch = ragged_batch(model, spread)
    return refer(model, batch, name, normalisation(batch, loss_type))


def backward(trainer, batch):
    """Loss and gradients as the trainer makes them; returns the loss and the sampled rows."""
    loss = trainer.compute_loss(trainer.model, batch.for_trl())
    loss.backward()
    samples = trainer.isopo.current.samples
    trainer.isopo.end()
    return loss.item(), None if samples is None else samples.rows[~samples.absent]


def compare(model, trainer, expected, rule, **settings):
    loss, rows = backward(trainer, expected.batch)
    if trainer.args.fisher_samples == ALL:
        rows = None  # the oracle takes all real positions
    check(model, expected.gradients(model, rows, rule, **settings))
    assert loss == pytest.approx(expected.expected.loss, rel=1e-9, abs=1e-12)


# Every combination


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("lora", [False, True], ids=["full", "lora"])
@pytest.mark.parametrize("name", WEIGHTS)
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


@pytest.mark.parametrize("loss_type", ["grpo", "bnpo", "dr_grpo", "luspo"])
@pytest.mark.parametrize("name", ["sampler", "p3o", "kpo"])
def test_every_normalisation(name, loss_type, tmp_path):
    model = build("llama", lora=True)
    trainer = trainer_for(model, tmp_path, loss_type=loss_type, scale="paper", **WEIGHTS[name])
    expected = reference("llama", True, name, loss_type=loss_type)
    compare(model, trainer, expected, "fisher", scale="paper")


@pytest.mark.parametrize("lora", [False, True], ids=["full", "lora"])
@pytest.mark.parametrize("name", ["p3o", "kpo wide"])
@pytest.mark.parametrize("family", FAMILIES[1:])
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


# On-policy


class Watch(ISOPOTrainer):
    """Keeps the log-probabilities of the last forward."""

    def _get_per_token_logps_and_entropies(self, *args, **kwargs):
        output = super()._get_per_token_logps_and_entropies(*args, **kwargs)
        self.seen = output[0].detach().clone()
        return output


def prepared(folder, model, kind=ISOPOTrainer, **settings):
    settings = {"gradient_checkpointing": False, "fisher_samples": 7, **settings}
    return training.prepared(training.build(folder, model, kind, **settings))


def generated(trainer):
    """A batch that the trainer has just generated."""
    data = trainer._generate_and_score_completions([{"prompt": text} for text in ("What?", "Is it so?", "No")])
    names = ("prompt_ids", "prompt_mask", "completion_ids", "completion_mask")
    advantages = torch.tensor([0.8, -1.1, 0.4], dtype=torch.float64)
    extra = {name: data[name] for name in ("generated_after", "drawn_by_policy")}
    return oracle.Batch(*(data[name] for name in names), advantages, extra)


@pytest.mark.parametrize("fresh", [False, True], ids=["same sampler", "fresh data"])
@pytest.mark.parametrize(
    "rule, lora", [*((rule, False) for rule in RULES), ("fisher", True), ("interacting", True), ("none", True)]
)
def test_p3o_on_policy_is_no_weighting(rule, lora, fresh, tmp_path):
    model = build("llama", lora)
    trainer = prepared(tmp_path, model, rule=rule, token_weights="p3o")
    # What the sampler says of fresh data, the very policy in other arithmetic, is not asked
    batch = off_policy(model, generated(trainer)) if fresh else ragged_batch(model)
    watch = prepared(tmp_path, build("llama", lora), Watch, rule=rule)
    loss, expected = training.gradients(watch, batch.for_trl())
    if not fresh:
        batch.extra["sampling_per_token_logps"] = watch.seen
    own_loss, gradients = training.gradients(trainer, batch.for_trl())
    assert own_loss == loss
    assert all(torch.equal(gradients[parameter], expected[parameter]) for parameter in expected)


@pytest.mark.parametrize("name", ["sampler", "p3o", "kpo"])
def test_fresh_data_is_weighed_where_the_sampler_is_another_policy(name, tmp_path):
    model = build("llama")
    trainer = prepared(tmp_path, model, top_p=0.9, **WEIGHTS[name])
    batch = off_policy(model, generated(trainer))
    compare(model, trainer, refer(model, batch, name, normalisation(batch)), "fisher")


@pytest.mark.parametrize("gain", [None, 0.3])
def test_kpo_on_policy_weighs_a_token_by_its_part_in_later_ratios(gain, tmp_path):
    """`sum_{t >= k} n_t h_tk`, in which `h_tk = K_k prod_{k < j <= t} (1 - K_j)` over scored tokens."""
    model = build("llama")
    batch = ragged_batch(model)
    batch.extra["sampling_per_token_logps"][:] = math.nan
    gains = [gain] * 8
    if gain is None:
        gains, P = [], 1.0
        for _ in range(8):
            P += 1e-6
            gains.append(P / (P + 1))
            P *= 1 - gains[-1]
        # Without process noise the filter is the mean of 0 and all observations
        assert gains == pytest.approx([1 / (t + 2) for t in range(8)], rel=1e-3)
    n = normalisation(batch, "grpo")
    weights = torch.zeros_like(n)
    for s in range(len(n)):
        places = n[s].nonzero().squeeze(1).tolist()
        for k, place in enumerate(places):
            for t in range(k, len(places)):
                carried = math.prod(1 - gains[j] for j in range(k + 1, t + 1))
                weights[s, place] += n[s, places[t]] * gains[k] * carried
    assert ((weights / n - 1).abs() > 0.01)[n > 0].all()
    G = oracle.position_gradients(model, batch, weights)
    model.zero_grad()
    trainer = trainer_for(model, tmp_path, token_weights="kpo", kpo_gain=gain, loss_type="grpo")
    _, rows = backward(trainer, batch)
    check(model, oracle.expected_gradients(model, G, batch, rows, "fisher"))


# A real training run


class Fed(ISOPOTrainer):
    """Trains on given batches; generates nothing."""

    def _prepare_inputs(self, inputs):
        return self.batches.pop(0).for_trl()


class Keep(TrainerCallback):
    """Keeps every step's gradients."""

    def __init__(self):
        self.steps = []

    def on_pre_optimizer_step(self, args, state, control, model=None, **_):
        self.steps.append({p: p.grad.clone() for p in model.parameters() if p.requires_grad})


@pytest.mark.parametrize(
    "name, rule, loss_type",
    [
        ("p3o", "fisher", "grpo"),
        ("p3o", "interacting", "dapo"),
        ("p3o", "none", "grpo"),
        ("p3o biased", "fig4", "dapo"),
        ("kpo wide", "fisher", "dapo"),
    ],
)
def test_gradient_of_whole_steps_in_a_training_run(name, rule, loss_type, tmp_path):
    """
    Two steps of two microbatches. The sample size is that of the step's microbatches so far, running means are those
    of the step before, and whatever scales the loss on its way scales the pull alike.
    """
    model = build("llama")
    settings = {"regularization": 0.5} if rule not in ("none", "interacting") else {}
    steps = []
    for step in range(2):
        pair = [oracle.random_batch([3, 4, 2], [4, 2, 5], 100, seed=10 * step + part) for part in range(2)]
        pair = [off_policy(model, batch, 0.3 + 0.5 * part, seed=step + 5 * part) for part, batch in enumerate(pair)]
        for batch in pair:
            batch.extra["num_items_in_batch"] = sum(b.completion_mask.sum() for b in pair)
        steps.append(pair)
    expected, means = [], None
    for pair in steps:
        total, seen = {}, []
        for part, batch in enumerate(pair):
            n = normalisation(batch, "grpo", accumulation=2)
            if loss_type == "dapo":
                n = batch.completion_mask.double() / batch.extra["num_items_in_batch"]
            so_far = pair[: part + 1]
            ess = effective_sample_size([forward(model, b)[0] for b in so_far], so_far)
            result = refer(model, batch, name, n, ess)
            share = result.gradients(model, None, rule, histories=means, **settings)
            total = {p: total.get(p, 0) + gradient for p, gradient in share.items()}
            seen.append((batch, result.G))
        expected.append(total)
        means = updated_means(model, seen, rule, settings, means)
    keep = Keep()
    trainer = training.build(
        tmp_path,
        model,
        Fed,
        options={"callbacks": [keep]},
        rule=rule,
        loss_type=loss_type,
        gradient_accumulation_steps=2,
        gradient_checkpointing=False,
        fisher_samples=ALL,
        learning_rate=0.0,
        max_grad_norm=0.0,
        **settings,
        **WEIGHTS[name],
    )
    trainer.batches = [batch for pair in steps for batch in pair]
    trainer.train()
    assert trainer.model is model and len(keep.steps) == 2 and not trainer.batches
    for gradients, total in zip(keep.steps, expected, strict=True):
        for p, gradient in gradients.items():
            p.grad = gradient
        check(model, total)
    lines = [line for line in trainer.state.log_history if "off_policy/ess" in line]
    for line, pair in zip(lines, steps, strict=True):
        ess = effective_sample_size([forward(model, b)[0] for b in pair], pair)
        assert line["off_policy/ess"] == pytest.approx(ess.item(), rel=1e-9)


# Terms that no rule rescales, without the trainer


def token_logps(model, batch):
    logits = model(batch.input_ids, attention_mask=batch.attention_mask).logits[:, :-1]
    return (
        logits.log_softmax(-1)
        .gather(-1, batch.input_ids[:, 1:, None])
        .squeeze(-1)[:, -batch.completion_ids.shape[1] :]
    )


def three_gradients(model, rule="fisher"):
    """Of the loss by the rule, of a term without any, and of the loss with the term as `unscaled`."""
    batch = oracle.random_batch([3, 1, 5, 4], [6, 8, 1, 4], 100)
    weights = oracle.token_weights(batch)
    slopes = torch.randn(weights.shape, generator=torch.Generator().manual_seed(2), dtype=torch.float64)

    def term(logps):
        return ((slopes * logps + logps.square()) * batch.completion_mask).sum() / 7

    def taken():
        result = {name: p.grad.clone() for name, p in model.named_parameters() if p.requires_grad}
        model.zero_grad()
        return result

    model.train()
    torch.manual_seed(3)
    term(token_logps(model, batch)).backward()
    plain = taken()
    isopo = ISOPO(model, rule, fisher_samples=ALL)
    results = []
    for unscaled in (False, True):
        torch.manual_seed(3)  # dropout
        with isopo.microbatch(batch.advantages, attention_mask=batch.attention_mask):
            logps = token_logps(model, batch)
            if unscaled:
                isopo.unscaled(term(logps) / 3)
                isopo.unscaled(term(logps) * 2 / 3)
                assert all(p.grad is None for p in model.parameters())  # nothing arrives before the loss's own
            (-(logps * weights).sum()).backward()
        results.append(taken())
    isopo.detach()
    return results[0], plain, results[1]


def check_sum(scaled, plain, both):
    assert scaled.keys() == plain.keys() == both.keys()
    for name in both:
        size = both[name].norm()
        assert (both[name] - scaled[name] - plain[name]).norm() <= 1e-12 * size, name
        assert plain[name].norm() > 1e-6 * size > 0, name


@pytest.mark.parametrize("rule", ["fisher", "interacting", "none"])
@pytest.mark.parametrize("lora", [False, True], ids=["full", "lora"])
@pytest.mark.parametrize("family", FAMILIES)
def test_unscaled_term_is_added_as_it_is(family, lora, rule):
    check_sum(*three_gradients(build(family, lora), rule))


@pytest.mark.parametrize(
    "settings",
    [
        {"lora_dropout": 0.3},
        {"lora_bias": True},
        {"modules_to_save": ["lm_head"]},
        {"modules_to_save": ["embed_tokens"]},
        {"target_modules": ["q_proj", "v_proj"], "bias": "lora_only"},
    ],
    ids=str,
)
def test_unscaled_term_with_lora_variants(settings):
    check_sum(*three_gradients(build("qwen2", **settings)))


@pytest.mark.parametrize("hooked", ["lora_A", "lora_B", "base_layer"])
def test_unscaled_term_where_lora_is_not_fused(hooked):
    """A hook makes a layer go by PEFT's own forward."""
    model = build("llama", lora=True)
    for name, module in model.named_modules():
        if hooked in name and isinstance(module, torch.nn.Linear) and "layers.0" in name:
            module.register_forward_hook(lambda module, args, output: None)
    check_sum(*three_gradients(model))


@pytest.mark.parametrize("trained", ["bias", "norm", "ln_", "wte", "wpe", "layers.1", "h.0.mlp", "lm_head"])
def test_unscaled_term_where_only_some_parameters_are_trained(trained):
    model = build("gpt2" if trained in ("bias", "ln_", "wte", "wpe", "h.0.mlp") else "qwen2", tie=False)
    for name, p in model.named_parameters():
        p.requires_grad_(trained in name)
    assert any(p.requires_grad for p in model.parameters())
    check_sum(*three_gradients(model))


def test_unscaled_term_of_one_microbatch_does_not_reach_the_next():
    model = build("llama")
    before, _, _ = three_gradients(model)
    after, _, _ = three_gradients(model)
    isopo, batch = ISOPO(model, fisher_samples=ALL), oracle.random_batch([3, 1, 5, 4], [6, 8, 1, 4], 100)
    for unscaled in (True, False):
        model.zero_grad()
        with isopo.microbatch(batch.advantages, attention_mask=batch.attention_mask):
            logps = token_logps(model, batch)
            if unscaled:
                isopo.unscaled(logps.sum())
            (-(logps * oracle.token_weights(batch)).sum()).backward()
    for name, p in model.named_parameters():
        assert torch.equal(before[name], after[name]), name
        assert (p.grad - before[name]).norm() <= 1e-12 * before[name].norm(), name


def test_unscaled_term_changes_no_statistic():
    model, batch = build("llama"), oracle.random_batch([3, 1, 5, 4], [6, 8, 1, 4], 100)
    figures = []
    for unscaled in (False, True):
        isopo = ISOPO(model, fisher_samples=ALL)
        with isopo.microbatch(batch.advantages, attention_mask=batch.attention_mask):
            logps = token_logps(model, batch)
            if unscaled:
                isopo.unscaled(logps.sum())
            (-(logps * oracle.token_weights(batch)).sum()).backward()
        multipliers = isopo.multipliers()
        figures.append((isopo.step(), {name: m.tolist() for name, m in multipliers.items()}))
        isopo.detach()
    assert figures[0] == figures[1]


def test_unscaled_outside_of_a_microbatch_is_refused():
    model, batch = build("llama"), oracle.random_batch([3, 1], [2, 4], 100)
    isopo = ISOPO(model)
    with pytest.raises(RuntimeError, match="outside of a microbatch"):
        isopo.unscaled(token_logps(model, batch).sum())
    with isopo.microbatch(batch.advantages, attention_mask=batch.attention_mask):
        token_logps(model, batch).sum().backward()
    with pytest.raises(RuntimeError, match="outside of a microbatch"):
        isopo.unscaled(token_logps(model, batch).sum())


def test_unscaled_after_the_backward_is_refused():
    model, batch = build("llama"), oracle.random_batch([3, 1], [2, 4], 100)
    isopo = ISOPO(model)
    with pytest.raises(RuntimeError, match="after the loss's backward"):
        with isopo.microbatch(batch.advantages, attention_mask=batch.attention_mask):
            logps = token_logps(model, batch)
            logps.sum().backward(retain_graph=True)
            isopo.unscaled(logps.square().sum())
    assert isopo.current is None


def test_unscaled_gradient_of_a_layer_that_the_loss_does_not_reach_is_not_lost_silently():
    model, batch = build("llama"), oracle.random_batch([3, 1], [2, 4], 100)
    isopo = ISOPO(model)
    with isopo.microbatch(batch.advantages, attention_mask=batch.attention_mask):
        token_logps(model, batch).sum().backward()
    with pytest.raises(RuntimeError, match=r"reached model\.layers\.1\..*, but the loss did not"):
        with isopo.microbatch(batch.advantages, attention_mask=batch.attention_mask):
            ids, mask = batch.input_ids, batch.attention_mask
            output = model(input_ids=ids, attention_mask=mask, output_hidden_states=True)
            isopo.unscaled(output.logits.square().sum())
            output.hidden_states[1].sum().backward()


def test_unscaled_before_the_forward_is_refused():
    model, batch = build("llama"), oracle.random_batch([3, 1], [2, 4], 100)
    isopo = ISOPO(model)
    with pytest.raises(RuntimeError, match="No trained layer took part"):
        with isopo.microbatch(batch.advantages, attention_mask=batch.attention_mask):
            isopo.unscaled(torch.zeros((), requires_grad=True))


def test_reentrant_checkpointing_is_refused(tmp_path):
    settings = {"gradient_checkpointing": True, "gradient_checkpointing_kwargs": {"use_reentrant": True}}
    with pytest.raises(ValueError, match="reentrant"):
        trainer_for(build("llama"), tmp_path, token_weights="p3o", **settings)
    # Without a rule both parts go back together
    trainer_for(tiny.model("llama"), tmp_path, token_weights="p3o", rule="none", **settings)
