"""The matrix of runs of `learning.py`: which there are, which come next, and which learning rate was the best."""

import itertools
import json
import re
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from decimal import Decimal
from pathlib import Path
from statistics import median
from typing import Any

import yaml


BEST = "best"
Results = dict[str, dict[str, Any]]  # by a run's name
# How settings other than method, rate and seed stand in a run's name
SHORT = {
    "regularization": "lambda",
    "steps_per_generation": "stale",
    "microbatch": "microbatch",
    "token_weights": "weights",
    "epsilon": "clip",
    "optimizer": "optimizer",
    "lora": "lora",
    "grouped": "grouped",
    "task": "task",
    "target_kl": "target",
    "step_kl_share": "share",
    "fisher_scope": "scope",
    "skip_zero_advantage": "skip",
    "model": "model",
    "steps": "steps",
    "momentum": "momentum",
    "spring_decay": "mu",
    "weights": "weights",
    "bf16_updates": "updates",
    "auto_times": "times",
    "resume_at": "resumed",
    "completions": "completions",
}
# Settings that have no place there, beside the rate and the seed, which stand at its end
UNNAMED = ("learning_rate", "seed", "validate_at")
# Settings that decide how long a run takes, and how much of the GPU
OF_SECONDS = ("task", "model", "microbatch", "steps_per_generation")
OF_MEMORY = (*OF_SECONDS, "completions", "method", "optimizer", "momentum", "weights", "bf16_updates", "lora")
# GiB of the GPU that a process holds beside PyTorch's memory: its context, with the libraries' kernels
CONTEXT = 1.6


@dataclass(frozen=True)
class Run:
    """One run: its name, from what sets it apart, and every setting it is made with."""

    name: str
    group: str
    method: str
    settings: dict[str, Any]


@dataclass(frozen=True)
class Entry:
    """A run as the matrix asks for it: its learning rate may still be `"best"`, that of group `rates_of`."""

    group: str
    method: str
    given: dict[str, Any]
    rates_of: str


