"""Terms of a loss that no rule rescales, without the trainer, in float64."""

from collections import Counter

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from isopo_trl import ISOPO
from isopo_trl.microbatch import Microbatch
from tests import oracle
from tests.gradients.test_oracle import build


pytestmark = pytest.mark.usefixtures("float64_throughout")

FAMILIES = ["llama", "gpt2", "gemma3", "qwen2", "phi3"]
ALL = 10_000


def three_gradients(model, rule="fisher"):
    """Of the loss by the rule, of a term without any, and of the loss with the term as `unscaled`."""
    batch = oracle.random_batch([3, 1, 5, 4], [6, 8, 1, 4], 100)
    weights = oracle.token_weights(batch)
    slopes = torch.randn(weights.shape, generator=torch.Generator().manual_seed(2), dtype=torch.float64)

    def term(logps):
        return ((slopes * logps + logps.square()) * batch.completion_mask).sum() / 7

    def taken():
        result = {name: p.grad.clone() for name, p in model.named_parameters() if p.requires_grad}
        model.zero_grad()
        return result

    model.train()
    torch.manual_seed(3)
    term(oracle.token_logps(model, batch)).backward()
    plain = taken()
    isopo = ISOPO(model, rule, fisher_samples=ALL)
    results = []
    for unscaled in (False, True):
        torch.manual_seed(3)  # dropout
        with isopo.microbatch(batch.advantages, attention_mask=batch.attention_mask):
            logps = oracle.token_logps(model, batch)
            if unscaled:
                isopo.unscaled(term(logps) / 3)
                isopo.unscaled(term(logps) * 2 / 3)
                assert all(p.grad is None for p in model.parameters())  # nothing arrives before the loss's own
            (-(logps * weights).sum()).backward()
        results.append(taken())
    isopo.detach()
    return results[0], plain, results[1]


def check_sum(scaled, plain, both):
    assert scaled.keys() == plain.keys() == both.keys()
    for name in both:
        size = both[name].norm()
        assert (both[name] - scaled[name] - plain[name]).norm() <= 1e-12 * size, name
        assert plain[name].norm() > 1e-6 * size > 0, name


@pytest.mark.parametrize(
    ("family", "lora", "rule"),
    [
        pytest.param(family, lora, rule, id=f"{family}-{'lora' if lora else 'full'}-{rule}")
        for family, lora, rule in [
            *(("llama", lora, rule) for lora in (False, True) for rule in ("fisher", "interacting", "none")),
            *((family, False, "fisher") for family in FAMILIES[1:]),  # biases, Conv1D, scales, joined projections
        ]
    ],
)
def test_unscaled_term_is_added_as_it_is(family, lora, rule):
    check_sum(*three_gradients(build(family, lora), rule))


@pytest.mark.parametrize(
    "settings",
    [
        {"lora_dropout": 0.3},
        {"lora_bias": True},
        {"modules_to_save": ["lm_head"]},
        {"modules_to_save": ["embed_tokens"]},
        {"target_modules": ["q_proj", "v_proj"], "bias": "lora_only"},
    ],
    ids=str,
)
def test_unscaled_term_with_lora_variants(settings):
    check_sum(*three_gradients(build("qwen2", **settings)))


@pytest.mark.parametrize("hooked", ["lora_A", "lora_B", "base_layer"])
def test_unscaled_term_where_lora_is_not_fused(hooked):
    """A hook makes a layer go by PEFT's own forward."""
    model = build("llama", lora=True)
    for name, module in model.named_modules():
        if hooked in name and isinstance(module, torch.nn.Linear) and "layers.0" in name:
            module.register_forward_hook(lambda module, args, output: None)
    check_sum(*three_gradients(model))


@pytest.mark.parametrize("trained", ["bias", "norm", "ln_", "wpe", "layers.1", "lm_head"])
def test_unscaled_term_where_only_some_parameters_are_trained(trained):
    model = build("gpt2" if trained in ("bias", "ln_", "wpe") else "qwen2", tie=False)
    for name, p in model.named_parameters():
        p.requires_grad_(trained in name)
    assert any(p.requires_grad for p in model.parameters())
    check_sum(*three_gradients(model))


