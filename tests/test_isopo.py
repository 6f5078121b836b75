"""ISOPO on a model: what it refuses, what it reports, and its state."""

import warnings

import pytest
import torch
from torch import nn

from isopo_trl import ISOPO


MASK = torch.ones(2, 4)


def linear():
    return nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 2))


def attached(*args, **settings):
    model = linear()
    return model, ISOPO(model, *args, **settings)


def run(isopo, model, advantages=(1.0, -1.0)):
    with isopo.microbatch(torch.tensor(advantages), attention_mask=MASK):
        model(torch.randn(2, 4, 3)).sum().backward()


# Misuse


def test_a_backward_after_the_microbatch_has_ended_is_an_error():
    model, isopo = attached()
    isopo.begin(torch.ones(2), attention_mask=MASK)
    loss = model(torch.randn(2, 4, 3)).sum()
    isopo.end()
    with pytest.raises(RuntimeError, match="after its microbatch had ended"):
        loss.backward()


def test_a_forward_before_the_microbatch_is_an_error_and_not_a_plain_gradient():
    model, isopo = attached()
    loss = model(torch.randn(2, 4, 3)).sum()
    with pytest.raises(RuntimeError, match="inside the `with` block"):
        with isopo.microbatch(torch.ones(2), attention_mask=MASK):
            loss.backward()


def test_a_microbatch_inside_a_microbatch_is_an_error():
    model, isopo = attached()
    with pytest.raises(RuntimeError, match="Another microbatch"), isopo.microbatch(torch.ones(2), attention_mask=MASK):
        run(isopo, model)


def test_two_backwards_in_a_later_microbatch_are_noticed_whichever_way_it_ends():
    model, isopo = attached()
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


def test_a_layer_that_is_used_twice_or_not_at_all_is_reported_by_name_in_the_first_backward():
    model = Twice()
    isopo = ISOPO(model)
    isopo.begin(torch.ones(2), attention_mask=MASK)
    model(torch.randn(2, 4, 3))
    isopo.end()  # without a backward, in which layers are counted
    with pytest.raises(RuntimeError) as error:
        run(isopo, model)
    message = str(error.value)
    assert "shared.weight, shared.bias: 2 times" in message and "unused.weight, unused.bias: 0 times" in message
    assert "once" not in message.split("exactly once")[1] and isopo.current is None


def test_a_parameter_that_becomes_trainable_later_is_refused_by_name():
    model = linear()
    model[1].weight.requires_grad_(False)
    isopo = ISOPO(model)
    run(isopo, model)
    isopo.step()
    model[1].weight.requires_grad_(True)
    with pytest.raises(RuntimeError, match="1.weight became trainable"):
        isopo.begin(torch.ones(2), attention_mask=MASK)


def test_a_layer_that_is_frozen_is_left_alone_but_named_where_it_never_had_a_gradient():
    model, isopo = attached()
    run(isopo, model)
    model.zero_grad()
    model[0].requires_grad_(False)
    run(isopo, model)
    assert model[0].weight.grad is None and model[1].weight.grad is not None
    assert isopo.step()["broken_sequences"] == 0
    model, isopo = attached()
    model[0].requires_grad_(False)
    with pytest.raises(RuntimeError, match="0.weight, 0.bias: 0 times"):
        run(isopo, model)


@pytest.mark.parametrize(
    ("advantages", "arguments", "message"),
    [
        (2, {}, "either `attention_mask`"),
        (2, {"attention_mask": MASK, "sequence_ids": MASK}, "either `attention_mask`"),
        (2, {"attention_mask": MASK[0]}, r"\[B, T\]"),
        (2, {"attention_mask": torch.ones(3, 4)}, r"of shape \[3\], one per row, got \[2\]"),
        ((2, 4), {"attention_mask": MASK}, "per-token advantages are not supported"),
        (2, {"sequence_ids": torch.full((1, 4), 2)}, "`sequence_ids` names sequence 2"),
        (2, {"attention_mask": MASK, "prompts": torch.arange(3)}, r"`prompts` .* shape \[2\], got \[3\]"),
    ],
)
def test_arguments_that_do_not_fit_are_named(advantages, arguments, message):
    with pytest.raises(ValueError, match=message):
        ISOPO(linear()).begin(torch.ones(advantages), **arguments)


