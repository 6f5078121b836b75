"""A run that resumes goes on with the numbers of one that was not interrupted, or says what is different."""

import json
import os
import signal
import subprocess
import sys
import warnings
from pathlib import Path

import pytest
import torch

from tests import training
from tests.checkpoints import resume_worker
from tests.checkpoints.interrupted import SETTINGS, cut


ROOT = Path(__file__).parents[2]


def killed(*arguments):
    """A run in a process of its own, which ends as one does that is killed."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    command = [sys.executable, resume_worker.__file__, *map(str, arguments), "killed"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == -signal.SIGKILL, done.stderr[-3000:]


def steps(log):
    lines = [json.loads(line) for line in log.read_text().splitlines()]
    return {line["step"]: line for line in lines}


def test_a_killed_run_resumes_with_the_same_numbers(tmp_path):
    killed(tmp_path / "killed", tmp_path / "killed.log")
    resume_worker.main(tmp_path / "whole", tmp_path / "whole.log")
    assert max(steps(tmp_path / "killed.log")) == 5 and not (tmp_path / "killed.log.pt").exists()
    resume_worker.main(tmp_path / "killed", tmp_path / "resumed.log", "resumed")

    expected, resumed = steps(tmp_path / "whole.log"), steps(tmp_path / "resumed.log")
    assert min(resumed) > 3 and max(resumed) == 8
    for step, figures in resumed.items():
        assert figures == pytest.approx(expected[step], rel=1e-6), step
    weights, again = (torch.load(tmp_path / f"{name}.log.pt") for name in ("whole", "resumed"))
    for name in weights:
        torch.testing.assert_close(again[name], weights[name])


def change(folder, **entries):
    """Change what the last checkpoint says of itself."""
    path = folder / "checkpoint-3" / "isopo_state.pt"
    state = torch.load(path, weights_only=True)
    weighting = {**state["weighting"], **entries.pop("weighting", {})}
    torch.save({**state, "weighting": weighting, **entries}, path)


@pytest.mark.parametrize(
    "before, now, expected",
    [
        ({"layers": ["another.weight"]}, {}, ["isopo_state.pt: ", "another.weight"]),
        ({}, {"rule": "npg"}, ["isopo_state.pt: ", "name='fisher'", "name='npg'"]),
        ({}, {"token_weights": "kpo"}, ["isopo_state.pt: ", "token_weights='none' to 'kpo'", "start a new run"]),
        (
            {"weighting": {"token_weights": "kpo", "kpo_gain": None}},
            {"token_weights": "kpo", "kpo_gain": 0.1},
            ["isopo_state.pt: ", "kpo_gain=None to 0.1", "start a new run"],
        ),
        ("damage", {}, ["optimizer.pt", "checkpoint-2"]),
    ],
    ids=str,
)
def test_a_checkpoint_that_does_not_fit_is_refused_before_anything_is_loaded(before, now, expected, folder):
    cut(folder / "checkpoint-3" / "optimizer.pt") if before == "damage" else change(folder, **before)
    trainer = training.build(folder, **SETTINGS, **now, max_steps=4)
    weights = {name: p.detach().clone() for name, p in trainer.model.named_parameters()}
    with pytest.raises(ValueError) as info:
        trainer.train(resume_from_checkpoint=True)
    assert all(text in str(info.value) for text in ["checkpoint-3", *expected]), info.value
    assert trainer.state.global_step == 0 and trainer.isopo.state_dict()["draws"] == 0
    assert all(torch.equal(p, weights[name]) for name, p in trainer.model.named_parameters())


@pytest.mark.parametrize(
    "before, now, expected",
    [
        ({}, {}, []),
        ({}, {"regularization_decay": 0.5}, ["regularization_decay=0.9 to 0.5"]),
        ({}, {"fisher_samples": 32}, ["fisher_samples=64 to 32", "first step goes by the microbatch"]),
        (
            {"weighting": {"token_weights": "sampler", "vllm_importance_sampling_clip_max": 2.0}},
            {"token_weights": "sampler"},
            ["vllm_importance_sampling_clip_max=2.0 to 3.0"],
        ),
        (
            {"weighting": {"beta": 0.3}},
            {"entropy_coef": 0.1, "off_policy_mask_threshold": 0.5},
            ["beta=0.3 to 0.0, entropy_coef=0.0 to 0.1", "off_policy_mask_threshold=None to 0.5"],
        ),
        # Without statistics, there is nothing that other weights could contradict
        ("no rule", {"rule": "none", "token_weights": "kpo", "fisher_samples": 3}, ["token_weights='none' to 'kpo'"]),
        ("no optimizer", {}, ["checkpoint-3 has no state of the optimizer"]),
    ],
    ids=str,
)
def test_a_run_goes_on_and_says_what_is_different(before, now, expected, folder, caplog):
    if before == "no optimizer":
        (folder / "checkpoint-3" / "optimizer.pt").unlink()
    elif before == "no rule":
        change(folder, rule=training.build(folder, rule="none").isopo.rule.settings)
    else:
        change(folder, **before)
    trainer = training.build(folder, **SETTINGS, **now, max_steps=4)
    with caplog.at_level("WARNING", logger="isopo_trl"), warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        trainer.train(resume_from_checkpoint=True)
    assert trainer.state.global_step == 4
    said = [str(warning.message) for warning in caught if "ISOPO" in str(warning.message)]
    said += [record.getMessage() for record in caplog.records if record.name.startswith("isopo_trl")]
    assert bool(said) == bool(expected) and all(text in " ".join(said) for text in expected), said