class Matrix:
    """The file, read: `entries` in order, and the settings they stand for."""

    def __init__(self, content: dict[str, Any], smoke: bool = False):
        self.content = content
        self.smoke = content.get("smoke", {}) if smoke else {}
        self.entries = list(self._expanded())
        self.groups = {group["group"]: group.get("answers", "") for group in content["groups"]}

    @classmethod
    def read(cls, path: str | Path, smoke: bool = False) -> "Matrix":
        with open(path) as file:
            return cls(yaml.safe_load(file), smoke)

    def _expanded(self) -> Iterator[Entry]:
        names = [group["group"] for group in self.content["groups"]]
        for group in self.content["groups"]:
            over = group["over"]
            rates_of = group.get("rates_of", "rates")
            for values in itertools.product(*over.values()):
                given = {**group.get("with", {}), **dict(zip(over, values, strict=True))}
                method = given.pop("method", None)
                if method not in self.content["methods"]:
                    raise ValueError(
                        f"Group {group['group']!r} asks for method {method!r}: expected is one of "
                        f"{', '.join(self.content['methods'])}."
                    )
                if given.get("learning_rate") == BEST and rates_of not in names:
                    raise ValueError(f"Group {group['group']!r} takes rates of {rates_of!r}, which is not a group.")
                yield Entry(group["group"], method, given, rates_of)

    def run(self, entry: Entry, learning_rate: float | None = None) -> Run:
        """The run of an entry, once its learning rate is known."""
        given = dict(entry.given)
        if learning_rate is not None:
            given["learning_rate"] = float(learning_rate)
        settings = (
            self.content["defaults"] | self.content["tasks"][given.get("task", self.content["defaults"]["task"])]
        )
        settings = settings | self.content["methods"][entry.method] | given
        name = run_name(entry.method, given)
        smaller = dict(self.smoke)
        if settings["steps"] == 0:
            smaller |= {"steps": 0, "validate_at": []}
        if self.smoke and "resume_at" in settings:
            smaller["resume_at"] = self.smoke["steps"] // 2
        return Run(name, entry.group, entry.method, settings | {"method": entry.method} | smaller)

    def runs(self, finished: Results, groups: list[str] | None = None) -> Iterator[Run | Entry]:
        """Each run once, in order; entries whose rate cannot be known yet as they are."""
        seen = set()
        for entry in self.entries:
            if groups and entry.group not in groups:
                continue
            rate = entry.given.get("learning_rate")
            if rate == BEST:
                rate = self.best_rate(entry, finished)
                if rate is None:
                    yield entry
                    continue
            run = self.run(entry, rate)
            if run.name not in seen:
                seen.add(run.name)
                yield run

    def best_rate(self, entry: Entry, finished: Results) -> float | None:
        """
        Rate at which the method did best on held-back problems of its task; None until its part of the grid is
        finished.
        """
        task = entry.given.get("task")
        if not self.grid(entry.method, [entry.rates_of], task):
            raise ValueError(f"Group {entry.rates_of!r} has no rates of method {entry.method!r} to choose from.")
        return self.best_of(entry.method, [entry.rates_of], finished, task)

    def grid(self, method: str, groups: Collection[str], task: str | None = None) -> list[Run]:
        """A method's runs with a rate that is given, in these groups, of this task or else of the usual one."""
        entries = [e for e in self.entries if (e.method, e.given.get("task")) == (method, task) and e.group in groups]
        return [self.run(e, e.given["learning_rate"]) for e in entries if e.given["learning_rate"] != BEST]

    def best_of(
        self, method: str, groups: Collection[str], finished: Results, task: str | None = None
    ) -> float | None:
        """The rate of these groups at which the method did best; None until all its runs there are finished."""
        grid = self.grid(method, groups, task)
        if not grid or any(run.name not in finished for run in grid):
            return None
        # Of equals the lower rate, which goes less far from the start
        return max(
            (held_back_score(finished[run.name]), -run.settings["learning_rate"], run.settings["learning_rate"])
            for run in grid
        )[2]

    def expected_seconds(self, run: Run, finished: Results, parallel: int, shared: bool = False) -> float:
        """
        Seconds from the start of a run's process to its end: by runs like it, else as the matrix says. Steps of fewer
        at a time take less in proportion, but not less than those of one alone.
        """
        of_model = self.content.get("models", {}).get(run.settings.get("model"), {})
        expected = self.content["expected"] | of_model.get("expected", {})
        share = expected["step"] + expected["microbatch"] * run.settings["completions"] / run.settings["microbatch"]
        start, step = expected["start"], max(expected["alone"], share * parallel)
        if like := self._like(run, finished, parallel, shared):
            start = median(result["seconds"]["total"] - result["seconds"]["train"] for result in like)
            step = median(result["seconds"]["train"] / result["settings"]["steps"] for result in like)
            if (number := like[0]["hardware"]["parallel"]) > parallel:
                step = max(min(expected["alone"], step), step * parallel / number)
        return start + step * run.settings["steps"]

    def expected_end(self, run: Run, finished: Results, parallel: int, shared: bool = False) -> float:
        """Seconds from a run's last step to its end."""
        if like := self._like(run, finished, parallel, shared):
            return median(
                result["seconds"]["validation"] / len(result["validations"]) + result["seconds"]["test"]
                for result in like
            )
        return self.content["expected"]["end"]

    def expected_gib(self, run: Run, finished: Results, otherwise: float) -> float:
        """GPU memory that a run may come to take: as much as any run like it came to; `otherwise` without any."""
        # Second attempts used to let vLLM take what it found free
        like = [result for result in made_like(run, finished, OF_MEMORY) if result.get("attempt", 1) == 1]
        return max((peak + CONTEXT for result in like if (peak := result["hardware"]["peak_gib"])), default=otherwise)

    def model_in(self, folder: str | Path) -> str:
        """Name of the model whose weights a folder has, by its config.json."""
        config = json.loads((Path(folder) / "config.json").read_text())
        known = self.content["models"]
        for name, model in known.items():
            if all(config.get(key) == value for key, value in model["config"].items()):
                return name
        has = {key: config.get(key) for model in known.values() for key in model["config"]}
        said = "; ".join(f"{name} ({model['config']})" for name, model in known.items())
        raise ValueError(f"The model in {folder} has {has}, which is none of the matrix: expected is one of {said}.")

    def _like(self, run: Run, finished: Results, parallel: int, shared: bool) -> list[dict[str, Any]]:
        """Runs that shared the machine in the same way: as many at a time, or the next larger number that there is."""
        like = [
            result
            for result in made_like(run, finished, OF_SECONDS)
            if result["settings"]["steps"] > 0
            and result["hardware"]["parallel"] >= parallel
            and result["hardware"].get("shared_kernels", False) == shared
        ]
        number = min((result["hardware"]["parallel"] for result in like), default=parallel)
        return [result for result in like if result["hardware"]["parallel"] == number]


def made_like(run: Run, finished: Results, names: Collection[str]) -> list[dict[str, Any]]:
    """Finished runs whose settings of these names are the same."""
    own = {name: run.settings.get(name) for name in names}
    return [made for made in finished.values() if own == {name: made.get("settings", {}).get(name) for name in names}]


def run_name(method: str, given: dict[str, Any]) -> str:
    """File name of a run: method, what is not as usual, learning rate, seed."""
    parts = [method]
    for key, value in sorted(given.items()):
        if key not in UNNAMED:
            if key not in SHORT:
                raise ValueError(f"{key!r} has no place in a run's name: expected is one of {', '.join(SHORT)}.")
            # Parts are told apart by their hyphens
            said = value.replace("-", "_") if isinstance(value, str) else value
            parts.append(re.sub("False|None", "no", f"{SHORT[key]}{said}").replace("True", ""))
    if "learning_rate" in given:
        parts.append(f"lr{short_rate(given['learning_rate'])}")
    if "seed" in given:
        parts.append(f"seed{given['seed']}")
    return "-".join(parts)


def short_rate(rate: float) -> str:
    """As `2e-6`, with all its digits."""
    return f"{Decimal(repr(float(rate))).normalize():e}"


def held_back_score(result: dict[str, Any]) -> float:
    """What rates are chosen by: accuracy on held-back problems, mean of the last two validations."""
    last = result["validations"][-2:]
    return sum(validation["accuracy"] for validation in last) / len(last)


def read_results(folder: str | Path) -> Results:
    """Finished runs by name."""
    return {path.stem: json.loads(path.read_text()) for path in sorted(Path(folder).glob("*.json"))}
