"""`skip_zero_advantage`: sequences without an advantage cost no pass, and the others count as they did with them."""

import pytest
import torch
from datasets import IterableDataset
from peft import LoraConfig
from transformers import TrainerCallback
from trl import GRPOTrainer

from isopo_trl import ISOPOTrainer
from isopo_trl.loss import zero_advantages
from isopo_trl.rules import rule_names
from isopo_trl.step_size.measurement import drawn
from isopo_trl.token_weights import ratio_loss
from isopo_trl.trl_seam.generation import Progress
from tests import oracle, tiny, training
from tests.gradients.test_oracle import build, check
from tests.trainer.test_vision import image_batch, vision_model


def generation(advantages, seed=0, **extra):
    """What TRL would have generated: ragged sequences with these advantages."""
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.randint(1, 7, (2, len(advantages)), generator=generator).tolist()
    batch = oracle.random_batch(*lengths, 100, seed, torch.tensor(advantages, dtype=torch.float64))
    return {**batch.for_trl(), **{name: make(batch) for name, make in extra.items()}}


class ByHand(ISOPOTrainer):
    """Its generations are those of a list. Notes the microbatches of the loss, and gradients; counts the passes."""

    def __init__(self, *args, **kwargs):
        self.microbatches, self.gradients, self.passes = [], [], 0
        super().__init__(*args, **kwargs)
        self.model.register_forward_pre_hook(self._count)

    def _count(self, *_):
        self.passes += 1

    def _generate_and_score_completions(self, inputs):
        return dict(self.generations.pop(0))

    def _compute_loss(self, model, inputs):
        self.microbatches.append(dict(inputs))
        return super()._compute_loss(model, inputs)

    def _get_grad_norm(self, model, grad_norm=None):
        self.gradients.append({p: p.grad.clone() for p in model.parameters() if p.requires_grad})
        return super()._get_grad_norm(model, grad_norm)


def trained(folder, generations, model=None, kind=ByHand, data=None, options=None, **settings):
    settings = {"rule": "none", "per_device_train_batch_size": 3, "max_grad_norm": 1e30, **settings}
    # Momentum and decay move weights in a step without a gradient; an eps that rounding does not get past
    settings = {"max_steps": 3, "weight_decay": 0.1, "adam_epsilon": 1e-3, "skip_zero_advantage": False, **settings}
    model = tiny.model("qwen3", dtype=torch.float64) if model is None else model
    data = tiny.prompts(24) if data is None else data
    trainer = training.build(folder, model, kind, data=data, options=options, **settings)
    trainer.generations = list(generations)
    trainer.train()
    return trainer


def whole_and_skipped(*args, **kwargs):
    """The same run with all sequences, and without those that have no advantage."""
    return [trained(*args, skip_zero_advantage=skip, **kwargs) for skip in (False, True)]


def logged(trainer, name):
    return [line[name] for line in trainer.state.log_history if name in line]


def have_equal_weights(one, other):
    """Bit for bit."""
    pairs = zip(one.model.parameters(), other.model.parameters(), strict=True)
    return all(torch.equal(p, q) for p, q in pairs)


def assert_same_weights(one, other, tolerance=1e-9):
    for (name, p), q in zip(one.model.named_parameters(), other.model.parameters(), strict=True):
        error = ((p - q).norm() / q.norm()).item()
        assert error < tolerance, f"{name}: {error}"


# Rule none: the same step


SOME, NONE, FEW = [0.5, 0, 0, -1.0, 0, 2.0], [0.0] * 6, [0, 0, 0, 0, 1.5, 0]
ACCUMULATED = {"gradient_accumulation_steps": 2, "steps_per_generation": 2}


