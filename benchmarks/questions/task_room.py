"""
Which tasks has a model room to learn? Pass rates before training on problems of reasoning-gym and `isopo_trl.coding`.

Three steps, since the machine with the GPU may lack reasoning-gym and the network:

    python benchmarks/questions/task_room.py prompts --output outputs/task_prompts.json
    python benchmarks/questions/task_room.py sample --model DIR --prompts outputs/task_prompts.json \
        --output outputs/task_samples.json.gz
    python benchmarks/questions/task_room.py score --samples outputs/task_samples.json.gz

`sample` needs transformers and vLLM alone, and no other file of this repository. `prompts` and `score` want
`PYTHONHASHSEED=0`: some tasks make their problems in an order that depends on it. Prompts are those of
`examples/reasoning_tasks.py` and `examples/coding.py`.

Room is not enough: where one answer is right for most problems, that answer is what is learned. How often it is stands
in the table of `score`, and without any model, with the tasks of `learning/matrix.yaml` as well, in that of

    python benchmarks/questions/task_room.py commonest
"""

import argparse
import gzip
import json
import statistics
import sys
import textwrap
import time
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any


GROUP = 4  # completions of a prompt, beside a greedy one
LARGEST = 16 * 2**20  # bytes of a file of completions
PROBLEMS = 2000  # of a task, in which the commonest answer is looked for
CODE = "code"
SUMS = {"operations": ["+", "-"], "operations_weights": [0.5, 0.5]}
# Tasks of reasoning-gym with the settings that make them small; each is tried with reasoning-gym's own as well
TASKS: dict[str, dict[str, Any]] = {
    "aiw": {"max_entities": 3},
    "base_conversion": {"min_base": 2, "max_base": 10, "max_value": 30},
    "basic_arithmetic": {"max_terms": 3, "max_digits": 1},
    "binary_alternation": {"min_n": 4, "max_n": 6},
    "bitwise_arithmetic": {"difficulty": 1},
    "caesar_cipher": {"min_words": 1, "max_words": 3, "max_rotation": 3},
    "calendar_arithmetic": {"tasks": ["weekday_of_date", "is_leap_year"], "offset_upper_bound": 10},
    "chain_sum": {"max_terms": 4, "max_digits": 2},
    "coin_flip": {"max_trials": 6},
    "complex_arithmetic": {"min_real": -5, "max_real": 5, "min_imag": -5, "max_imag": 5, **SUMS},
    "count_bits": {"max_n": 255},
    "count_primes": {"max_n": 30},
    "countdown": {"min_numbers": 3, "max_numbers": 3, "max_value": 10, "min_target": 5, "max_target": 40},
    "decimal_arithmetic": {"min_num_decimal_places": 1, "max_num_decimal_places": 1, "max_terms": 2},
    "decimal_chain_sum": {"max_terms": 3, "max_digits": 1, "max_decimal_places": 1},
    "dice": {"num_dice": 2, "max_dice_size": 12},
    "family_relationships": {"min_family_size": 4, "max_family_size": 5},
    "fraction_simplification": {"max_value": 12, "max_factor": 9, "styles": ["plain"]},
    "gcd": {"min_value": 2, "max_value": 60},
    "largest_island": {"max_rows": 5, "max_cols": 5, "max_num_islands": 2, "max_island_size": 5},
    "lcm": {"min_value": 2, "max_value": 15},
    "leg_counting": {"min_animals": 2, "max_animals": 3, "max_instances": 4},
    "letter_counting": {"min_words": 2, "max_words": 4},
    "needle_haystack": {"min_num_statements": 3, "max_num_statements": 8},
    "number_filtering": {"max_numbers": 5, "max_decimals": 0},
    "number_format": {"max_num_candidates": 3, "max_n": 100000},
    "number_sequence": {"min_terms": 5, "max_complexity": 1, "min_value": -20, "max_value": 20},
    "number_sorting": {"max_numbers": 5, "max_decimals": 0},
    "palindrome_generation": {"max_length": 5},
    "polynomial_multiplication": {
        **{"max_terms": 2, "max_value": 9, "max_degree": 1, "min_polynomials": 2, "max_polynomials": 2},
        "variables": ["x"],
    },
    "power_function": {"min_base": -12, "max_base": 12, "max_exponent": 3},
    "prime_factorization": {"max_value": 200},
    "products": {"max_digits": 2},
    "rotate_matrix": {"min_n": 2, "max_n": 3, "max_rotations": 3},
    "simple_equations": {"max_terms": 3, "max_value": 20},
    "simple_geometry": {"max_sides": 4},
    "spell_backward": {"max_word_len": 5},
    "spiral_matrix": {"min_n": 2, "max_n": 3},
    "time_intervals": {"task_types": ["time", "time_seconds"], "max_time_difference_seconds": 7200},
    "word_sequence_reversal": {"max_words": 5},
    "word_sorting": {"max_words": 4, "max_word_length": 6},
}
DIFFICULTIES = (1, 2, 3)  # of the grammar of functions


