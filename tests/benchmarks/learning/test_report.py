"""`learning.py report`: what it says of made-up results, whose statistics are computed here as well."""

import functools
import itertools
import json
import random
import re
import shutil
from pathlib import Path

import numpy as np
import pytest
import yaml


ROOT = Path(__file__).parents[3]
MATRIX = ROOT / "benchmarks" / "learning" / "matrix.yaml"
CONTENT = yaml.safe_load(MATRIX.read_text())
TARGET = CONTENT["methods"]["fisher_kl"]["target_kl"]
(OTHERS,) = (group["over"]["target_kl"] for group in CONTENT["groups"] if group["group"] == "targets")
PROBLEMS = 200


@pytest.fixture(scope="module")
def module():
    pytest.importorskip("matplotlib")
    import report

    return report


@pytest.fixture
def report(module, tmp_path):
    """Writes results, makes the report, and returns the exit status and the page."""
    return reporter(module, tmp_path)


def reporter(module, folder):
    docs, runs = folder / "docs", folder / "learning" / "runs"
    docs.mkdir()
    runs.mkdir(parents=True)
    page = docs / "results.md"
    page.write_text(f"# By hand\n\n{module.BEGIN}\nmade earlier\n{module.END}\n\nBelow.\n")

    def make(*results):
        for result in results:
            (runs / f"{result['name']}.json").write_text(json.dumps(result))
        status = module.main(MATRIX, runs, docs)
        return status, page.read_text()

    make.docs = docs
    make.learning = runs.parent
    return make


@functools.cache
def settings_of_the_matrix():
    """`{name of a run: its settings}`."""
    from matrix import Matrix, Run

    return {r.name: r.settings for r in Matrix.read(MATRIX).runs({}) if isinstance(r, Run)}


def made_up(method, rate, seed, draw, **changed):
    """A run's file, with settings as the matrix has them."""
    from matrix import run_name

    name = run_name(method, {"learning_rate": rate, "seed": seed, **changed})
    settings = settings_of_the_matrix()[f"{method}-lr2e-6-seed0"] | {"learning_rate": rate, "seed": seed} | changed
    right = [draw.random() < 0.3 for _ in range(PROBLEMS)]
    return {
        "name": name,
        "settings": settings,
        "validations": [
            {"step": 25, "accuracy": 0.22 + 0.05 * draw.random(), "kl": 2 + draw.random(), "length": 200.0},
            {"step": 50, "accuracy": 0.28 + 0.05 * draw.random(), "kl": 8 + 4 * draw.random(), "length": 200.0},
        ],
        "held_back": 512,
        "test": {
            "accuracy": sum(right) / PROBLEMS,
            "count": PROBLEMS,
            "right": f"{int(''.join('01'[bit] for bit in right), 2):0{PROBLEMS // 4}x}",
        },
        "steps": {
            "step": list(range(1, 51)),
            "seconds": [4.0 * step for step in range(1, 51)],
            "reward": [0.3 if step % 2 else None for step in range(1, 51)],
            "grad_norm": [0.5 + draw.random() for _ in range(50)],
            "isopo/multiplier_max": [10 * draw.random() for _ in range(50)],
        },
        "prompts": [f"{seed}-{step}" for step in range(50)],
        "prompts_of_generations": [f"{seed}-{step}" for step in range(25)],
        "seconds": {"total": 800.0, "train": 700.0},
        "versions": {"torch": "2.11.0"},
        "commit": "c",
        "date": "2026-01-01",
        "hardware": {"device": "GPU", "parallel": 6},
    }


def before_training():
    settings = {"task": "gsm8k", "steps": 0}
    test = {"accuracy": 0.2, "count": PROBLEMS, "right": "0"}
    return {
        "name": "start",
        "settings": settings,
        "validations": [{"step": 0, "accuracy": 0.21}],
        "test": test,
        "held_back": 512,
    }


def section_of(page, section):
    return page.partition(f"\n## {section}\n")[2].partition("\n## ")[0]


def rows_of(page, section):
    """Cells of the section's first table, by the first one."""
    return rows_of_table(section_of(page, section))


def rows_of_table(text):
    """Cells of the first table, by the first one."""
    lines = list(itertools.takewhile(lambda line: line.startswith("|"), re.sub(r"\A[^|]*", "", text).splitlines()))
    head, _, *rows = ([cell.strip() for cell in line.strip("|").split("|")] for line in lines)
    return {row[0]: dict(zip(head, row, strict=True)) for row in rows}


def numbers(cell):
    return [float(number) for number in re.findall(r"[+-]?\d+(?:\.\d+)?", cell)]


def clock(**seconds):
    """A round of `phases.py`: generation and the rest of a step, by method."""
    methods = {
        name: {"phases": {"generation": a, "forward": b / 4, "backward": 3 * b / 4}}
        for name, (a, b) in seconds.items()
    }
    return {"methods": methods, "title": "gsm8k, one GPU"}