@pytest.mark.usefixtures("float64_throughout")
@pytest.mark.parametrize("loss_type", ratio_loss.LOSS_TYPES)
def test_without_a_rule_the_weights_are_those_of_the_whole_batch(loss_type, tmp_path):
    steps = 4 if loss_type == "dapo" else 1  # what follows on the first is the same for all
    settings = {**ACCUMULATED, "loss_type": loss_type, "max_steps": steps}
    if loss_type == "cispo":
        settings["epsilon_high"] = 5.0
    generations = [generation(a, seed) for seed, a in enumerate((SOME, NONE, FEW, [0.25, -1, 1, 2, 3, -2])[:steps])]
    whole, skipped = whole_and_skipped(tmp_path, generations, **settings)
    assert_same_weights(skipped, whole)
    assert logged(skipped, "loss") == pytest.approx(logged(whole, "loss"), rel=1e-6)  # which is summed in float32
    assert logged(skipped, "grad_norm") == pytest.approx(logged(whole, "grad_norm"), rel=1e-9)
    # Two microbatches per step: three sequences fit into one, none into none
    assert (whole.passes, skipped.passes) == (2 * steps, steps)
    assert logged(skipped, "isopo/skipped_fraction") == pytest.approx([0.5, 1, 5 / 6, 0][:steps])
    assert [len(batch["advantages"]) for batch in skipped.microbatches] == [3, 1, 3, 3][:steps]
    for name in ("isopo/multiplier_mean", "isopo/effective_sequences"):
        assert logged(skipped, name) == pytest.approx(logged(whole, name))


def random_logps(batch):
    """What the sampler says it drew tokens with: not what the policy does."""
    generator = torch.Generator().manual_seed(7)
    return -5 + torch.rand(batch.completion_mask.shape, generator=generator, dtype=torch.float64)


@pytest.mark.usefixtures("float64_throughout")
@pytest.mark.parametrize(
    "settings",
    [
        {"token_weights": "kpo", "epsilon": 0.2, "epsilon_high": 0.2, "loss_type": "bnpo"},
        {"epsilon": 0.2, "importance_sampling_level": "sequence", "loss_type": "grpo"},
        {"off_policy_mask_threshold": 0.1},
        {"token_weights": "m2po"},
        {"token_weights": "bapo", "bapo_target": 0.5},
        {"token_weights": "p3o", "rule": "fisher"},
    ],
    ids=str,
)
def test_off_policy_data_have_the_weights_of_the_whole_batch(settings, tmp_path):
    """Two steps per generation, which serves twice. P3O pulls at every sequence, and takes all of them."""
    settings = {**settings, "steps_per_generation": 2, "num_iterations": 2, "max_steps": 4}
    batch = generation(SOME, sampling_per_token_logps=random_logps)
    whole, skipped = whole_and_skipped(tmp_path, [batch], **settings)
    assert_same_weights(skipped, whole)
    if settings.get("token_weights") == "p3o":
        assert logged(skipped, "isopo/skipped_fraction") == [0] * 4
        assert logged(skipped, "off_policy/ess") == logged(whole, "off_policy/ess")
    else:
        assert logged(skipped, "isopo/skipped_fraction") != [0] * 4 and skipped.passes <= whole.passes


@pytest.mark.usefixtures("float64_throughout")
def test_p3o_leaves_sequences_out_as_long_as_the_policy_itself_drew_them(tmp_path):
    own = {"generated_after": lambda _: torch.tensor(0), "drawn_by_policy": lambda _: torch.tensor(True)}
    batch = generation(SOME, sampling_per_token_logps=random_logps, **own)
    settings = {"token_weights": "p3o", "num_iterations": 2, "steps_per_generation": 2, "max_steps": 2}
    settings["gradient_accumulation_steps"] = 2
    whole, skipped = whole_and_skipped(tmp_path, [batch], **settings)
    assert_same_weights(skipped, whole)
    assert logged(skipped, "isopo/skipped_fraction") == [0.5, 0]
    assert (whole.passes, skipped.passes) == (4, 3)


@pytest.mark.usefixtures("float64_throughout")
def test_a_step_of_two_generations_ends_with_a_pass_if_there_was_one(tmp_path):
    """Ranks exchange gradients in the last one."""
    settings = {"gradient_accumulation_steps": 2, "steps_per_generation": 1, "max_steps": 2, "loss_type": "grpo"}
    generations = [generation(a[:3], seed) for seed, a in enumerate((SOME, NONE, NONE, FEW[3:]))]
    whole, skipped = whole_and_skipped(tmp_path, generations, **settings)
    assert_same_weights(skipped, whole)
    assert [len(batch["advantages"]) for batch in skipped.microbatches] == [1, 1, 1]
    assert skipped.microbatches[1]["loss_weights"] == 0 and skipped.microbatches[1]["advantages"] == 0


