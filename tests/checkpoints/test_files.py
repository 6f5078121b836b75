"""Resuming: from what is not all of a checkpoint, is no checkpoint, or belongs to another run."""

import os
import shutil
import warnings

import pytest
import torch
from safetensors.torch import load_file, save_file

from isopo_trl.checkpoints import files as checkpoints
from tests import tiny, training
from tests.gradients import vision_families
from tests.test_config import sentences


SETTINGS = {"save_strategy": "steps", "save_steps": 1, "max_completion_length": 3}


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """The output folder of a run with three checkpoints; to be copied."""
    folder = tmp_path_factory.mktemp("saved")
    training.build(folder, **SETTINGS, max_steps=3).train()
    assert [path.name for path in checkpoints.in_folder(folder)] == ["checkpoint-1", "checkpoint-2", "checkpoint-3"]
    return folder


@pytest.fixture
def folder(saved, tmp_path):
    return shutil.copytree(saved, tmp_path / "run")


def refused(folder, resume=True, error=ValueError, **settings):
    """The message of a run that is refused before it has loaded anything."""
    trainer = training.build(folder, **{**SETTINGS, **settings}, max_steps=4)
    before = {name: p.detach().clone() for name, p in trainer.model.named_parameters()}
    with pytest.raises(error) as info:
        trainer.train(resume_from_checkpoint=resume)
    assert trainer.state.global_step == 0 and trainer.isopo.state_dict()["draws"] == 0
    assert all(torch.equal(p, before[name]) for name, p in trainer.model.named_parameters())
    message = str(info.value)
    assert sentences(message) == 1 and message.endswith("."), message
    return message


# Which checkpoint


def test_checkpoints_are_in_the_order_of_their_steps(tmp_path):
    for name in ("checkpoint-10", "checkpoint-9", "checkpoint-x", "checkpoint-5-copy", "other"):
        (tmp_path / name).mkdir()
    (tmp_path / "checkpoint-11").write_text("a file")
    assert [path.name for path in checkpoints.in_folder(tmp_path)] == ["checkpoint-9", "checkpoint-10"]
    assert checkpoints.in_folder(tmp_path / "nowhere") == []


def test_words_and_paths_choose_a_checkpoint(folder):
    last, first = folder / "checkpoint-3", folder / "checkpoint-1"
    for given, expected in [(None, None), (False, None), ("False", None), (True, last), ("true", last)]:
        assert checkpoints.chosen(given, str(folder)) == expected
    assert checkpoints.chosen(first, str(folder)) == checkpoints.chosen(str(first), "elsewhere") == first


@pytest.mark.parametrize("given", ["nonsense", "", 5, ["checkpoint-1"], "checkpoint-1/trainer_state.json"], ids=repr)
def test_what_is_no_folder_is_refused_with_those_there_are(given, folder, monkeypatch):
    monkeypatch.chdir(folder)
    with pytest.raises(ValueError) as error:
        checkpoints.chosen(given, str(folder))
    message = str(error.value)
    assert f"resume_from_checkpoint={given!r}" in message and "checkpoint-1, checkpoint-2, checkpoint-3" in message
    assert sentences(message) == 1


@pytest.mark.parametrize("name", ["empty", "nowhere"])
def test_last_checkpoint_of_a_folder_without_any_is_refused(name, tmp_path):
    (tmp_path / "empty").mkdir()
    with pytest.raises(ValueError, match=f"resume_from_checkpoint=True.*{name}.*has none.*new run") as error:
        checkpoints.chosen(True, str(tmp_path / name))
    assert sentences(str(error.value)) == 1


def test_folder_of_checkpoints_is_refused_with_those_in_it(folder):
    message = refused(folder, str(folder))
    assert "is not a checkpoint, but a folder of them" in message and str(folder / "checkpoint-3") in message


