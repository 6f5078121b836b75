"""What the backward of every layer needs to know about the microbatch it is part of."""

from dataclasses import dataclass, field

import torch
from torch import nn

from .geometry import kernels
from .geometry.coefficients import Ledger, Rule, coefficients
from .geometry.running import RunningStatistics
from .geometry.sequences import Samples, Sequences
from .geometry.statistics import Statistics


@dataclass
class Microbatch:
    """
    One microbatch: its sequences, samples and advantages, and what its backward pass recorded.

    Layers hold on to it through their autograd context, so a backward that runs on another thread, or after the next
    forward has begun, still finds its own.

    Args:
        shape (`tuple[int, int]`): `(B, T)`, the shape of the token positions that the model sees.
        sequences ([`Sequences`]): which of the `B T` rows belong to which sequence.
        samples ([`Samples`], *optional*): sampled positions, where the rule needs them.
        advantages (`torch.Tensor`): `[m]`, the part of the advantages that is not in the loss.
        rule ([`Rule`]): the rule.
        running ([`RunningStatistics`]): the running means as they were when the microbatch began.
        loss_scale (`float`): constant that the loss carries.
        scored (`torch.Tensor`, *optional*): `[B, C]`, which of the last `C` predictions (positions `T - 1 - C` to `T -
            2`) are scored by TRL's fused LM head.

    While `recording`, layers work for the `plain` microbatch beside this one, in which no sequence is rescaled.
    """

    shape: tuple[int, int]
    sequences: Sequences
    samples: Samples | None
    advantages: torch.Tensor
    rule: Rule
    running: RunningStatistics
    loss_scale: float = 1.0
    scored: torch.Tensor | None = None
    ledger: Ledger = field(init=False)
    reached: list[int] = field(init=False)
    closed: bool = field(init=False, default=False)
    touched: list[torch.Tensor] = field(init=False, default_factory=list)
    plain: "Microbatch | None" = field(init=False, default=None)
    recording: bool = field(init=False, default=False)
    _fused: dict[torch.dtype, bool] = field(init=False, default_factory=dict)

    def __post_init__(self):
        self.reached = [0] * len(self.running.mean)
        self.weigh(self.advantages)

    def fused(self, x: torch.Tensor) -> bool:
        """Whether Triton's kernels can take a layer's rows `x` `[N, features]`."""
        known = self._fused.get(x.dtype)
        if known is None:
            m, n = self.sequences.count, 0 if self.samples is None else len(self.samples.rows)
            known = self.sequences.index is None and kernels.usable(x, m, n, self.rule)
            self._fused[x.dtype] = known
        return known

    def reach(self, index: int) -> Ledger:
        """Note that the backward pass is at layer `index`, and where its coefficients go."""
        if self.closed:
            raise RuntimeError(
                "A backward pass ran after its microbatch had ended: call `backward` before `end`, or inside the "
                "`microbatch` context."
            )
        self.reached[index] += 1
        return self.ledger

    def weigh(self, advantages: torch.Tensor) -> None:
        """Take other advantages `[m]`, before the backward."""
        self.advantages = advantages
        self.ledger = self.running.open(advantages, self.loss_scale)

    def touch(self, module: nn.Module) -> None:
        """Note a trained parameter of each layer in the graph, through which the layer's backward can be asked for."""
        # As the module has it now: FSDP exchanges parameters between forward and backward
        for p in module._parameters.values():
            if p is not None and p.requires_grad:
                self.touched.append(p)
                return

    def unscaled(self, term: torch.Tensor, plain: RunningStatistics) -> None:
        """
        Run the backward of a loss `term` that carries no advantage, and keep its gradients until the loss's own.

        Args:
            term (`torch.Tensor`): scalar.
            plain ([`RunningStatistics`]): those of rule `"none"`, for as many layers.
        """
        if self.plain is None:
            ones = torch.ones_like(self.advantages)
            self.plain = Microbatch(self.shape, self.sequences, None, ones, plain.rule, plain, scored=self.scored)
        self.recording = True
        try:
            # Asked for as the gradient of parameters, so that it is returned (as None) instead of accumulated
            torch.autograd.grad(term, self.touched, retain_graph=True, allow_unused=True)
        finally:
            self.recording = False

    def coefficients(self, index: int, statistics: Statistics) -> torch.Tensor:
        """Coefficients `[m]` of layer `index`, kept for the running means and the log."""
        ledger = self.reach(index)
        history = self.running.expectations(index)
        result = coefficients(statistics, ledger.advantages, self.rule, history, self.loss_scale)
        ledger.record(index, result)
        return result.c

    def rows(self, name: str, x: torch.Tensor, features: int = 1) -> torch.Tensor:
        """View a layer's tensor, positions first, as rows `[N, ...]`; `features` counts the dimensions behind them."""
        self.check(name, x, features)
        return x.reshape(self.sequences.rows, *x.shape[x.dim() - features :])

    def check(self, name: str, x: torch.Tensor, features: int = 1) -> None:
        """Raise if the positions of `x` are not the microbatch's: then rows cannot be told apart by sequence."""
        B, T = self.shape
        positions = x.shape[: x.dim() - features]
        if positions != self.shape and positions not in ((B * T,), (1, B * T)):
            raise RuntimeError(
                f"{name} got positions of shape {tuple(positions)}, but the microbatch has {B} x {T}: check that "
                "`attention_mask` has the shape of `input_ids`; if it has, ISOPO cannot tell which sequence this "
                "layer's rows belong to, so freeze its parameters, or leave it out of the LoRA targets."
            )
