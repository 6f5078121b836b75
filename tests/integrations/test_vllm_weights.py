"""The trainer's weights are vLLM's where its layout allows it: what either reads is what the other has written."""

import copy
import logging

import pytest
import torch
from safetensors import safe_open
from torch import nn
from transformers import AutoModelForCausalLM

from isopo_trl.integrations import vllm_weights
from isopo_trl.integrations.vllm_weights import Apart, OneCopy, verify, views
from isopo_trl.narrow_weights.optimizers import NarrowAdamW, NarrowSGD
from isopo_trl.step_size.taken_back import way_back_of
from tests import tiny, training


STACKED = {"qkv_proj": ["q_proj", "k_proj", "v_proj"], "gate_up_proj": ["gate_proj", "up_proj"]}
PADDED = 64  # vocabularies, to a multiple
NORM, EMBEDDING = "model.norm.weight", "model.embed_tokens.weight"
QKV, DOWN = "model.layers.0.self_attn.qkv_proj.weight", "model.layers.0.mlp.down_proj.weight"


class Engine:
    """Memory in vLLM's layout: matrices one above the other, and rows of padding below the embedding."""

    def __init__(self, model: nn.Module):
        self.model = model
        self.sent: list[str] = []
        self.resets = 0
        own, self.memory, self.places = self.own(), {}, {}
        for name, p in own.items():
            path, module, leaf = name.rsplit(".", 2) if name.count(".") > 1 else ("", *name.split("."))
            whole = next((whole for whole, parts in STACKED.items() if module in parts), None)
            if whole is None:
                rows = -len(p) % PADDED if "embed" in name or "lm_head" in name else 0
                self.memory[name] = torch.cat([torch.empty_like(p), p.new_zeros(rows, *p.shape[1:])]).detach()
                self.places[name] = self.memory[name][: len(p)]
                continue
            parts = [own[f"{path}.{part}.{leaf}"] for part in STACKED[whole]]
            stack = f"{path}.{whole}.{leaf}"
            if stack not in self.memory:
                self.memory[stack] = torch.cat([torch.empty_like(part) for part in parts]).detach()
            start = sum(map(len, parts[: STACKED[whole].index(module)]))
            self.places[name] = self.memory[stack][start : start + len(p)]

    def own(self):
        return dict(self.model.named_parameters())

    def theirs(self):
        return self.memory

    def stacked(self):
        return STACKED

    def load(self, name, values):
        self.sent.append(name)
        self.places[name].copy_(values)

    def weights_have_changed(self):
        self.resets += 1

    def send_by(self, stand_in):
        self.after_a_step = lambda: stand_in(self.send)

    def send(self):
        for name, p in self.own().items():
            self.load(name, p.detach())
        self.weights_have_changed()


def contents(model):
    return {name: p.detach().clone() for name, p in model.named_parameters()}


def assert_equal(one, other):
    assert one.keys() == other.keys()
    for name in one:
        assert torch.equal(one[name], other[name]), name


def backward(model, number=0):
    model.zero_grad()
    ids = torch.randint(9, 90, (2, 12), generator=torch.Generator().manual_seed(number))
    model(input_ids=ids, labels=ids).loss.backward()


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3"])
@pytest.mark.parametrize("tie", [False, True])
def test_each_parameter_is_a_part_of_vllms_memory_and_stays_the_object_and_the_values_that_it_was(family, tie):
    model = tiny.model(family, tie=tie, dtype=torch.bfloat16)
    objects, before = list(model.parameters()), contents(model)
    vllm = Engine(model)
    OneCopy(vllm)
    assert all(one is other for one, other in zip(model.parameters(), objects, strict=True))
    assert_equal(contents(model), before)
    assert_equal(vllm.places, before)
    model.get_output_embeddings().weight.data.fill_(3)  # either way
    assert bool((vllm.places["model.embed_tokens.weight" if tie else "lm_head.weight"] == 3).all())
    vllm.places["model.layers.1.self_attn.v_proj.weight"].fill_(5)
    assert bool((model.model.layers[1].self_attn.v_proj.weight == 5).all())
    padding = vllm.memory["model.embed_tokens.weight"][model.config.vocab_size :]
    assert len(padding) and not padding.any()


