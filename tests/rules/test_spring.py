"""SPRING: its coefficients and its steps against the definition, with the kernel's linear system solved as it
stands."""

import math

import pytest
import torch

from isopo_trl import ISOPO
from isopo_trl.geometry import cost
from isopo_trl.layers import lm_head
from isopo_trl.rules import Spring, make_rule
from isopo_trl.rules.rule import KernelForm
from isopo_trl.step_size.completion_length import AUTO, AUTO_PLAIN
from tests import tiny, training
from tests.gradients.test_oracle import check
from tests.rules import several_steps
from tests.rules.gradients import ADVANTAGES, HISTORY, computed, example


@pytest.mark.parametrize("history", [None, HISTORY], ids=["first step", "history"])
@pytest.mark.parametrize("loss_scale", [1.0, 0.25])
def test_spring_solves_for_what_the_last_direction_leaves_of_the_advantages(history, loss_scale):
    v, G = example()
    phi = torch.randn(12, generator=torch.Generator().manual_seed(7), dtype=torch.float64)
    mean = v.square().sum(1).mean() if history is None else history["norm^2"]
    matrix = v @ v.T + 0.3 * mean * torch.eye(5, dtype=torch.float64)
    fitted = v.T @ torch.linalg.solve(matrix, ADVANTAGES - 0.7 * v @ phi)
    rule = make_rule("spring", regularization=0.3, spring_decay=0.7)
    V = loss_scale * v
    result = computed(V, G, ADVANTAGES, rule, history, phi, loss_scale=loss_scale)
    torch.testing.assert_close(V.T @ result.c, fitted / loss_scale, rtol=1e-9, atol=1e-12)
    # Where the loss contains the signs
    signs = torch.tensor([1.0, -1.0, 1.0, 1.0, -1.0], dtype=torch.float64)
    other = computed(signs[:, None] * V, G, signs * ADVANTAGES, rule, history, phi, loss_scale=loss_scale)
    torch.testing.assert_close(signs * other.c, result.c, rtol=1e-9, atol=1e-12)


def test_without_memory_spring_is_interacting_to_the_letter():
    V, G = example()
    pair = [make_rule("spring", spring_decay=0.0), make_rule("interacting", scale="paper")]
    ours, other = (computed(V, G, ADVANTAGES, rule, HISTORY, loss_scale=0.5) for rule in pair)
    assert torch.equal(ours.c, other.c) and not pair[0].needs.direction


class OtherSpring(Spring):
    """Its formula may be another one."""


def test_the_kernels_are_told_the_decay_but_know_no_subclass():
    assert Spring(regularization=0.3, spring_decay=0.7).kernel_form == KernelForm(0.3, decay=0.7)
    assert OtherSpring().kernel_form is None


@pytest.mark.parametrize("name", several_steps.RUNS)
def test_steps_of_several_microbatches_are_the_definition(name, tmp_path, float64_throughout):
    """
    The direction is that of the last step for all microbatches, its mean over these is taken, and `mu phi` is added
    once, before clipping. A step of one microbatch carries another constant than one of two.
    """
    kind, model, settings = several_steps.RUNS[name]
    run = kind(model, tmp_path, rule="spring", regularization=0.5, spring_decay=0.9, **settings)
    uses = several_steps.parameters(run.model)
    phi, means = {p: torch.zeros_like(p) for of in uses.values() for p in of}, None
    for step, microbatches in enumerate(several_steps.STEPS):
        run.model.zero_grad()
        seen = [several_steps.gradients(model, step, part) for part in range(microbatches)]
        updated, squares = {p: 0.9 * of_p for p, of_p in phi.items()}, {}
        for batch, V in seen:
            for use, of in uses.items():
                square = V[use].square().sum(1)
                squares[use] = squares.get(use, 0) + square.mean() / microbatches
                c0 = 0.5 * (square.mean() if means is None else means[use])
                residual = batch.advantages - 0.9 * V[use] @ several_steps.flat(phi, of)
                c = torch.linalg.solve(V[use] @ V[use].T + c0 * torch.eye(3, dtype=torch.float64), residual)
                several_steps.add(updated, of, c @ V[use] / microbatches)
            run.backward(batch, microbatches)
        phi = updated
        means = squares if means is None else {use: 0.9 * means[use] + 0.1 * x for use, x in squares.items()}
        run.isopo.add_momentum()
        check(run.model, {p: microbatches**2 * of_p for p, of_p in phi.items()})
        for p in phi:
            p.grad.mul_(0.1)  # clipping, which the direction does not see
        run.isopo.step()


