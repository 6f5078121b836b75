"""
Completions per second that the rewards score, on one core.

The completions are solutions in GSM8K's style of a few sentences each, one in four of them wrong, whose answers stand
after `####`, there within a sentence, in a box, or in the last sentence; each is scored as text and as a conversation,
with its prompt. A group of completions shares a prompt, as in training. Times are the processor's, and the median over
the repeats. The last column is the slowest of a few texts of one million characters that are made to be slow, in
milliseconds.

    python benchmarks/speed/rewards_time.py
    python benchmarks/speed/rewards_time.py --math-verify 500    # math_verify_reward too, on so many completions
"""

import argparse
import json
import random
import statistics
import time
from collections.abc import Callable

from setting import environment

from isopo_trl.gsm8k import format_reward, gsm8k_reward, math_verify_reward


ENDINGS = {
    "####": "\n#### {}",
    "sentence": "\n#### The farmer is paid {} for her eggs in 2 weeks.",
    "box": " The answer is $\\boxed{{{}}}$.",
    "prose": " So {} is what she has left over in the end.",
}
MEGABYTES = (
    "1," * 500_000,
    "9" * 1_000_000,
    "1/" * 500_000,
    "-" * 1_000_000,
    "(" * 1_000_000,
    "\\boxed{" + "{" * 1_000_000,
    "#### " + "x" * 1_000_000,
    "#### " + "- $ " * 250_000,
    "#### " + "\\frac{1}" * 125_000,
    "#### " + "x = 1 is " * 111_111,
    "#### " + "½" * 1_000_000,
)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--completions", type=int, default=20_000)
    parser.add_argument("--group", type=int, default=8, help="completions of one prompt")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--math-verify", type=int, default=0, metavar="COMPLETIONS", help="needs math-verify")
    parser.add_argument("--output", help="JSON file for the figures")
    return parser.parse_args()


def problems(count: int, group: int, ending: str, seed: int = 0) -> dict[str, list]:
    """Prompts, completions that end in this way, and gold solutions, `count` of each."""
    generator = random.Random(seed)
    batch: dict[str, list] = {"prompts": [], "completions": [], "answer": []}
    while len(batch["prompts"]) < count:
        boxes, eggs, price = (generator.randint(2, 99) for _ in range(3))
        total = boxes * eggs * price
        prompt = f"A farmer fills {boxes} boxes with {eggs} eggs each and sells an egg for ${price}. What is she paid?"
        solution = (
            f"She fills {boxes} boxes with {eggs} eggs, which makes {boxes} * {eggs} = <<{boxes}*{eggs}="
            f"{boxes * eggs}>>{boxes * eggs} eggs.\nEach of them is sold for ${price}, so that she is paid "
            f"{boxes * eggs} * {price} = $<<{boxes * eggs}*{price}={total}>>{total} for all of them."
        )
        for _ in range(group):
            answer = total + (generator.random() < 0.25)
            batch["prompts"].append(prompt)
            batch["completions"].append(
                solution + ENDINGS[ending].format(generator.choice([f"{answer:,}", f"${answer}"]))
            )
            batch["answer"].append(f"{solution}\n#### {total}")
    return {name: column[:count] for name, column in batch.items()}


def as_conversations(batch: dict[str, list]) -> dict[str, list]:
    return {
        "prompts": [[{"role": "user", "content": prompt}] for prompt in batch["prompts"]],
        "completions": [[{"role": "assistant", "content": completion}] for completion in batch["completions"]],
        "answer": batch["answer"],
    }


def seconds(reward: Callable, batch: dict[str, list], repeats: int) -> float:
    times = []
    for _ in range(repeats):
        start = time.process_time()
        reward(**batch)
        times.append(time.process_time() - start)
    return statistics.median(times)


def main():
    options = parse()
    report = {"environment": environment(), "options": vars(options), "results": []}
    print(", ".join(f"{name} {value}" for name, value in report["environment"].items()))
    print(f"{'':20} {'answer':8} {'as':14} {'characters':>10} {'per second':>11} {'us each':>8} {'1 MB/ms':>8}")
    rewards = [(gsm8k_reward, options.completions), (format_reward, options.completions)]
    if options.math_verify:
        rewards.append((math_verify_reward, options.math_verify))
    for reward, count in rewards:
        slowest = None
        if reward is not math_verify_reward:
            slowest = max(seconds(reward, {"completions": [text], "answer": ["1"]}, 1) for text in MEGABYTES)
        for ending in ENDINGS:
            batch = problems(count, options.group, ending)
            characters = statistics.mean(map(len, batch["completions"]))
            for kind, columns in (("text", batch), ("conversation", as_conversations(batch))):
                each = seconds(reward, columns, options.repeats) / count
                report["results"].append(
                    {
                        "reward": reward.__name__,
                        "answer": ending,
                        "as": kind,
                        "characters": characters,
                        "per_second": 1 / each,
                        "slowest_megabyte_ms": None if slowest is None else 1e3 * slowest,
                    }
                )
                last = "" if slowest is None else f"{1e3 * slowest:8.1f}"
                figures = f"{characters:10.0f} {1 / each:11,.0f} {1e6 * each:8.2f} {last:>8}"
                print(f"{reward.__name__:20} {ending:8} {kind:14} {figures}")
    if options.output:
        with open(options.output, "w") as file:
            json.dump(report, file, indent=2)


if __name__ == "__main__":
    main()
