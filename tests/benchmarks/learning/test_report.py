"""`learning.py report`: what it says of made-up results, whose statistics are computed here as well."""

import contextlib
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
PROBLEMS = 200
METHODS = ("grpo", "fisher", "interacting")


@pytest.fixture(scope="module")
def module():
    import report

    return report


@pytest.fixture(scope="module")
def page_of(module):
    """What the report says of results, without its figures."""

    def page(*results, fisher_norms=None, clocks=None):
        by_name = {result["name"]: result for result in sorted(results, key=lambda result: result["name"])}
        return "\n" + module.Report(module.Matrix.read(MATRIX), by_name, fisher_norms or {}, clocks).text([])

    return page


@pytest.fixture
def report(module, tmp_path):
    """Writes results, makes the report, and returns the exit status and the page."""
    pytest.importorskip("matplotlib")
    docs, runs = tmp_path / "docs", tmp_path / "learning" / "runs"
    docs.mkdir()
    runs.mkdir(parents=True)
    (docs / "runs.md").write_text(f"# By hand\n\n{module.BEGIN}\nmade earlier\n{module.END}\n\nBelow.\n")

    def make(*results):
        for result in results:
            (runs / f"{result['name']}.json").write_text(json.dumps(result))
        return module.main(MATRIX, runs, docs), (docs / "runs.md").read_text()

    make.docs = docs
    return make


@functools.cache
def settings_of_the_matrix():
    """`{name of a run: its settings}`."""
    from matrix import Matrix, Run

    return {r.name: r.settings for r in Matrix.read(MATRIX).runs({}) if isinstance(r, Run)}


def made_up(method, rate, seed, draw, worse=0.0, **changed):
    """A run's file, with settings as the matrix has them, and so much worse on held-back problems."""
    from matrix import run_name

    settings = settings_of_the_matrix()[f"{method}-lr2e-6-seed0"] | {"learning_rate": rate, "seed": seed} | changed
    right = [draw.random() < 0.3 for _ in range(PROBLEMS)]
    accuracies = [0.22 + 0.05 * draw.random() - worse, 0.28 + 0.05 * draw.random() - worse]
    return {
        "name": run_name(method, {"learning_rate": rate, "seed": seed, **changed}),
        "settings": settings,
        "validations": [
            {"step": 25, "accuracy": accuracies[0], "kl": 2 + draw.random()},
            {"step": 50, "accuracy": accuracies[1], "kl": 8 + 4 * draw.random()},
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
            "grad_norm": [0.5 + draw.random() for _ in range(50)],
            "isopo/multiplier_max": [10 * draw.random() for _ in range(50)],
        },
        "prompts": [f"{seed}-{step}" for step in range(50)],
        "prompts_of_generations": [f"{seed}-{step}" for step in range(25)],
        "seconds": {"total": 800.0, "train": 700.0},
        "versions": {"torch": "2.11.0"},
        "date": "2026-01-01",
        "hardware": {"device": "GPU", "parallel": 6},
    }


START = {
    "name": "start",
    "settings": {"task": "gsm8k", "model": CONTENT["defaults"]["model"], "steps": 0},
    "validations": [{"step": 0, "accuracy": 0.21}],
    "test": {"accuracy": 0.2, "count": PROBLEMS, "right": "0"},
    "held_back": 512,
}


@pytest.fixture(scope="module")
def many():
    """Three seeds of three methods; the best rate of each is 2e-6."""
    draw = random.Random(5)
    best = [made_up(method, 2e-6, seed, draw) for method in METHODS for seed in (0, 1, 2)]
    return [START, *best, *(made_up(method, rate, 0, draw, 0.1) for method in METHODS for rate in (1e-6, 4e-6))]


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


def line_of(page, start):
    return next(line for line in page.splitlines() if line.startswith(start))


def numbers(text):
    return [float(number) for number in re.findall(r"[+-]?\d+(?:\.\d+)?", text)]


def rounded(*values, to=0.1):
    return pytest.approx(values, abs=0.51 * to)


def spread(values, to=0.1):
    return rounded(np.median(values), min(values), max(values), to=to)


def points(*runs):
    """Test accuracy, mean of the runs."""
    return 100 * np.mean([run["test"]["accuracy"] for run in runs])


