"""The LM head under TRL's chunked log-probabilities, and the place where TRL looks these up."""

import copy
import itertools
from types import SimpleNamespace

import pytest
import torch
import trl.trainer.utils as trl_utils
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from isopo_trl import ISOPO
from isopo_trl.geometry import cost
from isopo_trl.layers import lm_head
from isopo_trl.rules import rule_names
from tests import oracle


B, T, C, HIDDEN, VOCABULARY = 3, 6, 4, 5, 11
ADVANTAGES = torch.tensor([1.0, -0.5, 2.0], dtype=torch.float64)
ATTENTION = torch.tensor([[0, 1, 1, 1, 1, 1], [1, 1, 1, 1, 0, 0], [1, 1, 1, 1, 1, 1]])
SCORED = torch.tensor([[1, 1, 1, 1], [1, 1, 0, 0], [1, 0, 1, 1]])  # of the last C tokens


class LanguageModel(nn.Module):
    """A head over given hidden states: what the chunked path and the module path have in common."""

    def __init__(self, bias=False):
        super().__init__()
        self.lm_head = nn.Linear(HIDDEN, VOCABULARY, bias=bias)

    def get_output_embeddings(self):
        return self.lm_head

    def forward(self, hidden):
        return self.lm_head(hidden)


@pytest.fixture
def float64_throughout(monkeypatch):
    """TRL's chunked function goes to float32 in places; here it cannot."""
    monkeypatch.setattr(torch.Tensor, "float", torch.Tensor.double)
    for name in ("float", "float32"):  # both names are in use
        monkeypatch.setattr(torch, name, torch.float64)


def example(bias):
    generator = torch.Generator().manual_seed(0)
    model = LanguageModel(bias).double()
    with torch.no_grad():
        for p in model.parameters():
            p.copy_(torch.randn(p.shape, generator=generator, dtype=torch.float64))
    hidden = torch.randn(B, T - 1, HIDDEN, generator=generator, dtype=torch.float64)
    targets = torch.randint(VOCABULARY, (B, T - 1), generator=generator)
    weights = torch.zeros(B, T - 1, dtype=torch.float64)
    weights[:, T - 1 - C :] = SCORED * torch.rand(B, C, generator=generator, dtype=torch.float64)
    return model, hidden, targets, weights


def chunked_logps(hidden, head, targets, temperature=1.0, softcap=None, logit_scale=1.0, chunk=4):
    """As TRL's patched forward calls it."""
    return trl_utils._ChunkedLogProbFunction.apply(
        hidden, head.weight, head.bias, targets, temperature, chunk, softcap, logit_scale, ()
    )[0]


def direct_logps(hidden, head, targets, temperature=1.0, softcap=None, logit_scale=1.0):
    logits = head(hidden) * logit_scale
    if softcap is not None:
        logits = softcap * torch.tanh(logits / softcap)
    return (logits / temperature).log_softmax(-1).gather(-1, targets.unsqueeze(-1)).squeeze(-1)


def definition(model, hidden, targets, weights, rows, rule, **settings):
    """`sum_s c_s V_s` from the gradient of each prediction alone, and the plain gradient of the hidden states."""
    parameters = list(model.parameters())
    size = sum(p.numel() for p in parameters)
    G = torch.zeros(B, T, size, dtype=torch.float64)  # the last position predicts nothing
    for b, t in itertools.product(range(B), range(T - 1)):
        loss = -weights[b, t] * direct_logps(hidden[b, t], model.lm_head, targets[b, t], **settings)
        G[b, t] = torch.cat([g.flatten() for g in torch.autograd.grad(loss, parameters)])
    V = G.sum(1)
    c = oracle.coefficients(V, G.view(B * T, -1)[rows], ADVANTAGES, rule)
    leaf = hidden.clone().requires_grad_()
    (-weights * direct_logps(leaf, model.lm_head, targets, **settings)).sum().backward()
    flat = (c @ V).split([p.numel() for p in parameters])
    return [g.view_as(p) for g, p in zip(flat, parameters, strict=True)], leaf.grad


