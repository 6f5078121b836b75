"""Mixtures of experts against the oracle: every expert's matrices and the router, in float64."""

import functools
from types import SimpleNamespace

import pytest
import torch
from peft import LoraConfig, get_peft_model
from peft.tuners.lora.layer import ParamWrapper
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint
from transformers import GptOssConfig, Llama4TextConfig, MixtralConfig
from transformers.integrations.moe import use_experts_implementation
from transformers.models.gpt_oss.modeling_gpt_oss import GptOssExperts
from transformers.models.llama4.modeling_llama4 import Llama4TextExperts
from transformers.models.mixtral.modeling_mixtral import MixtralExperts

from isopo_trl import ISOPO
from isopo_trl.geometry.routing import Routing
from tests import oracle, tiny
from tests.gradients import mixtures
from tests.layers.harness import Holder


pytestmark = pytest.mark.usefixtures("float64_throughout")
BATCH = functools.partial(oracle.random_batch, [3, 1, 5, 4], [6, 8, 1, 4], 100)
TOLERANCE = 1e-9
RULES = ["fisher", "fig4", "interacting", "none"]
# LoRA on bare parameters
ALL_OF_GPT_OSS = ("mlp.experts.gate_up_proj", "mlp.experts.down_proj", "mlp.router.weight")
TARGETS = {
    "mixtral": ("mlp.experts.gate_up_proj", "mlp.experts.down_proj", "mlp.gate.weight"),
    "gpt_oss": ALL_OF_GPT_OSS,
    "deepseek_v3": ("mlp.experts.down_proj", "mlp.gate.weight"),
}


def adapted(*targets):
    """LoRA on the parameters that are named, and on the attention; `None` for none."""
    return {"target_modules": ["o_proj"], "target_parameters": list(targets)} if targets else None


def build(family, lora=None):
    model = tiny.model(family, dtype=torch.float64)
    if lora is not None:
        model = get_peft_model(model, LoraConfig(r=2, lora_alpha=8, **lora)).to(torch.float64)
        generator = torch.Generator().manual_seed(1)
        with torch.no_grad():
            for name, p in model.named_parameters():
                if "lora_" in name:  # B starts at zero; here both factors have a gradient
                    p.copy_(torch.randn(p.shape, generator=generator, dtype=torch.float64) * 0.3)
        return model
    for name, p in model.named_parameters():
        if "sinks" in name:  # another kind of layer
            p.requires_grad_(False)
    return model


@functools.cache
def reference(family, *targets):
    model, batch = build(family, adapted(*targets)), BATCH()
    return mixtures.position_gradients(model, batch, oracle.token_weights(batch))


def backward(model, batch, isopo):
    """A microbatch without the trainer; returns the sampled rows."""
    weights = oracle.token_weights(batch)
    with isopo.microbatch(batch.advantages, attention_mask=batch.attention_mask) as microbatch:
        positions = torch.arange(batch.input_ids.shape[1]).unsqueeze(0)
        output = model(batch.input_ids, attention_mask=batch.attention_mask, position_ids=positions, use_cache=False)
        logps = output.logits[:, :-1].log_softmax(-1).gather(-1, batch.input_ids[:, 1:, None]).squeeze(-1)
        (-(logps[:, -weights.shape[1] :] * weights).sum()).backward()
    samples = microbatch.samples
    return None if samples is None else samples.rows[~samples.absent]


def check(model, expected):
    error, where = mixtures.worst_error(model, expected)
    assert error < TOLERANCE, f"{where}: {error}"


def cases(families, quick):
    """Every family with every rule; all but the `quick` ones are slow."""
    return [
        pytest.param(family, rule, marks=[] if (family, rule) in quick else pytest.mark.slow, id=f"{family}-{rule}")
        for family in families
        for rule in RULES
    ]


QUICK = [("gpt_oss", rule) for rule in RULES]
QUICK += [("mixtral", "interacting"), ("qwen3_moe", "fisher"), ("glm4_moe", "fig4"), ("deepseek_v3", "fisher")]


