"""Losses of the ratio to the behaviour policy: GRPO's clipped objective, GSPO, CISPO, SAPO, VESPO, with any rule."""

import functools
import math

import pytest
import torch
from trl import GRPOTrainer

from isopo_trl import ISOPOConfig, ISOPOTrainer
from isopo_trl.token_weights import RatioLoss
from isopo_trl.token_weights.ratio_loss import LOSS_TYPES, clipping_range, signs, takes_ratio, weighting_for
from isopo_trl.trl_seam.batch import Batch
from isopo_trl.trl_seam.loans import borrowed, intercepted
from isopo_trl.trl_seam.scoring import Scoring
from tests import oracle, tiny, training
from tests.gradients.test_oracle import RULES, build, trainer_for
from tests.token_weights.definition import (
    Expected,
    Reference,
    compare,
    forward,
    normalisation,
    ragged_batch,
    scored_tokens,
)
from tests.trainer.test_sampling import sampled


# name: settings of the configuration. TRL holds SAPO's and VESPO's in float32, so these are numbers that it can hold
LOSSES = {
    "clipped": {"epsilon": 0.2, "epsilon_high": 0.3},
    "two-sided": {"epsilon": 0.2, "delta": 1.3, "loss_type": "grpo"},
    "GSPO": {"epsilon": 0.05, "loss_type": "grpo", "importance_sampling_level": "sequence"},
    "GSPO by token": {"epsilon": 0.05, "loss_type": "luspo", "importance_sampling_level": "sequence"},
    "CISPO": {"epsilon_high": 1.5, "loss_type": "cispo"},
    "SAPO": {"loss_type": "sapo", "sapo_temperature_neg": 2.0, "sapo_temperature_pos": 0.5},
    "SAPO by sequence": {"loss_type": "sapo", "sapo_temperature_neg": 4.0, "importance_sampling_level": "sequence"},
    "VESPO": {"loss_type": "vespo", "vespo_k_neg": 1.5, "vespo_lambda_neg": 0.75},
}


def config(**settings):
    return ISOPOConfig("unused", **{**training.SETTINGS, **settings})


# By their definition, in float64


def objective(leaf, batch, n, advantages, settings):
    """The objective from the log-probabilities `leaf` `[B, C]`, sequence by sequence and token by token."""
    sampler, scored = batch.extra["sampling_per_token_logps"], scored_tokens(batch)
    loss_type = settings.get("loss_type", "dapo")
    low, high = settings.get("epsilon", 0.2), settings.get("epsilon_high", settings.get("epsilon", 0.2))
    total = 0.0
    for s in range(len(leaf)):
        A, places = advantages[s], [t for t in range(leaf.shape[1]) if scored[s, t]]
        if not places:
            continue
        z = {}
        for t in places:  # what nobody knows, and what has no advantage, counts as on-policy
            known = not sampler[s, t].isnan() and (batch.advantages[s] != 0 or loss_type == "vespo")
            z[t] = leaf[s, t] - (sampler[s, t] if known else leaf[s, t].detach())
        if settings.get("importance_sampling_level") == "sequence":
            mean = sum(z.values()) / len(z)
            z = dict.fromkeys(z, mean)
        w = math.exp(sum(z.values()).item())
        for t in places:
            r = z[t].exp()
            if loss_type == "cispo":
                part = min(r.item(), high) * A * leaf[s, t]
            elif loss_type == "sapo":
                tau = settings.get("sapo_temperature_pos", 1.0) if A > 0 else settings["sapo_temperature_neg"]
                part = 4 / tau / (1 + (-tau * (r - 1)).exp()) * A
            elif loss_type == "vespo":
                k, lam = (2.0, 3.0) if A >= 0 else (settings["vespo_k_neg"], settings["vespo_lambda_neg"])
                part = math.exp(lam) * w**k * math.exp(-lam * w) * A * leaf[s, t]
            else:
                clipped = min(max(r, r.new_tensor(1 - low)), r.new_tensor(1 + high))
                r = min(r, r.new_tensor(settings.get("delta", math.inf)))
                part = min(r * A, clipped * A)
            total = total + n[s, t] * part
    return total