def test_folder_that_is_no_checkpoint_is_refused(folder, tmp_path):
    (tmp_path / "empty").mkdir()
    assert "isopo_state.pt, so it is not a checkpoint" in refused(folder, str(tmp_path / "empty"), FileNotFoundError)


# Whether all of it is there


def cut(path):
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def unsafe(path):
    class Payload:
        def __reduce__(self):
            return (open, (str(path) + ".ran", "w"))

    torch.save({"layers": Payload()}, path)


def dangling(path):
    path.unlink()
    path.symlink_to("gone")


BROKEN = [
    ("isopo_state.pt", cut),
    ("isopo_state.pt", lambda path: path.write_bytes(b"")),
    ("isopo_state.pt", lambda path: path.write_text("not a state")),
    ("isopo_state.pt", lambda path: torch.save([1, 2], path)),
    ("isopo_state.pt", unsafe),
    ("model.safetensors", cut),
    ("optimizer.pt", cut),
    ("rng_state.pth", cut),
    ("trainer_state.json", cut),
    ("trainer_state.json", lambda path: path.write_text("[]")),
    ("optimizer.pt", dangling),
    ("model.safetensors", dangling),
]


@pytest.mark.parametrize("name, breaks", BROKEN)
def test_damaged_file_is_named_with_the_checkpoint_to_use_instead(name, breaks, folder):
    path = folder / "checkpoint-3" / name
    breaks(path)
    (folder / "checkpoint-2" / "optimizer.pt").unlink()
    with pytest.raises(ValueError) as error:
        checkpoints.read(folder / "checkpoint-3")
    message = str(error.value)
    assert f"{folder / 'checkpoint-3'} is damaged" in message and f"({name} cannot be read)" in message
    assert f"delete it, and resume from {folder / 'checkpoint-1'}" in message  # the second is not complete
    assert not list(folder.glob("**/*.ran"))  # loading is safe
    assert sentences(message) == 1


def directory(path):
    path.unlink()
    path.mkdir()


def failing(path):
    """A file that is there and that may be opened, but whose bytes cannot be had."""
    path.unlink()
    path.symlink_to("/proc/self/mem")


def forbidden(path):
    path.chmod(0)


@pytest.mark.parametrize(
    "name, breaks",
    [
        ("isopo_state.pt", directory),
        ("trainer_state.json", directory),
        *[(name, failing) for name in ("isopo_state.pt", "trainer_state.json", "optimizer.pt", "model.safetensors")],
        *[(name, forbidden) for name in ("isopo_state.pt", "trainer_state.json", "optimizer.pt", "model.safetensors")],
    ],
)
def test_file_that_the_machine_cannot_read_is_not_called_damaged(name, breaks, folder):
    path = folder / "checkpoint-3" / name
    breaks(path)
    if breaks is forbidden and os.access(path, os.R_OK):
        pytest.skip("this user may read everything")
    if breaks is failing and not os.path.exists("/proc/self/mem"):
        pytest.skip("no file that can be opened and not be read")
    with pytest.raises(OSError) as error:
        checkpoints.read(folder / "checkpoint-3")
    assert "damaged" not in str(error.value) and "delete" not in str(error.value)


def test_state_that_does_not_fit_into_memory_is_not_called_damaged(folder, monkeypatch):
    def full(*_, **__):
        raise MemoryError("no room")

    monkeypatch.setattr(torch, "load", full)
    with pytest.raises(MemoryError, match="no room"):
        checkpoints.read(folder / "checkpoint-3")


def test_checkpoint_that_cannot_be_read_is_not_offered_in_anothers_place(folder):
    cut(folder / "checkpoint-3" / "optimizer.pt")
    directory(folder / "checkpoint-2" / "isopo_state.pt")
    with pytest.raises(ValueError, match="checkpoint-3 is damaged.*resume from .*checkpoint-1, the last"):
        checkpoints.read(folder / "checkpoint-3")


