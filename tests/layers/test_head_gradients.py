"""Gradients that the head's forward takes on its way: TRL's outputs as they are, the definition, and what is saved."""

import copy
from types import SimpleNamespace

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode
from trl.kernels import chunked_logprob

from isopo_trl import ISOPO
from isopo_trl.kernels.launch import INTERPRET
from isopo_trl.layers import head_gradients, lm_head
from isopo_trl.loss.frozen_head import frozen_head
from isopo_trl.trl_seam import head
from isopo_trl.trl_seam.head import ChunkedLogProbFunction
from tests.layers.test_lm_head import ADVANTAGES, LanguageModel, chunked_logps, float64_throughout


N, V, D, SAMPLES = 7, 23, 5, 3
OUTPUTS = ("log_probs", "entropy", "log_sum_sq_probs", "mean_logits", "is_top1")
__all__ = ["float64_throughout"]


def counted():
    """Context that counts operations, those of a product that is added in place as well."""

    def in_place(total, x, y, **_):
        return 2 * x[0] * x[1] * y[1]

    return FlopCounterMode(display=False, custom_mapping={torch.ops.aten.addmm_: in_place})


def example(dtype=torch.float64, certain=False):
    """Arguments of TRL's function, and samples; where every other token is nearly certain, in whole numbers."""
    generator = torch.Generator().manual_seed(0)
    shapes = (N, D), (V, D), (V,), (SAMPLES, V)
    drawn = [torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype) for shape in shapes]
    hidden, weight, bias, samples = drawn
    targets = torch.randint(V, (N,), generator=generator)
    if certain:  # and so with logits that no product rounds
        hidden, weight, bias = ((size * x).round() for size, x in ((4, hidden), (2, weight), (2, bias)))
        targets[::2] = (hidden @ weight.t() + bias).argmax(1)[::2]
    hidden.requires_grad_()
    return [hidden, weight, bias, targets, 0.7, 8, None, 0.3, OUTPUTS], samples


class Context(SimpleNamespace):
    """What a function's forward writes to."""

    def __init__(self):
        super().__init__(needs_input_grad=(True,))

    def save_for_backward(self, *tensors):
        self.saved_tensors = tensors

    def mark_non_differentiable(self, *_):
        pass

    def set_materialize_grads(self, _):
        pass


def taken(args, samples=None):
    ctx = Context()
    with torch.no_grad():
        return ctx, head_gradients.forward_with_gradients(ctx, args, samples)


def definition(args, samples):
    """In float64, of what the arguments are."""
    hidden, weight, bias, *_ = (x.detach().double() for x in args[:3])
    e = torch.nn.functional.one_hot(args[3], V) - ((hidden @ weight.t() + bias) * 0.3 / 0.7).softmax(1)
    return e @ weight * 0.3 / 0.7, e @ samples.double().t() * 0.3 / 0.7