@pytest.mark.usefixtures("float64_throughout")
def test_what_a_stream_leaves_of_an_accumulation_goes_into_the_next_step(tmp_path):
    """Three microbatches per epoch, two per step: Trainer keeps the gradient of the third."""
    settings = {"gradient_accumulation_steps": 2, "steps_per_generation": 1, "max_steps": 3, "loss_type": "grpo"}
    data = IterableDataset.from_generator(lambda: iter(tiny.prompts(3).to_list()))
    few, none = FEW[3:], NONE[3:]
    for advantages in ([few, none] * 4, [none, none, few, none, none, none, none, few]):
        generations = [generation(a, seed) for seed, a in enumerate(advantages)]
        whole, skipped = whole_and_skipped(tmp_path, generations, data=data, **settings)
        assert_same_weights(skipped, whole)
        assert not skipped.generations and skipped.passes < whole.passes == 8
        assert logged(skipped, "grad_norm") == pytest.approx(logged(whole, "grad_norm"), rel=1e-9)


class StopsEpoch(TrainerCallback):
    """After two microbatches of every run."""

    def on_train_begin(self, args, state, control, **kwargs):
        self.after = 2

    def on_substep_end(self, args, state, control, **kwargs):
        self.after -= 1
        control.should_epoch_stop = self.after == 0


@pytest.mark.usefixtures("float64_throughout")
def test_an_epoch_that_a_callback_ends_inside_a_step_loses_nothing(tmp_path):
    settings = {"gradient_accumulation_steps": 4, "steps_per_generation": 4, "loss_type": "bnpo"}
    settings |= {"max_steps": -1, "num_train_epochs": 3, "data": tiny.prompts(4)}
    generations = [generation(a + b, seed) for seed, (a, b) in enumerate(((SOME, NONE), (FEW, SOME), (NONE, FEW)))]
    whole, skipped = whole_and_skipped(tmp_path, generations, options={"callbacks": [StopsEpoch()]}, **settings)
    assert_same_weights(skipped, whole)
    assert skipped.passes < whole.passes == 10


def test_a_run_without_any_signal_makes_no_pass_and_decays_as_it_would(tmp_path):
    whole, skipped = whole_and_skipped(tmp_path, [generation(NONE)] * 2, **ACCUMULATED, rule="fisher", max_steps=2)
    assert skipped.passes == 0 and skipped.isopo.state_dict()["running"] is None
    assert have_equal_weights(skipped, whole)
    assert logged(skipped, "grad_norm") == logged(whole, "grad_norm") == [0, 0]
    assert logged(skipped, "isopo/multiplier_mean") == [0, 0] and logged(skipped, "isopo/fisher_norm") == []


# Other rules: statistics over the sequences that carry an advantage


@pytest.mark.usefixtures("float64_throughout")
@pytest.mark.parametrize(
    "lora,rule,reentrant",
    [(False, "fisher", None), (True, "fig4", True), (True, "interacting", False)],
    ids=str,
)
def test_the_gradient_is_the_definition_over_the_remaining_sequences(lora, rule, reentrant, tmp_path):
    settings = {"gradient_checkpointing": reentrant is not None, "rule": rule, "fisher_samples": 10_000}
    if reentrant is not None:
        settings["gradient_checkpointing_kwargs"] = {"use_reentrant": reentrant}
    settings |= {"loss_type": "bnpo", "per_device_train_batch_size": 3, "learning_rate": 0.0, "weight_decay": 0.0}
    settings |= {"gradient_accumulation_steps": 4, "max_steps": 1, "skip_zero_advantage": True}
    advantages = [0.5, 0, 0, -1, 0, 2, 0, 0.7, 0, 0, 0, -0.3]
    trainer = trained(tmp_path, [generation(advantages)], build("qwen3", lora), **settings)
    # By TRL's microbatches, as it has shuffled them: by what a token is divided there
    divided = {}
    for inputs in trainer._buffered_inputs:
        whole = as_batch(inputs)
        rows = oracle.token_weights(whole, "bnpo", accumulation=4)
        divided |= {a: row for a, row in zip(whole.advantages.tolist(), rows, strict=True) if a}
    assert [len(inputs["advantages"]) for inputs in trainer.microbatches] == [2, 3]
    expected = dict.fromkeys(trainer.gradients[0], 0)
    for inputs in trainer.microbatches:
        part = as_batch(inputs)
        per_token = torch.stack([divided.pop(a) for a in part.advantages.tolist()])
        G = oracle.position_gradients(build("qwen3", lora), part, per_token)
        for p, gradient in oracle.expected_gradients(trainer.model, G, part, None, rule).items():
            expected[p] = expected[p] + gradient
    assert not divided, "a sequence with an advantage is missing"
    for p, gradient in trainer.gradients[0].items():
        p.grad = gradient
    check(trainer.model, expected)