def test_a_list_in_the_place_of_a_tensor_is_answered_with_what_to_write():
    isopo = ISOPO(linear())
    with pytest.raises(TypeError, match=r"`advantages` must be a tensor, got list: give `torch.tensor\(advantages\)`"):
        isopo.begin([1.0, -1.0], attention_mask=MASK)
    with pytest.raises(TypeError, match="`attention_mask` must be a tensor, got list"):
        with isopo.microbatch(torch.ones(2), attention_mask=MASK.tolist()):
            pass


@pytest.mark.parametrize(
    ("rule", "value"), [("fisher", float("nan")), ("interacting", float("inf")), ("none", float("nan"))]
)
def test_an_advantage_that_is_not_finite_is_counted_and_stays_out_of_the_running_means(rule, value):
    model, isopo = attached(rule)
    run(isopo, model, (1.0, value))
    assert isopo.step()["broken_sequences"] >= 1
    assert torch.isfinite(isopo._running.mean).all()


# State


def test_the_state_goes_on_where_it_was_saved_also_in_the_middle_of_another_run():
    models = [linear(), linear()]
    models[1].load_state_dict(models[0].state_dict())
    one, other = (ISOPO(model, "fig4", seed=3, fisher_scope="microbatch", fisher_samples=3) for model in models)
    run(other, models[1])
    other.step()
    run(one, models[0])
    one.step()
    other.load_state_dict(one.state_dict())
    figures = []
    for isopo, model in ((one, models[0]), (other, models[1])):
        torch.manual_seed(0)
        model.zero_grad()
        run(isopo, model)
        figures.append(isopo.step())
    assert figures[0] == figures[1] and torch.equal(one._running.mean, other._running.mean)
    assert torch.equal(models[0][0].weight.grad, models[1][0].weight.grad)


@pytest.mark.parametrize(
    ("model", "settings", "message"),
    [
        (nn.Sequential(nn.Linear(3, 3)), {}, "other trained parameters .*1.bias"),
        (linear(), {"rule": "euclidean"}, "belong to name='fisher'.*name='euclidean'"),
        (linear(), {"regularization": 0.5}, "regularization=0.1.*regularization=0.5"),
    ],
)
def test_the_state_of_another_model_or_rule_is_refused(model, settings, message):
    with pytest.raises(ValueError, match=message):
        ISOPO(model, **settings).load_state_dict(ISOPO(linear()).state_dict())


@pytest.mark.parametrize(
    ("entries", "message"),
    [
        ({"rule": None, "draws": None}, "rule, draws missing"),
        ({"draws": [1]}, "draws missing, or of another type"),
        ({"running": {}}, "not .* finite running means"),
        ({"running": {"mean": torch.zeros(3, 5)}}, "not .* finite running means"),
        ({"running": {"mean": torch.full((2, 5), torch.nan)}}, "not .* finite running means"),
    ],
)
def test_what_is_not_a_state_is_refused_and_changes_nothing(entries, message):
    model, isopo = attached()
    run(isopo, model)
    isopo.step()
    before = isopo._running.mean.clone()
    state = {**isopo.state_dict(), **entries}
    state = {name: value for name, value in state.items() if name not in entries or value is not None}
    for given, said in ((state, message), ([state], "not a state of ISOPO")):
        with pytest.raises(ValueError, match=said):
            isopo.load_state_dict(given)
    assert torch.equal(isopo._running.mean, before) and isopo.state_dict()["draws"] == 1


@pytest.mark.parametrize(
    ("rule", "expected"),
    [
        ("fisher", ["regularization_decay=0.9 to 0.5, fisher_samples=64 to 8"]),
        ("euclidean", ["regularization_decay=0.9 to 0.5."]),
        ("none", []),
    ],
)
def test_another_decay_or_number_of_samples_is_reported_where_it_means_something(rule, expected):
    isopo = ISOPO(linear(), rule, regularization_decay=0.5, fisher_samples=8)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        isopo.load_state_dict(ISOPO(linear(), rule).state_dict())
    assert len(caught) == len(expected)
    assert all(words in str(warning.message) for words, warning in zip(expected, caught, strict=True))


# A multiplier out of proportion