@pytest.mark.parametrize("strategy", ["whole", "blocks"])
def test_the_head_takes_its_part_of_the_direction_with_each_part_of_the_vocabulary(
    strategy, tmp_path, float64_throughout, monkeypatch
):
    monkeypatch.setattr(lm_head, "choose_strategy", lambda *_: strategy)
    monkeypatch.setattr(lm_head, "_TILE", 70)  # several tiles over the vocabulary
    monkeypatch.setattr(cost, "WHOLE_LIMIT", 100)  # and several blocks of a tile
    test_steps_of_several_microbatches_are_the_definition("trainer, full, tied", tmp_path, float64_throughout)


def test_two_ways_to_the_momentum_and_a_step_that_was_broken_off(float64_throughout):
    """`step` adds it where nobody has, once; and it is gone with a gradient that is not finite."""
    run = several_steps.ByHand("full, tied", None, "spring")
    batch, _ = several_steps.gradients("full, tied", 0, 0)
    state = run.isopo.state_dict()["direction"]
    assert state is None

    def gradient(steps, **given):
        for _ in range(steps):
            run.model.zero_grad()
            run.backward(batch, 1)
            run.isopo.step(**given)
        return run.model.lm_head.weight.grad.clone()

    first, second = gradient(1), gradient(1)
    assert not torch.equal(first, second)
    run.backward(batch, 1)
    with pytest.raises(RuntimeError, match="call `add_momentum` before `clip_grad_norm_`"):
        run.isopo.step(torch.tensor(1.0))
    run.isopo.add_momentum()
    with pytest.raises(RuntimeError, match="close the step first"):
        run.backward(batch, 1)
    run.isopo.forget_step()
    assert run.isopo.state_dict()["direction"] is None
    gradient(1)
    run.model.zero_grad()
    run.backward(batch, 1)
    run.isopo.add_momentum()
    run.isopo.step(torch.tensor(math.inf))
    assert run.isopo.state_dict()["direction"] is None
    run.backward(batch, 1)
    with pytest.raises(ValueError, match="loss_scale=0.5 differs from that of the step's other microbatches, 1"):
        run.backward(batch, 2)


def test_what_is_frozen_on_the_way_is_not_moved_by_what_it_did_before():
    model = torch.nn.Sequential(torch.nn.Linear(3, 3), torch.nn.Linear(3, 2))
    isopo = ISOPO(model, "spring")
    for step in range(2):
        model[0].requires_grad_(step == 0)  # as PEFT does with an adapter that gives way to another
        model.zero_grad()
        with isopo.microbatch(torch.tensor([1.0, -1.0]), attention_mask=torch.ones(2, 4)):
            model(torch.randn(2, 4, 3)).sum().backward()
        isopo.step()
    assert model[0].weight.grad is None and model[1].weight.grad is not None
    assert {*isopo.state_dict()["direction"]["tensors"]} == {"1.weight", "1.bias"}


SETTINGS = {"rule": "spring", "optim": "sgd", "gradient_accumulation_steps": 2, "max_steps": 4}
SETTINGS |= {"learning_rate": 1e-3, "max_grad_norm": 0.05}


