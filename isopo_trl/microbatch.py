"""What the backward of every layer needs to know about the microbatch it is part of."""

from dataclasses import dataclass, field

import torch

from .geometry.coefficients import Coefficients, Rule, alive_sequences, coefficients
from .geometry.running import RECORDED, RunningStatistics
from .geometry.sequences import Samples, Sequences
from .geometry.statistics import Statistics, scalar_dtype


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
    """

    shape: tuple[int, int]
    sequences: Sequences
    samples: Samples | None
    advantages: torch.Tensor
    rule: Rule
    running: RunningStatistics
    loss_scale: float = 1.0
    scored: torch.Tensor | None = None
    record: torch.Tensor = field(init=False)
    reached: list[int] = field(init=False)

    def __post_init__(self):
        layers = len(self.running.mean)
        device = self.advantages.device
        self.record = torch.zeros(
            layers, len(RECORDED), self.sequences.count, device=device, dtype=scalar_dtype(device)
        )
        self.reached = [0] * layers

    def coefficients(self, index: int, statistics: Statistics) -> torch.Tensor:
        """Coefficients `[m]` of layer `index`, recorded for the running means and the log."""
        needs = self.rule.needs
        result: Coefficients = coefficients(
            statistics,
            self.advantages,
            self.rule,
            self.running.mean[index],
            self.running.known[index],
            self.loss_scale,
        )
        alive = alive_sequences(result.fisher, result.norm, needs)
        broken = ~torch.isfinite(result.fisher + result.norm)
        self.record[index] = torch.stack([*(x.to(self.record.dtype) for x in result), alive, broken])
        self.reached[index] += 1
        return result.c

    def rows(self, name: str, x: torch.Tensor, features: int = 1) -> torch.Tensor:
        """
        View a layer's tensor, positions first, as rows `[N, ...]`; `features` counts the dimensions behind them.

        Raises if the positions are not those of the microbatch: then rows cannot be told apart by sequence.
        """
        B, T = self.shape
        positions = tuple(x.shape[: x.dim() - features])
        if positions not in ((B, T), (B * T,), (1, B * T)):
            raise RuntimeError(
                f"{name} got positions of shape {positions}, but the microbatch has {B} x {T}: ISOPO cannot tell "
                "which sequence each row belongs to. Freeze this layer's parameters, or leave it out of the LoRA "
                "targets."
            )
        return x.reshape(B * T, *x.shape[x.dim() - features :])