def as_batch(inputs):
    names = ("prompt_ids", "prompt_mask", "completion_ids", "completion_mask", "advantages")
    return oracle.Batch(*(inputs[name] for name in names))


@pytest.mark.usefixtures("float64_throughout")
def test_running_means_are_those_of_a_run_in_which_the_others_never_were(tmp_path):
    whole = [generation(a, seed) for seed, a in enumerate((SOME, [1, 0, 0, 2, -1, 0.1], FEW))]
    rest = []
    for batch in whole:
        keep = batch["advantages"] != 0
        rest.append({name: x[keep] if x.dim() else x for name, x in batch.items()})
    settings = {"rule": "fig4", "fisher_samples": 10_000, "per_device_train_batch_size": 6}
    skipped = trained(tmp_path, whole, skip_zero_advantage=True, **settings)
    expected = trained(tmp_path, rest, **settings)
    assert_same_weights(skipped, expected)
    one, other = (trainer.isopo.state_dict()["running"] for trainer in (skipped, expected))
    torch.testing.assert_close(one["mean"], other["mean"], rtol=1e-9, atol=0)
    for name in ("isopo/multiplier_max", "isopo/fisher_norm", "isopo/effective_sequences"):
        assert logged(skipped, name) == pytest.approx(logged(expected, name), rel=1e-9)


def in_float32(advantages, seed=0, **extra):
    batch = generation(advantages, seed, **extra)
    return {**batch, "advantages": batch["advantages"].float()}


@pytest.mark.parametrize("rule", ["fisher", "interacting", "none"])
def test_a_sequence_that_fills_in_has_no_gradient_and_counts_nowhere(rule, tmp_path):
    trainer = training.prepared(training.build(tmp_path, rule=rule, loss_type="grpo"))
    loss, gradients = training.gradients(trainer, {**in_float32([0.0]), "loss_weights": torch.zeros(1)})
    assert loss == 0 and not any(gradient.any() for gradient in gradients.values())
    figures = trainer.isopo.step()
    assert not any(figures.values()), figures
    running = trainer.isopo.state_dict()["running"]
    assert not running["mean"].any() and (rule == "none" or not any(running["known"]))


def sampled_logps(batch):
    noise = torch.randn(batch.completion_mask.shape, generator=torch.Generator().manual_seed(7))
    return -4.6 + noise * torch.tensor([[0.1], [0.1], [2.0]])


