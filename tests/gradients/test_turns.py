"""
Completions of several turns: what a tool wrote between them is context, as a prompt is. It has no part in the loss, in
token weights and their sums, in the lengths of completions and in what a step is measured by; in float64.
"""

import dataclasses

import pytest
import torch

from isopo_trl import ISOPOTrainer
from isopo_trl.step_size import measurement as measuring
from tests import oracle, tiny, training
from tests.gradients.test_oracle import build, trainer_for
from tests.loss.test_zero_advantages import assert_same_weights, logged, trained, whole_and_skipped
from tests.step_size.enumeration import Recorded, Run, ratio_of_sums, sequences
from tests.token_weights import test_ratio_loss
from tests.token_weights.definition import (
    ALL,
    WEIGHTS,
    compare,
    definition,
    forward,
    gtpo_weights,
    normalisation,
    off_policy,
    refer,
    scored_tokens,
)
from tests.token_weights.test_ratio_loss import LOSSES
from tests.trainer.fixed_rollout import fixed_rollout
from tests.trainer.test_rollouts import add, call


pytestmark = [
    pytest.mark.usefixtures("float64_throughout"),
    pytest.mark.filterwarnings("ignore:You are using 'rollout_func'"),
]

# Three turns; two; a tool at the end, which has left no room for an answer; one turn; no advantage; masked, as
# TRL does it with one that was cut off
TURNS = ["11001101", "10001", "11100", "111", "1011", "00000"]
LENGTHS, LIVE = [8, 5, 5, 3, 4, 5], [1, 1, 1, 1, 1, 0]
ADVANTAGES = [0.8, -1.1, 0.6, -0.4, 0.0, 1.3]


def several_turns(model, spread=0.6):
    """What an old policy drew; its log-probabilities are nonsense where a tool wrote."""
    advantages = torch.tensor(ADVANTAGES, dtype=torch.float64)
    batch = oracle.random_batch([3, 1, 5, 4, 2, 3], LENGTHS, 100, advantages=advantages)
    batch.completion_mask *= torch.tensor(LIVE).unsqueeze(1)
    own = torch.ones_like(batch.completion_mask)  # TRL pads with ones
    for row, turns in zip(own, TURNS, strict=True):
        row[: len(turns)] = torch.tensor(list(map(int, turns)))
    batch.extra["tool_mask"] = own
    batch.extra["prompt_numbers"] = torch.tensor([4, 4, 7, 7, 7, 7])
    return off_policy(model, batch, spread)


# The gradient


@pytest.mark.parametrize(
    ("rule", "lora", "loss_type"),
    [
        ("fisher", False, "grpo"),
        ("npg", True, "dr_grpo"),
        ("fig4", True, "bnpo"),
        ("euclidean", False, "luspo"),
        ("interacting", False, "dapo"),
        ("none", True, "grpo"),
    ],
)
def test_gradient_of_every_rule_is_that_of_the_turns(rule, lora, loss_type, tmp_path):
    model = build("llama", lora)
    batch = several_turns(model)
    expected = refer(model, batch, "none", normalisation(batch, loss_type))
    # Every position is a sample, those of the tools included, as those of prompts are
    compare(model, trainer_for(model, tmp_path, rule=rule, loss_type=loss_type, fisher_samples=ALL), expected, rule)


