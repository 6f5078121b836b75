"""
Time and memory of whole optimizer steps through `trainer.train()`, sampling left out: TRL's GRPO against ISOPO.

A `rollout_func` returns ready completions, so that what remains is scoring, old log-probabilities where the trainer
computes them, forward, backward and the optimizer. With the default settings a generation serves two optimizer steps
(`steps_per_generation` microbatches, `accumulation` to a step), so GRPO needs the log-probabilities of its old policy,
which is a forward pass over every generated batch; ISOPO has no old policy.

Rounds alternate between the trainers, each on a fresh copy of one random model. Times are those of whole cycles of
generation and optimizer steps, divided by the steps in them; the first cycle of every round is left out. Memory (GPUs
only) is the peak during training, optimizer state and weights included.

    python benchmarks/speed/optimizer_step.py                                            # a small model, for CPUs
    python benchmarks/speed/optimizer_step.py --shape 0.6b --sequences 8 --length 1024   # for one GPU
    python benchmarks/speed/optimizer_step.py --equal 0.5 --rule fisher+skip             # half of the groups left out
    python benchmarks/speed/optimizer_step.py --accumulation 4 --rule fisher fisher@step # where the metric is from

With `--target-kl`, what it costs to measure steps and to keep weights is measured too; a step needs 32 sequences or
more for that to be a 32nd of them. A target that no step reaches, such as 1, leaves out what it costs to shorten them:

    python benchmarks/speed/optimizer_step.py --shape 0.6b --sequences 8 --length 1024 --accumulation 8 \\
        --steps-per-generation 16 --target-kl 1 --rounds 1 --cycles 6
    python benchmarks/speed/optimizer_step.py --shape 8b --lora 16 --checkpointing --sequences 4 --length 1024 \\
        --full --accumulation 8 --steps-per-generation 8 --target-kl 1 --rounds 1 --cycles 4
    python benchmarks/speed/optimizer_step.py --shape 8b-6layers --dtype float32 --checkpointing --sequences 4 \\
        --full --length 1024 --accumulation 8 --steps-per-generation 8 --target-kl 1 --rounds 1 --cycles 3

In such a run the target is turned on and off from cycle to cycle, so that what it costs is known from steps that
follow one another: a machine that is slower for a while does not change it. Cycles in which passes that measure a step
were made as usual, or recorded to be replayed, are told apart from those in which all of them were replayed.
"""

import argparse
import itertools
import json
import math
import random
import statistics
import time

import liger_kernels
import torch
from setting import (
    HEADER,
    LIGER,
    RULES,
    STEP,
    PeakMemory,
    add_case_options,
    environment,
    make_trainer,
    random_batch,
    refuse_without_liger,
    release,
    row,
    summary,
    synchronize,
)
from transformers import PrinterCallback, TrainerCallback


TARGET = " target"  # behind the rule's name: with a target for its steps


class Clock(TrainerCallback):
    """Time, and number of forward passes of the model so far, at the end of every optimizer step."""

    def __init__(self):
        self.forwards = 0
        self.stamps: list[tuple[float, int]] = []

    def count(self, *_):
        self.forwards += 1

    def on_step_end(self, args, state, control, **kwargs):
        synchronize()
        self.stamps.append((time.perf_counter(), self.forwards))


class Switch(TrainerCallback):
    """
    Turns the control of steps off and on after every cycle; begins with it on, and from the same state each time.

    Args:
        trainer ([`ISOPOTrainer`]): the trainer, with `target_kl`.
        steps (`int`): of a cycle.
    """

    def __init__(self, trainer, steps: int):
        self._control, self._steps = trainer.step_control, steps
        self._state = self._control.size.state_dict()
        self._made = 0

    def on_step_end(self, args, state, control, **kwargs):
        self._made += 1
        if self._made % self._steps:
            return
        events = ("on_step_begin", "on_pre_optimizer_step", "on_optimizer_step")
        for name in (*events, "see", "score_early"):
            if name in vars(self._control):
                delattr(self._control, name)
            else:
                setattr(self._control, name, lambda *args, **kwargs: None)
        self._control.size.load_state_dict(self._state)