def test_a_run_that_resumes_has_the_direction_to_the_last_bit(tmp_path):
    weights, directions = [], []
    for resume in (None, tmp_path / "checkpoint-2"):
        trainer = training.build(tmp_path, **SETTINGS, save_strategy="steps", save_steps=2)
        trainer.train(resume_from_checkpoint=None if resume is None else str(resume))
        weights.append({name: p.detach().clone() for name, p in trainer.model.named_parameters()})
        directions.append(trainer.isopo.state_dict()["direction"])
    for name, p in weights[0].items():
        assert torch.equal(weights[1][name], p), name
        assert torch.equal(directions[1]["tensors"][name], directions[0]["tensors"][name]), name
    saved = torch.load(tmp_path / "checkpoint-2" / "isopo_state.pt", weights_only=True)["direction"]
    assert saved["unit"] == 1 / 4 and saved["tensors"].keys() == directions[0]["tensors"].keys()


def test_steps_that_have_a_length_go_along_the_direction(tmp_path):
    """`target_kl` tries and makes the steps with the momentum in them; without it they would go elsewhere."""

    class Watched(training.ISOPOTrainer):
        def _get_grad_norm(self, model, grad_norm=None):
            before.update({name: p.detach().clone() for name, p in model.named_parameters()})
            return super()._get_grad_norm(model, grad_norm)

    before = {}
    settings = {**SETTINGS, "learning_rate": 1.0, "target_kl": 1e-3, "step_kl_share": 1.0, "max_grad_norm": 0.0}
    trainer = training.build(tmp_path, kind=Watched, **{**settings, "max_steps": 3})
    trainer.train()
    phi = trainer.isopo.state_dict()["direction"]["tensors"]
    moved = torch.cat([(p.detach() - before[n]).flatten() for n, p in trainer.model.named_parameters()])
    along = -torch.cat([phi[n].flatten() for n, _ in trainer.model.named_parameters()])
    assert torch.cosine_similarity(moved, along, dim=0) > 0.999


@pytest.mark.parametrize(("decay", "nats"), [(0.9, AUTO), (0.0, AUTO_PLAIN)])
def test_the_automatic_length_is_that_of_steps_that_add_up(tmp_path, decay, nats):
    trainer = training.build(tmp_path, **{**SETTINGS, "max_steps": 1}, target_kl="auto", spring_decay=decay)
    trainer.train()
    assert trainer.step_control.size.target == pytest.approx(nats / trainer.step_control.length.mean)


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        ({"spring_decay": 1.0}, "spring_decay=1.0"),
        ({"spring_decay": -0.1}, "spring_decay=-0.1"),
        ({"spring_decay": math.nan}, "spring_decay=nan"),
        ({"scale": "relative"}, "scale='relative'"),
        ({"regularization": 0.0}, "rule='spring'"),
        ({"keep_small": True}, "keep_small=True"),
    ],
    ids=str,
)
def test_a_setting_that_cannot_be_honoured_is_named(settings, named):
    with pytest.raises(ValueError, match=named):
        make_rule("spring", **settings)


@pytest.mark.parametrize(
    ("settings", "warned"),
    [
        ({"optim": "sgd"}, False),
        ({"optim": "adamw_torch"}, True),
        ({"optim": "sgd", "optim_args": "momentum=0.9"}, True),
    ],
    ids=str,
)
def test_an_optimizer_that_turns_the_direction_elsewhere_is_warned_of(settings, warned, tmp_path, caplog):
    training.build(tmp_path, rule="spring", **settings)
    assert sum("set optim='sgd' without momentum" in record.message for record in caplog.records) == warned


def test_a_model_that_is_sharded_after_it_was_attached_is_refused(monkeypatch):
    model = tiny.model("llama")
    isopo = ISOPO(model, "spring")
    model.lm_head.weight.ds_id = 1  # as ZeRO-3 marks what it has taken apart
    with pytest.raises(
        ValueError, match="rule='spring' measures.*sharded under DeepSpeed ZeRO-3 as lm_head.weight is"
    ):
        isopo.begin(torch.ones(2), attention_mask=torch.ones(2, 4))
