"""
`learning.py report`: the tables of docs/runs.md and the figures beside them, from the results' files alone.

What it writes stands between two markers of the page; the rest of the page is written by hand. Every number has its n
beside it, and what is not yet run is said in its place.
"""

import itertools
import json
import re
import sys
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from statistics import fmean
from typing import Any, NamedTuple

import report_figures
from matrix import Matrix, Run, held_back_score, read_results, short_rate
from report_statistics import bits, bootstrap_interval, crossed_interval, interval_over_problems, median, spearman


BEGIN = "<!-- made by `python benchmarks/learning/learning.py report`: do not edit by hand -->"
END = "<!-- end of what is made -->"

Result = dict[str, Any]
Rows = dict[str, list[Result]]  # runs that differ in their seed alone, by label

# What a seed's data depends on beside the seed
OF_DATA = ("task", "model", "seed", "held_back", "completions", "generations", "steps_per_generation")
# How the parts of a run's name are said in tables; the others stand there as they are
SAID = {
    r"groupedno": "shuffled",
    r"grouped": "by prompt",
    r"microbatch(\d+)": r"microbatches of \1",
    r"lambda([\d.]+)": r"λ = \1",
    r"skip": "zero advantages left out",
    r"scopemicrobatch": "metric of the microbatch",
    r"scopestep": "metric of the step before",
    r"stale(\d+)": r"\1 steps per generation",
    r"weightsp3o": "P3O",
    r"weights(dppo_tv|dppo_kl|m2po|aspo)": r"`\1`",
    r"clip([\d.]+)": r"clipped at \1",
    r"lora(\d+)": r"LoRA r = \1",
    r"optimizermuon": "Muon",
    r"share([\d.]+)": r"measured on \1 of the batch",
    r"target([\d.]+)": r"target \1",
    r"optimizersgd": "SGD",
    r"momentum([\d.]+)": r"momentum \1",
    r"mu([\d.]+)": r"μ = \1",
    r"steps(\d+)": r"\1 steps",
    r"modelQwen2.5_Coder_([\d.]+B)_Instruct": r"\1",
    r"weightsbfloat16": "weights in bf16",
    r"updatesstochastic": "rounded at random",
    r"updatesexact": "with a remainder",
    r"updatesno": "rounded to nearest",
    r"resumed(\d+)": r"resumed after \1",
}
HUMAN_EVAL = "human_eval"
MEMORY = {
    "memory/allocated": "GPU, in use",
    "memory/reserved": "GPU, reserved by PyTorch",
    "memory/host": "host",
}
GENERATION = "generation"  # as `phases.py` calls it
MAIN = ("grpo", "reinforce", "fisher", "interacting", "fig4", "euclidean")
STARTS = "results_starts.png"
DIFFERENCES_FROM_GRPO = "results_differences.png"
START_GROUPS = ("starts", "starts_without")
RATE_GROUPS = ("rates", "rates_of_euclidean")
MAIN_GROUPS = ("first", *RATE_GROUPS, "seeds", "seeds_of_others", "divergence")
STALE_METHODS = ("stale_grpo", "stale_methods", "stale_methods_clipped")
PLAIN_REINFORCE = "plain_reinforce"
# Labels: SGD without a target at its best rate, and the rule that does best with one
PLAIN_GRPO, PLAIN_BEST = "grpo, SGD, 1e-2", "plain_interacting, target 1e-3"
DIRECTIONS = ("directions", "directions_shorter", "directions_seeds", "directions_proma", "directions_lambda")
TASKS, RESUMED = "tasks", "resumed"
TASK_TARGETS = ("tasks_targets", "sums_targets", "sums_batches")
TEN_STEPS = slice(None, 10), slice(-10, None)  # the first and the last ones
TASK_RATES, TASK_GRPO = "rates_tasks", "tasks_grpo"
PROCESSORS = ("x86_64", "aarch64", "arm64")  # what a run on a CPU has as its device
# With the runs of a task that is not gone on with
PLAIN_OF_TASKS, GRPO_OF_TASKS = (TASKS, "tasks_targets", "shortcut"), (TASK_GRPO, "shortcut_grpo")
PLAIN_GROUPS = ("plain", "plain_targets", "plain_longer", "plain_momentum", "rates_sgd", "sgd")
BF16_GROUPS = ("bf16", "bf16_seeds")


class Estimate(NamedTuple):
    """A mean of differences by seed: these, its interval, and whether that is of the problems alone."""

    values: list[float]
    interval: tuple[float, float] | None
    of_problems: bool = False


def main(matrix: Path, results: Path, docs: Path) -> int:
    page = docs / "runs.md"
    text = page.read_text()
    if text.count(BEGIN) != 1 or text.count(END) != 1:
        print(f"learning.py: {page} must have these two lines, once each:\n{BEGIN}\n{END}", file=sys.stderr)
        return 2
    beside = (read_results(results.parent / folder) for folder in ("fisher_norm", "clock"))
    report = Report(Matrix.read(matrix), read_results(results), *beside)
    figures = report.figures(docs)
    head, rest = text.split(BEGIN)
    page.write_text(head + BEGIN + "\n\n" + report.text(figures) + "\n" + END + rest.split(END)[1])
    differing = report.unequal_prompts() + report.unequal_settings()
    for line in differing:
        print(f"learning.py: {line}", file=sys.stderr)
    return 1 if differing else 0