def normalised(batch, settings):
    loss_type = settings.get("loss_type", "dapo")
    return normalisation(batch, {"cispo": "dapo", "vespo": "dapo", "sapo": "grpo"}.get(loss_type, loss_type))


def define(logps, batch, settings):
    """What is expected of a batch whose tokens have these log-probabilities `[B, C]`."""
    n, A = normalised(batch, settings), batch.advantages
    leaf, sign = logps.clone().requires_grad_(), torch.where(A < 0, -1.0, 1.0).double()
    (weights,) = torch.autograd.grad(objective(leaf, batch, n, sign, settings), leaf)
    return Expected(weights, None, A.abs(), -objective(leaf, batch, n, A, settings).item())


def refer(model, batch, settings):
    expected = define(forward(model, batch)[0], batch, settings)
    G = oracle.position_gradients(model, batch, expected.weights)
    model.zero_grad()
    return Reference(batch, expected, G, None)


@functools.cache
def reference(name, lora):
    model = build("llama", lora)
    return refer(model, ragged_batch(model), LOSSES[name])


@pytest.mark.usefixtures("float64_throughout")
@pytest.mark.parametrize(
    ("name", "rule", "lora"),
    [
        (name, RULES[(number + other) % len(RULES)], number % 2 == 1)
        for number, name in enumerate(LOSSES)
        for other in (0, 3)
    ],
)
def test_gradient_is_the_definition(name, rule, lora, tmp_path):
    model = build("llama", lora)
    compare(model, trainer_for(model, tmp_path, rule=rule, **LOSSES[name]), reference(name, lora), rule)


@pytest.mark.usefixtures("float64_throughout")
def test_the_examples_are_not_trivial():
    """Both kinds of advantage have tokens that are clipped and tokens that are not, and no weight is that of r = 1."""
    model = build("llama")
    batch = ragged_batch(model)
    logps, scored = forward(model, batch)[0], scored_tokens(batch).bool()
    for name, settings in LOSSES.items():
        weights, n = define(logps, batch, settings).weights, normalised(batch, settings)
        sign = torch.where(batch.advantages < 0, -1.0, 1.0).unsqueeze(1)
        assert ((weights * sign - n).abs() > 0.05 * n)[scored].sum() > 8, name
        if name in ("clipped", "two-sided"):
            for of_sign in (batch.advantages < 0, batch.advantages > 0):
                assert 0 < (weights[of_sign][scored[of_sign]] == 0).sum() < scored[of_sign].sum(), name
        if name == "GSPO":  # which clips a sequence as a whole
            assert 0 < (weights[scored.any(1)] == 0).all(1).sum() < 4


@pytest.mark.usefixtures("float64_throughout")
@pytest.mark.parametrize("name", ["clipped", "GSPO", "CISPO", "VESPO"])
def test_a_sequence_that_is_clipped_whole_or_has_no_advantage_is_no_error(name, tmp_path):
    model = build("llama")
    batch = oracle.random_batch([3, 4, 2], [1, 4, 3], 100, advantages=torch.tensor([0.6, 0.0, -0.8]).double())
    logps, _ = forward(model, batch)
    batch.extra["sampling_per_token_logps"] = logps - torch.tensor([[0.9], [0.5], [-0.9]])  # r is far out of the range
    batch.extra["num_items_in_batch"] = batch.completion_mask.sum()
    expected = refer(model, batch, LOSSES[name])
    compare(model, trainer_for(model, tmp_path, rule="interacting", **LOSSES[name]), expected, "interacting")


# As in TRL


def scored(trainer, batch):
    """Log-probabilities `[B, C]` of the completions."""
    with torch.no_grad():
        return Scoring(trainer).logps(Batch(batch))


