"""Token weights on fresh data, and over the microbatches and steps of a training run, in float64."""

import pytest
import torch
from transformers import TrainerCallback

from isopo_trl import ISOPOTrainer
from tests import oracle, training
from tests.gradients.test_oracle import build, check, updated_means
from tests.token_weights.definition import (
    ALL,
    WEIGHTS,
    compare,
    effective_sample_size,
    forward,
    normalisation,
    off_policy,
    ragged_batch,
    refer,
)


pytestmark = pytest.mark.usefixtures("float64_throughout")


# Fresh data


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
@pytest.mark.parametrize("rule, lora", [("fisher", False), ("interacting", True), ("none", False)])
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
    assert own_loss == pytest.approx(loss, rel=1e-12)
    if rule == "none":  # where advantages stand in another place
        assert training.distance(gradients, expected) < 1e-14
    else:
        assert all(torch.equal(gradients[parameter], expected[parameter]) for parameter in expected)


@pytest.mark.parametrize("name", ["sampler", "p3o", "kpo"])
def test_fresh_data_is_weighed_where_the_sampler_is_another_policy(name, tmp_path):
    model = build("llama")
    trainer = prepared(tmp_path, model, top_p=0.9, **WEIGHTS[name])
    batch = off_policy(model, generated(trainer))
    compare(model, trainer, refer(model, batch, name, normalisation(batch)), "fisher")


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
        ("p3o", "interacting", "grpo"),
        ("kpo wide", "fisher", "dapo"),
        ("m2po", "fisher", "dapo"),
        ("bapo", "none", "dapo"),
    ],
)
def test_gradient_of_whole_steps_in_a_training_run(name, rule, loss_type, tmp_path):
    """
    Two steps of two microbatches. The sample size and the bounds are those of the step's microbatches so far, running
    means are those of the step before, and whatever scales the loss on its way scales the pull alike.
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
            logps = [forward(model, b)[0] for b in so_far]
            before = list(zip(logps, so_far, strict=True))[:part]
            result = refer(model, batch, name, n, effective_sample_size(logps, so_far), before=before)
            share = result.gradients(model, None, rule, histories=means, **settings)
            total = {p: total.get(p, 0) + gradient for p, gradient in share.items()}
            seen.append((batch, result.G))
        expected.append(total)
        means = updated_means(model, seen, rule, settings, means)
    keep = Keep()
    settings |= {"rule": rule, "loss_type": loss_type, "gradient_accumulation_steps": 2, "fisher_samples": ALL}
    settings |= {"gradient_checkpointing": False, "learning_rate": 0.0, "max_grad_norm": 0.0, **WEIGHTS[name]}
    trainer = training.build(tmp_path, model, Fed, options={"callbacks": [keep]}, **settings)
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
