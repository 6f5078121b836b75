"""A run that resumes goes on with the numbers of one that was not interrupted, or says what is different."""

import warnings

import pytest
import torch
from transformers import TrainerCallback

from isopo_trl import ISOPOConfig
from isopo_trl.checkpoints.state import described
from tests import tiny, training
from tests.checkpoints.interrupted import SETTINGS, cut


class Killed(BaseException):
    """Goes past all that would still be done for a run that ends."""


class Kill(TrainerCallback):
    """Ends the run two steps past its checkpoint."""

    def on_log(self, args, state, control, **kwargs):
        if state.global_step == 4:
            raise Killed


def figures_by_step(trainer):
    lines = [line for line in trainer.state.log_history if "loss" in line]
    return {line["step"]: {name: x for name, x in line.items() if "time" not in name} for line in lines}


def test_a_killed_run_resumes_with_the_same_numbers(tmp_path):
    settings = {"rule": "fig4", "regularization": 0.5, "gradient_accumulation_steps": 2, "max_steps": 6}
    settings |= {"save_strategy": "steps", "save_steps": 2, "data": tiny.prompts(64)}
    killed = training.build(tmp_path / "killed", **settings, options={"callbacks": [Kill()]})
    with pytest.raises(Killed):
        killed.train()
    whole = training.build(tmp_path / "whole", **settings)
    whole.train()
    again = training.build(tmp_path / "killed", **settings)
    again.train(resume_from_checkpoint=True)
    expected, resumed = figures_by_step(whole), figures_by_step(again)
    assert killed.state.global_step == 4 and len(resumed) == 6
    for step, figures in resumed.items():
        assert figures == pytest.approx(expected[step], rel=1e-6), step
    for p, q in zip(again.model.parameters(), whole.model.parameters(), strict=True):
        torch.testing.assert_close(p, q)


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
        ({}, {"optim": "sgd"}, ["isopo_state.pt: ", "optim='adamw_torch' to 'sgd'", "resume with the saved optim"]),
        (
            {"optimizer": {"optim": "sgd", "momentum": 0.0, "dampening": 0.0, "nesterov": False}},
            {"optim": "sgd", "optim_args": "momentum=0.9"},
            ["isopo_state.pt: ", "(momentum=0.0 to 0.9)", "optim_args", "start a new run"],
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
        (
            {},
            {"regularization_decay": 0.5, "fisher_samples": 32},
            ["regularization_decay=0.9 to 0.5", "fisher_samples=64 to 32", "first step goes by the microbatch"],
        ),
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
        ("no optimizer", {"optim": "sgd"}, ["checkpoint-3 has no state of the optimizer"]),
        ({}, {"optim": "adamw_torch"}, []),
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


def own(kind, **settings):
    model = tiny.model("qwen3")
    return {"model": model, "options": {"optimizers": (kind(model.parameters(), lr=0.01, **settings), None)}}


def test_an_optimizer_of_the_users_resumes_its_own_state_and_no_other(tmp_path):
    sgd = torch.optim.SGD
    training.build(tmp_path, **SETTINGS, **own(sgd, momentum=0.9), max_steps=1).train()
    for other, words in ((own(torch.optim.Rprop), "'sgd' to 'Rprop'"), (own(sgd), "momentum=0.9 to 0")):
        with pytest.raises(ValueError, match=words):
            training.build(tmp_path, **SETTINGS, **other, max_steps=2).train(resume_from_checkpoint=True)
    again = training.build(tmp_path, **SETTINGS, **own(sgd, momentum=0.9), max_steps=2)
    again.train(resume_from_checkpoint=True)
    again.args.max_steps = 3
    again.train(resume_from_checkpoint=True)  # with accelerate's wrapper in its place
    assert again.state.global_step == 3


def test_an_optimizer_is_described_alike_however_it_is_given(tmp_path):
    parameters = [torch.zeros(2, requires_grad=True)]
    args = ISOPOConfig(str(tmp_path), **training.SETTINGS, optim="sgd", optim_args="momentum=0.5, nesterov=yes")
    sgd, settings = torch.optim.SGD, {"momentum": 0.5, "nesterov": True}
    ways = [(args,), (None, sgd(parameters, lr=1.0, **settings)), (None, None, (sgd, settings))]
    assert [described(*way) for way in ways] == [{"optim": "sgd", "dampening": 0, **settings}] * 3
    default = ISOPOConfig(str(tmp_path), **training.SETTINGS)
    assert described(default) == described(None, torch.optim.AdamW(parameters)) == {"optim": "adamw_torch"}
