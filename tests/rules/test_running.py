"""Running means and reported figures against loops over the sequences of each step."""

import copy
import math

import pytest
import torch

from isopo_trl.rules import Coefficients, make_rule
from isopo_trl.rules.running import EXPECTATIONS, RunningStatistics


FISHER, EUCLIDEAN, BOTH, NTK = make_rule("fisher"), make_rule("euclidean"), make_rule("fig4"), make_rule("interacting")
RULES = [FISHER, EUCLIDEAN, BOTH, NTK]
LAYERS = 3
EVERYBODY = [(1, s) for s in range(3)]  # at layer 1


def running(rule=BOTH, decay=0.9, layers=LAYERS):
    return RunningStatistics(layers, decay, rule, torch.device("cpu"))


def microbatch(m, seed, dead=(), broken=(), noise=(), layers=LAYERS):
    """
    What a microbatch of m sequences gives, as a list (layers) of lists (sequences) of dicts; `dead`, `broken` and
    `noise`, which have next to no gradient and are marked so, are pairs (layer, sequence).
    """
    generator = torch.Generator().manual_seed(seed)
    advantages = [(-1) ** s * (0.5 + s) for s in range(m)]
    rows = []
    for layer in range(layers):
        rows.append([])
        for s in range(m):
            numbers = (0.5 + torch.rand(4, generator=generator, dtype=torch.float64)).tolist()
            entry = dict(zip(("multiplier", "fisher", "norm", "raw"), numbers, strict=True))
            if (layer, s) in dead:
                entry = dict.fromkeys(entry, 0.0)
            if (layer, s) in broken:
                entry = {**dict.fromkeys(entry, math.nan), "fisher": math.inf}
            if (layer, s) in noise:
                entry |= {"fisher": 1e-9 * entry["fisher"], "norm": 1e-9 * entry["norm"]}
            entry |= {"a": advantages[s], "c": entry["multiplier"] * advantages[s]}
            entry["noise"] = float((layer, s) in noise)
            entry["alive"] = (layer, s) not in (*dead, *broken, *noise)
            rows[-1].append(entry)
    return rows


def results(rows, rule):
    """The same as the layers hand it over: only what the rule computes."""
    given = {"c": True, "fisher": rule.needs.overlap, "norm": rule.needs.norm or rule.needs.ntk}
    given |= {"raw": not rule.needs.ntk, "noise": True}
    return [
        Coefficients(
            **{
                name: torch.tensor([entry[name] for entry in layer], dtype=torch.float64) if there else None
                for name, there in given.items()
            }
        )
        for layer in rows
    ]


def add(statistics, rows, reached=None):
    advantages = torch.tensor([entry["a"] for entry in rows[0]], dtype=torch.float64)
    ledger = statistics.open(advantages)
    for layer, result in enumerate(results(rows, statistics.rule)):
        if reached is None or reached[layer]:
            ledger.record(layer, result)
    statistics.add(ledger, reached or [True] * len(rows))


def take(statistics, microbatches):
    for rows in microbatches:
        add(statistics, rows)
    return statistics.step()


def alive_entries(microbatches, layer):
    return [entry for rows in microbatches for entry in rows[layer] if entry["alive"]]


def step_means(microbatches, layer, rule):
    """The step's mean of every expectation over the layer's sequences with a gradient, 0 for what is not computed."""
    entries = alive_entries(microbatches, layer)
    fisher, norm = rule.needs.overlap, rule.needs.norm or rule.needs.ntk
    x = "fisher" if fisher else "norm"
    values = {
        "fisher^2": [e["fisher"] ** 2 * fisher for e in entries],
        "norm^2": [e["norm"] ** 2 * norm for e in entries],
        "relative^2": [(e["fisher"] / e["norm"]) ** 2 * (fisher and norm) for e in entries],
        "fx": [e["raw"] * e[x] * (not rule.needs.ntk) for e in entries],
        "x": [e[x] for e in entries],
    }
    return [sum(values[name]) / len(entries) for name in EXPECTATIONS]


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.name)
def test_every_sequence_with_a_gradient_counts_once_in_the_first_mean(rule):
    """Microbatches of different sizes, sequences without a gradient at some layers, broken ones and noise."""
    microbatches = [
        microbatch(2, 0, dead=[(0, 1)]),
        microbatch(5, 1, broken=[(2, 0), (1, 0)], noise=[(1, 3)]),
        microbatch(1, 2, dead=[(2, 0)]),
    ]
    statistics = running(rule)
    assert not any(statistics.known)
    figures = take(statistics, microbatches)
    assert all(statistics.known)
    for layer in range(LAYERS):
        assert statistics.mean[layer].tolist() == pytest.approx(step_means(microbatches, layer, rule))
    # A sequence broken in two layers is one broken sequence
    assert all(map(math.isfinite, figures.values())) and figures["broken_sequences"] == 1


