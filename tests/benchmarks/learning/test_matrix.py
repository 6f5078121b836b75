"""The matrix of the learning benchmark: which runs there are, what they are called, and which rate is the best."""

import itertools
from pathlib import Path

import pytest
import yaml


FILE = Path(__file__).parents[3] / "benchmarks" / "learning" / "matrix.yaml"


@pytest.fixture(scope="module")
def module():
    import matrix

    return matrix


@pytest.fixture(scope="module")
def matrix(module):
    return module.Matrix.read(FILE)


def small(groups, **others):
    """A matrix of two methods."""
    return {
        "defaults": {"task": "gsm8k", "steps": 4, "rule": "none", "completions": 8, "microbatch": 4},
        "tasks": {"gsm8k": {}, "sums": {"steps": 2}},
        "expected": {"start": 10, "end": 7, "step": 1, "microbatch": 0.5, "alone": 5},
        "methods": {"plain": {}, "fisher": {"rule": "fisher"}},
        "groups": groups,
        **others,
    }


RATES = {"group": "rates", "with": {"seed": 0}, "over": {"learning_rate": [1e-6, 2e-6, 4e-6], "method": ["fisher"]}}
SEEDS = {"group": "seeds", "with": {"learning_rate": "best"}, "over": {"seed": [1, 2], "method": ["fisher"]}}


def result(*accuracies):
    return {"validations": [{"accuracy": accuracy} for accuracy in accuracies]}


def test_the_first_key_of_a_group_turns_slowest(module):
    over = {"seed": [0, 1], "method": ["plain", "fisher"]}
    matrix = module.Matrix(small([{"group": "a", "with": {"learning_rate": 1e-6}, "over": over}]))
    expected = [f"{method}-lr1e-6-seed{seed}" for seed, method in itertools.product([0, 1], ["plain", "fisher"])]
    assert [run.name for run in matrix.runs({})] == expected


def test_a_run_that_two_groups_ask_for_is_made_once(module):
    matrix = module.Matrix(small([RATES, {**RATES, "group": "again"}]))
    assert len(list(matrix.runs({}))) == 3


def test_settings_of_task_method_and_group_go_before_the_defaults(module):
    groups = [{"group": "a", "with": {"task": "sums", "seed": 3}, "over": {"method": ["fisher"]}}]
    (run,) = module.Matrix(small(groups)).runs({})
    given = {"task": "sums", "steps": 2, "rule": "fisher", "seed": 3, "method": "fisher"}
    assert run.settings == {"completions": 8, "microbatch": 4} | given


def test_runs_at_the_best_rate_wait_for_the_whole_grid(module):
    matrix = module.Matrix(small([RATES, SEEDS]))
    part = {"fisher-lr1e-6-seed0": result(0.3), "fisher-lr2e-6-seed0": result(0.9)}
    waiting = [item for item in matrix.runs(part) if isinstance(item, module.Entry)]
    assert [(entry.method, entry.given["seed"]) for entry in waiting] == [("fisher", 1), ("fisher", 2)]


@pytest.mark.parametrize(
    ("accuracies", "best"),
    [
        ([(0.1, 0.3), (0.2, 0.25), (0.1, 0.2)], "2e-6"),  # 0.2, 0.225, 0.15: the last two count alike
        ([(0.9, 0.1, 0.1), (0.0, 0.3, 0.3), (0.0, 0.2, 0.2)], "2e-6"),  # an earlier one does not
        ([(0.2, 0.2), (0.2, 0.2), (0.2, 0.2)], "1e-6"),  # of equals, the lowest
    ],
)
def test_the_best_rate_is_that_of_the_best_held_back_accuracy(module, accuracies, best):
    matrix = module.Matrix(small([RATES, SEEDS]))
    names = [f"fisher-lr{rate}-seed0" for rate in ("1e-6", "2e-6", "4e-6")]
    finished = {name: result(*values) for name, values in zip(names, accuracies, strict=True)}
    assert [run.name for run in matrix.runs(finished)][3:] == [f"fisher-lr{best}-seed1", f"fisher-lr{best}-seed2"]


def took(task, steps, parallel, total, train, microbatch=4):
    settings = {"task": task, "steps": steps, "microbatch": microbatch}
    seconds = {"total": total, "train": train, "validation": 6, "test": 3}
    return {"settings": settings, "hardware": {"parallel": parallel}, "seconds": seconds, "validations": [{}, {}]}