def read(path: Path) -> Any:
    opened = gzip.open(path, "rt", encoding="utf-8") if path.suffix == ".gz" else open(path, encoding="utf-8")
    with opened as file:
        return json.load(file)


def write(path: Path, content: Any) -> int:
    """The file's size in bytes."""
    text = json.dumps(content, ensure_ascii=False, separators=(",", ":")).encode()
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(gzip.compress(text) if path.suffix == ".gz" else text)
    return path.stat().st_size


# Prompts


def examples() -> Any:
    """The example whose prompts and scores these are."""
    sys.path[:0] = [str(Path(__file__).resolve().parents[2] / folder) for folder in ("examples", "")]
    import reasoning_tasks

    return reasoning_tasks


def different(problems: Any, count: int) -> Iterator[tuple[int, dict[str, Any]]]:
    """So many problems with different questions, and their numbers; fewer where ten times as many do not have them."""
    seen: set[str] = set()
    for number in range(10 * count):
        problem = problems[number]
        if (question := problem["question"].strip()) not in seen:
            seen.add(question)
            yield number, problem
        if len(seen) == count:
            return


def reasoning_prompts(names: Iterable[str], count: int, seed: int, answers: Iterable[str]) -> Iterator[dict[str, Any]]:
    """A row for each problem: `messages`, and what its score needs."""
    from datasets import Dataset

    from isopo_trl.gsm8k import as_prompts

    example = examples()
    for name in names:
        for size, config in (("small", TASKS[name]), ("default", {})):
            found = list(different(example.make_task(name, config, seed), count))
            rows = Dataset.from_list([{"question": problem["question"].strip()} for _, problem in found])
            for answer in answers:
                prompted = as_prompts(rows, example.INSTRUCTIONS[answer])
                for (number, _), row in zip(found, prompted, strict=True):
                    where = {"task": name, "size": size, "config": config, "seed": seed, "index": number}
                    yield {**where, "answer": answer, "messages": row["prompt"]}


def code_rows(size: str, count: int) -> Any:
    """Problems of the grammar (`grammar1`), or of HumanEval."""
    from isopo_trl.coding import human_eval, make_problems

    return human_eval() if size == "human_eval" else make_problems(count, int(size.removeprefix("grammar")))


def code_prompts(count: int) -> Iterator[dict[str, Any]]:
    from isopo_trl.coding import as_prompts

    for size in (*(f"grammar{difficulty}" for difficulty in DIFFICULTIES), "human_eval"):
        try:
            rows = code_rows(size, count)
        except ImportError as error:
            print(error)
            continue
        for index, row in enumerate(as_prompts(rows)):
            where = {"task": CODE, "size": size, "count": len(rows), "index": index}
            yield {**where, "answer": "function", "messages": row["prompt"]}


def make_prompts(options: argparse.Namespace) -> None:
    examples()  # puts the package on the path
    rows = [
        *reasoning_prompts(options.tasks or TASKS, options.count, options.seed, options.answers),
        *(() if options.no_code else code_prompts(options.code_count)),
    ]
    size = write(options.output, rows)
    print(f"{len(rows)} prompts, {size / 2**20:.2f} MiB: {options.output}")