@pytest.fixture(scope="module")
def many():
    """Three seeds of three methods; the best rate of each is 2e-6."""
    draw = random.Random(5)
    results = [before_training()]
    for method in ("grpo", "fisher", "interacting"):
        for seed in (0, 1, 2):
            results.append(made_up(method, 2e-6, seed, draw))
        for rate in (1e-6, 4e-6):
            result = made_up(method, rate, 0, draw)
            for validation in result["validations"]:
                validation["accuracy"] -= 0.1
            results.append(result)
    return results


@pytest.fixture(scope="module")
def of_many(module, many, tmp_path_factory):
    """The page of `many`, and the folder that it is in."""
    make = reporter(module, tmp_path_factory.mktemp("many"))
    status, page = make(*many)
    assert status == 0
    return page, make.docs


def test_without_any_run_the_page_says_that_there_is_none(report):
    status, page = report()
    assert status == 0 and "0 of " in page and page.startswith("# By hand\n") and page.endswith("\n\nBelow.\n")
    assert "made earlier" not in page and "not run" in page and "Not yet run: `grpo-lr2e-6-seed0`" in page
    assert list(report.docs.glob("*.png")) == []


def test_one_run_is_shown_as_one(report):
    result = made_up("fisher", 2e-6, 0, random.Random(0))
    status, page = report(before_training(), result)
    (row,) = rows_of(page, "Methods").values()
    assert status == 0 and row["n"] == "1"
    assert numbers(row["test accuracy"]) == [pytest.approx(100 * result["test"]["accuracy"], abs=0.051)]
    assert "grid of rates is not finished" in page and "problems alone" not in row.values()


def test_medians_and_ranges_are_those_of_the_seeds(of_many, many):
    page, _ = of_many
    rows = rows_of(page, "Methods")
    assert set(rows) == {"grpo, 2e-6", "fisher, 2e-6", "interacting, 2e-6"}  # the best of the grid, not marked
    for method in ("grpo", "fisher", "interacting"):
        own = [r for r in many if re.fullmatch(rf"{method}-lr2e-6-seed\d", r["name"])]
        row = rows[f"{method}, 2e-6"]
        accuracies = [100 * r["test"]["accuracy"] for r in own]
        divergences = [r["validations"][-1]["kl"] for r in own]
        assert row["n"] == "3"
        for cell, values in ((row["test accuracy"], accuracies), (row["KL from the start"], divergences)):
            assert numbers(cell) == pytest.approx([np.median(values), min(values), max(values)], abs=0.051)
        prices = [k / (a - 20) for k, a in zip(divergences, accuracies, strict=True) if a > 20]
        assert numbers(row["nats per point gained"])[0] == pytest.approx(np.median(prices), abs=0.0051)


def test_differences_are_paired_by_seed_and_resampled(of_many, many):
    page, _ = of_many
    rows = rows_of(page, "Methods")
    of = {r["name"]: r for r in many}
    for method in ("fisher", "interacting"):
        pairs = [(of[f"{method}-lr2e-6-seed{seed}"], of[f"grpo-lr2e-6-seed{seed}"]) for seed in (0, 1, 2)]
        values = [100 * (a["test"]["accuracy"] - b["test"]["accuracy"]) for a, b in pairs]
        mean, low, high, n = numbers(rows[f"{method}, 2e-6"]["accuracy, difference from `grpo` in points"])
        assert (mean, n) == (pytest.approx(np.mean(values), abs=0.051), 3)
        right = [[[int(bit) for bit in f"{int(r['test']['right'], 16):0{PROBLEMS}b}"] for r in pair] for pair in pairs]
        each, draw, means = np.array([np.subtract(*pair) for pair in right]), np.random.default_rng(1), []
        for _ in range(4000):  # seeds and problems, each with replacement
            means.append(100 * each[np.ix_(draw.integers(3, size=3), draw.integers(PROBLEMS, size=PROBLEMS))].mean())
        expected = np.quantile(means, [0.025, 0.975])
        assert (low, high) == pytest.approx(expected, abs=0.1 * np.ptp(expected))
    assert rows["grpo, 2e-6"]["accuracy, difference from `grpo` in points"] == ""


def test_of_one_seed_the_interval_is_that_of_the_problems_and_says_so(report, module):
    draw = random.Random(7)
    first, second = made_up("fisher", 2e-6, 0, draw), made_up("grpo", 2e-6, 0, draw)
    _, page = report(first, second)
    cell = rows_of(page, "Methods")["fisher, 2e-6*"]["accuracy, difference from `grpo` in points"]
    a, b = (np.array([int(bit) for bit in f"{int(r['test']['right'], 16):0{PROBLEMS}b}"]) for r in (first, second))
    error = 100 * np.std(a - b, ddof=1) / np.sqrt(PROBLEMS)
    mean = 100 * np.mean(a - b)
    assert numbers(cell) == pytest.approx([mean, mean - 1.96 * error, mean + 1.96 * error, 1], abs=0.051)
    assert cell.endswith("problems alone")