@pytest.mark.parametrize("family,rule", cases(["mixtral", "qwen3_moe", "gpt_oss", "glm4_moe", "deepseek_v3"], QUICK))
def test_every_expert_and_router_has_the_gradient_of_the_definition(family, rule):
    model, batch = build(family), BATCH()
    rows = backward(model, batch, ISOPO(model, rule, fisher_samples=7))
    check(model, mixtures.expected_gradients(model, reference(family), batch, rows, rule))


@pytest.mark.parametrize(
    "family,rule", cases(TARGETS, [("gpt_oss", "fisher"), ("gpt_oss", "fig4"), ("mixtral", "interacting")])
)
def test_lora_on_every_expert_and_router_has_the_gradient_of_the_definition(family, rule):
    batch, targets = BATCH(), TARGETS[family]
    model = build(family, adapted(*targets))
    rows = backward(model, batch, ISOPO(model, rule, fisher_samples=7))
    check(model, mixtures.expected_gradients(model, reference(family, *targets), batch, rows, rule))


def test_factors_in_the_layout_of_older_peft_have_the_gradient_of_the_definition(monkeypatch):
    """Before 0.19, PEFT took every stack for one of transposed matrices."""
    update = ParamWrapper.update_layer

    def update_layer(self, *args, **kwargs):
        self._did_swap_in_out_features = True  # what keeps it from looking
        update(self, *args, **kwargs)
        self._did_swap_in_out_features = False

    monkeypatch.setattr(ParamWrapper, "update_layer", update_layer)
    model, batch = build("mixtral", adapted("mlp.experts.gate_up_proj")), BATCH()
    A = model.get_parameter("base_model.model.model.layers.0.mlp.experts.lora_A.default.weight")
    assert A.shape == (2 * 4, 64)  # the outputs of the stack
    G = mixtures.position_gradients(model, batch, oracle.token_weights(batch))
    model.zero_grad()
    rows = backward(model, batch, ISOPO(model, fisher_samples=7))
    check(model, mixtures.expected_gradients(model, G, batch, rows))


@pytest.mark.parametrize("implementation", ["batched_mm", "grouped_mm"])
def test_every_implementation_has_the_gradient_of_the_definition(implementation):
    model, batch = build("gpt_oss"), BATCH()
    model.set_experts_implementation(implementation)
    rows = backward(model, batch, ISOPO(model, fisher_samples=7))
    check(model, mixtures.expected_gradients(model, reference("gpt_oss"), batch, rows))


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("targets", [(), ALL_OF_GPT_OSS], ids=["full", "lora"])
def test_gradient_checkpointing_changes_nothing(targets, reentrant):
    model, batch = build("gpt_oss", adapted(*targets)), BATCH()
    model.gradient_checkpointing_enable({"use_reentrant": reentrant})
    model.enable_input_require_grads()
    rows = backward(model.train(), batch, ISOPO(model, fisher_samples=7))
    check(model, mixtures.expected_gradients(model, reference("gpt_oss", *targets), batch, rows))


@pytest.mark.parametrize("rule", ["fisher", pytest.param("fig4", marks=pytest.mark.slow), "interacting"])
def test_packed_sequences_are_told_apart_at_every_expert(rule):
    """All sequences in one row behind each other, some padding between them."""
    model, batch = build("mixtral"), BATCH()
    weights, P = oracle.token_weights(batch), batch.prompt_ids.shape[1]
    columns = [row.nonzero().squeeze(1) for row in batch.attention_mask]
    pad = torch.full((2,), -1)
    sequence_ids = torch.cat([torch.cat([torch.full_like(c, s), pad]) for s, c in enumerate(columns)])
    ids = torch.cat([torch.cat([batch.input_ids[s, c], 0 * pad]) for s, c in enumerate(columns)])
    positions = torch.cat([torch.cat([c, 0 * pad]) for c in columns])
    scored = torch.zeros(len(ids), dtype=torch.float64)
    first = 0
    for s, c in enumerate(columns):
        scored[first : first + len(c)] = torch.nn.functional.pad(weights[s], (P, 0))[c]
        first += len(c) + len(pad)
    same = (sequence_ids.unsqueeze(0) == sequence_ids.unsqueeze(1)).tril()
    mask = torch.zeros(same.shape, dtype=torch.float64).masked_fill(~same, torch.finfo(torch.float64).min)
    isopo = ISOPO(model, rule, fisher_samples=10_000)
    with isopo.microbatch(batch.advantages, sequence_ids=sequence_ids.unsqueeze(0)):
        logits = model(ids.unsqueeze(0), attention_mask=mask[None, None], position_ids=positions.unsqueeze(0)).logits
        logps = logits[0, :-1].log_softmax(-1).gather(-1, ids[1:, None]).squeeze(-1)
        (-(logps * scored[1:]).sum()).backward()
    check(model, mixtures.expected_gradients(model, reference("mixtral"), batch, None, rule))


