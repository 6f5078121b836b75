"""A weighting from outside the package is chosen by its name, and its gradient is what it says, in float64."""

import dataclasses
import re
from pathlib import Path

import pytest
import torch

from isopo_trl import ISOPOConfig
from isopo_trl.token_weights import WEIGHTINGS, Tokens, Unscaled, Weighted, Weighting, register
from tests import oracle, training
from tests.gradients.test_oracle import build, check, trainer_for
from tests.token_weights.definition import (
    ALL,
    backward,
    forward,
    log_ratios,
    normalisation,
    ragged_batch,
    scored_tokens,
)


pytestmark = pytest.mark.usefixtures("float64_throughout")
PAGE = Path(__file__).parents[2] / "docs" / "off_policy.md"


@pytest.fixture(autouse=True)
def registry_as_it_was():
    before = dict(WEIGHTINGS)
    yield
    WEIGHTINGS.clear()
    WEIGHTINGS.update(before)


def config(**settings):
    return ISOPOConfig("unused", **{**training.SETTINGS, **settings})


def compared(folder, name, rule, weights, pull=None):
    """
    A trainer with the weighting `name`, and the loss of a batch whose gradient is `sum_s c_s V_s` with the weights
    `[B, C]` of the log-ratios in `V`, and as it is, that of the unscaled `pull` `[B, C]`.
    """
    model = build("llama")
    batch = ragged_batch(model)
    z, n = log_ratios(forward(model, batch)[0], batch), normalisation(batch)
    advantages = batch.advantages
    V = oracle.position_gradients(model, batch, n * weights(z, batch))
    if name == "tempered":  # whose weights have the sign in them
        batch = dataclasses.replace(batch, advantages=advantages.abs())
    expected = oracle.expected_gradients(model, V, batch, None, rule)
    if pull is not None:
        ones = dataclasses.replace(batch, advantages=torch.ones_like(advantages))
        unscaled = oracle.position_gradients(model, batch, -n * pull(z))
        unscaled = oracle.expected_gradients(model, unscaled, ones, None, "none")
        expected = {p: gradient + unscaled[p] for p, gradient in expected.items()}
    model.zero_grad()
    trainer = trainer_for(model, folder, rule=rule, token_weights=name, fisher_samples=ALL)
    loss, _ = backward(trainer, dataclasses.replace(batch, advantages=advantages))
    check(model, expected)
    return trainer, loss, z, n, batch


# The page


@pytest.mark.parametrize("rule", ["fisher", "interacting"])
def test_weighting_of_the_page_has_the_gradient_that_it_says(rule, tmp_path):
    blocks = re.findall(r"^```python\n(.*?)^```$", PAGE.read_text(), flags=re.DOTALL | re.MULTILINE)
    (block,) = [block for block in blocks if "@register" in block]
    assert block.count("\n") <= 20
    exec(compile(block.partition("\nargs = ")[0], PAGE.name, "exec"), {})

    def weights(z, batch):
        length = scored_tokens(batch).sum(1).tolist()
        mean = torch.stack([row.sum() / max(n, 1) for row, n in zip(z, length, strict=True)]).exp()
        assert (mean > 1.5).any() and (mean < 1).any()
        return mean.clamp(max=1.5).unsqueeze(1).expand_as(z)

    trainer, _, z, _, batch = compared(tmp_path, "geometric_mean", rule, weights)
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
    [(Halved, "fisher"), (Halved, "none"), (OnlyPulled, "interacting"), (BySequence, "fisher")],
)
def test_weights_and_unscaled_terms_of_ones_own(weighting, rule, tmp_path):
    register("own")(weighting)

    def weights(z, batch):
        of_kind = {Halved: z.exp().sqrt(), OnlyPulled: torch.ones_like(z), BySequence: (z.sum(1, True) / 4).exp()}
        return of_kind[weighting].expand_as(z)

    _, loss, z, n, batch = compared(tmp_path, "own", rule, weights, lambda z: 0.3 * z)
    value = (n * (0.15 * z.square() - weights(z, batch) * batch.advantages.unsqueeze(1))).sum().item()
    assert loss == pytest.approx(value, rel=1e-9)


def test_ratio_of_ones_own_is_clipped_and_differentiated(tmp_path):
    register("tempered")(Tempered)

    def weights(z, batch):
        z, sign = z.clone().requires_grad_(), torch.where(batch.advantages < 0, -1.0, 1.0).unsqueeze(1)
        r = (z / 2).exp()
        (slope,) = torch.autograd.grad(torch.minimum(r * sign, r.clamp(0.9, 1.2) * sign).sum(), z)
        assert 0 < (slope == 0)[scored_tokens(batch).bool()].sum() < scored_tokens(batch).sum()
        return slope

    trainer, *_ = compared(tmp_path, "tempered", "fisher", weights)
    assert (trainer.args.epsilon, trainer.args.epsilon_high) == (0.1, 0.2)


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


def test_what_would_count_a_ratio_twice_is_refused():
    x = torch.zeros(1, 1)
    with pytest.raises(ValueError, match="only one of the two"):
        Weighted(log_ratio=x, unscaled=lambda: None)
    with pytest.raises(ValueError, match="`old_logps` together with"):
        Weighted(weights=x, old_logps=x)