@pytest.mark.parametrize("name", ["trainer_state.json", "optimizer.pt", "scheduler.pt", "rng_state.pth", "the model"])
def test_missing_file_is_named_with_the_checkpoint_to_use_instead(name, folder):
    (folder / "checkpoint-3" / {"the model": "model.safetensors"}.get(name, name)).unlink()
    with pytest.raises(ValueError) as error:
        checkpoints.read(folder / "checkpoint-3")
    message = str(error.value)
    assert f"({name} is missing)" in message and str(folder / "checkpoint-2") in message


def test_cut_off_checkpoint_is_refused_before_anything_is_loaded(folder):
    for name in ("trainer_state.json", "scheduler.pt", "rng_state.pth"):
        (folder / "checkpoint-3" / name).unlink()
    cut(folder / "checkpoint-3" / "optimizer.pt")
    message = refused(folder)
    assert "optimizer.pt cannot be read, scheduler.pt is missing" in message
    assert str(folder / "checkpoint-2") in message


def test_cut_off_checkpoint_without_another_says_that_there_is_none(folder):
    for step in (1, 2):
        shutil.rmtree(folder / f"checkpoint-{step}")
    (folder / "checkpoint-3" / "trainer_state.json").unlink()
    with pytest.raises(ValueError, match="start a new run"):
        checkpoints.read(folder / "checkpoint-3")


@pytest.mark.parametrize("files", [["optimizer.bin", "scheduler.pt", "rng_state_0.pth"], ["global_step3/", "latest"]])
def test_files_of_sharded_runs_count(files, tmp_path):
    for name in files:
        (tmp_path / name).mkdir() if name.endswith("/") else (tmp_path / name).touch()
    assert checkpoints.missing(tmp_path) == []


# Whether it belongs to the run


def change(path, **entries):
    state = torch.load(path, weights_only=True)
    state.update(entries)
    torch.save({name: value for name, value in state.items() if value != "missing"}, path)


@pytest.mark.parametrize(
    "entries, expected",
    [({"running": "missing"}, "it has no running"), ({"layers": ["another.weight"]}, "another.weight")],
    ids=str,
)
def test_state_that_does_not_fit_is_refused_by_the_name_of_its_file(entries, expected, folder):
    path = folder / "checkpoint-3" / "isopo_state.pt"
    change(path, **entries)
    message = refused(folder)
    assert str(path) in message and expected in message


def test_checkpoint_of_another_rule_is_refused_by_the_name_of_its_file(folder):
    message = refused(folder, rule="npg")
    assert str(folder / "checkpoint-3" / "isopo_state.pt") in message
    assert "name='fisher'" in message and "name='npg'" in message


@pytest.mark.parametrize(
    "before, after, expected",
    [
        ({}, {"token_weights": "kpo"}, ["token_weights='none' to 'kpo'"]),
        ({"token_weights": "p3o"}, {"token_weights": "sampler"}, ["token_weights='p3o' to 'sampler'"]),
        (
            {"token_weights": "kpo"},
            {"token_weights": "kpo", "kpo_gain": 0.1, "kpo_stop_gradient": True},
            ["kpo_gain=None to 0.1", "kpo_stop_gradient=False to True"],
        ),
    ],
    ids=str,
)
def test_other_token_weights_are_refused(before, after, expected, folder):
    chosen = training.build(folder, **SETTINGS, **before).weighting.chosen()
    change(folder / "checkpoint-3" / "isopo_state.pt", weighting=chosen)
    message = refused(folder, **after)
    assert all(text in message for text in [*expected, "start a new run"]), message


def resumed(folder, caplog, **settings):
    """A run that goes on for a step, and what it says."""
    trainer = training.build(folder, **{**SETTINGS, **settings}, max_steps=4)
    with caplog.at_level("WARNING", logger="isopo_trl"), warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        trainer.train(resume_from_checkpoint=True)
    assert trainer.state.global_step == 4
    said = [str(warning.message) for warning in caught if "ISOPO" in str(warning.message)]
    return said + [record.getMessage() for record in caplog.records if record.name.startswith("isopo_trl")]