@pytest.mark.parametrize(
    "settings",
    [
        *({"rule": rule} for rule in ("fig4", "euclidean")),
        *({"rule": "none", "token_weights": weights} for weights in ("p3o", "sampler", "kpo")),
    ],
    ids=str,
)
def test_a_sequence_that_fills_in_beside_others_counts_nowhere(settings, tmp_path):
    """Neither in their gradients and statistics, nor in the weights of their tokens, nor as drift."""
    settings = {"target_kl": 1e-3, "num_iterations": 2, "loss_type": "grpo", "fisher_samples": 10_000, **settings}
    found = []
    for fills_in in (False, True):
        trainer = training.prepared(training.build(tmp_path, tiny.model("qwen3"), **settings))
        batch = in_float32([0.5, -1.0, 0.0], sampling_per_token_logps=sampled_logps)
        loss_weights = torch.tensor([1.5, 1.5, 0.0])
        if not fills_in:
            batch = {name: x[:2] if x.dim() else x for name, x in batch.items()}
            loss_weights = torch.ones(2)
        loss, gradients = training.gradients(trainer, {**batch, "loss_weights": loss_weights})
        drift = trainer.step_control.behaviour._sums
        of_tokens = {name: value.item() for name, value in trainer.weighting.step().items()}
        figures = {"loss": loss, "tokens": drift[1].item(), "drift": drift[0].item(), **of_tokens}
        figures |= trainer.isopo.step()
        if settings.get("token_weights") == "p3o":  # whose pull acts on all there are
            del figures["effective_sequences"]
        found.append((figures, gradients, trainer.isopo.state_dict()["running"]["mean"]))
    (figures, gradients, mean), (same, others, filled) = found
    assert figures["tokens"] == batch["completion_mask"][:2].sum() and ("ess" in figures) == (len(settings) > 5)
    assert same == pytest.approx(figures, rel=1e-4, nan_ok=True) and training.distance(others, gradients) < 1e-5
    torch.testing.assert_close(filled, mean, rtol=1e-4, atol=1e-6)


def test_a_sequence_that_fills_in_is_not_among_the_kept_rows(tmp_path):
    held = []
    for fills_in in (False, True):
        settings = {"rule": "fisher", "loss_type": "grpo", "fisher_scope": "step", "fisher_samples": 4}
        trainer = training.prepared(training.build(tmp_path, **settings))
        for advantage, seed in ((1.0, 0), (0.0, 1)):
            if advantage or fills_in:
                batch = in_float32([advantage], seed)
                training.gradients(trainer, {**batch, "loss_weights": torch.tensor([advantage])})
        trainer.isopo.step()
        held.append(trainer.isopo.state_dict()["rows"]["rows"])
    for layer, rows in held[0].items():
        for name, x in rows.items():
            assert torch.equal(held[1][layer][name], x), f"layer {layer}, {name}"


# What is left out, and how the rest is packed


def test_equal_rewards_are_told_from_their_rounded_mean():
    rewards = torch.tensor([[0.7, 1], [0.7, 1], [0.7, 1], [0.7, 2], [0.7, torch.nan], [0.7, torch.nan]])
    missing = torch.full((3, 2), torch.nan)
    weights = torch.tensor([1.0, 0.5])
    assert zero_advantages.equal_rewards(rewards, weights, 2).tolist() == [True, True, False, False, True, True]
    assert zero_advantages.equal_rewards(rewards, weights, 3).tolist() == [True] * 3 + [False] * 3
    one_of_two = torch.cat([rewards[:1], missing])
    assert zero_advantages.equal_rewards(one_of_two, weights, 2).tolist() == [True] * 4
    assert zero_advantages.equal_rewards(rewards, torch.tensor([1.0, 0.0]), 3).all()


def test_groups_of_equal_rewards_are_left_out_although_their_mean_is_rounded(tmp_path):
    def reward(completions, **_):
        return [0.7] * 7 + [0.3] * 7 + [0.1] * 7 + tiny.reward(completions[21:])

    assert torch.full((1, 7), 0.7).nanmean() != torch.tensor(0.7)
    settings = {"num_generations": 7, "per_device_train_batch_size": 7, "gradient_accumulation_steps": 4}
    settings |= {"max_steps": 1, "max_completion_length": 2, "skip_zero_advantage": True}
    trainer = training.build(tmp_path, reward=reward, **settings)
    trainer.train()
    assert logged(trainer, "isopo/skipped_fraction") == [0.75]


def test_sequences_stay_together_by_group_and_parts_are_even():
    advantages = torch.tensor([0.0, 1, 0, 0, torch.nan, 0, 0, 0])
    assert zero_advantages.remaining_units(advantages) == [[1], [4]]
    assert zero_advantages.remaining_units(advantages, 2) == [[0, 1], [4, 5]]
    assert zero_advantages.remaining_units(torch.zeros(4), 2) == []
    assert zero_advantages.in_equal_parts([[0], [2], [5], [6], [7]], 2) == [[0, 2], [5, 6, 7]]
    assert zero_advantages.in_equal_parts([[0, 1], [4, 5]], 3) == [[], [0, 1], [4, 5]]