def last_kl(*runs):
    return np.mean([run["validations"][-1]["kl"] for run in runs])


def held_back(*runs):
    return 100 * np.mean([validation["accuracy"] for run in runs for validation in run["validations"]])


def answers(run):
    return np.array([int(bit) for bit in f"{int(run['test']['right'], 16):0{PROBLEMS}b}"])


# The page


def test_what_is_written_by_hand_stays_and_what_is_not_run_is_said(report, capsys):
    status, page = report()
    assert status == 0 and page.startswith("# By hand\n") and page.endswith("\n\nBelow.\n")
    assert "made earlier" not in page and "0 of " in page and "Not yet run: `grpo-lr2e-6-seed0`" in page
    assert list(report.docs.glob("*.png")) == []
    (report.docs / "runs.md").write_text("# Nothing\n")
    assert report() == (2, "# Nothing\n") and "must have these two lines" in capsys.readouterr().err


def test_the_page_in_the_repository_is_that_of_its_results(module, tmp_path, monkeypatch):
    """
    To the letter, so that the same results give the same page; and the matrix has all of them. On a phone, half of
    their size, figures can be read.
    """
    pytest.importorskip("matplotlib")
    import report_figures
    from card import DPI, SMALL, WIDTH
    from matplotlib.text import Text
    from matrix import Matrix, Run, read_results

    own, cards, titles = report_figures.card, [], []

    @contextlib.contextmanager
    def kept(*arguments):
        with own(*arguments) as figure:
            cards.append(figure)
            titles.append(arguments[2])
            yield figure

    monkeypatch.setattr(report_figures, "card", kept)

    results = read_results(MATRIX.parent / "runs")
    assert all(result["name"] == name for name, result in results.items())
    assert results.keys() <= {run.name for run in Matrix.read(MATRIX).runs(results) if isinstance(run, Run)}
    shutil.copy(ROOT / "docs" / "runs.md", tmp_path)
    assert module.main(MATRIX, MATRIX.parent / "runs", tmp_path) == 0  # none has other prompts or settings
    page = (tmp_path / "runs.md").read_text()
    assert page == (ROOT / "docs" / "runs.md").read_text()
    pictures = sorted(tmp_path.glob("*.png"))
    assert [picture.stem for picture in pictures] == [
        f"results_{n}" for n in ("accuracy", "differences", "divergence", "starts")
    ]
    for picture in pictures:
        assert picture.read_bytes().startswith(b"\x89PNG")
        assert f"]({picture.name})" in page or f"]({picture.name})" in (ROOT / "docs" / "results.md").read_text()
        assert (ROOT / "docs" / picture.name).is_file()
    assert SMALL * 360 / 72 / WIDTH >= 9 and WIDTH * DPI == 2 * 360
    for figure in cards:
        assert (figure.get_figwidth(), figure.dpi) == (WIDTH, DPI)
        assert all(text.get_fontsize() >= SMALL for text in figure.findobj(Text))
        drawn = figure.get_tightbbox()  # in inches
        assert drawn.x0 >= 0 and drawn.y0 >= 0 and drawn.x1 <= WIDTH and drawn.y1 <= figure.get_figheight()
    assert len(cards) == len(pictures)
    # As many comparisons as there are, by which one that leaves zero out is judged
    (counted,) = filter(None, (re.search(r"\d+ of (\d+) intervals contain zero", title) for title in titles))
    said = (ROOT / "docs" / "results.md").read_text()
    assert f"{counted[0]}](" in said and f"Of the {counted[1]} differences" in said
    assert f"one of [{counted[1]} comparisons](" in (ROOT / "README.md").read_text()


def test_prompts_that_differ_between_methods_of_a_seed_are_an_error(module, report, many, capsys, monkeypatch):
    monkeypatch.setattr(module.Report, "figures", lambda *_: [])  # which take longer
    status, page = report(*many)
    assert status == 0 and "15 of 15 comparable runs" in page
    other = json.loads(json.dumps(next(r for r in many if r["name"] == "interacting-lr2e-6-seed1")))
    other["prompts_of_generations"][3] = "another"
    status, page = report(other)
    assert status == 1 and "14 of 15 comparable runs" in page and "from generation 3 on" in page
    assert "interacting-lr2e-6-seed1 saw other prompts than" in page
    assert "saw other prompts" in capsys.readouterr().err
    other["hardware"]["device"] = "x86_64"  # on a CPU they come in another order
    status, page = report(other)
    assert status == 0 and "14 of 14 comparable runs" in page