class Report:
    """
    Args:
        matrix: the runs there should be.
        results: those there are, by name.
        fisher_norms: results of `fisher_norm.py`, by model.
        clocks: results of `phases.py`, a file per round.
    """

    def __init__(
        self,
        matrix: Matrix,
        results: dict[str, Result],
        fisher_norms: dict[str, Result],
        clocks: dict[str, Result] | None = None,
    ):
        self.matrix, self.results, self.fisher_norms, self.clocks = matrix, results, fisher_norms, clocks or {}
        self.start = results.get("start")
        untrained = [r for r in results.values() if not r["settings"]["steps"]]
        self.starts_by_model = {task_and_model(result): result for result in untrained}

    def text(self, figures: Iterable[str]) -> str:
        figures = list(figures)
        sections = [
            self.made(),
            self.rates("Learning rates", RATE_GROUPS, always=True),
            self.methods(figures),
            self.lambdas(),
            self.microbatches(),
            self.variants("Sequences without an advantage", ("not_skipping", "skipping"), None),
            self.variants(
                "The metric of a microbatch and of a step",
                ("skipping", "scopes"),
                None,
                "fisher, metric of the microbatch",
            ),
            self.stale(),
            self.variants("Stale data: methods of the field", STALE_METHODS, "grpo"),
            self.at_best("LoRA", "rates_lora", "lora"),
            self.rates("LoRA: learning rates", ("rates_lora",)),
            self.at_best("Muon", "rates_muon", "muon"),
            self.rates("Muon: learning rates", ("rates_muon",)),
            self.starts(figures),
            self.targets(),
            self.plain("Plain steps", PLAIN_GROUPS, base=PLAIN_GRPO),
            self.rates("GRPO with SGD: learning rates", ("rates_sgd",)),
            self.plain("Plain steps: rules with a direction", DIRECTIONS, base=PLAIN_BEST),
            self.plain("Plain steps: weights in bf16", BF16_GROUPS, base=PLAIN_BEST),
            self.plain("Plain steps: 200 steps", ("long",), ("long_grpo",)),
            self.plain("Plain steps: 1.5B", ("larger",), ("larger_grpo",)),
            self.rates("1.5B: learning rates", ("rates_larger",)),
            *self.tasks(),
            self.automatic_targets(),
            self.resumed(),
            self.variants("Sums", ("sums",), "grpo"),
            self.variants("Sums: starting learning rates", ("sums_starts",), None),
            self.fisher_norm(),
        ]
        return "\n\n".join(section for section in sections if section) + "\n"

    def figures(self, docs: Path) -> list[str]:
        """Draws what there are runs for, and returns the names of the files."""
        names = []
        rows = {label: runs for label, runs in self.main_rows().items() if runs}
        if rows:
            seconds = self.seconds_of_step(rows)
            names.append(report_figures.accuracy(rows, self.start, docs / "results_accuracy.png", seconds))
            names.append(report_figures.divergence(rows, self.start, docs / "results_divergence.png"))
        starts = self.start_rows()
        if any(report_figures.has_target(label) for label in starts):
            names.append(report_figures.starts(starts, self.start, docs / STARTS))
        differences = self.differences_from_grpo()
        if differences:
            names.append(report_figures.differences(differences, docs / DIFFERENCES_FROM_GRPO))
        return names

    def differences_from_grpo(self) -> dict[str, dict[str, Estimate]]:
        """Of test accuracy, in points, by seed: of each method, under a title for what it shares with its GRPO."""
        old = self.by_label(("stale", "stale_p3o", "stale_clipped", "stale_regularized", *STALE_METHODS))
        blocks = {
            "AdamW": self.main_rows(),
            "8 steps per generation": {name: runs for name, runs in old.items() if "8 steps per" in name},
            "LoRA r = 32": self.rows_at_best("rates_lora", "lora"),
            "Muon": self.rows_at_best("rates_muon", "muon"),
            "SGD": {**self.grpo_of(()), **self.by_label(PLAIN_GROUPS)},
            "The same, weights in bf16": {**self.grpo_of(()), **self.by_label(BF16_GROUPS)},
        }
        found = {}
        for title, rows in blocks.items():
            base = next((label for label in rows if label.startswith("grpo,")), None)
            others = {label: runs for label, runs in rows.items() if label != base} if base else {}
            estimates = {
                label.replace(f", {title.rpartition(', ')[2]}", "").replace("`", "").removeprefix("plain_"): in_points(
                    runs, rows[base]
                )
                for label, runs in others.items()
                if base
            }
            if any(estimate.values for estimate in estimates.values()):
                found[title] = {label: estimate for label, estimate in estimates.items() if estimate.values}
        return found

    # What there is

    def finished(self, groups: Iterable[str] | None = None, task: str | None = None) -> Iterator[tuple[Run, Result]]:
        """Runs of the matrix that are made, of these groups (and task) or of all, in its order, with their results."""
        for run in self.matrix.runs(self.results, None if groups is None else list(groups)):
            if isinstance(run, Run) and run.name in self.results and task in (None, run.settings["task"]):
                yield run, self.results[run.name]

    def made(self) -> str:
        trained = [result for result in self.results.values() if result["settings"]["steps"]]
        wanted = len(list(self.matrix.runs(self.results)))
        lines = ["## What is made", "", f"{len(list(self.finished()))} of {wanted} runs of the matrix."]
        if trained:
            hours = sum(r["seconds"]["total"] / r["hardware"]["parallel"] for r in trained) / 3600
            lines[-1] += f" {len(trained)} trained, {hours:.2f} hours of a machine in all: " + "; ".join(
                f"{count} on {device}, {parallel} at a time"
                for (device, parallel), count in counted(
                    (r["hardware"]["device"], r["hardware"]["parallel"]) for r in trained
                )
            )
            lines[-1] += f". {described_versions(trained)}"
        if self.start:
            test, (held_back,) = self.start["test"], self.start["validations"]
            lines += [
                "",
                f"Before training, greedy: {percent(test['accuracy'])} of {test['count']:,} test problems, "
                f"{percent(held_back['accuracy'])} of {self.start['held_back']} held back from training (n = 1).",
            ]
        lines += [f"\n**{line}**" for line in self.other_models()]
        compared = self.compared_prompts()
        if compared:
            unequal = self.unequal_prompts()
            lines += [
                "",
                "Prompts are the same, generation by generation, between methods of one seed: "
                f"{compared - len(unequal)} of {compared} comparable runs."
                + "".join(f"\n\n**{line}**" for line in unequal),
            ]
        other = self.other_settings()
        if other:
            lines += ["", "Made with settings that the matrix has no more: " + "; ".join(other) + "."]
        return "\n".join(lines)

    def other_settings(self) -> list[str]:
        """Runs whose settings are not those of the matrix; before the first step none of them matters."""
        lines = []
        for run, result in self.finished():
            has = result["settings"]
            names = sorted(key for key in {*has, *run.settings} if has.get(key) != run.settings.get(key))
            if names and run.settings["steps"]:
                lines.append(f"`{run.name}` ({', '.join(names)})")
        return lines

    def other_models(self) -> list[str]:
        """Runs that began with other weights than the first one of the same task and model."""
        first: dict[tuple, Result] = {}
        lines = []
        for result in self.results.values():
            one = first.setdefault(task_and_model(result), result)
            if result.get("model") != one.get("model"):
                lines.append(f"{result['name']} began with another model than {one['name']}")
        return lines

    def _by_data(self) -> list[list[Result]]:
        """
        Runs that should have seen the same prompts in each generation, in an order that a CPU and a GPU have apart:
        those of a step depend on how microbatches are made. So one that has noted both comes first, and of these one
        with TRL's microbatches.
        """
        groups = defaultdict(list)
        for result in sorted(self.results.values(), key=lambda r: ("prompts_of_generations" not in r, grouped(r))):
            if result["settings"]["steps"] and result["prompts"]:
                of_data = tuple(result["settings"].get(key) for key in OF_DATA)
                groups[result["hardware"]["device"] in PROCESSORS, *of_data].append(result)
        return [group for group in groups.values() if len(group) > 1]

    def compared_prompts(self) -> int:
        """Runs that have another one of the same seed beside them."""
        return sum(map(len, self._by_data()))

    def unequal_prompts(self) -> list[str]:
        """Runs that saw other prompts than the first one of the same seed."""
        lines = []
        for first, *others in self._by_data():
            for other in others:
                # Of generations where both have noted them, else of steps
                both = "prompts_of_generations" in first and "prompts_of_generations" in other
                unit, key = ("generation", "prompts_of_generations") if both else ("step", "prompts")
                pairs = zip(first[key], other[key], strict=False)
                place = next((number for number, (a, b) in enumerate(pairs) if a != b), None)
                if place is not None:
                    lines.append(f"{other['name']} saw other prompts than {first['name']}, from {unit} {place} on")
        return lines

    def unequal_settings(self) -> list[str]:
        """Runs that the matrix would make in another way by now, under the name that they have."""
        lines = []
        for run, result in self.finished():
            if run.settings["steps"]:
                made = result["settings"]
                apart = [key for key in made if key in run.settings and made[key] != run.settings[key]]
                lines += [f"{run.name} has {k}={made[k]}, the matrix says {run.settings[k]}: rename it" for k in apart]
        return lines

    # Sections

    def rates(self, title: str, groups: tuple[str, ...], always: bool = False, task: str | None = None) -> str:
        """The grid: accuracy on held-back problems by method and rate; nothing without a run, unless always."""
        methods = unique(entry.method for entry in self.matrix.entries if entry.group in groups)
        grids = {
            method: {run.settings["learning_rate"]: run.name for run in self.matrix.grid(method, groups, task)}
            for method in methods
        }
        rates = sorted({rate for grid in grids.values() for rate in grid})
        if not always and not any(name in self.results for grid in grids.values() for name in grid.values()):
            return ""
        lines = [f"## {title}", ""]
        lines += [
            "Accuracy on held-back problems, mean of the last two validations, and KL from the start at the last one, "
            "seed 0 (n = 1); the rate that is chosen is in bold, once the method's part of the grid is finished.",
            "",
        ]
        lines += table(["method", *map(short_rate, rates)])
        for method, grid in grids.items():
            best = self.matrix.best_of(method, groups, self.results, task)
            cells = []
            for rate in rates:
                result = self.results.get(grid.get(rate, ""))
                score = percent(held_back_score(result)) if result else "not run"
                divergence = spread(known([kl(result)]), ", {:.1f}") if result else ""
                cells.append((f"**{score}**" if result and rate == best else score) + divergence)
            lines.append(row([f"`{method}`", *cells]))
        return "\n".join(lines)

    def main_rows(self) -> Rows:
        """Each method at its rate, seeds that are made; at the rate of most methods until its grid is finished."""
        rows: Rows = {}
        runs: dict[str, dict[float, dict[int, Result]]] = {method: defaultdict(dict) for method in MAIN}
        for result in self.trained("gsm8k"):
            settings = result["settings"]
            if variant(result) in runs:
                runs[variant(result)][settings["learning_rate"]][settings["seed"]] = result
        methods_at = Counter(rate for made in runs.values() for rate in made)
        for method, made in runs.items():
            if not made:
                continue
            best = self.matrix.best_of(method, RATE_GROUPS, self.results)
            rate = best if best in made else max(made, key=lambda rate: (methods_at[rate], len(made[rate]), -rate))
            mark = "" if best is not None else "*"
            rows[f"{method}, {short_rate(rate)}{mark}"] = [made[rate][seed] for seed in sorted(made[rate])]
        return rows

    def methods(self, figures: list[str]) -> str:
        lines = ["## Methods"]
        rows = self.main_rows()
        if not rows:
            return "\n".join([*lines, *self.missing(MAIN_GROUPS)])
        lines += ["", *self.comparison(rows, next((label for label in rows if label.startswith("grpo,")), None))]
        if any(label.endswith("*") for label in rows):
            lines += ["", "\\* The method's grid of rates is not finished: the rate that most methods have runs at."]
        lines += self.against_control(rows)
        lines += ["", *self.tail(rows)]
        lines += self.clock()
        captions = {
            "results_accuracy.png": "Accuracy on held-back problems by step and by seconds of training; median and "
            "range over seeds",
            "results_divergence.png": "KL from the start against accuracy on held-back problems at the last step, a "
            "point per run, with hulls",
        }
        for name in figures:
            lines += ["", f"![{captions[name]}]({name})"] if name in captions else []
        return "\n".join([*lines, *self.missing(MAIN_GROUPS)])

    def rounds(self) -> list[dict[str, dict[str, float]]]:
        """Seconds of a step's phases with a method alone on the machine, by method, of each round."""
        return [
            {
                {"none": "reinforce"}.get(method, method): figures["phases"]
                for method, figures in clock["methods"].items()
            }
            for clock in self.clocks.values()
        ]

    def seconds_of_step(self, rows: Rows) -> dict[str, float] | None:
        """
        By method, if all have been measured beside GRPO: generation, which is the same work, as all have it, and the
        rest, GRPO's by the method's share of it. Rounds may be of different machines, and not all of all methods.
        """
        rounds = self.rounds()
        methods = [label.partition(",")[0] for label in rows]
        shares = {method: shares_of_grpo(rounds, method) for method in methods}
        if not all(shares.values()):
            return None
        common = median(phases[GENERATION] for entries in rounds for phases in entries.values())
        of_grpo = median(but_generation(entries["grpo"]) for entries in rounds if "grpo" in entries)
        return {method: common + of_grpo * median(found) for method, found in shares.items()}

    def clock(self) -> list[str]:
        """A table of what steps take, alone on the machine."""
        rounds = self.rounds()
        if not rounds:
            return []
        common = [phases[GENERATION] for entries in rounds for phases in entries.values()]
        titles = unique(clock["title"] for clock in self.clocks.values())
        lines = [
            "",
            f"Seconds of an optimizer step, one method alone on the machine ({'; '.join(titles)}), n rounds of "
            f"several steps. Generation is the same work for all, {spread(common, '{:.2f}')} s, and left out:",
            "",
            *table(["method", "n", "without generation", "of GRPO's in the same round"]),
        ]
        for method in MAIN:
            seconds = [but_generation(entries[method]) for entries in rounds if method in entries]
            if seconds:
                share = spread(shares_of_grpo(rounds, method), "{:.2f}") if method != "grpo" else ""
                lines.append(row([method, str(len(seconds)), spread(seconds, "{:.2f}"), share]))
        return lines

    def against_control(self, rows: Rows) -> list[str]:
        """A sentence on what the Fisher metric does to a rule that normalises (the paper's figure 5)."""
        found = {label.split(",")[0]: results for label, results in rows.items()}
        if not {"fisher", "euclidean"} <= set(found):
            return []
        fisher, euclidean = found["fisher"], found["euclidean"]
        parts = [f"{difference_of_tests(fisher, euclidean)} in points of accuracy"]
        parts.append(f"{difference(fisher, euclidean, kl, '{:+.1f}')} in KL")
        level = self.common_accuracy(rows)
        if level:
            at_level = difference(fisher, euclidean, lambda result: self.kl_at(result, level), "{:+.1f}")
            parts.append(f"{at_level} in KL at {percent(level)} held back")
        return ["", f"`fisher` against `euclidean`, its control, by seed: {'; '.join(parts)}."]

    def lambdas(self) -> str:
        rows: Rows = defaultdict(list)
        for method in ("fisher", "fig4"):
            found = [r for r in self.trained("gsm8k") if re.fullmatch(rf"{method}(-lambda[\d.]+)?", variant(r))]
            rates = {r["settings"]["learning_rate"] for r in found if variant(r) != method}
            for result in sorted(
                found, key=lambda r: (r["settings"]["learning_rate"], r["settings"]["regularization"])
            ):
                if result["settings"]["learning_rate"] in rates:
                    rows[labelled(result, f"{method}, λ = {result['settings']['regularization']:g}")].append(result)
        lines = ["## Lambda"]
        if not rows:
            return "\n".join([*lines, *self.missing(("first_lambda", "tail", "lambda"))])
        for _, labels in itertools.groupby(rows, lambda label: (label.split(", ")[0], label.split(", ")[-1])):
            block = {label: rows[label] for label in labels}
            lines += ["", *self.comparison(block, next((label for label in block if "λ = 0," in label), None))]
            lines += self.against_grpo(block)
        lines += ["", *self.tail(dict(rows))]
        return "\n".join([*lines, *self.missing(("first_lambda", "tail", "lambda"))])

    def against_grpo(self, block: Rows) -> list[str]:
        """A sentence on what rows of one rate are beside GRPO at that rate."""
        (rate,) = {r["settings"]["learning_rate"] for results in block.values() for r in results}
        of_grpo = [r for r in self.trained("gsm8k") if variant(r) == "grpo" and r["settings"]["learning_rate"] == rate]
        if not of_grpo:
            return []
        parts = [f"{label}: {difference_of_tests(results, of_grpo)}" for label, results in block.items()]
        return ["", f"Accuracy, difference from `grpo` at that rate in points: {'; '.join(parts)}."]

    def start_rows(self) -> dict[str, dict[float, list[Result]]]:
        """Runs from several starting rates that are made, by method, with its target if it has one, and rate."""
        rows: dict[str, dict[float, list[Result]]] = {}
        for run, result in self.finished(START_GROUPS):
            label, target = run.method.removesuffix("_kl"), run.settings.get("target_kl")
            label += f", target {short_rate(target)}" if target else ""
            by_rate = rows.setdefault(label, defaultdict(list))
            by_rate[run.settings["learning_rate"]].append(result)
        return rows

    def starts(self, figures: list[str]) -> str:
        """Test accuracy by method and starting rate, and how far each is from the best."""
        rows = self.start_rows()
        lines = ["## Starting learning rates"]
        if not any(map(report_figures.has_target, rows)):
            return "\n".join([*lines, *self.missing(START_GROUPS)])
        rates = sorted({rate for by_rate in rows.values() for rate in by_rate})
        best = max(fmean(map(accuracy, runs)) for by_rate in rows.values() for runs in by_rate.values())
        lines += [
            "",
            "Test accuracy, median and range over seeds, and in brackets the distance of the mean from the best mean "
            f"of all, {percent(best)}, in points. A target is that of a step, `target_kl`, in nats per token.",
            "",
            *table(["method", *map(short_rate, rates)]),
        ]
        for method, by_rate in rows.items():
            cells = []
            for rate in rates:
                values = [100 * accuracy(r) for r in by_rate.get(rate, [])]
                apart = f" [{fmean(values) - 100 * best:+.1f}], n = {len(values)}" if values else ""
                cells.append(spread(values, "{:.1f} %") + apart if values else "not run")
            lines.append(row([method, *cells]))
        lines += [*self.of_the_rule(rows), "", "What the steps were like:", "", *self.lengths(rows)]
        if STARTS in figures:
            caption = "Accuracy on test problems against the starting learning rate; median and range over seeds"
            lines += ["", f"![{caption}]({STARTS})"]
        return "\n".join([*lines, *self.missing(START_GROUPS)])

    def of_the_rule(self, rows: dict[str, dict[float, list[Result]]]) -> list[str]:
        """A sentence for each rule with a target: what it adds to REINFORCE with the same target, over all starts."""
        lines = []
        for label, by_rate in rows.items():
            method, _, target = label.partition(", ")
            plain = rows.get(f"reinforce, {target}", {})
            rates = sorted(set(by_rate) & set(plain))
            if target and method != "reinforce" and rates:
                first, second = ([r for rate in rates for r in runs[rate]] for runs in (by_rate, plain))
                lines += [
                    "",
                    f"`{method}` against REINFORCE, both with {target}, by seed, each the mean over the starts that "
                    f"both have ({', '.join(map(short_rate, rates))}): "
                    f"{difference_of_tests(first, second, 'learning_rate')} in points of accuracy; "
                    f"{difference(first, second, kl, '{:+.1f}', 'learning_rate')} in KL.",
                ]
        return lines

    def targets(self) -> str:
        """Runs of one start with different targets, which are compared on held-back problems."""
        default = self.matrix.content["methods"]["fisher_kl"]["target_kl"]
        rows: dict[float, Result] = {}
        for run, result in self.finished(("targets", "starts")):
            start = result["settings"]["seed"], result["settings"]["learning_rate"]
            if run.method == "fisher_kl" and start == (0, 1e-6):
                rows[result["settings"]["target_kl"]] = result
        lines = ["## Targets for a step"]
        if not set(rows) - {default}:
            return "\n".join([*lines, *self.missing(("targets",))])
        lines += ["", *table(["`target_kl`", "n", "held back", "test accuracy", "KL from the start", *LENGTHS])]
        for target in sorted(rows):
            result = rows[target]
            cells = [short_rate(target), "1", percent(held_back_score(result)), percent(accuracy(result))]
            lines.append(row([*cells, spread(known([kl(result)]), "{:.1f}"), *step_cells([result])]))
        return "\n".join([*lines, *self.missing(("targets",))])

    def lengths(self, rows: dict[str, dict[float, list[Result]]]) -> list[str]:
        lines = table(["method, start", "n", "KL from the start", *LENGTHS])
        for method, by_rate in rows.items():
            for rate in sorted(by_rate):
                runs = by_rate[rate]
                cells = [f"{method}, {short_rate(rate)}", str(len(runs)), spread(known(map(kl, runs)), "{:.1f}")]
                lines.append(row([*cells, *step_cells(runs)]))
        return lines

    def grpo_of(self, groups: tuple[str, ...], task: str | None = None) -> Rows:
        """GRPO with AdamW as some groups have it, or at its rate among the methods."""
        if not groups:
            return {label: runs for label, runs in self.main_rows().items() if label.startswith("grpo,")}
        rows: Rows = defaultdict(list)
        for _, result in self.finished(groups, task):
            rows[labelled(result, said(variant(result)))].append(result)
        return dict(rows)

    def by_label(self, groups: tuple[str, ...], task: str | None = None) -> Rows:
        """Runs of groups, with the target of their steps in the label."""
        rows: Rows = defaultdict(list)
        for _, result in self.finished(groups, task):
            rows[with_target(result)].append(result)
        return dict(rows)

    def plain(
        self,
        title: str,
        groups: tuple[str, ...],
        beside: tuple[str, ...] = (),
        task: str | None = None,
        base: str | None = None,
    ) -> str:
        """
        Runs of groups, their steps' lengths, and what they are beside GRPO, beside REINFORCE's plain steps, and beside
        the plain steps whose label is `base`.
        """
        of_grpo, rows, wanted = self.grpo_of(beside, task), self.by_label(groups, task), groups + beside
        lines = [f"## {title}"]
        if not rows:
            return "\n".join([*lines, *self.missing(wanted, task)])
        lines += ["", *courses({**of_grpo, **rows})]
        lines += ["", *self.comparison({**of_grpo, **rows}, next(iter(of_grpo), None))]
        of_rules, of_base = [], []
        plain = self.by_label(PLAIN_GROUPS) if base else {}
        for label, results in rows.items():
            method, _, others = label.partition(", ")
            reinforce = rows.get(f"{PLAIN_REINFORCE}, {others}")
            if not method.startswith("plain_"):
                continue
            if reinforce and method != PLAIN_REINFORCE:
                of_rules.append(row([label, *compared(results, reinforce)]))
            if base in plain and len(paired(results, plain[base])) > 1:
                of_base.append(row([label, *compared(results, plain[base])]))
        for whom, differences in (
            (f"Each rule against `{PLAIN_REINFORCE}` with the same target, by seed:", of_rules),
            (f"Against `{base}`, by seed, where there is more than one:", of_base),
        ):
            if differences:
                lines += ["", whom, "", *table(["method", *DIFFERENCES]), *differences]
        return "\n".join([*lines, *self.missing(wanted, task)])

    def task_names(self, *groups: str) -> list[str]:
        """Of tasks of which a run of these groups is made."""
        return unique(run.settings["task"] for run, _ in self.finished(groups))

    def tasks(self) -> Iterator[str]:
        """Sections on the other tasks, each as far as there are runs of it."""
        groups = (TASK_RATES, *PLAIN_OF_TASKS, *GRPO_OF_TASKS)
        for task in self.task_names(*groups):
            first = next(r for _, r in self.finished(groups, task))
            head, *lines = self.plain(f"Task: {task}", PLAIN_OF_TASKS, GRPO_OF_TASKS, task).split("\n")
            lines = [head, "", f"{described_task(first['settings'])}{self.before_training(first)}", *lines]
            yield "\n".join([*lines, *self.of_human_eval(task)])
            yield self.rates(f"Task: {task}, learning rates of GRPO", (TASK_RATES,), task=task)
        for task in self.task_names("tasks_long"):
            yield self.plain(f"Task: {task}, 200 steps", ("tasks_long",), ("tasks_long_grpo",), task)

    def before_training(self, result: Result) -> str:
        start = self.start_of(result)
        if start is None:
            return ""
        shares = percent(start["test"]["accuracy"]), percent(start["validations"][0]["accuracy"])
        return (
            f" Before training, greedy: {shares[0]} of {start['test']['count']:,} test problems, {shares[1]} of "
            f"{start['held_back']} held back from training (n = 1)."
        )

    def of_human_eval(self, task: str) -> list[str]:
        """A sentence on the further test that runs of functions may have."""
        start = next((s for (name, _), s in self.starts_by_model.items() if name == task and HUMAN_EVAL in s), None)
        rows = {"before training": [start]} if start else {}
        rows |= {**self.grpo_of((TASK_GRPO,), task), **self.by_label((TASKS,), task)}
        parts = [
            f"{label}: {spread(shares, '{:.1f} %')}, n = {len(shares)}"
            for label, results in rows.items()
            if (shares := [100 * r[HUMAN_EVAL]["accuracy"] for r in results if HUMAN_EVAL in r])
        ]
        return ["", f"Of HumanEval's problems, which are not trained on: {'; '.join(parts)}."] if parts else []

    def automatic_targets(self) -> str:
        """Multiples of what `target_kl="auto"` is, by task and by the completions of a step."""
        rows: dict[str, dict[float, dict[int, Result]]] = defaultdict(lambda: defaultdict(dict))
        for run, result in self.finished((TASKS, *TASK_TARGETS)):
            task, completions = run.settings["task"], re.search(r"-completions(\d+)", result["name"])
            label = f"{task}, {completions[1]} completions per step" if completions else task
            rows[label][run.settings.get("auto_times", 1)][run.settings["seed"]] = result
        multiples = sorted({multiple for found in rows.values() for multiple in found})
        if len(multiples) < 2:
            return ""
        lines = [
            "## Multiples of the automatic target",
            "",
            'Plain steps of so many times what `target_kl="auto"` is, of the seeds that all of a row have: test '
            "accuracy, and KL from the start. Tokens are those of a completion, mean over the first and the last ten "
            "steps, with `auto` itself.",
            "",
            *table(["task", "n", "tokens", *(f"{multiple:g} times" for multiple in multiples)]),
        ]
        for label, found in rows.items():
            seeds = sorted(set.intersection(*map(set, found.values())))
            tokens = [column(found[1][seed], "completions/mean_length") for seed in seeds if 1 in found]
            ends = [f"{fmean(x for of in tokens for x in of[part]):.0f}" for part in TEN_STEPS] if tokens else []
            cells = [label, str(len(seeds)), " to ".join(ends)]
            for multiple in multiples:
                results = [found[multiple][seed] for seed in seeds] if multiple in found else []
                accuracies = spread([100 * accuracy(result) for result in results], "{:.1f} %")
                divergence = spread(known(map(kl, results)), "{:.1f}")
                cells.append(f"{accuracies}, {divergence}" if results else "not run")
            lines.append(row(cells))
        return "\n".join([*lines, *self.missing(TASK_TARGETS)])

    def resumed(self) -> str:
        """Memory and learning of runs that went on from a checkpoint, in another process."""
        lines = []
        for _, result in self.finished((RESUMED,)):
            half, steps = result["first_half"]["steps"], result["settings"]["steps"]
            ends = ((1, 10), (half - 9, half), (half + 1, half + 10), (steps - 9, steps))
            peaks = known([result["first_half"]["peak_gib"], result["hardware"]["peak_gib"]])
            most = " and ".join(f"{peak:.2f}" for peak in peaks)
            lines += [
                f"`{result['name']}`: {steps} steps, resumed after {half} in another process. GiB at the end of a "
                f"step, means over ten steps; PyTorch had reserved at most {most or 'nothing'} on the GPU:",
                "",
                *table(["", *(f"steps {first} to {last}" for first, last in ends)]),
            ]
            for name, words in MEMORY.items():
                if values := column(result, name):
                    lines.append(row([words, *(f"{fmean(values[first - 1 : last]):.3f}" for first, last in ends)]))
            lines += ["", *courses({with_target(result): [result]}), ""]
        return "\n".join(["## A long run, resumed", "", *lines]).rstrip() if lines else ""

    def rows_at_best(self, rates: str, seeds: str) -> Rows:
        """Each method at its rate, chosen from the group of rates: those with a whole grid."""
        methods = unique(entry.method for entry in self.matrix.entries if entry.group == rates)
        best = {method: self.matrix.best_of(method, [rates], self.results) for method in methods}
        made: dict[str, list[Result]] = {method: [] for method in methods}
        for run, result in self.finished((rates, seeds)):
            if run.settings["learning_rate"] == best[run.method]:
                made[run.method].append(result)
        return {labelled(results[0], said(variant(results[0]))): results for results in made.values() if results}

    def at_best(self, title: str, rates: str, seeds: str) -> str:
        """Each method at its rate, beside GRPO at its own."""
        rows, lines = self.rows_at_best(rates, seeds), [f"## {title}"]
        if rows:
            base = next((label for label in rows if label.startswith("grpo,")), None)
            lines += ["", *self.comparison(rows, base)]
        return "\n".join([*lines, *self.missing((rates, seeds))])

    def variants(self, title: str, groups: tuple[str, ...], baseline: str | None, of_all: str = "") -> str:
        """Runs of groups, each against the baseline with the same other settings, or all against one of them."""
        rows: Rows = defaultdict(list)
        apart = {}
        for _, result in self.finished(groups):
            label = labelled(result, said(variant(result)))
            rows[label].append(result)
            # What stands behind the method's name must agree, but for what is done about stale data
            plain = re.sub(r"-(weights\w+|clip[\d.]+|lambda[\d.]+)", "", variant(result))
            apart[label] = plain.partition("-")[2] if baseline else ""
        lines = [f"## {title}"]
        if not rows:
            return "\n".join([*lines, *self.missing(groups)])
        blocks: dict[str, Rows] = defaultdict(dict)
        for label, results in rows.items():
            blocks[apart[label]][label] = results
        for block in blocks.values():
            base = next((label for label in block if baseline and label.startswith(baseline)), None)
            other = next((label for label in block if label.startswith(of_all)), next(iter(block)))
            lines += ["", *self.comparison(block, base or other)]
        return "\n".join([*lines, *self.missing(groups)])

    def microbatches(self) -> str:
        groups = ("large_microbatches", "microbatches")
        lines = [self.variants("Microbatches of one prompt's group", groups, None, "interacting, shuffled")]
        pairs = {"isopo/cosine_same_prompt": "one prompt", "isopo/cosine_other_prompts": "different prompts"}
        for name, of in pairs.items():
            means = known(mean_of(result, name) for _, result in self.finished(groups))
            if means:
                figures = f"{spread(means, '{:.3f}')}, n = {len(means)} runs"
                lines += ["", f"Mean cosine between gradients of two completions of {of}: {figures}."]
        return "\n".join(lines)

    def stale(self) -> str:
        groups = ("fresh", "stale", "stale_p3o", "stale_clipped", "stale_regularized")
        lines = [self.variants("Stale data", groups, "grpo")]
        rows: Rows = defaultdict(list)
        by_age: dict[str, dict[int, list[Result]]] = defaultdict(lambda: defaultdict(list))
        treated: dict[tuple[str, str, int], list[Result]] = defaultdict(list)
        for run, result in self.finished(groups):
            rows[labelled(result, said(variant(result)))].append(result)
            steps = run.settings["steps_per_generation"]
            if run.group in ("fresh", "stale"):
                by_age[run.method][steps].append(result)
            else:
                treated[run.method, said(variant(result)), steps].append(result)

        aged = [
            row([method, f"{steps} against {min(by_steps)}", *compared(by_steps[steps], by_steps[min(by_steps)])])
            for method, by_steps in by_age.items()
            for steps in sorted(by_steps)[1:]
        ]
        if not aged:
            return "\n".join(lines)
        lines += ["", "Each method against itself on fresher data, by seed:", ""]
        lines += [*table(["method", "steps per generation", *DIFFERENCES]), *aged]
        if treated:
            lines += [
                "",
                "P3O, clipping and lambda, against the method without them on data of the same age, by seed:",
                "",
            ]
            lines += table(["method", *DIFFERENCES])
            for (method, name, steps), results in treated.items():
                lines.append(row([name, *compared(results, by_age[method][steps])]))
        head = ["method, rate", "n", "effective share of the tokens", "lowest of a step", "weight of a sequence"]
        head.append("tokens clipped")
        lines += ["", "How far the policy is from the one that drew the data, means over the steps:", "", *table(head)]
        for label, results in rows.items():
            shares = [known(of(r, "off_policy/ess") for r in results) for of in (mean_of, smallest)]
            weights = known(mean_of(r, "sampling/importance_sampling_ratio/mean") for r in results)
            cells = [label, str(len(results)), *(spread(values, "{:.3f}") for values in (*shares, weights))]
            # Logged as 0 where nothing is ever clipped
            off = [100 * share for share in known(mean_of(r, "clip_ratio/region_mean") for r in results) if share]
            lines.append(row([*cells, spread(off, "{:.2f} %")]))
        return "\n".join(lines)

    def trained(self, task: str) -> list[Result]:
        return [r for r in self.results.values() if r["settings"]["steps"] and r["settings"]["task"] == task]

    def missing(self, groups: tuple[str, ...], task: str | None = None) -> list[str]:
        """A sentence on what is not yet run of these groups, of one task or of all."""
        names, waiting = [], 0
        for item in self.matrix.runs(self.results, list(groups)):
            of_task = item.settings["task"] if isinstance(item, Run) else item.given.get("task")
            if task not in (None, of_task):
                continue
            if not isinstance(item, Run):
                waiting += 1
            elif item.name not in self.results:
                names.append(f"`{item.name}`")
        if not names and not waiting:
            return []
        listed = ", ".join(names[:4]) + (f" and {len(names) - 4} more" if len(names) > 4 else "")
        later = f"{waiting} that wait for their learning rate" if waiting else ""
        return ["", "Not yet run: " + "; ".join(filter(None, [listed, later])) + "."]

    # Tables

    def comparison(self, rows: Rows, baseline: str | None) -> list[str]:
        """Accuracy and divergence of each row, and its differences from the baseline's by seed."""
        level = self.common_accuracy(rows)
        head = ["method, rate", "n", "test accuracy", "KL from the start"]
        priced = any(self.prices(results) for results in rows.values())
        head += ["nats per point gained"] if priced else []
        head += [f"KL at {percent(level)} held back"] if level else []
        if baseline:
            name = re.sub(", [^,]*$", "", baseline)
            head += [f"accuracy, difference from `{name}` in points", f"KL, difference from `{name}`"]
        lines = table(head)
        for label, results in rows.items():
            cells = [label, str(len(results)), spread([100 * accuracy(r) for r in results], "{:.1f} %")]
            cells.append(spread(known(map(kl, results)), "{:.1f}"))
            cells += [spread(self.prices(results), "{:.2f}")] if priced else []
            if level:
                cells.append(spread(known(self.kl_at(r, level) for r in results), "{:.1f}"))
            if baseline:
                same = label == baseline
                cells += ["", ""] if same else [difference_of_tests(results, rows[baseline])]
                cells += [] if same else [difference(results, rows[baseline], kl, "{:+.1f}")]
            lines.append(row(cells))
        others = [label for label in rows if label != baseline]
        if baseline and others:
            parts = [f"{label}: {difference(rows[label], rows[baseline], held_back, '{:+.1f}')}" for label in others]
            lines += ["", f"On held-back problems, difference from `{name}` in points: {'; '.join(parts)}."]
        return lines

    def tail(self, rows: Rows) -> list[str]:
        """What the rule does to the gradient."""
        lines = table(
            ["method, rate", "n", "largest multiplier", "mean gradient norm", "steps clipped", "effective sequences"]
        )
        for label, results in rows.items():
            cells = [label, str(len(results))]
            cells.append(spread(known(biggest(r, "isopo/multiplier_max") for r in results), "{:.0f}"))
            cells.append(spread(known(mean_of(r, "grad_norm") for r in results), "{:.2f}"))
            cells.append(spread([100 * share for share in known(clipped(r) for r in results)], "{:.0f} %"))
            cells.append(spread(known(mean_of(r, "isopo/effective_sequences") for r in results), "{:.0f}"))
            lines.append(row(cells))
        return lines

    def prices(self, results: list[Result]) -> list[float]:
        """Nats per point of test accuracy gained, of runs that gained any."""
        starts = [(r, self.start_of(r)) for r in results]
        gains = [(kl(r), 100 * (accuracy(r) - accuracy(start))) for r, start in starts if start]
        return [divergence / gain for divergence, gain in gains if divergence is not None and gain > 0]

    def start_of(self, result: Result) -> Result | None:
        """The model that a run begins with, before training, if it has been measured."""
        return self.starts_by_model.get(task_and_model(result))

    def path(self, result: Result) -> list[tuple[float, float]]:
        """Held-back accuracy and KL at the start and at each validation."""
        start = self.start_of(result)
        if not start:
            return []
        begin = [(start["validations"][0]["accuracy"], 0.0)]
        return begin + [(v["accuracy"], v["kl"]) for v in result["validations"] if v.get("kl") is not None]

    def common_accuracy(self, rows: Rows) -> float | None:
        """The highest held-back accuracy that every run comes to; None where one does not rise at all."""
        paths = [self.path(result) for results in rows.values() for result in results]
        if not paths or not all(paths):
            return None
        level = min(max(a for a, _ in path) for path in paths)
        return level if level > paths[0][0][0] else None

    def kl_at(self, result: Result, level: float) -> float | None:
        """KL where the accuracy first comes to this level, between validations by linear interpolation."""
        for (low, before), (high, after) in itertools.pairwise(self.path(result)):
            if low < level <= high:
                return before + (level - low) / (high - low) * (after - before)
        return None

    # The Fisher norm

    def fisher_norm(self) -> str:
        lines = ["## How good is the Fisher norm?", ""]
        if not self.fisher_norms:
            return "\n".join([*lines, "Not yet run."])
        for name, result in self.fisher_norms.items():
            lines += fisher_norm_tables(name, result)
        return "\n".join(lines).rstrip()