def test_run_with_the_same_settings_resumes_without_a_word(folder, caplog):
    assert resumed(folder, caplog) == []


def test_other_decay_and_number_of_samples_are_reported(folder, caplog):
    message, of_rows = resumed(folder, caplog, regularization_decay=0.5, fisher_samples=32)
    assert "regularization_decay=0.9 to 0.5, fisher_samples=64 to 32" in message
    assert "not as many as are set here" in of_rows and "first step goes by the microbatch" in of_rows


def test_other_clipping_under_the_same_weights_is_reported(folder, caplog):
    before = {"token_weights": "sampler", "vllm_importance_sampling_clip_max": 2.0}
    chosen = training.build(folder, **SETTINGS, **before).weighting.chosen()
    change(folder / "checkpoint-3" / "isopo_state.pt", weighting=chosen)
    (message,) = resumed(folder, caplog, token_weights="sampler")
    assert "vllm_importance_sampling_clip_max=2.0 to 3.0" in message


def test_other_terms_and_another_mask_are_reported(folder, caplog):
    path = folder / "checkpoint-3" / "isopo_state.pt"
    change(path, weighting={**torch.load(path, weights_only=True)["weighting"], "beta": 0.3})
    (message,) = resumed(folder, caplog, entropy_coef=0.1, off_policy_mask_threshold=0.5)
    for text in ("beta=0.3 to 0.0", "entropy_coef=0.0 to 0.1", "off_policy_mask_threshold=None to 0.5"):
        assert text in message


def test_other_token_weights_are_reported_where_there_are_no_statistics(folder, caplog):
    path = folder / "checkpoint-3" / "isopo_state.pt"
    none = training.build(folder, **SETTINGS, rule="none").isopo
    change(path, rule=none.rule.settings)
    (message,) = resumed(folder, caplog, rule="none", token_weights="kpo", regularization_decay=0.5, fisher_samples=3)
    assert "token_weights='none' to 'kpo'" in message


@pytest.mark.parametrize("key", [True, "missing"], ids=["saved without", "early"])
def test_checkpoint_without_the_states_of_the_optimizer_is_taken_and_reported(key, folder, caplog):
    for name in ("optimizer.pt", "scheduler.pt", "rng_state.pth"):
        (folder / "checkpoint-3" / name).unlink()
    change(folder / "checkpoint-3" / "isopo_state.pt", save_only_model=key)
    (message,) = resumed(folder, caplog)
    assert "has no optimizer.pt, scheduler.pt, rng_state.pth" in message and "starts anew" in message


def test_early_checkpoint_is_taken_without_a_word(folder, caplog):
    entries = ("regularization_decay", "fisher_samples", "weighting", "save_only_model")
    change(folder / "checkpoint-3" / "isopo_state.pt", **dict.fromkeys(entries, "missing"))
    assert resumed(folder, caplog, regularization_decay=0.5) == []


def test_what_is_saved_is_said_by_the_configuration_alone(saved):
    state = torch.load(saved / "checkpoint-3" / "isopo_state.pt", weights_only=True)
    loss = {"importance_sampling_level": "token", "loss_type": "dapo"}
    nothing = dict.fromkeys(("epsilon", "epsilon_high", "delta", "off_policy_mask_threshold"))
    coefficients = dict.fromkeys(("beta", "entropy_coef", "router_aux_loss_coef"), 0.0)
    switches = {"kl_in_reward": False, "use_bias_correction_kl": True, "use_adaptive_entropy": False}
    switches |= {"skip_zero_advantage": True}
    assert state["weighting"] == {"token_weights": "none", **nothing, **loss, **coefficients, **switches}
    assert state["save_only_model"] is False
    assert (state["regularization_decay"], state["fisher_samples"]) == (0.9, 64)


# Weights that change form


