"""The projection `<V_s, D>` on a direction that is held, of every kind of layer: gradients of single sequences by
autograd, in float64, times D."""

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import nn

import isopo_trl.layers.linear
import isopo_trl.layers.lm_head
from isopo_trl import ISOPO
from isopo_trl.geometry import cost
from isopo_trl.layers import Layer, register_layer, registry, rescaled_linear
from isopo_trl.microbatch import Microbatch
from tests import oracle, tiny, training
from tests.layers import harness
from tests.layers.harness import LAYERS, MASK, PACKED, B, Holder, T


pytestmark = pytest.mark.usefixtures("float64_throughout")
TARGETS = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj", "mlp.router.weight"]


def random_direction(model, seed=5):
    generator = torch.Generator().manual_seed(seed)
    named = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
    return {name: torch.randn(p.shape, generator=generator, dtype=torch.float64) for name, p in named}


def check(isopo, model, direction, gradients):
    """`gradients[s]`: of each trained parameter, sequence s alone, by name; both uses of a tied weight have one D."""
    uses = {}
    for layer in isopo.layers:
        of_layer = [isopo.projections()[name] for name in layer.entry_names()]
        parameters = tuple(holder.get_parameter(own) for holder, own in layer.places)
        uses.setdefault(parameters, []).append(torch.stack(of_layer).sum(0))
        if layer.kind == "experts" and len(parameters[0]) == len(of_layer):  # each expert by itself
            names = [name for name, p in model.named_parameters() if any(p is q for q in parameters)]
            own = [sum((g[n].flatten(1) * direction[n].flatten(1)).sum(1) for n in names) for g in gradients]
            torch.testing.assert_close(torch.stack(of_layer), torch.stack(own, 1), rtol=1e-9, atol=1e-11)
    for parameters, found in uses.items():
        names = [name for name, p in model.named_parameters() if any(p is q for q in parameters)]
        expected = torch.stack([sum((g[n] * direction[n]).sum() for n in names) for g in gradients])
        assert expected.abs().max() > 1e-6, names
        torch.testing.assert_close(sum(found), expected, rtol=1e-9, atol=1e-11, msg=lambda m, n=names: f"{n}: {m}")


# Each kind alone