def fisher_norm_tables(name: str, result: Result) -> list[str]:
    """Rank correlations between norms and measured divergence: overall, and by kind of layer."""
    layers = result["layers"]
    sequences = len(result["lengths"])
    quadratic = sorted(w / h for layer in layers for w, h in zip(layer["kl"], layer["half"], strict=True))
    settings = result["settings"]
    lines = [
        f"{name} on {result['hardware']['device']}: {sequences} completions of at most {settings['tokens']} tokens, "
        f"{sum(result['lengths']):,} positions, {len(layers)} layers. Twice the step caused "
        f"{median(quadratic):.2f} times the divergence (median; {quadratic[0]:.2f} to {quadratic[-1]:.2f}; "
        f"n = {len(quadratic)}); where it is quadratic, that is 4.",
        "",
        "Rank correlation between sequences, median over layers (n = number of layers): of each norm with the root of "
        "the measured divergence per squared size of the step, in the sequence itself and in completions of other "
        "prompts; along `V_s` as it is, and along `V_s / |V_s|`, where the length of the gradient cannot help. With "
        "some of the positions, means over several draws of them.",
        "",
    ]
    names = [*layers[0]["fisher"], "norm"]
    heads = [heading(n) for n in names]
    lines += table(["measured in", "step along", "n", *heads])
    kinds = [layer["kind"] for layer in layers]
    by_kind: dict[bool, list[str]] = {}
    for where, unit in itertools.product(("kl", "others"), (False, True)):
        if layers[0][where][0] is None:
            continue
        found = {n: [correlation(layer, n, where, unit) for layer in layers] for n in names}
        place = "itself" if where == "kl" else "others"
        cells = [place, "`V_s / abs(V_s)`" if unit else "`V_s`", str(len(layers))]
        lines.append(row([*cells, *map(median_cell, found.values())]))
        if where == "kl":
            by_kind[unit] = table(["kind", "n", *heads])
            for kind in unique(kinds):
                own = [number for number, other in enumerate(kinds) if other == kind]
                cells = [median_cell([values[number] for number in own]) for values in found.values()]
                by_kind[unit].append(row([f"`{kind}`", str(len(own)), *cells]))
    lines += ["", "By kind of layer, measured in the sequence itself, along `V_s`:", "", *by_kind[False]]
    return [*lines, "", "and along `V_s / |V_s|`:", "", *by_kind[True], ""]


