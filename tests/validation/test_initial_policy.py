"""The KL divergence is that from the policy before training, which is kept aside and brought back unharmed."""

import copy
import math

import pytest
import torch
from datasets import Dataset
from peft import get_peft_model

from isopo_trl.validation.initial_policy import InitialPolicy, kl_estimates
from tests import tiny, training
from tests.validation.validating import (
    FIGURES,
    Keeping,
    adapter,
    assert_equal,
    logged,
    model,
    shaken,
    sharper,
    validating,
    weights,
)


# The copy


@pytest.mark.parametrize("case", ["full", "lora"])
def test_the_initial_policy_takes_the_place_of_the_present_one_and_leaves_it(case, tmp_path):
    given, options, _ = policies(case)
    trainer = training.build(tmp_path, given, options=options)
    then = weights(trainer)
    initial = InitialPolicy(trainer)
    shaken(trainer.model)
    now = weights(trainer)
    trained = {name for name, p in trainer.model.named_parameters() if p.requires_grad}
    assert set(initial.copies) == trained and not any(torch.equal(then[name], now[name]) for name in trained)
    for _ in range(2):  # what was exchanged once can be exchanged again
        with initial.in_place_of(trainer):
            assert_equal(weights(trainer), then)
        assert_equal(weights(trainer), now)
    with pytest.raises(RuntimeError, match="in between"), initial.in_place_of(trainer):
        raise RuntimeError("in between")
    assert_equal(weights(trainer), now)


# The estimate


def test_estimates_add_up_over_the_tokens_that_there_are():
    logps = torch.tensor([[-1.0, -2.0, -3.0], [-0.5, 7.0, 7.0]])
    initial = torch.tensor([[-1.5, -2.0, -2.0], [-2.5, 0, 0]])
    mask = torch.tensor([[1, 1, 1], [1, 0, 0]])
    k3 = [math.exp(d) - 1 - d for d in (-0.5, 0.0, 1.0, -2.0)]
    assert kl_estimates(logps, initial, mask).tolist() == pytest.approx([sum(k3[:3]), k3[3]], rel=1e-12)


def policies(case):
    """What to give to the trainer, its options, and an independent model to be the initial policy."""
    torch.manual_seed(0)  # of the adapter's first values
    base, config = model(ending=5), adapter(dropout=0.1)
    if case == "full":
        return base, {}, copy.deepcopy(base)
    if case == "lora":
        return base, {"peft_config": config}, get_peft_model(copy.deepcopy(base), config).eval()
    trained = shaken(get_peft_model(base, config))
    return trained, {}, copy.deepcopy(trained).eval()


def estimate(rows, policy, initial, temperature):
    """`sum_t (exp(d_t) - 1 - d_t)`, averaged over the rows, from passes of one row without padding."""
    total = 0.0
    for row in rows:
        then, now = (training.log_probabilities(each, *row, temperature) for each in (initial, policy))
        difference = then - now
        total += (difference.exp() - 1 - difference).sum().item()
    return total / len(rows)


@pytest.mark.parametrize("case", ["full", "lora", "adapter"])
def test_divergence_is_that_of_sampled_completions_from_the_initial_policy(case, tmp_path):
    given, options, initial = policies(case)
    trainer, callback = validating(
        tmp_path,
        given,
        data=tiny.prompts(8),
        callback=Keeping,
        options=options,
        batch_size=3,
        kl_prompts=6,
        learning_rate=0.01,
        temperature=0.7,
        regularization=0.0,
        max_completion_length=12,  # so that some are shorter
    )
    trainer.train()
    assert logged(trainer, "validation/kl")[0] == 0
    policy = copy.deepcopy(initial)
    policy.load_state_dict(trainer.model.state_dict())
    sampled = callback.rows[8:]  # after the greedy ones
    texts = tiny.prompts(8)["prompt"]
    assert [prompt for prompt, _ in sampled] == tiny.tokenizer()(texts[:6])["input_ids"]
    expected = estimate(sampled, policy, initial, 0.7)
    assert expected > 0.05
    assert logged(trainer, "validation/kl")[2] == pytest.approx(expected, rel=1e-3)
    if case == "adapter":  # the base model would have been another initial policy
        with initial.disable_adapter():
            assert estimate(sampled, policy, initial, 0.7) != pytest.approx(expected, rel=0.05)