def test_divergence_at_equal_accuracy_is_interpolated(report):
    draw = random.Random(0)
    slow, fast = made_up("grpo", 2e-6, 0, draw), made_up("fisher", 2e-6, 0, draw)
    slow["validations"] = [{"step": 25, "accuracy": 0.25, "kl": 4.0}, {"step": 50, "accuracy": 0.29, "kl": 8.0}]
    fast["validations"] = [{"step": 25, "accuracy": 0.31, "kl": 6.0}, {"step": 50, "accuracy": 0.35, "kl": 9.0}]
    _, page = report(before_training(), slow, fast)
    rows = rows_of(page, "Methods")
    # 29 % is reached by all: the slow one at its last validation, the fast one at (0.29 - 0.21) / 0.1 of its first
    assert rows["grpo, 2e-6*"]["KL at 29.0 % held back"] == "8.0"
    assert rows["fisher, 2e-6*"]["KL at 29.0 % held back"] == "4.8"


def test_fisher_is_set_beside_its_control(report):
    draw = random.Random(1)
    ours = [made_up("fisher", 2e-6, seed, draw) for seed in (0, 1, 2)]
    others = [made_up("euclidean", 2e-6, seed, draw) for seed in (0, 1, 2)]
    for results, told in ((ours, False), (ours + others, True)):
        _, page = report(before_training(), *results)
        assert ("its control, by seed" in page) == told
    (line,) = [line for line in page.splitlines() if "its control, by seed" in line]
    points, divergence, at_level = line.partition(": ")[2].split("; ")

    def mean(measure):
        return np.mean([measure(a) - measure(b) for a, b in zip(ours, others, strict=True)])

    assert numbers(points)[0] == pytest.approx(100 * mean(lambda r: r["test"]["accuracy"]), abs=0.051)
    assert numbers(divergence)[0] == pytest.approx(mean(lambda r: r["validations"][-1]["kl"]), abs=0.051)
    assert "n = 3 in KL at" in at_level and "held back" in at_level


def test_the_grid_is_shown_with_the_chosen_rate_in_bold(of_many, many):
    page, _ = of_many
    rows = rows_of(page, "Learning rates")
    of = {r["name"]: r for r in many}
    for rate in ("1e-6", "2e-6", "4e-6"):
        validations = of[f"fisher-lr{rate}-seed0"]["validations"]
        score = 100 * np.mean([v["accuracy"] for v in validations])
        assert numbers(rows["`fisher`"][rate]) == pytest.approx([score, validations[-1]["kl"]], abs=0.051)
        assert rows["`fisher`"][rate].startswith("**") == (rate == "2e-6")
    assert rows["`reinforce`"]["1e-6"] == "not run"


def test_the_tail_of_the_multipliers_is_that_of_the_steps(report, many):
    results = [r for r in many if r["name"].startswith("fisher-lr2e-6")]
    larger = made_up("fisher", 2e-6, 0, random.Random(3), regularization=1)
    _, page = report(*results, larger)
    text = page.partition("\n## Lambda\n")[2].partition("\n## ")[0]
    line = [line for line in text.splitlines() if line.startswith("| fisher, λ = 0, 2e-6 | 3 |")][-1]
    most, norm, share = ([c.strip() for c in line.strip("|").split("|")][place] for place in (2, 3, 4))
    tops = [max(r["steps"]["isopo/multiplier_max"]) for r in results]
    norms = [np.mean(r["steps"]["grad_norm"]) for r in results]
    shares = [100 * np.mean(np.array(r["steps"]["grad_norm"]) > 1) for r in results]
    for cell, values, rounding in ((most, tops, 0.51), (norm, norms, 0.0051), (share, shares, 0.51)):
        assert numbers(cell) == pytest.approx([np.median(values), min(values), max(values)], abs=rounding)


def test_every_lambda_is_set_beside_grpo_at_its_rate(report):
    draw = random.Random(6)
    ours = made_up("fisher", 2e-6, 0, draw, regularization=0.1)
    same, other = made_up("grpo", 2e-6, 0, draw), made_up("grpo", 1e-6, 0, draw)
    difference = 100 * (ours["test"]["accuracy"] - same["test"]["accuracy"])
    for results, told in (((ours, other), False), ((ours, same, other), True)):
        _, page = report(*results)
        text = page.partition("\n## Lambda\n")[2].partition("\n## ")[0]
        assert (f"`grpo` at that rate in points: fisher, λ = 0.1, 2e-6: {difference:+.1f} [" in text) == told
        assert ("at that rate" in text) == told


