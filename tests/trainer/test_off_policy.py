"""Runs on data that the policy did not draw: an older policy did, or a hotter one, or another model."""

import copy
import functools
import math

import pytest
import torch
from peft import LoraConfig
from transformers import TrainerCallback

from isopo_trl import ISOPOTrainer
from tests import tiny, training


# token weights, rule, weights, further settings
CASES = [
    ("p3o", "none", "full", {}),
    ("p3o", "fisher", "full", {"regularization": 1.0}),
    ("p3o", "fisher", "lora", {}),
    ("kpo", "none", "lora", {}),
    ("kpo", "fisher", "full", {"epsilon": 0.1, "epsilon_high": 0.2}),
    ("sampler", "fisher", "full", {}),
    ("sampler", "none", "lora", {"vllm_importance_sampling_mode": "token_truncate"}),
]
# After how many steps data is fresh again, and the settings
REUSE = {
    "iterations": (4, {"num_iterations": 4}),
    "generation": (2, {"steps_per_generation": 4, "gradient_accumulation_steps": 2}),
    "unaligned": (3, {"steps_per_generation": 3, "gradient_accumulation_steps": 2}),
}


def crossed(cases, others):
    """
    Every case with every one of the others, as parameters. Each case with one, and each of these with several cases,
    is run every time; what is left of the product is slow.
    """
    others = list(others)
    return [
        pytest.param(
            case,
            other,
            marks=[] if place == number % len(others) else pytest.mark.slow,
            id="-".join([*case[:3], str(other)]),
        )
        for number, case in enumerate(cases)
        for place, other in enumerate(others)
    ]


def build(folder, case, kind=ISOPOTrainer, options=None, **settings):
    tokens, rule, weights, own = case
    options = dict(options or {})
    if weights == "lora":
        options["peft_config"] = LoraConfig(r=2, lora_alpha=8, target_modules="all-linear")
    settings = {"token_weights": tokens, "rule": rule, **own, **settings}
    return training.build(folder, kind=kind, options=options, **settings)


def check(line, case, fresh):
    """One step's figures."""
    names = {"ess", "ratio_mean", "kl"} | ({"filtered_ratio_mean"} if case[0] == "kpo" else set())
    figures = {name: line[f"off_policy/{name}"] for name in names}
    assert {name for name in line if name.startswith("off_policy/")} == {f"off_policy/{name}" for name in names}
    assert all(map(math.isfinite, figures.values()))
    if fresh:
        assert figures == {name: 0.0 if name == "kl" else 1.0 for name in names}
    else:
        assert 0 < figures["ess"] < 1 and figures["kl"] > 0
        assert all(0.1 < figures[name] < 10 and figures[name] != 1 for name in names if name.endswith("ratio_mean"))


def by_hand(model, prompts, completions, sampler):
    """Effective sample size and mean ratio of completions of which the sampler's log-probabilities are known."""
    logps = [training.log_probabilities(model, *pair) for pair in zip(prompts, completions, strict=True)]
    r = (torch.cat(logps) - torch.tensor([x for row in sampler for x in row], dtype=torch.float64)).exp()
    return (r.sum() ** 2 / (len(r) * r.square().sum())).item(), r.mean().item()


# Reused data


