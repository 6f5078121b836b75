"""ISOPO on a model: what it refuses, what it reports, and its state."""

import warnings

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import nn

from isopo_trl import ISOPO
from tests import tiny


MASK = torch.ones(2, 4)


def linear():
    return nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 2))


def run(isopo, model, advantages=None):
    with isopo.microbatch(torch.tensor([1.0, -1.0]) if advantages is None else advantages, attention_mask=MASK):
        model(torch.randn(2, 4, 3)).sum().backward()


# Misuse


def test_a_backward_after_the_microbatch_has_ended_is_an_error():
    model = linear()
    isopo = ISOPO(model)
    isopo.begin(torch.ones(2), attention_mask=MASK)
    loss = model(torch.randn(2, 4, 3)).sum()
    isopo.end()
    with pytest.raises(RuntimeError, match="after its microbatch had ended"):
        loss.backward()


def test_a_forward_before_the_microbatch_is_an_error_and_not_a_plain_gradient():
    model = linear()
    isopo = ISOPO(model)
    loss = model(torch.randn(2, 4, 3)).sum()
    with (
        pytest.raises(RuntimeError, match="inside the `with` block"),
        isopo.microbatch(torch.ones(2), attention_mask=MASK),
    ):
        loss.backward()


def test_a_microbatch_inside_a_microbatch_is_an_error():
    model = linear()
    isopo = ISOPO(model)
    with pytest.raises(RuntimeError, match="Another microbatch"), isopo.microbatch(torch.ones(2), attention_mask=MASK):
        run(isopo, model)


def test_two_forwards_in_a_later_microbatch_are_noticed_too():
    model = linear()
    isopo = ISOPO(model)
    run(isopo, model)
    with (
        pytest.raises(RuntimeError, match="0.weight, 0.bias: 2 times"),
        isopo.microbatch(torch.ones(2), attention_mask=MASK),
    ):
        (model(torch.randn(2, 4, 3)) + model(torch.randn(2, 4, 3))).sum().backward()


def test_a_parameter_that_becomes_trainable_later_is_refused_by_name():
    model = linear()
    model[1].weight.requires_grad_(False)
    isopo = ISOPO(model)
    run(isopo, model)
    isopo.step()
    model[1].weight.requires_grad_(True)
    with pytest.raises(RuntimeError, match="1.weight became trainable"):
        isopo.begin(torch.ones(2), attention_mask=MASK)


def test_another_adapter_made_active_later_is_refused_by_name():
    settings = LoraConfig(r=2, target_modules="all-linear")
    model = get_peft_model(tiny.model("qwen2"), settings, adapter_name="first")
    model.add_adapter("second", settings)
    isopo = ISOPO(model)
    assert all(".first." in row["parameter"] for row in isopo.coverage())
    model.set_adapter("second")
    with pytest.raises(RuntimeError, match="lora_A.second.weight.* became trainable"):
        isopo.begin(torch.ones(2), attention_mask=MASK)


def test_two_backwards_in_one_microbatch_are_noticed_whichever_way_it_ends():
    model = linear()
    isopo = ISOPO(model)
    run(isopo, model)
    isopo.begin(torch.ones(2), attention_mask=MASK)
    output = model(torch.randn(2, 4, 3))
    output[:, :2].sum().backward(retain_graph=True)
    output[:, 2:].sum().backward()
    with pytest.raises(RuntimeError, match="0.weight, 0.bias: 2 times"):
        isopo.step()


class Twice(nn.Module):
    def __init__(self):
        super().__init__()
        self.shared, self.once, self.unused = nn.Linear(3, 3), nn.Linear(3, 3), nn.LayerNorm(3)

    def forward(self, x):
        return self.once(self.shared(self.shared(x)))


def test_a_layer_that_is_used_twice_or_not_at_all_is_reported_by_name():
    model = Twice()
    isopo = ISOPO(model)
    with pytest.raises(RuntimeError) as error, isopo.microbatch(torch.ones(2), attention_mask=MASK):
        model(torch.randn(2, 4, 3)).sum().backward()
    message = str(error.value)
    assert "shared.weight, shared.bias: 2 times" in message
    assert "unused.weight, unused.bias: 0 times" in message
    assert "once" not in message.split("exactly once")[1]
    assert isopo.current is None


def test_layers_are_counted_only_once_a_backward_has_run():
    model = Twice()
    isopo = ISOPO(model)
    isopo.begin(torch.ones(2), attention_mask=MASK)
    model(torch.randn(2, 4, 3))
    isopo.end()
    with pytest.raises(RuntimeError, match="shared.weight"), isopo.microbatch(torch.ones(2), attention_mask=MASK):
        model(torch.randn(2, 4, 3)).sum().backward()


def test_a_parameter_that_is_frozen_later_is_left_alone():
    model = linear()
    isopo = ISOPO(model)
    run(isopo, model)
    model.zero_grad()
    model[0].requires_grad_(False)
    run(isopo, model)
    assert model[0].weight.grad is None and model[1].weight.grad is not None
    assert isopo.step()["broken_sequences"] == 0