def test_every_lambda_is_set_beside_none_on_held_back_problems(report):
    draw = random.Random(8)
    without = [made_up("fig4", 2e-6, seed, draw) for seed in (0, 1, 2)]
    ours = [made_up("fig4", 2e-6, seed, draw, regularization=1) for seed in (2, 1, 0)]
    _, page = report(*ours)
    assert "On held-back problems, difference" not in page
    _, page = report(*without, *ours)
    line = next(line for line in page.splitlines() if line.startswith("On held-back problems, difference"))
    assert "difference from `fig4, λ = 0` in points: fig4, λ = 1, 2e-6" in line
    value, low, high, count = numbers(line.partition("2e-6: ")[2])
    score = [100 * np.mean([v["accuracy"] for run in runs for v in run["validations"]]) for runs in (ours, without)]
    assert value == pytest.approx(score[0] - score[1], abs=0.051) and low <= value <= high and count == 3


def test_microbatches_of_groups_see_the_prompts_of_shuffled_ones_in_each_generation(report):
    draw = random.Random(9)
    shuffled = made_up("interacting", 2e-6, 0, draw, microbatch=8, grouped=False)
    grouped = made_up("interacting", 2e-6, 0, draw, microbatch=8, grouped=True)
    old = made_up("interacting", 2e-6, 0, draw)
    del old["prompts_of_generations"]  # as in the first files: compared by steps, which `grouped` has in its own order
    grouped["prompts"] = grouped["prompts"][::-1]
    for result, cosine in ((shuffled, 0.25), (grouped, -0.5)):
        result["steps"]["isopo/cosine_same_prompt"] = [None, *[cosine] * 49]  # no pair in the first step
    # The rate is the best of its grid
    grid = [made_up("interacting", rate, 0, draw) for rate in (1e-6, 4e-6)]
    for result in grid:
        for validation in result["validations"]:
            validation["accuracy"] -= 0.1
    status, page = report(old, *grid, grouped, shuffled)
    assert status == 0 and "5 of 5 comparable runs" in page
    rows = rows_of(page, "Microbatches of one prompt's group")
    assert list(rows) == [
        "interacting, 2e-6",
        "interacting, shuffled, microbatches of 8, 2e-6",
        "interacting, by prompt, microbatches of 8, 2e-6",
    ]
    assert "two completions of one prompt: -0.125 (-0.500 to 0.250), n = 2 runs." in page
    assert "of different prompts:" not in page
    cells = rows["interacting, by prompt, microbatches of 8, 2e-6"]
    difference = 100 * (grouped["test"]["accuracy"] - shuffled["test"]["accuracy"])
    of_shuffled = "accuracy, difference from `interacting, shuffled, microbatches of 8` in points"
    assert numbers(cells[of_shuffled])[0] == pytest.approx(difference, abs=0.051)
    grouped["prompts_of_generations"][2] = "another"
    status, page = report(grouped)
    assert status == 1 and "saw other prompts than" in page and "from generation 2 on" in page


