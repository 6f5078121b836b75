"""
Settings of SGD in `optim_args`. transformers passes over most names in silence, and says what is wrong with a value
only when the model has been loaded.
"""

import math


_TRUE, _FALSE = ("true", "1", "yes"), ("false", "0", "no")
# Names that SGD knows and transformers does not pass on, or sets otherwise
_INSTEAD = {
    "lr": "Set learning_rate, which is a setting of its own.",
    "weight_decay": "Set weight_decay, which is a setting of its own.",
    "maximize": "Leave it out: rewards are maximised already, and a negative weight in reward_weights reverses one.",
}


def sgd_settings(optim_args: str | None) -> dict[str, float | bool]:
    """
    The `momentum`, `dampening` and `nesterov` of `optim="sgd"`, zero where not given; raises `ValueError` for other
    names, and for values without a meaning.
    """
    given = _parsed(optim_args)
    unread = [name for name in given if name not in ("momentum", "dampening", "nesterov")]
    if unread:
        remedy = _INSTEAD.get(unread[0], "Leave it out, or give the optimizer as an object (`optimizers`).")
        raise ValueError(
            f"{unread[0]!r} in optim_args={optim_args!r} would have no effect with optim='sgd', to which transformers "
            f"passes momentum, dampening and nesterov. {remedy}"
        )
    momentum, dampening = _number(given, "momentum"), _number(given, "dampening")
    if not 0 <= momentum < 1:
        raise ValueError(
            f"momentum={given['momentum']} in optim_args must be a number from 0 to below 1, such as 0.9."
        )
    if not math.isfinite(dampening):
        raise ValueError(f"dampening={given['dampening']} in optim_args must be a finite number, such as 0.9.")
    nesterov = given.get("nesterov", "false").lower()
    if nesterov not in (*_TRUE, *_FALSE):
        raise ValueError(f"nesterov={given['nesterov']} in optim_args must be true or false.")
    if nesterov in _TRUE and (momentum == 0 or dampening != 0):
        raise ValueError(
            f"nesterov=true in optim_args={optim_args!r} needs a momentum above 0, and no dampening: write "
            "'momentum=0.9,nesterov=true', or leave it out."
        )
    return {"momentum": momentum, "dampening": dampening if momentum else 0.0, "nesterov": nesterov in _TRUE}


def _parsed(optim_args: str | None) -> dict[str, str]:
    """Values by name, read as transformers reads them."""
    if not optim_args:
        return {}
    pairs = [pair.split("=") for pair in optim_args.replace(" ", "").split(",")] if isinstance(optim_args, str) else []
    if not pairs or any(len(pair) != 2 for pair in pairs):
        raise ValueError(
            f"optim_args={optim_args!r} must be a text of names and values, with commas between them: "
            "'momentum=0.9,nesterov=true', for example."
        )
    return {name: value for name, value in pairs}


def _number(given: dict[str, str], name: str) -> float:
    """A number, 0 where there is none of this name, and NaN where it is none."""
    try:
        return float(given.get(name, 0.0))
    except ValueError:
        return math.nan
