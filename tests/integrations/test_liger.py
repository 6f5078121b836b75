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
NORMS = {"rms_norm": False, "layer_norm": False}
GATES = {"swiglu": False, "geglu": False}


def test_norms_and_experts_keep_isopos_layers_and_a_backward_in_place_is_not_run_twice():
    dense, experts = tiny.model("qwen3"), tiny.model("qwen3_moe")
    given = {"rope": True, "rms_norm": False}
    assert liger.kernels(dense, given) == {"rope": True, **NORMS} and given == {"rope": True, "rms_norm": False}
    assert liger.kernels(experts, None) == {**NORMS, "swiglu": False}
    for model in (dense, experts):
        assert liger.kernels(model, None, "beta=0.1") == {**NORMS, **GATES}
    with pytest.raises(ValueError, match=r"asks for swiglu, whose backward works in place.*with beta=0\.1"):
        liger.kernels(dense, {"swiglu": True}, "beta=0.1")


@pytest.mark.parametrize(("rule", "off"), [("fisher", {**NORMS, **GATES}), ("none", NORMS)])
def test_a_trainer_goes_back_twice_for_terms_beside_a_rule(rule, off, tmp_path):
    trainer = training.build(tmp_path, rule=rule, token_weights="p3o", use_liger_kernel=True)
    found = trainer.args.liger_kernel_config
    assert {name for name in (*NORMS, *GATES) if found.get(name) is False} == set(off)


@pytest.mark.parametrize(
    ("asked", "said"),
    [
        (["rms_norm"], "liger_kernel_config asks for rms_norm.*leave it out"),
        # What TRL refuses is refused first, and in its words
        (["rms_norm", "fused_linear_cross_entropy"], "fused_linear_cross_entropy.*is not supported.*fused LM head"),
    ],
)
def test_a_kernel_in_place_of_a_trained_layer_is_refused(asked, said, tmp_path):
    with pytest.raises(ValueError, match=said):
        training.build(tmp_path, use_liger_kernel=True, liger_kernel_config=dict.fromkeys(asked, True))


@pytest.mark.skipif(not RUNS, reason="needs liger-kernel, and a GPU or TRITON_INTERPRET=1")
@pytest.mark.parametrize("peft", [None, LoraConfig(r=2, target_modules="all-linear")], ids=["full", "lora"])
@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_the_weights_are_those_without_liger(family, peft, tmp_path):
    trained, settings = [], {"learning_rate": 1e-3, "optim": "sgd", "use_cpu": not torch.cuda.is_available()}
    for use in (False, True):
        trainer = training.build(tmp_path, family, options={"peft_config": peft}, use_liger_kernel=use, **settings)
        training.train(trainer, still=("lora_A",))
        trained.append(trainer)
    plain, with_liger = ({name: p.detach() for name, p in one.model.named_parameters()} for one in trained)
    mlp = next(module for name, module in trained[1].model.named_modules() if name.endswith(".mlp"))
    assert "Liger" in mlp._get_name()
    assert training.distance(with_liger, plain) < 1e-5