def test_what_a_run_takes_is_known_from_runs_made_like_it(module):
    matrix = module.Matrix(small([RATES]))
    run = next(matrix.runs({}))  # 4 steps
    others = {
        "another task": took("sums", 4, 6, 1000, 900),
        "alone on the machine": took("gsm8k", 4, 1, 7, 4),
        "start": took("gsm8k", 0, 6, 500, 0),
        "smaller microbatches": took("gsm8k", 4, 6, 5000, 4000, microbatch=1),
    }
    assert matrix.expected_seconds(run, others, 6) == 10 + 4 * 6 * (1 + 2 * 0.5)
    assert matrix.expected_seconds(run, {}, 2) == 10 + 4 * 5  # no faster than alone
    like = {"a": took("gsm8k", 10, 6, 50, 20), "b": took("gsm8k", 2, 6, 60, 20), "c": took("gsm8k", 4, 6, 56, 20)}
    # 30, 40, 36 beside the steps, and 2, 10, 5 per step
    assert matrix.expected_seconds(run, others | like, 6) == 36 + 4 * 5
    assert matrix.expected_end(run, others | like, 6) == 6 / 2 + 3
    # Of fewer at a time, steps take less; of many more there is nothing to go by
    assert matrix.expected_seconds(run, others | like, 5) == 36 + 4 * 5  # no faster than alone
    like |= {name: took("gsm8k", 4, 8, 100, 64) for name in "de"}
    assert matrix.expected_seconds(run, others | like, 7) == 36 + 4 * 16 * 7 / 8
    assert matrix.expected_seconds(run, others | like, 9) == 10 + 4 * 9 * (1 + 2 * 0.5)
    # Under the multi-process service they would take another time
    assert matrix.expected_seconds(run, others | like, 6, shared=True) == 10 + 4 * 6 * (1 + 2 * 0.5)
    assert matrix.expected_end(run, others | like, 6, shared=True) == 7
    like["a"]["hardware"]["shared_kernels"] = True
    assert matrix.expected_seconds(run, others | like, 6, shared=True) == 30 + 4 * 2


def test_a_group_that_asks_for_what_is_not_there_is_refused(module):
    with pytest.raises(ValueError, match="method 'unknown'"):
        module.Matrix(small([{"group": "a", "over": {"method": ["unknown"]}}]))
    with pytest.raises(ValueError, match="'rates', which is not a group"):
        module.Matrix(small([SEEDS]))


# The matrix itself


def test_every_run_of_the_matrix_has_a_name_of_its_own(module, matrix):
    """With made-up results for each grid, so that every learning rate is known."""
    finished = {}
    while True:
        runs = list(matrix.runs(finished))
        new = {run.name: result(0.5) for run in runs if isinstance(run, module.Run)}
        if set(new) == set(finished):
            break
        finished = new
    assert all(isinstance(run, module.Run) for run in runs)
    settings = {run.name: run.settings for run in runs}
    assert len(settings) == len(runs)
    kept = [yaml.safe_dump(values, sort_keys=True) for values in settings.values()]
    assert len(set(kept)) == len(kept), "two names for the same settings"


def test_each_method_has_the_same_grid_of_rates(matrix):
    grids = {}
    for entry in matrix.entries:
        if entry.group in ("rates", "rates_of_euclidean"):
            grids.setdefault(entry.method, set()).add(entry.given["learning_rate"])
    assert set(grids) == {"grpo", "reinforce", "fisher", "fig4", "interacting", "euclidean"}
    assert len({frozenset(rates) for rates in grids.values()}) == 1


def test_rates_that_are_close_to_each_other_have_names_of_their_own(module):
    rates = [1e-6, 1.5e-6, 2e-6, 2e-5, 1e-4, 2e-3, 0.5]
    names = [module.run_name("m", {"learning_rate": rate, "seed": 0}) for rate in rates]
    expected = ["1e-6", "1.5e-6", "2e-6", "2e-5", "1e-4", "2e-3", "5e-1"]
    assert names == [f"m-lr{rate}-seed0" for rate in expected]


def test_starts_are_a_factor_of_a_hundred_apart_with_a_target_and_without(module, matrix):
    groups = ["starts", "starts_without"]
    runs = [run for run in matrix.runs({}, groups) if isinstance(run, module.Run)]
    assert len(runs) == 45
    assert {run.settings["learning_rate"] for run in runs} == {1e-7, 1e-6, 1e-5}
    for method, without in (("fisher_kl", "fisher"), ("reinforce_kl", "reinforce")):
        one, other = (next(run.settings for run in runs if run.method == name) for name in (method, without))
        assert {name for name in one if one[name] != other.get(name)} == {"method", "target_kl"}
    shared = {run.name for run in runs} & {run.name for run in matrix.runs({}, ["rates"])}
    assert shared == {f"{method}-lr1e-6-seed0" for method in ("grpo", "fisher", "reinforce")}


def test_the_seeds_that_the_questions_ask_for_are_there(module, matrix):
    seeds = {}
    for entry in matrix.entries:
        if entry.given.get("task", "gsm8k") == "gsm8k" and set(entry.given) <= {"learning_rate", "seed"}:
            seeds.setdefault(entry.method, set()).add(entry.given.get("seed"))
    assert all(len(seeds[method]) >= 5 for method in ("grpo", "fisher", "interacting", "euclidean"))
    assert all(len(seeds[method]) >= 3 for method in ("reinforce", "fig4"))
    sums = [(entry.method, entry.given["seed"]) for entry in matrix.entries if entry.group == "sums"]
    assert len(set(sums)) == len(sums) == 4 * 8