def heading(name: str) -> str:
    return {"all": "F, all positions", "reduced": "F, whole sequences", "norm": "N"}.get(name, f"F, {name}")


def median_cell(correlations: list[float | None]) -> str:
    """Median over layers, of those that have a correlation."""
    values = known(correlations)
    return f"{median(values):.2f}" if values else "none"


def correlation(layer: Result, name: str, where: str, unit: bool) -> float | None:
    """
    Rank correlation over sequences of a norm with the root of the divergence over the step's size, mean over the draws
    of positions. None of the length of the gradient along a step of length one: divided by itself, it has no spread.
    """
    if name == "norm" and unit:
        return None
    norm = layer["norm"]
    draws = [norm] if name == "norm" else layer["fisher"][name]
    measured = [max(divergence, 0) ** 0.5 / size for divergence, size in zip(layer[where], layer["size"], strict=True)]
    if unit:
        draws = [[value / length for value, length in zip(draw, norm, strict=True)] for draw in draws]
        measured = [value / length for value, length in zip(measured, norm, strict=True)]
    values = known(spearman(draw, measured) for draw in draws)
    return fmean(values) if values else None


# Steps of measured length

LENGTHS = ["nats per token of a step", "steps shortened", "learning rate at the end"]


def courses(rows: Rows) -> list[str]:
    """Accuracy at each validation and at the end, divergence, and what the steps were like."""
    steps = sorted({v["step"] for results in rows.values() for r in results for v in r["validations"]})
    head = ["method, target or rate", "n", *(f"held back at {step}" for step in steps)]
    lines = table([*head, "test accuracy", "KL from the start", *LENGTHS])
    for label, results in rows.items():
        cells = [label, str(len(results))]
        for step in steps:
            at = [100 * v["accuracy"] for r in results for v in r["validations"] if v["step"] == step]
            cells.append(spread(at, "{:.1f} %"))
        cells += [spread([100 * accuracy(r) for r in results], "{:.1f} %"), spread(known(map(kl, results)), "{:.1f}")]
        lines.append(row([*cells, *step_cells(results)]))
    return lines


