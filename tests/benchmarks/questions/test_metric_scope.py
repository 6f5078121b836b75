"""What `metric_scope.py` measures: rows of layers, norms and solutions, against explicit gradients."""

import json

import pytest
import torch

from tests import tiny


GROUP = 2


@pytest.fixture(scope="module")
def metric_scope():
    import metric_scope

    return metric_scope


@pytest.fixture(scope="module")
def model(metric_scope):
    model = tiny.model("qwen3").double().eval()
    metric_scope.untie(model)
    return model


def batch_of(metric_scope, seed):
    from fisher_norm import padded

    generator = torch.Generator().manual_seed(seed)
    lengths, prompts = [9, 6, 8, 11], [4, 3, 4, 5]
    return padded([torch.randint(3, 20, (n,), generator=generator).tolist() for n in lengths], prompts)


@pytest.mark.usefixtures("float64_throughout")
def test_kernel_and_norms_are_those_of_explicit_gradients(metric_scope, model, monkeypatch):
    from fisher_norm import chosen_layers, package_norms, sequence_gradient

    monkeypatch.setattr(metric_scope, "AT_ONCE", 3)
    names, batch = chosen_layers(model, 1), batch_of(metric_scope, 0)
    rows = metric_scope.layer_rows(model, batch, names)
    model.requires_grad_(True)
    norms = package_norms(model, batch)
    step = metric_scope.Step(batch.lengths, GROUP)
    assert {metric_scope.kind(name) for name in names} == set(metric_scope.KINDS)
    drawn = step.drawn(step.cut(2), 6)  # as many in each microbatch as there are
    assert drawn.sum() == 12
    V = {name: [] for name in names}
    for s in range(4):
        sequence_gradient(model, batch, s)
        for name in names:
            V[name].append(torch.cat([p.grad.flatten() for p in model.get_submodule(name).parameters(recurse=False)]))
    for name in names:
        v, own = torch.stack(V[name]), rows[name]
        sequence = step.sequence[own.place]
        found, K = metric_scope.scopes(step, own, own, sum(batch.lengths))
        torch.testing.assert_close(K, v @ v.t())
        # A step of one microbatch, and one whose kept rows are all its own, have the metric of the step
        overlap = metric_scope.overlaps(own, own, sequence, 4)
        expected = torch.tensor(norms[name]["fisher"]["all"][0], dtype=v.dtype)
        torch.testing.assert_close(metric_scope.fisher(overlap, own.square()), expected)
        for scope, size in (("all", "4"), ("sampled", "4"), ("kept", "64"), ("sampled", "step")):
            assert found[scope][size]["rank"] == pytest.approx(1)
            assert found[scope][size]["spread"] == pytest.approx(0, abs=1e-9)
        # One sequence by itself: the metric of its own positions, beside all and beside the others'
        alone, others = (
            torch.stack([metric_scope.fisher(overlap[part(s)][:, s], own.square()[part(s)]) for s in range(4)])
            for part in (sequence.eq, sequence.ne)
        )
        for key, reference in (("spread", expected), ("spread_elsewhere", others)):
            assert found["all"]["1"][key] == pytest.approx((alone / reference).log().std().item())
        # Projections keep inner products on average: that of many is near
        generator = torch.Generator().manual_seed(0)
        projected = torch.zeros(4, 20_000, dtype=v.dtype)
        projected.index_add_(0, sequence, own.projected(20_000, generator))
        torch.testing.assert_close(projected @ projected.t(), K, rtol=0, atol=0.1 * K.diagonal().max().item())


def test_errors_of_the_interacting_solution_are_those_of_its_equation(metric_scope):
    generator = torch.Generator().manual_seed(0)
    V = torch.randn(6, 9, generator=generator, dtype=torch.float64)
    K, A, c0 = V @ V.t(), torch.randn(6, generator=generator, dtype=torch.float64), torch.tensor(2.0)
    c = metric_scope.solution(K, A, c0)
    torch.testing.assert_close(K @ c + c0 * c, c0 * A)
    microbatch = torch.tensor([0, 1, 0, 1, 1, 0])
    torch.testing.assert_close(metric_scope.swept(K, A, c0, torch.zeros(6, dtype=torch.long)), c)
    swept = metric_scope.swept(K, A, c0, microbatch)
    second = microbatch == 1  # knows the first, and solves its own equations
    torch.testing.assert_close((K @ swept + c0 * swept)[second], (c0 * A)[second])
    first = ~second
    torch.testing.assert_close(swept[first], metric_scope.solution(K[first][:, first], A[first], c0))
    apart = metric_scope.solution(metric_scope.within(K, microbatch), A, c0)
    torch.testing.assert_close(apart[first], swept[first])


def test_results_are_drawn_and_put_into_tables(metric_scope, model, tmp_path):
    from fisher_norm import chosen_layers

    names = chosen_layers(model, 1)[:3]
    layers = metric_scope.measure(model, batch_of(metric_scope, 0), batch_of(metric_scope, 1), names, GROUP)
    model.requires_grad_(True)
    (tmp_path / "tiny.json").write_text(json.dumps({"model": "tiny", "layers": layers}))
    figure = tmp_path / "figure.png"
    metric_scope.main(["--draw", "--results", str(tmp_path), "--figure", str(figure)])
    assert figure.stat().st_size > 1000
    table = metric_scope.summary({"layers": layers})
    assert table.count("\n") > 20 and "nan" not in table