# Weights that look at other tokens, sequences, or the whole batch; others are in `tests/token_weights`
@pytest.mark.parametrize(
    ("name", "rule", "lora"),
    [
        ("p3o", "interacting", False),
        ("kpo wide", "fisher", True),
        ("m2po", "fisher", False),
        ("bapo", "npg", True),
        ("gtpo", "fisher", True),
    ],
)
def test_gradient_with_token_weights_is_that_of_the_turns(name, rule, lora, tmp_path, monkeypatch):
    monkeypatch.setitem(WEIGHTS, "m2po", {"token_weights": "m2po", "m2po_budget": 0.3})
    monkeypatch.setitem(WEIGHTS, "bapo", {"token_weights": "bapo", "bapo_target": 0.8})
    of_groups = {"token_weights": "gtpo", "group_microbatches": True, "num_generations": 2}
    monkeypatch.setitem(WEIGHTS, "gtpo", of_groups)
    model = build("llama", lora)
    batch = several_turns(model)
    own = scored_tokens(batch)
    if name == "gtpo":  # turns that begin and end alike, before and after a tool's answer
        ids = batch.completion_ids
        ids[1, :2], ids[1, 4], ids[3, :3] = ids[0, :2], ids[0, 7], ids[2, :3]
        off_policy(model, batch)
        weights = gtpo_weights(ids, own, batch.advantages, batch.extra["prompt_numbers"])
        assert weights[0, [0, 7]].tolist() == [2, 2] and weights[2, :3].tolist() == [4, 4, 4]
        assert weights[0, 1] == 1 and not weights[1, [0, 4]].any() and not weights[3].any()
    n = normalisation(batch)
    expected = refer(model, batch, name, n)
    # They would be others if a tool's tokens had a say in them
    all_own = dataclasses.replace(batch, extra={**batch.extra, "tool_mask": torch.ones_like(own)})
    others = definition(forward(model, all_own)[0], all_own, n, name).weights
    assert ((others - expected.expected.weights)[own.bool()].abs() > 1e-6).any()
    compare(model, trainer_for(model, tmp_path, rule=rule, **WEIGHTS[name]), expected, rule)


def test_gradient_of_a_loss_of_the_ratio_is_that_of_the_turns(tmp_path):
    """The ratio is a mean over the model's own tokens; others are in `tests/token_weights/test_ratio_loss.py`."""
    model, settings = build("llama"), LOSSES["GSPO by token"]
    expected = test_ratio_loss.refer(model, several_turns(model), settings)
    compare(model, trainer_for(model, tmp_path, rule="interacting", **settings), expected, "interacting")


@pytest.mark.parametrize("loss_type", ["bnpo", "dapo"])
def test_turns_without_an_advantage_are_left_out_of_the_same_step(loss_type, tmp_path):
    masks = torch.ones(6, 6, dtype=torch.long)
    masks[0, 1:3] = masks[3, 0] = masks[3, 2] = masks[4, 1:4] = masks[5, 2:] = 0
    batches = [_generation(seed, masks) for seed in range(2)]
    settings = {"loss_type": loss_type, "gradient_accumulation_steps": 2, "steps_per_generation": 2, "max_steps": 2}
    whole, skipped = whole_and_skipped(tmp_path, batches, **settings)
    assert_same_weights(skipped, whole)
    assert logged(skipped, "isopo/skipped_fraction") == [0.5, 0.5]
    plain = trained(tmp_path, [{**batch, "tool_mask": masks * 0 + 1} for batch in batches], **settings)
    assert not torch.equal(next(plain.model.parameters()), next(whole.model.parameters()))


def _generation(seed, tool_mask):
    advantages = torch.tensor([0.5, 0, 0, -1.0, 0, 2.0], dtype=torch.float64)
    batch = oracle.random_batch([3, 1, 5, 4, 2, 3], [6, 4, 6, 5, 6, 4], 100, seed, advantages)
    scored = batch.completion_mask * tool_mask
    return {**batch.for_trl(), "tool_mask": tool_mask, "num_items_in_batch": scored.sum()}


# From a generation of TRL's


class Saying(ISOPOTrainer):
    """Its model says these texts, one list of them per turn, for the rows that have not ended."""

    says = ([call("add", a=2, b=3), call("add", c=3), "no"], [call("add", a=5, b=4), "sorry"], ["9"])

    def _generate_single_turn(self, prompt_ids, *args, **kwargs):
        self.turns = getattr(self, "turns", -1) + 1
        texts = self.says[self.turns]
        assert len(texts) == len(prompt_ids)
        return [self.processing_class(text + tiny.EOS)["input_ids"] for text in texts], None