def test_a_layer_frozen_before_the_first_backward_is_named():
    model = linear()
    isopo = ISOPO(model)
    model[0].requires_grad_(False)
    with pytest.raises(RuntimeError, match="0.weight, 0.bias: 0 times"):
        run(isopo, model)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({}, "either `attention_mask`"),
        ({"attention_mask": MASK, "sequence_ids": MASK}, "either `attention_mask`"),
        ({"attention_mask": MASK[0]}, r"\[B, T\]"),
        ({"attention_mask": torch.ones(3, 4)}, r"of shape \[3\], one per row, got \[2\]"),
        ({"sequence_ids": torch.full((1, 4), 2)}, "names sequence 2"),
        ({"attention_mask": MASK, "prompts": torch.arange(3)}, r"`prompts` .* shape \[2\], got \[3\]"),
    ],
)
def test_arguments_that_do_not_fit_are_named(arguments, message):
    with pytest.raises(ValueError, match=message):
        ISOPO(linear()).begin(torch.ones(2), **arguments)


def test_a_sequence_number_without_an_advantage_is_an_error_that_says_so():
    packed = torch.tensor([[0, 0, 1, 1], [2, 2, 2, -1], [3, 1, 1, 3]])  # holds sequences 0 .. 3
    with pytest.raises(ValueError, match="sequence_ids"):
        ISOPO(linear()).begin(torch.ones(3), sequence_ids=packed)


def test_advantages_per_token_are_refused():
    with pytest.raises(ValueError, match="per-token advantages are not supported"):
        ISOPO(linear()).begin(torch.ones(2, 4), attention_mask=MASK)


def test_step_before_any_microbatch_is_an_error():
    with pytest.raises(RuntimeError, match="before any microbatch"):
        ISOPO(linear()).step()


@pytest.mark.parametrize("rule", ["fisher", "interacting", "none"])
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_an_advantage_that_is_not_finite_is_counted_and_stays_out_of_the_running_means(rule, value):
    model = linear()
    isopo = ISOPO(model, rule)
    run(isopo, model, torch.tensor([1.0, value]))
    figures = isopo.step()
    assert figures["broken_sequences"] >= 1
    assert torch.isfinite(isopo._running.mean).all()


# State


def test_the_state_goes_on_where_it_was_saved():
    models = [linear(), linear()]
    models[1].load_state_dict(models[0].state_dict())
    one, other = (ISOPO(model, "fig4", seed=3) for model in models)
    run(one, models[0])
    one.step()
    other.load_state_dict(one.state_dict())
    torch.manual_seed(0)
    run(one, models[0])
    models[1].zero_grad()
    torch.manual_seed(0)
    run(other, models[1])
    assert torch.equal(one.step()["fisher_norm"] * torch.ones(1), other.step()["fisher_norm"] * torch.ones(1))
    assert torch.equal(one._running.mean, other._running.mean)


def test_a_state_can_be_taken_back_in_the_middle_of_a_run():
    model = linear()
    isopo = ISOPO(model)
    run(isopo, model)
    isopo.step()
    saved, mean = isopo.state_dict(), isopo._running.mean.clone()
    run(isopo, model)
    isopo.step()
    assert not torch.equal(isopo._running.mean, mean)
    isopo.load_state_dict(saved)
    assert torch.equal(isopo._running.mean, mean) and isopo.state_dict()["draws"] == saved["draws"]


@pytest.mark.parametrize(
    ("model", "settings", "message"),
    [
        (nn.Sequential(nn.Linear(3, 3)), {}, "other trained parameters .*1.bias"),
        (linear(), {"rule": "euclidean"}, "belong to name='fisher'.*name='euclidean'"),
        (linear(), {"regularization": 0.5}, "regularization=0.1.*regularization=0.5"),
    ],
)
def test_the_state_of_another_model_or_rule_is_refused(model, settings, message):
    saved = ISOPO(linear())
    with pytest.raises(ValueError, match=message):
        ISOPO(model, **settings).load_state_dict(saved.state_dict())


def shaped(layers, columns):
    return {"mean": torch.ones(layers, columns), "known": [True] * layers}


@pytest.mark.parametrize(
    ("entries", "message"),
    [
        ({"running": "missing"}, "running missing"),
        ({"rule": "missing", "draws": "missing"}, "rule, draws missing"),
        ({"draws": [1]}, "draws missing, or of another type"),
        ({"running": {}}, "not .* finite running means"),
        ({"running": {"mean": torch.zeros(3, 5)}}, "not .* finite running means"),
        ({"running": {"mean": torch.full((2, 5), torch.nan)}}, "not .* finite running means"),
    ],
)
def test_what_is_not_a_state_is_refused_and_changes_nothing(entries, message):
    model = linear()
    isopo = ISOPO(model)
    run(isopo, model)
    isopo.step()
    before = isopo._running.mean.clone()
    state = {name: value for name, value in {**isopo.state_dict(), **entries}.items() if not value == "missing"}
    with pytest.raises(ValueError, match=message):
        isopo.load_state_dict(state)
    with pytest.raises(ValueError, match="not a state of ISOPO"):
        isopo.load_state_dict([state])
    assert torch.equal(isopo._running.mean, before) and isopo.state_dict()["draws"] == 1