def test_stale_data_is_set_beside_grpo_of_the_same_age_and_beside_the_methods_own_fresher(report, many):
    draw = random.Random(10)
    seeds = {"grpo": (2, 0, 1), "fisher": (0, 1, 2)}
    of_grpo, of_fisher = (
        [made_up(method, 2e-6, seed, draw, steps_per_generation=8) for seed in seeds[method]] for method in seeds
    )
    p3o = made_up("fisher", 2e-6, 1, draw, steps_per_generation=8, token_weights="p3o")
    clipped = made_up("fisher", 2e-6, 1, draw, steps_per_generation=8, epsilon=0.2)
    regularized = made_up("fisher", 2e-6, 1, draw, steps_per_generation=8, regularization=0.1)
    p3o["steps"] |= {"off_policy/ess": [0.75] * 25 + [0.25] * 25, "clip_ratio/region_mean": [0.0] * 50}
    clipped["steps"] |= {"sampling/importance_sampling_ratio/mean": [0.5] * 50, "clip_ratio/region_mean": [0.02] * 50}
    status, page = report(*many, *of_grpo, *of_fisher, p3o, clipped, regularized)
    assert status == 0
    tables = re.split(r"^(?=\| method)", section_of(page, "Stale data"), flags=re.M)
    _, fresh, stale, against_itself, treated, ages = tables
    assert list(rows_of_table(fresh)) == ["grpo, 2e-6", "fisher, 2e-6", "interacting, 2e-6"]
    rows = rows_of_table(stale)
    assert {row: cells["n"] for row, cells in rows.items()} == {
        "grpo, 8 steps per generation, 2e-6": "3",
        "fisher, 8 steps per generation, 2e-6": "3",
        "fisher, 8 steps per generation, P3O, 2e-6": "1",
        "fisher, clipped at 0.2, 8 steps per generation, 2e-6": "1",
        "fisher, λ = 0.1, 8 steps per generation, 2e-6": "1",
    }

    def last_kl(*runs):
        return np.mean([run["validations"][-1]["kl"] for run in runs])

    one = rows["fisher, clipped at 0.2, 8 steps per generation, 2e-6"]
    difference = last_kl(clipped) - last_kl(of_grpo[2])
    assert numbers(one["KL, difference from `grpo, 8 steps per generation`"]) == [
        pytest.approx(difference, abs=0.051),
        1,
    ]
    rows = rows_of_table(against_itself)
    assert list(rows) == ["grpo", "fisher"]
    for method, runs in (("grpo", of_grpo), ("fisher", of_fisher)):
        before = [run for run in many if run["name"].startswith(f"{method}-lr2e-6-")]
        assert rows[method]["steps per generation"] == "8 against 2"
        value, low, high, count = numbers(rows[method]["KL"])
        assert value == pytest.approx(last_kl(*runs) - last_kl(*before), abs=0.051) and low <= value <= high
        assert count == 3
    rows = rows_of_table(treated)
    for name, run in (
        ("8 steps per generation, P3O", p3o),
        ("clipped at 0.2, 8 steps per generation", clipped),
        ("λ = 0.1, 8 steps per generation", regularized),
    ):
        difference = last_kl(run) - last_kl(of_fisher[1])
        assert numbers(rows[f"fisher, {name}"]["KL"]) == [pytest.approx(difference, abs=0.051), 1]
    rows = rows_of_table(ages)
    assert list(rows) == [*rows_of_table(fresh), *rows_of_table(stale)]
    assert list(rows["fisher, 8 steps per generation, P3O, 2e-6"].values())[1:] == ["1", "0.500", "0.250", "", ""]
    one = rows["fisher, clipped at 0.2, 8 steps per generation, 2e-6"]
    assert list(one.values())[1:] == ["1", "", "", "0.500", "2.00 %"]


def test_prompts_that_differ_between_methods_of_a_seed_are_an_error(report, many, capsys):
    status, page = report(*many)
    assert status == 0 and "15 of 15 comparable runs" in page
    other = json.loads(json.dumps(next(r for r in many if r["name"] == "interacting-lr2e-6-seed1")))
    other["prompts_of_generations"][3] = "another"
    status, page = report(other)
    assert status == 1 and "14 of 15 comparable runs" in page
    assert "interacting-lr2e-6-seed1 saw other prompts than" in page and "from generation 3 on" in page
    assert "saw other prompts" in capsys.readouterr().err
    del other["prompts_of_generations"]  # as in the first files
    assert report(other)[0] == 0
    other["prompts"][7] = "another"
    status, page = report(other)
    assert status == 1 and "from step 7 on" in page


def test_results_of_other_settings_than_the_matrix_has_are_named(report):
    result = made_up("grpo", 2e-6, 0, random.Random(0))
    result["settings"] = result["settings"] | {"format_weight": 0.2}
    _, page = report(result)
    assert "`grpo-lr2e-6-seed0` (format_weight)" in page


def test_a_run_from_another_model_is_named(report):
    draw = random.Random(0)
    one, other = (made_up(method, 2e-6, 0, draw) | {"model": method} for method in ("grpo", "fisher"))
    _, page = report(one, one | {"name": "grpo-lr1e-6-seed0"})
    assert "another model" not in page
    _, page = report(other)
    assert "grpo-lr1e-6-seed0 began with another model than fisher-lr2e-6-seed0" in page


def test_methods_are_compared_at_one_rate_until_their_grids_are_finished(report):
    draw = random.Random(0)
    rates = {"grpo": (1e-6, 2e-6), "fisher": (2e-6, 4e-6), "fig4": (2e-6,)}
    _, page = report(*(made_up(method, rate, 0, draw) for method in rates for rate in rates[method]))
    methods = page[page.index("## Methods") : page.index("## Lambda")]
    assert set(re.findall(r"\| (\w+, \S+)\* \|", methods)) == {f"{method}, 2e-6" for method in rates}


