"""A weighting from outside the package is chosen by its name, and its gradient is what it says, in float64."""

import dataclasses
import re
from pathlib import Path

import pytest
import torch

from isopo_trl import ISOPOConfig
from isopo_trl.token_weights import WEIGHTINGS, Tokens, Unscaled, Weighted, Weighting, register
from tests import oracle, training
from tests.gradients.test_oracle import build, check, everything_in_float64, trainer_for  # noqa: F401
from tests.token_weights.definition import (
    backward,
    forward,
    log_ratios,
    normalisation,
    ragged_batch,
    scored_tokens,
)


PAGE = Path(__file__).parents[2] / "docs" / "off_policy.md"


@pytest.fixture(autouse=True)
def registry_as_it_was():
    before = dict(WEIGHTINGS)
    yield
    WEIGHTINGS.clear()
    WEIGHTINGS.update(before)


def config(**settings):
    return ISOPOConfig("unused", **{**training.SETTINGS, **settings})


def expected_gradients(model, batch, weights, rows, rule, unscaled=None):
    """`sum_s c_s V_s` with `weights` `[B, C]` in `V`, and the gradient of `unscaled` `[B, C]` as it is."""
    n = normalisation(batch)
    total = oracle.expected_gradients(model, oracle.position_gradients(model, batch, n * weights), batch, rows, rule)
    model.zero_grad()
    if unscaled is None:
        return total
    batch = dataclasses.replace(batch, advantages=torch.ones_like(batch.advantages))
    pull = oracle.position_gradients(model, batch, -n * unscaled)
    model.zero_grad()
    pull = oracle.expected_gradients(model, pull, batch, None, "none")
    return {p: gradient + pull[p] for p, gradient in total.items()}


# The page


def test_weighting_of_the_page_has_the_gradient_that_it_says(tmp_path):
    blocks = re.findall(r"^```python\n(.*?)^```$", PAGE.read_text(), flags=re.DOTALL | re.MULTILINE)
    (block,) = [block for block in blocks if "@register" in block]
    assert block.count("\n") <= 20
    names = {}
    exec(compile(block.partition("\nargs = ")[0], PAGE.name, "exec"), names)
    for rule in ("fisher", "interacting", "none"):
        model = build("llama")
        batch = ragged_batch(model)
        _, rows = backward(trainer := trainer_for(model, tmp_path, rule=rule, token_weights="geometric_mean"), batch)
        gradients = {p: p.grad.clone() for p in model.parameters()}
        model.zero_grad()
        z, length = log_ratios(forward(model, batch)[0], batch), scored_tokens(batch).sum(1)
        mean = torch.stack([row.sum() / max(int(n), 1) for row, n in zip(z, length, strict=True)]).exp()
        assert (mean > 1.5).any() and (mean < 1).any()
        weights = mean.clamp(max=1.5).unsqueeze(1).expand_as(z)
        expected = expected_gradients(model, batch, weights, rows, rule)
        for p, gradient in gradients.items():
            p.grad = gradient
        check(model, expected)
        # The figures of the batch come without a line of code
        trainer._log_step({"broken_sequences": 0})
        (ess,) = trainer._metrics["train"]["off_policy/ess"]
        r = z[scored_tokens(batch).bool()].exp()
        assert ess == pytest.approx((r.sum() ** 2 / (len(r) * r.square().sum())).item(), rel=1e-9)


# All that a weighting may return


class Halved(Weighting):
    """The root of the ratio, and a pull that is its square over two."""

    goes_back_twice = True

    def weigh(self, tokens):
        z = tokens.log_ratio.detach()
        return Weighted(weights=(z / 2).exp(), unscaled=lambda: Unscaled(0.3 * z.square() / 2, 0.3 * z))


class OnlyPulled(Halved):
    """The pull alone."""

    def weigh(self, tokens):
        return Weighted(unscaled=super().weigh(tokens).unscaled)