@pytest.mark.parametrize("targets", [(), ALL_OF_GPT_OSS], ids=["full", "lora"])
def test_an_expert_that_no_sample_was_sent_to_gets_the_mean_multiplier(targets):
    model, batch = build("gpt_oss", adapted(*targets)), BATCH()
    isopo = ISOPO(model, fisher_samples=1)
    rows = backward(model, batch, isopo)
    check(model, mixtures.expected_gradients(model, reference("gpt_oss", *targets), batch, rows))
    stacks = {name: f for name, f in isopo.multipliers().items() if "experts" in name}
    plain = [name for name, f in stacks.items() if torch.equal(f, torch.ones_like(f))]
    assert len(plain) >= len(stacks) // 2 and len(plain) < len(stacks)  # one sample goes to two experts of four


def test_an_expert_without_tokens_keeps_its_history():
    """Four steps with running means; one expert is first chosen in the second, another not in the third."""
    model, means = build("gpt_oss"), {}
    isopo = ISOPO(model, fisher_samples=10_000)
    for step, absent in enumerate([3, None, 0, None]):
        batch = oracle.random_batch([3, 4, 2], [4, 2, 5], 100, seed=step)
        with torch.no_grad():
            for layer in model.model.layers:
                # The last one's is large enough for some position to choose it, whatever the other weights
                layer.mlp.router.bias.copy_(torch.tensor([0.1, 0.2, 0.3, 2.0]))
                if absent is not None:
                    layer.mlp.router.bias[absent] = -1000
        isopo.detach()
        G = mixtures.position_gradients(model, batch, oracle.token_weights(batch))
        for layer in (*isopo.layers, *isopo._shortcuts):
            layer.attach()
        model.zero_grad()
        backward(model, batch, isopo)
        check(model, mixtures.expected_gradients(model, G, batch, None, histories=means))
        if absent is not None:
            assert not model.model.layers[0].mlp.experts.down_proj.grad[absent].any()
        isopo.step()
        means = mixtures.updated_means(model, G, batch, means)
        known = dict(zip(isopo._entry_names, isopo._running.known, strict=True))
        assert known["model.layers.1.mlp.experts.gate_up_proj[3]"] == (step > 0)
    assert len(means) == len(isopo._entry_names)


def test_a_term_without_an_advantage_reaches_experts_and_routers_as_it_is():
    model, plain, batch = build("gpt_oss"), build("gpt_oss"), BATCH()
    isopo = ISOPO(model, fisher_samples=7)

    def run(model, term):
        positions = torch.arange(batch.input_ids.shape[1]).unsqueeze(0)
        logits = model(batch.input_ids, attention_mask=batch.attention_mask, position_ids=positions).logits[:, :-1]
        logps = logits.log_softmax(-1).gather(-1, batch.input_ids[:, 1:, None]).squeeze(-1)
        weights = oracle.token_weights(batch)
        term((logps[:, -weights.shape[1] :].square() * weights).sum())
        return -(logps[:, -weights.shape[1] :] * weights).sum()

    with isopo.microbatch(batch.advantages, attention_mask=batch.attention_mask) as microbatch:
        run(model, isopo.unscaled).backward()
    rows = microbatch.samples.rows
    run(plain, lambda term: term.backward())
    expected = mixtures.expected_gradients(model, reference("gpt_oss"), batch, rows)
    own = {name: p.grad for name, p in plain.named_parameters() if p.requires_grad}
    check(model, {name: gradient + own[name] for name, gradient in expected.items()})


