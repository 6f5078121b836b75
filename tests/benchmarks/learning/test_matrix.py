"""The matrix of the learning benchmark: which runs there are, what they are called, and which rate is the best."""

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


def small(groups):
    """A matrix of two methods."""
    return {
        "defaults": {"task": "gsm8k", "steps": 4, "rule": "none", "completions": 8, "microbatch": 4},
        "tasks": {"gsm8k": {}, "sums": {"steps": 2}},
        "expected": {"start": 10, "end": 7, "step": 1, "microbatch": 0.5, "alone": 5},
        "methods": {"plain": {}, "fisher": {"rule": "fisher"}},
        "groups": groups,
    }


RATES = {"group": "rates", "with": {"seed": 0}, "over": {"learning_rate": [1e-6, 2e-6, 4e-6], "method": ["fisher"]}}
SEEDS = {"group": "seeds", "with": {"learning_rate": "best"}, "over": {"seed": [1, 2], "method": ["fisher"]}}


def result(*accuracies):
    return {"validations": [{"accuracy": accuracy} for accuracy in accuracies]}


def test_a_run_is_made_once_in_the_order_of_the_groups_and_has_their_settings(module):
    over = {"seed": [0, 1], "method": ["plain", "fisher"]}  # the first key turns slowest
    group = {"group": "a", "with": {"task": "sums", "learning_rate": 1e-6}, "over": over}
    runs = list(module.Matrix(small([group, {**group, "group": "again"}])).runs({}))
    expected = [f"{method}-tasksums-lr1e-6-seed{seed}" for seed in (0, 1) for method in ("plain", "fisher")]
    assert [run.name for run in runs] == expected
    given = {"task": "sums", "steps": 2, "rule": "fisher", "seed": 1, "method": "fisher", "learning_rate": 1e-6}
    assert runs[-1].settings == {"completions": 8, "microbatch": 4} | given


@pytest.mark.parametrize(
    ("accuracies", "best"),
    [
        ([(0.1, 0.3), (0.2, 0.25), (0.1, 0.2)], "2e-6"),  # 0.2, 0.225, 0.15: the last two count alike
        ([(0.9, 0.1, 0.1), (0.0, 0.3, 0.3), (0.0, 0.2, 0.2)], "2e-6"),  # an earlier one does not
        ([(0.2, 0.2), (0.2, 0.2), (0.2, 0.2)], "1e-6"),  # of equals, the lowest
    ],
)
def test_runs_at_the_best_rate_wait_for_the_whole_grid_and_have_that_of_the_best_held_back(module, accuracies, best):
    matrix = module.Matrix(small([RATES, SEEDS]))
    names = [f"fisher-lr{rate}-seed0" for rate in ("1e-6", "2e-6", "4e-6")]
    finished = {name: result(*values) for name, values in zip(names, accuracies, strict=True)}
    assert [run.name for run in matrix.runs(finished)][3:] == [f"fisher-lr{best}-seed1", f"fisher-lr{best}-seed2"]
    del finished[names[0]]
    waiting = [item for item in matrix.runs(finished) if isinstance(item, module.Entry)]
    assert [(entry.method, entry.given["seed"]) for entry in waiting] == [("fisher", 1), ("fisher", 2)]


def test_each_task_has_the_best_rate_of_its_own_runs(module):
    def group(name, rate, seeds, **more):
        over = {"seed": seeds, "task": ["gsm8k", "sums"], **rate, "method": ["fisher"]}
        return {"group": name, "over": over, **more}

    rates = {"learning_rate": [1e-6, 2e-6]}
    seeds = group("seeds", {}, [1], rates_of="rates", **{"with": {"learning_rate": "best"}})
    matrix = module.Matrix(small([group("rates", rates, [0]), seeds]))
    scores = {("gsm8k", "1e-6"): 0.3, ("gsm8k", "2e-6"): 0.1, ("sums", "1e-6"): 0.2, ("sums", "2e-6"): 0.4}
    finished = {f"fisher-task{task}-lr{rate}-seed0": result(score) for (task, rate), score in scores.items()}
    names = [run.name for run in matrix.runs(finished, ["seeds"])]
    assert names == ["fisher-taskgsm8k-lr1e-6-seed1", "fisher-tasksums-lr2e-6-seed1"]
    del finished["fisher-tasksums-lr1e-6-seed0"]
    known, waiting = matrix.runs(finished, ["seeds"])
    assert known.name == names[0] and waiting.given["task"] == "sums"