@pytest.mark.parametrize("decay", [0.9, 0.0])
def test_later_steps_enter_with_one_minus_the_decay_when_they_are_closed(decay):
    steps = [[microbatch(3, 10 * k), microbatch(2, 10 * k + 1)] for k in range(3)]
    statistics = running(FISHER, decay)
    expected = [step_means(steps[0], layer, FISHER) for layer in range(LAYERS)]
    take(statistics, steps[0])
    for step in steps[1:]:
        before = statistics.mean.clone()
        for rows in step:
            add(statistics, rows)
        assert torch.equal(statistics.mean, before)
        statistics.step()
        for layer in range(LAYERS):
            new = step_means(step, layer, FISHER)
            expected[layer] = [decay * old + (1 - decay) * x for old, x in zip(expected[layer], new, strict=True)]
            assert statistics.mean[layer].tolist() == pytest.approx(expected[layer])
    before = statistics.mean.clone()
    statistics.step()  # without a microbatch
    assert torch.equal(statistics.mean, before)


def test_a_layer_without_a_gradient_keeps_its_history():
    statistics = running()
    # Layer 1 has none at first: no history yet
    take(statistics, [microbatch(3, 0, dead=EVERYBODY)])
    assert statistics.known == [True, False, True]
    assert statistics.expectations(1) is None and statistics.expectations(0) is not None
    # Its first gradient comes in whole, while the others are averaged with their past
    second = [microbatch(3, 1)]
    take(statistics, second)
    assert statistics.mean[1].tolist() == pytest.approx(step_means(second, 1, BOTH))
    # And stays when the gradient is gone again, or broken
    for kind in ("dead", "broken"):
        take(statistics, [microbatch(3, 2, **{kind: EVERYBODY})])
        assert statistics.mean[1].tolist() == pytest.approx(step_means(second, 1, BOTH))
    assert statistics.mean[0].tolist() != pytest.approx(step_means(second, 0, BOTH))


@pytest.mark.parametrize("rule", [*RULES, make_rule("none")], ids=lambda rule: rule.name)
def test_a_layer_that_the_backward_pass_did_not_reach_counts_nowhere(rule):
    # Rule "none" has its coefficients in the ledger from the start: only `reached` tells such a layer apart
    rows = microbatch(3, 0)
    whole, part = running(rule, layers=2), running(rule)
    add(part, rows, reached=[True, False, True])
    add(whole, [rows[0], rows[2]])
    assert part.step() == pytest.approx(whole.step())
    assert part.known == [True, False, True] and part.expectations(1) is None
    assert torch.equal(part.mean[[0, 2]], whole.mean) and part.mean[1].abs().sum() == 0


@pytest.mark.parametrize("rule", [*RULES, make_rule("none")], ids=lambda rule: rule.name)
def test_a_ledger_keeps_the_means_and_advantages_that_it_was_opened_with(rule):
    statistics = running(rule)
    take(statistics, [microbatch(3, 0, dead=EVERYBODY if any(rule.needs) else ())])
    advantages = torch.tensor([2.0, -1.0, 0.5, 0.0])
    ledger = statistics.open(advantages, loss_scale=0.25)
    for layer, row in enumerate(ledger.history):
        known = statistics.expectations(layer)
        assert row[5] == float(known is not None)
        if known is not None:
            assert torch.equal(row[:5], torch.cat([known.mean_square, known.scale.view(1), known.multiplier.view(1)]))
            x, fx = (statistics.mean[layer, EXPECTATIONS.index(name)].item() for name in ("x", "fx"))
            scales = (x / fx, fx / x) if fx else (0, 0)
            assert (known.scale.item(), known.multiplier.item()) == pytest.approx(scales)
    before = ledger.history.clone()
    advantages.zero_()
    take(statistics, [microbatch(3, 1)])
    assert torch.equal(ledger.history, before) and (rule.name == "none" or not torch.equal(statistics.history, before))
    assert ledger.advantages.tolist() == [2, -1, 0.5, 0] and ledger.advantages.dtype == torch.float64


