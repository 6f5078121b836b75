"""
Where the time of the quick start's optimizer step goes, in this version and in the way that TRL has it on a CPU.

A step of `python examples/gsm8k.py`: one generation of the example's model, the rewards, and forward, loss and
backward of its microbatch. Four things differ between `trl` and `isopo`: a prompt is read as often as it has
completions, or once (`prompts_read_once`); the LM head gets every position, or those whose predictions are scored
(`scored_rows_alone`); its backward makes the logits again, or not (`frozen_head`); and attention has a mask, or none
(`attention`). Rounds do both, in turn, with the same prompts and the same random stream, in one process. Sequences
without an advantage are left out of a step's passes (`skip_zero_advantage`), and at first most have none: so the
passes are measured for several numbers of them.

    OMP_NUM_THREADS=1 python benchmarks/speed/quick_start.py

Seconds are of the processor, all threads together, so that other work on the machine counts less than it does by the
clock (`--clock`). Arguments that are not known here are passed on to the example.
"""

import argparse
import statistics
import sys
import time
from contextlib import ExitStack, nullcontext
from pathlib import Path
from typing import Any
from unittest import mock


ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "examples")]

import gsm8k  # noqa: E402
import torch  # noqa: E402
from phases import BACKWARD, PhaseClock, at_trls_marks  # noqa: E402
from transformers import set_seed  # noqa: E402

from isopo_trl import trainer as isopo_trainer  # noqa: E402
from isopo_trl.integrations import attention  # noqa: E402
from isopo_trl.trl_seam.generation import Progress  # noqa: E402


WAYS = ("trl", "isopo")
IN_GENERATION = ("generation", "scoring", "other")
IN_PASSES = ("forward", "backward", "other")


def built(arguments: list[str]) -> Any:
    """The example's trainer."""
    defaults = ["--validation_size", "0", "--skip_zero_advantage", "false"]
    script_args, args, model_args = gsm8k.read_arguments([*defaults, *arguments])
    gsm8k.begin(args, model_args)
    train, _, tokenizer = gsm8k.load(script_args, args, model_args)
    return gsm8k.build(script_args, args, model_args, train, tokenizer, *gsm8k.rewards(script_args))


def as_trl_has_it() -> ExitStack:
    """Context in which a trainer goes TRL's way."""
    stack = ExitStack()
    for name in ("prompts_read_once", "scored_rows_alone"):
        stack.enter_context(mock.patch.object(isopo_trainer, name, lambda *_: nullcontext()))
    stack.enter_context(mock.patch.object(attention, "goes_by_distances", lambda *_: False))
    return stack


class Step:
    """
    The parts of a step, each with its phases' seconds.

    Args:
        trainer (`ISOPOTrainer`): the example's.
        clock ([`PhaseClock`]): which is told of them.
    """

    def __init__(self, trainer: Any, clock: PhaseClock):
        self.trainer, self.clock = trainer, clock
        trainer.current_gradient_accumulation_steps = 1
        trainer.model.train()
        self.rows = next(iter(trainer.get_train_dataloader()))

    def generation(self) -> tuple[dict[str, float], dict[str, torch.Tensor]]:
        """Seconds of a generation with its rewards, and the batch."""
        set_seed(0)
        self.clock.restart()
        batch = self.trainer._generate_and_score_completions(self.rows)
        return self.clock.cut(), batch

    def passes(self, batch: dict[str, torch.Tensor], sequences: int) -> dict[str, float]:
        """Seconds of forward, loss and backward of the first of a batch's sequences."""
        trainer = self.trainer
        part = {name: value[:sequences] if value.dim() else value for name, value in batch.items()}
        part["advantages"] = torch.linspace(-1, 1, sequences)
        self.clock.restart()
        loss = trainer.compute_loss(trainer.model, part)
        with self.clock.phase(BACKWARD):
            loss.backward()
        trainer.isopo.end()
        trainer.isopo.step()
        seconds = self.clock.cut()
        trainer.model.zero_grad()
        return seconds


def measure(step: Step, rounds: int, sizes: list[int]) -> dict[str, dict[str, list[dict[str, float]]]]:
    """Seconds by phases, of each way's generation and of its passes for each number of sequences, round by round."""
    parts = ["generation", *map(str, sizes)]
    seconds: dict[str, Any] = {way: {part: [] for part in parts} for way in WAYS}
    with at_trls_marks(step.clock):
        for turn in range(rounds + 1):
            for way in WAYS if turn % 2 else WAYS[::-1]:
                with as_trl_has_it() if way == "trl" else nullcontext():
                    generation, batch = step.generation()
                    of_parts = [generation, *(step.passes(batch, size) for size in sizes)]
                if turn:  # the first warms up
                    for part, phases in zip(parts, of_parts, strict=True):
                        seconds[way][part].append(phases)
    return seconds


def rows(seconds: dict[str, Any]) -> list[tuple[str, float, float, float, float, float]]:
    """Name, medians of both ways, and the ratio of the second to the first, with its range, round by round."""
    table = []

    def add(name: str, both: list[list[float]]) -> None:
        ratios = [b / a for a, b in zip(*both, strict=True)]
        table.append((name, *map(statistics.median, both), statistics.median(ratios), min(ratios), max(ratios)))

    for part in seconds[WAYS[0]]:
        names = IN_GENERATION if part == "generation" else IN_PASSES
        for name in names:
            title = name if part == "generation" else f"{name}, {part} sequences"
            both = [[phases[name] for phases in seconds[way][part]] for way in WAYS]
            if min(map(min, both)) > 0.01:
                add(title, both)
    for part in list(seconds[WAYS[0]])[1:]:
        both = [
            [sum(a.values()) + sum(b.values()) for a, b in zip(of["generation"], of[part], strict=True)]
            for of in (seconds[way] for way in WAYS)
        ]
        add(f"step, {part} sequences", both)
    return table


def main(arguments: list[str]) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--sequences", type=int, nargs="+", default=[8, 24], help="in a step's passes")
    parser.add_argument("--clock", action="store_true", help="by the clock, not the processor's time")
    options, others = parser.parse_known_args(arguments)
    trainer = built(others)
    clock = PhaseClock(time.perf_counter if options.clock else time.process_time)
    step = Step(trainer, clock)
    assert Progress(trainer).per_generation == 1, "a generation of the quick start serves for one step"
    table = rows(measure(step, options.rounds, options.sequences))
    print(f"{'seconds':24} {'trl':>7} {'isopo':>7} {'ratio':>6} {'(range)':>13}")
    for name, before, after, ratio, least, largest in table:
        print(f"{name:24} {before:7.2f} {after:7.2f} {ratio:6.2f} ({least:.2f} to {largest:.2f})")


if __name__ == "__main__":
    main(sys.argv[1:])