@pytest.mark.usefixtures("float64_throughout")
@pytest.mark.parametrize("tokens", [2, 4096])
@pytest.mark.parametrize("chunk", [1, 8, 50])
def test_gradients_are_those_of_the_definition(chunk, tokens, monkeypatch):
    monkeypatch.setattr(chunked_logprob, "TOKEN_CHUNK_SIZE", tokens)
    args, samples = example()
    args[5] = chunk
    ctx, _ = taken(args, samples)
    for found, expected in zip((ctx.unit, ctx.products), definition(args, samples), strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("autocast", [False, True], ids=["", "autocast"])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_outputs_are_trls_bit_for_bit(dtype, autocast, monkeypatch):
    monkeypatch.setattr(chunked_logprob, "TOKEN_CHUNK_SIZE", 4)
    args, samples = example(dtype)
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        _, found = taken(args, samples)
        expected = ChunkedLogProbFunction.apply(*args)
    assert all(torch.equal(x, y) for x, y in zip(found, expected, strict=True))


@pytest.mark.skipif(not INTERPRET, reason="Triton's kernels run on a CPU under its interpreter alone")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_by_trls_kernels_they_are_the_same(dtype, monkeypatch):
    monkeypatch.setattr(chunked_logprob, "TOKEN_CHUNK_SIZE", 4)
    args, samples = example(dtype, certain=True)
    expected, _ = taken(args, samples)
    monkeypatch.setattr(chunked_logprob, "_use_triton", lambda _: True)
    for module in (head, head_gradients):
        monkeypatch.setattr(module, "head_uses_triton", lambda _: True)
    outputs = ChunkedLogProbFunction.apply(*args)
    ctx, found = taken(args, samples)
    assert all(torch.equal(x, y) for x, y in zip(found, outputs, strict=True))
    close = {"rtol": 1e-4, "atol": 1e-5} if dtype == torch.float32 else {"rtol": 2e-2, "atol": 2e-2}
    torch.testing.assert_close((ctx.unit, ctx.products), (expected.unit, expected.products), **close)


@pytest.mark.parametrize("autocast", [False, True], ids=["", "autocast"])
def test_nearly_certain_tokens_lose_nothing_in_half_precision(autocast):
    """There `w_target` and the mean of the rows nearly cancel, and what is left is small beside either."""
    args, samples = example(torch.float32 if autocast else torch.bfloat16, certain=True)
    exact, rows = definition(args, samples), (args[1], samples)
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        ctx, outputs = taken(args, samples)
    rest = 1 - torch.exp(outputs[0][::2, None])
    assert (rest < 1e-2).any()  # or nothing cancels
    for found, expected, x in zip((ctx.unit, ctx.products), exact, rows, strict=True):
        off = (found - expected).abs().amax(1, keepdim=True)[::2]
        assert (off <= 2**-7 * rest * x.abs().max() + 1e-5).all()


def test_certain_tokens_with_large_logits_have_no_gradient():
    """The largest logit is subtracted from itself, so that no rounding of scale and temperature may differ."""
    args, samples = example(torch.float32)
    with torch.no_grad():
        args[0].mul_(1e4)
    args[3] = (args[0] @ args[1].t()).argmax(1)
    ctx, (logps, *_) = taken(args, samples)
    assert (logps == 0).sum() >= 4  # or they are not that certain
    assert (ctx.unit[logps == 0] == 0).all() and (ctx.products[logps == 0] == 0).all()


@pytest.mark.parametrize("given", [{}, {"softcap": 5.0}, {"cuda": torch.float32}, {"cuda": torch.bfloat16}], ids=str)
def test_they_are_taken_where_nothing_is_lost(given):
    args, _ = example(torch.float32)
    args[6] = given.get("softcap")
    if "cuda" in given:
        args[0] = SimpleNamespace(device=torch.device("cuda"), dtype=given["cuda"])
    assert head_gradients.are_exact(args) == (given in ({}, {"cuda": torch.bfloat16}))


# The head in microbatches

B, T, C, HIDDEN = 3, 40, 30, 64
VOCABULARY = 512


def two_steps(rule, by_backward=False, term=False, monkeypatch=None, samples=2):
    """
    Gradients of the second step's last microbatch, whose metric is the first's, the rows that the step leaves, and the
    products of the microbatch's forward and backward, in units of tokens x vocabulary x hidden.
    """
    torch.manual_seed(0)
    model = LanguageModel(bias=True)
    model.lm_head = torch.nn.Linear(HIDDEN, VOCABULARY)
    model = model.double()
    isopo = ISOPO(model, rule, fisher_samples=samples)
    if by_backward:
        monkeypatch.setattr(lm_head, "are_exact", lambda _: False)
    mask = torch.ones(B, T, dtype=torch.long)
    for number in range(4):
        model.zero_grad()
        leaf = torch.randn(B * C, HIDDEN, dtype=torch.float64).requires_grad_()
        targets, slopes = torch.randint(VOCABULARY, (B * C,)), torch.rand(B * C, dtype=torch.float64)
        with isopo.microbatch(ADVANTAGES, attention_mask=mask, completion_mask=mask[:, :C]):
            with counted() as flops:
                logps = chunked_logps(leaf, model.lm_head, targets, chunk=100)
                for power in range(1, 3 if term else 1):
                    isopo.unscaled((slopes**power * logps).sum())
                (slopes * logps).sum().backward()
        if number % 2:
            isopo.step()
    rows = isopo._rows.layers[0].held.fields.values() if isopo._rows is not None else ()
    tensors = [leaf.grad, *(p.grad for p in model.parameters()), *rows]
    return tensors, flops.get_total_flops() / (2 * B * C * VOCABULARY * HIDDEN)


@pytest.mark.usefixtures("float64_throughout")
@pytest.mark.parametrize("term", [False, True], ids=["", "terms"])
def test_the_head_has_the_same_gradients_as_without_them(term, monkeypatch):
    """And leaves the same rows for the next step."""
    (found, fewer), (expected, more) = (
        two_steps("fisher", old, term, monkeypatch, samples=8) for old in (False, True)
    )
    assert fewer < more - (0.8, 1.8)[term]
    for x, y in zip(found, expected, strict=True):
        torch.testing.assert_close(x, y, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize(
    ("rule", "strategy", "products"), [("none", "ghost", 4), ("fisher", "ghost", 4), ("fig4", "blocks", 6)]
)
def test_products_over_the_vocabulary_in_a_step(rule, strategy, products, monkeypatch):
    """On top come those with samples, of which there are 2 beside 64 hidden features, and of the rows they leave."""
    monkeypatch.setattr(lm_head, "choose_strategy", lambda *_: strategy)
    _, found = two_steps(rule)
    assert products <= found < products + 0.2


def test_as_many_samples_as_tokens_keep_the_old_way(monkeypatch):
    new, old = (two_steps("fisher", old, False, monkeypatch, samples=B * C)[1] for old in (False, True))
    assert new == old


def step(isopo, head):
    """The function's context after a step, of which something lives on."""
    mask, width = torch.ones(B, T, dtype=torch.long), len(head.weight)
    with isopo.microbatch(ADVANTAGES, attention_mask=mask, completion_mask=mask[:, :C]):
        hidden = torch.randn(B * C, HIDDEN, requires_grad=True)
        logps = chunked_logps(hidden, head, torch.randint(width, (B * C,)), chunk=width)
        isopo.unscaled(logps.sum())
        logps.sum().backward()
    isopo.step()
    return logps.grad_fn


def head_of(width):
    model = LanguageModel()
    model.lm_head = torch.nn.Linear(HIDDEN, width, bias=False)
    return ISOPO(model, "fisher", fisher_samples=2), model.lm_head


@pytest.mark.parametrize("width", [V - 4, V + 4])
def test_rows_of_another_vocabulary_are_refused_with_words(width):
    isopo, head = head_of(V)
    step(isopo, head)
    other, its_head = head_of(width)
    other.load_state_dict(isopo.state_dict())
    with pytest.raises(RuntimeError, match="the checkpoint is of another model"):
        step(other, its_head)


def test_what_was_taken_is_gone_before_the_backward_of_other_layers():
    given = head_of(V)
    for _ in range(2):
        held = [x for x in vars(step(*given)).values() if isinstance(x, torch.Tensor) and x.is_floating_point()]
        assert not held


@pytest.mark.parametrize(("dtype", "products"), [(torch.float32, 2), (torch.bfloat16, 2)], ids=str)
def test_products_of_a_head_that_is_not_trained(dtype, products):
    args, _ = example(dtype)
    with counted() as flops:
        frozen_head(*args[:-1], ("log_probs", "entropy"))[0].sum().backward()
    assert flops.get_total_flops() == products * 2 * N * V * D
    plain = copy.copy(args)
    plain[0] = args[0].detach().requires_grad_()
    ChunkedLogProbFunction.apply(*plain)[0].sum().backward()
    torch.testing.assert_close(args[0].grad, plain[0].grad, rtol=2e-2, atol=2e-2)
