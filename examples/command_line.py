"""
How the scripts of this folder read their arguments: the command line and the file after `--config`, together and once.

TRL's parser with three differences. An abbreviation is refused: what it stands for changes with the arguments that
there are. A mistake is a `ValueError` of one sentence, not a page of usage. What was given is told apart from what was
left to a default, since here the defaults depend on what was given.
"""

import json
import os
from argparse import Namespace
from collections.abc import Iterable
from difflib import get_close_matches
from types import UnionType
from typing import Any, NoReturn, Union, get_args, get_origin, get_type_hints

import yaml
from trl import TrlParser


NOT_GIVEN = object()


class Parser(TrlParser):
    """
    Args:
        dataclass_types (`Iterable[type]`): dataclasses, whose fields are the arguments.
        may_be_empty (`tuple[str]`): arguments for which an empty text has a meaning. For others it is a mistake, such
            as a shell variable that is not set.
        defaults: what `--help` shows where it is not the dataclass's own.
    """

    def __init__(self, dataclass_types: Iterable[type], may_be_empty: tuple[str, ...] = (), **defaults: Any):
        super().__init__(dataclass_types, allow_abbrev=False)
        self.types = {name: hint for kind in self.dataclass_types for name, hint in get_type_hints(kind).items()}
        self.may_be_empty = may_be_empty
        self.add_argument("--config", help="YAML file of arguments; the command line takes precedence.")
        self.set_defaults_with_config(**defaults)

    def error(self, message: str) -> NoReturn:
        raise ValueError(message)

    def given(self, arguments: list[str]) -> dict[str, Any]:
        """By name, what the arguments say, or else the file after `--config`; a default is never among them."""
        found = self._parsed(arguments)
        path = found.pop("config", None)
        if path is not None:
            try:
                found = {**self._of_file(path), **found}
            except ValueError as error:
                raise ValueError(f"{path}: {error}") from error
        for name, value in found.items():
            if value == "" and name not in self.may_be_empty:
                raise ValueError(f"--{name} is empty: give it a value, or leave it out.")
            if name.endswith("_kwargs") and isinstance(value, str) and not _is_object(value):
                raise ValueError(f"--{name} {value} is not a JSON object such as '{{\"name\": 1}}'.")
        return found

    def _parsed(self, words: list[str]) -> dict[str, Any]:
        nothing = Namespace(**{action.dest: NOT_GIVEN for action in self._actions})
        found, rest = self.parse_known_args(words, nothing)
        if rest:
            raise ValueError(self._unknown(next((word for word in rest if word.startswith("-")), rest[0])))
        return {name: value for name, value in vars(found).items() if value is not NOT_GIVEN}

    def _unknown(self, word: str) -> str:
        name = word.split("=")[0]
        plain = name.lstrip("-").replace("-", "_")
        known = [*self.types, "config"]
        close = [other for other in known if plain and other.startswith(plain)]
        close = close or get_close_matches(plain, known, cutoff=0.8)
        meant = f"did you mean --{' or --'.join(close[:3])}?" if close else "see --help."
        return f"{name} is not an argument of this script: {meant}"

    def _of_file(self, path: str) -> dict[str, Any]:
        settings = read_settings(path)
        environment = settings.pop("env", None) or {}
        if not isinstance(environment, dict):
            raise ValueError(f"`env` is {environment!r}, but should be a list of environment variables.")
        words, found = [], {}
        for name, value in settings.items():
            if name not in self.types:
                raise ValueError(self._unknown(name))
            kinds = _kinds(self.types[name])
            if name == "scale_rewards" and isinstance(value, bool):  # TRL knows what that means
                found[name] = value
            elif value is False and str in kinds:
                words.append(f"--{name}=no")  # as in `save_strategy: no`, which YAML takes for false
            elif value is not None and not isinstance(value, list | dict):
                words.append(f"--{name}={value}")
            elif type(value) not in kinds:
                raise ValueError(f"`{name}` is {value!r}, which is not a value that it can have.")
            elif isinstance(value, list) and str not in kinds:
                words += [f"--{name}", *map(str, value)]
            else:
                found[name] = value
        found |= self._parsed(words)
        os.environ.update({str(name): str(value) for name, value in environment.items()})
        return found


class _NoKeyTwice(yaml.SafeLoader):
    def construct_mapping(self, node, deep=False):
        seen = set()
        for key, _ in node.value:
            name = str(key.value).replace("-", "_")
            if name in seen:
                raise yaml.MarkedYAMLError(problem=f"`{key.value}` is there twice", problem_mark=key.start_mark)
            seen.add(name)
        return super().construct_mapping(node, deep)


def read_settings(path: str) -> dict[str, Any]:
    """The settings of a YAML file by name, with underscores where the file has hyphens."""
    try:
        with open(path, encoding="utf-8") as file:
            settings = yaml.load(file, _NoKeyTwice)
    except OSError as error:
        raise ValueError(f"the file cannot be read ({error.strerror}).") from error
    except (yaml.YAMLError, UnicodeDecodeError, RecursionError) as error:
        raise ValueError(f"this is not valid YAML: {error}") from error
    if not isinstance(settings, dict) or not all(isinstance(name, str) for name in settings):
        raise ValueError("this is not a list of settings: it should have lines such as `rule: fisher`.")
    return {name.replace("-", "_"): value for name, value in settings.items()}


def _is_object(text: str) -> bool:
    try:
        return isinstance(json.loads(text), dict)
    except (ValueError, RecursionError):
        return False


def _kinds(hint: Any) -> set[Any]:
    """The classes of which a value may be: those of `list[str] | None` are `list` and `NoneType`."""
    options = get_args(hint) if get_origin(hint) in (Union, UnionType) else (hint,)
    return {get_origin(option) or option for option in options}