def test_results_of_other_settings_or_models_than_the_others_are_named(module, page_of):
    run = functools.partial(made_up, draw=random.Random(0))
    one, other, another = run("grpo", 2e-6, 0), run("fisher", 2e-6, 0), run("fisher", 1e-6, 0)
    one["settings"]["format_weight"], other["model"] = 0.2, "another"
    page = page_of(one, other, another)
    assert "settings that the matrix has no more: `grpo-lr2e-6-seed0` (format_weight)." in page
    assert re.findall(r"\*\*(\S+) began with another model than (\S+)\*\*", page) == [(other["name"], another["name"])]
    report = module.Report(module.Matrix.read(MATRIX), {one["name"]: one}, {})
    assert report.unequal_settings() == ["grpo-lr2e-6-seed0 has format_weight=0.2, the matrix says 0.0: rename it"]


# Methods


def test_medians_and_ranges_are_those_of_the_seeds(page_of, many):
    rows = rows_of(page_of(*many), "Methods")
    assert list(rows) == [f"{method}, 2e-6" for method in METHODS]  # the best of the grid, not marked
    for row in rows.values():
        own = [r for r in many if re.fullmatch(rf"{row['method, rate'].split(',')[0]}-lr2e-6-seed\d", r["name"])]
        assert row["n"] == "3" and numbers(row["test accuracy"]) == spread([points(r) for r in own])
        assert numbers(row["KL from the start"]) == spread([last_kl(r) for r in own])
        prices = [last_kl(r) / (points(r) - 20) for r in own if points(r) > 20]
        assert numbers(row["nats per point gained"]) == spread(prices, 0.01)


def test_differences_are_paired_by_seed_and_resampled(page_of, many):
    rows, of = rows_of(page_of(*many), "Methods"), {r["name"]: r for r in many}
    assert rows["grpo, 2e-6"]["accuracy, difference from `grpo` in points"] == ""
    for method in METHODS[1:]:
        pairs = [[of[f"{name}-lr2e-6-seed{seed}"] for name in (method, "grpo")] for seed in (0, 1, 2)]
        mean, *interval, n = numbers(rows[f"{method}, 2e-6"]["accuracy, difference from `grpo` in points"])
        assert ([mean], n) == (rounded(np.mean([points(a) - points(b) for a, b in pairs])), 3)
        each, draw = np.array([answers(a) - answers(b) for a, b in pairs]), np.random.default_rng(1)
        drawn = ((draw.integers(3, size=3), draw.integers(PROBLEMS, size=PROBLEMS)) for _ in range(4000))
        expected = np.quantile([100 * each[np.ix_(*both)].mean() for both in drawn], [0.025, 0.975])
        assert interval == pytest.approx(expected, abs=0.1 * np.ptp(expected))


def test_of_one_seed_the_interval_is_that_of_the_problems_and_says_so(page_of):
    draw = random.Random(7)
    first, second = made_up("fisher", 2e-6, 0, draw), made_up("grpo", 2e-6, 0, draw)
    page = page_of(first, second)
    cell = rows_of(page, "Methods")["fisher, 2e-6*"]["accuracy, difference from `grpo` in points"]
    each = 100 * (answers(first) - answers(second))
    half, mean = 1.96 * np.std(each, ddof=1) / np.sqrt(PROBLEMS), np.mean(each)
    assert numbers(cell) == rounded(mean, mean - half, mean + half, 1) and cell.endswith("problems alone")
    assert "grid of rates is not finished" in page