# Completions


def encoded(rows: list[dict[str, Any]], tokenizer: Any) -> list[list[int]]:
    """Token ids of each row's messages, as a trainer's rollout has them."""
    texts = [
        tokenizer.apply_chat_template(row["messages"], add_generation_prompt=True, tokenize=False) for row in rows
    ]
    return [tokenizer(text, add_special_tokens=False)["input_ids"] for text in texts]


def figures(sampled: list[list[Any]], greedy: list[list[Any]], prompt_ids: list[list[int]]) -> list[dict[str, Any]]:
    """What is kept of each prompt: texts, lengths in tokens and which were cut off, the greedy one at the end."""
    return [
        {
            "texts": [output.text for output in (*some, *one)],
            "lengths": [len(output.token_ids) for output in (*some, *one)],
            "cut": [output.finish_reason == "length" for output in (*some, *one)],
            "prompt_length": len(ids),
        }
        for some, one, ids in zip(sampled, greedy, prompt_ids, strict=True)
    ]


def sample(options: argparse.Namespace) -> None:
    from transformers import AutoTokenizer
    from vllm import LLM, SamplingParams

    start = time.perf_counter()
    rows = read(options.prompts)
    tokenizer = AutoTokenizer.from_pretrained(options.model)
    prompt_ids = encoded(rows, tokenizer)
    fitting = [number for number, ids in enumerate(prompt_ids) if len(ids) + options.max_tokens <= options.max_length]
    if len(fitting) < len(rows):
        print(
            f"{len(rows) - len(fitting)} prompts are left out: longer than --max-length {options.max_length} allows."
        )
    rows, prompt_ids = [rows[number] for number in fitting], [prompt_ids[number] for number in fitting]
    model = LLM(
        str(options.model),
        gpu_memory_utilization=options.gpu_memory_utilization,
        max_model_len=options.max_length,
        enforce_eager=options.enforce_eager,
        seed=options.seed,
    )
    started = time.perf_counter()
    prompts = [{"prompt_token_ids": ids} for ids in prompt_ids]
    outputs, seconds = [], []
    for count, temperature in ((GROUP, 1.0), (1, 0.0)):
        begin = time.perf_counter()
        settings = SamplingParams(n=count, temperature=temperature, max_tokens=options.max_tokens)
        outputs.append([request.outputs for request in model.generate(prompts, settings)])
        seconds.append(time.perf_counter() - begin)
    found = figures(*outputs, prompt_ids)
    kept = [{**{key: row[key] for key in row if key != "messages"}, **of} for row, of in zip(rows, found, strict=True)]
    for row, of in zip(rows, kept, strict=True):
        of["question"] = row["messages"][-1]["content"]
    about = {
        "seconds": {"start": started - start, "sampled": seconds[0], "greedy": seconds[1]},
        "mean_length": statistics.mean(length for of in found for length in of["lengths"]),
        "mean_prompt_length": statistics.mean(map(len, prompt_ids)),
        "max_tokens": options.max_tokens,
    }
    size = write(options.output, {"about": about, "rows": kept})
    print(json.dumps(about))
    print(f"{len(kept)} prompts, {size / 2**20:.2f} MiB: {options.output}")
    if size > LARGEST:
        print(f"The file is larger than {LARGEST / 2**20:.0f} MiB: name it *.json.gz, or sample fewer prompts.")


# Answers without a model


def commonest_answer(task: str, config: dict[str, Any], seed: int, count: int = PROBLEMS) -> dict[str, Any]:
    """The share of problems that the commonest answer is right for, as answers are written: a model gets no less."""
    answers = Counter(problem["answer"] for _, problem in different(examples().make_task(task, config, seed), count))
    ((answer, times),) = answers.most_common(1)
    found = {"n": answers.total(), "answers": len(answers), "commonest answer": times / answers.total()}
    return {**found, "which": textwrap.shorten(str(answer), 30, placeholder="...")}