class DeviceTime:
    """
    The GPU's time for what a target adds to a step: from where it begins to where it ends on the stream, so that what
    the host does meanwhile counts only if the GPU waits for it. Passes that are not replayed are left out.

    Args:
        control ([`StepControl`]): of the trainer.
        clock ([`Clock`]): counts passes that are not replayed.
    """

    def __init__(self, control, clock: Clock):
        self._kl, self._clock = control.kl, clock
        self._events = {}
        self._score = control.kl.score
        for part, name in ((control.kl, "score"), (control, "_begin"), (control.kl, "measure")):
            self._events[name] = []
            setattr(part, name, self._timed(getattr(part, name), self._events[name]))

    def _timed(self, call, events):
        def timed(*args):
            if call == self._score and self._kl._before:  # there is nothing left to do
                return call(*args)
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            before = self._clock.forwards
            start.record()
            result = call(*args)
            end.record()
            if self._clock.forwards == before:
                events.append((start, end))
            return result

        return timed

    def medians(self) -> dict[str, float]:
        """In seconds."""
        torch.cuda.synchronize()
        return {
            name: statistics.median(start.elapsed_time(end) for start, end in events) / 1e3 if events else math.nan
            for name, events in self._events.items()
        }


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_case_options(parser)
    rules = [*RULES, *(f"{rule}+skip" for rule in RULES), *(f"{rule}{STEP}" for rule in RULES)]
    parser.add_argument(
        "--rule",
        nargs="+",
        choices=rules,
        default=["fisher"],
        metavar="RULE",
        help=f"one or more; RULE+skip: with skip_zero_advantage, RULE{STEP}: with fisher_scope='step'",
    )
    parser.add_argument("--equal", type=float, default=0.0, help="share of groups in which all rewards are the same")
    parser.add_argument("--steps-per-generation", type=int, default=4, help="microbatches of one generation")
    parser.add_argument("--accumulation", type=int, default=2, help="microbatches of one optimizer step")
    parser.add_argument("--full", action="store_true", help="all completions of the full length")
    parser.add_argument("--target-kl", type=float, help="also the rules with steps of this length")
    parser.add_argument("--cost-only", action="store_true", help="nothing but what --target-kl costs")
    parser.add_argument("--liger", action="store_true", help="also GRPO and the rules with Liger's kernels")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--cycles", type=int, default=4, help="measured in every round")
    parser.add_argument("--output", help="JSON file for the figures")
    options = parser.parse_args()
    if options.cost_only and not options.target_kl:
        parser.error("--cost-only is of the cost of --target-kl: give both")
    return options


