"""Rows that are kept over steps: their state, and what must not get into them."""

import logging
import warnings

import pytest
import torch
from torch import nn

from isopo_trl import ISOPO
from isopo_trl.fisher_rows.rows import FisherRows
from isopo_trl.geometry.routing import Routing
from isopo_trl.geometry.sequences import Sequences
from tests import oracle
from tests.fisher_rows.test_step_scope import sampled_positions


B, T, D = 3, 4, 5
FORMULA = {"scale": "paper", "regularization": 0.0}  # with which coefficients depend on no running mean
SCOPE = {"fisher_scope": "step", "fisher_samples": 6}


class Step:
    """Random rows and cotangents of three sequences of a linear layer, and what the definition makes of them."""

    def __init__(self, number):
        generator = torch.Generator().manual_seed(number)
        self.number = number
        self.x = torch.randn(B, T, D, generator=generator, dtype=torch.float64)
        self.g = torch.randn(B, T, 2, generator=generator, dtype=torch.float64)
        self.advantages = torch.randn(B, generator=generator, dtype=torch.float64)
        self.mask = torch.ones(B, T, dtype=torch.long)
        self.G = torch.einsum("btp,btd->btpd", self.g, self.x).flatten(2)

    def rows(self, count):
        batch = oracle.Batch(self.mask, self.mask, self.mask[:, :0], self.mask[:, :0], self.advantages)
        chosen = sampled_positions(batch, self.number, count, lambda s, _: s, seed=0)
        return self.G.flatten(0, 1)[chosen]

    def expected(self, samples, scales=None):
        V = self.G.sum(1)
        c = oracle.coefficients(V, samples, self.advantages, "fisher", **FORMULA)
        return ((c if scales is None else c * scales) @ V).view(2, D)

    def run(self, model, isopo, scales=(1.0,) * B, start=0, closed=True):
        """Sequences one by one from `start` on, whose losses carry the constants `scales`."""
        model.zero_grad()
        for s, scale in enumerate(scales, start):
            with isopo.microbatch(self.advantages[s : s + 1], attention_mask=self.mask[s : s + 1], loss_scale=scale):
                model(self.x[s : s + 1]).backward(scale * self.g[s : s + 1])
        if closed:
            isopo.step()


def linear():
    return nn.Sequential(nn.Linear(D, 2, bias=False)).double()


def attached(**settings):
    model = linear()
    return model, ISOPO(model, **{**SCOPE, **FORMULA, **settings})


def check(model, expected):
    torch.testing.assert_close(model[0].weight.grad, expected, rtol=1e-9, atol=1e-11)


def test_the_constant_of_the_loss_is_no_part_of_the_rows():
    """Microbatches of one step whose losses carry different constants count the same in the next one's metric."""
    model, isopo = attached()
    first, second = Step(0), Step(1)
    first.run(model, isopo, (1.0, 0.125, 8.0))
    second.run(model, isopo, (2.0, 1.0, 0.5))
    # By the formula to the letter, fisher's coefficient undoes a constant of the loss
    check(model, second.expected(first.rows(6)))


def test_a_step_with_few_positions_leaves_no_rows_of_older_steps_behind():
    """Six rows are asked for, and the third step has four positions; memory is that of the first one's rows."""
    model, isopo = attached()
    steps = [Step(number) for number in range(4)]
    for step in steps[:2]:
        step.run(model, isopo)
    steps[2].run(model, isopo, (1.0,))
    steps[3].run(model, isopo)
    check(model, steps[3].expected(steps[2].G[0]))


def test_a_resumed_run_goes_on_bit_for_bit():
    """The memory of the rows that were saved is filled again by later steps of the run that saved them."""
    steps = [Step(number) for number in range(5)]
    model, isopo = attached(scale="relative", regularization=0.1)
    saved = None
    for step in steps:
        step.run(model, isopo, (0.5,) * B)
        if step.number == 2:
            saved = isopo.state_dict()
    again, resumed = attached(scale="relative", regularization=0.1)
    resumed.load_state_dict(saved)
    for step in steps[3:]:
        step.run(again, resumed, (0.5,) * B)
    assert torch.equal(again[0].weight.grad, model[0].weight.grad)
    assert torch.equal(resumed._running.mean, isopo._running.mean)


