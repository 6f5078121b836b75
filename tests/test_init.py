"""Importing the package checks the version of TRL."""

import subprocess
import sys
from pathlib import Path

import pytest


ROOT = Path(__file__).parents[1]


def import_with(version):
    """Import the package in a process that believes in this version of TRL; `None` for none installed."""
    code = f"""
import importlib.metadata as metadata
real = metadata.version
def pretend(name):
    if name != "trl":
        return real(name)
    if {version!r} is None:
        raise metadata.PackageNotFoundError(name)
    return {version!r}
metadata.version = pretend
import sys
sys.path.insert(0, {str(ROOT)!r})
import importlib.util
spec = importlib.util.find_spec("isopo_trl")
source = open(spec.origin).read().split("from .attach")[0]
exec(compile(source, spec.origin, "exec"))
print("accepted")
"""
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)


@pytest.mark.parametrize("version", ["1.16.0", "1.16.3", "1.17.0.dev0", "1.99.1"])
def test_supported_versions_are_accepted(version):
    assert import_with(version).stdout.strip() == "accepted"


@pytest.mark.parametrize("version", ["1.15.0", "2.0.0", "0.29.0", None])
def test_other_versions_are_refused_with_what_to_install(version):
    done = import_with(version)
    assert done.returncode != 0
    assert "ImportError" in done.stderr and 'pip install "trl>=1.16.0,<2.0.0"' in done.stderr
    assert (version or "not installed") in done.stderr
