"""Tests that run completions are skipped on machines that cannot confine them, where running them is refused."""

import pytest

from isopo_trl.coding import Limits
from isopo_trl.coding.sandbox import Confined


def reason():
    try:
        Confined("", "", Limits()).end()
    except RuntimeError as error:
        return str(error)
    return ""


REASON = reason()
confines = pytest.mark.skipif(bool(REASON), reason=REASON)