def loaded(caplog, state, **settings):
    """A run that goes on from a state, and what it had to say."""
    model, isopo = attached(**settings)
    with warnings.catch_warnings(record=True) as caught, caplog.at_level(logging.WARNING):
        warnings.simplefilter("always")
        isopo.load_state_dict(state)
    return model, isopo, [str(warning.message) for warning in caught] + [record.message for record in caplog.records]


@pytest.mark.parametrize(
    "saved,changed",
    [
        ({"fisher_scope": "microbatch"}, ["fisher_scope='microbatch' to 'step'"]),
        ({"fisher_samples": 5}, ["fisher_samples=5 to 6"]),
    ],
)
def test_without_rows_that_fit_the_first_step_goes_by_the_microbatch_and_that_is_said(saved, changed, caplog):
    model, isopo = attached(**saved)
    Step(0).run(model, isopo)
    model, isopo, said = loaded(caplog, isopo.state_dict())
    assert len(said) == 2 and all(change in said[0] for change in changed)
    assert "no rows of the last step" in said[1] and "by the microbatch" in said[1]
    step = Step(isopo._rows.closed_steps)
    step.run(model, isopo)
    check(model, by_microbatch(step))


def by_microbatch(step):
    """Where each sequence is measured with those of its positions that are its own six best: all four."""
    each = zip(step.G.sum(1), step.G, step.advantages, strict=True)
    own = [oracle.coefficients(V[None], G, A[None], "fisher", **FORMULA) @ V[None] for V, G, A in each]
    return sum(own).view(2, D)


def test_nothing_else_is_said_of_rows_that_are_not_needed(caplog):
    assert loaded(caplog, attached()[1].state_dict())[2] == []  # before the first step
    model, isopo = attached()
    Step(0).run(model, isopo)
    _, isopo, said = loaded(caplog, isopo.state_dict(), fisher_scope="microbatch")
    assert len(said) == 1 and "fisher_scope='step' to 'microbatch'" in said[0]
    assert isopo.state_dict()["rows"] is None


def test_what_are_no_rows_is_refused_and_changes_nothing():
    model, isopo = attached()
    Step(0).run(model, isopo)
    with pytest.raises(ValueError, match="rows missing, or of another type"):
        isopo.load_state_dict({**isopo.state_dict(), "rows": []})
    second = Step(1)
    second.run(model, isopo)
    check(model, second.expected(Step(0).rows(6)))


def test_rows_of_another_shape_are_told():
    model, isopo = attached()
    Step(0).run(model, isopo)
    other = nn.Sequential(nn.Linear(D, 3, bias=False)).double()
    resumed = ISOPO(other, **SCOPE, **FORMULA)
    resumed.load_state_dict(isopo.state_dict())
    step = Step(1)
    with pytest.raises(RuntimeError, match=r"shape \[3\].*'g': \[2\].*another model"):
        with resumed.microbatch(step.advantages, attention_mask=step.mask):
            other(step.x).sum().backward()


def test_a_step_that_is_not_finite_leaves_no_rows():
    model, isopo = attached()
    first, broken, third = Step(0), Step(1), Step(2)
    first.run(model, isopo)
    broken.g[1, 2] = torch.inf
    broken.run(model, isopo)
    third.run(model, isopo)
    check(model, third.expected(first.rows(6)))


@pytest.mark.parametrize("at", [0, 1])
def test_a_step_in_which_no_sequence_counts_leaves_the_rows_of_the_step_before(at):
    """As DeepSpeed has it, for which a step without any advantage makes a pass."""
    model, isopo = attached()
    rows = None
    for step in map(Step, range(3)):
        if step.number == at:
            nobody, other = torch.zeros(B, dtype=torch.float64), Step(7)
            with isopo.microbatch(nobody, attention_mask=0 * other.mask, signs=nobody):
                model(other.x).backward(0 * other.g)
            isopo.step()
        step.run(model, isopo)
        check(model, by_microbatch(step) if rows is None else step.expected(rows))
        rows = step.rows(6)