@pytest.mark.parametrize(
    ("rule", "expected"),
    [
        ("fisher", "regularization_decay=0.9 to 0.5, fisher_samples=64 to 8"),
        ("euclidean", "regularization_decay=0.9 to 0.5."),
        ("none", None),
    ],
)
def test_another_decay_or_number_of_samples_is_reported_where_it_means_something(rule, expected):
    state = ISOPO(linear(), rule).state_dict()
    isopo = ISOPO(linear(), rule, regularization_decay=0.5, fisher_samples=8)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        isopo.load_state_dict(state)
    assert len(caught) == (expected is not None)
    assert all(expected in str(warning.message) for warning in caught)


# A multiplier out of proportion


def sure_of_one_sequence(model, isopo):
    """A step on two sequences, of which the model is almost sure of the second; returns the figures."""
    x = torch.tensor([[0.5, -0.2, 0.3], [0.0, 0.0, 12.0]]).unsqueeze(1).expand(2, 4, 3)
    with isopo.microbatch(torch.tensor([1.0, -1.0]), attention_mask=MASK):
        model(x).log_softmax(-1)[..., 0].sum().backward()
    return isopo.step()


def certain():
    model = nn.Sequential(nn.Linear(3, 2))
    with torch.no_grad():
        model[0].weight.copy_(torch.tensor([[0.3, 0.1, 0.5], [-0.2, 0.4, -0.5]]))
        model[0].bias.zero_()
    return model


@pytest.mark.parametrize("scale", ["relative", "paper"])
@pytest.mark.parametrize("rule", ["fisher", "npg", "fig4", "euclidean"])
def test_a_sequence_that_the_policy_is_sure_of_cannot_blow_up_a_step(rule, scale):
    model = certain()
    isopo = ISOPO(model, rule, scale=scale)
    figures = sure_of_one_sequence(model, isopo)
    power = -sum(isopo.rule.exponents)
    if scale == "relative":
        assert figures["multiplier_max"] <= (1 + 2 / 0.1) ** (power / 2)
    assert figures["multiplier_max"] / figures["multiplier_min"] <= (1 + 2 / 0.1) ** (power / 2)


@pytest.mark.parametrize("scale", ["relative", "paper"])
@pytest.mark.parametrize("rule", ["fisher", "euclidean"])
def test_a_multiplier_out_of_proportion_is_reported_once_with_what_to_set(rule, scale, caplog):
    model = certain()
    isopo = ISOPO(model, rule, scale=scale, regularization=0)
    figures = sure_of_one_sequence(model, isopo)
    assert figures["multiplier_max"] / figures["multiplier_min"] > 1000
    sure_of_one_sequence(model, isopo)
    (record,) = caplog.records
    assert record.levelname == "WARNING" and "In this step" in record.message
    assert "at 0.weight" in record.message and "regularization=0.1 (it is 0)" in record.message


@pytest.mark.parametrize("settings", [{}, {"scale": "paper"}, {"rule": "interacting"}, {"rule": "none"}], ids=str)
def test_nothing_is_reported_where_the_multiplier_is_in_proportion(settings, caplog):
    model = certain()
    isopo = ISOPO(model, **settings)
    sure_of_one_sequence(model, isopo)
    assert not caplog.records


def test_a_small_lambda_is_told_to_be_larger(caplog):
    model = certain()
    sure_of_one_sequence(model, ISOPO(model, regularization=1e-6))
    assert "regularization=1e-05 (it is 1e-06)" in caplog.text


def test_the_gradients_norm_is_read_along():
    model = linear()
    isopo = ISOPO(model)
    run(isopo, model)
    assert "grad_norm" not in isopo.step()
    norm = torch.nn.utils.get_total_norm([p.grad for p in model.parameters()])
    run(isopo, model)
    assert isopo.step(norm)["grad_norm"] == pytest.approx(norm.item())


def test_multipliers_are_the_coefficients_over_the_advantages():
    torch.manual_seed(0)
    model = linear()
    isopo = ISOPO(model, "euclidean", scale="paper", regularization=0)
    with pytest.raises(RuntimeError, match="before any microbatch"):
        isopo.multipliers()
    x = torch.randn(2, 4, 3)
    with isopo.microbatch(torch.tensor([2.0, 0.0]), attention_mask=MASK):
        model(x).sum().backward()
    found = isopo.multipliers()
    assert list(found) == ["0.weight", "1.weight"]
    model.zero_grad()
    isopo.detach()
    model(x[:1]).sum().backward()
    norm = torch.cat([model[0].weight.grad.flatten(), model[0].bias.grad]).norm()
    assert found["0.weight"][0].item() == pytest.approx(1 / norm.item(), rel=1e-5)
    assert found["0.weight"][1].isnan()
