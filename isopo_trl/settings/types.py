"""
Types of settings, as the annotations of their fields give them. Dataclasses do not enforce them, and a command line, a
YAML file or NumPy hands over texts and scalars that would go wrong much later.
"""

import dataclasses
import inspect
import numbers
import reprlib
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np


# By the name in an annotation: types that are taken, what makes Python's own of them, and what an error calls them
_KINDS: dict[str, tuple[Any, Callable[[Any], Any], str]] = {
    "float": (numbers.Real, float, "a number"),
    "int": (numbers.Integral, int, "a whole number"),
    "bool": (bool | np.bool_, bool, "True or False"),
    "str": (str, str.__str__, "a text"),
}


def typed(name: str, value: Any, annotation: Any) -> Any:
    """
    The value of a setting as Python's own type (NumPy's scalars are taken as well); raises `ValueError`, naming the
    setting, where it is of another.

    Args:
        name (`str`): what the setting is called.
        value: what was given for it.
        annotation: `float`, `int`, `bool` or `str`, or one of them `| None`; with another, any value is taken.
    """
    kind, optional = _kind(annotation)
    if kind not in _KINDS or (optional and value is None):
        return value
    taken, as_own, expected = _KINDS[kind]
    if not isinstance(value, taken) or (isinstance(value, bool) and kind != "bool"):
        expected = f"{expected} or None" if optional else expected
        raise ValueError(f"{name}={shown(value)} is of type {type(value).__name__}: give {expected}.")
    try:
        return as_own(value)
    except OverflowError:
        raise ValueError(f"{name}={shown(value)} is too large: give a number that a float can hold.") from None


def type_fields(settings: Any, names: Iterable[str] | None = None) -> None:
    """
    Replace the fields of a dataclass by what [`typed`] makes of them.

    Args:
        settings: an object of a dataclass, frozen or not.
        names (`Iterable[str]`, *optional*): of the fields; all of them if `None`.
    """
    defaults = {field.name: field.default for field in dataclasses.fields(settings)}
    # As they were written: a parser of command lines replaces the types of fields, and forgets `| None`
    annotations: dict[str, Any] = {}
    for parent in reversed(type(settings).__mro__):
        annotations |= inspect.get_annotations(parent)
    for name in defaults if names is None else names:
        value = getattr(settings, name)
        if value is not defaults[name]:  # a class may break its own word
            object.__setattr__(settings, name, typed(name, value, annotations[name]))


def shown(value: Any) -> str:
    """`repr`, in one line and cut short."""
    return " ".join(_SHORT.repr(value).split())


def _kind(annotation: Any) -> tuple[str, bool]:
    """The name of the type that an annotation asks for, and whether `None` will do as well."""
    text = annotation.__name__ if isinstance(annotation, type) else str(annotation)
    parts = [part.strip().rpartition(".")[2] for part in text.split("|")]
    optional = "None" in parts or "NoneType" in parts
    # `Any` beside a type is for type checkers
    kinds = [part for part in parts if part not in ("None", "NoneType", "Any")]
    return kinds[0] if len(kinds) == 1 else "", optional


_SHORT = reprlib.Repr()
_SHORT.maxstring = _SHORT.maxother = _SHORT.maxlong = 60