def sure_of_one_sequence(**settings):
    """Two steps on two sequences, of which the model is almost sure of the second; returns the figures."""
    model = nn.Sequential(nn.Linear(3, 2))
    with torch.no_grad():
        model[0].weight.copy_(torch.tensor([[0.3, 0.1, 0.5], [-0.2, 0.4, -0.5]]))
        model[0].bias.zero_()
    x = torch.tensor([[0.5, -0.2, 0.3], [0.0, 0.0, 12.0]]).unsqueeze(1).expand(2, 4, 3)
    isopo = ISOPO(model, **settings)
    for _ in range(2):
        with isopo.microbatch(torch.tensor([1.0, -1.0]), attention_mask=MASK):
            model(x).log_softmax(-1)[..., 0].sum().backward()
        figures = isopo.step()
    return figures


@pytest.mark.parametrize("scale", ["relative", "paper"])
@pytest.mark.parametrize("rule", ["fisher", "npg", "fig4", "euclidean"])
def test_a_sequence_that_the_policy_is_sure_of_cannot_blow_up_a_step(rule, scale, caplog):
    figures = sure_of_one_sequence(rule=rule, scale=scale)
    largest = (1 + 2 / 0.1) ** ({"npg": 2, "fig4": 3}.get(rule, 1) / 2)
    assert figures["multiplier_max"] <= (largest if scale == "relative" else largest * figures["multiplier_min"])
    assert not caplog.records


@pytest.mark.parametrize(
    ("settings", "advice"),
    [
        ({"rule": "fisher", "regularization": 0}, "regularization=0.1 (it is 0)"),
        ({"rule": "euclidean", "scale": "paper", "regularization": 0}, "regularization=0.1 (it is 0)"),
        ({"rule": "fisher", "regularization": 1e-6}, "regularization=1e-05 (it is 1e-06)"),
    ],
)
def test_a_multiplier_out_of_proportion_is_reported_once_with_what_to_set(settings, advice, caplog):
    figures = sure_of_one_sequence(**settings)
    assert figures["multiplier_max"] / figures["multiplier_min"] > 500
    (record,) = caplog.records
    assert record.levelname == "WARNING" and "In this step" in record.message
    assert "at 0.weight" in record.message and advice in record.message


# Figures


def test_the_gradients_norm_is_read_along():
    model, isopo = attached()
    with pytest.raises(RuntimeError, match="before any microbatch"):
        isopo.step()
    run(isopo, model)
    assert "grad_norm" not in isopo.step()
    norm = torch.nn.utils.get_total_norm([p.grad for p in model.parameters()])
    run(isopo, model)
    assert isopo.step(norm)["grad_norm"] == pytest.approx(norm.item())


@pytest.mark.parametrize("rule", ["fisher", "npg", "fig4", "euclidean", "interacting"])
def test_figures_of_multipliers_are_the_same_in_both_scales(rule):
    """To the letter of the paper they have units, in which no number says anything."""
    settings = {"fisher_scope": None if rule in ("euclidean", "interacting") else "microbatch", "regularization": 0.3}
    model, x, figures = linear(), torch.randn(2, 4, 3), []
    for scale in ("relative", "paper"):
        isopo = ISOPO(model, rule, scale=scale, **settings)
        with isopo.microbatch(torch.tensor([1.0, -0.5]), attention_mask=MASK, loss_scale=0.25):
            (1e-3 * model(x)).square().sum().backward()
        figures.append({name: value for name, value in isopo.step().items() if name.startswith("multiplier")})
        isopo.detach()
    assert len(figures[0]) == 3 and figures[1] == pytest.approx(figures[0], rel=1e-4)


def test_multipliers_are_the_coefficients_over_the_advantages():
    model, isopo = attached("euclidean", scale="paper", regularization=0)
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


@pytest.mark.parametrize("rule", ["fisher", "interacting"])
def test_a_backward_inside_of_autocast_has_the_gradient_of_one_outside(rule):
    torch.manual_seed(0)
    model, x, found = linear(), torch.randn(2, 4, 3), []
    for inside in (False, True):
        model.zero_grad()
        isopo = ISOPO(model, rule=rule)
        with isopo.microbatch(torch.tensor([1.0, -2.0]), attention_mask=MASK):
            with torch.autocast("cpu", torch.bfloat16):
                loss = model(x).float().square().sum()
                if inside:
                    loss.backward()
            if not inside:
                loss.backward()
        isopo.detach()
        found.append([p.grad for p in model.parameters()])
    assert all(map(torch.equal, *found)) and any(g.any() for g in found[0])
