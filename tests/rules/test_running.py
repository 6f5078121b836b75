"""Running means and reported figures against loops over the sequences of each step."""

import copy
import math

import pytest
import torch

from isopo_trl.rules import Coefficients, make_rule
from isopo_trl.rules.running import EXPECTATIONS, RunningStatistics


FISHER, EUCLIDEAN, BOTH, NTK = make_rule("fisher"), make_rule("euclidean"), make_rule("fig4"), make_rule("interacting")
RULES = [FISHER, EUCLIDEAN, BOTH, NTK]
NAMES = [rule.name for rule in RULES]
LAYERS = 3


def running(rule=BOTH, decay=0.9, layers=LAYERS):
    return RunningStatistics(layers, decay, rule, torch.device("cpu"))


def microbatch(m, seed, dead=(), broken=(), layers=LAYERS):
    """
    What a microbatch of m sequences gives, as a list (layers) of lists (sequences) of dicts; `dead` and `broken`
    are pairs (layer, sequence).
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
            entry |= {"a": advantages[s], "c": entry["multiplier"] * advantages[s]}
            entry["noise"] = 0.0
            entry["alive"] = (layer, s) not in (*dead, *broken)
            rows[-1].append(entry)
    return rows


def results(rows, rule):
    """The same as the layers hand it over: only what the rule computes."""
    given = {"c": True, "fisher": rule.needs.overlap, "norm": rule.needs.norm or rule.needs.ntk}
    given["raw"] = not rule.needs.ntk
    given["noise"] = True
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


def take(statistics, microbatches):
    for rows in microbatches:
        add(statistics, rows)
    return statistics.step()


@pytest.mark.parametrize("rule", RULES, ids=NAMES)
def test_the_first_step_is_the_mean_over_all_its_sequences(rule):
    # Microbatches of different sizes: every sequence counts once, not every microbatch
    microbatches = [microbatch(2, 0), microbatch(5, 1), microbatch(1, 2)]
    statistics = running(rule)
    assert not any(statistics.known)
    take(statistics, microbatches)
    assert all(statistics.known)
    for layer in range(LAYERS):
        assert statistics.mean[layer].tolist() == pytest.approx(step_means(microbatches, layer, rule))


@pytest.mark.parametrize("decay", [0.9, 0.5, 0.0])
def test_later_steps_enter_with_one_minus_the_decay(decay):
    steps = [[microbatch(3, 10 * k), microbatch(2, 10 * k + 1)] for k in range(4)]
    statistics = running(FISHER, decay)
    expected = [step_means(steps[0], layer, FISHER) for layer in range(LAYERS)]
    take(statistics, steps[0])
    for step in steps[1:]:
        take(statistics, step)
        for layer in range(LAYERS):
            new = step_means(step, layer, FISHER)
            expected[layer] = [decay * old + (1 - decay) * x for old, x in zip(expected[layer], new, strict=True)]
            assert statistics.mean[layer].tolist() == pytest.approx(expected[layer])


def test_the_means_stand_still_until_the_step_is_closed():
    statistics = running()
    take(statistics, [microbatch(3, 0)])
    before = statistics.mean.clone()
    add(statistics, microbatch(3, 1))
    assert torch.equal(statistics.mean, before)


def test_a_layer_without_a_gradient_keeps_its_history():
    everybody = [(1, s) for s in range(3)]
    statistics = running()
    # Layer 1 has none at first: no history yet
    take(statistics, [microbatch(3, 0, dead=everybody)])
    assert statistics.known == [True, False, True]
    assert statistics.expectations(1) is None and statistics.expectations(0) is not None
    # Its first gradient comes in whole, while the others are averaged with their past
    second = [microbatch(3, 1)]
    take(statistics, second)
    assert all(statistics.known)
    assert statistics.mean[1].tolist() == pytest.approx(step_means(second, 1, BOTH))
    # And stays when the gradient is gone again
    take(statistics, [microbatch(3, 2, dead=everybody)])
    assert statistics.mean[1].tolist() == pytest.approx(step_means(second, 1, BOTH))
    assert statistics.mean[0].tolist() != pytest.approx(step_means(second, 0, BOTH))


@pytest.mark.parametrize("rule", [*RULES, make_rule("none")], ids=[*NAMES, "none"])
def test_a_layer_that_the_backward_pass_did_not_reach_counts_nowhere(rule):
    # Rule "none" has its coefficients in the ledger from the start: only `reached` tells such a layer apart
    rows = microbatch(3, 0)
    whole, part = running(rule, layers=2), running(rule)
    add(part, rows, reached=[True, False, True])
    add(whole, [rows[0], rows[2]])
    assert part.step() == pytest.approx(whole.step())
    assert part.known == [True, False, True]
    assert torch.equal(part.mean[[0, 2]], whole.mean)
    assert part.mean[1].abs().sum() == 0
    assert part.expectations(1) is None


@pytest.mark.parametrize("rule", [*RULES, make_rule("none")], ids=[*NAMES, "none"])
def test_a_ledger_opens_with_the_means_and_no_figures(rule):
    statistics = running(rule)
    take(statistics, [microbatch(3, 0, dead=[(1, 0), (1, 1), (1, 2)] if any(rule.needs) else ())])
    advantages = torch.tensor([2.0, -1.0, 0.5, 0.0])
    ledger = statistics.open(advantages, loss_scale=0.25)
    assert ledger.advantages.tolist() == advantages.tolist() and ledger.advantages.dtype == torch.float64
    assert ledger.loss_scale == 0.25
    # No layer has a figure yet, and without statistics the coefficients are the advantages
    expected = torch.zeros(LAYERS, 5, 4, dtype=torch.float64)
    if not any(rule.needs):
        expected[:, 0] = ledger.advantages
    assert torch.equal(ledger.table, expected)
    for layer, row in enumerate(ledger.history):
        known = statistics.expectations(layer)
        assert row[5] == float(known is not None)
        if known is not None:
            assert torch.equal(row[:5], torch.cat([known.mean_square, known.scale.view(1), known.multiplier.view(1)]))
            x, fx = (statistics.mean[layer, EXPECTATIONS.index(name)].item() for name in ("x", "fx"))
            scales = (x / fx, fx / x) if fx else (0, 0)
            assert (known.scale.item(), known.multiplier.item()) == pytest.approx(scales)


def test_a_ledger_keeps_the_advantages_it_was_opened_with():
    advantages = torch.ones(3, dtype=torch.float64)
    ledger = running().open(advantages)
    advantages.zero_()
    assert ledger.advantages.tolist() == [1, 1, 1]


def test_an_open_ledger_does_not_see_the_running_means_move_on():
    statistics = running()
    take(statistics, [microbatch(3, 0)])
    ledger = statistics.open(torch.ones(3))
    before = ledger.history.clone()
    take(statistics, [microbatch(3, 1)])
    assert torch.equal(ledger.history, before)
    assert not torch.equal(statistics.history, before)


def test_a_step_without_a_microbatch_changes_nothing():
    statistics = running()
    statistics.step()
    assert not any(statistics.known) and statistics.mean.abs().sum() == 0
    take(statistics, [microbatch(3, 0)])
    before = statistics.mean.clone()
    statistics.step()
    assert torch.equal(statistics.mean, before)


def test_sequences_without_a_gradient_do_not_pull_the_mean_down():
    microbatches = [microbatch(3, 0, dead=[(0, 1), (2, 0)]), microbatch(2, 1, dead=[(0, 0), (0, 1)])]
    statistics = running()
    take(statistics, microbatches)
    for layer in range(LAYERS):
        assert statistics.mean[layer].tolist() == pytest.approx(step_means(microbatches, layer, BOTH))


def test_nothing_non_finite_gets_into_the_means_or_the_figures():
    microbatches = [microbatch(3, 0, broken=[(0, 1), (2, 1)]), microbatch(2, 1, broken=[(0, 0)])]
    everything = [microbatch(2, 2, broken=[(layer, s) for layer in range(LAYERS) for s in range(2)])]
    statistics = running()
    figures = take(statistics, microbatches)
    for layer in range(LAYERS):
        assert statistics.mean[layer].tolist() == pytest.approx(step_means(microbatches, layer, BOTH))
    assert all(map(math.isfinite, figures.values())), figures
    # A sequence broken in two layers is one broken sequence
    assert figures["broken_sequences"] == 2

    before = statistics.mean.clone()
    figures = take(statistics, everything)
    assert torch.equal(statistics.mean, before)
    assert all(map(math.isfinite, figures.values()))
    assert figures["broken_sequences"] == 2


def noisy(m, seed, noise, scale=1e-9):
    """A microbatch in which the sequences `noise`, pairs (layer, sequence), have next to no gradient, marked so."""
    rows = microbatch(m, seed)
    for layer, s in noise:
        entry = rows[layer][s]
        entry |= {"fisher": scale * entry["fisher"], "norm": scale * entry["norm"], "noise": 1.0, "alive": False}
    return rows


def test_noise_counts_neither_in_the_means_nor_in_the_figures():
    noise = [(0, 1), (2, 0)]
    microbatches = [noisy(3, 0, noise), microbatch(2, 1)]
    without = [microbatch(3, 0, dead=noise), microbatch(2, 1)]
    statistics, expected = running(), running()
    assert take(statistics, microbatches) == take(expected, without)
    assert torch.equal(statistics.mean, expected.mean) and all(statistics.known)


def test_a_broken_sequence_is_counted_whatever_noise_is_beside_it():
    rows = noisy(3, 0, [(0, 1), (1, 2)])
    rows[0][1] |= {"c": math.nan}  # a sequence that is both
    rows[2][0] |= {"fisher": math.inf, "alive": False}
    statistics = running()
    assert take(statistics, [rows])["broken_sequences"] == 2


def test_a_history_beside_which_everything_is_noise_is_forgotten():
    """One outlier in the running means would otherwise stop the layer for good, as noise does not change them."""
    everybody = [(1, s) for s in range(3)]
    statistics = running()
    take(statistics, [microbatch(3, 0)])
    before = statistics.mean.clone()
    # Not while one microbatch has a gradient that counts
    take(statistics, [noisy(3, 1, everybody), microbatch(2, 2)])
    assert all(statistics.known) and statistics.mean[1].tolist() != before[1].tolist()
    take(statistics, [noisy(3, 3, everybody), noisy(3, 4, everybody)])
    assert statistics.known == [True, False, True] and not statistics.mean[1].any()
    assert statistics.expectations(1) is None
    assert statistics.open(torch.ones(3)).history[:, 5].tolist() == [1, 0, 1]
    # From there on it is as after a first step
    last = [microbatch(3, 5)]
    take(statistics, last)
    assert statistics.mean[1].tolist() == pytest.approx(step_means(last, 1, BOTH))
    other = running()
    other.load_state_dict(copy.deepcopy(statistics.state_dict()))
    assert torch.equal(other.history, statistics.history)


def test_state_survives_saving_and_continues_the_same():
    steps = [[microbatch(3, k, dead=[(1, 0), (1, 1), (1, 2)])] for k in range(3)]
    one, other = running(), running()
    take(one, steps[0])
    take(one, steps[1])
    state = copy.deepcopy(one.state_dict())
    take(one, steps[2])  # must not reach back into the state that was saved
    other.load_state_dict(state)
    assert other.known == [True, False, True]
    take(other, steps[2])
    assert torch.equal(one.mean, other.mean) and one.known == other.known


def test_a_saved_state_is_not_changed_by_later_steps():
    statistics = running()
    take(statistics, [microbatch(3, 0)])
    state = statistics.state_dict()
    saved = copy.deepcopy(state)
    take(statistics, [microbatch(3, 1)])
    assert torch.equal(state["mean"], saved["mean"]) and state["known"] == saved["known"]


@pytest.mark.parametrize("rule", RULES, ids=NAMES)
def test_figures_are_those_of_the_sequences_of_the_last_step(rule):
    microbatches = [microbatch(4, 0, dead=[(0, 1)], broken=[(2, 3)]), microbatch(2, 1), microbatch(3, 2)]
    statistics = running(rule)
    take(statistics, [microbatch(5, 9)])  # an earlier step must not be seen
    figures = take(statistics, microbatches)
    needs = rule.needs

    entries = [entry for layer in range(LAYERS) for entry in alive_entries(microbatches, layer)]
    multipliers = [entry["multiplier"] for entry in entries]
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


def test_an_undefined_multiplier_is_left_out_of_the_figures_but_not_of_the_means():
    # c_s / A_s where A_s = 0
    rows = microbatch(3, 0, layers=1)
    rows[0][1]["a"] = 0.0
    statistics = running(NTK, layers=1)
    figures = take(statistics, [rows])
    defined = [rows[0][0]["multiplier"], rows[0][2]["multiplier"]]
    assert figures["multiplier_mean"] == pytest.approx(sum(defined) / 2)
    assert (figures["multiplier_min"], figures["multiplier_max"]) == pytest.approx((min(defined), max(defined)))
    assert figures["euclidean_norm"] == pytest.approx(sum(entry["norm"] for entry in rows[0]) / 3)
    assert statistics.mean[0].tolist() == pytest.approx(step_means([rows], 0, NTK))


def test_figures_of_a_step_without_gradients_are_zero():
    statistics = running()
    figures = take(statistics, [microbatch(2, 0, dead=[(layer, s) for layer in range(LAYERS) for s in range(2)])])
    assert set(figures.values()) == {0.0}