def check(rule, compact, bias, **settings):
    model, hidden, targets, weights = example(bias)
    plain = copy.deepcopy(model)
    isopo = ISOPO(model, rule, fisher_samples=9)
    leaf = hidden.clone().requires_grad_()
    keep = torch.zeros(B, T - 1, dtype=torch.bool)
    keep[:, T - 1 - C :] = SCORED.bool()
    if not compact:
        keep[:] = True
    with isopo.microbatch(ADVANTAGES, attention_mask=ATTENTION, completion_mask=SCORED) as microbatch:
        logps = chunked_logps(leaf[keep], model.lm_head, targets[keep], **settings)
        (-weights[keep] * logps).sum().backward()
    samples = microbatch.samples
    rows = torch.tensor([], dtype=torch.long) if samples is None else samples.rows[~samples.absent]
    expected, hidden_gradient = definition(plain, hidden, targets, weights, rows, rule, **settings)
    torch.testing.assert_close(leaf.grad, hidden_gradient, rtol=1e-9, atol=1e-12)
    for p, gradient in zip(model.parameters(), expected, strict=True):
        torch.testing.assert_close(p.grad, gradient, rtol=1e-9, atol=1e-12)


@pytest.mark.usefixtures("float64_throughout")
@pytest.mark.parametrize("bias", [False, True], ids=["", "bias"])
@pytest.mark.parametrize("compact", [False, True], ids=["all rows", "scored rows"])
@pytest.mark.parametrize("strategy", ["ghost", "whole", "blocks"])
@pytest.mark.parametrize("rule", rule_names())
def test_the_chunked_head_has_the_gradient_of_the_definition(rule, strategy, compact, bias, monkeypatch):
    monkeypatch.setattr(lm_head, "choose_strategy", lambda *_: strategy)
    monkeypatch.setattr(lm_head, "_TILE", 50)  # several tiles over the vocabulary
    monkeypatch.setattr(cost, "WHOLE_LIMIT", 40)  # and several blocks of a tile
    check(rule, compact, bias)


@pytest.mark.usefixtures("float64_throughout")
@pytest.mark.parametrize(
    "settings", [{"temperature": 0.7}, {"softcap": 1.5}, {"logit_scale": 0.3}, {"temperature": 2.0, "softcap": 2.0}]
)
@pytest.mark.parametrize("compact", [False, True], ids=["all rows", "scored rows"])
def test_the_chunked_head_honours_what_happens_to_the_logits(compact, settings):
    check("fig4", compact, bias=True, **settings)