def test_groups_stay_whole_with_group_microbatches(tmp_path):
    settings = {"rule": "interacting", "group_microbatches": True, "num_generations": 2, "max_steps": 1}
    settings |= {"per_device_train_batch_size": 4, "gradient_accumulation_steps": 3, "skip_zero_advantage": True}
    batch = in_float32([1.0, 0, 0, 0, 2, 3, 0, 0, 0, 0, 0, 4])
    trainer = trained(tmp_path, [batch], tiny.model("qwen3"), **settings)
    seen = [microbatch["advantages"].tolist() for microbatch in trainer.microbatches]
    groups = [sorted(part[i : i + 2]) for part in seen for i in range(0, len(part), 2)]
    assert sorted(map(len, seen)) == [2, 4] and sorted(groups) == [[0, 1], [0, 4], [2, 3]]


def among_images(rows, texts):
    """The batch of images, with some sequences that have none."""
    batch, others = image_batch(rows), [row for row in range(rows) if row not in texts]
    pixels = batch["pixel_values"].view(rows, 16, -1)[others].flatten(0, 1)
    batch |= {"pixel_values": pixels, "image_grid_thw": batch["image_grid_thw"][others]}
    batch["num_images"] = [int(row in others) for row in range(rows)]
    batch["prompt_ids"][texts, :6] = torch.arange(10, 16)
    batch["mm_token_type_ids"][texts] = 0
    return batch


@pytest.mark.usefixtures("float64_throughout")
@pytest.mark.parametrize("loss_type", ["bnpo", "dapo"])
def test_texts_among_images_have_the_step_of_the_whole_batch(loss_type, tmp_path):
    """Of the second step only texts are left; the vision tower goes on by its momentum."""
    generations = []
    for kept in ([0, 5, 9, 14], [1, 6]):
        batch, advantages = among_images(16, [1, 6, 9]), torch.zeros(16, dtype=torch.float64)
        advantages[kept] = torch.linspace(-1, 2, len(kept), dtype=torch.float64)
        generations.append({**batch, "advantages": advantages, "pixel_values": batch["pixel_values"].double()})
    settings = {**ACCUMULATED, "per_device_train_batch_size": 8, "num_generations": 2, "max_steps": 2}
    settings |= {"loss_type": loss_type, "gradient_checkpointing": False}
    whole, skipped = (
        trained(tmp_path, generations, vision_model(frozen=False).double(), skip_zero_advantage=skip, **settings)
        for skip in (False, True)
    )
    assert skipped.passes < whole.passes
    assert_same_weights(skipped, whole)
    assert [batch["num_images"][-1] for batch in skipped.microbatches] == [1, 1]
    assert skipped.microbatches[-1]["loss_weights"].count_nonzero() == 2


def test_a_step_that_is_measured_by_texts_among_images_alone_is_measured(tmp_path):
    """All of its microbatches have images, and none of the sequences that are drawn."""
    settings = {"log_step_kl": True, "step_kl_share": 0.1, "learning_rate": 1e-2, "max_steps": 1}
    settings |= {"per_device_train_batch_size": 2, "num_generations": 2, "gradient_accumulation_steps": 3}
    batch = among_images(6, drawn(6, 0.1, 0, seed=2))
    trainer = trained(tmp_path, [batch], vision_model(), seed=2, shuffle_dataset=False, **settings)
    (kl,) = logged(trainer, "step/kl")
    assert kl > 0 and not trainer.step_control.kl._as_trained


# By itself, and refused


@pytest.mark.parametrize("rule", rule_names())
def test_sequences_are_left_out_by_default_where_a_rule_takes_them_one_by_one(rule, tmp_path):
    together = rule in ("interacting", "spring", "proma")
    for asked, skips in ((None, not together), (True, True), (False, False)):
        if rule == "spring" and asked:
            continue  # refused
        assert (training.build(tmp_path, rule=rule, skip_zero_advantage=asked).skipping is not None) == skips


