"""`advantage_transform` in training: what comes to the loss, with which other settings, and after a checkpoint."""

import itertools

import pytest
import torch
from peft import LoraConfig
from transformers import TrainerCallback

from isopo_trl import ISOPOTrainer
from isopo_trl.advantages import Transform, register
from isopo_trl.advantages.transform import TRANSFORMS
from tests import tiny, training
from tests.advantages import definition
from tests.trainer.fixed_rollout import fixed_rollout


GROUP = 3
THRESHOLD = 4.345  # between the entropies of the tiny model's completions
BATCH = {"per_device_train_batch_size": 6, "num_generations": GROUP, "scale_rewards": "group"}


class Watched(ISOPOTrainer):
    """Keeps the rewards and the batches of its generations, and what comes to the loss."""

    def __init__(self, *args, **kwargs):
        self.rewards, self.generations, self.microbatches = [], [], []
        super().__init__(*args, **kwargs)
        begin = self.isopo.begin

        def noted(sizes, **more):
            self.microbatches.append((sizes * more["signs"]).tolist())
            begin(sizes, **more)

        self.isopo.begin = noted

    def _calculate_rewards(self, *args):
        rewards = super()._calculate_rewards(*args)
        self.rewards.append([None if r != r else r for r in (rewards * self.reward_weights).sum(1).tolist()])
        return rewards

    def _generate_and_score_completions(self, inputs):
        self.generations.append(super()._generate_and_score_completions(inputs))
        return self.generations[-1]


def sign(completions, **_):
    """1 and -1, about as often."""
    return [1.0 if sum(map(ord, text)) % 2 else -1.0 for text in completions]


def right(completions, **_):
    return [(value + 1) / 2 for value in sign(completions)]


def trained(folder, kind=Watched, **settings):
    trainer = training.build(folder, kind=kind, **{**BATCH, "max_steps": 1, **settings})
    trainer.train()
    return trainer


def advantages(trainer, number=0):
    return trainer.generations[number]["advantages"].tolist()


def close(values):
    return pytest.approx(values, rel=1e-4, abs=1e-4)  # rewards and advantages of TRL's are float32


def distributions(trainer, batch):
    """For each completion, the log-distributions its tokens were drawn from `[C, V]`, and the tokens; float64."""
    model = tiny.model("qwen3", dtype=torch.float64)  # as it was before the step
    for row in range(len(batch["advantages"])):
        prompt = batch["prompt_ids"][row][batch["prompt_mask"][row].bool()]
        completion = batch["completion_ids"][row][batch["completion_mask"][row].bool()]
        with torch.no_grad():
            logits = model(input_ids=torch.cat([prompt, completion])[None]).logits[0, len(prompt) - 1 : -1]
        yield logits.log_softmax(1), completion


@pytest.mark.parametrize("name", ["dcpo", "redit", "pacs", "empg", "g2rl", "cppo", "simpletir", "gtpo", "dcpo,cppo"])
def test_the_loss_gets_the_transformed_advantages(name, tmp_path):
    reward = {"pacs": right, "g2rl": sign}.get(name, tiny.reward)
    settings = {"g2rl_lambda": 1.5} if name == "g2rl" else {}
    if name == "simpletir":
        settings["simpletir_answer"] = "[A-M]"
    if name == "gtpo":
        settings |= {"scale_rewards": "none", "gtpo_threshold": THRESHOLD}
    texts = []

    def noted(completions, **columns):
        texts.extend(completions)
        return reward(completions, **columns)

    trainer = trained(tmp_path, reward=noted, advantage_transform=name, gradient_accumulation_steps=2, **settings)
    (rewards,), (batch,) = trainer.rewards, trainer.generations
    plain, found = definition.grpo(rewards, GROUP), advantages(trainer)
    if name in ("dcpo", "dcpo,cppo"):
        expected = [a for i in range(0, 12, GROUP) for a in definition.dcpo([rewards[i : i + GROUP]])]
        expected = definition.cppo(expected, GROUP, 0.5) if "cppo" in name else expected
    elif name == "redit":
        expected = found
        assert max(abs(a - b) for a, b in zip(found, plain, strict=True)) > 0.01
    elif name == "pacs":
        expected = definition.pacs(rewards, [0.0] * 12, GROUP, 1.0)
    elif name == "empg":
        entropies = [-(p.exp() * p).sum(1).mean().item() for p, _ in distributions(trainer, batch)]
        expected = definition.empg(rewards, plain, entropies, 1.0)
    elif name == "g2rl":
        head = tiny.model("qwen3", dtype=torch.float64).lm_head.weight.detach()
        directions = [(head[ids] - p.exp() @ head).mean(0).tolist() for p, ids in distributions(trainer, batch)]
        expected = definition.grpo(definition.g2rl(rewards, directions, GROUP, 1.5), GROUP)
    elif name == "cppo":
        expected = definition.cppo(plain, GROUP, 0.5)
    elif name == "gtpo":
        entropies = [-(p.exp() * p).sum(1).mean().item() for p, _ in distributions(trainer, batch)]
        assert min(entropies) < THRESHOLD < max(entropies), entropies
        expected = definition.gtpo(rewards, entropies, GROUP, 0.1, THRESHOLD)
    else:
        void = [not set(text) & set("ABCDEFGHIJKLM") for text in texts]
        assert any(void) and not all(void)
        expected = definition.simpletir(rewards, plain, void, GROUP, 1e-3)
    assert found == close(expected)
    if name != "simpletir":  # in which the void ones may be among equals
        assert found != close(plain)
    # What comes to the loss is what is not zero, and the table of completions has the same numbers
    seen = sum(trainer.microbatches, [])
    assert sorted(a for a in seen if a) == sorted(a for a in found if a)
    assert list(trainer._logs["advantages"]) == close(found)
    if "cppo" in name:
        assert len(seen) == 8, "what is pruned must not be computed"
        assert trainer.state.log_history[0]["isopo/skipped_fraction"] == pytest.approx(1 / 3)
    if name == "simpletir":
        assert trainer.state.log_history[0]["advantages/void_fraction"] == pytest.approx(sum(void) / 12)


