"""
Completions of several turns: what a tool wrote between them is context, as a prompt is. It has no part in the loss, in
token weights and their sums, in the lengths of completions and in what a step is measured by; in float64.
"""

import pytest
import torch

from isopo_trl import ISOPOTrainer
from isopo_trl.step_size import measurement as measuring
from tests import oracle, tiny, training
from tests.gradients.test_oracle import build
from tests.loss.test_zero_advantages import assert_same_weights, logged, trained, whole_and_skipped
from tests.step_size.enumeration import Recorded, Run, ratio_of_sums, sequences
from tests.token_weights.definition import (
    compare,
    normalisation,
    refer,
)
from tests.trainer.fixed_rollout import fixed_rollout
from tests.trainer.test_rollouts import add, call


pytestmark = [
    pytest.mark.usefixtures("float64_throughout"),
    pytest.mark.filterwarnings("ignore:You are using 'rollout_func'"),
]


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
