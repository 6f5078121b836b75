"""Liger's kernels are in the models that are said to have them, and in no other."""

import argparse

import pytest
import torch
from transformers.models.qwen3 import modeling_qwen3

from tests import tiny


@pytest.fixture(scope="module")
def liger_kernels(importable):
    import liger_kernels

    return liger_kernels


@pytest.fixture(scope="module")
def setting(importable):
    import setting

    return setting


def case(setting, **options) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    setting.add_case_options(parser)
    setting.add_variant_options(parser, [])
    return parser.parse_args([], argparse.Namespace(**options))


def test_a_name_that_is_exchanged_for_all_models_is_put_back(liger_kernels):
    model, own = tiny.model("qwen3"), modeling_qwen3.apply_rotary_pos_emb
    with pytest.raises(KeyError), liger_kernels.apart(model):
        modeling_qwen3.apply_rotary_pos_emb = torch.add
        raise KeyError
    assert modeling_qwen3.apply_rotary_pos_emb is own


def test_the_rival_cannot_be_measured_without_liger(setting, liger_kernels, monkeypatch):
    monkeypatch.setattr(liger_kernels, "is_installed", lambda: False)
    with pytest.raises(SystemExit, match="grpo:liger needs liger-kernel: pip install"):
        setting.variant_names(case(setting, rules=["grpo:liger", "fisher"]))
    assert setting.variant_names(case(setting, rules=["fisher"])) == ["grpo", "fisher"]


@pytest.mark.parametrize("lora", [0, 2])
def test_kernels_are_in_place_in_their_own_model_and_while_it_runs(lora, setting, liger_kernels):
    pytest.importorskip("liger_kernel")
    own = {name: getattr(modeling_qwen3, name) for name in ("apply_rotary_pos_emb", "Qwen3RMSNorm", "Qwen3MLP")}
    options = case(setting, rules=[], lora=lora)
    for name in ("grpo:liger", "fisher:liger"):
        variant = setting.Variant(name, options)
        with variant.kernels:
            liger_kernels.check(variant.trainer)
        assert all(getattr(modeling_qwen3, name) is value for name, value in own.items())
        with pytest.raises(RuntimeError, match=r"not in place: apply_rotary_pos_emb \(1 in all\)"):
            liger_kernels.check(variant.trainer)
    with pytest.raises(RuntimeError, match=r"not in place: apply_rotary_pos_emb, .*layers\.0"):
        liger_kernels.check(setting.Variant("grpo", options).trainer)