@pytest.mark.parametrize(
    ("section", "given", "grid"),
    [("LoRA", {"lora": 32}, (2e-5, 5e-5, 1e-4)), ("Muon", {"optimizer": "muon"}, (2e-6, 4e-6, 8e-6))],
)
def test_with_lora_and_muon_each_method_has_its_own_best_rate(report, section, given, grid):
    draw = random.Random(12)
    best = {"grpo": grid[0], "fisher": grid[1], "interacting": grid[2]}
    runs = {}
    for method, rate in itertools.product(best, grid):
        runs[method, rate] = made_up(method, rate, 0, draw, **given)
        if rate != best[method]:
            for validation in runs[method, rate]["validations"]:
                validation["accuracy"] -= 0.1
    others = {method: made_up(method, best[method], 1, draw, **given) for method in ("grpo", "fisher")}
    # Where one rate of a grid is missing, the method's best is not known
    for missing in ({"grpo", "interacting"}, {"interacting"}, set()):
        results = [run for (method, rate), run in runs.items() if method not in missing or rate != grid[1]]
        _, page = report(*results, *(run for method, run in others.items() if method not in missing))
        assert "Not yet run" in section_of(page, section)
        rows = {label.partition(",")[0]: cells for label, cells in rows_of(page, section).items()}
        assert list(rows) == [method for method in best if method not in missing]
        assert all(rows[method]["method, rate"].endswith(f", {short(best[method])}") for method in rows)
        assert rows["fisher"]["n"] == "2"
        differences = [cell for name, cell in rows["fisher"].items() if name.startswith("KL, difference")]
        assert len(differences) == ("grpo" not in missing)
    ours, base = (
        np.mean([run["validations"][-1]["kl"] for run in (runs[method, best[method]], others[method])])
        for method in ("fisher", "grpo")
    )
    assert numbers(differences[0]) == [pytest.approx(ours - base, abs=0.051), 2]


def test_seconds_are_those_of_a_method_alone_once_all_have_been_measured(report, many, module, monkeypatch):
    folder = report.learning / "clock"
    folder.mkdir()
    figures, drawn = module.report_figures, []
    saved, names = figures._saved, {color: name for name, color in figures.COLORS.items()}

    def watched(figure, file):
        if file.name == "results_accuracy.png":
            axis = figure.axes[1]
            ends = {names[line.get_color()]: line.get_xdata()[-1] for line in axis.lines}
            drawn.append((axis.get_xlabel(), ends))
        return saved(figure, file)

    monkeypatch.setattr(figures, "_saved", watched)
    rounds = [
        clock(grpo=(1.0, 2.0), fisher=(1.4, 1.5)),
        clock(grpo=(1.2, 2.4), fisher=(1.3, 1.7), interacting=(1.1, 4.4), none=(1.1, 0.4)),
        clock(fisher=(1.15, 1.6), euclidean=(1.15, 5.0)),  # nothing to compare them with
    ]
    for number, entry in enumerate(rounds):
        (folder / f"round{number}.json").write_text(json.dumps(entry))
        _, page = report(*many)
    # Of `interacting` there was nothing at first: seconds as the runs had them
    beside = dict.fromkeys(("grpo", "fisher", "interacting"), 200.0)
    assert drawn[0] == ("seconds of training, beside other runs", beside)
    # The second round was slower for GRPO as well: what counts is the share of GRPO's seconds in the same round
    shares = {"grpo": 1.0, "fisher": (1.5 / 2.0 + 1.7 / 2.4) / 2, "interacting": 4.4 / 2.4}
    alone = {method: 50 * (1.15 + 2.2 * share) for method, share in shares.items()}
    assert drawn[1:] == [("seconds of training", pytest.approx(alone))] * 2
    text = page.partition("Seconds of an optimizer step, one method alone on the machine (gsm8k, one GPU)")[2]
    assert "1.15 (1.00 to 1.40) s" in text
    lines = [line for line in text.split("\n\n")[1].splitlines() if line.startswith("|")]
    assert lines[2:] == [
        "| grpo | 2 | 2.20 (2.00 to 2.40) |  |",
        "| reinforce | 1 | 0.40 | 0.17 |",
        "| fisher | 3 | 1.60 (1.50 to 1.70) | 0.73 (0.71 to 0.75) |",
        "| interacting | 1 | 4.40 | 1.83 |",
        "| euclidean | 1 | 5.00 |  |",
    ]


def test_figures_are_drawn_and_shown(of_many):
    page, docs = of_many
    for name in ("results_accuracy.png", "results_divergence.png"):
        assert (docs / name).read_bytes().startswith(b"\x89PNG") and f"]({name})" in page


def short(number):
    return f"{number:.0e}".replace("e-0", "e-")


def started(method, rate, seed, draw, **changed):
    """A run of the group of starting rates; with a target for its steps where the method's name says so."""
    result = made_up("fisher", rate, seed, draw)
    name = f"{method}{''.join(f'-target{value}' for value in changed.values())}-lr{rate:.0e}-seed{seed}"
    result |= {"name": name.replace("e-0", "e-")}
    if method.endswith("_kl"):
        result["settings"] = result["settings"] | {"method": method, "target_kl": TARGET} | changed
        lengths = [1e-4 * draw.random() for _ in range(50)]
        kept = [1.0 if draw.random() < 0.9 else 0.5 for _ in range(50)]
        rates = [1e-6 * draw.random() for _ in range(50)]
        result["steps"] |= {"step/kl": lengths, "step/kept": kept, "step/learning_rate": rates}
    return result


