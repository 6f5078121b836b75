"""SGD and AdamW for weights in bf16: a step is made in float32, in parts, and kept as `bf16_updates` says."""

from collections.abc import Iterator
from itertools import chain
from typing import Any

import torch

from ..step_size.taken_back import blocks, local
from .parts import Part
from .steps import SGD, AdamW, StepInputs
from .stream import first_element, key, noise
from .way_back import NarrowSteps, NarrowTrials


class Narrow(torch.optim.Optimizer):
    """
    What the optimizers of this file share. Parameters in bf16 are rounded at random or have a remainder; others, in
    float32 or float64, are moved as PyTorch moves them. Moments are in float32.

    The remainder has the type of its weight, as PyTorch and the transports between ranks expect of a state, but its
    bits are those of an int16. The state's `step` counts the random numbers on.

    Args:
        parameters: parameters or groups of them.
        updates (`str`): `"stochastic"` or `"exact"`.
        seed (`int`): of the random numbers.
        float32_gradients (`bool`): whether gradients of weights in bf16 are added up in float32.
        settings: those of PyTorch's optimizer.
    """

    formula: type[SGD] | type[AdamW]

    def __init__(
        self, parameters: Any, *, updates: str, seed: int = 0, float32_gradients: bool = False, **settings: Any
    ):
        super().__init__(parameters, **settings)
        self.updates, self.seed = updates, seed
        refused = [name for name in ("amsgrad", "capturable", "differentiable") if self.defaults.get(name)]
        if refused:
            raise ValueError(f"bf16_updates={updates!r} does not work with {refused[0]}=True: leave that out.")
        parameters = list(self._parameters())
        dtypes = {p.dtype for p in parameters}
        wrong = dtypes - {torch.bfloat16, torch.float32, torch.float64}
        if wrong or torch.bfloat16 not in dtypes:
            raise ValueError(
                f"bf16_updates={updates!r} is about trained weights in bf16, but those here are in "
                f"{', '.join(sorted(map(str, dtypes)))}: leave it out, or load the model in bf16. (Under FSDP2, "
                "accelerate makes them float32 where bf16=True: set bf16=False to keep them in bf16.)"
            )
        if updates == "stochastic":
            for p in parameters:
                first_element(p)  # refuses what has none
        for p in parameters if float32_gradients else ():
            if p.dtype == torch.bfloat16:
                p.grad_dtype = torch.float32

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self.give_remainders()
        for place, group, p in self.stepped():
            is_first = self._begin(group, p)
            for part in self.parts(place, p):
                before = part.wide()
                self.formula.learn(group, before, part.step, is_first)
                part.write(self.formula.moved(group, float(group["lr"]), before, part.step))
        return loss

    @torch.no_grad()
    def give_remainders(self) -> None:
        """
        Before a step: weights that are to have a remainder, and have none, get one at random. Which float32 number a
        weight in bf16 stands for nobody knows, and the model is the same with any that rounds to it. But with a
        remainder of 0 it would not move before steps have added up to half the distance of two numbers in bf16.
        """
        for place, _, p in self.stepped() if self.updates == "exact" else ():
            if p.dtype != torch.bfloat16 or "remainder" in self.state[p]:
                continue
            remainder, start, numbers = torch.zeros_like(p), self._start(p), key(self.seed, 0, place)
            for weight, part in blocks(local(p), local(remainder)):
                drawn = noise(numbers, start, part.numel(), part.device).view(part.shape) - 2**15
                part.view(torch.int16).copy_(drawn.masked_fill_(weight == 0, 0))  # beside 0 there is no room below
                start += part.numel()
            self.state[p]["remainder"] = remainder

    def stepped(self) -> Iterator[tuple[int, dict[str, Any], torch.Tensor]]:
        """The parameters that a step moves: each with its number in the optimizer, and its group."""
        groups = [(group, p) for group in self.param_groups for p in group["params"]]
        return ((place, group, p) for place, (group, p) in enumerate(groups) if p.grad is not None)

    def parts(self, place: int, p: torch.Tensor, *others: torch.Tensor, ahead: bool = False) -> Iterator[Part]:
        """
        One of [`stepped`], part by part, with `others` of its shape on this rank: of the step that was begun last, or
        of the one `ahead`, with what the state has so far.
        """
        state, start = self.state.get(p, {}), self._start(p)
        number = int(state.get("step", 0)) + ahead
        names = [name for name in state if name != "step"]
        tensors = [p, p.grad, *(state[name] for name in names)]
        for weight, gradient, *values in blocks(*map(local, tensors), *others):
            moments = dict(zip(names, values, strict=False))
            remainder = moments.pop("remainder", None)
            step = StepInputs(gradient.to(torch.promote_types(weight.dtype, torch.float32)), moments, number)
            numbers, is_exact = key(self.seed, number, place), self.updates == "exact"
            yield Part(weight, remainder, step, values[len(names) :], numbers, start, is_exact)
            start += weight.numel()

    def remainder(self, p: torch.Tensor) -> list[torch.Tensor]:
        """This rank's part of a parameter's remainder, where there is one."""
        state = self.state.get(p, {})
        return [local(state["remainder"])] if "remainder" in state else []

    def way_back(self, offload: bool = False) -> NarrowSteps | NarrowTrials:
        """What tries steps or takes them back, for `target_kl`."""
        return NarrowSteps(self, offload)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """PyTorch would give all of a state the type of the weights; what other optimizers keep is left out."""
        super().load_state_dict(state_dict)
        saved = chain.from_iterable(group["params"] for group in state_dict["param_groups"])
        own = ((group, p) for group in self.param_groups for p in group["params"])
        for (group, p), place in zip(own, saved, strict=True):
            of = state_dict["state"].get(place, {})
            state = {"step": torch.as_tensor(of["step"]).float().cpu()} if "step" in of else {}
            for name in self.formula.moment_names(group):
                if isinstance(of.get(name), torch.Tensor):
                    state[name] = of[name].to(device=p.device, dtype=torch.promote_types(p.dtype, torch.float32))
            if self.updates == "exact" and p.dtype == torch.bfloat16 and "remainder" in of:
                state["remainder"] = of["remainder"].to(p.device)
            if of:
                self.state[p] = state

    def _begin(self, group: dict[str, Any], p: torch.Tensor) -> bool:
        """Begin a step of a parameter; returns whether its moments are new."""
        state, names = self.state[p], self.formula.moment_names(group)
        new = [name for name in names if name not in state]
        for name in new:
            state[name] = torch.zeros_like(p, dtype=torch.promote_types(p.dtype, torch.float32))
        state["step"] = state.get("step", torch.tensor(0.0)) + 1
        return bool(new)

    def _start(self, p: torch.Tensor) -> int:
        """The first element of this rank's part, where random numbers go by it."""
        try:
            return first_element(p)
        except ValueError:
            if self.updates == "stochastic":
                raise
            return 0  # remainders may begin with the same numbers on all ranks

    def _parameters(self) -> Iterator[torch.Tensor]:
        return (p for group in self.param_groups for p in group["params"])


class NarrowSGD(Narrow, torch.optim.SGD):
    """SGD."""

    formula = SGD

    def way_back(self, offload: bool = False) -> NarrowTrials:
        return NarrowTrials(self)


class NarrowAdamW(Narrow, torch.optim.AdamW):
    """AdamW."""

    formula = AdamW