class Generates(ISOPOTrainer):
    """Its generations are those of a list, and nothing else is its own."""

    def _generate_and_score_completions(self, inputs):
        return dict(self.generations.pop(0))


class OtherGeneration(GRPOTrainer):
    """TRL's trainer with advantages that no reward function had a part in."""

    def _generate_and_score_completions(self, inputs):
        return dict(self.generations.pop(0))


class WithOtherGeneration(ISOPOTrainer, OtherGeneration):
    pass


@pytest.mark.parametrize("kind", [Generates, WithOtherGeneration])
def test_by_default_a_step_is_that_of_the_sequences_with_an_advantage(kind, tmp_path):
    settings = {"max_steps": 1, "rule": "fisher"}
    whole, skipped = whole_and_skipped(tmp_path, [generation(SOME)], **settings)
    by_default = trained(tmp_path, [generation(SOME)], kind=kind, skip_zero_advantage=None, **settings)
    assert have_equal_weights(by_default, skipped) and not have_equal_weights(by_default, whole)
    assert logged(by_default, "isopo/skipped_fraction") == [0.5]


@pytest.mark.parametrize("method", ["_prepare_inputs", "compute_loss", "_compute_loss"])
@pytest.mark.parametrize("of_trl", [False, True])
def test_by_default_a_subclass_that_may_need_them_has_all_sequences(method, of_trl, tmp_path):
    """Advantages of its own, or a term that has none: also where TRL's trainer was changed."""
    changed = type("Changed", (GRPOTrainer if of_trl else ISOPOTrainer,), {method: getattr(GRPOTrainer, method)})
    kind = type("Both", (ISOPOTrainer, changed), {}) if of_trl else changed
    assert training.build(tmp_path, kind=kind).skipping is None
    assert training.build(tmp_path, kind=kind, skip_zero_advantage=True).skipping is not None


ADAPTER = {"peft_config": LoraConfig(r=2)}  # without which the reference model is another one


@pytest.mark.parametrize(
    "model,settings",
    [
        ("qwen3", {"beta": 0.1}),
        ("qwen3", {"entropy_coef": 0.1}),
        ("qwen3", {"use_adaptive_entropy": True}),
        ("qwen3_moe", {"router_aux_loss_coef": 0.1}),
        ("qwen3", {"top_entropy_quantile": 0.5}),
    ],
    ids=str,
)
def test_what_every_sequence_takes_part_in_is_refused(model, settings, tmp_path):
    (name,) = settings
    with pytest.raises(ValueError, match=f"skip_zero_advantage=True.*{name}="):
        training.build(tmp_path, model, options=ADAPTER, **settings, skip_zero_advantage=True)
    assert training.build(tmp_path, model, options=ADAPTER, **settings).skipping is None
    if name == "beta":  # which in the reward is no term
        assert training.build(tmp_path, options=ADAPTER, **settings, kl_in_reward=True).skipping is not None


# Beside what else is new in a step


@pytest.mark.usefixtures("float64_throughout")
def test_a_step_is_measured_by_the_same_sequences_with_and_without(tmp_path):
    """Also by those that are left out, and where no pass is made."""
    settings = {**ACCUMULATED, "max_steps": 3, "log_step_kl": True, "step_kl_share": 0.5}
    generations = [generation(a, seed) for seed, a in enumerate((SOME, NONE, FEW))]
    whole, skipped = whole_and_skipped(tmp_path, generations, **settings)
    for name in ("step/kl", "step/kl_stderr"):
        assert all(kl > 0 for kl in logged(whole, name))
        assert logged(skipped, name) == pytest.approx(logged(whole, name), rel=1e-6)