KINDS = {
    "sgd": lambda weights: torch.optim.SGD(weights, lr=0.1, momentum=0.9),
    "adamw": lambda weights: torch.optim.AdamW(weights, lr=0.1),
    "fused": lambda weights: torch.optim.AdamW(weights, lr=0.1, fused=True),
    "stochastic": lambda weights: NarrowSGD(weights, lr=0.1, updates="stochastic"),
    "exact": lambda weights: NarrowAdamW(weights, lr=0.1, updates="exact"),
}


@pytest.mark.parametrize("kind", KINDS)
def test_vllm_has_the_weights_of_every_step_also_of_one_taken_back_and_they_are_those_of_a_model_apart(kind):
    model = tiny.model("qwen2", dtype=torch.bfloat16)
    apart = copy.deepcopy(model)
    vllm = Engine(model)
    OneCopy(vllm)
    vllm.sent.clear()
    for network in (model, apart):
        optimizer = KINDS[kind](list(network.parameters()))
        way_back = way_back_of(optimizer)
        for number in range(3):
            backward(network, number)
            way_back.remember()
            if number == 1:
                way_back.move(1.0)  # tried, or made
                optimizer.step() if not hasattr(way_back, "squares") else None
                way_back.move(0.0)
            else:
                optimizer.step()
            way_back.settle()
            if network is model:
                vllm.after_a_step()
                assert_equal(vllm.places, contents(model))
    assert_equal(vllm.places, contents(apart))
    assert not vllm.sent and vllm.resets == 3


def test_weights_that_somebody_has_put_elsewhere_are_sent_and_that_is_said_once(caplog):
    model = tiny.model("llama", dtype=torch.bfloat16)
    vllm = Engine(model)
    OneCopy(vllm)
    moved = model.model.layers[0].mlp.up_proj
    moved.weight.data = moved.weight.data + 1
    with caplog.at_level(logging.WARNING):
        for _ in range(2):
            model.model.norm.weight.data.add_(1)
            vllm.after_a_step()
            assert_equal(vllm.places, contents(model))
    (said,) = caplog.messages
    assert "1 parameters have been given other memory" in said and "mlp.up_proj.weight" in said


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda m: m.update({NORM: m[NORM].float()}), "the type of .*bfloat16, and torch.float32 in vLLM"),
        (lambda m: m.update({QKV: m[QKV][:-8]}), r"rows in vLLM, and \d+ \+ \d+ \+ \d+ here"),
        (lambda m: m.update({DOWN: m[DOWN][:, 1:]}), "the shape of .*down_proj"),
        (lambda m: m.update({DOWN: m[DOWN].mT.contiguous().mT}), "another order in memory"),
        (lambda m: m.pop(NORM), "vLLM has no model.norm.weight"),
        (lambda m: m.update({"model.scale": torch.ones(1)}), "the model has no model.scale"),
        (lambda m: m.update({EMBEDDING: m[EMBEDDING][:50]}), "the shape of .*embed_tokens"),
    ],
    ids=["type", "part of a matrix", "columns", "order", "none", "one more", "a smaller vocabulary"],
)
def test_a_layout_that_is_another_leaves_the_model_its_own_weights_and_says_why(change, reason):
    model = tiny.model("llama", dtype=torch.bfloat16)
    vllm, places = Engine(model), {name: p.data_ptr() for name, p in model.named_parameters()}
    change(vllm.memory)
    with pytest.raises(Apart, match=reason):
        OneCopy(vllm)
    assert places == {name: p.data_ptr() for name, p in model.named_parameters()}