def test_divergence_at_equal_accuracy_is_interpolated(page_of):
    draw = random.Random(0)
    slow, fast = made_up("grpo", 2e-6, 0, draw), made_up("fisher", 2e-6, 0, draw)
    slow["validations"] = [{"step": 25, "accuracy": 0.25, "kl": 4.0}, {"step": 50, "accuracy": 0.29, "kl": 8.0}]
    fast["validations"] = [{"step": 25, "accuracy": 0.31, "kl": 6.0}, {"step": 50, "accuracy": 0.35, "kl": 9.0}]
    rows = rows_of(page_of(START, slow, fast), "Methods")
    # 29 % is reached by all: the slow one at its last validation, the fast one at (0.29 - 0.21) / 0.1 of its first
    assert [row["KL at 29.0 % held back"] for row in rows.values()] == ["8.0", "4.8"]


def test_methods_are_compared_at_one_rate_until_their_grids_are_finished(page_of):
    rates, draw = {"grpo": (1e-6, 2e-6), "fisher": (2e-6, 4e-6), "fig4": (2e-6,)}, random.Random(0)
    page = page_of(*(made_up(method, rate, 0, draw) for method in rates for rate in rates[method]))
    assert set(rows_of(page, "Methods")) == {f"{method}, 2e-6*" for method in rates}


def test_seconds_are_those_of_a_method_alone_once_all_have_been_measured(module, page_of, many):
    def clock(**seconds):
        """A round of `phases.py`: generation and the rest of a step, by method."""
        methods = {
            name: {"phases": {"generation": generation, "forward": rest / 4, "backward": 3 * rest / 4}}
            for name, (generation, rest) in seconds.items()
        }
        return {"methods": methods, "title": "gsm8k, one GPU"}

    first = clock(grpo=(1.0, 2.0), fisher=(1.4, 1.5))
    second = clock(grpo=(1.2, 2.4), fisher=(1.3, 1.7), interacting=(1.1, 4.4), none=(1.1, 0.4))
    third = clock(fisher=(1.15, 1.6), euclidean=(1.15, 5.0))  # nothing to compare them with
    rows = dict.fromkeys((f"{method}, 2e-6" for method in METHODS), [])
    matrix = module.Matrix.read(MATRIX)
    assert module.Report(matrix, {}, {}, {"1": first}).seconds_of_step(rows) is None  # of `interacting` nothing
    clocks = {"1": first, "2": second, "3": third}
    # The second round was slower for GRPO as well: what counts is the share of GRPO's seconds in the same round
    shares = {"grpo": 1.0, "fisher": (1.5 / 2.0 + 1.7 / 2.4) / 2, "interacting": 4.4 / 2.4}
    alone = {method: 1.15 + 2.2 * share for method, share in shares.items()}
    assert module.Report(matrix, {}, {}, clocks).seconds_of_step(rows) == pytest.approx(alone)
    head = "Seconds of an optimizer step, one method alone on the machine (gsm8k, one GPU)"
    text = page_of(*many, clocks=clocks).partition(head)[2]
    assert "1.15 (1.00 to 1.40) s" in text and text.split("\n\n")[1].splitlines()[2:] == [
        "| grpo | 2 | 2.20 (2.00 to 2.40) |  |",
        "| reinforce | 1 | 0.40 | 0.17 |",
        "| fisher | 3 | 1.60 (1.50 to 1.70) | 0.73 (0.71 to 0.75) |",
        "| interacting | 1 | 4.40 | 1.83 |",
        "| euclidean | 1 | 5.00 |  |",
    ]


def test_plain_steps_stand_beside_grpos_at_the_best_rate_without_a_target(page_of):
    draw = random.Random(31)
    rates = [
        of_task(f"grpo-optimizersgd-lr{rate}-seed0", draw, worse=worse)
        for rate, worse in (("1e-3", 0.1), ("1e-1", 0.2))
    ]
    names = "grpo-optimizersgd-lr1e-2-seed0", "plain_interacting-target0.001-lr1e-1-seed0"
    base, with_target = (
        [
            of_task(name.replace("seed0", f"seed{seed}"), draw, settings_of_the_matrix()[name] | {"seed": seed})
            for seed in (0, 1, 2)
        ]
        for name in names
    )
    section = section_of(page_of(START, *rates, *base, *with_target), "Plain steps")
    text = section.partition("Against `grpo, SGD, 1e-2`")[2]
    ((label, row),) = rows_of_table(text.partition("\n")[2]).items()
    assert label == "plain_interacting, target 1e-3"
    gained = sum(points(run) for run in with_target) / 3 - sum(points(run) for run in base) / 3
    assert numbers(row["test accuracy, in points"])[:1] == rounded(gained) and "n = 3" in row["KL"]
    # With one seed there is nothing to see
    assert "Against `grpo" not in page_of(START, *rates, *base, with_target[0])


