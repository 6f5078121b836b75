"""The mean length of a step's completions, by which nats per token are nats per completion."""

from typing import Any

import torch

from .optimizers import is_plain


# What a step moves the policy by with `target_kl="auto"`, in nats per completion
AUTO = 0.05
# The same for plain steps. Without momentum, steps do not add up: of 0.05 nats each, they go a quarter as far
AUTO_PLAIN = 0.25
# Of the mean, per optimizer step
DECAY = 0.9


def automatic(optimizer: Any, *, goes_on: bool = False) -> float:
    """What `target_kl="auto"` is with an optimizer, in nats per completion; `goes_on`: a rule adds steps up."""
    optimizer = getattr(optimizer, "optimizer", optimizer)  # inside of DeepSpeed's
    return AUTO_PLAIN if is_plain(optimizer) and not goes_on else AUTO


class CompletionLength:
    """
    A running mean of the number of scored tokens of a completion, over all ranks.

    Attributes:
        mean (`float`, *optional*): the mean; `None` before a token was scored.
    """

    def __init__(self, accelerator: Any):
        self._accelerator = accelerator
        self.mean: float | None = None
        self.forget()

    def forget(self) -> None:
        """Begin a new step."""
        self._sums = torch.zeros(2, dtype=torch.float64, device=self._accelerator.device)

    def see(self, scored: torch.Tensor) -> None:
        """Take note of a microbatch: `[B, C]`, nonzero at scored tokens. A completion without any does not count."""
        scored = scored != 0
        self._sums = self._sums + torch.stack([scored.sum(), scored.any(dim=1).sum()])

    def close(self) -> None:
        """End the step."""
        tokens, completions = self._accelerator.reduce(self._sums, reduction="sum").tolist()
        self.forget()
        if completions:
            own = tokens / completions
            self.mean = own if self.mean is None else DECAY * self.mean + (1 - DECAY) * own