@pytest.mark.parametrize("family", ["qwen3_moe", "mixtral"])  # experts one by one; a router under another name, too
def test_a_mixture_resumes_with_the_experts_that_were_saved(family, tmp_path):
    whole = training.build(tmp_path, tiny.model(family), **SETTINGS, max_steps=2)
    whole.train()
    resumed = training.build(tmp_path, tiny.model(family), **SETTINGS, max_steps=2)
    resumed.train(resume_from_checkpoint=tmp_path / "checkpoint-1")
    expected = dict(whole.model.named_parameters())
    assert all(torch.equal(p, expected[name]) for name, p in resumed.model.named_parameters())


def test_the_best_model_has_the_experts_that_were_saved(tmp_path):
    trained = training.build(tmp_path, tiny.model("mixtral"), **SETTINGS, max_steps=1)
    trained.train()
    trainer = training.build(tmp_path, tiny.model("mixtral"), **SETTINGS, max_steps=1)
    trainer.state.best_model_checkpoint = str(tmp_path / "checkpoint-1")
    trainer._load_best_model()
    expected = dict(trained.model.named_parameters())
    assert all(torch.equal(p, expected[name]) for name, p in trainer.model.named_parameters())


@pytest.mark.parametrize("family", ["qwen2_5_vl", "llava"])
def test_models_whose_weights_are_saved_under_other_names_are_read_back(family, tmp_path):
    model = vision_families.build(family).float()
    model.save_pretrained(tmp_path)
    expected = {name: p.detach().clone() for name, p in model.named_parameters()}
    with torch.no_grad():
        for p in model.parameters():
            p.zero_()
    checkpoints.load_converted(model, tmp_path, list(expected))
    assert all(torch.equal(p, expected[name]) for name, p in model.named_parameters())


def test_weights_of_several_widths_are_loaded_without_rounding(tmp_path):
    model = tiny.model("mixtral", dtype=torch.bfloat16)
    model.model.norm.to(torch.float32).weight.data.fill_(1 / 3)  # which is no number of bf16
    model.save_pretrained(tmp_path)
    other = tiny.model("mixtral", seed=1, dtype=torch.bfloat16)
    other.model.norm.to(torch.float32)
    checkpoints.load_converted(other, tmp_path, ["model.layers.0.mlp.gate.weight"])
    expected = dict(model.named_parameters())
    for name, p in other.named_parameters():
        assert p.dtype == expected[name].dtype and torch.equal(p, expected[name])


@pytest.mark.parametrize("family", ["llama", "mixtral"])
def test_a_checkpoint_without_some_of_the_weights_is_refused(family, tmp_path):
    training.build(tmp_path, tiny.model(family), **SETTINGS, max_steps=1).train()
    file = tmp_path / "checkpoint-1" / "model.safetensors"
    weights = load_file(file)
    del weights["model.norm.weight"]
    save_file(weights, file, metadata={"format": "pt"})
    trainer = training.build(tmp_path, tiny.model(family), **SETTINGS, max_steps=2)
    with pytest.raises(ValueError, match="checkpoint-1 has no weights for .*model.norm.weight") as error:
        trainer.train(resume_from_checkpoint=True)
    assert sentences(str(error.value)) == 1


def test_tied_weights_are_not_lost(tmp_path):
    model = tiny.model("llama", tie=True)
    assert checkpoints.lost(model, ["lm_head.weight"]) == []
    assert checkpoints.lost(model, ["lm_head.weight", "model.embed_tokens.weight"])
    assert checkpoints.lost(model, ["model.norm.weight", "no weight"]) == ["model.norm.weight"]
    model._keys_to_ignore_on_save = ["model.norm.weight"]
    assert checkpoints.lost(model, ["model.norm.weight"]) == []


def test_weights_that_a_model_of_ones_own_has_lost_are_named(tmp_path):
    with pytest.raises(ValueError, match="no weights for a, b, c and 1 more,"):
        checkpoints.load_converted(torch.nn.Linear(1, 1), tmp_path, ["a", "b", "c", "d"])
