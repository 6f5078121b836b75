import shutil

import pytest

from tests import training
from tests.checkpoints import interrupted


@pytest.fixture(scope="session")
def saved(tmp_path_factory):
    """The output folder of a run with three checkpoints, to be copied."""
    folder = tmp_path_factory.mktemp("saved")
    training.build(folder, **interrupted.SETTINGS, max_steps=3).train()
    return folder


@pytest.fixture
def folder(saved, tmp_path):
    """A copy of the output folder of a run with three checkpoints."""
    return shutil.copytree(saved, tmp_path / "run")
