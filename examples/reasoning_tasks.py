"""
Train a language model on tasks of the package reasoning-gym, which makes their problems and scores the answers, and
see what came of it. The package has a hundred tasks, from arithmetic to puzzles: `pip install reasoning-gym`.

Without arguments a 135M model learns three small tasks, in minutes on a CPU:

    python examples/reasoning_tasks.py

Tasks of one's own choice, as hard as their settings make them, mixed in equal shares; with a larger model, on one GPU:

    python examples/reasoning_tasks.py --tasks gcd --task_config '{"max_value": 30}'
    python examples/reasoning_tasks.py --model_name_or_path Qwen/Qwen3-0.6B --tasks leg_counting number_sequence \
        --task_config '{"leg_counting": {"max_animals": 4}}' --use_vllm --vllm_mode colocate

Problems are the same for the same `--task_seed`, and no question that is validated with is trained on. `--answer` says
where the answer stands in a completion: it names one of the functions in `ANSWERS` below. Arguments are those of
`ISOPOConfig`, of TRL's `ModelConfig` and the ones below, as in `gsm8k.py`, on the command line or in a YAML file
(`--config`).
"""

import json
import math
import os
import re
import sys
from collections.abc import Callable, Iterable, Iterator
from dataclasses import MISSING, dataclass, field, fields
from difflib import get_close_matches
from itertools import islice, zip_longest
from typing import Any

import embedded
from command_line import Parser
from datasets import Dataset
from example_run import (
    DEFAULTS,
    EMBEDDED,
    REFUSALS,
    RunArguments,
    begin,
    build,
    carry_out,
    check,
    check_prompt,
    completed,
    follow,
    load_model,
    one_voice,
    parsed,
    rank,
    refuse,
    say,
)
from example_run import SMALL as SMALL_MODEL
from tqdm.auto import tqdm
from trl import GRPOConfig, ModelConfig

from isopo_trl import ISOPOConfig
from isopo_trl.gsm8k import as_prompts
from isopo_trl.validation import ValidationCallback


SCRIPT = "reasoning_tasks.py"