@pytest.mark.filterwarnings("ignore:You are using 'rollout_func'")
@pytest.mark.parametrize("name", ["empg", "g2rl", "gtpo"])
def test_a_truncated_completion_that_is_masked_changes_no_other(name, tmp_path):
    eos = tiny.IDS["eos_token_id"]
    rollout = fixed_rollout(lambda row: [20 + row, 30 + 3 * row, 50 if row in (1, 3) else eos])
    settings = {"g2rl": {"g2rl_lambda": 1.5}, "gtpo": {"scale_rewards": "none", "gtpo_threshold": 100.0}}.get(name, {})
    trainer = training.build(
        tmp_path,
        kind=Watched,
        reward=(lambda completions, **_: [1.0, -1.0, 1.0] * 2) if name == "g2rl" else tiny.reward,
        options={"rollout_func": rollout},
        **{**BATCH, "max_steps": 1, "mask_truncated_completions": True, "advantage_transform": name, **settings},
    )
    trainer.train()
    (rewards,), (batch,) = trainer.rewards, trainer.generations
    masked = {row for row in range(6) if not batch["completion_mask"][row].any()}
    assert masked == {1, 3}
    measured = list(distributions(trainer, batch))
    entropies = [-(p.exp() * p).sum(1).mean().item() for p, _ in measured]
    plain = definition.grpo(rewards, GROUP)
    if name == "empg":
        expected = definition.empg(rewards, plain, entropies, 1.0, masked)
    elif name == "g2rl":
        head = tiny.model("qwen3", dtype=torch.float64).lm_head.weight.detach()
        directions = [(head[ids] - p.exp() @ head).mean(0).tolist() for p, ids in measured]
        expected = definition.grpo(definition.g2rl(rewards, directions, GROUP, 1.5, masked), GROUP)
    else:
        expected = definition.gtpo(rewards, entropies, GROUP, 0.1, 100.0, masked)
    assert advantages(trainer) == close(expected)


def equal(completions, **_):
    return [1.0] * len(completions)


def test_equal_rewards_are_learned_from_where_a_transform_tells_them_apart(tmp_path, caplog):
    settings = {"reward": equal, "max_steps": 12, "max_completion_length": 2}
    plain = trained(tmp_path, **settings)
    assert not plain.microbatches and "nothing is learned" in caplog.text
    caplog.clear()
    noisy = trained(tmp_path, advantage_transform="redit", **settings)
    assert len(noisy.microbatches) == 12 and all(noisy.generations[0]["advantages"])
    assert "nothing is learned" not in caplog.text


def test_an_evaluation_is_not_transformed_and_leaves_the_state_as_it_is(tmp_path):
    options = {"eval_dataset": tiny.prompts(6)}
    settings = {"advantage_transform": "dcpo", "per_device_eval_batch_size": 6, **BATCH}
    trainer = training.build(tmp_path, kind=Watched, options=options, **settings)
    trainer.evaluate()
    assert trainer.generations and not trainer.transforms.transforms[0]._visits
    assert advantages(trainer) == close(definition.grpo(trainer.rewards[0], GROUP))


COMBINED = [
    {"loss_type": "grpo", "epsilon": 0.2, "num_iterations": 2, "advantage_transform": "redit,empg"},
    {"loss_type": "vespo", "advantage_transform": "dcpo,empg", "gradient_accumulation_steps": 2},
    {"beta": 0.1, "kl_in_reward": True, "advantage_transform": "dcpo,cppo"},
    {"beta": 0.1, "advantage_transform": "redit", "rule": "none", "scale_rewards": "none"},
    {"rule": "interacting", "skip_zero_advantage": True, "advantage_transform": "cppo"},
    {
        "token_weights": "m2po",
        "num_iterations": 2,
        "advantage_transform": "dcpo,simpletir",
        "simpletir_answer": "[A-Q]",
    },
    {"multi_objective_aggregation": "normalize_then_sum", "advantage_transform": ["empg", "cppo"]},
]


