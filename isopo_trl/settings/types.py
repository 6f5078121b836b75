"""
Types of settings: the one place that says whether a value is the number, the text or the yes or no that a field asks
for.

What a field may be is read off its annotation. Ranges, and what goes with what, are left to those who use a setting.
"""

import dataclasses
import numbers
import reprlib
from collections.abc import Iterable
from typing import Any

import numpy as np


_EXPECTED = {"float": "a number", "int": "a whole number", "bool": "True or False", "str": "a text"}


def typed(name: str, value: Any, annotation: Any) -> Any:
    """
    The value of a setting as Python's own type (NumPy's scalars are taken as well); raises `ValueError`, naming the
    setting, where it is of another.

    Args:
        name (`str`): what the setting is called.
        value: what was given for it.
        annotation: `float`, `int`, `bool` or `str`, or one of them `| None`; others are not checked.
    """
    kind, optional = _read(annotation)
    if kind not in _EXPECTED or (optional and value is None):
        return value
    is_bool = isinstance(value, bool | np.bool_)
    try:
        if kind == "float" and isinstance(value, numbers.Real) and not is_bool:
            return float(value)
        if kind == "int" and isinstance(value, numbers.Integral) and not is_bool:
            return int(value)
    except OverflowError:
        raise ValueError(f"{name}={shown(value)} is too large: give a number that a float can hold.") from None
    if kind == "bool" and is_bool:
        return bool(value)
    if kind == "str" and isinstance(value, str):
        return value
    raise ValueError(
        f"{name}={shown(value)} is of type {type(value).__name__}: give {_EXPECTED[kind]}"
        f"{' or None' if optional else ''}."
    )


def type_fields(settings: Any, names: Iterable[str] | None = None) -> None:
    """
    Replace the fields of a dataclass by what [`typed`] makes of them.

    Args:
        settings: an object of a dataclass, frozen or not.
        names (`Iterable[str]`, *optional*): of the fields to be checked; all of them if `None`.
    """
    fields = {field.name: field for field in dataclasses.fields(settings)}
    for name in fields if names is None else names:
        value = getattr(settings, name)
        if value is not fields[name].default:  # a class may break its own word
            object.__setattr__(settings, name, typed(name, value, fields[name].type))


def shown(value: Any) -> str:
    """`repr`, in one line and cut short."""
    return " ".join(_SHORT.repr(value).split())


def _read(annotation: Any) -> tuple[str, bool]:
    """The name of the type that an annotation asks for, and whether `None` will do as well."""
    text = annotation.__name__ if isinstance(annotation, type) else str(annotation)
    parts = [part.strip().rpartition(".")[2] for part in text.split("|")]
    optional = "None" in parts or "NoneType" in parts
    # `Any` beside a type is for type checkers
    kinds = [part for part in parts if part not in ("None", "NoneType", "Any")]
    return kinds[0] if len(kinds) == 1 else "", optional


_SHORT = reprlib.Repr()
_SHORT.maxstring = _SHORT.maxother = _SHORT.maxlong = 60