def stale(trainer, advantages=(1.3, -0.7, 0.4, 0.0, -0.3)):
    """A batch of completions that an old policy drew, which TRL has scored."""
    batch = oracle.random_batch([3, 1, 5, 4, 2], [6, 5, 1, 4, 3], 100, advantages=torch.tensor(advantages)).for_trl()
    logps = scored(trainer, batch)
    noise = torch.randn(logps.shape, generator=torch.Generator().manual_seed(0))
    return {**batch, "old_per_token_logps": logps - 0.5 * noise}


@pytest.fixture(scope="module")
def grpo(tmp_path_factory):
    return training.prepared(training.build(tmp_path_factory.mktemp("grpo"), kind=GRPOTrainer))


@pytest.mark.parametrize(("level", "threshold", "delta"), [("token", None, 1.3), ("sequence", 0.1, None)])
@pytest.mark.parametrize("loss_type", LOSS_TYPES)
def test_loss_of_trl_is_proportional_to_an_advantage_of_either_sign(loss_type, level, threshold, delta, grpo):
    """What ISOPO's rescaling rests on: the loss with an advantage's sign, times its size, is the loss."""
    batch = stale(grpo)
    logps = batch["old_per_token_logps"] + 0.4 * torch.sin(torch.arange(30.0)).view(5, 6)
    factors = torch.tensor([1.0, 1e-3, 0.3, 7.0, 200.0])
    settings = {"loss_type": loss_type, "importance_sampling_level": level, "off_policy_mask_threshold": threshold}

    def slope(advantages):
        leaf = logps.clone().requires_grad_()
        output = (leaf, torch.zeros_like(leaf), None)
        with (
            borrowed(grpo, **settings),
            borrowed(grpo.args, delta=delta),
            intercepted(grpo, "_get_per_token_logps_and_entropies", lambda *_, **__: output),
        ):
            loss = grpo._compute_loss(grpo.model, {**batch, "advantages": advantages})
        return torch.autograd.grad(loss, leaf)[0]

    for sign in (torch.ones(5), -torch.ones(5)):
        unit = slope(sign)
        assert unit.any()
        torch.testing.assert_close(slope(factors * sign), factors.unsqueeze(1) * unit)


class Counting(ISOPOTrainer):
    """Counts passes over completions, but for those of generation, that have no gradient."""

    def _get_per_token_logps_and_entropies(self, *args, **kwargs):
        self.passes = getattr(self, "passes", 0) + (not torch.is_grad_enabled())
        return super()._get_per_token_logps_and_entropies(*args, **kwargs)


RUNS = [
    ({"epsilon": 0.02}, {"num_iterations": 3}),
    ({"epsilon": 0.001, "loss_type": "grpo", "importance_sampling_level": "sequence"}, {"steps_per_generation": 3}),
    ({"loss_type": "cispo", "epsilon_high": 1.01}, {"num_iterations": 3}),
]


@pytest.mark.parametrize(("settings", "reuse"), RUNS, ids=str)
def test_rule_none_trains_to_the_weights_of_grpo_on_stale_data(settings, reuse, tmp_path):
    """
    TRL scores its old policy by a pass of its own, ours is what the sampler noted: the same but for rounding. Plain
    gradient descent, so that rounding stays what it is.
    """
    settings = {**settings, **reuse, "optim": "sgd", "learning_rate": 0.3, "max_steps": 3, "max_grad_norm": 0.0}
    start, moved, lines = tiny.model("qwen3").state_dict(), [], []
    for kind, rule in ((GRPOTrainer, {}), (Counting, {"rule": "none"})):
        trainer = training.build(tmp_path, kind=kind, lr_scheduler_type="constant", **settings, **rule)
        trainer.train()
        moved.append({name: p.detach() - start[name] for name, p in trainer.model.named_parameters()})
        lines.append([line for line in trainer.state.log_history if "loss" in line])
    assert training.distance(moved[1], moved[0]) < 1e-3
    assert trainer.passes == 0
    for plain, own in zip(*lines, strict=True):
        for name in (name for name in plain if "clip_ratio/" in name or name.startswith(("cispo", "vespo", "loss"))):
            assert own[name] == pytest.approx(plain[name], abs=1e-4), name
    assert [line["off_policy/ess"] == 1 for line in lines[1]] == [True, False, False]
    clips = [name for name in lines[1][-1] if name in ("clip_ratio/region_mean", "cispo_clip_ratio")]
    assert all(max(line[name] for line in lines[1][1:]) > 0 for name in clips)


