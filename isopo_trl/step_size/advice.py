"""
What a user is told of steps: before training, where the settings leave nothing of a rule or a weighting; and then,
once, of steps that are longer than anybody means them, or measured by too little.
"""

from collections.abc import Iterator
from typing import Any

from ..rules.direction import GradientSoFar, LastStep
from ..rules.rule import Rule
from ..token_weights import Weighting
from .controller import Measurement
from .optimizers import is_plain


# Nats per completion, above all targets that have been of use
LARGEST_TARGET = 0.5


def of_settings(args: Any, rule: Rule, weighting: Weighting, optimizer: Any) -> Iterator[str]:
    """
    Of an optimizer whose steps are not those that a rule or a weighting means, and of microbatches that leave a rule
    nothing to look at.
    """
    direction = rule.direction() if rule.needs.direction else None
    if weighting.of_plain_steps and not is_plain(optimizer, args):
        yield (
            f"token_weights={args.token_weights!r} gates tokens by what a plain gradient step at the learning "
            "rate would do, and the steps of another optimizer have other lengths and directions, so that its "
            "bounds mean little: set optim='sgd' without momentum, or find bounds by off_policy/gated."
        )
    if isinstance(direction, LastStep) and not is_plain(optimizer, args):
        yield (
            f"rule={args.rule!r} makes a direction of its own of each step and those before, for plain gradient "
            "steps to follow, and another optimizer turns it elsewhere: set optim='sgd' without momentum, with "
            "target_kl (its default there) or a learning_rate of its own."
        )
    if isinstance(direction, GradientSoFar) and args.gradient_accumulation_steps == 1:
        yield (
            f"rule={args.rule!r} acts between the microbatches of a step, and gradient_accumulation_steps=1 makes "
            "one of each step, so that nothing is left of it but rule='none': raise it, with a lower "
            "per_device_train_batch_size for the same step, or take another rule."
        )
    if direction is None and rule.needs.ntk and args.per_device_train_batch_size == 1:
        yield (
            f"rule={args.rule!r} lets the sequences of a microbatch act on each other, and "
            "per_device_train_batch_size=1 leaves each alone in its own: raise it, with fewer "
            "gradient_accumulation_steps for the same step, or take another rule."
        )


def of_target(target: float, length: float | None, usual: float) -> str | None:
    """
    Of a target that is too large; `None` where there is nothing to say.

    Args:
        target (`float`): KL divergence of a step, in nats per token.
        length (`float`, *optional*): mean number of tokens of a completion, if that is known.
        usual (`float`): what `target_kl="auto"` is, in nats per completion.
    """
    if length is None or target * length <= LARGEST_TARGET:
        return None
    return (
        f"target_kl={target:g} nats per token are {target * length:.3g} nats per completion of {length:.3g} tokens: "
        f"a few such steps leave little of the policy. Targets in use are about {usual:g} nats per completion: set "
        f"target_kl={usual / length:.1g}, or target_kl='auto'. This is said once."
    )


def of_measurement(measurement: Measurement) -> str | None:
    """Of a step that was measured by a single sequence; `None` where there is nothing to say."""
    if not measurement.kl > 0 or measurement.stderr != measurement.kl:
        return None
    return (
        "The KL divergence of a step was measured by one sequence alone, and nothing tells how far that is off "
        "(step/kl_stderr is step/kl itself): raise step_kl_share, so that several of a step's sequences are measured. "
        "This is said once."
    )