def test_gradient_of_the_turns_that_trl_generates_is_the_definition(tmp_path):
    model, data = build("qwen3"), tiny.conversational_prompts(3)
    settings = {"max_completion_length": 200, "gradient_checkpointing": False, "fisher_samples": 7}
    trainer = training.build(tmp_path, model, Saying, data=data, options={"tools": [add]}, **settings)
    training.prepared(trainer)
    generated = trainer._generate_and_score_completions([dict(row) for row in data])
    names = ("prompt_ids", "prompt_mask", "completion_ids", "completion_mask")
    batch = oracle.Batch(*(generated[name] for name in names), generated["advantages"].double())
    # What the model has said, and nothing else, is scored
    scored = generated["completion_mask"] * generated["tool_mask"]
    said = [
        trainer.processing_class.decode(ids[own.bool()]) for ids, own in zip(batch.completion_ids, scored, strict=True)
    ]
    first, second, third = trainer.says
    turns = [[first[0], second[0], third[0]], [first[1], second[1]], [first[2]]]
    assert said == ["".join(text + tiny.EOS for text in row) for row in turns]
    assert generated["num_items_in_batch"] == scored.sum() < batch.completion_mask.sum()
    batch.extra = {"tool_mask": generated["tool_mask"], "num_items_in_batch": scored.sum()}
    compare(model, trainer, refer(model, batch, "none", normalisation(batch)), "fisher")


# The size of the step


def rollout(row):
    return [20 + row, 30, 40 + 3 * row, 50 + row, 61, 70, 33][: 7 - row % 3]


MASKS = [[1, 0, 0, 1, 1, 0, 1], [0, 0, 1, 0, 1, 1], [1, 1, 1, 1, 1]]
TURNED = fixed_rollout(rollout, env_mask=lambda row: MASKS[row % 3])


@pytest.mark.parametrize("compared", ["all positions", "some positions"])
def test_a_step_is_measured_at_the_tokens_of_the_model_and_by_their_number(compared, tmp_path, monkeypatch):
    if compared == "some positions":
        monkeypatch.setattr(measuring, "LARGEST_LOGITS", 5 * 6 * len(tiny.VOCABULARY))
    settings = {"target_kl": "auto", "learning_rate": 0.05, "step_kl_share": 1.0, "max_completion_length": 8}
    settings |= {"per_device_train_batch_size": 6, "lr_scheduler_type": "constant"}
    run = Run(tmp_path, lambda: tiny.model("qwen3", dtype=torch.float64), {"rollout_func": TURNED}, **settings)
    assert len(run.lines) == 2
    mean_length = sum(map(sum, MASKS)) / len(MASKS)
    for step, line in enumerate(run.lines):
        batch = run.trainer.batches[step]
        each = run.divergences(step, [batch])
        own = [torch.tensor(MASKS[ids[0] % 3], dtype=torch.float64) for ids in batch["completion_ids"] - 20]
        if compared == "some positions":
            places, counted = measuring.columns(7, 5 / 7, step, run.trainer.args.seed)
            assert 3 <= len(places) < 7
            weights = torch.zeros(7).index_put((torch.tensor(places),), torch.tensor(counted))
            own = [mask * weights[: len(mask)] for mask in own]
        kl = sum((x * w).sum() for x, w in zip(each, own, strict=True)) / sum(w.sum() for w in own)
        assert line["step/kl"] == pytest.approx(kl.item(), rel=1e-6)
        assert kl.item() != pytest.approx(ratio_of_sums(each).kl, rel=1e-2)  # as it would be of all tokens
        assert line["step/kl_per_completion"] == pytest.approx(kl.item() * mean_length, rel=1e-6)
    assert run.trainer.step_control.length.mean == pytest.approx(mean_length)
    assert run.trainer.step_control.size.target == pytest.approx(0.05 / mean_length)


def test_drift_from_the_sampler_is_that_of_the_tokens_of_the_model(tmp_path):
    def drawn_with(row):
        return [-4.0 if own else -50.0 for own in MASKS[row % 3]]

    options = {"rollout_func": fixed_rollout(rollout, drawn_with, env_mask=lambda row: MASKS[row % 3])}
    settings = {"behaviour_kl": 1e9, "num_iterations": 2, "max_steps": 1, "max_completion_length": 8}
    model = tiny.model("qwen3", dtype=torch.float64)
    trainer = training.build(tmp_path, model, Recorded, options=options, **settings)
    trainer.train()
    (batch,), change = trainer.batches, []
    for prompt, completion in sequences(batch):
        own = torch.tensor(MASKS[(completion[0] - 20) % 3]).bool()
        before = tiny.model("qwen3", dtype=torch.float64)
        change.append(training.log_probabilities(before, prompt.tolist(), completion.tolist())[own] + 4)
    change = torch.cat(change)
    found = trainer.step_control.behaviour.floor  # of data that no step came after
    assert found == pytest.approx((change.exp() - 1 - change).mean().item(), rel=1e-6)
