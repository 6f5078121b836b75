"""Rules by name."""

import inspect
from collections.abc import Callable
from functools import partial
from typing import Any

from .rule import Rule


_REGISTERED: dict[str, partial[Rule]] = {}


def register_rule(name: str, rule: Callable[..., Rule] | None = None, **settings: Any) -> Any:
    """
    Make a rule known by `name`, for `ISOPO(model, rule=name)` and `ISOPOConfig(rule=name)`.

    Args:
        name (`str`):
            The name.
        rule (`type[Rule]`, *optional*):
            The class, or whatever makes a [`Rule`] from settings given by name. Without it this is a decorator.
        settings:
            Defaults of the rule's settings that are other than the class's own.

    Example:

    ```python
    register_rule("half_fisher", PowerRule, fisher_power=-0.5)
    ```
    """
    if rule is None:
        return lambda rule: register_rule(name, rule, **settings)
    made, known = partial(rule, **settings), _REGISTERED.get(name)
    if known is not None and not _is_made_again(known, made):
        raise ValueError(f"There is a rule {name!r} already, by {_origin(known)}: choose another name.")
    _REGISTERED[name] = made
    return rule


def _is_made_again(known: partial[Rule], made: partial[Rule]) -> bool:
    """Whether this is the same rule once more, as when a notebook's cell is changed and runs again."""
    if known.func is made.func:
        return known.keywords == made.keywords
    return _origin(known) == _origin(made)


def _origin(rule: partial[Rule]) -> str:
    maker: Any = rule.func
    return f"{maker.__module__}.{maker.__qualname__}"


def rule_names() -> tuple[str, ...]:
    """The names of all rules."""
    return tuple(_REGISTERED)


def rule_settings(name: str) -> tuple[str, ...]:
    """The names of a rule's settings."""
    parameters = inspect.signature(_registered(name)).parameters
    return tuple(parameter for parameter in parameters if parameter != "name")


def make_rule(rule: str | Rule, **settings: Any) -> Rule:
    """
    The rule of this name with these settings; a [`Rule`] is returned as it is.

    A setting that is `None` is the rule's own, and one that is `False` may be given to a rule that does not have it.
    """
    settings = {name: value for name, value in settings.items() if value is not None}
    if isinstance(rule, Rule):
        if settings:
            raise ValueError(
                f"{', '.join(settings)} cannot be given beside a rule that is an object: its settings are its own."
            )
        return rule
    takes = rule_settings(rule)
    for name, value in settings.items():
        if name not in takes and value is not False:
            remedy = f"set {name}=False" if value is True else "remove it"
            raise ValueError(
                f"{name}={value} has no meaning for rule={rule!r}, whose settings are {', '.join(takes)}: {remedy}, "
                "or choose another rule."
            )
    return _registered(rule)(name=rule, **{name: x for name, x in settings.items() if name in takes})


def _registered(name: str) -> partial[Rule]:
    if not isinstance(name, str) or name not in _REGISTERED:
        raise ValueError(f"rule={name!r} is unknown: choose one of {', '.join(map(repr, _REGISTERED))}.")
    return _REGISTERED[name]
