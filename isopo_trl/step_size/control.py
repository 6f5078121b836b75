"""What happens around every optimizer step so that its KL divergence is known, and is what was asked for."""

import logging
import math
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from transformers import TrainerCallback

from ..integrations import deepspeed
from ..trl_seam.batch import Batch
from . import advice, optimizers
from .completion_length import AUTO, CompletionLength, automatic
from .controller import CLOSE, OVERSHOOT, Measurement, StepSize, fitted, is_too_long
from .drift import BehaviourBound
from .measurement import StepKL
from .taken_back import SGDSteps, WayBack, WeightCopy, local, trained, way_back_of


logger = logging.getLogger(__name__)


# Length of the first step of SGD that is tried, in units of the weights': next to no weight loses a bit by it, and
# most models stand ten times as much
SHORT = 1e-6
# Steps in a row that may be taken back wholly
PATIENCE = 3


class StepControl(TrainerCallback):
    """
    Measures each optimizer step, and with `target_kl` controls its length: multiplies the learning rate for the time
    of the step, shortens it where it went too far, and learns from it.

    Args:
        kl, size, behaviour: measures steps; decides, where there is a target; ends generations.
        accelerator (`Accelerator`): the ranks.
        is_auto (`bool`): whether the target is the [`automatic`] one, whatever `size` says.
        goes_on (`bool`): whether the rule lets each step go on from the last one.
        log (`Callable`): takes figures by their names.
        offload (`bool`): whether to keep a copy of the weights in the memory of the host.
        engine, others (`Callable`, *optional*): return DeepSpeed's engine, if any, and the trainer's callbacks.
    """

    def __init__(
        self,
        kl: StepKL,
        size: StepSize | None,
        behaviour: BehaviourBound | None,
        accelerator: Any,
        *,
        is_auto: bool = False,
        goes_on: bool = False,
        log: Callable[[dict[str, float]], None],
        offload: bool = False,
        engine: Callable[[], Any] | None = None,
        others: Callable[[], list[TrainerCallback]] = list,
    ):
        self.kl, self.size, self.behaviour = kl, size, behaviour
        self._accelerator, self._log_figures = accelerator, log
        self._is_auto, self._goes_on = is_auto, goes_on
        self._offload, self._engine, self._others = offload, engine, others
        self.length = CompletionLength(accelerator)
        self._usual = AUTO  # what `target_kl="auto"` is with the optimizer, in nats per completion
        self.learning_rate: float | None = None  # what the last step was made with, where it had a target
        self._optimizer: Any = None  # as training has it, without accelerate's wrapper
        self._way_back: WayBack | None = None
        self._is_verified = False  # the optimizer's state, after its first step
        self._warned = False  # that steps of that length are lost in rounding
        self._advised: set[str] = set()  # of what else
        self._rates: list[tuple[dict[str, Any], Any]] = []  # groups whose rates are multiplied, and their own rates
        self._factor = 1.0  # what they are multiplied by
        self._schedule = 1.0  # what the target is multiplied by
        self._applied = 0.0  # the largest of them, as it was for the step
        self._tried: float | None = None  # the KL divergence of a step that was tried before it is made

    def reset(self) -> None:
        """Before a run, or after one that was broken off."""
        self._restore_rates()
        self.kl.reset()
        self.length.forget()
        if self.behaviour is not None:
            self.behaviour.forget()
        self._way_back = self._tried = None
        self._is_verified = False

    def on_train_begin(self, args, state, control, optimizer=None, **kwargs):
        self._optimizer = getattr(optimizer, "optimizer", optimizer)
        self._usual = automatic(self._optimizer, goes_on=self._goes_on)
        # Inside of DeepSpeed's
        optimizers.refuse(getattr(self._optimizer, "optimizer", self._optimizer), args.target_kl)
        if self.size is not None and self._engine is not None:
            deepspeed.refuse_optimizer(self._optimizer)

    def on_train_end(self, args, state, control, **kwargs):
        self.kl.reset()

    def on_step_begin(self, args, state, control, **kwargs):
        self.kl.begin()

    def see(self, batch: Batch, step: int, microbatches: int, fresh: bool) -> None:
        """Take note of one of the step's microbatches; `fresh`: no step came between its generation and now."""
        self.kl.note(batch, step, microbatches)
        self.length.see(batch.scored)
        if self.behaviour is not None:
            self.behaviour.see(fresh)

    def score_early(self, step: int) -> None:
        """Between two microbatches: make the pass before the step where it costs no time, and nobody comes between."""
        if self.kl.may_score_early and not acts_within_steps([each for each in self._others() if each is not self]):
            self.kl.score_early(step)

    def on_pre_optimizer_step(self, args, state, control, **kwargs):
        if self._engine is None:  # else it has had its step
            self.prepare(state.global_step)
            self._begin()

    def on_optimizer_step(self, args, state, control, **kwargs):
        self._restore_rates()
        made, self._tried = self._tried or 0.0, None
        if self.size is None:
            measurement = self.kl.measure()
            self._log(measurement)
            made = measurement.kl
        elif self._schedule > 0 and not isinstance(self._way_back, SGDSteps):
            made, _ = self._control(self.size)
        self.kl.forget()
        if self.behaviour is not None:
            self._log_figures(self.behaviour.close(made))

    def prepare(self, step: int) -> None:
        """Right before the step, when its gradients are there."""
        self.kl.score(step)
        self.length.close()
        if self.size is None:
            return
        if self._is_auto and self.length.mean is not None:
            self.size.aim(self._usual / self.length.mean)
        if self.behaviour is not None:
            self.behaviour.aim(self.size.target)
        self._warn_of_rounding(self.size.target)
        self._advise("target", advice.of_target(self.size.target, self.length.mean, self._usual))
        self._find_rates(self.size)

    def rate_ahead(self) -> float | None:
        """The largest learning rate of the step under way, as far as it is known now; `None` without a target."""
        if self.size is None or self._optimizer is None:
            return None
        self._find_rates(self.size)
        return self._applied

    def _find_rates(self, size: StepSize) -> None:
        groups = self._groups()
        for group in groups:
            group.setdefault("initial_lr", float(group["lr"]))
        multiple = max(map(scheduled, groups))
        # The schedule multiplies the target, and so the rate by its root; nothing makes the target larger
        self._schedule = min(1.0, multiple)
        self._factor = size.rate * math.sqrt(self._schedule) / multiple if multiple > 0 else 0.0
        self._applied = self._factor * max(float(group["lr"]) for group in groups)

    def step(self, step: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Stands in for the step of DeepSpeed's optimizer, which the trainer's loop does not make."""
        self._begin()
        try:
            return step(*args, **kwargs)
        finally:
            self._restore_rates()

    def _control(self, size: StepSize) -> tuple[float, float]:
        """Measure, shorten and learn from a step. Returns the KL divergence that is left of it, and its share."""
        way_back = self._way_back
        assert way_back is not None
        if not self._is_verified:
            optimizers.refuse_by_state(self._optimizer)
            self._is_verified = True
        asked = size.target * self._schedule
        target = max(asked, self.kl.rounding)  # nothing shorter can be told to be too long
        measurement, kept, tried = self.kl.measure(), 1.0, 1.0
        # A first step may be of any length, and what can be tried can be made longer, too
        searches = size.level is None and isinstance(way_back, SGDSteps) and measurement.is_known
        searches = searches and target == asked and self._has_gradient()
        if is_too_long(measurement, target) or (searches and measurement.kl < (1 - CLOSE) * target):
            measured_at = partial(self._measured_at, way_back)
            kept, tried, measurement = fitted(target, measurement, measured_at, may_grow=searches)
        if not kept:
            self._take_back(way_back)
            size.taken_back(tried)
        elif measurement.is_known and self._has_gradient():  # what momentum does alone, for a while, says nothing
            if target > asked and measurement.kl >= asked:  # nor does rounding
                size.not_told(kept)
            elif measurement.kl == 0:
                size.too_small(kept)
            else:
                size.measured(measurement, kept, self._schedule)
        self.learning_rate = kept * self._applied
        self._log(measurement if kept else Measurement(0.0, 0.0), {"kept": min(kept, 1.0)})
        way_back.settle()
        if size.lost >= PATIENCE:
            size.lost = 0  # another call of `train` has as much patience
            raise FloatingPointError(
                f"{PATIENCE} steps in a row could not be made: after each of them the KL divergence was "
                f"{measurement.kl:.3g} nats per token, however short the step was made, where {target:.3g} is the "
                "target. Each was taken back, so that the weights are as they were before. Look for a batch or a "
                "layer that is out of proportion (isopo/multiplier_max, grad_norm), or raise target_kl."
            )
        return (measurement.kl if kept else 0.0), kept

    def _warn_of_rounding(self, target: float) -> None:
        if self._warned or not 0 < target < self.kl.rounding:  # an automatic one is 0 before its first completion
            return
        self._warned = True
        logger.warning(
            f"target_kl={target:g} is less than what rounding alone amounts to here, about {self.kl.rounding:g} nats "
            "per token. So steps are made with learning_rate as it is, and shortened only where they go beyond "
            f"{OVERSHOOT:g} times that. Use a larger target; where flash attention or FSDP2 runs the model in bf16 or "
            "fp16, attn_implementation='sdpa' or float32 lets smaller ones be measured."
        )

    def _advise(self, subject: str, said: str | None) -> None:
        if said is not None and subject not in self._advised:
            self._advised.add(subject)
            if self._accelerator.is_main_process:
                logger.warning(said)

    def _take_back(self, way_back: WayBack) -> None:
        way_back.move(0.0)
        if self._on_any_rank(way_back.lost):
            raise FloatingPointError(
                "The optimizer's step has left weights that are not finite, and they cannot be computed back: go back "
                "to the last checkpoint, with a lower learning rate, or set target_kl_offload=True, which keeps a "
                "copy of the weights."
            )

    def _measured_at(self, way_back: WayBack, share: float) -> Measurement:
        way_back.move(share)
        return self.kl.measure()

    def _log(self, measurement: Measurement, figures: dict[str, float] | None = None) -> None:
        self._advise("measurement", advice.of_measurement(measurement))
        known = {"kl": measurement.kl, "kl_stderr": measurement.stderr} if measurement.is_known else {}
        if known and self.length.mean is not None:
            known["kl_per_completion"] = measurement.kl * self.length.mean
        self._log_figures({**known, **(figures or {})})

    # The optimizer

    def _groups(self) -> list[dict[str, Any]]:
        """Groups that hold parameters; DeepSpeed has dropped others, and ZeRO-3 says of none what it holds."""
        return [group for group in self._optimizer.param_groups if group["params"] or self._engine is not None]

    def _begin(self) -> None:
        """What is left to do before a step that has a target: its learning rates, and a way back."""
        if self.size is None:
            return
        self._rates = [(group, group["lr"]) for group in self._groups()]
        self.learning_rate = self._applied
        for group, rate in self._rates:
            group["lr"] = rate * self._factor
        if self._way_back is None and self._engine is None:
            self._way_back = way_back_of(self._optimizer, self._offload)
        elif self._way_back is None:
            weights, moved = deepspeed.moved_weights(self._optimizer)
            self._way_back = WeightCopy(weights, self._offload, moved)
        self._way_back.remember()
        if isinstance(self._way_back, SGDSteps) and self._schedule > 0:
            self._try(self._way_back, self.size)

    def _try(self, steps: SGDSteps, size: StepSize) -> None:
        """Find the learning rates with which the optimizer is to make its step, and leave the weights as they are."""
        if size.level is None and size.target * self._schedule >= self.kl.rounding:
            self._begin_short(steps, size)
        try:
            steps.move(1.0)
            self._tried, kept = self._control(size)
        finally:
            steps.settle()
        for group, rate in self._rates:
            group["lr"] = rate * self._factor * kept

    def _begin_short(self, steps: SGDSteps, size: StepSize) -> None:
        """Begin the search for the first step's rate with one of [`SHORT`], whatever the learning rate is."""
        squares = steps.squares().to(self._accelerator.device)
        step, weights = self._accelerator.reduce(squares, reduction="sum").tolist()
        if step > 0 and weights > 0:
            factor = SHORT * math.sqrt(weights / step)
            size.rate *= factor
            self._factor *= factor
            self._applied *= factor
            for group, rate in self._rates:
                group["lr"] = rate * self._factor
            steps.remember()

    def _restore_rates(self) -> None:
        """What the schedule goes on from, however the step has ended."""
        for group, rate in self._rates:
            group["lr"] = rate
        self._rates = []

    def _has_gradient(self) -> bool:
        """Whether any gradient of the step is not zero, on any rank."""
        if self._engine is not None:  # which has done away with it
            return self._engine().get_global_grad_norm() != 0
        gradients = [local(p.grad) for p in trained(self._optimizer) if p.grad is not None]
        return self._on_any_rank(any(bool((gradient != 0).any()) for gradient in gradients))

    def _on_any_rank(self, found: bool) -> bool:
        number = torch.tensor([found], device=self._accelerator.device).int()
        return bool(self._accelerator.reduce(number, reduction="sum").item())

    # State

    def state_dict(self) -> dict[str, Any]:
        state: dict[str, Any] = {} if self.size is None else {"size": self.size.state_dict()}
        state["length"], state["usual"] = self.length.mean, self._usual
        return state if self.behaviour is None else {**state, "behaviour": self.behaviour.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """What other settings have not saved begins anew."""
        if self.size is not None and "size" in state:
            self.size.load_state_dict(state["size"])
        self.length.mean = state.get("length")
        if self.size is not None and self._is_auto and self.length.mean is not None:
            self.size.target = state["usual"] / self.length.mean
        if self.behaviour is not None and "behaviour" in state:
            self.behaviour.load_state_dict(state["behaviour"])


def acts_within_steps(callbacks: list[TrainerCallback]) -> bool:
    """Whether a callback may change weights between the microbatches of a step and the step."""
    events = ("on_substep_end", "on_pre_optimizer_step")
    return any(
        getattr(type(each), event) is not getattr(TrainerCallback, event) for each in callbacks for event in events
    )


def scheduled(group: dict[str, Any]) -> float:
    """What the schedule multiplies the learning rate of a group of parameters by."""
    whole = max(float(group["initial_lr"]), float(group.get("max_lr", 0.0)))  # OneCycleLR begins far below its largest
    return float(group["lr"]) / whole if whole > 0 else 0.0
