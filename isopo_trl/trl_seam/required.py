"""TRL's version, and the look-up of what is private to it: what is missing, or has changed, is noted."""

import importlib
import inspect
import os
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from packaging.specifiers import SpecifierSet
from packaging.version import Version


# The minor release that is tested. setup.cfg repeats it, which tests/test_trl_seam.py holds it to
TRL_RANGE = ">=1.16,<1.17"
# Set by scripts/newest_trl: go on with a version out of the range. What is missing is an error all the same
ANY_VERSION = "ISOPO_ANY_TRL"
INSTALL = f'install it with `pip install "trl{TRL_RANGE}"`'


def verify_version(found: str | None) -> None:
    """Raise `ImportError` unless TRL's version `found` (`None`: not installed) is one that is supported."""
    if found is None:
        raise ImportError(f"isopo_trl needs TRL {TRL_RANGE}, but TRL is not installed: {INSTALL}.")
    supported = Version(Version(found).base_version) in SpecifierSet(TRL_RANGE)
    if not supported and os.environ.get(ANY_VERSION, "0") in ("", "0"):
        raise ImportError(f"isopo_trl needs TRL {TRL_RANGE}, but found {found}: {INSTALL}, or a newer isopo_trl.")


def _installed_version() -> str | None:
    try:
        return version("trl")
    except PackageNotFoundError:
        return None


_missing: list[str] = []


def difference(path: str, *parameters: str, mentions: tuple[str, ...] = ()) -> str | None:
    """
    In what the object at a dotted `path` is not as expected, in words; `None` if it is.

    Args:
        path (`str`): of a module, class, function or method.
        parameters (`str`): names of the leading parameters of a function, without `self`.
        mentions (`tuple[str, ...]`): names of attributes and keys that the function's own code reads or sets.
    """
    found = _lookup(path)
    if found is None:
        return f"{path} does not exist"
    if parameters:
        names = [name for name in inspect.signature(found).parameters if name != "self"]
        if tuple(names[: len(parameters)]) != parameters:
            return f"{path} takes ({', '.join(names)}) instead of ({', '.join(parameters)}, ...)"
    if mentions:
        code = inspect.unwrap(found).__code__
        unknown = [name for name in mentions if name not in {*code.co_names, *code.co_consts}]
        if unknown:
            return f"{path} makes no use of {', '.join(unknown)}"
    return None


def require(path: str, *parameters: str, mentions: tuple[str, ...] = ()) -> Any:
    """The object at a dotted path; a [`difference`] from what is expected is an error at the end of this file."""
    problem = difference(path, *parameters, mentions=mentions)
    if problem is not None:
        _missing.append(problem)
    return _lookup(path)


def _lookup(path: str) -> Any:
    parts = path.split(".")
    for length in range(len(parts), 0, -1):
        try:
            found: Any = importlib.import_module(".".join(parts[:length]))
        except ModuleNotFoundError:
            continue
        for name in parts[length:]:
            found = getattr(found, name, None)
        return found
    return None


def raise_for_missing() -> None:
    """Raise `ImportError` if anything that was required is missing or has changed."""
    if _missing:
        raise ImportError(
            f"TRL {_installed_version()} is not as isopo_trl needs it: {'; '.join(_missing)}. It needs TRL "
            f"{TRL_RANGE}: {INSTALL}, or a newer isopo_trl."
        )


verify_version(_installed_version())