def ready_completions(options: argparse.Namespace):
    """A `rollout_func` that returns the same random completions each time."""
    batch = random_batch(options, options.sequences * options.steps_per_generation)
    lengths = batch["completion_mask"].sum(1).tolist()
    if options.full:
        lengths = [options.length // 2] * len(lengths)
    completions = [ids[:length] for ids, length in zip(batch["completion_ids"].tolist(), lengths, strict=True)]
    output = {"prompt_ids": batch["prompt_ids"].tolist(), "completion_ids": completions, "logprobs": None}
    return lambda prompts, trainer: dict(output)


def random_reward(options: argparse.Namespace):
    """A reward function: random numbers, and the same for all completions of a group in the given share of groups."""
    groups = itertools.count(1)

    def reward(completions, **_):
        rewards = []
        for _ in range(len(completions) // options.sequences):
            number = next(groups)
            equal = math.floor(number * options.equal) > math.floor((number - 1) * options.equal)
            rewards += [1.0 if equal else random.random() for _ in range(options.sequences)]
        return rewards

    return reward


def train(name: str, options: argparse.Namespace, rollout_func, device_times: list[dict[str, float]]):
    """
    One round: seconds and forward passes per optimizer step of every measured cycle, and the peak of memory. What a
    target takes of the GPU's time is added to `device_times`.
    """
    rule = name.removesuffix(TARGET)
    cycles = 1 + options.cycles * (1 if rule == name else 2)
    microbatches = math.lcm(options.steps_per_generation, options.accumulation)  # of one cycle
    steps = microbatches // options.accumulation
    generations = cycles * microbatches // options.steps_per_generation
    length = {"target_kl": options.target_kl, "behaviour_kl": math.inf} if rule != name else {}
    trainer = make_trainer(
        rule,
        options,
        random_reward(options),
        prompts=generations * options.steps_per_generation,
        rollout_func=rollout_func,
        per_device_train_batch_size=options.sequences,
        num_generations=options.sequences,
        steps_per_generation=options.steps_per_generation,
        gradient_accumulation_steps=options.accumulation,
        max_completion_length=options.length // 2,
        max_steps=cycles * steps,
        logging_strategy="no",
        save_strategy="no",
        disable_tqdm=True,
        **length,
    )
    clock = Clock()
    trainer.model.register_forward_pre_hook(clock.count)
    trainer.add_callback(clock)
    if rule != name:
        trainer.add_callback(Switch(trainer, steps))
        device_time = DeviceTime(trainer.step_control, clock) if torch.cuda.is_available() else None
    trainer.remove_callback(PrinterCallback)
    with liger_kernels.apart(trainer.model), PeakMemory(trainer.model) as peak:
        trainer.train()
        if trainer.args.use_liger_kernel:
            liger_kernels.check(trainer)
    if rule != name and device_time is not None:
        device_times.append(device_time.medians())
    ends = clock.stamps[steps - 1 :: steps]
    spans = [(end[0] - start[0], end[1] - start[1]) for start, end in zip(ends, ends[1:], strict=False)]
    return [seconds / steps for seconds, _ in spans], [forwards / steps for _, forwards in spans], peak.bytes


def main():
    options = parse()
    names = ["grpo", *options.rule]
    names += [name + LIGER for name in names if options.liger]
    names = [] if options.cost_only else names
    names += [rule + TARGET for rule in options.rule if options.target_kl]
    refuse_without_liger(names)
    rollout_func = ready_completions(options)
    times, forwards, peaks = {name: [] for name in names}, {name: [] for name in names}, {}
    costs: dict[str, list[tuple[float, float]]] = {rule: [] for rule in options.rule if options.target_kl}
    alone: dict[str, list[float]] = {rule: [] for rule in costs}
    device_times: dict[str, list[dict[str, float]]] = {name: [] for name in names}
    for turn in range(options.rounds):
        for name in names if turn % 2 == 0 else names[::-1]:
            seconds, calls, peaks[name] = train(name, options, rollout_func, device_times[name])
            if name.endswith(TARGET):  # first without, then with
                rule = name.removesuffix(TARGET)
                pairs = zip(seconds[::2], seconds[1::2], calls[::2], calls[1::2], strict=True)
                costs[rule] += [(aimed / own - 1, more - least) for own, aimed, least, more in pairs]
                alone[rule] += seconds[::2]
                seconds, calls = seconds[1::2], calls[1::2]
            times[name] += seconds
            forwards[name] += calls
            release()
    results = summary(times, peaks, base=names[0])
    report = {"environment": environment(), "options": vars(options), "results": results}
    print(", ".join(f"{name} {value}" for name, value in report["environment"].items()))
    print(f"{options.shape}, {options.sequences} x {options.length} a microbatch, LoRA {options.lora}")
    print(f"{'':12} {HEADER} {'forwards':>9}   (per optimizer step)")
    for name, figures in results.items():
        figures["forwards"] = sum(forwards[name]) / len(forwards[name])
        print(f"{name:12} {row(figures)} {figures['forwards']:9.2f}")
    report |= {"target_cost": costs, "without": alone, "device_times": device_times}
    for rule, found in costs.items():
        replayed = [cost for cost, passes in found if passes == 0]
        others = [f"{cost:.1%} ({passes:g})" for cost, passes in found if passes != 0]
        print(f"cost of the target, of the cycle of {rule} before it:")
        print(f"  all passes replayed: {', '.join(f'{cost:.1%}' for cost in replayed) or 'none'}")
        if replayed:
            print(f"  their median: {statistics.median(replayed):.1%}")
        print(f"  others, with the passes per step that were not: {', '.join(others) or 'none'}")
        step = statistics.median(alone[rule])
        for parts in device_times[rule + TARGET]:
            of_parts = ", ".join(f"{name.strip('_')} {1e3 * seconds:.1f}" for name, seconds in parts.items())
            total = sum(parts.values())
            print(f"  the GPU's time in ms: {of_parts}: {total / step:.1%} of {1e3 * step:.0f} without a target")
    if options.output:
        with open(options.output, "w") as file:
            json.dump(report, file, indent=2)


if __name__ == "__main__":
    main()