# Other tasks


TASK = next(group for group in CONTENT["groups"] if group["group"] == "start_tasks")["over"]["task"][0]


def of_task(name, draw, settings=None, worse=0.0):
    """A run of the matrix, of another task than GSM8K."""
    result = made_up("fisher", 2e-6, 0, draw, worse)
    settings = settings or settings_of_the_matrix()[name]
    lengths = [40.0 + step for step in range(settings["steps"])]
    return result | {
        "name": name,
        "settings": settings,
        "steps": result["steps"] | {"completions/mean_length": lengths},
    }


def started_task(draw):
    name = f"start-task{TASK}"
    return of_task(name, draw) | {"validations": [{"step": 0, "accuracy": 0.15}]}


def tasks_runs(draw):
    """Both rates of GRPO, of which the second is the better one; plain steps of three seeds; and multiples of auto."""
    ends = [f"task{TASK}-lr1e-1-seed{seed}" for seed in (0, 1, 2)]
    rates = [
        of_task(f"grpo-task{TASK}-lr{rate}-seed0", draw, worse=0.1 * (rate == "1e-6")) for rate in ("1e-6", "2e-6")
    ]
    plain_steps = [of_task(f"plain_interacting-targetauto-{end}", draw) for end in ends]
    times = [of_task(f"plain_interacting-times{times}-targetauto-{ends[0]}", draw) for times in (0.25, 4)]
    return rates, plain_steps, times


def test_other_tasks_have_a_section_each_where_there_are_runs_of_them(page_of):
    draw = random.Random(21)
    assert "## Task" not in page_of(START) and "automatic target" not in page_of(START)
    assert "## Task" not in page_of(START, started_task(draw))  # a start alone says nothing
    rates, plain_steps, times = tasks_runs(draw)
    start = started_task(draw)
    start["human_eval"] = {"accuracy": 0.25}
    plain_steps[1]["human_eval"] = {"accuracy": 0.5}
    page = page_of(START, start, *rates, *plain_steps, *times)
    assert re.findall("^## Task: (.*)$", page, flags=re.M) == [TASK, f"{TASK}, learning rates of GRPO"]
    section = section_of(page, f"Task: {TASK}")
    courses, beside = map(rows_of_table, re.split(r"^(?=\| method)", section, flags=re.M)[1:])
    labels = [f"plain_interacting, target {length}" for length in ("auto", "0.25 × auto", "4 × auto")]
    assert list(courses) == list(beside) == ["grpo, 2e-6", *labels]
    assert numbers(courses[labels[0]]["test accuracy"]) == spread([points(run) for run in plain_steps])
    (difference,) = rounded(points(plain_steps[0]) - points(rates[1])).expected
    assert f"{difference:+.1f}" in beside[labels[0]]["accuracy, difference from `grpo` in points"]
    assert f"{points(start):.1f} % of {PROBLEMS} test problems, 15.0 % of 512" in section
    assert "HumanEval" in section and "before training: 25.0 %" in section and f"{labels[0]}: 50.0 %, n = 1" in section
    assert "-seed1`" in section and "taskcode" not in section  # of GRPO, and of this task alone
    row = rows_of(page, f"Task: {TASK}, learning rates of GRPO")["`grpo`"]
    assert row["2e-6"].startswith("**") and not row["1e-6"].startswith("**")


def test_a_task_that_is_not_gone_on_with_keeps_its_section(page_of):
    draw = random.Random(24)
    names = ("grpo-taskletter_counting-lr2e-6-seed0", "plain_interacting-targetauto-taskletter_counting-lr1e-1-seed0")
    runs = [of_task(name, draw) for name in names]
    page = page_of(*runs)
    assert re.findall("^## Task: (.*)$", page, flags=re.M) == ["letter_counting"]
    section = section_of(page, "Task: letter_counting")
    rows = rows_of_table(re.split(r"^(?=\| method)", section, flags=re.M)[2])
    assert list(rows) == ["grpo, 2e-6", "plain_interacting, target auto"] and "Not yet run" not in section