def test_what_a_run_takes_is_known_from_runs_made_like_it(module):
    def took(task, steps, parallel, total, train, **more):
        settings = {"task": task, "steps": steps, "microbatch": 4} | more
        seconds = {"total": total, "train": train, "validation": 6, "test": 3}
        return {"settings": settings, "hardware": {"parallel": parallel}, "seconds": seconds, "validations": [{}, {}]}

    matrix = module.Matrix(small([RATES]))
    run = next(matrix.runs({}))  # 4 steps
    others = {
        "another task": took("sums", 4, 6, 1000, 900),
        "alone on the machine": took("gsm8k", 4, 1, 7, 4),
        "start": took("gsm8k", 0, 6, 500, 0),
        "smaller microbatches": took("gsm8k", 4, 6, 5000, 4000, microbatch=1),
        "several steps per generation": took("gsm8k", 4, 6, 60, 30, steps_per_generation=8),
    }
    as_the_matrix_says = 10 + 4 * 6 * (1 + 2 * 0.5)
    assert matrix.expected_seconds(run, others, 6) == as_the_matrix_says
    assert matrix.expected_seconds(run, {}, 2) == 10 + 4 * 5  # no faster than alone
    like = {"a": took("gsm8k", 10, 6, 50, 20), "b": took("gsm8k", 2, 6, 60, 20), "c": took("gsm8k", 4, 6, 56, 20)}
    # 30, 40, 36 beside the steps, and 2, 10, 5 per step
    assert matrix.expected_seconds(run, others | like, 6) == 36 + 4 * 5
    assert matrix.expected_end(run, others | like, 6) == 6 / 2 + 3
    # Of fewer at a time, steps take less
    like |= {name: took("gsm8k", 4, 8, 100, 64) for name in "de"}
    assert matrix.expected_seconds(run, others | like, 7) == 36 + 4 * 16 * 7 / 8
    # Under the multi-process service they would take another time
    assert matrix.expected_seconds(run, others | like, 6, shared=True) == as_the_matrix_says
    like["a"]["hardware"]["shared_kernels"] = True
    assert matrix.expected_seconds(run, others | like, 6, shared=True) == 30 + 4 * 2


def test_a_run_may_come_to_take_as_much_memory_as_any_that_was_made_like_it(module):
    run = next(module.Matrix(small([RATES])).runs({}))

    def took(peak, attempt=1, **other):
        # What it is trained with beside that is of no consequence
        settings = {**run.settings, "learning_rate": 1.0, "seed": 9, "steps": 200, **other}
        return {"settings": settings, "hardware": {"peak_gib": peak}, "attempt": attempt}

    def expected(*results):
        return module.Matrix(small([RATES])).expected_gib(run, dict(enumerate(results)), 20.0)

    others = {"method": "plain", "task": "sums", "model": "m", "microbatch": 1, "completions": 16, "lora": 32}
    others |= {"steps_per_generation": 8, "optimizer": "sgd", "momentum": 0.9, "weights": "bfloat16"}
    others |= {"bf16_updates": "exact"}
    unlike = [took(90.0, **{name: value}) for name, value in others.items()]
    unlike += [{"validations": []}, took(None), took(90.0, attempt=2)]  # of a CPU; and of what vLLM found free
    for result in unlike:
        assert expected(result) == 20.0, result
    assert expected(*unlike, took(15.0), took(17.0), took(16.0)) == 17.0 + 1.6
    del (now := took(17.0))["attempt"]  # which is no longer written
    assert expected(now) == 17.0 + 1.6


def test_a_group_that_asks_for_what_is_not_there_is_refused(module):
    with pytest.raises(ValueError, match="method 'unknown'"):
        module.Matrix(small([{"group": "a", "over": {"method": ["unknown"]}}]))
    with pytest.raises(ValueError, match="'rates', which is not a group"):
        module.Matrix(small([SEEDS]))


# The matrix itself


def test_every_run_of_the_matrix_has_a_name_of_its_own(module, matrix):
    """With made-up results for each grid, so that every learning rate is known."""
    finished = {}
    for _ in range(3):
        runs = list(matrix.runs(finished))
        finished = {run.name: result(0.5) for run in runs if isinstance(run, module.Run)}
    assert len(finished) == len(runs) == len({yaml.safe_dump(run.settings, sort_keys=True) for run in runs})
    rates = {1e-6: "1e-6", 1.5e-6: "1.5e-6", 2e-5: "2e-5", 0.5: "5e-1"}
    names = [module.run_name("m", {"learning_rate": rate, "seed": 0}) for rate in rates]
    assert names == [f"m-lr{rate}-seed0" for rate in rates.values()]
    given = {
        "regularization": 1,
        "grouped": False,
        "bf16_updates": None,
        "model": "A-1.5B",
        "validate_at": [1],
        "seed": 0,
    }
    assert module.run_name("m", given) == "m-updatesno-groupedno-modelA_1.5B-lambda1-seed0"