def test_a_broken_sequence_is_counted_whatever_noise_is_beside_it():
    rows = microbatch(3, 0, noise=[(0, 1), (1, 2)])
    rows[0][1] |= {"c": math.nan}  # a sequence that is both
    rows[2][0] |= {"fisher": math.inf, "alive": False}
    assert take(running(), [rows])["broken_sequences"] == 2


def test_a_history_beside_which_everything_is_noise_is_forgotten():
    """One outlier in the running means would otherwise stop the layer for good, as noise does not change them."""
    statistics = running()
    take(statistics, [microbatch(3, 0)])
    before = statistics.mean.clone()
    # Not while one microbatch has a gradient that counts
    take(statistics, [microbatch(3, 1, noise=EVERYBODY), microbatch(2, 2)])
    assert all(statistics.known) and statistics.mean[1].tolist() != before[1].tolist()
    take(statistics, [microbatch(3, 3, noise=EVERYBODY), microbatch(3, 4, noise=EVERYBODY)])
    assert statistics.known == [True, False, True] and not statistics.mean[1].any()
    assert statistics.expectations(1) is None
    assert statistics.open(torch.ones(3)).history[:, 5].tolist() == [1, 0, 1]
    # From there on it is as after a first step
    last = [microbatch(3, 5)]
    take(statistics, last)
    assert statistics.mean[1].tolist() == pytest.approx(step_means(last, 1, BOTH))


def test_a_saved_state_continues_the_same_and_is_not_changed_by_later_steps():
    steps = [[microbatch(3, k, dead=EVERYBODY)] for k in range(3)]
    one, other = running(), running()
    take(one, steps[0])
    take(one, steps[1])
    state = one.state_dict()
    saved = copy.deepcopy(state)
    take(one, steps[2])
    assert torch.equal(state["mean"], saved["mean"]) and state["known"] == saved["known"] == [True, False, True]
    other.load_state_dict(state)
    take(other, steps[2])
    assert torch.equal(one.mean, other.mean) and torch.equal(one.history, other.history) and one.known == other.known


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.name)
def test_figures_are_those_of_the_sequences_of_the_last_step(rule):
    microbatches = [microbatch(4, 0, dead=[(0, 1)], broken=[(2, 3)], noise=[(1, 2)]), microbatch(2, 1)]
    for rows in microbatches[1]:
        rows[1]["a"] = 0.0  # c_s / A_s is not defined, and counts in no figure of multipliers
    statistics = running(rule)
    take(statistics, [microbatch(5, 9)])  # an earlier step must not be seen
    figures = take(statistics, microbatches)
    needs = rule.needs

    entries = [entry for layer in range(LAYERS) for entry in alive_entries(microbatches, layer)]
    multipliers = [entry["multiplier"] for entry in entries if entry["a"]]
    participation = []
    for layer in range(LAYERS):
        c = [entry["c"] for entry in alive_entries(microbatches, layer)]
        participation.append(sum(map(abs, c)) ** 2 / sum(x * x for x in c))

    def mean(value):
        return sum(map(value, entries)) / len(entries)

    expected = {
        "multiplier_mean": sum(multipliers) / len(multipliers),
        "multiplier_min": min(multipliers),
        "multiplier_max": max(multipliers),
        "effective_sequences": sum(participation) / LAYERS,
        "broken_sequences": 1,
    }
    if needs.overlap:
        expected["fisher_norm"] = mean(lambda e: e["fisher"])
    if needs.norm or needs.ntk:
        expected["euclidean_norm"] = mean(lambda e: e["norm"])
    if needs.overlap and needs.norm:
        expected["relative_norm"] = mean(lambda e: e["fisher"] / e["norm"])
    assert figures == pytest.approx(expected)


def test_figures_of_a_step_without_gradients_are_zero():
    dead = [(layer, s) for layer in range(LAYERS) for s in range(2)]
    assert set(take(running(), [microbatch(2, 0, dead=dead)]).values()) == {0.0}