def test_unscaled_term_of_one_microbatch_does_not_reach_the_next():
    model = build("llama")
    before, _, _ = three_gradients(model)
    after, _, _ = three_gradients(model)
    isopo, batch = ISOPO(model, fisher_samples=ALL), oracle.random_batch([3, 1, 5, 4], [6, 8, 1, 4], 100)
    for unscaled in (True, False):
        model.zero_grad()
        with isopo.microbatch(batch.advantages, attention_mask=batch.attention_mask):
            logps = oracle.token_logps(model, batch)
            if unscaled:
                isopo.unscaled(logps.sum())
            (-(logps * oracle.token_weights(batch)).sum()).backward()
    for name, p in model.named_parameters():
        assert torch.equal(before[name], after[name]), name
        assert (p.grad - before[name]).norm() <= 1e-12 * before[name].norm(), name


def test_unscaled_term_changes_no_statistic():
    model, batch = build("llama"), oracle.random_batch([3, 1, 5, 4], [6, 8, 1, 4], 100)
    figures = []
    for unscaled in (False, True):
        isopo = ISOPO(model, fisher_samples=ALL)
        with isopo.microbatch(batch.advantages, attention_mask=batch.attention_mask):
            logps = oracle.token_logps(model, batch)
            if unscaled:
                isopo.unscaled(logps.sum())
            (-(logps * oracle.token_weights(batch)).sum()).backward()
        multipliers = isopo.multipliers()
        figures.append((isopo.step(), {name: m.tolist() for name, m in multipliers.items()}))
        isopo.detach()
    assert figures[0] == figures[1]


def test_unscaled_outside_of_a_microbatch_is_refused():
    model, batch = build("llama"), oracle.random_batch([3, 1], [2, 4], 100)
    isopo = ISOPO(model)
    with pytest.raises(RuntimeError, match="outside of a microbatch"):
        isopo.unscaled(oracle.token_logps(model, batch).sum())
    with isopo.microbatch(batch.advantages, attention_mask=batch.attention_mask):
        oracle.token_logps(model, batch).sum().backward()
    with pytest.raises(RuntimeError, match="outside of a microbatch"):
        isopo.unscaled(oracle.token_logps(model, batch).sum())


def test_unscaled_after_the_backward_is_refused():
    model, batch = build("llama"), oracle.random_batch([3, 1], [2, 4], 100)
    isopo = ISOPO(model)
    with pytest.raises(RuntimeError, match="after the loss's backward"):
        with isopo.microbatch(batch.advantages, attention_mask=batch.attention_mask):
            logps = oracle.token_logps(model, batch)
            logps.sum().backward(retain_graph=True)
            isopo.unscaled(logps.square().sum())
    assert isopo.current is None


def test_unscaled_gradient_of_a_layer_that_the_loss_does_not_reach_is_not_lost_silently():
    model, batch = build("llama"), oracle.random_batch([3, 1], [2, 4], 100)
    isopo = ISOPO(model)
    with isopo.microbatch(batch.advantages, attention_mask=batch.attention_mask):
        oracle.token_logps(model, batch).sum().backward()
    with pytest.raises(RuntimeError, match=r"reached model\.layers\.1\..*, but the loss did not"):
        with isopo.microbatch(batch.advantages, attention_mask=batch.attention_mask):
            ids, mask = batch.input_ids, batch.attention_mask
            output = model(input_ids=ids, attention_mask=mask, output_hidden_states=True)
            isopo.unscaled(output.logits.square().sum())
            output.hidden_states[1].sum().backward()


def test_unscaled_before_the_forward_is_refused():
    model, batch = build("llama"), oracle.random_batch([3, 1], [2, 4], 100)
    isopo = ISOPO(model)
    with pytest.raises(RuntimeError, match="No trained layer took part"):
        with isopo.microbatch(batch.advantages, attention_mask=batch.attention_mask):
            isopo.unscaled(torch.zeros((), requires_grad=True))


# What is kept of a term: cotangents, or the gradients that they make


