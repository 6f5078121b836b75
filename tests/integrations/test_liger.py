"""Liger's kernels beside ISOPO's layers: those of layers that hold no trained parameter stay."""

import importlib.util
import os

import pytest
import torch
from peft import LoraConfig

from isopo_trl.integrations import liger
from tests import tiny, training


# Triton's kernels run on a GPU, or on a CPU under its interpreter
RUNS = importlib.util.find_spec("liger_kernel") is not None and (
    torch.cuda.is_available() or os.environ.get("TRITON_INTERPRET") == "1"
)


def test_norms_and_experts_keep_isopos_layers():
    dense, experts = tiny.model("qwen3"), tiny.model("qwen3_moe")
    assert liger.kernels(dense, None) == {"rms_norm": False, "layer_norm": False}
    given = {"rope": True, "rms_norm": False}
    assert liger.kernels(dense, given) == {"rope": True, "rms_norm": False, "layer_norm": False}
    assert given == {"rope": True, "rms_norm": False}
    assert liger.kernels(experts, None) == {"rms_norm": False, "layer_norm": False, "swiglu": False}


def test_a_backward_that_works_in_place_is_not_run_twice(tmp_path):
    dense, experts = tiny.model("qwen3"), tiny.model("qwen3_moe")
    off = {"rms_norm": False, "layer_norm": False, "swiglu": False, "geglu": False}
    assert liger.kernels(dense, {"rope": True}, "beta=0.1") == {"rope": True, **off}
    assert liger.kernels(experts, None, "beta=0.1") == off
    with pytest.raises(ValueError, match=r"asks for swiglu, whose backward works in place.*with beta=0\.1"):
        liger.kernels(dense, {"swiglu": True}, "beta=0.1")
    terms = {"token_weights": "p3o", "use_liger_kernel": True}
    assert training.build(tmp_path, **terms).args.liger_kernel_config.items() >= off.items()
    assert "swiglu" not in training.build(tmp_path, rule="none", **terms).args.liger_kernel_config


def test_what_trl_refuses_is_refused_first_and_in_its_words(tmp_path):
    both = {"fused_linear_cross_entropy": True, "rms_norm": True}
    with pytest.raises(ValueError, match="fused_linear_cross_entropy.*is not supported.*fused LM head"):
        training.build(tmp_path, use_liger_kernel=True, liger_kernel_config=both)


def test_a_kernel_in_place_of_a_trained_layer_is_refused(tmp_path):
    with pytest.raises(ValueError, match="liger_kernel_config asks for rms_norm.*leave it out"):
        training.build(tmp_path, use_liger_kernel=True, liger_kernel_config={"rms_norm": True})


@pytest.mark.skipif(not RUNS, reason="needs liger-kernel, and a GPU or TRITON_INTERPRET=1")
@pytest.mark.parametrize("peft", [None, LoraConfig(r=2, target_modules="all-linear")], ids=["full", "lora"])
@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_the_weights_are_those_without_liger(family, peft, tmp_path):
    trained = []
    for use in (False, True):
        trainer = training.build(
            tmp_path,
            family,
            options={"peft_config": peft},
            use_cpu=not torch.cuda.is_available(),
            use_liger_kernel=use,
            learning_rate=1e-3,
            optim="sgd",
        )
        training.train(trainer, still=("lora_A",))
        trained.append(trainer)
    plain, with_liger = ({name: p.detach() for name, p in one.model.named_parameters()} for one in trained)
    mlp = next(module for name, module in trained[1].model.named_modules() if name.endswith(".mlp"))
    assert "Liger" in mlp._get_name()
    assert training.distance(with_liger, plain) < 1e-5
