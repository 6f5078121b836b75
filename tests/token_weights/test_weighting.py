"""What every weighting shares: sums over the microbatches of a step and over ranks, and their end."""

import pytest
import torch

from isopo_trl import ISOPOConfig
from isopo_trl.token_weights import Weighting, named
from tests import training


NAMES = ["sampler", "p3o", "kpo"]


class Ranks:
    """A second process that has seen the same as this one."""

    def reduce(self, tensor, reduction):
        assert reduction == "sum"
        return 2 * tensor

    def gather(self, tensor):
        return torch.cat([tensor, tensor])


def weighting(name, ranks=None):
    return named(name)(ISOPOConfig("unused", token_weights=name, **training.SETTINGS), ranks)


def microbatch(seed, shape=(3, 5)):
    generator = torch.Generator().manual_seed(seed)
    logps = -3 * torch.rand(shape, generator=generator, dtype=torch.float64)
    behaviour = logps + 0.5 * torch.randn(shape, generator=generator, dtype=torch.float64)
    mask = (torch.rand(shape, generator=generator) < 0.8).long()
    return logps.requires_grad_(), behaviour, mask


def effective_sample_size(microbatches):
    r = torch.cat([(logps - behaviour)[mask.bool()].exp().detach() for logps, behaviour, mask in microbatches])
    return r.sum() ** 2 / (len(r) * r.square().sum())


@pytest.mark.parametrize("ranks", [None, Ranks()], ids=["alone", "two ranks"])
@pytest.mark.parametrize("name", NAMES)
def test_figures_of_a_step_are_those_of_all_its_microbatches(name, ranks):
    own, batches = weighting(name, ranks), [microbatch(seed) for seed in range(3)]
    for _ in range(2):  # steps
        for batch in batches:
            own(*batch)
        figures = own.step()
        torch.testing.assert_close(figures["ess"], effective_sample_size(batches))
        assert own.step() == {}


@pytest.mark.parametrize("name", NAMES)
def test_neither_an_evaluation_nor_a_step_that_was_given_up_is_part_of_the_step(name):
    own = weighting(name)
    own(*microbatch(2))
    own.reset()
    own(*microbatch(0))
    with torch.no_grad():
        weighted = own(*microbatch(1))
    torch.testing.assert_close(own.figures(weighted.sums)["ess"], effective_sample_size([microbatch(1)]))
    torch.testing.assert_close(own.step()["ess"], effective_sample_size([microbatch(0)]))


def test_bound_of_p3o_follows_the_microbatches_of_the_step():
    own, batches = weighting("p3o"), [microbatch(seed) for seed in range(3)]
    for part, (logps, behaviour, mask) in enumerate(batches):
        weighted = own(logps, behaviour, mask)
        ess = effective_sample_size(batches[: part + 1])
        ratio = torch.where(mask.bool(), (logps - behaviour).detach().exp(), 1.0)
        torch.testing.assert_close(weighted.weights, torch.minimum(ratio, ess))
        z = torch.where(mask.bool(), (logps - behaviour).detach(), 0.0)
        torch.testing.assert_close(weighted.unscaled().slope, (1 - ess) * z * z.exp())


def test_pull_of_p3o_vanishes_on_policy():
    logps, _, mask = microbatch(0)
    assert weighting("p3o")(logps, logps.detach(), mask).unscaled() is None


def test_a_weighting_that_returns_bare_numbers_is_refused_by_its_name_and_told_what_to_return():
    class Bare(Weighting):
        name = "bare"

        def weigh(self, tokens):
            return tokens.log_ratio.detach().exp()

    with pytest.raises(TypeError, match=r"token_weights='bare': `weigh` of Bare returned Tensor .*Weighted\(weights="):
        Bare(None)(*microbatch(0))