class BySequence(Halved):
    """A weight per sequence, and the pull."""

    def weigh(self, tokens):
        z = tokens.log_ratio.detach().sum(1, keepdim=True) / 4
        return Weighted(weights=z.exp(), unscaled=super().weigh(tokens).unscaled)


class Tempered(Weighting):
    """Half of the log-ratio, clipped to the range that it brings."""

    defaults = {"epsilon": 0.1, "epsilon_high": 0.2}

    def weigh(self, tokens):
        return Weighted(log_ratio=tokens.log_ratio / 2)


@pytest.mark.parametrize(
    ("weighting", "rule"),
    [
        *((Halved, rule) for rule in ("fisher", "interacting", "none")),
        *((weighting, rule) for weighting, rule in ((OnlyPulled, "interacting"), (BySequence, "fisher"))),
        *(
            pytest.param(weighting, rule, marks=pytest.mark.slow)
            for weighting, others in ((OnlyPulled, ("fisher", "none")), (BySequence, ("interacting", "none")))
            for rule in others
        ),
    ],
)
def test_weights_and_unscaled_terms_of_ones_own(weighting, rule, tmp_path):
    register("own")(weighting)
    model = build("llama")
    trainer = trainer_for(model, tmp_path, rule=rule, token_weights="own")
    batch = ragged_batch(model)
    z = log_ratios(forward(model, batch)[0], batch)
    weights = {Halved: z.exp().sqrt(), OnlyPulled: torch.ones_like(z), BySequence: (z.sum(1, True) / 4).exp()}
    weights = weights[weighting].expand_as(z)
    loss, rows = backward(trainer, batch)
    gradients = {p: p.grad.clone() for p in model.parameters()}
    model.zero_grad()
    expected = expected_gradients(model, batch, weights, rows, rule, unscaled=0.3 * z)
    for p, gradient in gradients.items():
        p.grad = gradient
    check(model, expected)
    n = normalisation(batch)
    value = (n * (0.15 * z.square() - weights * batch.advantages.unsqueeze(1))).sum().item()
    assert loss == pytest.approx(value, rel=1e-9)


@pytest.mark.parametrize("rule", ["fisher", "none"])
def test_ratio_of_ones_own_is_clipped_and_differentiated(rule, tmp_path):
    register("own")(Tempered)
    model = build("llama")
    trainer = trainer_for(model, tmp_path, rule=rule, token_weights="own")
    assert (trainer.args.epsilon, trainer.args.epsilon_high) == (0.1, 0.2)
    batch = ragged_batch(model)
    z = log_ratios(forward(model, batch)[0], batch).requires_grad_()
    r = (z / 2).exp()
    sign = torch.where(batch.advantages < 0, -1.0, 1.0).unsqueeze(1)
    objective = torch.minimum(r * sign, r.clamp(0.9, 1.2) * sign)
    (weights,) = torch.autograd.grad(objective.sum(), z)
    assert 0 < (weights == 0)[scored_tokens(batch).bool()].sum() < scored_tokens(batch).sum()
    _, rows = backward(trainer, batch)
    gradients = {p: p.grad.clone() for p in model.parameters()}
    model.zero_grad()
    signed = dataclasses.replace(batch, advantages=batch.advantages.abs())
    expected = expected_gradients(model, signed, weights, rows, rule)
    for p, gradient in gradients.items():
        p.grad = gradient
    check(model, expected)


def test_weighting_is_told_of_the_behaviour_policy_and_the_mask(tmp_path):
    seen = []

    @register("own")
    class Watch(Weighting):
        def weigh(self, tokens):
            seen.append(tokens)
            return Weighted()

    model = build("llama")
    trainer = trainer_for(model, tmp_path, token_weights="own")
    batch = ragged_batch(model)
    backward(trainer, batch)
    (tokens,) = seen
    assert isinstance(tokens, Tokens) and tokens.logps.requires_grad
    assert torch.equal(tokens.mask, scored_tokens(batch))
    torch.testing.assert_close(tokens.behaviour, batch.extra["sampling_per_token_logps"], equal_nan=True)
    torch.testing.assert_close(tokens.log_ratio.detach(), log_ratios(forward(model, batch)[0], batch))


