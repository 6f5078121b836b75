"""Weights in a checkpoint: in whatever form they are saved, all of them are loaded, or the run is refused."""

import pytest
import torch
from safetensors.torch import load_file, save_file

from isopo_trl.checkpoints.weights import load_converted, lost_weights
from tests import tiny, training
from tests.checkpoints.interrupted import SETTINGS
from tests.gradients import vision_families


def differing(model, expected):
    expected = dict(expected.named_parameters())
    return [
        name for name, p in model.named_parameters() if p.dtype != expected[name].dtype or (p != expected[name]).any()
    ]


def test_a_mixture_has_the_experts_that_were_saved_when_it_resumes_and_as_the_best_model(tmp_path):
    """They are saved one by one, and Mixtral's router under another name, too."""
    whole, resumed, best = (training.build(tmp_path, tiny.model("mixtral"), **SETTINGS, max_steps=2) for _ in range(3))
    whole.train()
    resumed.train(resume_from_checkpoint=tmp_path / "checkpoint-1")
    assert not differing(resumed.model, whole.model)
    best.state.best_model_checkpoint = str(tmp_path / "checkpoint-2")
    best._load_best_model()
    assert not differing(best.model, whole.model)


@pytest.mark.parametrize("family", ["qwen2_5_vl", "llava"])
def test_models_whose_weights_are_saved_under_other_names_are_read_back(family, tmp_path):
    model, other = vision_families.build(family).float(), vision_families.build(family).float()
    model.save_pretrained(tmp_path)
    with torch.no_grad():
        for p in other.parameters():
            p.zero_()
    load_converted(other, tmp_path, ["any"])
    assert not differing(other, model)


def test_weights_of_several_widths_are_loaded_without_rounding(tmp_path):
    model, other = (tiny.model("mixtral", seed=seed, dtype=torch.bfloat16) for seed in (0, 1))
    model.model.norm.to(torch.float32).weight.data.fill_(1 / 3)  # which is no number of bf16
    other.model.norm.to(torch.float32)
    model.save_pretrained(tmp_path)
    load_converted(other, tmp_path, ["any"])
    assert not differing(other, model)


@pytest.mark.parametrize("family", ["llama", "mixtral"])
def test_a_checkpoint_without_some_of_the_weights_is_refused(family, tmp_path):
    training.build(tmp_path, tiny.model(family), **SETTINGS, max_steps=1).train()
    file = tmp_path / "checkpoint-1" / "model.safetensors"
    weights = load_file(file)
    del weights["model.norm.weight"]
    save_file(weights, file, metadata={"format": "pt"})
    trainer = training.build(tmp_path, tiny.model(family), **SETTINGS, max_steps=2)
    with pytest.raises(ValueError, match="checkpoint-1 has no weights for .*model.norm.weight"):
        trainer.train(resume_from_checkpoint=True)


def test_weights_are_lost_unless_they_are_tied_or_not_meant_to_be_saved():
    model = tiny.model("llama", tie=True)
    assert lost_weights(model, ["lm_head.weight"]) == []
    assert lost_weights(model, ["lm_head.weight", "model.embed_tokens.weight"])
    assert lost_weights(model, ["model.norm.weight", "no weight"]) == ["model.norm.weight"]
    model._keys_to_ignore_on_save = ["model.norm.weight"]
    assert lost_weights(model, ["model.norm.weight"]) == []


def test_weights_that_a_model_of_ones_own_has_lost_are_named(tmp_path):
    with pytest.raises(ValueError, match="no weights for a, b, c and 1 more,"):
        load_converted(torch.nn.Linear(1, 1), tmp_path, ["a", "b", "c", "d"])
