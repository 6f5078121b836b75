"""A run that resumes inside a generation, or in a later epoch, ends with the weights of an unbroken one."""

import logging

import pytest
import torch

from isopo_trl.checkpoints import files, generation
from tests import tiny, training


SETTINGS = {
    "save_strategy": "steps",
    "save_steps": 1,
    "max_completion_length": 4,
    "learning_rate": 1e-2,
    "token_weights": "sampler",
    "vllm_importance_sampling_mode": "token_truncate",
}
# Of four prompts: the second epoch begins after 4 and 8 steps
REUSED = {
    "slices": {"steps_per_generation": 4, "gradient_accumulation_steps": 2, "num_generations": 6},
    "both": {
        "num_iterations": 2,
        "steps_per_generation": 2,
        "num_generations": 2,
        "per_device_train_batch_size": 2,
    },
}
ITERATIONS = {"num_iterations": 2}


def weights(trainer):
    return {name: p.detach().clone() for name, p in trainer.model.named_parameters()}


def resumed(folder, step, **settings):
    trainer = training.build(folder, data=tiny.prompts(4), **{**SETTINGS, **settings})
    trainer.train(resume_from_checkpoint=folder / f"checkpoint-{step}")
    return trainer


def differing(trainer, expected):
    return [name for name, p in trainer.model.named_parameters() if not torch.equal(p, expected[name])]


@pytest.mark.parametrize("kind", REUSED)
def test_the_weights_are_those_of_an_unbroken_run_bit_for_bit(kind, tmp_path, caplog):
    # Seven steps: what is resumed at the fifth goes on with a generation, and then makes another
    settings = {"max_steps": 7, **REUSED[kind]}
    whole = training.build(tmp_path, data=tiny.prompts(4), **{**SETTINGS, **settings})
    whole.train()
    expected = weights(whole)
    generations = [any(path.glob("isopo_generation_*")) for path in files.in_folder(tmp_path)]
    assert True in generations and False in generations and (whole.state.epoch > 1) == (kind == "slices")
    for step in (1, 5):
        with caplog.at_level(logging.WARNING):
            trainer = resumed(tmp_path, step, **settings)
        assert not differing(trainer, expected), f"resumed at step {step}"
    assert "same completions" not in caplog.text


@pytest.mark.parametrize("change", ["missing", "damaged", "settings", "early"])
def test_completions_that_cannot_be_had_again_are_reported(change, tmp_path, caplog):
    training.build(tmp_path, data=tiny.prompts(4), **SETTINGS, max_steps=2, **ITERATIONS).train()
    folder, settings = tmp_path / "checkpoint-1", dict(ITERATIONS)
    file, state = folder / generation.file_name(0), torch.load(folder / files.STATE_FILE)
    if change == "missing":
        file.unlink()
    elif change == "damaged":
        torch.save({"batches": object()}, file)
    elif change == "settings":
        settings["num_iterations"] = 3
    else:
        del state["position"], state["optimizer_steps"]
        torch.save(state, folder / files.STATE_FILE)
    with caplog.at_level(logging.WARNING):
        resumed(tmp_path, 1, max_steps=2, **settings)
    advice = [record.message for record in caplog.records if "same completions" in record.message]
    assert len(advice) == 1 and f"multiple of {settings['num_iterations']}" in advice[0]
    reasons = {"missing": "missing", "damaged": "cannot be read", "settings": "num_iterations=2 to 3"}
    assert reasons.get(change, "earlier version") in advice[0]


def test_nothing_is_said_between_generations(tmp_path, caplog):
    training.build(tmp_path, data=tiny.prompts(4), **SETTINGS, max_steps=2, num_iterations=2).train()
    with caplog.at_level(logging.WARNING):
        resumed(tmp_path, 2, max_steps=3, num_iterations=3)
    assert "same completions" not in caplog.text