class Counting(ISOPOTrainer):
    """Counts the model's forward passes, those without gradients apart, but for generation's."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.passes = {True: 0, False: 0}
        self.generating = False
        self.model.register_forward_pre_hook(self._count)

    def _count(self, module, args):
        if not self.generating:
            self.passes[torch.is_grad_enabled()] += 1

    def _generate_single_turn(self, *args, **kwargs):
        self.generating = True
        try:
            return super()._generate_single_turn(*args, **kwargs)
        finally:
            self.generating = False


@pytest.mark.parametrize(("case", "reuse"), crossed(CASES, REUSE))
def test_reused_data_is_off_policy_after_the_first_step(case, reuse, tmp_path):
    every, settings = REUSE[reuse]
    trainer = build(tmp_path, case, Counting, max_steps=every + 2, **settings)
    for step, line in enumerate(training.train(trainer)):
        check(line, case, fresh=step % every == 0)
    # The sampler's log-probabilities are kept, not computed again
    microbatches = (every + 2) * settings.get("gradient_accumulation_steps", 1)
    assert trainer.passes == {True: microbatches, False: 0}


def test_without_weights_there_is_no_further_pass_either(tmp_path):
    trainer = build(tmp_path, ("none", "fisher", "full", {}), Counting, max_steps=4, num_iterations=4)
    lines = training.train(trainer)
    assert trainer.passes == {True: 4, False: 0}
    assert not any(name.startswith("off_policy/") for line in lines for name in line)


@pytest.mark.parametrize("case", CASES[1:5:3], ids=lambda case: "-".join(case[:3]))
def test_a_run_resumes_in_the_middle_of_reused_data(case, tmp_path):
    settings = {"num_iterations": 4, "max_steps": 7, "save_strategy": "steps", "save_steps": 2, "save_total_limit": 9}
    whole = training.train(build(tmp_path, case, **settings))
    resumed = build(tmp_path, case, **settings)
    resumed.train(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))
    lines = [line for line in resumed.state.log_history if "loss" in line]
    assert resumed.state.global_step == 7 and lines[:2] == whole[:2]
    # The checkpoint has the completions: the run goes on with data that is as stale as it was
    for line, other in zip(lines[2:], whole[2:], strict=True):
        check(line, case, fresh=line["off_policy/ess"] == 1)
        for name in line:
            if name in ("loss", "grad_norm") or name.startswith(("off_policy/", "isopo/")):
                assert line[name] == other[name], name
    assert [line["off_policy/ess"] == 1 for line in lines] == [True, False, False, False, True, False, False]


# Other samplers


class Keeping(ISOPOTrainer):
    """Keeps the batches that it generates."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.batches = []

    def _generate_and_score_completions(self, inputs):
        self.batches.append(super()._generate_and_score_completions(inputs))
        return self.batches[-1]


@pytest.mark.parametrize("case", CASES, ids=lambda case: "-".join(case[:3]))
def test_sampling_at_another_temperature_is_off_policy_from_the_start(case, tmp_path):
    trainer = build(tmp_path, case, Keeping, generation_kwargs={"temperature": 1.2}, max_completion_length=8)
    lines = training.train(trainer)
    for line in lines:
        check(line, case, fresh=False)
    batch, model = trainer.batches[0], tiny.model("qwen3")
    masks = batch["prompt_mask"].bool(), batch["completion_mask"].bool()
    prompts = [ids[mask].tolist() for ids, mask in zip(batch["prompt_ids"], masks[0], strict=True)]
    completions = [ids[mask].tolist() for ids, mask in zip(batch["completion_ids"], masks[1], strict=True)]
    pairs = list(zip(prompts, completions, strict=True))
    hot = [training.log_probabilities(model, *pair, temperature=1.2) for pair in pairs]
    torch.testing.assert_close(batch["sampling_per_token_logps"][masks[1]].double(), torch.cat(hot), rtol=0, atol=1e-4)
    ess, mean = by_hand(model, prompts, completions, [row.tolist() for row in hot])
    assert lines[0]["off_policy/ess"] == pytest.approx(ess, rel=1e-4)
    assert lines[0]["off_policy/ratio_mean"] == pytest.approx(mean, rel=1e-4)


class OtherModel:
    """A rollout function: a perturbed copy of the model draws the completions, and says with what probability."""

    def __init__(self):
        self.model = tiny.model("qwen3")
        self.rollouts = []
        generator = torch.Generator().manual_seed(1)
        with torch.no_grad():
            for p in self.model.parameters():
                p.add_(0.01 * torch.randn(p.shape, generator=generator))

    def __call__(self, prompts, trainer):
        rollout = {"prompt_ids": [], "completion_ids": [], "logprobs": []}
        for prompt in prompts:
            ids = trainer.processing_class(prompt)["input_ids"]
            output = self.model.generate(
                torch.tensor([ids]),
                attention_mask=torch.ones(1, len(ids), dtype=torch.long),
                do_sample=True,
                top_k=0,
                max_new_tokens=6,
                output_scores=True,
                return_dict_in_generate=True,
            )
            completion = output.sequences[0, len(ids) :]
            logps = torch.cat(output.scores).log_softmax(-1).gather(1, completion.unsqueeze(1)).squeeze(1)
            rollout["prompt_ids"].append(ids)
            rollout["completion_ids"].append(completion.tolist())
            rollout["logprobs"].append(logps.tolist())
        self.rollouts.append(rollout)
        return rollout


