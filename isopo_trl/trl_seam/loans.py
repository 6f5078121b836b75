"""Attributes and methods of objects that others own, TRL's above all, borrowed for the length of a call."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any


@contextmanager
def borrowed(owner: Any, **settings: Any) -> Iterator[None]:
    """Context in which attributes of `owner` (TRL's trainer, its `args`, or another object) have other values."""
    own = {name: getattr(owner, name) for name in settings}
    try:
        for name, value in settings.items():
            setattr(owner, name, value)
        yield
    finally:
        for name, value in own.items():
            setattr(owner, name, value)


@contextmanager
def intercepted(owner: Any, name: str, stand_in: Callable[..., Any]) -> Iterator[None]:
    """Context in which calls of a method of `owner` go to `stand_in`, whose first argument is the method as it was."""
    method, before = getattr(owner, name), owner.__dict__.get(name)
    setattr(owner, name, lambda *args, **kwargs: stand_in(method, *args, **kwargs))
    try:
        yield
    finally:
        delattr(owner, name)
        if before is not None:
            setattr(owner, name, before)


@contextmanager
def results_noted(trainer: Any, name: str, results: list[Any]) -> Iterator[None]:
    """Context in which `results` gets what TRL's calls of a method return."""

    def stand_in(method: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        results.append(method(*args, **kwargs))
        return results[-1]

    with intercepted(trainer, name, stand_in):
        yield
