"""
Ranges of settings. Outside of those of GRPO's own, TRL divides by zero, trains with NaN, or fails in the first step
with an error that does not name the setting: hence a line for each.
"""

import math
from collections.abc import Callable, Mapping
from numbers import Real
from typing import Any


Bound = tuple[Callable[[Any], bool], str]

AT_LEAST_ONE: Bound = (lambda x: 1 <= x < math.inf and x % 1 == 0, "a whole number and at least 1")
POSITIVE: Bound = (lambda x: 0 < x < math.inf, "positive and finite")
NOT_NEGATIVE: Bound = (lambda x: 0 <= x < math.inf, "finite and not negative")
FINITE: Bound = (math.isfinite, "finite")

BOUNDS: dict[str, Bound] = {
    "num_generations": (lambda x: 2 <= x < math.inf, "at least 2, for advantages within a group"),
    "per_device_train_batch_size": AT_LEAST_ONE,
    "gradient_accumulation_steps": AT_LEAST_ONE,
    "generation_batch_size": AT_LEAST_ONE,
    "steps_per_generation": AT_LEAST_ONE,
    "num_iterations": AT_LEAST_ONE,
    "max_completion_length": AT_LEAST_ONE,
    "temperature": POSITIVE,
    "repetition_penalty": POSITIVE,
    "top_p": (lambda x: 0 < x <= 1, "in (0, 1]"),
    "top_k": (lambda x: -1 <= x < math.inf, "at least 0 (which turns it off; with vLLM, -1 does as well)"),
    "min_p": (lambda x: 0 <= x <= 1, "in [0, 1]"),
    "learning_rate": NOT_NEGATIVE,
    "weight_decay": NOT_NEGATIVE,
    "max_grad_norm": (lambda x: x >= 0, "at least 0 (which turns clipping off)"),
    "num_train_epochs": NOT_NEGATIVE,
    "neftune_noise_alpha": NOT_NEGATIVE,
    "entropy_coef": FINITE,
    "entropy_coef_min": FINITE,
    "entropy_coef_max": FINITE,
    "entropy_coef_delta": FINITE,
    "entropy_target": (lambda x: x == x, "a number"),
    "router_aux_loss_coef": FINITE,
    "delta": (lambda x: x > 0, "above 0: it is the largest ratio that a token or sequence may have"),
    "sapo_temperature_neg": POSITIVE,
    "sapo_temperature_pos": POSITIVE,
    "vespo_k_pos": NOT_NEGATIVE,
    "vespo_lambda_pos": NOT_NEGATIVE,
    "vespo_k_neg": NOT_NEGATIVE,
    "vespo_lambda_neg": NOT_NEGATIVE,
}
CHOICES = {
    "scale_rewards": ("group", "batch", "none", True, False),
    "importance_sampling_level": ("token", "sequence"),
    "multi_objective_aggregation": ("sum_then_normalize", "normalize_then_sum"),
}


# What is to be given for a setting that is refused by [`outside`]
GIVE_AT_LEAST_0: Bound = (NOT_NEGATIVE[0], "a finite number of at least 0")
GIVE_ABOVE_0: Bound = (POSITIVE[0], "a finite number above 0")
GIVE_BELOW_1: Bound = (lambda x: 0 <= x < 1, "a number from 0 to below 1")


def outside(settings: Any, name: str, bound: Bound, meaning: str) -> tuple[bool, str]:
    """Whether a setting is out of range, and the message for that, which begins with what the setting means."""
    value, (holds, expected) = getattr(settings, name), bound
    return value is None or not holds(value), f"{name}={value} {meaning}: give {expected}."


def verify_ranges(settings: Mapping[str, Any]) -> None:
    """Raise a `ValueError` for a setting of GRPO's that is out of range; `None` mostly means that it is not used."""
    for name, (holds, expected) in BOUNDS.items():
        value = settings.get(name)
        if value is None and name != "num_generations":
            continue
        if isinstance(value, bool) or not isinstance(value, Real) or not holds(value):
            raise ValueError(f"{name}={value!r} must be {expected}.")
    for name, choices in CHOICES.items():
        if settings.get(name, choices[0]) not in choices:
            names = ", ".join(repr(choice) for choice in choices if isinstance(choice, str))
            raise ValueError(f"{name}={settings[name]!r} must be one of {names}.")