@pytest.mark.parametrize("checkpointed", [False, True], ids=["", "checkpointed"])
@pytest.mark.parametrize("experts", [4, 32])
def test_rows_of_a_term_are_kept_where_they_are_smaller_than_gradients(experts, checkpointed, monkeypatch):
    """Two terms and the loss then share one product per stack."""
    m, T, k, d = 3, 5, 2, 6
    config = GptOssConfig(hidden_size=d, intermediate_size=5, num_local_experts=experts)
    config._experts_implementation = "eager"
    generator = torch.Generator().manual_seed(0)
    model = Holder(GptOssExperts(config).double())
    with torch.no_grad():
        for p in model.parameters():
            p.copy_(torch.randn(p.shape, generator=generator, dtype=torch.float64))
    x, loss, first, second = torch.randn(4, m * T, d, generator=generator, dtype=torch.float64)
    choices = torch.rand(m * T, experts, generator=generator).topk(k).indices
    weights = torch.rand(m * T, k, generator=generator, dtype=torch.float64)
    x.requires_grad_()
    products = []
    outer = Routing.outer
    monkeypatch.setattr(Routing, "outer", lambda *args: products.append(args) or outer(*args))

    def run(*terms):
        model.zero_grad()
        isopo = ISOPO(model, fisher_samples=7)
        with isopo.microbatch(torch.tensor([1.0, -0.5, 2.0]), attention_mask=torch.ones(m, T)):
            arguments = (model, x, choices, weights)
            y = checkpoint(*arguments, use_reentrant=False) if checkpointed else model(*arguments[1:])
            for term in terms:
                isopo.unscaled((y * term).sum())
            y.backward(loss)
        isopo.detach()
        return {name: p.grad for name, p in model.named_parameters()}

    alone = run()
    assert len(products) == 2
    found = run(first, second)
    rows_are_smaller = m * T * k < experts * min(d, 5)
    assert len(products) == (4 if rows_are_smaller else 8)
    model.zero_grad()
    model(x, choices, weights).backward(first + second)
    for name, p in model.named_parameters():
        expected = alone[name] + p.grad
        assert (found[name] - expected).norm() < TOLERANCE * expected.norm(), name


def test_only_some_stacks_or_biases_may_be_trained():
    model, batch = build("gpt_oss"), BATCH()
    for name, p in model.named_parameters():
        p.requires_grad_("down_proj_bias" in name or "gate_up_proj" in name and "bias" not in name)
    G = mixtures.position_gradients(model, batch, oracle.token_weights(batch))
    model.zero_grad()
    isopo = ISOPO(model, "fig4", fisher_samples=7)
    assert {row["kind"] for row in isopo.coverage()} == {"experts"}
    rows = backward(model, batch, isopo)
    check(model, mixtures.expected_gradients(model, G, batch, rows, "fig4"))


@use_experts_implementation(has_gate=False)
class Ungated(torch.nn.Module):
    """Experts without a gate, as NemotronH has them, and with another activation."""

    def __init__(self, config):
        super().__init__()
        self.num_experts, self.act_fn = 5, torch.tanh
        self.up_proj = torch.nn.Parameter(torch.empty(5, 4, 6))
        self.down_proj = torch.nn.Parameter(torch.empty(5, 6, 4))

    def forward(self, hidden_states, top_k_index, top_k_weights):
        rows = [
            sum(w * (self.down_proj[e] @ self.act_fn(self.up_proj[e] @ x)) for e, w in zip(of_x, weights, strict=True))
            for x, of_x, weights in zip(hidden_states, top_k_index, top_k_weights, strict=True)
        ]
        return torch.stack(rows)