def test_with_a_target_kept_rows_and_groups_a_resumed_run_is_the_unbroken_one(tmp_path):
    settings = {
        **{"max_steps": 4, "save_strategy": "steps", "save_steps": 1, "rule": "fisher", "learning_rate": 1e-2},
        **{"skip_zero_advantage": True, "fisher_scope": "step", "group_microbatches": True},
        **{"target_kl": 1e-3, "step_kl_share": 0.5, "num_iterations": 2, "gradient_accumulation_steps": 2},
        **{"num_generations": 3, "per_device_train_batch_size": 3, "steps_per_generation": 2},
        "per_device_eval_batch_size": 3,
    }
    # Of the two groups of a generation the first is left out
    reward = lambda completions, **_: [0.0] * 3 + [float(len(text)) for text in completions[3:]]  # noqa: E731
    whole = training.build(tmp_path, reward=reward, data=tiny.prompts(12), **settings)
    whole.train()
    fractions = logged(whole, "isopo/skipped_fraction")
    assert len(fractions) == 4 and 0.5 in fractions
    assert all(0 < kl < 2e-3 for kl in logged(whole, "step/kl") if kl)
    for step in (1, 3):
        run = training.build(tmp_path, reward=reward, data=tiny.prompts(12), **settings)
        run.train(resume_from_checkpoint=tmp_path / f"checkpoint-{step}")
        assert have_equal_weights(run, whole), f"resumed at step {step}"
    run.evaluate(tiny.prompts(3))  # where nothing is left out
    assert "eval_loss" in run.state.log_history[-1]


def test_a_step_without_a_pass_does_not_begin_a_generation_anew(tmp_path):
    """One at the end of a generation counts with the others, and one at its start still begins it."""
    settings = {"behaviour_kl": 1e9, "learning_rate": 1e-2, "num_iterations": 1, "steps_per_generation": 2}
    dated = [{"generated_after": torch.tensor(steps), "drawn_by_policy": torch.tensor(True)} for steps in (0, 2)]
    generations = [{**generation(a, seed), **dated[seed]} for seed, a in enumerate((FEW, NONE))]
    paths = []

    class Noting(ByHand):
        def log(self, *args, **kwargs):
            paths.append(self.step_control.behaviour.path)
            super().log(*args, **kwargs)

    trainer = trained(tmp_path, generations, kind=Noting, skip_zero_advantage=True, max_steps=4, **settings)
    made = [kl**0.5 for kl in logged(trainer, "step/kl")]
    assert made[2] and made[3] and len(trainer.microbatches) == 1
    assert paths[:4] == pytest.approx([made[0], made[0] + made[1], made[2], made[2] + made[3]])


class BreaksOff(ByHand):
    """Fails in the second microbatch of the first of two generations."""

    def _compute_loss(self, model, inputs):
        if len(self.generations) == 1 and self.microbatches:
            self.microbatches.clear()
            raise KeyboardInterrupt
        return super()._compute_loss(model, inputs)


def test_a_step_that_was_broken_off_leaves_nothing_to_the_next(tmp_path):
    settings = {**ACCUMULATED, "max_steps": 1, "rule": "fig4", "fisher_scope": "step", "fisher_samples": 8}
    settings |= {"per_device_train_batch_size": 3, "max_grad_norm": 1e30, "skip_zero_advantage": False}
    settings |= {"token_weights": "sampler", "vllm_importance_sampling_mode": "token_truncate"}
    figures, held = [], []
    for kind, seeds in ((ByHand, (0,)), (BreaksOff, (1, 0))):
        model = tiny.model("qwen3", dtype=torch.float64)
        trainer = training.build(tmp_path, model, kind, data=tiny.prompts(24), **settings)
        logps = {"sampling_per_token_logps": random_logps}
        trainer.generations = [generation(SOME[::2] * 2, seed, **logps) for seed in seeds]
        if kind is BreaksOff:
            with pytest.raises(KeyboardInterrupt):
                GRPOTrainer.train(trainer)
            Progress(trainer).set(0, None)
        GRPOTrainer.train(trainer)  # without what ours does at its ends, as where auto_find_batch_size begins anew
        figures.append([*logged(trainer, "isopo/euclidean_norm"), *logged(trainer, "off_policy/ess")])
        rows = trainer.isopo.state_dict()["rows"]["rows"]
        held.append({layer: rows["a"].double().sum(0) for layer, rows in rows.items() if "a" in rows})
    assert figures[1] == pytest.approx(figures[0], rel=1e-6) and len(figures[0]) == 2
    torch.testing.assert_close(held[1], held[0])