# Training


def test_weighting_of_ones_own_trains_on_what_transformers_drew(tmp_path):
    register("own")(Halved)
    lines = training.train(training.build(tmp_path, token_weights="own", num_iterations=2, max_steps=4))
    assert [line["off_policy/ess"] == 1.0 for line in lines] == [True, False, True, False]


# Settings


def test_settings_of_a_weighting_of_ones_own():
    @dataclasses.dataclass
    class OwnConfig(ISOPOConfig):
        own_cap: float = dataclasses.field(default=2.0, metadata={"help": "Largest weight."})

    @register("own")
    class Capped(Weighting):
        title = "my weighting"
        settings = ("own_cap",)

        @classmethod
        def refusals(cls, args):
            yield args.own_cap <= 0, f"own_cap={args.own_cap} must be positive."
            yield from super().refusals(args)

        def weigh(self, tokens):
            return Weighted(weights=tokens.log_ratio.detach().exp().clamp(max=self.args.own_cap))

    settings = {**training.SETTINGS, "output_dir": "unused"}
    assert OwnConfig(token_weights="own", own_cap=3.0, **settings).own_cap == 3.0
    with pytest.raises(ValueError, match=r"own_cap=-1.0 must be positive"):
        OwnConfig(token_weights="own", own_cap=-1.0, **settings)
    with pytest.raises(ValueError, match="own_cap=3.0 is a setting of my weighting, but token_weights='p3o': remove"):
        OwnConfig(token_weights="p3o", own_cap=3.0, **settings)
    with pytest.raises(ValueError, match="kpo_gain=0.5 is a setting of KPO, but token_weights='own'"):
        OwnConfig(token_weights="own", kpo_gain=0.5, **settings)
    # The weighting is known to other configurations, too, which have no such setting
    assert config(token_weights="kpo").token_weights == "kpo"


@pytest.mark.parametrize(
    "settings",
    [
        {"epsilon": 0.1},
        {"importance_sampling_level": "sequence"},
        {"vllm_importance_sampling_clip_max": 2.0},
        {"kpo_gain": 0.1},
    ],
    ids=str,
)
def test_settings_that_a_weighting_would_ignore_are_refused(settings):
    register("own")(Halved)
    with pytest.raises(ValueError, match=next(iter(settings))):
        config(token_weights="own", **settings)


def test_name_that_is_taken_is_refused():
    with pytest.raises(ValueError, match="token_weights='p3o' is isopo_trl.token_weights.p3o.P3O already"):
        register("p3o")(Halved)
    assert WEIGHTINGS["p3o"] is not Halved
    register("own")(Halved)
    register("own")(Halved)  # as a cell of a notebook that is run again


def test_unknown_name_is_refused_with_those_there_are():
    register("own")(Halved)
    with pytest.raises(ValueError, match="token_weights='mine' is unknown: choose one of .*'kpo'.*'own'"):
        config(token_weights="mine")


# Mistakes


def test_unscaled_term_that_was_not_announced_is_refused(tmp_path):
    @register("own")
    class Unannounced(Weighting):
        def weigh(self, tokens):
            return Weighted(unscaled=lambda: None)

    model = build("llama")
    trainer = trainer_for(model, tmp_path, token_weights="own")
    with pytest.raises(TypeError, match="goes_back_twice = True"):
        trainer.compute_loss(trainer.model, ragged_batch(model).for_trl())


def test_clipped_ratio_and_unscaled_term_are_refused():
    with pytest.raises(ValueError, match="only one of the two"):
        Weighted(log_ratio=torch.zeros(1, 1), unscaled=lambda: None)


def test_reentrant_checkpointing_is_refused_where_a_weighting_goes_back_twice(tmp_path):
    register("own")(Halved)
    settings = {"gradient_checkpointing": True, "gradient_checkpointing_kwargs": {"use_reentrant": True}}
    with pytest.raises(ValueError, match="token_weights='own' needs to go back through the model twice"):
        training.build(tmp_path, token_weights="own", **settings)
