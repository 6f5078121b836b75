"""A run that resumes inside a generation, or in a later epoch, ends with the weights of an unbroken one."""

import logging

import pytest
import torch

from isopo_trl.checkpoints import generation
from isopo_trl.checkpoints.choice import checkpoints_in
from tests import tiny, training


SETTINGS = {
    "save_strategy": "steps",
    "save_steps": 1,
    "max_completion_length": 4,
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


def run(folder, step=None, **settings):
    """A trainer after a run, from the beginning or resumed at a step."""
    trainer = training.build(folder, data=tiny.prompts(4), **SETTINGS, **settings)
    trainer.train(resume_from_checkpoint=None if step is None else folder / f"checkpoint-{step}")
    return trainer


@pytest.mark.parametrize("kind", REUSED)
def test_the_weights_are_those_of_an_unbroken_run_bit_for_bit(kind, tmp_path, caplog):
    # Seven steps: what is resumed at the fifth goes on with a generation, and then makes another
    settings = {"max_steps": 7, **REUSED[kind]}
    whole = run(tmp_path, **settings)
    held = [any(path.glob("isopo_generation_*")) for path in checkpoints_in(tmp_path)]
    assert True in held and False in held and (whole.state.epoch > 1) == (kind == "slices")
    expected = dict(whole.model.named_parameters())
    with caplog.at_level(logging.WARNING):
        resumed = run(tmp_path, 5, **settings)
    assert all(torch.equal(p, expected[name]) for name, p in resumed.model.named_parameters())
    assert "same completions" not in caplog.text


@pytest.mark.parametrize(
    "step, iterations, reason",
    [(1, 2, "a rank's are not in it"), (1, 3, "num_iterations=2 to 3"), (2, 3, None)],
    ids=["without its file", "with other settings", "between generations"],
)
def test_completions_that_cannot_be_used_again_are_reported(step, iterations, reason, tmp_path, caplog):
    run(tmp_path, max_steps=2, num_iterations=2)
    (tmp_path / "checkpoint-1" / generation.file_name(0)).unlink()
    with caplog.at_level(logging.WARNING):
        run(tmp_path, step, max_steps=3, num_iterations=iterations)
    said = [record.message for record in caplog.records if "same completions" in record.message]
    if reason is None:
        assert not said
    else:
        assert len(said) == 1 and reason in said[0] and f"multiple of {iterations}" in said[0]