class Undescribed(torch.nn.Module):
    """Experts that say nothing of themselves but have the usual stacks, as in Step 3.7."""

    def __init__(self):
        super().__init__()
        self.num_experts = 5
        self.gate_up_proj = torch.nn.Parameter(torch.empty(5, 8, 6))
        self.down_proj = torch.nn.Parameter(torch.empty(5, 6, 4))

    def _apply_gate(self, y):
        gate, up = y.chunk(2, dim=-1)
        return gate.tanh() * up

    def forward(self, hidden_states, top_k_index, top_k_weights):
        rows = [
            sum(
                w * (self.down_proj[e] @ self._apply_gate(self.gate_up_proj[e] @ x))
                for e, w in zip(of_x, weights, strict=True)
            )
            for x, of_x, weights in zip(hidden_states, top_k_index, top_k_weights, strict=True)
        ]
        return torch.stack(rows)


@pytest.mark.parametrize(
    "make",
    [lambda: Ungated(SimpleNamespace(_experts_implementation="eager")), Undescribed],
    ids=["ungated", "undescribed"],
)
def test_experts_of_other_forms_have_the_gradient_of_the_definition(make):
    experts = make().double()
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for p in experts.parameters():
            p.copy_(torch.randn(p.shape, generator=generator, dtype=torch.float64))
    x, cotangent = torch.randn(2, 12, 6, generator=generator, dtype=torch.float64)
    choices = torch.rand(12, 5, generator=generator).topk(2).indices
    weights = torch.rand(12, 2, generator=generator, dtype=torch.float64)
    stacks = list(experts.parameters())
    G = [torch.autograd.grad(experts(x[[t]], choices[[t]], weights[[t]]), stacks, cotangent[[t]]) for t in range(12)]
    isopo, advantages = ISOPO(Holder(experts), fisher_samples=12), torch.tensor([1.0, -0.5, 2.0], dtype=torch.float64)
    with isopo.microbatch(advantages, attention_mask=torch.ones(3, 4)):
        experts(x, choices, weights).backward(cotangent)
    for stack, position in zip(stacks, zip(*G, strict=True), strict=True):
        for e in range(5):
            of_expert = torch.stack(position)[:, e].flatten(1)
            V = of_expert.view(3, 4, -1).sum(1)
            expected = oracle.coefficients(V, of_expert, advantages, "fisher") @ V
            torch.testing.assert_close(stack.grad[e].flatten(), expected, rtol=1e-9, atol=1e-12)


def dense_experts(lora):
    """Llama 4's experts, in PEFT's wrapper or not, and what they are called with: every position at every expert."""
    config = Llama4TextConfig(num_local_experts=3, hidden_size=6, intermediate_size=4)
    model = Holder(Llama4TextExperts(config).double())
    generator = torch.Generator().manual_seed(0)
    if lora:
        targets = ["layer.gate_up_proj", "layer.down_proj"]
        model = get_peft_model(model, LoraConfig(r=2, target_parameters=targets)).double()
    with torch.no_grad():
        for p in model.parameters():
            p.copy_(torch.randn(p.shape, generator=generator, dtype=torch.float64))
    x, cotangent = torch.randn(2, 3, 12, 6, generator=generator, dtype=torch.float64)
    x[torch.rand(3, 12, generator=generator) < 0.5] = 0  # where a position was not sent
    return model, x, cotangent


@pytest.mark.parametrize("packed", [False, True], ids=["padded", "packed"])
@pytest.mark.parametrize("lora", [False, True], ids=["full", "lora"])
def test_experts_that_are_called_with_every_position_have_the_gradient_of_the_definition(lora, packed):
    model, x, cotangent = dense_experts(lora)
    units = mixtures.units(model)
    trained = [p for unit in units.values() for p in unit.parameters.values()]
    labels = torch.cat([unit.labels for unit in units.values()])
    G = []
    for t in range(12):
        gradients = torch.autograd.grad(model(x[:, t]), trained, cotangent[:, t])
        G.append(torch.cat([g.flatten() for g in gradients]))
    G = torch.stack(G)
    ids = torch.tensor([0, 0, 2, 2, 1, 1, 1, -1, 2, 2, 0, 0]) if packed else torch.arange(12) // 4
    where = {"sequence_ids": ids.view(3, 4)} if packed else {"attention_mask": torch.ones(3, 4)}
    isopo, advantages = ISOPO(model, fisher_samples=12), torch.tensor([1.0, -0.5, 2.0], dtype=torch.float64)
    with isopo.microbatch(advantages, **where):
        output = model(x.flatten(0, 1))
        output.backward(cotangent.flatten(0, 1))
    isopo.detach()
    torch.testing.assert_close(output, model(x.flatten(0, 1)), rtol=1e-12, atol=1e-12)
    found = torch.cat([p.grad.flatten() for p in trained])
    for layer in range(len(labels.unique())):
        here = labels == layer
        V = torch.stack([G[ids == s][:, here].sum(0) for s in range(3)])
        expected = oracle.coefficients(V, G[ids >= 0][:, here], advantages, "fisher") @ V
        torch.testing.assert_close(found[here], expected, rtol=1e-9, atol=1e-12)