@pytest.mark.parametrize("rows", [False, True], ids=["gradients", "rows"])
@pytest.mark.parametrize("family, lora", [("gpt2", False), ("qwen2", True)])
def test_whatever_is_kept_of_a_term_is_added_as_it_is(family, lora, rows, monkeypatch):
    monkeypatch.setattr(Microbatch, "keeps_rows", lambda *_: rows)
    check_sum(*three_gradients(build(family, lora), "fig4"))


class Operations(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.number = Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.number[func.__name__.partition(".")[0]] += 1
        return func(*args, **(kwargs or {}))


class Chain(torch.nn.Module):
    """An embedding, linear layers and norms, so that each operation of a backward is known."""

    def __init__(self, ids, hidden, checkpointed):
        super().__init__()
        self.embedding = torch.nn.Embedding(ids, hidden)
        widths = [hidden, 4 * hidden, hidden, hidden]
        pairs = zip(widths[:-1], widths[1:], strict=True)
        self.linear = torch.nn.ModuleList(torch.nn.Linear(*pair, bias=False) for pair in pairs)
        self.norm = torch.nn.LayerNorm(hidden)
        self.checkpointed = checkpointed

    def forward(self, ids):
        x = self.embedding(ids)
        for layer in self.linear:
            x = checkpoint(layer, x, use_reentrant=False) if self.checkpointed else layer(x)
        return self.norm(x)


@pytest.mark.parametrize("checkpointed", [False, True], ids=["", "checkpointed"])
@pytest.mark.parametrize("m, T", [(3, 2), (3, 40)], ids=["few positions", "many positions"])
def test_a_term_goes_back_with_no_more_work_than_it_must(m, T, checkpointed):
    """
    Where cotangents are kept, a linear layer has one product, that for its input; none is kept that is larger than the
    gradient and the inputs in memory. The gradient is that of the definition either way.
    """
    hidden, vocabulary = 8, 50
    torch.manual_seed(0)
    model = Chain(vocabulary, hidden, checkpointed).double()
    ids = torch.randint(vocabulary, (m, T))
    loss, term = torch.randn(2, m, T, hidden, dtype=torch.float64)
    found = []
    for terms in (False, True):
        model.zero_grad()
        isopo = ISOPO(model, fisher_samples=ALL)
        with isopo.microbatch(torch.tensor([1.0, -0.5, 2.0]), attention_mask=torch.ones(m, T)):
            y = model(ids)
            if terms:
                with Operations() as operations:
                    isopo.unscaled((y * term).sum())
            y.backward(loss)
        isopo.detach()
        found.append({name: p.grad for name, p in model.named_parameters()})
    model.zero_grad()
    model(ids).backward(term)
    for name, p in model.named_parameters():
        expected = found[0][name] + p.grad
        assert (found[1][name] - expected).norm() < 1e-12 * expected.norm(), name
    # 8 -> 32 keeps its gradient where there are more than 8 positions; 32 -> 8 and 8 -> 8 also where they recompute
    gradients = 0 if m * T <= hidden else 3 if checkpointed else 1
    # A recomputation of one layer ends before its product
    assert operations.number["mm"] + operations.number["addmm"] == 3 + gradients
    assert operations.number["embedding_dense_backward"] == (m * T > vocabulary)
    assert not {"topk", "index_select", "linalg_vector_norm", "bmm", "einsum"} & set(operations.number)


def test_a_term_reaches_parameters_from_positions_of_no_sequence_too():
    """Load balancing counts them, for one."""
    torch.manual_seed(0)
    model = Chain(50, 8, checkpointed=False).double()
    ids, owner = torch.randint(50, (1, 12)), torch.tensor([[0] * 4 + [-1] * 3 + [1] * 5])
    loss, term = torch.randn(2, 1, 12, 8, dtype=torch.float64)
    loss[0, 4:7] = 0
    found = []
    for terms in (False, True):
        model.zero_grad()
        isopo = ISOPO(model, fisher_samples=ALL)
        with isopo.microbatch(torch.tensor([1.0, -0.5]), sequence_ids=owner):
            y = model(ids)
            if terms:
                isopo.unscaled((y * term).sum())
            y.backward(loss)
        isopo.detach()
        found.append({name: p.grad for name, p in model.named_parameters()})
    model.zero_grad()
    model(ids).backward(term)
    check_sum(found[0], {name: p.grad for name, p in model.named_parameters()}, found[1])