# Fresh data


@pytest.mark.parametrize(
    "settings",
    [
        {"epsilon": 0.0},
        {"epsilon": 0.0, "importance_sampling_level": "sequence", "loss_type": "grpo"},
        {"loss_type": "sapo", "sapo_temperature_pos": 1.0, "sapo_temperature_neg": 2.0},
    ],
    ids=str,
)
def test_fresh_data_has_a_ratio_of_exactly_one(settings, tmp_path):
    """A loss of the ratio is then the plain one, whatever its range: nothing is clipped, and no pass is made."""

    def after_a_step(**settings):
        settings = {"max_steps": 1, "gradient_accumulation_steps": 2, **settings}
        trainer = training.build(tmp_path, kind=Counting, **settings)
        (line,) = training.train(trainer)
        assert trainer.passes == 0
        return trainer.model.state_dict(), line

    weights, line = after_a_step(**settings)
    assert (line["off_policy/ess"], line["off_policy/ratio_mean"], line["off_policy/kl"]) == (1.0, 1.0, 0.0)
    assert all(line[name] == 0 for name in line if "clip_ratio/" in name and name.startswith(("clip", "cispo")))
    level = settings.get("importance_sampling_level", "token")
    loss_type = "grpo" if level == "sequence" or "loss_type" in settings else "dapo"
    plain, _ = after_a_step(loss_type=loss_type, importance_sampling_level=level)
    assert all(torch.equal(weights[name], plain[name]) for name in plain)


# The off-policy mask


@pytest.mark.parametrize("known", ["sampling_per_token_logps", "old_per_token_logps"])
def test_off_policy_mask_without_a_ratio_drops_sequences_and_nothing_else(known, grpo, tmp_path):
    """Whether the sampler says what tokens were drawn with, or TRL has scored the old policy."""
    batch = stale(grpo, [1.0, -1.0, -0.5, -0.3, 0.7])
    del batch["old_per_token_logps"]
    own = training.prepared(training.build(tmp_path, rule="none", loss_type="luspo", off_policy_mask_threshold=0.1))
    distance = torch.tensor([0.0, 0.02, 0.3, 0.2, 0.9])  # per token
    _, masked = training.gradients(own, {**batch, known: scored(own, batch) + distance.unsqueeze(1)})
    plain = training.prepared(training.build(tmp_path, rule="none", loss_type="luspo"))
    kept = batch["advantages"] * torch.tensor([1, 1, 0, 0, 1])
    assert training.distance(masked, training.gradients(plain, {**batch, "advantages": kept})[1]) < 1e-5


# vLLM


@pytest.mark.filterwarnings("ignore:You are using 'rollout_func'")
def test_with_vllm_the_ratio_is_to_the_sampler_and_corrects_for_it_once(tmp_path):
    """The same as a `rollout_func` with these log-probabilities: no weights beside the ratio, and no pass."""
    results = []
    for use_vllm in (False, True):
        options = {"rollout_func": sampled}
        trainer = training.build(tmp_path, kind=Counting, options=options, rule="none", epsilon=0.2)
        training.prepared(trainer)
        trainer.use_vllm, trainer._last_loaded_step = use_vllm, 0
        batch = trainer._generate_and_score_completions([{"prompt": text} for text in ("What?", "Is it so?", "No")])
        assert "importance_sampling_ratio" not in batch and "old_per_token_logps" not in batch
        results.append(training.gradients(trainer, batch)[1])
        assert trainer._metrics["train"]["clip_ratio/region_mean"][-1] > 0
        assert trainer.passes == 0
    assert training.distance(*results) == 0


