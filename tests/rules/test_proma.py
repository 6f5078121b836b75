"""PROMA: its coefficients and its steps against the definition, with projections of vectors as they stand."""

import math

import pytest
import torch

from isopo_trl import ISOPO
from isopo_trl.rules import Proma, make_rule
from isopo_trl.rules.rule import KernelForm
from tests import training
from tests.gradients.test_oracle import check
from tests.rules import several_steps
from tests.rules.gradients import ADVANTAGES, HISTORY, computed, example


def accumulated(R, V, A, strength=1.0, bound=0.5):
    """R after a microbatch, and how much `P` was shortened."""
    S = V / V.norm(dim=1, keepdim=True)
    P = S.T @ torch.linalg.solve(S @ S.T + 0.01 * torch.eye(len(V), dtype=V.dtype), S @ R)
    g = A @ V
    shortened = 1.0
    if P.norm() > bound * g.norm():
        shortened = bound * g.norm() / P.norm()
    return R - strength * shortened * P + g, shortened


@pytest.mark.parametrize("history", [None, HISTORY], ids=["first step", "history"])
@pytest.mark.parametrize(
    ("size", "settings"),
    [(0.1, {}), (30.0, {}), (30.0, {"proma_strength": 0.4, "proma_bound": 0.1}), (30.0, {"proma_bound": 0.0})],
    ids=str,
)
def test_proma_takes_the_projection_away(size, settings, history):
    V, G = example()
    R = size * torch.randn(12, generator=torch.Generator().manual_seed(7), dtype=torch.float64)
    bound, strength = settings.get("proma_bound", 0.5), settings.get("proma_strength", 1.0)
    expected, shortened = accumulated(R, V, ADVANTAGES, strength, bound)
    assert (shortened < 1) == (size == 30.0)
    rule = make_rule("proma", **settings)
    result = computed(V, G, ADVANTAGES, rule, history, R)
    torch.testing.assert_close(R + V.T @ result.c, expected, rtol=1e-9, atol=1e-12)
    # A constant of the loss is in both
    other = computed(0.25 * V, G, ADVANTAGES, rule, history, 0.25 * R, loss_scale=0.25)
    torch.testing.assert_close(other.c, result.c, rtol=1e-9, atol=1e-12)
    signs = torch.tensor([1.0, -1.0, 1.0, 1.0, -1.0], dtype=torch.float64)
    other = computed(signs[:, None] * V, G, signs * ADVANTAGES, rule, history, R)
    torch.testing.assert_close(signs * other.c, result.c, rtol=1e-9, atol=1e-12)


def test_a_sequence_without_a_gradient_takes_no_part_and_the_first_microbatch_has_nothing_to_give_way():
    V, G = example()
    V[1] = 0
    R = torch.randn(12, generator=torch.Generator().manual_seed(7), dtype=torch.float64)
    others = torch.tensor([0, 2, 3, 4])
    expected, _ = accumulated(R, V[others], ADVANTAGES[others])
    result = computed(V, G, ADVANTAGES, make_rule("proma"), None, R)
    torch.testing.assert_close(R + V.T @ result.c, expected, rtol=1e-9, atol=1e-12)
    assert torch.equal(computed(V, G, ADVANTAGES, make_rule("proma"), None, 0 * R).c, ADVANTAGES)


class OtherProma(Proma):
    """Its formula may be another one."""


def test_the_kernels_are_told_strength_and_bound_but_know_no_subclass():
    assert Proma(proma_strength=0.4, proma_bound=2.0).kernel_form == KernelForm(proma=(0.4, 2.0))
    assert OtherProma().kernel_form is None


@pytest.mark.parametrize("name", several_steps.RUNS)
def test_steps_of_several_microbatches_are_the_definition(name, tmp_path, float64_throughout):
    """What was accumulated is this step's alone; a tied weight has one R for both of its uses."""
    kind, model, settings = several_steps.RUNS[name]
    run = kind(model, tmp_path, rule="proma", proma_strength=0.8, **settings)
    uses, shortened = several_steps.parameters(run.model), []
    for step, microbatches in enumerate(several_steps.STEPS):
        run.model.zero_grad()
        R = {p: torch.zeros_like(p) for of in uses.values() for p in of}
        for part in range(microbatches):
            batch, V = several_steps.gradients(model, step, part)
            before = dict(R)
            for use, of in uses.items():
                so_far = several_steps.flat(before, of)
                after, share = accumulated(so_far, V[use] / microbatches, batch.advantages, 0.8)
                several_steps.add(R, of, after - so_far)
                shortened.append(float(share))
            run.backward(batch, microbatches)
        check(run.model, R)
        run.isopo.step()
    assert min(shortened) < 1 == max(shortened)


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        ({"proma_strength": -1.0}, "proma_strength=-1.0"),
        ({"proma_bound": math.inf}, "proma_bound=inf"),
        ({"proma_bound": math.nan}, "proma_bound=nan"),
        ({"regularization": 0.5}, "regularization=0.5"),
    ],
    ids=str,
)
def test_a_setting_that_cannot_be_honoured_is_named(settings, named):
    with pytest.raises(ValueError, match=named):
        make_rule("proma", **settings)


def test_a_step_whose_gradients_are_kept_elsewhere_is_an_error():
    model = torch.nn.Linear(3, 2)
    isopo = ISOPO(model, "proma")
    with isopo.microbatch(torch.ones(2), attention_mask=torch.ones(2, 4)):
        model(torch.randn(2, 4, 3)).sum().backward()
    model.zero_grad()
    with pytest.raises(RuntimeError, match="call `step` once per optimizer step, before `zero_grad`"):
        isopo.begin(torch.ones(2), attention_mask=torch.ones(2, 4))
    isopo.step()
    isopo.begin(torch.ones(2), attention_mask=torch.ones(2, 4))


@pytest.mark.parametrize("microbatches", [1, 2])
def test_steps_of_one_microbatch_are_warned_of(microbatches, tmp_path, caplog):
    training.build(tmp_path, rule="proma", gradient_accumulation_steps=microbatches)
    assert any("nothing is left of it" in record.message for record in caplog.records) == (microbatches == 1)