@pytest.mark.parametrize("biases", ["zero", "random"])
def test_what_vllm_loads_in_another_order_is_not_taken_for_the_same_whatever_the_values(biases):
    model = tiny.model("qwen2", dtype=torch.bfloat16)
    attention = model.model.layers[0].self_attn
    if biases == "zero":  # all alike
        for projection in (attention.q_proj, attention.k_proj, attention.v_proj):
            nn.init.zeros_(projection.bias)
    k, v = (f"model.layers.0.self_attn.{name}.bias" for name in ("k_proj", "v_proj"))
    vllm = Engine(model)
    vllm.places[k], vllm.places[v] = vllm.places[v], vllm.places[k]
    with pytest.raises(Apart, match=r"vLLM loads .*k_proj\.bias in an order of its own"):
        OneCopy(vllm)

    square = torch.randn(8, 8)
    with pytest.raises(Apart, match="in an order of its own"):
        memory = {"weight": torch.empty(8, 8)}
        own = {"weight": square}
        verify(own, views(own, memory, {}), lambda name, values: memory[name].copy_(values.mT))
    two = {"one": square, "two": square + 1}
    memory = {name: torch.empty(8, 8) for name in two}
    with pytest.raises(Apart, match="vLLM loads another parameter where one is"):
        parts = views(two, memory, {})
        verify(two, parts, lambda name, values: [memory[each].copy_(values) for each in {name, "one"}])


@pytest.mark.parametrize("tie", [False, True])
def test_a_checkpoint_of_shared_weights_is_that_of_a_model_apart_and_is_loaded_into_vllms_memory(tmp_path, tie):
    model = tiny.model("qwen2", tie=tie, dtype=torch.bfloat16)
    model.save_pretrained(tmp_path / "apart", max_shard_size="6KB")
    expected = contents(model)
    vllm = Engine(model)
    OneCopy(vllm)
    model.save_pretrained(tmp_path / "shared", max_shard_size="6KB")
    files = {path.name: path.read_bytes() for path in (tmp_path / "apart").iterdir()}
    assert len(files) > 4  # shards
    assert files == {path.name: path.read_bytes() for path in (tmp_path / "shared").iterdir()}
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "shared", dtype="auto")
    assert_equal(contents(again), expected)
    torch.save(model.state_dict(), tmp_path / "state.pt")
    with torch.no_grad():
        for p in model.parameters():
            p.zero_()
    model.load_state_dict(torch.load(tmp_path / "state.pt"))
    vllm.sent.clear()
    vllm.after_a_step()
    assert_equal(vllm.places, expected)
    assert not vllm.sent
    assert_equal(contents(copy.deepcopy(model)), expected)


def test_a_trainer_saves_resumes_and_ends_in_the_weights_of_a_run_apart(tmp_path):
    settings = {"bf16_updates": "exact", "optim": "adamw_torch", "target_kl": 1e-3, "max_steps": 3, "temperature": 0.7}

    def trainer(folder, **others):
        return training.build(
            tmp_path / folder,
            tiny.model("qwen2", dtype=torch.bfloat16),
            **{**settings, "save_strategy": "no", **others},
        )

    apart = trainer("apart")
    apart.train()
    saving = trainer("shared", save_strategy="steps", save_steps=2)
    OneCopy(Engine(saving.model))
    saving.train()
    assert_equal(contents(saving.model), contents(apart.model))
    resumed = trainer("shared")
    vllm = Engine(resumed.model)
    OneCopy(vllm)
    vllm.sent.clear()
    resumed.train(resume_from_checkpoint=str(tmp_path / "shared" / "checkpoint-2"))
    vllm.after_a_step()
    assert_equal(vllm.places, contents(apart.model))
    assert not vllm.sent
    resumed.save_model(str(tmp_path / "last"))
    with safe_open(tmp_path / "last" / "model.safetensors", "pt") as file:
        assert_equal({name: file.get_tensor(name) for name in file.keys()}, contents(apart.model))  # noqa: SIM118


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"vllm_enable_sleep_mode": True}, "vllm_enable_sleep_mode=True lets vLLM drop its weights"),
        ({"vllm_tensor_parallel_size": 2}, "vllm_tensor_parallel_size=2 it has a part of each matrix"),
        ({}, "the type of"),
    ],
)
def test_what_keeps_weights_apart_is_said_once(tmp_path, caplog, changes, reason):
    trainer = training.build(tmp_path, tiny.model("llama", dtype=torch.bfloat16), bf16_updates="exact")
    for name, value in changes.items():
        setattr(trainer.args, name, value)
    vllm = Engine(tiny.model("llama"))
    vllm.model = trainer.model
    with caplog.at_level(logging.WARNING):
        assert vllm_weights.share(trainer, vllm) is None
    (said,) = caplog.messages
    assert said.startswith("vLLM has a copy of the weights of its own") and reason in said
