"""What a user is told, once, of steps that are longer than anybody means them, or measured by too little."""

from .controller import Measurement


# Nats per completion, above all targets that have been of use
LARGEST_TARGET = 0.5


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