@pytest.mark.usefixtures("float64_throughout")
@pytest.mark.parametrize("with_entropy", [False, True], ids=["", "entropy"])
@pytest.mark.parametrize("strategy", ["ghost", "whole", "blocks"])
@pytest.mark.parametrize("rule", ["fisher", "fig4", "none"])
def test_terms_are_added_to_the_chunked_head_as_they_are(rule, strategy, with_entropy, monkeypatch):
    """Two of them, of log-probabilities or of these and entropies, in whichever way the loss's gradient is made."""
    monkeypatch.setattr(lm_head, "choose_strategy", lambda *_: strategy)
    monkeypatch.setattr(lm_head, "_TILE", 50)  # several tiles over the vocabulary
    monkeypatch.setattr(cost, "WHOLE_LIMIT", 70)
    model, hidden, targets, weights = example(bias=True)
    slopes = torch.linspace(-1, 2, 2 * B * (T - 1), dtype=torch.float64).view(2, B, T - 1)

    def run(terms):
        isopo = ISOPO(model, rule, fisher_samples=9)
        leaf = hidden.clone().requires_grad_()
        model.zero_grad()
        with isopo.microbatch(ADVANTAGES, attention_mask=ATTENTION, completion_mask=SCORED):
            arguments = (leaf.flatten(0, 1), model.lm_head.weight, model.lm_head.bias, targets.flatten())
            logps, *entropy = trl_utils._ChunkedLogProbFunction.apply(*arguments, 0.7, 4, None, 1.0, ("entropy",))
            for slope in slopes if terms else ():
                term = (slope.flatten() * logps).sum()
                isopo.unscaled(term + (entropy[0] * slope.flatten().square()).sum() if with_entropy else term)
            (-weights.flatten() * logps).sum().backward()
        isopo.detach()
        return [leaf.grad, *(p.grad for p in model.parameters())]

    both, alone = run(terms=True), run(terms=False)
    leaf = hidden.clone().requires_grad_()
    model.zero_grad()
    logits = (model.lm_head(leaf) / 0.7).log_softmax(-1)
    term = slopes.sum(0) * logits.gather(-1, targets.unsqueeze(-1)).squeeze(-1)
    if with_entropy:
        term = term - slopes.square().sum(0) * (logits.exp() * logits).sum(-1)
    term.sum().backward()
    # The hidden states have the loss's own: the terms' went back before
    torch.testing.assert_close(both[0], alone[0], rtol=1e-9, atol=1e-12)
    for found, of_loss, p in zip(both[1:], alone[1:], model.parameters(), strict=True):
        torch.testing.assert_close(found, of_loss + p.grad, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("rule", rule_names())
def test_a_microbatch_without_a_scored_token_gives_the_chunked_head_a_zero_gradient(rule):
    """On devices with Triton, TRL then hands over no row at all (`mask_truncated_completions`)."""
    model, hidden, targets, _ = example(bias=True)
    isopo = ISOPO(model, rule)
    none = torch.zeros_like(SCORED)
    leaf = hidden.flatten(0, 1)[:0].clone().requires_grad_()
    with isopo.microbatch(ADVANTAGES, attention_mask=ATTENTION, completion_mask=none):
        chunked_logps(leaf, model.lm_head, targets.flatten()[:0]).sum().backward()
    assert model.lm_head.weight.grad.abs().sum() == 0
    assert model.lm_head.bias.grad.abs().sum() == 0


def test_a_head_that_is_called_as_a_module_is_a_linear_layer():
    model, hidden, targets, _ = example(bias=True)
    head = copy.deepcopy(model.lm_head)
    isopo = ISOPO(model, "euclidean")
    x = torch.cat([hidden, hidden[:, :1]], dim=1)  # [B, T, HIDDEN]
    with isopo.microbatch(ADVANTAGES, attention_mask=torch.ones(B, T)):
        model(x).pow(2).sum().backward()
    V = []
    for s in range(B):
        gradients = torch.autograd.grad(head(x[s]).pow(2).sum(), list(head.parameters()))
        V.append(torch.cat([g.flatten() for g in gradients]))
    V = torch.stack(V)
    expected = oracle.coefficients(V, V[:0], ADVANTAGES, "euclidean") @ V
    torch.testing.assert_close(torch.cat([p.grad.flatten() for p in model.parameters()]), expected)


def test_an_entropy_gradient_is_refused():
    model, hidden, targets, _ = example(bias=False)
    isopo = ISOPO(model)
    with (
        pytest.raises(RuntimeError, match="entropy"),
        isopo.microbatch(ADVANTAGES, attention_mask=ATTENTION, completion_mask=SCORED),
    ):
        arguments = (hidden.flatten(0, 1), model.lm_head.weight, None, targets.flatten())
        outputs = trl_utils._ChunkedLogProbFunction.apply(*arguments, 1.0, 4, None, 1.0, ("entropy",))
        (outputs[0].sum() + outputs[1].sum()).backward()


@pytest.mark.parametrize(
    "where",
    [
        {"attention_mask": ATTENTION},
        {"sequence_ids": torch.arange(B).unsqueeze(1).expand(B, T), "completion_mask": SCORED},
    ],
    ids=["no completion mask", "packed"],
)
def test_the_chunked_head_says_what_it_has_not_been_told(where):
    model, hidden, targets, _ = example(bias=False)
    with pytest.raises(RuntimeError, match="completion_mask"), ISOPO(model).microbatch(ADVANTAGES, **where):
        chunked_logps(hidden.flatten(0, 1), model.lm_head, targets.flatten())


# The place where TRL looks the function up: calls go to the head that owns the weight


def gradient(model, hidden, targets, weights):
    """The head's gradient by TRL's chunked log-probabilities, added to what is there."""
    logps = chunked_logps(hidden.flatten(0, 1), model.lm_head, targets.flatten())
    return -(weights.flatten() * logps).sum()


def trls_own(model, *data):
    """The same as TRL's function gives it, on a copy that nobody is attached to."""
    model = copy.deepcopy(model)
    model.zero_grad()
    gradient(model, *data).backward()
    return model.lm_head.weight.grad


@pytest.mark.parametrize("how", ["never begun", "ended", "aborted", "an error", "detached"])
def test_outside_of_a_microbatch_the_gradient_is_trls(how):
    model, *data = example(bias=False)
    isopo, where = ISOPO(model), {"attention_mask": ATTENTION, "completion_mask": SCORED}
    if how == "an error":
        with pytest.raises(KeyboardInterrupt), isopo.microbatch(ADVANTAGES, **where):
            raise KeyboardInterrupt
    elif how != "never begun":
        isopo.begin(ADVANTAGES, **where)
        {"ended": isopo.end, "aborted": isopo.abort, "detached": isopo.detach}[how]()
    gradient(model, *data).backward()
    assert torch.equal(model.lm_head.weight.grad, trls_own(model, *data))


def test_the_head_of_another_model_is_left_to_trl_in_a_microbatch():
    model, *data = example(bias=False)
    other = copy.deepcopy(model)
    isopo = ISOPO(model)
    microbatch = isopo.begin(ADVANTAGES, attention_mask=ATTENTION, completion_mask=SCORED)
    gradient(other, *data).backward()
    assert torch.equal(other.lm_head.weight.grad, trls_own(model, *data)) and microbatch.visits == [0]


def test_a_frozen_head_is_left_to_trl():
    model = nn.Sequential(nn.Linear(HIDDEN, HIDDEN), LanguageModel().requires_grad_(False)).double()
    model.get_output_embeddings = lambda: model[1].lm_head
    _, hidden, targets, weights = example(bias=False)
    inputs = [model[0](hidden).detach().requires_grad_() for _ in range(2)]
    isopo = ISOPO(model)
    microbatch = isopo.begin(ADVANTAGES, attention_mask=ATTENTION)  # the head would ask for the completion mask
    gradient(model[1], inputs[0], targets, weights).backward()
    isopo.abort()
    gradient(model[1], inputs[1], targets, weights).backward()
    assert torch.equal(inputs[0].grad, inputs[1].grad) and microbatch.visits == [0]


STAGES = ("begin", "forward", "backward", "end")
ORDERS = [order for order in itertools.combinations(range(8), 4)]  # the places of the first's stages among all


class Run:
    """A microbatch of one model, stage by stage."""

    def __init__(self, model, data, rule):
        self.model, self.data = model, data
        self.isopo = ISOPO(model, rule, fisher_samples=9)

    def begin(self):
        self.isopo.begin(ADVANTAGES, attention_mask=ATTENTION, completion_mask=SCORED)

    def forward(self):
        self.loss = gradient(self.model, *self.data)

    def backward(self):
        self.loss.backward()

    def end(self):
        self.isopo.end()
        return self.model.lm_head.weight.grad


def two_runs():
    """Models of one shape, as two trainers in a process may have, with rules and weights of their own."""
    model, *data = example(bias=False)
    other = copy.deepcopy(model)
    with torch.no_grad():
        other.lm_head.weight.mul_(0.5)
    return Run(model, data, "fisher"), Run(other, data, "interacting")


def alone(run):
    for stage in STAGES:
        result = getattr(run, stage)()
    return result


def test_microbatches_of_two_models_in_any_order_are_those_of_each_alone():
    expected = [alone(run) for run in two_runs()]
    assert not torch.allclose(*expected)
    for order, intruder in zip(ORDERS, itertools.cycle([None, "attach", "detach", "abort"]), strict=False):
        runs, done = two_runs(), [0, 0]
        bystander = ISOPO(example(bias=False)[0])
        others = []
        for place in range(8):
            which = int(place not in order)
            result = getattr(runs[which], STAGES[done[which]])()
            done[which] += 1
            if done[which] == len(STAGES):
                assert torch.equal(result, expected[which]), order
            # Somebody else comes or goes between any two stages
            if intruder == "attach":
                others.append(ISOPO(example(bias=False)[0]))
                others[-1].begin(ADVANTAGES, attention_mask=ATTENTION, completion_mask=SCORED)
            elif intruder is not None:
                bystander.begin(ADVANTAGES, attention_mask=ATTENTION, completion_mask=SCORED)
                getattr(bystander, intruder)()


def test_without_gradients_the_chunked_head_is_trls():
    model, hidden, targets, _ = example(bias=True)
    direct = direct_logps(hidden.flatten(0, 1), model.lm_head, targets.flatten())
    isopo = ISOPO(model)
    microbatch = isopo.begin(ADVANTAGES, attention_mask=ATTENTION)
    with torch.no_grad():
        logps = chunked_logps(hidden.flatten(0, 1), model.lm_head, targets.flatten())
    isopo.end()
    torch.testing.assert_close(logps.double(), direct.detach(), rtol=1e-5, atol=1e-5)
    assert microbatch.visits == [0]


class Shapes(TorchDispatchMode):
    """Remembers the shape of every tensor that an operation makes."""

    def __init__(self):
        super().__init__()
        self.shapes = set()

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        output = function(*args, **(kwargs or {}))
        for x in output if isinstance(output, (tuple, list)) else (output,):
            if isinstance(x, torch.Tensor):
                self.shapes.add(tuple(x.shape))
        return output


@pytest.mark.parametrize("limit", ["TRL's chunk", "elements of a tile"])
@pytest.mark.parametrize("rule", ["fisher", "fig4", "interacting", "none"])
@pytest.mark.parametrize("strategy", ["ghost", "whole", "blocks"])
def test_tokens_times_vocabulary_never_exists(strategy, rule, limit, monkeypatch):
    monkeypatch.setattr(lm_head, "choose_strategy", lambda *_: strategy)
    model, hidden, targets, _ = example(bias=True)
    rows, vocabulary = targets.numel(), model.lm_head.weight.shape[0]

    def tensors_of_a_backward(chunk, tile):
        monkeypatch.setattr(lm_head, "_TILE", tile)
        isopo = ISOPO(model, rule)
        with isopo.microbatch(ADVANTAGES, attention_mask=ATTENTION, completion_mask=SCORED):
            leaf = hidden.flatten(0, 1).requires_grad_()
            loss = chunked_logps(leaf, model.lm_head, targets.flatten(), chunk=chunk).sum()
            with Shapes() as seen:
                loss.backward()
        isopo.detach()
        return seen.shapes

    def whole(shapes):
        return [shape for shape in shapes if vocabulary in shape and rows in shape]

    width = 3
    bounds = {"chunk": width, "tile": 2**27} if limit == "TRL's chunk" else {"chunk": 2**16, "tile": rows * width + 1}
    shapes = tensors_of_a_backward(**bounds)
    assert not whole(shapes), shapes
    assert (rows, width) in shapes and (rows, width + 1) not in shapes
    # Without a limit it would, and this test would see it
    assert whole(tensors_of_a_backward(chunk=2**16, tile=2**27))


def test_logits_are_made_at_once_where_gradients_of_sequences_are_formed_in_narrow_blocks(monkeypatch):
    """Else a microbatch of many sequences, whose blocks are narrow, would make many times the launches."""
    monkeypatch.setattr(lm_head, "choose_strategy", lambda *_: "blocks")
    monkeypatch.setattr(cost, "WHOLE_LIMIT", 2 * B * HIDDEN)
    model, hidden, targets, _ = example(bias=False)
    isopo = ISOPO(model, "interacting")
    with isopo.microbatch(ADVANTAGES, attention_mask=ATTENTION, completion_mask=SCORED):
        leaf = hidden.flatten(0, 1).requires_grad_()
        loss = chunked_logps(leaf, model.lm_head, targets.flatten(), chunk=2**16).sum()
        with Shapes() as seen:
            loss.backward()
    assert (targets.numel(), VOCABULARY) in seen.shapes
    assert (B, 2, HIDDEN) in seen.shapes and (B, VOCABULARY, HIDDEN) not in seen.shapes


@pytest.mark.parametrize("rows", [1, 301, 4097, 7801, 2**27 // 100])
@pytest.mark.parametrize("vocabulary", [7, 32003, 151936])
def test_rows_of_a_tile_begin_where_matrix_products_are_fast(rows, vocabulary):
    states = torch.empty(rows, 1, dtype=torch.bfloat16, device="meta")
    tile = lm_head._buffer(SimpleNamespace(chunk_size=2**15), states, vocabulary)
    assert tile.stride() == (tile.shape[1] + -tile.shape[1] % 8, 1)
    # As wide as it may be, but for less than 128 columns
    assert 0 <= min(vocabulary, 2**15, 2**27 // rows) - tile.shape[1] < 128
