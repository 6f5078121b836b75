"""The share of an optimizer's first step that weights in bf16 or fp16 lose, being rounded to nearest."""

from typing import Any

import torch
from accelerate.logging import get_logger
from transformers import TrainerCallback

from ..step_size.taken_back import local
from .steps import SGD, AdamW, StepInputs


logger = get_logger(__name__)

NARROW = (torch.bfloat16, torch.float16)
# Weights that are looked at, at equal distances
SAMPLED = 2**20
_FORMULAS: dict[type, type[SGD] | type[AdamW]] = {torch.optim.SGD: SGD, torch.optim.AdamW: AdamW}
# Below this share of a step, nothing is said
_NOTHING = 0.005
_IN_BF16 = "Set bf16_updates='stochastic' (at some noise) or 'exact' (2 bytes per weight), or train in float32, with "
_IN_FLOAT16 = (
    "Load the model in bf16 (model_init_kwargs={'dtype': 'bfloat16'}) and set bf16_updates, or train in float32, with "
)
_IN_FLOAT32 = "model_init_kwargs={'dtype': 'float32'} and, on a GPU that has it, bf16=True."


class LostSteps(TrainerCallback):
    """Warns, after the first step, of what has been lost of it."""

    def __init__(self, accelerator: Any):
        self._accelerator = accelerator
        self._warned = False
        self._hooks: list[Any] = []

    def on_train_begin(self, args, state, control, optimizer=None, **kwargs):
        self._unhook()
        optimizer = getattr(optimizer, "optimizer", optimizer)
        groups = getattr(optimizer, "param_groups", [])
        narrow = [(group, p) for group in groups for p in group["params"] if p.requires_grad and p.dtype in NARROW]
        if self._warned or not narrow:
            return
        formula = _FORMULAS.get(type(optimizer))
        if formula is None:
            self._warned = True
            logger.warning(
                f"Trained weights are in {_named(narrow)}, whose rounding may lose most of a step. {_remedy(narrow)}"
            )
            return
        stride = -(-sum(local(p).numel() for _, p in narrow) // SAMPLED)
        before: dict[torch.Tensor, torch.Tensor] = {}

        def note(*_: Any) -> None:
            before.update({p: _sample(p, stride).clone() for _, p in narrow if p.grad is not None})

        def measure(*_: Any) -> None:
            made = torch.zeros(3, dtype=torch.float64, device=self._accelerator.device)
            for group, p in narrow:
                if p in before:
                    made += _moved(formula, optimizer.state.get(p, {}), group, p, before[p], stride).to(made.device)
            before.clear()
            along, whole, number = self._accelerator.reduce(made, reduction="sum").tolist()
            if not whole > 0:  # a schedule's first step, or one without a gradient
                return
            self._warned = True
            self._unhook()
            lost = 1 - along / whole
            if lost < _NOTHING:
                return
            logger.warning(
                f"Trained weights are in {_named(narrow)}, and rounding them to nearest has lost "
                f"{100 * lost:.3g} % of the first step (measured on {number:.0f} weights, at a "
                f"learning rate of {max(float(group['lr']) for group, _ in narrow):.3g}). {_remedy(narrow)}"
            )

        self._hooks = [optimizer.register_step_pre_hook(note), optimizer.register_step_post_hook(measure)]

    def _unhook(self) -> None:
        for hook in self._hooks:
            hook.remove()
        self._hooks = []


def _named(narrow: list[Any]) -> str:
    return " and ".join(sorted({str(p.dtype).removeprefix("torch.") for _, p in narrow}))


def _remedy(narrow: list[Any]) -> str:
    has_float16 = any(p.dtype == torch.float16 for _, p in narrow)  # which bf16_updates refuses
    return (_IN_FLOAT16 if has_float16 else _IN_BF16) + _IN_FLOAT32


def _sample(values: Any, stride: int) -> torch.Tensor:
    return local(values).flatten()[::stride]


@torch.no_grad()
def _moved(formula: Any, state: Any, group: Any, p: Any, before: torch.Tensor, stride: int) -> torch.Tensor:
    """`<made, exact>`, `<exact, exact>` and the number of weights, `[3]`, over a sample of a parameter."""
    wide = before.double()
    moments = {name: _sample(state[name], stride).double() for name in formula.moment_names(group)}
    step = StepInputs(_sample(p.grad, stride).double(), moments, int(state.get("step", 1)))
    exact = formula.moved(group, float(group["lr"]), wide, step) - wide
    made = _sample(p, stride).double() - wide
    return torch.stack([(made * exact).sum(), exact.square().sum(), torch.ones_like(exact).sum()])