def test_starting_rates_are_compared_with_the_best_of_all(report):
    draw = random.Random(3)
    runs = {
        (method, rate): [started(method, rate, seed, draw) for seed in (0, 1, 2)]
        for method in ("fisher_kl", "fisher", "grpo")
        for rate in (1e-7, 1e-6, 1e-5)
        if (method, rate) != ("grpo", 1e-5)
    }
    _, page = report(before_training(), *itertools.chain(*runs.values()))
    rows = rows_of(page, "Starting learning rates")
    means = {key: 100 * np.mean([r["test"]["accuracy"] for r in own]) for key, own in runs.items()}
    labels = {"fisher_kl": f"fisher, target {short(TARGET)}", "fisher": "fisher", "grpo": "grpo"}
    assert set(rows) == set(labels.values()) and rows["grpo"]["1e-5"] == "not run"
    for (method, rate), own in runs.items():
        values = [100 * r["test"]["accuracy"] for r in own]
        cell = rows[labels[method]][short(rate)]
        expected = [np.median(values), min(values), max(values), means[method, rate] - max(means.values()), 3]
        assert numbers(cell) == pytest.approx(expected, abs=0.051)
    assert (report.docs / "results_starts.png").read_bytes().startswith(b"\x89PNG") and "](results_starts.png)" in page
    own = runs["fisher_kl", 1e-5]
    line = next(line for line in page.splitlines() if line.startswith(f"| fisher, target {short(TARGET)}, 1e-5 |"))
    n, _, length, shortened, rate = (cell.strip() for cell in line.strip("|").split("|")[1:])
    assert n == "3"
    lengths = [np.mean(r["steps"]["step/kl"][25:]) for r in own]
    assert float(length.split(" ")[0]) == pytest.approx(np.median(lengths), rel=0.05)
    shares = [100 * np.mean([kept < 1 for kept in r["steps"]["step/kept"]]) for r in own]
    assert numbers(shortened)[0] == pytest.approx(np.median(shares), abs=0.51)
    ends = [np.mean(r["steps"]["step/learning_rate"][-10:]) for r in own]
    assert float(rate.split(" ")[0]) == pytest.approx(np.median(ends), rel=0.05)


def test_a_rule_with_a_target_is_set_beside_reinforce_with_it_over_all_starts(report):
    draw = random.Random(5)
    made = [
        started(method, rate, seed, draw)
        for method in ("fisher_kl", "reinforce_kl")
        for rate in (1e-7, 1e-6, 1e-5)
        for seed in (0, 1, 2)
        if (method, rate, seed) not in {("reinforce_kl", 1e-5, 1), ("fisher_kl", 1e-7, 0)}  # these have no partner
    ]
    _, page = report(before_training(), *made)
    line = next(line for line in page.splitlines() if line.startswith("`fisher` against REINFORCE"))
    *_, of_tests, of_kl = (numbers(part) for part in line.replace(":", ";").split(";"))
    by_run = {(r["settings"]["method"], r["settings"]["learning_rate"], r["settings"]["seed"]): r for r in made}
    of_seeds = []
    for seed in (0, 1, 2):
        pairs = [
            tuple(by_run.get((m, rate, seed)) for m in ("fisher_kl", "reinforce_kl")) for rate in (1e-7, 1e-6, 1e-5)
        ]
        pairs = [pair for pair in pairs if all(pair)]
        accuracies = [100 * (a["test"]["accuracy"] - b["test"]["accuracy"]) for a, b in pairs]
        divergences = [a["validations"][-1]["kl"] - b["validations"][-1]["kl"] for a, b in pairs]
        of_seeds.append((np.mean(accuracies), np.mean(divergences)))
    accuracy, divergence = np.mean(of_seeds, axis=0)
    assert of_tests[0] == pytest.approx(accuracy, abs=0.051) and of_tests[1] < accuracy < of_tests[2]
    assert of_kl[0] == pytest.approx(divergence, abs=0.051) and of_kl[1] <= of_kl[0] <= of_kl[2]
    assert of_tests[3] == of_kl[3] == 3


def test_targets_of_one_start_stand_side_by_side(report):
    draw = random.Random(4)
    _, page = report(started("fisher_kl", 1e-6, 0, draw))
    assert f"Not yet run: `fisher_kl-target{OTHERS[0]}-lr1e-6-seed0`" in page.partition("## Targets for a step")[2]
    other = started("fisher_kl", 1e-6, 0, draw, target_kl=OTHERS[0])
    _, page = report(other, started("fisher_kl", 1e-6, 0, draw), started("fisher_kl", 1e-6, 1, draw))
    rows = rows_of(page, "Targets for a step")
    assert list(rows) == list(map(short, sorted([TARGET, OTHERS[0]])))
    cells = rows[short(OTHERS[0])]
    assert numbers(cells["test accuracy"]) == [pytest.approx(100 * other["test"]["accuracy"], abs=0.051)]
    held_back = np.mean([validation["accuracy"] for validation in other["validations"]])
    assert numbers(cells["held back"]) == [pytest.approx(100 * held_back, abs=0.051)]


