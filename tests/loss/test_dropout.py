"""Whatever a model drops at random is found, and named with the setting that turns it off."""

import pytest
from peft import LoraConfig, get_peft_model
from torch import nn
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

from isopo_trl.loss.dropout import noise_of_ratios
from tests import tiny, training


def llama(**settings):
    return LlamaForCausalLM(LlamaConfig(**tiny.SIZE, **tiny.IDS, **settings))


def test_dropout_of_modules_of_lora_and_of_attention_is_named_with_what_turns_it_off():
    said = noise_of_ratios(get_peft_model(llama(), LoraConfig(r=2, lora_dropout=0.05, target_modules=["q_proj"])))
    assert "layers.0.self_attn.q_proj.lora_dropout.default with p=0.05, " in said and "more" not in said
    assert "disable_dropout=True (or lora_dropout=0.0 in the peft_config)." in said
    said = noise_of_ratios(llama(attention_dropout=0.1))
    assert "model.layers.1.self_attn.attention_dropout with p=0.1)" in said
    assert said.endswith("set model_init_kwargs={'attention_dropout': 0.0}, which disable_dropout does not reach.")
    said = noise_of_ratios(GPT2LMHeadModel(GPT2Config(**{**tiny.GPT2, "resid_pdrop": 0.2}, **tiny.IDS)))
    assert "transformer.h.0.attn.resid_dropout with p=0.2, " in said and "and 1 more)" in said
    assert said.endswith("set disable_dropout=True.")


def test_nothing_is_said_of_a_model_that_drops_nothing():
    assert noise_of_ratios(get_peft_model(llama(), LoraConfig(r=2))) is None
    assert noise_of_ratios(nn.Sequential(nn.Dropout(0.0), nn.Linear(2, 2))) is None


DROPS = {"peft_config": LoraConfig(r=2, lora_dropout=0.05, target_modules=["q_proj"])}


@pytest.mark.parametrize(
    ("settings", "warned"),
    [
        ({"epsilon": 0.2, "num_iterations": 2}, True),
        ({"token_weights": "sampler", "top_p": 0.9}, True),
        ({"target_kl": 1e-3, "num_iterations": 2}, True),  # whose bound on the drift goes by the ratio
        ({"epsilon": 0.2}, False),  # of the policy itself, to which the ratio is 1 by definition
        ({"num_iterations": 2}, False),  # nobody looks at a ratio
        ({"epsilon": 0.2, "num_iterations": 2, "disable_dropout": True}, False),
    ],
)
def test_a_trainer_warns_of_dropout_where_something_goes_by_the_ratio_to_the_sampler(
    settings, warned, tmp_path, caplog
):
    training.build(tmp_path, "llama", options=DROPS, **settings)
    assert ("drops activations at random" in caplog.text) == warned