def test_a_microbatch_that_was_broken_off_leaves_no_rows():
    """Nor do those of the step before it, some of whose slots it may have taken."""
    model, isopo = attached()
    first, other, second = Step(0), Step(7), Step(1)
    first.run(model, isopo, (1.0,), closed=False)
    with pytest.raises(KeyError):
        with isopo.microbatch(other.advantages, attention_mask=other.mask):
            model(other.x).backward(other.g)
            raise KeyError
    first.run(model, isopo, (1.0, 1.0), start=1)
    second.run(model, isopo)
    first.mask[0] = 0
    check(model, second.expected(first.rows(6)))


def test_a_microbatch_that_does_not_reach_a_layer_leaves_no_gradient_in_its_rows():
    model = nn.ModuleList([nn.Linear(D, 2, bias=False), nn.Linear(D, 2, bias=False)]).double()
    isopo = ISOPO(model, **SCOPE, **FORMULA)
    steps = [Step(number) for number in range(3)]

    def run(step, reached):
        model.zero_grad()
        for s in range(B):
            with isopo.microbatch(step.advantages[s : s + 1], attention_mask=step.mask[s : s + 1]):
                outputs = [layer(step.x[s : s + 1]) for layer in (model if reached(s) else model[:1])]
                torch.stack(outputs).sum(0).backward(step.g[s : s + 1])
        isopo.step()

    run(steps[0], lambda s: True)
    run(steps[1], lambda s: s != 1)
    run(steps[2], lambda s: True)
    steps[1].G[1] = 0  # at the second layer
    torch.testing.assert_close(model[1].weight.grad, steps[2].expected(steps[1].rows(6)), rtol=1e-9, atol=1e-11)


@pytest.mark.parametrize(
    "keys,message",
    [(torch.arange(2), r"shape \[3\].*\[2\]"), (torch.zeros(3), "whole numbers.*float32")],
)
def test_keys_must_be_whole_numbers_one_per_sequence(keys, message):
    _, isopo = attached()
    step = Step(0)
    with pytest.raises(ValueError, match=message):
        isopo.begin(step.advantages, attention_mask=step.mask, sequence_keys=keys)


def test_a_layer_whose_rows_have_no_gradient_gets_the_mean_multiplier():
    """As LoRA's A does in the second step: in the first, B was zero."""
    model, isopo = attached(scale="relative")
    first, second = Step(0), Step(1)
    first.g.zero_()
    first.run(model, isopo)
    second.run(model, isopo)
    check(model, (second.advantages @ second.G.sum(1)).view(2, D))


def test_a_term_without_an_advantage_is_added_as_it_is_and_leaves_no_rows():
    model, isopo = attached()
    steps = [Step(number) for number in range(3)]
    steps[0].run(model, isopo)
    model.zero_grad()
    with isopo.microbatch(steps[1].advantages, attention_mask=steps[1].mask):
        output = model(steps[1].x)
        isopo.unscaled(output.square().sum())
        output.backward(steps[1].g)
    isopo.step()
    of_term = 2 * torch.einsum("btp,btd->pd", model(steps[1].x).detach(), steps[1].x)
    check(model, steps[1].expected(steps[0].rows(6)) + of_term)
    steps[2].run(model, isopo)
    check(model, steps[2].expected(steps[1].rows(6)))


def test_the_order_of_experts_is_that_of_the_rows_of_the_step():
    """Memory comes back after two steps, with other rows in it."""
    kept, generator = FisherRows(6), torch.Generator().manual_seed(0)
    for number in range(5):
        step = Step(number)
        routing = Routing.of(torch.rand(B * T, 4, generator=generator).topk(2).indices, 4, Sequences.regular(B, T))
        draw = kept.draw(step.mask != 0, Sequences.regular(B, T), torch.arange(B), 1.0)
        g, a = (routing.of_positions(x.flatten(0, 1)) for x in (step.g, step.x))
        draw.collect_routed(0, g, a, routing.choices, routing.places)
        samples = kept.held(0)
        kept.commit(draw, unreached=[])
        if samples is not None:
            rows, bounds = routing.rows_from_before(samples)
            for expert in range(4):
                assert (samples.choices.flatten()[rows[bounds[expert] : bounds[expert + 1]]] == expert).all()
            assert bounds[-1] == 12
        kept.close()
