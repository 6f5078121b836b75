"""The LM head on a CPU where it is not trained: what TRL's function gives, and the definition."""

import pytest
import torch

from isopo_trl.loss import frozen_head
from isopo_trl.trl_seam.head import ChunkedLogProbFunction


pytestmark = pytest.mark.usefixtures("float64_throughout")

N, V, D = 6, 23, 5


def example(dtype=torch.float64):
    generator = torch.Generator().manual_seed(0)
    hidden, weight = (3 * torch.randn(n, D, generator=generator, dtype=torch.float64) for n in (N, V))
    bias = torch.randn(V, generator=generator, dtype=torch.float64)
    targets = torch.randint(V, (N,), generator=generator)
    return hidden.to(dtype).requires_grad_(), weight.to(dtype), bias.to(dtype), targets


@pytest.mark.parametrize("has_bias", [False, True], ids=["", "bias"])
@pytest.mark.parametrize("tile", [1, 40, 2**19])
def test_log_probabilities_entropies_and_gradients_are_those_of_the_definition(tile, has_bias, monkeypatch):
    monkeypatch.setattr(frozen_head, "_TILE", tile)
    hidden, weight, bias, targets = example()
    bias = bias if has_bias else None
    settings = (0.7, 8, None, 0.3, ("log_probs", "entropy"))
    logps, entropy, *others = frozen_head.frozen_head(hidden, weight, bias, targets, *settings)
    logits = torch.nn.functional.linear(hidden, weight, bias) * 0.3 / 0.7
    expected = logits.log_softmax(1)
    of_targets, expected_entropy = expected.gather(1, targets[:, None])[:, 0], -(expected.exp() * expected).sum(1)
    torch.testing.assert_close(logps, of_targets, rtol=1e-9, atol=1e-12)
    torch.testing.assert_close(entropy, expected_entropy, rtol=1e-9, atol=1e-12)
    assert others == [None] * 3
    slopes = torch.linspace(-1, 2, N, dtype=torch.float64)
    for pair in ((logps, of_targets), (logps + entropy, of_targets + expected_entropy)):
        found, wanted = (torch.autograd.grad((slopes * x).sum(), hidden, retain_graph=True)[0] for x in pair)
        torch.testing.assert_close(found, wanted, rtol=1e-9, atol=1e-12)


def test_nothing_scored_has_a_gradient_of_zero():
    hidden, weight, _, targets = example()
    logps, entropy, *_ = frozen_head.frozen_head(hidden[:0], weight, None, targets[:0], 1.0, 8, outputs=("entropy",))
    logps.sum().backward()
    assert logps.shape == entropy.shape == (0,) and not hidden.grad.any()


@pytest.mark.parametrize("given", [{"softcap": 30.0}, {"outputs": ("is_top1",), "entropy_counts": True}], ids=str)
def test_what_gains_nothing_goes_to_trl(given, monkeypatch):
    calls = []
    monkeypatch.setattr(ChunkedLogProbFunction, "apply", lambda *args: calls.append(args))
    frozen_head.frozen_head(*example(), 1.0, 8, **given)
    with torch.no_grad():
        frozen_head.frozen_head(*example(), 1.0, 8, outputs=("is_top1",))
    assert len(calls) == 2 and len(calls[0]) == len(calls[1]) == 9


@pytest.mark.parametrize("with_entropy", [False, True], ids=["", "entropy"])
@pytest.mark.parametrize("given", [{"outputs": ("entropy", "is_top1")}, {"dtype": torch.bfloat16}], ids=str)
def test_elsewhere_outputs_are_trls_bit_for_bit(given, with_entropy):
    """Other outputs and other dtypes than the loop for CPUs knows, as everything is on a GPU."""
    dtype = given.get("dtype", torch.float64)
    settings = (0.7, 8, None, 0.3, given.get("outputs", ("entropy",)))
    hidden, *others = example(dtype)
    found = frozen_head.frozen_head(hidden, *others, *settings)
    expected = ChunkedLogProbFunction.apply(hidden, *others, *settings)
    assert all(x is y if x is None else torch.equal(x, y) for x, y in zip(found, expected, strict=True))
    slopes = torch.linspace(-1, 2, N, dtype=found[0].dtype)
    totals = [
        (slopes * (logps + entropy if with_entropy else logps)).sum() for logps, entropy, *_ in (found, expected)
    ]
    of_found, of_expected = (torch.autograd.grad(total, hidden)[0] for total in totals)
    rtol, atol = (1e-9, 1e-12) if dtype == torch.float64 else (0.03, 0.03)
    torch.testing.assert_close(of_found, of_expected, rtol=rtol, atol=atol)
    assert of_found.dtype == dtype
