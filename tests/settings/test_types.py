"""Types of settings: what is taken, as what, and for which annotations."""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
from transformers import HfArgumentParser

from isopo_trl.settings.types import type_fields, typed


@pytest.mark.parametrize(
    "value, annotation, expected",
    [
        (1, float, 1.0),
        (Fraction(1, 2), float, 0.5),
        (np.float32(0.5), float | None, 0.5),
        (np.int64(3), int, 3),
        (np.bool_(True), bool, True),
        (None, float | None, None),
        (np.str_("text"), "str", "text"),
        (2, "float | None", 2.0),
        (2, float | Any, 2.0),
        # No simple type: anything goes
        ("2", int | str, "2"),
        ([2], list[int], [2]),
    ],
    ids=str,
)
def test_a_value_becomes_pythons_own(value, annotation, expected):
    found = typed("strength", value, annotation)
    assert found == expected and type(found) is type(expected)


@pytest.mark.parametrize(
    "value, annotation, expected",
    [
        (True, float, "strength=True is of type bool: give a number."),
        (True, "int", "strength=True is of type bool: give a whole number."),
        ("1", "float | Any", "strength='1' is of type str: give a number."),
        (1.0, int, "strength=1.0 is of type float: give a whole number."),
        (1j, float | None, "strength=1j is of type complex: give a number or None."),
        (0, bool, "strength=0 is of type int: give True or False."),
        (None, str, "strength=None is of type NoneType: give a text."),
        (np.ones(2), float, "strength=array([1., 1.]) is of type ndarray: give a number."),
        (10**400, float, f"strength=1{'0' * 27}...{'0' * 29} is too large: give a number that a float can hold."),
    ],
    ids=lambda value: str(value)[:30],
)
def test_a_value_of_another_type_is_refused_in_one_short_line(value, annotation, expected):
    with pytest.raises(ValueError) as error:
        typed("strength", value, annotation)
    assert str(error.value) == expected


def test_all_fields_or_those_named_are_typed_but_for_defaults_of_the_class():
    @dataclass(frozen=True)
    class Settings:
        strength: float = None
        count: int = 1

    settings = Settings(count=np.int64(2))
    type_fields(settings)
    assert settings.strength is None and type(settings.count) is int
    with pytest.raises(ValueError, match="count='2'"):
        type_fields(Settings(count="2"))
    type_fields(Settings(count="2"), ["strength"])


def test_what_is_optional_stays_so_after_a_command_line_was_read():
    """Transformers' parser replaces the types of the fields of the class."""

    @dataclass
    class Settings:
        share: float | None = 0.5

    HfArgumentParser(Settings).parse_args_into_dataclasses(["--share", "1"])
    settings = Settings(None)
    type_fields(settings)
    assert settings.share is None