def test_multiples_of_the_automatic_target_stand_side_by_side_with_the_completions_lengths(page_of):
    rates, plain_steps, times = tasks_runs(random.Random(22))
    rows = rows_of(page_of(*plain_steps, *times), "Multiples of the automatic target")
    steps = plain_steps[0]["settings"]["steps"]
    assert list(rows) == [TASK] and numbers(rows[TASK]["tokens"]) == rounded(44.5, 40 + steps - 5.5, to=1)
    for column, run in zip(("0.25 times", "1 times", "4 times"), (times[0], plain_steps[0], times[1]), strict=True):
        assert numbers(rows[TASK][column]) == rounded(points(run), last_kl(run))


def test_a_resumed_run_shows_its_memory_before_and_after(page_of):
    draw = random.Random(23)
    name = next(name for name in settings_of_the_matrix() if "-resumed" in name)
    run = of_task(name, draw)
    half, steps = run["settings"]["resume_at"], run["settings"]["steps"]
    run["first_half"] = {"steps": half, "peak_gib": 17.0}
    run["hardware"] = {**run["hardware"], "peak_gib": 18.0}
    run["steps"]["memory/host"] = [1.0] * half + [3.0] * (steps - half)
    section = section_of(page_of(run), "A long run, resumed")
    assert "17.00 and 18.00" in section
    row = rows_of_table(section)["host"]
    assert list(row.values()) == ["host", "1.000", "1.000", "3.000", "3.000"]
    assert list(row)[1:] == ["steps 1 to 10", f"steps {half - 9} to {half}", *list(row)[3:]]


# The Fisher norm


def test_correlations_of_the_fisher_norm_are_by_rank_and_by_kind(page_of):
    draw, keys = random.Random(2), ["16", "64", "250", "1024", "all", "reduced", "norm"]

    def positive():
        return [0.1 + draw.random() for _ in range(6)]

    def layer(kind):
        fisher = {key: [positive() for _ in range(1 if key in ("all", "reduced") else 2)] for key in keys[:-1]}
        found = {"kind": kind, "fisher": fisher} | {name: positive() for name in ("kl", "others", "norm", "size")}
        return found | {"half": [value / 4 for value in found["kl"]]}

    layers = [layer("q"), layer("q"), layer("norm")]
    given = {"settings": {"tokens": 40}, "lengths": [10] * 6, "layers": layers, "hardware": {"device": "CPU"}}
    text = section_of(page_of(fisher_norms={"Model": given}), "How good is the Fisher norm?")

    def expected(layer, key, where, unit):
        length = np.array(layer["norm"])
        draws = [length] if key == "norm" else np.array(layer["fisher"][key])
        measured = np.sqrt(layer[where]) / np.array(layer["size"])
        if unit:
            draws, measured = [draw / length for draw in draws], measured / length
        ranked = [np.argsort(np.argsort(values)) for values in (measured, *draws)]
        return np.mean([np.corrcoef(ranked[0], of_draw)[0, 1] for of_draw in ranked[1:]])

    tables = [
        [line.strip("|").split("|") for line in t.splitlines()[2:]]
        for t in re.findall(r"(?:^\|.*\n?)+", text, flags=re.M)
    ]
    lines = list(zip(tables[0], itertools.product(("kl", "others"), (False, True)), [layers] * 4, strict=True))
    lines += [(table[0], ("kl", unit), layers[:2]) for table, unit in zip(tables[1:], (False, True), strict=True)]
    for line, of, own in lines:
        *_, n = line[: -len(keys)]
        assert int(n) == len(own)
        for key, cell in zip(keys, line[-len(keys) :], strict=True):
            if (key, of[1]) == ("norm", True):
                assert cell.strip() == "none"
            else:
                assert float(cell) == pytest.approx(
                    np.median([expected(layer, key, *of) for layer in own]), abs=0.0051
                )
    assert tables[1][0][0].strip() == "`q`" and "4.00 times the divergence" in text and "n = 18" in text