def test_results_of_other_settings_than_the_matrix_has_now_are_named(report, capsys):
    result = started("fisher_kl", 1e-7, 0, random.Random(7), target_kl=OTHERS[0])
    status, _ = report(result | {"name": "fisher_kl-lr1e-7-seed0"})
    assert status == 1
    assert f"fisher_kl-lr1e-7-seed0 has target_kl={OTHERS[0]}, the matrix says {TARGET}" in capsys.readouterr().err


def test_results_in_the_repository_are_as_the_matrix_has_them(module):
    from matrix import Matrix, Run, read_results

    matrix, results = Matrix.read(MATRIX), read_results(MATRIX.parent / "runs")
    assert all(result["name"] == name for name, result in results.items())
    assert set(results) <= {run.name for run in matrix.runs(results) if isinstance(run, Run)}
    report = module.Report(matrix, results, {})
    assert report.unequal_settings() == [] and report.unequal_prompts() == []


def test_the_same_results_give_the_same_page(of_many, report, many):
    assert report(*many) == (0, of_many[0])


def test_a_page_without_markers_is_refused(report, capsys):
    (report.docs / "results.md").write_text("# Nothing\n")
    status, page = report()
    assert status == 2 and page == "# Nothing\n"
    assert "must have these two lines" in capsys.readouterr().err


def test_correlations_of_the_fisher_norm_are_by_rank_and_by_kind(report):
    draw = random.Random(2)
    m = 6

    def layer(name, kind):
        positive = lambda: [0.1 + draw.random() for _ in range(m)]  # noqa: E731
        fisher = {key: [positive(), positive()] for key in ("16", "64", "250", "1024")}
        fisher |= {key: [positive()] for key in ("all", "reduced")}
        kl = positive()
        others = {"half": [value / 4 for value in kl], "others": positive(), "norm": positive(), "size": positive()}
        return {"layer": name, "kind": kind, "fisher": fisher, "kl": kl, **others}

    layers = [layer("a.q", "q"), layer("b.q", "q"), layer("n", "norm")]
    result = {
        "settings": {"tokens": 40},
        "lengths": [10] * m,
        "layers": layers,
        "hardware": {"device": "CPU"},
    }
    folder = report.learning / "fisher_norm"
    folder.mkdir()
    (folder / "Model.json").write_text(json.dumps(result))
    _, page = report()

    def ranked(values):
        return np.argsort(np.argsort(values))

    def expected(layer, key, where, unit):
        length = np.array(layer["norm"])
        draws = [length] if key == "norm" else np.array(layer["fisher"][key])
        measured = np.sqrt(layer[where]) / np.array(layer["size"])
        if unit:
            draws, measured = [draw / length for draw in draws], measured / length
        return np.mean([np.corrcoef(ranked(draw), ranked(measured))[0, 1] for draw in draws])

    text = page.partition("How good is the Fisher norm?")[2]
    tables = [t for t in re.findall(r"(?:^\|.*\n?)+", text, flags=re.MULTILINE)]
    keys = ["16", "64", "250", "1024", "all", "reduced", "norm"]

    def cells(line):
        return [cell.strip() for cell in line.strip("|").split("|")]

    of_q = [cells(t.splitlines()[2]) for t in tables[1:]]
    for unit, line in zip((False, True), of_q, strict=True):
        assert line[:2] == ["`q`", "2"]
        for key, cell in zip(keys, line[2:], strict=True):
            if key == "norm" and unit:
                assert cell == "none"
                continue
            values = [expected(layer, key, "kl", unit) for layer in layers[:2]]
            assert float(cell) == pytest.approx(np.mean(values), abs=0.0051)  # the median of two
    overall = [cells(line) for line in tables[0].splitlines()[2:]]
    assert [line[:3] for line in overall][2] == ["others", "`V_s`", "3"]
    values = [expected(layer, "all", "others", False) for layer in layers]
    assert float(overall[2][3 + keys.index("all")]) == pytest.approx(np.median(values), abs=0.0051)
    assert "4.00 times the divergence" in text and "n = 18" in text


def test_the_page_in_the_repository_is_that_of_its_results(module, tmp_path):
    shutil.copy(ROOT / "docs" / "results.md", tmp_path)
    assert module.main(MATRIX, ROOT / "benchmarks" / "learning" / "runs", tmp_path) == 0
    assert (tmp_path / "results.md").read_text() == (ROOT / "docs" / "results.md").read_text()
    for picture in tmp_path.glob("*.png"):
        assert (ROOT / "docs" / picture.name).is_file()