# Settings


@pytest.mark.parametrize(
    ("settings", "taken", "expected"),
    [
        ({}, False, (0.2, 0.2)),
        ({"importance_sampling_level": "sequence"}, False, (0.2, 0.2)),
        ({"epsilon": 0.3}, True, (0.3, 0.3)),
        ({"epsilon_high": 0.28}, True, (0.2, 0.28)),
        ({"delta": 2.0}, True, (0.2, 0.2)),
        ({"loss_type": "cispo", "epsilon_high": 5.0}, True, (0.2, 5.0)),
        ({"loss_type": "sapo"}, True, (0.2, 0.2)),
        ({"token_weights": "kpo", "epsilon": 0.2}, False, (0.2, 0.0004)),
    ],
    ids=str,
)
def test_the_ratio_is_taken_where_a_range_or_a_loss_of_it_was_given(settings, taken, expected):
    args = config(**settings)
    assert takes_ratio(args) == taken and clipping_range(args) == expected
    assert (weighting_for(args) is RatioLoss) == taken


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({}, []),
        ({"loss_type": "cispo"}, ["epsilon_high=5.0"]),
        ({"loss_type": "cispo", "epsilon_high": 5.0, "top_p": 0.9}, []),
        ({"epsilon": 0.2}, []),
        ({"epsilon": 0.2, "top_p": 0.9}, ["not sampled from the distribution", "epsilon=0.2"]),
        ({"off_policy_mask_threshold": 0.2, "top_p": 0.9}, []),
    ],
    ids=str,
)
def test_ranges_that_cut_off_fresh_data_are_warned_of(settings, words):
    warnings = RatioLoss(config(**settings)).warnings()
    assert bool(warnings) == bool(words) and all(word in warnings[0] for word in words)


def test_signs_are_those_that_trl_counts_clipped_tokens_by():
    advantages = torch.tensor([0.3, -2.0, 0.0, math.nan])
    assert signs(advantages, "grpo").tolist() == [1, -1, 1, 1]
    assert signs(advantages, "cispo").tolist() == [1, -1, -1, 1]


def test_old_policy_is_the_behaviour_policy_where_that_is_known_and_within_reach():
    logps = torch.tensor([[-1.0, -2.0, -3.0, -4.0, -5.0], [-1.0] * 5], requires_grad=True)
    behaviour = torch.tensor([[-1.1, math.nan, -math.inf, -40.0, -7.0], [-3.0] * 5])
    mask = torch.tensor([[1, 1, 1, 1, 0], [1] * 5])
    old = RatioLoss(config(epsilon=0.2))(logps, behaviour, mask, torch.tensor([1.0, 0.0])).old_logps
    # Ratios are cut at exp(10); tokens that are not scored, and sequences without an advantage, have a ratio of 1
    assert not old.requires_grad
    assert torch.equal(old, torch.tensor([[-1.1, -2.0, -13.0, -14.0, -5.0], [-1.0] * 5]))
    vespo = RatioLoss(config(loss_type="vespo"))(logps, behaviour, mask, torch.tensor([1.0, 0.0])).old_logps
    assert torch.equal(vespo[1], behaviour[1])


def test_card_names_the_range_and_the_loss(tmp_path):
    trainer = training.build(tmp_path, loss_type="vespo", vespo_k_pos=1.5, epsilon=0.2)
    trainer.create_model_card()
    text = (tmp_path / "README.md").read_text()
    for row in ("`loss_type` | vespo", "`vespo_k_pos` | 1.5", "`epsilon` | 0.2"):
        assert f"| {row} |" in text, row