def step_cells(results: list[Result]) -> list[str]:
    """
    Of runs whose steps were measured: their divergence, mean over the steps of the second half; the share of steps
    that were shortened; and the learning rate, mean over the last ten steps.
    """
    lengths = [column(r, "step/kl") for r in results]
    shortened = [column(r, "step/kept") for r in results]
    # Runs of before 18 November 2026 have the schedule's rate under the other name
    with_target = [r for r in results if column(r, "step/kept")]
    rates = [(column(r, "step/learning_rate") or column(r, "learning_rate"))[-10:] for r in with_target]
    return [
        spread([fmean(values[len(values) // 2 :]) for values in lengths if values], "{:.2g}"),
        spread([100 * fmean(kept < 1 for kept in values) for values in shortened if values], "{:.0f} %"),
        spread([fmean(values) for values in rates if values], "{:.1e}"),
    ]


# Figures of one run


def but_generation(phases: dict[str, float]) -> float:
    return sum(phases.values()) - phases[GENERATION]


def shares_of_grpo(rounds: list[dict[str, dict[str, float]]], method: str) -> list[float]:
    """What a method takes without generation, over what GRPO takes, of each round that has both."""
    return [
        but_generation(entries[method]) / but_generation(entries["grpo"])
        for entries in rounds
        if {method, "grpo"} <= entries.keys()
    ]


def held_back(result: Result) -> float:
    return 100 * held_back_score(result)


def accuracy(result: Result) -> float:
    return result["test"]["accuracy"]


def kl(result: Result) -> float | None:
    """At the last validation."""
    return result["validations"][-1].get("kl") if result["validations"] else None


def column(result: Result, name: str) -> list[float]:
    return known(result["steps"].get(name, []))


def biggest(result: Result, name: str) -> float | None:
    return max(column(result, name), default=None)


def smallest(result: Result, name: str) -> float | None:
    return min(column(result, name), default=None)


def mean_of(result: Result, name: str) -> float | None:
    values = column(result, name)
    return sum(values) / len(values) if values else None


def clipped(result: Result) -> float | None:
    norms = column(result, "grad_norm")
    return sum(norm > 1 for norm in norms) / len(norms) if norms else None


def grouped(result: Result) -> bool:
    return bool(result["settings"].get("grouped"))


def task_and_model(result: Result) -> tuple[str, str]:
    """What the accuracy before training depends on."""
    return result["settings"]["task"], result["settings"]["model"]


def variant(result: Result) -> str:
    """A run's name without task, learning rate and seed."""
    return re.sub(r"(-task[^-]+)?(-lr[\d.]+e-?\d+)?(-seed\d+)?$", "", result["name"])


def said(name: str) -> str:
    """A variant's name in words."""
    method, *parts = name.split("-")
    for number, part in enumerate(parts):
        parts[number] = next(
            (re.sub(pattern, word, part) for pattern, word in SAID.items() if re.fullmatch(pattern, part)), part
        )
    return ", ".join([method.removesuffix("_kl"), *parts])


def labelled(result: Result, name: str) -> str:
    return f"{name}, {short_rate(result['settings']['learning_rate'])}"


def with_target(result: Result) -> str:
    """A run's variant in words, with its target; with its learning rate if it has none."""
    target = result["settings"].get("target_kl")
    if target is None:
        return labelled(result, said(variant(result)))
    times = result["settings"].get("auto_times", 1)
    length = short_rate(target) if target != "auto" else "auto" if times == 1 else f"{times:g} × auto"
    return f"{said(re.sub(r'-(target|times)[^-]+', '', variant(result)))}, target {length}"


def described_task(settings: dict[str, Any]) -> str:
    """A sentence."""
    if settings["kind"] == "code":
        return f"Functions in Python of difficulty {settings['difficulty']}, made from a grammar."
    config = f" with `{json.dumps(settings['task_config'])}`" if settings.get("task_config") else ""
    names = ", ".join(f"`{name}`" for name in settings["tasks"])
    return f"{names} of reasoning-gym{config}, `--answer {settings['answer']}`."


# Differences

DIFFERENCES = ["test accuracy, in points", "held back, in points", "KL"]


def compared(first: list[Result], second: list[Result]) -> list[str]:
    """By seed, with intervals: the `DIFFERENCES`."""
    cells = [difference_of_tests(first, second), difference(first, second, held_back, "{:+.1f}")]
    return [*cells, difference(first, second, kl, "{:+.1f}")]


def paired(first: list[Result], second: list[Result], same: str | None = None) -> list[list[tuple[Result, Result]]]:
    """Runs of the same seed, by seed: one pair each, or one for every value of the setting that they are to share."""

    def key(result: Result) -> tuple:
        return result["settings"]["seed"], same and result["settings"][same]

    others = {key(r): r for r in second}
    pairs = defaultdict(list)
    for result in first:
        if key(result) in others:
            pairs[result["settings"]["seed"]].append((result, others[key(result)]))
    return list(pairs.values())


def difference(
    first: list[Result],
    second: list[Result],
    measure: Callable[[Result], float | None],
    form: str,
    same: str | None = None,
) -> str:
    values = []
    for pairs in paired(first, second, same):
        measured = [(measure(a), measure(b)) for a, b in pairs]
        of_seed = [a - b for a, b in measured if a is not None and b is not None]
        values += [fmean(of_seed)] if of_seed else []
    return with_interval(values, bootstrap_interval(values), form)


def in_points(first: list[Result], second: list[Result], same: str | None = None) -> Estimate:
    """Difference in test accuracy, with an interval over seeds and problems; of few seeds, over problems alone."""
    seeds = paired(first, second, same)
    values = [100 * fmean(accuracy(a) - accuracy(b) for a, b in pairs) for pairs in seeds]
    if not values:
        return Estimate(values, None)
    each = [mean_by_problem(pairs) for pairs in seeds]
    interval = crossed_interval(each)
    if interval is not None:
        return Estimate(values, interval)
    of_problems = [sum(column) / len(column) for column in zip(*each, strict=True)]
    return Estimate(values, interval_over_problems(of_problems), of_problems=True)


def difference_of_tests(first: list[Result], second: list[Result], same: str | None = None) -> str:
    values, interval, of_problems = in_points(first, second, same)
    return with_interval(values, interval, "{:+.1f}") + (", problems alone" if of_problems else "")


def mean_by_problem(pairs: list[tuple[Result, Result]]) -> list[float]:
    """In points: by how much more often each problem was answered in the first runs of the pairs."""
    answers = [[bits(r["test"]["right"], r["test"]["count"]) for r in pair] for pair in pairs]
    by_pair = [[100 * (x - y) for x, y in zip(first, second, strict=True)] for first, second in answers]
    return [fmean(problem) for problem in zip(*by_pair, strict=True)]


def with_interval(values: list[float], interval: tuple[float, float] | None, form: str) -> str:
    if not values:
        return "no seed in common"
    text = signed(sum(values) / len(values), form)
    if interval is not None:
        text += " [" + ", ".join(signed(end, form) for end in interval) + "]"
    return f"{text}, n = {len(values)}"


# Text


def signed(value: float, form: str) -> str:
    """Without a sign of its own for what rounds to zero."""
    text = form.format(value)
    return text if float(text) else text.replace("-", "+")


def spread(values: list[float], form: str) -> str:
    """Median and range."""
    if not values:
        return ""
    middle = form.format(median(values))
    if len(values) == 1:
        return middle
    return f"{middle} ({form.format(min(values))} to {form.format(max(values))})"


def percent(share: float) -> str:
    return f"{100 * share:.1f} %"


def known(values: Iterable[Any]) -> list[float]:
    return [value for value in values if value is not None]


def unique(values: Iterable[str]) -> list[str]:
    return list(dict.fromkeys(values))


def counted(values: Iterable[Any]) -> list[tuple[Any, int]]:
    values = list(values)
    return [(value, values.count(value)) for value in dict.fromkeys(values)]


def described_versions(results: list[Result]) -> str:
    """Versions and dates, as ranges where runs differ."""
    dates = sorted({r["date"] for r in results})
    parts = []
    for package in ("torch", "transformers", "trl", "vllm"):
        versions = sorted({r["versions"][package] for r in results if package in r["versions"]})
        if versions:
            parts.append(f"{package} {' and '.join(versions)}")
    return f"{', '.join(parts)}; {dates[0]}" + (f" to {dates[-1]}" if len(dates) > 1 else "") + "."


def row(cells: list[str]) -> str:
    return "| " + " | ".join(cells) + " |"


def table(head: list[str]) -> list[str]:
    return [row(head), "|" + "---|" * len(head)]