def test_completions_for_the_divergence_are_sampled_as_in_training(tmp_path):
    """From the same random stream: those of `generate` with the training's temperature."""
    trainer, callback = validating(tmp_path, callback=Keeping, kl_prompts=3, temperature=1.7, seed=5)
    sharper(trainer.model)
    callback.validate()
    prompts, completions = zip(*callback.rows[3:], strict=True)
    tokenizer, policy = tiny.tokenizer(), sharper(model()).eval()
    batch = tokenizer(list(tiny.prompts(3)["prompt"]), padding=True, return_tensors="pt")
    sampling = {"do_sample": True, "temperature": 1.7, "top_k": 0, "top_p": 1.0, "max_new_tokens": 6}
    torch.manual_seed(5)
    output = policy.generate(**batch, **sampling)[:, batch["input_ids"].shape[1] :]
    assert list(prompts) == tokenizer(list(tiny.prompts(3)["prompt"]))["input_ids"]
    for row, completion in zip(output.tolist(), completions, strict=True):
        assert row[: len(completion)] == completion


def test_divergence_converges_to_the_exact_one(tmp_path):
    count, temperature = 4000, 0.8
    trainer, callback = validating(
        tmp_path,
        data=Dataset.from_dict({"prompt": ["What?"] * count}),
        batch_size=1000,
        kl_prompts=count,
        temperature=temperature,
        max_completion_length=1,
        per_device_train_batch_size=300,
    )
    sharper(trainer.model)
    measured = callback.validate()["validation/kl"]

    prompt = torch.tensor([tiny.tokenizer()("What?")["input_ids"]])
    with torch.no_grad():
        then, now = (
            (policy(prompt).logits[0, -1].double() / temperature).log_softmax(-1)
            for policy in (model(), sharper(model()))
        )
    exact, opposite = ((p.exp() * (p - q)).sum().item() for p, q in ((now, then), (then, now)))
    values = (then - now).exp() - 1 - (then - now)
    mean, square = ((now.exp() * moment).sum().item() for moment in (values, values**2))
    assert mean == pytest.approx(exact)
    error = ((square - mean**2) / count) ** 0.5
    assert error < 0.1 * exact and abs(opposite - exact) > 5 * error  # else this would say little
    assert measured == pytest.approx(exact, abs=4 * error)


def test_nothing_is_sampled_for_a_divergence_that_is_zero(tmp_path):
    trainer, callback = validating(tmp_path, callback=Keeping, kl_prompts=2)
    assert callback.validate()["validation/kl"] == 0 and len(callback.rows) == 3  # greedy ones
    with torch.no_grad():
        trainer.model.model.norm.weight[0] += 1e-3  # a single number
    assert callback.validate()["validation/kl"] > 0 and len(callback.rows) == 5


def test_divergence_is_not_measured_and_no_copy_kept_without_prompts_for_it(tmp_path):
    trainer, callback = validating(tmp_path, kl_prompts=0)
    trainer.train()
    assert callback._initial is None
    assert all(set(line) == {"step", *FIGURES[:2]} for line in callback.history)
    assert not logged(trainer, "validation/kl")


def test_a_resumed_run_measures_the_divergence_from_the_original_initial_policy(tmp_path):
    def run(checkpoint=None):
        given, options, _ = policies("lora")
        settings = {"max_steps": 3, "save_strategy": "steps", "save_steps": 2, "learning_rate": 0.05}
        trainer, _ = validating(tmp_path, given, options=options, steps=2, **settings)
        trainer.train(resume_from_checkpoint=checkpoint)
        return logged(trainer, "validation/kl")

    whole = run()
    resumed = run(str(tmp_path / "checkpoint-2"))
    assert whole[2] > 0.05
    assert resumed == pytest.approx(whole, rel=1e-4)
