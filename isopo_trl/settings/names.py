"""Names by which settings choose a class, which users may add to."""

from collections.abc import Mapping


def refuse_taken(setting: str, name: str, registered: Mapping[str, type], new: type) -> None:
    """
    Raise where a name of a setting is that of another class already. The same class again is a cell of a notebook that
    was run again.
    """
    known = registered.get(name)
    if known is not None and (known.__module__, known.__qualname__) != (new.__module__, new.__qualname__):
        raise ValueError(
            f"{setting}={name!r} is {known.__module__}.{known.__qualname__} already: choose another name."
        )
