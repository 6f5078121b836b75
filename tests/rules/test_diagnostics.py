"""Figures of a step's gradients against explicit gradients of every sequence, in float64."""

import functools
import itertools
import math
from types import SimpleNamespace

import pytest
import torch

from isopo_trl.layers.parts import part_of
from isopo_trl.rules import make_rule
from isopo_trl.rules.diagnostics import Diagnostics, pair_cosines
from isopo_trl.rules.ledger import Ledger
from isopo_trl.rules.rule import Coefficients
from isopo_trl.rules.running import RunningStatistics
from tests import oracle, training
from tests.gradients.test_oracle import backward, build, trainer_for


PROMPTS = [[0, 0, 1, 1], [2, 1, 2, 2]]  # of two microbatches; a prompt may be in both, but no pair is
SHAPES = [([3, 1, 5, 4], [6, 8, 1, 4]), ([2, 4, 3, 6], [5, 2, 7, 3])]
ADVANTAGES = [[1.2, -0.5, 0.8, -1.5], [-0.3, 0.0, 0.9, 1.1]]


def batches():
    return [
        oracle.random_batch(*shape, 100, seed, torch.tensor(ADVANTAGES[seed], dtype=torch.float64))
        for seed, shape in enumerate(SHAPES)
    ]


@functools.cache
def gradients():
    """`V` `[m, parameters]` and the gradients of all positions, of each module, by microbatch."""
    result = []
    for batch in batches():
        G = oracle.position_gradients(build("qwen3", tie=False), batch, oracle.token_weights(batch, "grpo", 2))
        rows = batch.attention_mask.reshape(-1).nonzero().squeeze(1)
        result.append({name: (positions.sum(1), positions.flatten(0, 1)[rows]) for name, positions in G.items()})
    return result


@pytest.mark.usefixtures("float64_throughout")
@pytest.mark.parametrize("rule", ["fisher", "fig4", "interacting"])
def test_figures_of_a_step_are_those_of_explicit_gradients(rule, tmp_path):
    model = build("qwen3", tie=False)
    trainer = trainer_for(model, tmp_path, rule=rule, loss_type="grpo", fisher_samples=10_000)
    training.prepared(trainer, accumulation=2)
    for batch, prompts in zip(batches(), PROMPTS, strict=True):
        batch.extra["prompt_numbers"] = torch.tensor(prompts)
        backward(trainer, batch)
    norm = torch.stack([p.grad.norm() for p in model.parameters() if p.requires_grad]).norm()
    figures = trainer.isopo.step(norm)

    parts = {layer.name: part_of(layer) for layer in trainer.isopo.layers}
    lengths, cosines, S, U = dict.fromkeys(parts.values(), 0.0), {True: [], False: []}, 0.0, dict.fromkeys(parts, 0)
    for batch, modules, prompts in zip(batches(), gradients(), PROMPTS, strict=True):
        for name, (V, samples) in modules.items():
            c = oracle.coefficients(V, samples, batch.advantages, rule)
            F = ((samples @ V.t()).square().sum(0) / samples.square().sum()).sqrt()
            lengths[parts[name]] += (c.abs() * F).sum().item()
            S += (c.square() * V.square().sum(1)).sum()
            U[name] = U[name] + c @ V
            for i, j in itertools.combinations(range(4), 2):
                cosines[prompts[i] == prompts[j]].append(torch.cosine_similarity(V[i], V[j], dim=0).item())
    U = sum(x.square().sum() for x in U.values())
    assert U.sqrt() == pytest.approx(norm.item())
    expected = {}
    if rule != "interacting":
        expected |= {f"share_{part}": length / sum(lengths.values()) for part, length in lengths.items()}
        assert {"share_attention", "share_mlp", "share_head"} <= set(expected)
    if rule != "fisher" and U > S:  # else the signal is not to be seen
        expected["noise_scale"] = ((8 * S - U) / (U - S)).item()
    if rule == "interacting":
        expected["cosine_same_prompt"] = sum(cosines[True]) / len(cosines[True])
        expected["cosine_other_prompts"] = sum(cosines[False]) / len(cosines[False])
    found = {name: x for name, x in figures.items() if name.startswith(("share", "noise", "cosine"))}
    assert found == pytest.approx(expected, rel=1e-9)


def ledger(rule, vectors, advantages, loss_scale=1.0, **settings):
    """A microbatch at one layer, whose loss is `loss_scale` times the one of the `vectors` `[m, p]`."""
    book = Ledger(rule, advantages, torch.zeros(1, 6, dtype=torch.float64), loss_scale, **settings)
    book.record(0, Coefficients(c=advantages, norm=vectors.norm(dim=1)), vectors @ vectors.t())
    return book


def step_of(diagnostics, books):
    diagnostics.start_step()
    for book in books:
        diagnostics.add(book, torch.ones(1, len(book.advantages), dtype=torch.bool))
    return diagnostics.sums


RULE = make_rule("euclidean")
LIKE = torch.zeros((), dtype=torch.float64)


