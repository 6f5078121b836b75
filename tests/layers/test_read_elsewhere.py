"""A trained parameter that the model also reads past its layer is refused, before its gradient goes wrong."""

import pytest
import torch
from peft import LoraConfig

from isopo_trl import ISOPO
from isopo_trl.layers.read_elsewhere import refuse_readers
from tests import tiny, training


def reading(model, name, read):
    """The model, whose first block adds what is read of a parameter to what it gives."""
    model.get_submodule("model.layers.0").register_forward_hook(
        lambda block, args, output: output + read(model.get_parameter(name)) * 1e-3
    )
    return model


@pytest.mark.parametrize(
    ("rule", "name", "read", "settings"),
    [
        ("fisher", "model.layers.0.self_attn.q_proj.weight", torch.mean, {}),
        ("none", "model.layers.0.self_attn.q_proj.weight", torch.mean, {"gradient_checkpointing": False}),
        ("fig4", "model.layers.1.mlp.down_proj.weight", lambda p: p.t()[0].sum(), {"bf16": True}),  # of a later block
        ("npg", "model.norm.weight", lambda p: p.to(torch.bfloat16).float(), {}),
        ("interacting", "model.embed_tokens.weight", lambda p: p.view(-1)[0], {}),
    ],
    ids=["linear", "without a rule", "transposed", "norm", "embedding"],
)
def test_a_parameter_that_is_read_past_its_layer_is_refused(rule, name, read, settings, tmp_path):
    model = reading(tiny.model("llama"), name, read)
    trainer = training.build(tmp_path, model, rule=rule, **settings)
    before = {name: p.clone() for name, p in model.named_parameters()}
    with pytest.raises(RuntimeError, match=f"{name}: the model reads this not only in the layer"):
        trainer.train()
    assert all(torch.equal(p, before[name]) for name, p in model.named_parameters())


def test_an_adapters_factor_that_is_read_elsewhere_is_refused(tmp_path):
    config = LoraConfig(r=2, target_modules=["q_proj"], init_lora_weights=False)
    trainer = training.build(tmp_path, "llama", options={"peft_config": config})
    reading(trainer.model.get_base_model(), "model.layers.0.self_attn.q_proj.lora_A.default.weight", torch.mean)
    with pytest.raises(RuntimeError, match="q_proj.lora_A.default.weight: the model reads"):
        trainer.train()


def test_all_parameters_are_found_and_a_few_named(tmp_path):
    model = tiny.model("llama")
    trained = [name for name, _ in model.named_parameters()]
    for name in trained:
        reading(model, name, torch.mean)
    with pytest.raises(RuntimeError, match=f"weight and {len(trained) - 8} more: the model reads this"):
        training.build(tmp_path, model).train()


def test_a_parameter_that_the_model_does_not_name_is_told_by_its_shape():
    weight = torch.nn.Parameter(torch.ones(3, 2))
    model, rows = torch.nn.Sequential(torch.nn.Linear(2, 3, bias=False)), torch.ones(1, 2, 2)
    model[0].weight = weight
    with ISOPO(model).microbatch(torch.ones(1), attention_mask=torch.ones(1, 2)):
        loss = (model(rows) + weight.mean()).sum()
        with pytest.raises(RuntimeError, match=r"^a parameter of shape \[3, 2\]: the model reads"):
            refuse_readers(loss, torch.nn.Linear(2, 3))  # as under FSDP2, which exchanges parameters
        loss.backward()


@pytest.mark.parametrize("tied", [False, True])
def test_what_is_detached_or_frozen_or_another_layers_may_be_read(tied, tmp_path):
    model = tiny.model("llama", tie=tied)
    model.model.layers[1].requires_grad_(False)
    reading(model, "model.layers.0.self_attn.q_proj.weight", lambda p: p.detach().mean())
    reading(model, "model.layers.1.self_attn.q_proj.weight", torch.mean)
    training.train(training.build(tmp_path, model))