# Where no tasks are given: some that a small model has room to learn, and how hard they are
TASKS = {
    "chain_sum": {"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 1},
    "gcd": {"min_numbers": 2, "max_numbers": 2, "min_value": 2, "max_value": 12},
    "lcm": {"min_numbers": 2, "max_numbers": 2, "min_value": 2, "max_value": 9},
}
# With the embedded model: minutes on two cores
SMALL = {
    **SMALL_MODEL,
    "answer": "last_number",
    "max_completion_length": 16,  # "The GCD of 9 and 6 is 3." is 13
    "max_steps": 12,
    "validation_steps": 6,
    "validation_size": 30,
    "kl_size": 12,
}
# So many instances in a row that were seen before are taken for the end of what a task has
IN_VAIN = 200
# What reasoning-gym may raise where it does not take a size or a setting
NOT_TAKEN = (AssertionError, ValueError, TypeError, KeyError, AttributeError)


# Where an answer stands: text of a completion -> answer, None where there is none. Add one of your own


def tags(text: str) -> str | None:
    """What stands in the last <answer> ... </answer>."""
    return reasoning_gym().utils.extract_answer(text)


def lines(text: str) -> list[str]:
    return [line.strip() for line in text.splitlines() if line.strip()]


def first_line(text: str) -> str | None:
    return lines(text)[0] if lines(text) else None


def last_line(text: str) -> str | None:
    return lines(text)[-1] if lines(text) else None


def last_number(text: str) -> str | None:
    """For a small model, which puts a number into a sentence."""
    numbers = re.findall(r"-?\d+(?:\.\d+)?", text)
    return numbers[-1] if numbers else None


def whole_text(text: str) -> str | None:
    return text.strip() or None


ANSWERS: dict[str, Callable[[str], str | None]] = {
    "tags": tags,
    "first_line": first_line,
    "last_line": last_line,
    "last_number": last_number,
    "whole_text": whole_text,
}
# What the model is told of it, unless --instruction says otherwise
INSTRUCTIONS = {
    "tags": "Think step by step, then give the answer alone between <answer> and </answer>.",
    "first_line": "Give the answer alone, on the first line.",
    "last_line": "Think step by step, then give the answer alone, on the last line.",
    "last_number": "Give the answer, a number, at the end.",
    "whole_text": "Give the answer alone.",
}


@dataclass
class TaskArguments(RunArguments):
    """
    Arguments of this script, beside those of every run ([`RunArguments`]).

    Args:
        tasks (`list[str]`, *optional*): tasks of reasoning-gym, mixed in equal shares. Defaults to three small ones.
        task_config (`dict`, *optional*): settings of the tasks, as JSON: `{"max_value": 30}`, or with several tasks
            `{"gcd": {"max_value": 30}}`. What is not set is reasoning-gym's default.
        task_seed (`int`): seed of the problems.
        train_size (`int`): problems to train on, fewer where tasks do not have so many.
        answer (`str`): where the answer stands in a completion: `"tags"`, `"first_line"`, `"last_line"`,
            `"last_number"` or `"whole_text"`.
    """

    tasks: list[str] | None = field(
        default=None, metadata={"help": "Names of tasks of reasoning-gym, mixed in equal shares."}
    )
    task_config: dict | str | None = field(
        default=None,
        metadata={"help": "Settings of the tasks as JSON: '{\"max_value\": 30}', or by task where there are several."},
    )
    task_seed: int = field(default=0, metadata={"help": "Seed of the problems."})
    train_size: int = field(default=2000, metadata={"help": "Problems to train on, where tasks have so many."})
    answer: str = field(
        default="tags", metadata={"help": f"Where the answer stands in a completion: {', '.join(ANSWERS)}."}
    )

    def __post_init__(self):
        super().__post_init__()
        if self.answer not in ANSWERS:
            raise ValueError(f"--answer {self.answer} is unknown: choose one of {', '.join(ANSWERS)}.")
        if self.train_size < 1:
            raise ValueError(f"--train_size {self.train_size} must be at least 1.")
        self.task_config = settings_by_task(self.tasks, self.task_config)


# The tasks


def reasoning_gym():
    """The package, which may not be installed."""
    try:
        import reasoning_gym
        import reasoning_gym.utils
    except ImportError as error:
        raise ImportError(f"{SCRIPT} needs the package reasoning-gym: pip install reasoning-gym ({error})") from error
    return reasoning_gym


def known_tasks() -> dict[str, tuple[type, type]]:
    """Class and settings of every task by name, but for the one that mixes others."""
    tasks = dict(reasoning_gym().factory.DATASETS)
    tasks.pop("composite", None)
    return tasks


def suggestion(name: str, known: Iterable[str]) -> str:
    """Near names, as a remark after a name that is not known."""
    close = get_close_matches(name, list(known))
    return f" (did you mean {' or '.join(close)}?)" if close else ""


def settings_by_task(tasks: list[str], given: dict | str | None) -> dict[str, dict[str, Any]]:
    """The settings of every task, from `--task_config` in any of its forms."""
    known = known_tasks()
    if not tasks:
        raise ValueError("--tasks is empty: give it names of tasks of reasoning-gym, or leave it out.")
    for task in tasks:
        if task not in known:
            listed = suggestion(task, known) or f": choose among {', '.join(sorted(known))}"
            raise ValueError(f"--tasks {task}: reasoning-gym has no such task{listed}.")
    if len(set(tasks)) < len(tasks):
        raise ValueError(f"--tasks {' '.join(tasks)}: a task is there twice.")
    example = f"'{{\"{tasks[0]}\": {{...}}}}'"
    if isinstance(given, str):
        try:
            given = json.loads(given)
        except ValueError as error:
            raise ValueError(f"--task_config {given} is not valid JSON ({error}): write it as {example}.") from error
    if not isinstance(given, dict | None):
        raise ValueError(f"--task_config {json.dumps(given)} is not a JSON object such as {example}.")
    given = given or {}
    by_name = all(isinstance(settings, dict) for settings in given.values())
    if len(tasks) == 1 and not (by_name and set(given) <= set(tasks)):
        return {tasks[0]: given}
    for task, settings in given.items():
        if task not in tasks:
            raise ValueError(
                f"--task_config is for {task!r}, which is none of the tasks{suggestion(task, tasks)}: with several "
                f"tasks, settings stand under the task's name, as {example}. These are {', '.join(tasks)}."
            )
        if not isinstance(settings, dict):
            raise ValueError(f"--task_config has {settings!r} for {task}, not an object of its settings.")
    return {task: given.get(task, {}) for task in tasks}


def make_task(task: str, settings: dict[str, Any], seed: int, needed: int = 2500):
    """
    The task with these settings: its instances by number, and their scores. Some tasks make a table of all their
    instances, so that there are not many more than are `needed`: enough to find so many different ones.
    """
    known = {
        setting.name: setting for setting in fields(known_tasks()[task][1]) if setting.name not in ("seed", "size")
    }

    def shown(setting) -> str:
        if setting.default is MISSING:
            return setting.name
        return f"{setting.name}={setting.default!r}"

    listed = f"its settings are {', '.join(map(shown, known.values()))}."
    for name in settings:
        if name not in known:
            raise ValueError(f"--task_config: {task} has no setting {name!r}{suggestion(name, known)}: {listed}")

    def made(size: int):
        return reasoning_gym().create_dataset(task, seed=seed, size=size, **settings)

    for size in (max(10_000, 4 * needed), needed):
        try:
            return made(size)
        except NOT_TAKEN as error:
            refused = error
    try:
        made(10)
    except NOT_TAKEN as error:
        reason = str(error) or "a value is out of its range"
        raise ValueError(f"--task_config: {task} does not take {json.dumps(settings)}: {reason}; {listed}") from error
    raise ValueError(
        f"{task} does not make {needed} problems ({refused}): choose a smaller --train_size or --validation_size."
    ) from refused


def different_instances(problems: Any, task: str) -> Iterator[dict[str, Any]]:
    """Instances of a task, none with the question of another, until no new ones are found."""
    seen, in_vain = set(), 0
    for number in range(len(problems)):
        try:
            instance = problems[number]
        except Exception as error:  # of many kinds: settings that only together are impossible
            raise ValueError(
                f"{task} makes no problem number {number} with these settings ({type(error).__name__}: {error}): "
                "change --task_config."
            ) from error
        question = instance["question"].strip()
        in_vain = in_vain + 1 if question in seen else 0
        if in_vain == IN_VAIN:
            return
        if not in_vain:
            seen.add(question)
            yield instance


def draw(problems: Any, task: str, train: int, held_out: int) -> tuple[list[dict], list[dict]]:
    """Instances to train on and to validate with; of a task that has few, a fifth is to validate with."""
    found = []
    with tqdm(total=train + held_out, desc=task, unit="problem", leave=False, disable=rank() > 0) as bar:
        for instance in islice(different_instances(problems, task), train + held_out):
            found.append(instance)
            bar.update()
    if len(found) < 2:
        raise ValueError(
            f"{task} has {len(found)} different problems with these settings: at least 2 are needed, to train and to "
            "validate. Change --task_config."
        )
    if len(found) < train + held_out:
        held_out = min(held_out, max(1, len(found) // 5))
    return found[held_out:], found[:held_out]


class Problems:
    """
    Problems of several tasks, and the scores of answers to them.

    Args:
        tasks (`dict[str, dict]`): settings of each task.
        seed (`int`): of all problems.
        train, held_out (`int`): number of problems to train on and to validate with, of all tasks together.
    """

    def __init__(self, tasks: dict[str, dict[str, Any]], seed: int, train: int, held_out: int):
        shares = [-(-size // len(tasks)) for size in (train, max(1, held_out))]
        self.tasks = {task: make_task(task, settings, seed, sum(shares)) for task, settings in tasks.items()}
        self.instances: list[dict[str, Any]] = []
        self.failed: set[str] = set()  # tasks of which a score could not be computed
        drawn = {task: draw(problems, task, *shares) for task, problems in self.tasks.items()}
        self.counts = {task: tuple(map(len, both)) for task, both in drawn.items()}
        for to_train, _ in drawn.values():  # tasks with few instances have them several times
            to_train += [to_train[number % len(to_train)] for number in range(len(to_train), shares[0])]
        self.train, self.held_out = (
            self._in_turn({task: both[which] for task, both in drawn.items()}) for which in (0, 1)
        )

    def _in_turn(self, instances: dict[str, list[dict]]) -> Dataset:
        """One of each task, then the next of each; `instance` is a number in `self.instances`."""
        rows = []
        for group in zip_longest(*instances.values()):
            for task, instance in zip(instances, group, strict=True):
                if instance is not None:
                    rows.append(
                        {"question": instance["question"].strip(), "task": task, "instance": len(self.instances)}
                    )
                    self.instances.append(instance)
        return Dataset.from_list(rows)

    def score(self, answer: str | None, task: str, instance: int) -> float:
        """reasoning-gym's own score of an answer, between 0 and 1: 0 where its scorer cannot read the answer."""
        try:
            score = self.tasks[task].score_answer(answer, self.instances[instance])
        except Exception as error:  # of many kinds: scorers differ in what they expect of an answer
            if task not in self.failed:
                say(f"The score of {answer!r} in {task} fails ({type(error).__name__}: {error}), and counts as 0.")
            self.failed.add(task)
            return 0.0
        if isinstance(score, bool | int | float) and 0 <= score <= 1:
            return float(score)
        raise ValueError(
            f"reasoning-gym scores {answer!r} in {task} with {score!r}: a number from 0 to 1 is expected."
        )


def scores(problems: Problems, answer: Callable[[str], str | None]):
    """The reward: reasoning-gym's score of the answer in a completion. The mean of each task is logged as well."""

    def task_score(completions, task, instance, log_metric=None, **kwargs) -> list[float]:
        texts = [text if isinstance(text, str) else text[-1]["content"] for text in completions]
        found = [problems.score(answer(text), *where) for text, *where in zip(texts, task, instance, strict=True)]
        for name in problems.tasks if log_metric and len(problems.tasks) > 1 else ():
            of_task = [score for score, other in zip(found, task, strict=True) if other == name]
            if of_task:
                log_metric(f"score/{name}", math.fsum(of_task) / len(of_task))
        return found

    return task_score


# The run


def read_arguments(arguments: list[str]) -> tuple[TaskArguments, GRPOConfig, ModelConfig]:
    """All arguments, after saying which model and tasks they mean."""
    parser = Parser((TaskArguments, ISOPOConfig, ModelConfig), may_be_empty=("instruction",), **DEFAULTS)
    given = parser.given(arguments)
    check(given)
    if "tasks" not in given:
        if "task_config" in given:
            raise ValueError("--task_config without --tasks: name the tasks that have these settings.")
        given |= {"tasks": list(TASKS), "task_config": TASKS}
    model = given.get("model_name_or_path", EMBEDDED)
    small = None
    if model == EMBEDDED:
        small = SMALL if "answer" in given else {**SMALL, "instruction": ""}  # a shorter prompt is a shorter wait
    settings = completed(given, "reasoning_tasks", small)
    parsed_arguments = parsed(TaskArguments, {**settings, "model_name_or_path": model})
    say(f"Model {embedded.MODEL if model == EMBEDDED else model}, tasks {', '.join(given['tasks'])} of reasoning-gym.")
    return parsed_arguments


def load(script_args: TaskArguments, args: GRPOConfig, model_args: ModelConfig):
    """The problems, prompts to train on and to validate with, and the tokenizer."""
    if args.world_size > 1 and os.environ.get("PYTHONHASHSEED", "random") == "random":
        raise ValueError(
            "Several processes need the same problems, and some tasks make them in an order that Python draws anew in "
            "each process: start the run with the environment variable PYTHONHASHSEED=0."
        )
    sizes = (script_args.train_size, script_args.validation_size)
    problems = Problems(script_args.task_config, script_args.task_seed, *sizes)
    for task, (train, held_out) in problems.counts.items():
        say(f"{task}: {train} problems to train on, and {held_out} others to validate with.")
    tokenizer = load_model(args, model_args, chat=not script_args.plain_text)
    instruction, template = script_args.instruction, script_args.user_template
    if instruction is None and template is None:
        instruction = INSTRUCTIONS[script_args.answer]
    if template is None and script_args.plain_text:
        template = "Question: {question}\nAnswer:"
    prompts = [
        as_prompts(rows, instruction, not script_args.plain_text, template)
        for rows in (problems.train, problems.held_out)
    ]
    check_prompt(prompts[0][0]["prompt"], tokenizer, args)
    return problems, *prompts, tokenizer


def report_by_task(problems: Problems, held_out: Dataset, validation: ValidationCallback, answer) -> None:
    """The validation's first and last scores of each task, and how many answers have all of it."""
    steps = [int(entry["step"]) for entry in (validation.history[0], validation.history[-1])]
    say("\nScores before and after, and how many are 1, of problems that were not trained on:")
    width = max(map(len, problems.tasks))
    for name in problems.tasks:
        figures = []
        for step in steps:
            rows = zip(held_out, validation.completions[step], strict=False)
            found = [problems.score(answer(text), name, row["instance"]) for row, text in rows if row["task"] == name]
            figures.append((math.fsum(found) / len(found), found.count(1.0), len(found)))
        (before, full_before, _), (after, full_after, size) = figures
        say(f"  {name:{width}}  {before:.2f} -> {after:.2f}   {full_before} -> {full_after} of {size}")


def main(arguments: list[str]) -> int:
    try:
        one_voice()
        script_args, args, model_args = read_arguments(arguments)
        resume = begin(args, model_args)
        problems, train, held_out, tokenizer = load(script_args, args, model_args)
        answer = ANSWERS[script_args.answer]
        reward = scores(problems, answer)
        trainer = build(script_args, args, model_args, train, tokenizer, [reward], [1.0])
        trainer.card_prompt = held_out[0]["prompt"]
        progress, validation = follow(trainer, script_args, held_out, reward, "score")
    except REFUSALS as error:
        return refuse(SCRIPT, str(error), error)
    elsewhere = "choose another --answer or change --instruction"
    code = carry_out(SCRIPT, trainer, progress, validation, resume, elsewhere=elsewhere)
    if code == 0 and validation is not None and args.world_size == 1:  # each rank knows its own completions
        report_by_task(problems, held_out, validation, answer)
    return code


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
