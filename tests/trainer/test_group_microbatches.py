"""`group_microbatches`: the completions of a prompt reach the loss in one microbatch, and nothing else changes."""

import pytest
import torch

from isopo_trl import ISOPOTrainer
from tests import oracle, tiny, training
from tests.gradients.test_oracle import build, check


def key(batch, row):
    """What a row of a batch is known by: its prompt, and its completion, advantage included."""
    prompt = batch["prompt_ids"][row][batch["prompt_mask"][row] != 0].tolist()
    completion = batch["completion_ids"][row][batch["completion_mask"][row] != 0].tolist()
    return tuple(prompt), (*completion, batch["advantages"][row].item())


class Watched(ISOPOTrainer):
    """Keeps what is generated, and what reaches the loss, microbatch by microbatch."""

    def __init__(self, *args, **kwargs):
        self.generations, self.microbatches, self.numbers = [], [], []
        super().__init__(*args, **kwargs)

    def _generate_and_score_completions(self, inputs):
        batch = super()._generate_and_score_completions(inputs)
        self.generations.append([key(batch, row) for row in range(len(inputs))])
        return batch

    def _compute_loss(self, model, inputs):
        self.microbatches.append([key(inputs, row) for row in range(len(inputs["advantages"]))])
        self.numbers.append(inputs["prompt_numbers"].tolist())
        return super()._compute_loss(model, inputs)


# Two groups in a microbatch, four microbatches in a generation, which serves twice for two steps each
REUSED = {
    "per_device_train_batch_size": 4,
    "num_generations": 2,
    "gradient_accumulation_steps": 2,
    "steps_per_generation": 4,
    "num_iterations": 2,
    "max_steps": 8,
}


@pytest.fixture(scope="module", params=[True, False], ids=["grouped", "shuffled"])
def watched(request, tmp_path_factory):
    data = tiny.prompts(24)
    settings = {**REUSED, "group_microbatches": request.param, "rule": "interacting", "learning_rate": 0.0}
    trainer = training.build(tmp_path_factory.mktemp("run"), kind=Watched, data=data, **settings)
    trainer.train()
    return trainer


def test_a_microbatch_holds_whole_groups_and_every_sequence_is_used_once_per_iteration(watched):
    grouped = watched.args.group_microbatches
    assert len(watched.generations) == 2 and len(watched.microbatches) == 16
    orders = []
    for number, generation in enumerate(watched.generations):
        served = watched.microbatches[8 * number : 8 * number + 8]
        for iteration in (served[:4], served[4:]):
            assert sorted(row for microbatch in iteration for row in microbatch) == sorted(generation)
        groups = [[prompt for prompt, _ in microbatch] for microbatch in served]
        whole = all(prompts.count(prompt) == 2 for prompts in groups for prompt in prompts)
        assert whole == grouped, "a group is cut" if grouped else "TRL does not shuffle any more"
        known = list(dict.fromkeys(prompt for prompt, _ in generation))
        orders.append([known.index(prompt) for prompts in groups[:4] for prompt in dict.fromkeys(prompts)])
    if grouped:
        in_order = list(range(8))
        assert orders[0] != orders[1] and in_order not in orders
        assert sorted(orders[0]) == sorted(orders[1]) == in_order


def test_the_numbers_of_prompts_tell_sequences_of_one_prompt_from_others(watched):
    for start in (0, 8):
        microbatches, numbers = watched.microbatches[start : start + 8], watched.numbers[start : start + 8]
        pairs = {
            (number, prompt)
            for microbatch, row in zip(microbatches, numbers, strict=True)
            for (prompt, _), number in zip(microbatch, row, strict=True)
        }
        assert len(pairs) == len(dict(pairs)) == len({prompt for _, prompt in pairs}) == 8


@pytest.mark.usefixtures("float64_throughout")
def test_the_gradient_is_that_of_each_groups_own_kernel(tmp_path):
    class Kept(ISOPOTrainer):
        def _generate_and_score_completions(self, inputs):
            self.batch = super()._generate_and_score_completions(inputs)
            return self.batch

        def _get_grad_norm(self, model, grad_norm=None):
            self.gradients = {p: p.grad.clone() for p in model.parameters() if p.requires_grad}
            return super()._get_grad_norm(model, grad_norm)

    settings = {"per_device_train_batch_size": 4, "num_generations": 4, "gradient_accumulation_steps": 3}
    settings |= {"group_microbatches": True, "max_steps": 1, "max_grad_norm": 1e30, "learning_rate": 0.0}
    settings |= {"rule": "interacting", "loss_type": "grpo"}
    trainer = training.build(tmp_path, build("qwen3", lora=True), Kept, **settings)
    trainer.train()
    names = ("prompt_ids", "prompt_mask", "completion_ids", "completion_mask", "advantages")
    batch = oracle.Batch(*(trainer.batch[name] for name in names))
    expected = dict.fromkeys(trainer.gradients, 0)
    for group in range(3):
        part = batch.part(slice(4 * group, 4 * group + 4))
        weights = oracle.token_weights(part, "grpo", accumulation=3)
        G = oracle.position_gradients(build("qwen3", lora=True), part, weights)
        for p, gradient in oracle.expected_gradients(trainer.model, G, part, None, "interacting").items():
            expected[p] = expected[p] + gradient
    for p, gradient in trainer.gradients.items():
        p.grad = gradient
    check(trainer.model, expected)


def test_resuming_inside_a_generation_is_as_unbroken_as_without(tmp_path, caplog):
    settings = {"group_microbatches": True, "per_device_train_batch_size": 4, "num_generations": 2, "max_steps": 4}
    settings |= {"steps_per_generation": 2, "save_strategy": "steps", "save_steps": 1}
    settings |= {"max_completion_length": 4, "learning_rate": 1e-2}
    whole = training.build(tmp_path, data=tiny.prompts(8), **settings)
    whole.train()
    expected = dict(whole.model.named_parameters())
    again = training.build(tmp_path, data=tiny.prompts(8), **settings)
    again.train(resume_from_checkpoint=tmp_path / "checkpoint-1")
    assert all(torch.equal(p, expected[name]) for name, p in again.model.named_parameters())
    assert "same completions" not in caplog.text
    # Microbatches that were cut otherwise are not taken for groups
    other = training.build(tmp_path, data=tiny.prompts(8), **{**settings, "group_microbatches": False, "max_steps": 2})
    other.train(resume_from_checkpoint=tmp_path / "checkpoint-1")
    assert "group_microbatches=True to False" in caplog.text


@pytest.mark.parametrize(
    "settings,names",
    [
        ({"per_device_train_batch_size": 4, "num_generations": 8, "gradient_accumulation_steps": 2}, "=8 .* of 4:"),
        ({"per_device_train_batch_size": 6, "num_generations": 4, "gradient_accumulation_steps": 2}, "=4 .* of 6:"),
        ({"accelerator_config": {"split_batches": True}}, "split_batches=True"),
    ],
)
def test_groups_that_do_not_fit_a_microbatch_are_refused(settings, names, tmp_path):
    assert not training.build(tmp_path, **settings).args.group_microbatches
    with pytest.raises(ValueError, match=f"group_microbatches=True .*{names}"):
        training.build(tmp_path, **settings, group_microbatches=True)