def test_a_dense_stack_that_gets_other_rows_is_refused():
    model, x, _ = dense_experts(lora=False)
    with (
        pytest.raises(RuntimeError, match="layer got 33 rows, but the microbatch has 12 positions for 3 experts"),
        ISOPO(model).microbatch(torch.ones(3), attention_mask=torch.ones(3, 4)),
    ):
        model(x[:, 1:].flatten(0, 1))


class Operations(TorchDispatchMode):
    """Counts the operations that PyTorch runs."""

    number = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.number += 1
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16], ids=str)
@pytest.mark.parametrize("rule", ["fisher", "fig4", "interacting"])
def test_operations_do_not_grow_with_the_number_of_experts(rule, dtype):
    def count(experts):
        settings = {**tiny.SIZE, **tiny.LOCAL, "num_local_experts": experts}
        model = Holder(MixtralExperts(MixtralConfig(**settings, experts_implementation="grouped_mm")).to(dtype))
        with torch.no_grad():
            for p in model.parameters():
                p.copy_(torch.randn(p.shape, generator=torch.Generator().manual_seed(0)))
        isopo = ISOPO(model, rule)
        generator = torch.Generator().manual_seed(1)
        x = torch.randn(12, 16, generator=generator).to(dtype).requires_grad_()
        choices = torch.rand(12, experts, generator=generator).topk(2).indices
        with isopo.microbatch(torch.ones(3), attention_mask=torch.ones(3, 4)), Operations() as operations:
            model(x, choices, torch.full((12, 2), 0.5, dtype=dtype)).sum().backward()
        return operations.number

    assert count(4) == count(16) == count(64)


def test_bfloat16_is_the_definition_to_its_rounding():
    """With PyTorch's grouped products."""
    torch.manual_seed(0)
    batch, results = BATCH(), []
    for dtype in (torch.float64, torch.bfloat16):
        model = build("mixtral")
        experts = model.model.layers[0].mlp.experts
        isopo = ISOPO(Holder(experts.to(dtype)), "fig4", fisher_samples=20)
        generator = torch.Generator().manual_seed(1)
        x = torch.randn(52, 16, generator=generator, dtype=torch.float64).to(dtype).requires_grad_()
        choices = torch.rand(52, 4, generator=generator).topk(2).indices
        cotangent = torch.randn(52, 16, generator=generator, dtype=torch.float64).to(dtype)
        with isopo.microbatch(batch.advantages, attention_mask=torch.ones(4, 13)):
            Holder(experts)(x, choices, torch.full((52, 2), 0.5, dtype=dtype)).backward(cotangent)
        results.append([experts.gate_up_proj.grad.double(), experts.down_proj.grad.double(), x.grad.double()])
    for exact, rounded in zip(*results, strict=True):
        assert (rounded - exact).norm() < 0.03 * exact.norm()