@pytest.mark.filterwarnings("ignore:You are using 'rollout_func'")
@pytest.mark.parametrize(("case", "iterations"), crossed(CASES, [1, 2]))
def test_rollouts_of_another_model_are_off_policy_from_the_start(case, iterations, tmp_path):
    other = OtherModel()
    trainer = build(tmp_path, case, Counting, options={"rollout_func": other}, max_steps=3, num_iterations=iterations)
    lines = training.train(trainer)
    for line in lines:
        check(line, case, fresh=False)
    rollout = other.rollouts[0]
    ess, mean = by_hand(tiny.model("qwen3"), rollout["prompt_ids"], rollout["completion_ids"], rollout["logprobs"])
    assert lines[0]["off_policy/ess"] == pytest.approx(ess, rel=1e-4)
    assert lines[0]["off_policy/ratio_mean"] == pytest.approx(mean, rel=1e-4)
    assert trainer.passes == {True: 3, False: 0}


# Learning


def different_letters(completions, **_):
    """How many different small letters there are, over 8: more than a policy without entropy can have."""
    return [len({letter for letter in text if letter.islower()}) / 8 for text in completions]


class Distance(TrainerCallback):
    """After each step, KL(policy || the policy that drew the batch) at the tokens of the batch."""

    def __init__(self):
        self.kl = []

    def on_step_end(self, args, state, control, model, **_):
        if state.global_step % args.num_iterations == 1:
            self.before = self.last
        batch = self.trainer.batches[-1]
        ids = torch.cat([batch["prompt_ids"], batch["completion_ids"]], dim=1)
        mask = torch.cat([batch["prompt_mask"], batch["completion_mask"]], dim=1)
        behaviour = tiny.model("qwen3")
        behaviour.load_state_dict(self.before)
        C = batch["completion_ids"].shape[1]
        with torch.no_grad():
            now, then = (
                of(input_ids=ids, attention_mask=mask, use_cache=False).logits[:, -C - 1 : -1].double().log_softmax(-1)
                for of in (model, behaviour)
            )
        scored = batch["completion_mask"].bool()
        self.kl.append((now.exp() * (now - then)).sum(-1)[scored].mean().item())
        self.last = copy.deepcopy(model.state_dict())


@pytest.fixture(scope="module")
def learned(tmp_path_factory):
    """Rewards, distances and entropies of a run with given token weights that makes 16 big steps with each batch."""

    @functools.cache
    def run(tokens):
        distance = Distance()
        trainer = build(
            tmp_path_factory.mktemp(tokens),
            (tokens, "none", "full", {}),
            Keeping,
            options={"callbacks": [distance]},
            reward=different_letters,
            data=tiny.prompts(8),
            seed=1,
            max_steps=96,
            num_iterations=16,
            learning_rate=0.05,
            lr_scheduler_type="constant",
            per_device_train_batch_size=16,
            num_generations=8,
            max_completion_length=8,
            gradient_checkpointing=False,
        )
        distance.trainer, distance.last = trainer, copy.deepcopy(trainer.model.state_dict())
        trainer.train()
        lines = [line for line in trainer.state.log_history if "loss" in line]
        rewards = [line["reward"] for line in lines if "reward" in line]
        entropy = [line["entropy"] for line in lines if "entropy" in line]
        return {"rewards": rewards, "kl": distance.kl, "entropy": entropy}

    return run


@pytest.mark.slow
def test_stale_data_leads_plain_updates_astray(learned):
    run = learned("none")
    assert max(run["kl"]) > 10 and run["entropy"][-1] < 0.5, run
    assert sum(run["rewards"][-3:]) / 3 < run["rewards"][0] + 0.1, run


@pytest.mark.slow
@pytest.mark.parametrize("tokens", ["p3o", "kpo"])
def test_token_weights_keep_learning_from_stale_data(tokens, learned):
    run = learned(tokens)
    assert max(run["kl"]) < 4 and run["entropy"][-1] > 1, run
    assert sum(run["rewards"][-3:]) / 3 > run["rewards"][0] + 0.1, run
