import os
from pathlib import Path

import pytest
from filelock import FileLock

from tests.distributed.process_group import launch


@pytest.fixture(scope="session")
def launched(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """
    The folder with what the quick runs of this folder's files have left, those that have a test to be run: all in one
    launch, most of which is spent on imports. A file says in `groups(folder)` which ranks it needs, and where each
    group writes to.
    """
    folder = tmp_path_factory.getbasetemp()
    if "PYTEST_XDIST_WORKER" in os.environ:
        folder = folder.parent  # which the workers share
    folder /= "distributed"
    with FileLock(f"{folder}.lock"):
        if not folder.exists():
            folder.mkdir()
            files = {item.path: item.module for item in request.session.items if isinstance(item, pytest.Function)}
            groups = [files[path].groups for path in sorted(files) if hasattr(files[path], "groups")]
            launch(*(group for of in groups for group in of(folder)))
    return folder