def tasks_of_the_matrix() -> Iterator[tuple[str, str, dict[str, Any]]]:
    """Task, name in the matrix and settings."""
    import yaml

    matrix = Path(__file__).resolve().parents[1] / "learning" / "matrix.yaml"
    for name, settings in yaml.safe_load(matrix.read_text())["tasks"].items():
        if "tasks" in settings:
            by_task = examples().settings_by_task(settings["tasks"], settings.get("task_config"))
            yield from ((task, name, config) for task, config in by_task.items())


def commonest(options: argparse.Namespace) -> None:
    names = options.tasks or TASKS
    sizes = [(name, size, config) for name in names for size, config in (("small", TASKS[name]), ("default", {}))]
    sizes += [(task, f"matrix: {name}", config) for task, name, config in tasks_of_the_matrix() if task in names]
    found = [
        {"task": task, "size": size, **commonest_answer(task, config, options.seed, options.count)}
        for task, size, config in sizes
    ]
    found.sort(key=lambda row: (-row["commonest answer"], row["task"], row["size"]))
    print_table(found)
    if options.output:
        write(options.output, found)


# Scores


def reasoning_rewards(rows: list[dict[str, Any]]) -> None:
    """Adds to each row the `rewards` of its completions, and `anywhere`, the best wherever the answer stands."""
    example = examples()
    problems = example.Problems.__new__(example.Problems)
    problems.failed = set()
    row = rows[0]
    task = example.make_task(row["task"], row["config"], row["seed"])
    problems.tasks = {row["task"]: task}
    problems.instances = [task[row["index"]] for row in rows]
    for number, (row, instance) in enumerate(zip(rows, problems.instances, strict=True)):
        if instance["question"].strip() not in row["question"]:
            raise ValueError(
                f"Problem {row['index']} of {row['task']} is not the one that was asked: set PYTHONHASHSEED=0 for "
                "prompts and score alike."
            )

        def score(name: str, text: str, row=row, number=number) -> float:
            return problems.score(example.ANSWERS[name](text), row["task"], number)

        row["rewards"] = [score(row["answer"], text) for text in row["texts"]]
        row["anywhere"] = [max(score(name, text) for name in example.ANSWERS) for text in row["texts"]]


def code_rewards(rows: list[dict[str, Any]]) -> None:
    """The same for functions; there is no second way to read them."""
    examples()
    from isopo_trl.coding import CodeReward

    reward = CodeReward()
    problems = code_rows(rows[0]["size"], rows[0]["count"])
    for row in rows:
        problem = problems[row["index"]]
        if problem["head"] not in row["question"]:
            raise ValueError(f"Problem {row['index']} of {row['size']} is not the one that was asked.")
        columns = {name: [problem[name]] * len(row["texts"]) for name in problem}
        row["rewards"] = row["anywhere"] = reward(row["texts"], **columns)


def table(groups: dict[tuple[str, str, str], list[dict[str, Any]]]) -> list[dict[str, Any]]:
    """Figures of each task, by how often its sampled completions pass."""
    found = []
    for (task, size, answer), rows in groups.items():
        sampled = [reward for row in rows for reward in row["rewards"][:GROUP]]
        found.append(
            {
                "task": task,
                "size": size,
                "answer": answer,
                "n": len(rows),
                "pass": statistics.mean(reward == 1 for reward in sampled),
                "greedy": statistics.mean(row["rewards"][GROUP] == 1 for row in rows),
                "reward": statistics.mean(sampled),
                "anywhere": statistics.mean(reward == 1 for row in rows for reward in row["anywhere"][:GROUP]),
                "any of 4": statistics.mean(1 in row["rewards"][:GROUP] for row in rows),
                "differ": statistics.mean(len(set(row["rewards"][:GROUP])) > 1 for row in rows),
                "tokens": statistics.mean(length for row in rows for length in row["lengths"][:GROUP]),
                "prompt": statistics.mean(row["prompt_length"] for row in rows),
                "cut": statistics.mean(cut for row in rows for cut in row["cut"][:GROUP]),
                "commonest answer": None if task == CODE else commonest_of(rows[0]),
            }
        )
    return sorted(found, key=lambda row: (-row["pass"], -row["differ"], row["task"], row["size"]))