def test_noise_and_signal_are_estimated_without_bias_and_averaged_before_they_are_divided():
    generator = torch.Generator().manual_seed(0)
    mean = torch.tensor([0.3, -0.2, 0.1], dtype=torch.float64)
    spread = torch.tensor([0.3, 0.2, 0.4], dtype=torch.float64)
    estimates, decay, moments = [], 0.5, None
    diagnostics = Diagnostics(RULE, decay, [], LIKE)
    for _ in range(200):
        X = mean + spread * torch.randn(6, 3, generator=generator, dtype=torch.float64)
        # On two ranks with three sequences each, whose gradient is the mean of both
        books = [ledger(RULE, X[:3] * 2, torch.ones(3).double()), ledger(RULE, X[3:] * 2, torch.ones(3).double())]
        figures = diagnostics.figures(step_of(diagnostics, books), X.sum(0).norm(), ranks=2)
        S, U = X.square().sum(), X.sum(0).square().sum()
        now = torch.stack([(6 * S - U) / 30, (U - S) / 30])
        estimates.append(now)
        moments = now if moments is None else decay * moments + (1 - decay) * now
        torch.testing.assert_close(diagnostics.moments[:2], moments)
        if moments[1] > 0:
            assert figures["noise_scale"].item() == pytest.approx((moments[0] / moments[1]).item())
        else:
            assert math.isnan(figures["noise_scale"])
    trace, signal = torch.stack(estimates).mean(0)
    assert trace == pytest.approx(spread.square().sum().item(), rel=0.1)
    assert signal == pytest.approx(mean.square().sum().item(), rel=0.1)


def test_the_losss_constant_is_in_the_gradients_as_it_is_in_their_norm():
    X = torch.randn(4, 3, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    A = torch.tensor([1.0, -2.0, 0.5, 1.0], dtype=torch.float64)
    sums = step_of(Diagnostics(RULE, 0.9, [], LIKE), [ledger(RULE, X, A, loss_scale=0.25)])
    assert sums[0] == pytest.approx((0.25 * A.unsqueeze(1) * X).square().sum().item()) and sums[1] == 4


def test_terms_without_an_advantage_and_a_norm_that_is_not_finite_leave_the_noise_scale_alone():
    X, ones = torch.eye(3, dtype=torch.float64), torch.ones(3, dtype=torch.float64)
    diagnostics = Diagnostics(RULE, 0.9, [], LIKE)
    sums = step_of(diagnostics, [ledger(RULE, X, ones), ledger(RULE, X, ones, beside_terms=True)])
    assert diagnostics.figures(sums, torch.tensor(2.0), 1) == {}
    sums = step_of(diagnostics, [ledger(RULE, X, ones)])
    assert diagnostics.figures(sums, None, 1) == {}
    diagnostics.figures(sums, torch.tensor(math.inf), 1)
    assert not diagnostics.moments.any()
    alone = step_of(diagnostics, [ledger(RULE, X[:1], ones[:1])])  # one sequence says nothing of noise
    diagnostics.figures(alone, torch.tensor(1.0), 1)
    assert not diagnostics.moments.any()


def test_cosines_leave_out_what_has_no_gradient_and_undo_the_signs_of_the_loss():
    V = torch.tensor([[1.0, 0.0], [1.0, 1.0], [0.0, 0.0], [-2.0, 0.0], [math.nan, 1.0]], dtype=torch.float64)
    signs = torch.tensor([1.0, -1.0, 1.0, 1.0, 1.0])
    flipped = signs.double().unsqueeze(1) * V
    alive = torch.tensor([[True, True, True, True, False]])
    sums = pair_cosines((flipped @ flipped.t()).unsqueeze(0), alive, torch.tensor([7, 7, 7, 3, 7]), signs)
    root = 0.5**0.5
    assert sums.tolist() == pytest.approx([root, 1, -1 - root, 2])


def test_the_noise_scale_goes_on_where_it_was_saved():
    runs = [RunningStatistics(1, 0.9, RULE, torch.device("cpu")) for _ in range(2)]
    generator = torch.Generator().manual_seed(0)

    def step(run, X):
        run.add(ledger(RULE, X, torch.ones(4).double()), [True])
        return run.step(X.sum(0).norm())

    first, second = (1 + torch.randn(4, 3, generator=generator, dtype=torch.float64) for _ in range(2))
    step(runs[0], first)
    runs[1].load_state_dict(runs[0].state_dict())
    figures = [step(run, second) for run in runs]
    assert figures[0] == figures[1] and "noise_scale" in figures[0]


@pytest.mark.parametrize(
    "kind,name,part",
    [
        ("linear", "model.layers.0.self_attn.q_proj", "attention"),
        ("lora", "base_model.model.model.layers.0.mlp.up_proj.lora_A.default", "mlp"),
        ("linear", "transformer.h.0.attn.c_attn", "attention"),
        ("rms norm", "model.layers.0.self_attn.q_norm", "norm"),
        ("elementwise", "transformer.h.0.ln_1", "norm"),
        ("embedding", "transformer.wpe", "embedding"),
        ("lm head", "lm_head", "head"),
        ("lora", "base_model.model.lm_head.lora_B.default", "head"),
        ("experts", "model.layers.0.block_sparse_moe.experts", "mlp"),
        ("any module", "backbone.layers.0.mixer", "other"),
    ],
)
def test_layers_are_told_apart_as_a_reader_would(kind, name, part):
    assert part_of(SimpleNamespace(kind=kind, name=name)) == part
