"""What happens around every optimizer step so that its KL divergence is known, and is what was asked for."""

import logging
import math
from collections.abc import Callable
from typing import Any

import torch
from transformers import TrainerCallback

from ..integrations import deepspeed_weights
from ..trl_seam.log import add_to_log
from . import optimizers
from .controller import OVERSHOOT, Measurement, StepSize, is_too_long, shortened
from .drift import BehaviourBound
from .measurement import StepKL
from .taken_back import AdamWSteps, KeptWeights, kept_weights, local, trained


logger = logging.getLogger(__name__)


# Steps in a row that may be taken back wholly
PATIENCE = 3


class StepControl(TrainerCallback):
    """
    Measures each optimizer step, and with `target_kl` controls its length: multiplies the learning rate for the time
    of the step, shortens it where it went too far, and learns from it.

    Args:
        trainer ([`ISOPOTrainer`]): the trainer.
    """

    def __init__(self, trainer: Any):
        self._trainer = trainer
        args = trainer.args
        self.kl = StepKL(trainer, args.step_kl_share)
        self.size = None if args.target_kl is None else StepSize(args.target_kl)
        self.behaviour = None if args.drift_bound is None else BehaviourBound(trainer, args.drift_bound)
        self._offload = args.target_kl_offload
        self._kept: KeptWeights | AdamWSteps | None = None
        self._checked = False  # the optimizer's state, after its first step
        self._warned = False  # that steps of that length are lost in rounding
        self._rates: list[tuple[dict[str, Any], Any]] = []  # groups whose rates are multiplied, and their own rates
        self._factor = 1.0  # what they are multiplied by
        self._schedule = 1.0  # what the target is multiplied by
        self._applied = 0.0  # the largest of them, as it was for the step

    def reset(self) -> None:
        """Before a run, or after one that was broken off."""
        self._restore_rates()
        self.kl.reset()
        if self.behaviour is not None:
            self.behaviour.forget()
        self._kept = None
        self._checked = False

    def on_train_begin(self, args, state, control, **kwargs):
        optimizer = self._optimizer()
        optimizers.check(getattr(optimizer, "optimizer", optimizer), args.target_kl)  # inside of DeepSpeed's
        if self.size is not None and self._trainer.is_deepspeed_enabled:
            deepspeed_weights.check(optimizer)

    def on_train_end(self, args, state, control, **kwargs):
        self.kl.reset()

    def on_step_begin(self, args, state, control, **kwargs):
        self.kl.begin()

    def on_pre_optimizer_step(self, args, state, control, **kwargs):
        if self._trainer.is_deepspeed_enabled:
            return  # it has had its step
        self.prepare()
        self._begin()

    def on_optimizer_step(self, args, state, control, **kwargs):
        self._restore_rates()
        made = 0.0
        if self.size is None:
            measurement = self.kl.measure()
            self._log(measurement)
            made = measurement.kl
        elif self._schedule > 0:
            made = self._control(self.size)
        self.kl.forget()
        if self.behaviour is not None:
            self._log_figures(self.behaviour.close(made))

    def prepare(self) -> None:
        """Right before the step, when its gradients are there."""
        self.kl.score()
        if self.size is None:
            return
        self._warn_of_rounding(self.size.target)
        groups = self._groups()
        for group in groups:
            group.setdefault("initial_lr", float(group["lr"]))
        multiple = max(map(scheduled, groups))
        # The schedule multiplies the target, and so the rate by its root; nothing makes the target larger
        self._schedule = min(1.0, multiple)
        self._factor = self.size.rate * math.sqrt(self._schedule) / multiple if multiple > 0 else 0.0
        self._applied = self._factor * max(float(group["lr"]) for group in groups)

    def step(self, step: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Stands in for the step of DeepSpeed's optimizer, which the trainer's loop does not make."""
        self._begin()
        try:
            return step(*args, **kwargs)
        finally:
            self._restore_rates()

    def _control(self, size: StepSize) -> float:
        """Measure, shorten and learn from a step; returns the KL divergence that is left of it."""
        assert self._kept is not None
        if not self._checked:
            optimizers.check_state(self._optimizer())
            self._checked = True
        asked = size.target * self._schedule
        target = max(asked, self.kl.rounding)  # nothing shorter can be told to be too long
        measurement, kept, tried = self.kl.measure(), 1.0, 1.0
        if is_too_long(measurement, target):
            kept, tried, measurement = shortened(target, measurement, self._measured_at)
        if not kept:
            self._take_back(self._kept)
            size.taken_back(tried)
        elif measurement.is_known and self._has_gradient():  # what momentum does alone, for a while, says nothing
            if target > asked and measurement.kl >= asked:  # nor does rounding
                size.not_told(kept)
            elif measurement.kl == 0:
                size.too_small(kept)
            else:
                size.measured(measurement, kept, self._schedule)
        figures = {"kept": kept, "learning_rate": kept * self._applied}
        self._log(measurement if kept else Measurement(0.0, 0.0), figures)
        self._kept.settle()
        if size.lost >= PATIENCE:
            size.lost = 0  # another call of `train` has as much patience
            raise FloatingPointError(
                f"{PATIENCE} steps in a row could not be made: after each of them the KL divergence was "
                f"{measurement.kl:.3g} nats per token, however short the step was made, where {target:.3g} is the "
                "target. Each was taken back, so that the weights are as they were before. Look for a batch or a "
                "layer that is out of proportion (isopo/multiplier_max, grad_norm), or raise target_kl."
            )
        return measurement.kl if kept else 0.0

    def _warn_of_rounding(self, target: float) -> None:
        if self._warned or target >= self.kl.rounding:
            return
        self._warned = True
        logger.warning(
            f"target_kl={target:g} is less than what rounding alone amounts to here, about {self.kl.rounding:g} nats "
            "per token. So steps are made with learning_rate as it is, and shortened only where they go beyond "
            f"{OVERSHOOT:g} times that. Use a larger target; where flash attention or FSDP2 runs the model in bf16 or "
            "fp16, attn_implementation='sdpa' or float32 lets smaller ones be measured."
        )

    def _take_back(self, kept: KeptWeights | AdamWSteps) -> None:
        kept.move(0.0)
        if self._on_any_rank(kept.lost):
            raise FloatingPointError(
                "The optimizer's step has left weights that are not finite, and they cannot be computed back: go back "
                "to the last checkpoint, with a lower learning rate, or set target_kl_offload=True, which keeps a "
                "copy of the weights."
            )

    def _measured_at(self, share: float) -> Measurement:
        assert self._kept is not None
        self._kept.move(share)
        return self.kl.measure()

    def _log(self, measurement: Measurement, figures: dict[str, float] | None = None) -> None:
        known = {"kl": measurement.kl, "kl_stderr": measurement.stderr} if measurement.is_known else {}
        self._log_figures({**known, **(figures or {})})

    def _log_figures(self, figures: dict[str, float]) -> None:
        add_to_log(self._trainer, "train", {f"step/{name}": value for name, value in figures.items()})

    # The optimizer

    def _optimizer(self) -> Any:
        """The optimizer itself, without accelerate's wrapper."""
        optimizer = self._trainer.optimizer
        return getattr(optimizer, "optimizer", optimizer)

    def _groups(self) -> list[dict[str, Any]]:
        """Those that hold parameters; DeepSpeed has dropped others, and ZeRO-3 says of none what it holds."""
        deepspeed = self._trainer.is_deepspeed_enabled
        return [group for group in self._optimizer().param_groups if group["params"] or deepspeed]

    def _begin(self) -> None:
        """What is left to do before a step that has a target: its learning rates, and a way back."""
        if self.size is None:
            return
        self._rates = [(group, group["lr"]) for group in self._groups()]
        for group, rate in self._rates:
            group["lr"] = rate * self._factor
        if self._kept is None:
            self._kept = self._weights()
        self._kept.keep()

    def _restore_rates(self) -> None:
        """What the schedule goes on from, however the step has ended."""
        for group, rate in self._rates:
            group["lr"] = rate
        self._rates = []

    def _weights(self) -> "KeptWeights | AdamWSteps":
        if self._trainer.is_deepspeed_enabled:
            return deepspeed_weights.kept_weights(self._optimizer(), self._offload)
        return kept_weights(self._optimizer(), self._offload)

    def _has_gradient(self) -> bool:
        """Whether any gradient of the step is not zero, on any rank."""
        if self._trainer.is_deepspeed_enabled:  # which has done away with it
            return self._trainer.model_wrapped.get_global_grad_norm() != 0
        gradients = [local(p.grad) for p in trained(self._optimizer()) if p.grad is not None]
        return self._on_any_rank(any(bool((gradient != 0).any()) for gradient in gradients))

    def _on_any_rank(self, found: bool) -> bool:
        accelerator = self._trainer.accelerator
        return bool(accelerator.reduce(torch.tensor([found], device=accelerator.device).int(), reduction="sum").item())

    # State

    def state_dict(self) -> dict[str, Any]:
        state: dict[str, Any] = {} if self.size is None else {"size": self.size.state_dict()}
        return state if self.behaviour is None else {**state, "behaviour": self.behaviour.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """What other settings have saved, or an earlier version has not, begins anew."""
        if self.size is not None and "size" in state:
            self.size.load_state_dict(state["size"])
        if self.behaviour is not None and "behaviour" in state:
            self.behaviour.load_state_dict(state["behaviour"])


def scheduled(group: dict[str, Any]) -> float:
    """What the schedule multiplies the learning rate of a group of parameters by."""
    whole = max(float(group["initial_lr"]), float(group.get("max_lr", 0.0)))  # OneCycleLR begins far below its largest
    return float(group["lr"]) / whole if whole > 0 else 0.0
