"""What would be uploaded to an index is whole, and works where there is no clone."""

import os
import re
import shutil
import subprocess
import sys
import tarfile
import zipfile
from email import message_from_bytes
from importlib.metadata import version
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet

from isopo_trl import __version__
from isopo_trl.trl_seam.required import TRL_RANGE


ROOT = Path(__file__).parents[1]
NAME = f"isopo_trl-{__version__}"
NOT_COMMITTED = (".*", "__pycache__", "build", "dist", "outputs", "site", "*.egg-info")
BUILD = "import sys; from setuptools import build_meta; getattr(build_meta, sys.argv[1])(sys.argv[2])"
# What a user does first, and the program that comes with it
USE = """
import runpy, sys
import isopo_trl, isopo_trl.coding, isopo_trl.gsm8k, isopo_trl.validation

print(isopo_trl.__file__, isopo_trl.__version__)
isopo_trl.ISOPOConfig(output_dir="outputs", target_kl=2e-4, use_cpu=True, bf16=False)
sys.argv = [sys.argv[1], "--help"]
runpy.run_path(sys.argv[0], run_name="__main__")
"""


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    """Folder with the source distribution, and the wheel that is made of it alone."""
    pytest.importorskip("setuptools", minversion="77", reason="needs setuptools 77")
    folder = tmp_path_factory.mktemp("distribution")
    shutil.copytree(ROOT, folder / "clone", ignore=shutil.ignore_patterns(*NOT_COMMITTED))

    def build(kind, source):
        command = [sys.executable, "-c", BUILD, kind, str(folder)]
        done = subprocess.run(command, cwd=source, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr

    build("build_sdist", folder / "clone")
    with tarfile.open(folder / f"{NAME}.tar.gz") as archive:
        # What Pythons of before 3.11.4 do not know, and those of today ask for
        safely = {"filter": "data"} if hasattr(tarfile, "data_filter") else {}
        archive.extractall(folder / "unpacked", **safely)
    build("build_wheel", folder / "unpacked" / NAME)
    return folder


def names(built):
    with zipfile.ZipFile(built / f"{NAME}-py3-none-any.whl") as wheel:
        return wheel.namelist()


def test_the_wheel_has_the_whole_package_and_nothing_else(built):
    own = {str(path.relative_to(ROOT)) for path in (ROOT / "isopo_trl").rglob("*") if path.suffix in (".py", ".typed")}
    assert "isopo_trl/py.typed" in own and "isopo_trl/kernels/linear.py" in own
    assert {name for name in names(built) if not name.startswith(f"{NAME}.dist-info/")} == own


def test_the_source_distribution_has_the_package_and_what_it_is_built_from(built):
    with tarfile.open(built / f"{NAME}.tar.gz") as archive:
        top = {name.split("/")[1] for name in archive.getnames() if "/" in name}
    assert top >= {"README.md", "LICENSE", "setup.cfg", "pyproject.toml", "isopo_trl"}
    assert not top & {"tests", "examples", "benchmarks", "docs"}


def test_the_metadata_are_those_of_what_works_here(built):
    with zipfile.ZipFile(built / f"{NAME}-py3-none-any.whl") as wheel:
        metadata = message_from_bytes(wheel.read(f"{NAME}.dist-info/METADATA"))
    assert metadata["Name"] == "isopo-trl" and metadata["Version"] == __version__
    pythons = SpecifierSet(metadata["Requires-Python"])
    classified = re.findall(r"Python :: (\d\.\d+)", str(metadata))
    assert classified and all(python in pythons for python in classified)
    assert ".".join(map(str, sys.version_info[:3])) in pythons
    required = [Requirement(line) for line in metadata.get_all("Requires-Dist")]
    always = {one.name: one.specifier for one in required if one.marker is None}
    assert always["trl"] == SpecifierSet(TRL_RANGE)
    assert always.keys() >= {"torch", "transformers", "peft", "accelerate", "datasets"}
    if not os.environ.get("ISOPO_ANY_TRL"):
        for name, range_of_versions in always.items():
            assert range_of_versions.contains(version(name), prereleases=True), name
    assert metadata.get_payload().startswith("# isopo-trl")


def test_the_wheel_works_outside_of_the_clone(built, tmp_path):
    install = [
        sys.executable,
        "-m",
        "pip",
        "install",
        "-q",
        "--no-deps",
        "--no-index",
        "--target",
        str(tmp_path / "to"),
    ]
    done = subprocess.run([*install, str(built / f"{NAME}-py3-none-any.whl")], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    (tmp_path / "elsewhere").mkdir()
    program = tmp_path / "to" / "bin" / "isopo-compare"
    environment = {**os.environ, "PYTHONPATH": str(tmp_path / "to"), "HF_HUB_OFFLINE": "1"}
    command = [sys.executable, "-c", USE, str(program)]
    done = subprocess.run(command, cwd=tmp_path / "elsewhere", env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    first, *rest = done.stdout.splitlines()
    assert first == f"{tmp_path / 'to' / 'isopo_trl' / '__init__.py'} {__version__}"
    assert rest[0].startswith("usage: isopo-compare")
