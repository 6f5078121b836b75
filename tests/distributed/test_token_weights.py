"""Token weights, losses of the ratio, and terms without an advantage are the same however ranks cut the batch."""

import importlib.util

import pytest
import torch

from tests import tiny
from tests.distributed.process_group import load_runs


# On two ranks, and what one rank does
RUNS = {
    "ddp-none-full-p3o": "ddp-none-full-p3o",
    "ddp-fisher-full-p3o": "ddp-fisher-full-p3o",
    "ddp-fisher-lora-p3o-stored": "ddp-fisher-lora-p3o",
    # One rank sees the tokens of the step at once
    "ddp-none-full-m2po": "ddp-none-full-m2po-joined",
    "ddp-none-lora-bapo": "ddp-none-lora-bapo-joined",
    "fsdp2-fisher-full-p3o": "ddp-fisher-full-p3o",
    "fsdp2-fisher-full-capo": "ddp-fisher-full-capo",
    "ddp-fisher-full-terms": "ddp-fisher-full-terms",
    "fsdp2-fisher-full-terms-silent": "ddp-fisher-full-terms-silent",
    "fsdp2-none-lora-terms": "ddp-none-lora-terms",
    "ddp-fisher-full-cispo": "ddp-fisher-full-cispo",
    "ddp-interacting-lora-gspo": "ddp-interacting-lora-gspo",
    "shard-fisher-full-kl": "loop-fisher-full-kl",
}
ZERO = {
    "zero2-fisher-full-p3o": "ddp-fisher-full-p3o",
    "zero3-fisher-full-p3o": "ddp-fisher-full-p3o",
    "zero3-fisher-lora-p3o-stored": "ddp-fisher-lora-p3o",
    "zero3-fisher-full-terms": "ddp-fisher-full-terms",
    "zero3-none-lora-terms-stored": "ddp-none-lora-terms",
}
# DeepSpeed divides what goes back by the number of accumulated microbatches, which on two ranks is one
ACCUMULATED = {"zero2-fisher-full-p3o": "ddp-fisher-full-p3o", "zero3-fisher-full-terms": "ddp-fisher-full-terms"}
if importlib.util.find_spec("deepspeed") is None:
    ZERO, ACCUMULATED = {}, {}

ALL = {**RUNS, **ZERO}

pytestmark = pytest.mark.distributed


def groups(folder):
    """Runs on one rank and on two; in both, the loops find the process group that a trainer leaves behind."""
    one = {*ALL.values(), *ACCUMULATED, "ddp-none-full-p3o-joined", "loop-fisher-full-none"}
    tiny.save(folder / "reference", "qwen3", tie=True)
    runs = {1: sorted(one), 2: ALL}
    return [(ranks, "token_weights_worker.py", folder / f"token_weights-{ranks}.pt", *runs[ranks]) for ranks in runs]


@pytest.fixture(scope="module")
def results(launched):
    """What each run left on each rank, of one and of two."""
    return {ranks: load_runs(launched / f"token_weights-{ranks}.pt") for ranks in (1, 2)}


def ranks(results, world, name):
    for result in results[world][name]:
        assert "error" not in result, result["error"]
    return results[world][name]


def distance(one, two):
    """The largest relative difference between the weights that two runs end with."""
    assert one["weights"].keys() == two["weights"].keys()
    pairs = [(two["weights"][name], expected) for name, expected in one["weights"].items()]
    return max((((weight - expected).norm() / expected.norm()).item()) for weight, expected in pairs)


def figures(result):
    return [{name: log[name] for name in log if name.startswith("off_policy/")} for log in result["logs"]]


@pytest.mark.parametrize("name", ALL)
def test_two_ranks_train_to_the_weights_of_one(name, results):
    (one,), (first, second) = ranks(results, 1, ALL[name]), ranks(results, 2, name)
    wrapped = {"d": "DistributedDataParallel", "f": "FSDP", "s": "FSDP", "z": "DeepSpeedEngine"}[name[0]]
    assert first["wrapped"].startswith(wrapped)
    assert distance(one, first) < 2e-6
    assert torch.equal(first["means"], second["means"]) or first["means"].isnan().all()
    if "logs" in one:
        assert figures(first) == figures(second), "ranks disagree"
        for left, right in zip(figures(one), figures(first), strict=True):
            assert left == pytest.approx(right, rel=1e-5)


@pytest.mark.parametrize("name", list(ACCUMULATED))
def test_deepspeed_accumulates_terms_as_they_are(name, results):
    (one,), (accumulated,) = ranks(results, 1, ACCUMULATED[name]), ranks(results, 1, name)
    assert accumulated["wrapped"] == "DeepSpeedEngine"
    assert distance(one, accumulated) < 2e-6


@pytest.mark.parametrize("name", [name for name in ALL if "p3o" in name])
def test_ess_is_that_of_all_tokens_on_all_ranks(name, results):
    (one,) = ranks(results, 1, ALL[name])
    for result in ranks(results, 2, name):
        ess = [line["off_policy/ess"] for line in figures(result)]
        assert ess == pytest.approx(one["ess"], rel=1e-5) and all(0.5 < x < 0.98 for x in ess)


def test_two_microbatches_in_one_give_the_same_weights(results):
    (together,), (one,) = ranks(results, 1, "ddp-none-full-p3o-joined"), ranks(results, 1, "ddp-none-full-p3o")
    assert distance(one, together) < 2e-6
    ess = [line["off_policy/ess"] for line in figures(together)]
    assert ess == pytest.approx(one["ess"], rel=1e-5)


def test_bounds_that_all_ranks_choose_are_not_those_without_data(results):
    (one,) = ranks(results, 1, "ddp-none-lora-bapo-joined")
    assert len({(line["off_policy/clip_low"], line["off_policy/clip_high"]) for line in figures(one)}) > 1
    (one,) = ranks(results, 1, "ddp-none-full-m2po-joined")
    assert all(0 < line["off_policy/gated"] < 0.5 for line in figures(one))
    (one,) = ranks(results, 1, "ddp-fisher-full-capo")
    assert all(0.1 < line["off_policy/gated"] < 0.9 for line in figures(one))


@pytest.mark.parametrize("name", [name for name in ALL if "terms" in name])
def test_entropy_bonus_is_adapted_to_the_tokens_of_all_ranks(name, results):
    (one,) = ranks(results, 1, ALL[name])
    expected = [line["entropy_coef"] for line in one["logs"]]
    assert expected == [pytest.approx(0.2 + 0.005 * step) for step in (1, 2, 3)]
    for result in ranks(results, 2, name):
        assert [line["entropy_coef"] for line in result["logs"]] == expected
        assert all(line["kl"] > 0.01 for line in result["logs"])


@pytest.mark.parametrize("name", [name for name in ALL if name.endswith(("cispo", "gspo"))])
def test_ratios_are_cut_as_on_one_rank(name, results):
    (one,) = ranks(results, 1, ALL[name])
    figure = "cispo_clip_ratio" if name.endswith("cispo") else "clip_ratio/region_mean"
    expected = [line[figure] for line in one["logs"]]
    first, second = ([line[figure] for line in result["logs"]] for result in ranks(results, 2, name))
    assert first == second and any(value > 0 for value in first) and 1 not in first
    if not name.endswith("cispo"):  # of whose tokens TRL counts those of all ranks together, microbatches one by one
        assert first == pytest.approx(expected, rel=1e-5)


def test_the_unscaled_term_is_not_without_effect(results):
    (plain,), (pulled,) = ranks(results, 1, "loop-fisher-full-none"), ranks(results, 1, "loop-fisher-full-kl")
    assert distance(plain, pulled) > 0.01
