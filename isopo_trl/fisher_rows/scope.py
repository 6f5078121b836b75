"""Where the Fisher metric is sampled: the settings `fisher_samples` and `fisher_scope`."""

from ..rules.rule import Rule
from ..settings.types import typed


SCOPES = ("microbatch", "step")
MOST_ROWS = 2**14
MOST_BY_DEFAULT = 2**10  # rows take 12 GB then, at 8B with full weights


def valid_samples(fisher_samples: int) -> int:
    """The number of samples; raises if it is of another type or out of range."""
    fisher_samples = typed("fisher_samples", fisher_samples, int)
    if fisher_samples < 1:
        raise ValueError(f"fisher_samples={fisher_samples} must be a whole number of at least 1.")
    return fisher_samples


def valid_scope(fisher_scope: str | None, fisher_samples: int, rule: Rule) -> str:
    """Where so many samples are taken from; raises if that is unknown, or would change nothing."""
    if fisher_scope is None:
        return "step" if rule.needs.overlap and fisher_samples <= MOST_BY_DEFAULT else "microbatch"
    fisher_scope = typed("fisher_scope", fisher_scope, str)
    if fisher_scope not in SCOPES:
        raise ValueError(f"fisher_scope={fisher_scope!r} is unknown: choose one of {', '.join(map(repr, SCOPES))}.")
    if fisher_scope == "step" and not rule.needs.overlap:
        raise ValueError(
            f"fisher_scope='step' is about the Fisher norm, which rule={rule.name!r} does not look at: remove it, or "
            "choose another rule ('fisher', 'npg', 'fig4')."
        )
    if fisher_scope == "step" and fisher_samples > MOST_ROWS:
        raise ValueError(
            f"fisher_samples={fisher_samples} rows would be held in memory for each layer under fisher_scope='step': "
            f"set at most {MOST_ROWS}, or fisher_scope='microbatch'."
        )
    return fisher_scope