@pytest.mark.parametrize("settings", COMBINED, ids=str)
def test_it_goes_together_with_the_settings_of_the_loss(settings, tmp_path):
    lora = {"peft_config": LoraConfig(r=2, target_modules="all-linear")} if "beta" in settings else {}
    trainer = training.build(tmp_path, kind=Watched, options=lora, **{**BATCH, "max_steps": 2, **settings})
    training.train(trainer)
    names = trainer.args.advantage_transform
    for batch in trainer.generations:
        found = batch["advantages"].view(-1, GROUP)
        assert found.isfinite().all() and found.any()
        if "cppo" in names:
            assert ((found != 0).sum(1) <= 2).all()


def test_a_transform_that_changes_nothing_leaves_the_run_as_it_is(tmp_path):
    with_none, with_one = [
        trained(tmp_path, advantage_transform=name, max_steps=2, cppo_pruning=0.0)
        if name
        else trained(tmp_path, max_steps=2)
        for name in (None, "cppo")
    ]
    for p, q in zip(with_none.model.parameters(), with_one.model.parameters(), strict=True):
        assert torch.equal(p, q)


class Kill(TrainerCallback):
    """Ends the run after a checkpoint."""

    def on_save(self, args, state, control, **kwargs):
        control.should_training_stop = state.global_step == 3
        return control


def test_a_run_with_a_state_per_prompt_and_noise_resumes_to_the_last_bit(tmp_path):
    # Two prompts to a generation, four in all, and inside of the second use of a generation
    settings = {"advantage_transform": "redit,dcpo", "num_iterations": 2, "data": tiny.prompts(4), "max_steps": 8}
    settings |= {"save_strategy": "steps", "save_steps": 3, "num_train_epochs": 20, **BATCH}
    whole = training.build(tmp_path / "whole", kind=Watched, **settings)
    whole.train()
    cut = training.build(tmp_path / "cut", kind=Watched, options={"callbacks": [Kill()]}, **settings)
    cut.train()
    assert cut.state.global_step == 3
    again = training.build(tmp_path / "cut", kind=Watched, **settings)
    again.train(resume_from_checkpoint=True)
    assert len(whole.generations) == 4 and len(again.generations) == 2
    for one, other in zip(again.generations, whole.generations[2:], strict=True):
        assert torch.equal(one["advantages"], other["advantages"])
    assert again.transforms.state_dict().keys() == {"redit", "dcpo"}
    for name, value in whole.transforms.state_dict()["dcpo"].items():
        assert torch.equal(value, again.transforms.state_dict()["dcpo"][name]), name
    assert whole.transforms.state_dict()["dcpo"]["visits"][:, 0].tolist() == [2.0] * 4
    for p, q in zip(whole.model.parameters(), again.model.parameters(), strict=True):
        assert torch.equal(p, q)
    # The second visit is not the first
    first, second = (definition.dcpo([whole.rewards[2][:GROUP]]), advantages(whole, 2)[:GROUP])
    assert first != pytest.approx(second, rel=1e-3)


def test_pacs_holds_the_policy_against_a_sampler_that_is_not_itself(tmp_path):
    settings = {"advantage_transform": "pacs", "reward": right, "temperature": 1.0, "top_k": 20}
    trainer = trained(tmp_path, **settings)
    (batch,) = trainer.generations
    ratios = []
    for (p, ids), drawn in zip(distributions(trainer, batch), batch["sampling_per_token_logps"], strict=True):
        ratios.append((p.gather(1, ids[:, None]).squeeze(1) - drawn[: len(ids)].double()).sum().item())
    assert max(map(abs, ratios)) > 0.1
    assert advantages(trainer) == pytest.approx(definition.pacs(trainer.rewards[0], ratios, GROUP, 1.0), rel=1e-3)


# Transforms of one's own


@pytest.fixture
def registry_as_it_was():
    before = dict(TRANSFORMS)
    yield
    TRANSFORMS.clear()
    TRANSFORMS.update(before)


def made(name, result, stage="advantages"):
    @register(name)
    class Own(Transform):
        def apply(self, generation):
            return result(generation)

    Own.stage = stage
    return Own


@pytest.mark.usefixtures("registry_as_it_was")
def test_a_transform_of_ones_own_is_called_with_all_there_is_and_its_errors_are_clear(tmp_path):
    counter = itertools.count(1)
    made("counted", lambda generation: torch.full_like(generation.advantages, next(counter)))
    trainer = trained(tmp_path, advantage_transform="counted", max_steps=2)
    assert [advantages(trainer, number) for number in (0, 1)] == [[1.0] * 6, [2.0] * 6]
    made("short", lambda generation: generation.advantages[1:])
    with pytest.raises(ValueError, match=r"'short'.*shape \[5\].*shape \[6\]"):
        trained(tmp_path, advantage_transform="short")
    made("broken", lambda generation: generation.advantages / 0)
    with pytest.raises(ValueError, match="'broken'.*not finite for 6 completions"):
        trained(tmp_path, advantage_transform="broken")
    made("wordy", lambda generation: "none")
    with pytest.raises(ValueError, match="'wordy'.*of type str"):
        trained(tmp_path, advantage_transform="wordy")