@pytest.mark.parametrize("packed", [False, True], ids=["padded", "packed"])
@pytest.mark.parametrize("name", LAYERS)
def test_a_layer_projects_each_sequence_on_the_direction(name, packed):
    layer = harness.build(name)
    x, m = harness.inputs_of(layer, B, T), 5 if packed else B
    ids = PACKED if packed else torch.where(MASK != 0, torch.arange(B).unsqueeze(1), -1)
    cotangent = torch.randn(layer(x).shape, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    trained = {name: p for name, p in layer.named_parameters() if p.requires_grad}
    gradients = []
    for s in range(m):
        mine = torch.where((ids == s).unsqueeze(-1), cotangent, 0)
        found = torch.autograd.grad(layer(x), list(trained.values()), mine)
        gradients.append({f"layer.{name}": g for name, g in zip(trained, found, strict=True)})
    model = Holder(layer)
    isopo, direction = ISOPO(model, "none"), random_direction(model)
    isopo.hold(direction)
    where = {"sequence_ids": PACKED} if packed else {"attention_mask": MASK}
    with isopo.microbatch(torch.ones(m, dtype=torch.float64), **where):
        model(x).backward(torch.where((ids >= 0).unsqueeze(-1), cotangent, 0))
    check(isopo, model, direction, gradients)


# Whole models


def by_sequence(model, batch, weights):
    """The gradient of each sequence's loss, by parameter: each alone, without padding."""
    result = []
    P = batch.prompt_ids.shape[1]
    for s in range(len(weights)):
        columns = batch.attention_mask[s].nonzero().squeeze(1)
        ids = batch.input_ids[s : s + 1, columns]
        logits = model(input_ids=ids, position_ids=columns.unsqueeze(0), use_cache=False).logits[0, :-1]
        logps = logits.log_softmax(-1).gather(1, ids[0, 1:, None]).squeeze(1)
        scored = columns[1:] >= P
        named = {name: p for name, p in model.named_parameters() if p.requires_grad}
        loss = -(logps[scored] * weights[s, columns[1:][scored] - P]).sum()
        gradients = torch.autograd.grad(loss, list(named.values()), allow_unused=True)
        pairs = zip(named.items(), gradients, strict=True)
        result.append({name: torch.zeros_like(p) if g is None else g for (name, p), g in pairs})
    return result


def adapted(model, **settings):
    model = get_peft_model(model, LoraConfig(r=2, lora_alpha=8, **settings)).to(torch.float64)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for p in model.parameters():
            if p.requires_grad:  # B starts at zero; here both factors have a gradient
                p.copy_(torch.randn(p.shape, generator=generator, dtype=torch.float64) * 0.3)
    return model


def batch():
    return oracle.random_batch([3, 1, 5, 4], [6, 8, 1, 4], 100)


@pytest.mark.parametrize(
    ("family", "lora", "settings"),
    [
        ("gpt2", None, {"rule": "interacting"}),  # tied, and the head by tiles; biases, Conv1D
        ("qwen3", None, {"rule": "none", "gradient_checkpointing": True}),
        ("qwen2", {"target_modules": "all-linear"}, {"rule": "fisher", "gradient_checkpointing": True}),
    ],
    ids=["full", "reentrant checkpointing", "LoRA, checkpointing"],
)
def test_a_model_under_the_trainer_projects_each_sequence(family, lora, settings, tmp_path, monkeypatch):
    monkeypatch.setattr(isopo_trl.layers.lm_head, "_TILE", 23 * 10)  # several tiles, the last one narrower
    model, data = tiny.model(family, dtype=torch.float64), batch()
    model = model if lora is None else adapted(model, **lora)
    signs = data.advantages.sign().unsqueeze(1)
    gradients = by_sequence(model, data, signs * oracle.token_weights(data))
    kwargs = {"use_reentrant": family == "qwen3"}
    settings = {"gradient_checkpointing": False, "gradient_checkpointing_kwargs": kwargs, **settings}
    sizes = {"per_device_train_batch_size": 4, "num_generations": 4, "max_completion_length": 8}
    trainer = training.prepared(training.build(tmp_path, model, data=tiny.prompts(4), **settings, **sizes))
    if settings["gradient_checkpointing"]:
        trainer.model.gradient_checkpointing_enable(kwargs)
        trainer.model.enable_input_require_grads()
    direction = random_direction(trainer.model)
    trainer.isopo.hold(direction)
    trainer.compute_loss(trainer.model, data.for_trl()).backward()
    trainer.isopo.end()
    check(trainer.isopo, trainer.model, direction, gradients)


@pytest.mark.parametrize("lora", [None, {"target_modules": ["o_proj"], "target_parameters": TARGETS}], ids=str)
def test_experts_routers_and_modules_of_no_kind_project_each_sequence(lora):
    """The experts have biases and transposed stacks, and attention has sinks."""
    model, data = tiny.model("gpt_oss", dtype=torch.float64), batch()
    model = model if lora is None else adapted(model, **lora)
    weights = oracle.token_weights(data)
    gradients = by_sequence(model, data, weights)
    isopo, direction = ISOPO(model, "none"), random_direction(model)
    isopo.hold(direction)
    with isopo.microbatch(data.advantages, attention_mask=data.attention_mask):
        (-(oracle.token_logps(model, data) * weights).sum()).backward()
    check(isopo, model, direction, gradients)


@pytest.mark.parametrize("strategy", ["whole", "blocks"])
def test_every_strategy_has_the_same_projection(strategy, monkeypatch):
    monkeypatch.setattr(isopo_trl.layers.linear, "choose_strategy", lambda *_: strategy)
    monkeypatch.setattr(cost, "WHOLE_LIMIT", 40)  # blocks of one row
    for name in ("linear", "wide linear without bias", "Conv1D"):
        test_a_layer_projects_each_sequence_on_the_direction(name, packed=True)


class Product(nn.Module):
    def __init__(self):
        super().__init__()
        self.kernel = nn.Parameter(torch.randn(harness.D, 3, dtype=torch.float64))

    def forward(self, x):
        return x @ self.kernel


def test_a_layer_of_ones_own_that_projects_nothing_is_noticed_in_the_first_backward(monkeypatch):
    monkeypatch.setattr(Microbatch, "note_parameters", lambda *_: None)  # as if it did not know of it
    model = Holder(nn.Linear(3, 2))
    isopo = ISOPO(model, "spring")
    with pytest.raises(RuntimeError, match="`microbatch.note_parameters`"):
        with isopo.microbatch(torch.ones(B), attention_mask=MASK):
            model(torch.randn(B, T, 3)).sum().backward()


@pytest.mark.parametrize("cast", [False, True])
def test_a_layer_of_ones_own_sees_the_direction_as_it_sees_its_weight(cast, monkeypatch):
    monkeypatch.setattr(registry, "_REGISTERED", {})

    @register_layer
    class ProductLayer(Layer):
        kind = "product"

        @classmethod
        def accepts(cls, module, trainable):
            return type(module) is Product

        def forward(self, module, microbatch, x):
            weight = module.kernel.t()
            return rescaled_linear(x, weight * 1 if cast else weight, None, self, microbatch)

    monkeypatch.setitem(LAYERS, "own", Product)
    if cast:
        with pytest.raises(RuntimeError, match="no view of its parameter"):
            test_a_layer_projects_each_sequence_on_the_direction("own", packed=False)
    else:
        test_a_layer_projects_each_sequence_on_the_direction("own", packed=False)


# What is refused


def test_a_direction_that_does_not_fit_is_refused_by_name():
    model = Holder(nn.Linear(3, 2))
    isopo = ISOPO(model, "none")
    for direction, named in (
        ({"layer.kernel": torch.zeros(2, 3)}, "'layer.kernel', which is no trained parameter"),
        ({"layer.weight": torch.zeros(3, 2)}, r"'layer.weight'.*shape \[2, 3\], got torch.float.* of shape \[3, 2\]"),
        ({"layer.bias": [0.0, 0.0]}, "got list"),
    ):
        with pytest.raises(ValueError, match=named):
            isopo.hold(direction)
    with pytest.raises(ValueError, match="rule='proma' has a direction of its own"):
        ISOPO(Holder(nn.Linear(3, 2)), "proma").hold({})
    with isopo.microbatch(torch.ones(3), attention_mask=MASK):
        model(torch.randn(B, T, 3)).sum().backward()
    with pytest.raises(RuntimeError, match="call `hold` before"):
        isopo.projections()
