"""GSM8K and files in its format: loaded, checked row by row, and turned into prompts."""

import json
import os
from typing import Any

from datasets import Dataset, load_dataset

from .answers import extract_answer


INSTRUCTION = "Solve the problem step by step, then give the answer on a line of its own, as: #### <number>"
COLUMNS = ("question", "answer")
HELD_OUT = 0.1  # rows of a single file that are kept for validation


def load_gsm8k(
    source: str = "openai/gsm8k", config: str | None = None, train: str = "train", test: str = "test"
) -> tuple[Dataset, Dataset]:
    """
    Problems to train on and problems to validate with, in the columns `question` and `answer`.

    Every answer is checked to have a number ([`~gsm8k.extract_answer`]): a row without one is an error that names
    it, since it would be scored as wrong whatever the completion.

    Args:
        source (`str`): a data set on the Hub; a folder with `train.jsonl` and `test.jsonl`; or one file of JSON lines,
            the last tenth of which is used to validate.
        config (`str`, *optional*): configuration of a data set on the Hub; `"main"` for GSM8K itself.
        train, test (`str`): names of the splits, and of the files in a folder.
    """
    if os.path.isdir(source):
        files = [os.path.join(source, f"{split}.jsonl") for split in (train, test)]
        for file in files:
            if not os.path.exists(file):
                raise ValueError(f"{file} does not exist: a folder of problems needs {train}.jsonl and {test}.jsonl.")
        return read_problems(files[0]), read_problems(files[1])
    if os.path.exists(source) or source.endswith((".jsonl", ".json")):
        problems = read_problems(source)
        if len(problems) < 2:
            raise ValueError(
                f"{source} has {len(problems)} problems: at least 2 are needed, to train and to validate."
            )
        first = len(problems) - max(1, int(HELD_OUT * len(problems)))
        return problems.select(range(first)), problems.select(range(first, len(problems)))
    if config is None and source == "openai/gsm8k":
        config = "main"
    try:
        first, second = (load_dataset(source, config, split=split) for split in (train, test))
    except Exception as error:  # the Hub's client raises many kinds
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise ValueError(
            f"The data set {source!r} is neither a file nor could it be loaded from the Hub: {reason}"
        ) from error
    return verified(first, f"{source}, {train}"), verified(second, f"{source}, {test}")


def read_problems(path: str) -> Dataset:
    """Problems from a file of JSON lines; a broken line is an error that names it."""
    rows = []
    try:
        with open(path, encoding="utf-8-sig") as file:  # a mark of the byte order may stand at the beginning
            for number, line in enumerate(file, start=1):
                if line.strip():
                    rows.append(_parsed(line, f"{path}, line {number}"))
    except OSError as error:
        raise ValueError(f"{path} cannot be read: {error.strerror}.") from error
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} is not a text in UTF-8: it should hold one JSON object per line.") from error
    if not rows:
        raise ValueError(f"{path} is empty: it should hold one JSON object per line, with {' and '.join(COLUMNS)}.")
    return Dataset.from_list(rows)


def _parsed(line: str, where: str) -> dict[str, str]:
    try:
        row = json.loads(line, object_pairs_hook=_no_name_twice)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{where} is not valid JSON ({error}): every line should be one JSON object.") from error
    if not isinstance(row, dict):
        raise ValueError(f"{where} is not a JSON object: it should be one with {' and '.join(COLUMNS)}.")
    _verify(row, where)
    return {name: str(row[name]) for name in COLUMNS}


def _no_name_twice(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    row = dict(pairs)
    if len(row) < len(pairs):
        raise ValueError("a name is there twice: " + ", ".join(name for name, _ in pairs))
    return row


def verified(dataset: Dataset, name: str) -> Dataset:
    """`dataset` with the two columns alone, once every row has been found to have a question and a number."""
    missing = [column for column in COLUMNS if column not in dataset.column_names]
    if missing:
        raise ValueError(
            f"{name} has no column {missing[0]!r}, only {', '.join(dataset.column_names)}: GSM8K's columns are "
            f"{' and '.join(COLUMNS)}."
        )
    for number, row in enumerate(dataset):
        _verify(row, f"{name}, row {number}")
    return dataset.select_columns(list(COLUMNS))


def _verify(row: dict[str, Any], where: str) -> None:
    for column in COLUMNS:
        if row.get(column) is None or str(row[column]).strip() == "":
            given = ", ".join(row) or "nothing"
            raise ValueError(f"{where} has no {column!r} (it has {given}): every row needs {' and '.join(COLUMNS)}.")
    if not isinstance(row["question"], str) or not isinstance(row["answer"], str | int | float):
        raise ValueError(
            f"{where} has the question {row['question']!r} and the answer {row['answer']!r}: the first should be a "
            "text, the second a text or a number."
        )
    try:
        row["question"].encode()
    except UnicodeEncodeError as error:
        raise ValueError(f"{where} has a question with half of a character: {row['question']!r}.") from error
    if extract_answer(str(row["answer"])) is None:
        raise ValueError(
            f"{where} has an answer without a number: {str(row['answer'])[-80:]!r}. It should be a solution "
            "that ends in `#### <number>`, or a number."
        )


def as_prompts(
    problems: Dataset, instruction: str | None = INSTRUCTION, chat: bool = True, template: str | None = None
) -> Dataset:
    """
    Columns `prompt` and `answer`, as TRL and [`~gsm8k.gsm8k_reward`] take them.

    Args:
        problems (`Dataset`): with `question` and `answer`.
        instruction (`str`, *optional*): put before the question, as the system's message or, without a chat, as text.
            An empty one takes the place of the system message that some chat templates have of their own; with `None`
            there is no such message.
        chat (`bool`): whether prompts are conversations, for a model with a chat template, or plain text.
        template (`str`, *optional*): the user's message, with `{question}` where the question goes. Defaults to the
            question alone, and to `"Problem: {question}\\nSolution:"` without a chat.
    """
    if template is None:
        template = "{question}" if chat else "Problem: {question}\nSolution:"
    if "{question}" not in template:
        raise ValueError(
            f"The template {template!r} has no place for the question: write {{question}} where it should go."
        )

    def prompt(row: dict[str, str]) -> dict[str, Any]:
        text = template.replace("{question}", row["question"])  # other braces, as in \boxed{}, stay as they are
        if not chat:
            return {"prompt": text if instruction is None else f"{instruction}\n\n{text}".lstrip()}
        messages = [{"role": "user", "content": text}]
        if instruction is not None:
            messages.insert(0, {"role": "system", "content": instruction})
        return {"prompt": messages}

    return problems.map(prompt, remove_columns=["question"])