@pytest.mark.parametrize("implementation", ["eager", "grouped_mm"])
@pytest.mark.parametrize("lora", [False, True], ids=["float32 weights", "float32 factors on bfloat16 weights"])
def test_autocast_to_bfloat16_is_the_definition_to_its_rounding(lora, implementation):
    float32, results = torch.get_default_dtype(), []
    for dtype in (torch.float64, float32):
        experts = build("mixtral").model.layers[0].mlp.experts
        experts.config._experts_implementation = implementation
        model = Holder(experts)
        if lora:
            config = LoraConfig(r=8, target_parameters=["layer.gate_up_proj", "layer.down_proj"])
            model.to(torch.bfloat16)
            model = get_peft_model(model, config).to(dtype)
            generator = torch.Generator().manual_seed(2)
            with torch.no_grad():
                for name, p in model.named_parameters():
                    if "lora_" in name:
                        p.copy_(torch.randn(p.shape, generator=generator) * 0.3)
                    elif dtype == float32:
                        p.data = p.data.to(torch.bfloat16)
        else:
            model.to(dtype)
        isopo = ISOPO(model, "fig4", fisher_samples=20)
        generator = torch.Generator().manual_seed(1)
        x, cotangent = (torch.randn(52, 16, generator=generator).to(torch.bfloat16).to(dtype) for _ in range(2))
        choices = torch.rand(52, 4, generator=generator).topk(2).indices
        with isopo.microbatch(BATCH().advantages, attention_mask=torch.ones(4, 13)):
            with torch.autocast("cpu", torch.bfloat16, enabled=dtype == float32):
                y = model(x, choices, torch.full((52, 2), 0.5, dtype=dtype))
            y.backward(cotangent.to(y.dtype))
        trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
        assert all(p.grad.dtype == dtype for p in trained.values())
        results.append({name: p.grad.double() for name, p in trained.items()})
    for name, exact in results[0].items():
        assert (results[1][name] - exact).norm() < 0.03 * exact.norm(), name


def test_another_adapter_than_the_planned_one_is_refused():
    model, batch = build("gpt_oss", adapted(*ALL_OF_GPT_OSS)), BATCH()
    isopo = ISOPO(model)
    model.add_adapter("other", LoraConfig(r=2, **adapted(*ALL_OF_GPT_OSS)))
    for p in model.parameters():
        p.requires_grad_(False)
    model.base_model.set_adapter(["default", "other"], inference_mode=True)
    for layer in isopo.layers:
        layer.module.requires_grad_(True)
    with pytest.raises(RuntimeError, match="default, other.*'default' alone"):
        backward(model, batch, isopo)


def test_without_its_adapter_a_model_is_the_one_it_was():
    """As for the log-probabilities of a reference model."""
    model, plain, batch = build("gpt_oss", adapted(*ALL_OF_GPT_OSS)), build("gpt_oss"), BATCH()
    isopo = ISOPO(model)
    isopo.begin(batch.advantages, attention_mask=batch.attention_mask)
    with model.disable_adapter():
        logits = model(batch.input_ids, attention_mask=batch.attention_mask).logits
    torch.testing.assert_close(logits, plain(batch.input_ids, attention_mask=batch.attention_mask).logits)


def test_state_of_another_number_of_experts_is_refused():
    model, batch = build("qwen3_moe"), BATCH()
    isopo = ISOPO(model)
    backward(model, batch, isopo)
    isopo.step()
    state = isopo.state_dict()
    isopo.load_state_dict(state)
    state["running"]["mean"] = state["running"]["mean"][:-1]
    with pytest.raises(ValueError, match="finite running means"):
        isopo.load_state_dict(state)


def test_an_implementation_that_is_not_known_is_refused_by_the_names_of_the_parameters():
    model = build("qwen3_moe")
    model.config._experts_implementation = "sonicmoe"
    with pytest.raises(ValueError, match=r"layers\.0\.mlp\.experts\.gate_up_proj \(.*'sonicmoe'.*'grouped_mm'"):
        ISOPO(model)


def test_experts_that_compute_something_else_are_refused(monkeypatch):
    """What is recognised is what the module does, not what it is called."""
    model = build("mixtral")
    experts = type(model.model.layers[0].mlp.experts)
    monkeypatch.setattr(experts, "_apply_gate", lambda self, x: x.chunk(2, dim=-1)[0])  # without the other half
    with pytest.raises(ValueError, match=r"experts\.down_proj \(MixtralExperts does not compute"):
        ISOPO(model)
