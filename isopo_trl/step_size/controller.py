"""
How long the next step is made, from what was measured of the steps before it: arithmetic on plain numbers.

Steps are made with `rate` times the learning rate. To leading order the KL divergence of a step is quadratic in it,

    kl = exp(level) rate^2

with a `level` that wanders from step to step, as gradients and the optimizer's moments do. It is followed by a Kalman
filter: each measurement `log kl - 2 log rate` counts by its error, and by how much single batches scatter. The next
rate is the one for which the level promises the target.

A step that goes too far is shortened on the spot, whatever the filter thinks of it, and one of a length that nobody
knows is [`fitted`].
"""

import math
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any


# Standard deviations, in nats of log kl: of the level's change from one step to the next, and of one batch's kl
DRIFT = 0.3
SCATTER = 0.5
# Standard deviations by which a measurement may be off before the level is taken to have jumped
LARGEST_SURPRISE = 3.0
# By how much the rate may change from one step to the next, up or down
LARGEST_CHANGE = 4.0
# A step is too long from this multiple of the target on
OVERSHOOT = 2.0
# A step that is too long is measured again until it is as near to the target as this, and at most so many times; one
# that may be of any length, more often
CLOSE = 0.1
SHORTENINGS = 5
SEARCHES = 20
# What is kept of a step whose measurement is not finite, before it is measured again
CAUTION = 0.1


@dataclass(frozen=True)
class Measurement:
    """
    The KL divergence of one step.

    Args:
        kl (`float`): in nats per token.
        stderr (`float`): its standard error; infinite where there was nothing to measure it by.
    """

    kl: float
    stderr: float

    @property
    def is_known(self) -> bool:
        """Whether anything was measured."""
        return self.kl != 0 or self.stderr != math.inf

    @property
    def relative_error(self) -> float:
        """At most 1: more is not told from noise by its logarithm."""
        return min(1.0, self.stderr / self.kl) if self.kl > 0 else 1.0


@dataclass
class StepSize:
    """
    The controller.

    Args:
        target (`float`): KL divergence that a step is to have, in nats per token.
        rate (`float`): what the learning rate is multiplied by in the next step.
        level (`float`, *optional*): estimate of `log kl` at a rate of 1; `None` before anything was measured.
        variance (`float`): of the level.
        lost (`int`): how many steps in a row were taken back wholly.
        held (`float`): the rate of the last step that was kept, or its share, less a factor for each that was lost.
    """

    target: float
    rate: float = 1.0
    level: float | None = None
    variance: float = 0.0
    lost: int = 0
    held: float = 0.0

    def aim(self, target: float) -> None:
        """Steps have another target from now on, and are longer or shorter by as much."""
        if self.level is not None:
            self.rate *= math.sqrt(target / self.target)
        self.target = target

    def measured(self, measurement: Measurement, kept: float = 1.0, schedule: float = 1.0) -> None:
        """
        Learn from a step made at [`rate`], and choose the next rate.

        Args:
            measurement ([`Measurement`]): of the step as it stands; positive and finite.
            kept (`float`): share of the step that was kept, positive.
            schedule (`float`): by which the target of this step was multiplied, positive.
        """
        made = math.log(self.rate * kept)
        observed = math.log(measurement.kl / schedule) - 2 * made
        noise = SCATTER**2 + measurement.relative_error**2
        if self.level is None:
            self.level, self.variance = observed, noise
        else:
            surprise = observed - self.level
            # A level that has jumped is one that was less certain than it seemed
            variance = max(self.variance + DRIFT**2, (surprise / LARGEST_SURPRISE) ** 2 - noise)
            gain = variance / (variance + noise)
            self.level += gain * surprise
            self.variance = (1 - gain) * variance
        wanted = (math.log(self.target) - self.level) / 2
        most = math.log(LARGEST_CHANGE)
        self.rate = math.exp(made + min(most, max(-most, wanted - made)))
        if self.lost:  # this step was one for caution's sake, and need not be the measure of the next
            self.rate = max(self.rate, min(math.exp(wanted), self.held))
        self.lost, self.held = 0, math.exp(made)

    def too_small(self, kept: float = 1.0) -> None:
        """A gradient, or the share `kept` of its step, did not move the policy by anything that could be measured."""
        self.rate *= kept * LARGEST_CHANGE
        if self.lost:  # for caution's sake it was made shorter than was needed
            self.rate = max(self.rate, self.held)
        self.lost = 0

    def not_told(self, kept: float = 1.0) -> None:
        """The share `kept` of a step is not too long, and no more is known of it: go on as was found, or given."""
        found = 1.0 if self.level is None else math.exp((math.log(self.target) - self.level) / 2)
        if not self.lost:
            self.held = self.rate * kept
        self.rate = max(self.rate, min(found, max(self.rate * LARGEST_CHANGE, self.held)))
        self.lost = 0

    def taken_back(self, kept: float) -> None:
        """Not even the share `kept` of the step could be kept."""
        self.rate *= kept / LARGEST_CHANGE
        self.held /= LARGEST_CHANGE
        self.lost += 1

    def state_dict(self) -> dict[str, Any]:
        return {name: value for name, value in asdict(self).items() if name != "target"}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        for name, value in state.items():
            setattr(self, name, value)


def is_too_long(measurement: Measurement, target: float) -> bool:
    """Whether a step must be shortened; one that cannot be measured must."""
    return not measurement.kl <= OVERSHOOT * target


def fitted(
    target: float,
    whole: Measurement,
    measured_at: Callable[[float], Measurement],
    *,
    may_grow: bool = False,
) -> tuple[float, float, Measurement]:
    """
    The share of a step that is as long as the target.

    Args:
        target (`float`): KL divergence that the step is to have.
        whole ([`Measurement`]): of the whole step, a share of 1.
        measured_at (`Callable`): moves the policy so that a given share of the step is made, and measures it.
        may_grow (`bool`): whether the share may be larger than 1, and is searched for however far away it is.

    Returns the share that is kept, 0 where the step remains [too long][is_too_long]; the last share that was tried;
    and what was measured of that.
    """
    share, latest = 1.0, whole
    below, above = 0.0, math.inf if may_grow else 1.0  # shares that are known to be on either side of the target
    short = 0.0  # the last that is known to be short enough
    for _ in range(SEARCHES if may_grow else SHORTENINGS):
        below, above = (share, above) if latest.kl < target else (below, share)
        if 0 < latest.kl < math.inf:
            share *= math.sqrt(target / latest.kl)
        else:
            share *= CAUTION if latest.kl else 1 / CAUTION
        if not below < share < above:  # not quadratic: weights, or choices of experts, change one after the other
            share = math.sqrt(below * above) if below else above * CAUTION
        latest = measured_at(share)
        if abs(latest.kl / target - 1) <= CLOSE or (latest.kl == 0 and not may_grow):  # nothing is left, for rounding
            break
        short = short if is_too_long(latest, target) else share
    if may_grow and latest.kl == 0:  # nothing moves the policy
        share, latest = 1.0, measured_at(1.0)
    if short and is_too_long(latest, target):
        share, latest = short, measured_at(short)
    return (0.0 if is_too_long(latest, target) else share), share, latest