def commonest_of(row: dict[str, Any]) -> float:
    return commonest_answer(row["task"], row["config"], row["seed"])["commonest answer"]


def shown(name: str, value: Any) -> str:
    if value is None or isinstance(value, str):
        return value or ""
    return f"{value:.0f}" if name in ("n", "answers", "tokens", "prompt") else f"{value:.2f}"


def print_table(rows: list[dict[str, Any]]) -> None:
    columns = list(rows[0])
    lines = [columns, *([shown(name, row[name]) for name in columns] for row in rows)]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    for line in lines:
        print("  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip())


def score(options: argparse.Namespace) -> None:
    samples = read(options.samples)
    groups: dict[tuple[str, str, str], list[dict[str, Any]]] = defaultdict(list)
    for row in samples["rows"]:
        groups[row["task"], row["size"], row["answer"]].append(row)
    for (task, *_), rows in groups.items():
        (code_rewards if task == CODE else reasoning_rewards)(rows)
    found = table(groups)
    print(
        f"Of {GROUP} completions per prompt: pass, all of the score; reward, the score; anywhere, pass wherever the "
        f"answer stands;\ndiffer, the share of prompts with different rewards; tokens of completions, of which 'cut' "
        f"reached {samples['about']['max_tokens']};\ncommonest answer, the share of problems that one answer is right "
        f"for, without a model.\n"
    )
    print_table(found)
    if options.output:
        write(options.output, {"about": samples["about"], "tasks": found})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    steps = parser.add_subparsers(dest="step", required=True)
    prompts = steps.add_parser("prompts", help="make the problems")
    prompts.add_argument("--output", type=Path, required=True)
    prompts.add_argument("--tasks", nargs="+", choices=TASKS, metavar="TASK", help="of reasoning-gym; all by default")
    prompts.add_argument("--count", type=int, default=32, help="problems of each task and difficulty")
    prompts.add_argument("--code-count", type=int, default=64, help="functions of each difficulty")
    prompts.add_argument("--no-code", action="store_true", help="leave functions out")
    prompts.add_argument("--answers", nargs="+", default=["tags"], help="as --answer of examples/reasoning_tasks.py")
    prompts.add_argument("--seed", type=int, default=0, help="of the problems")
    prompts.set_defaults(run=make_prompts)
    constant = steps.add_parser("commonest", help="how many problems the commonest answer is right for, as a table")
    constant.add_argument("--tasks", nargs="+", choices=TASKS, metavar="TASK", help="of reasoning-gym; all by default")
    constant.add_argument("--count", type=int, default=PROBLEMS, help="problems of each task and size")
    constant.add_argument("--seed", type=int, default=0, help="of the problems")
    constant.add_argument("--output", type=Path, help="file for the figures, as JSON")
    constant.set_defaults(run=commonest)
    sampling = steps.add_parser("sample", help="sample completions with vLLM")
    sampling.add_argument("--model", type=Path, required=True, help="folder with an instruct model")
    sampling.add_argument("--prompts", type=Path, required=True)
    sampling.add_argument("--output", type=Path, required=True, help="*.json.gz")
    sampling.add_argument(
        "--gpu-memory-utilization", type=float, default=0.5, help="share of the GPU's memory for vLLM"
    )
    sampling.add_argument("--enforce-eager", action="store_true", help="without CUDA graphs: a faster start")
    sampling.add_argument("--max-tokens", type=int, default=256, help="of a completion")
    sampling.add_argument("--max-length", type=int, default=4096, help="tokens of a prompt and its completion")
    sampling.add_argument("--seed", type=int, default=0)
    sampling.set_defaults(run=sample)
    scoring = steps.add_parser("score", help="pass rates, as a table")
    scoring.add_argument("--samples", type=Path, required=True)
    scoring.add_argument("--output", type=Path, help="file for the figures, as JSON")
    scoring.set_defaults(run=score)
    options = parser.parse_args()
    options.run(options)


if __name__ == "__main__":
    main()
