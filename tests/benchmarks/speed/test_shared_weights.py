"""Shared weights with vLLM itself: what it reads and generates after each step is what it would have been sent."""

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests import tiny


ROOT = Path(__file__).parents[3]


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="needs vLLM, for a GPU or a CPU")
@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_vllm_generates_with_the_weights_of_each_step_as_if_they_had_been_sent(tmp_path, family):
    model = tiny.save(tmp_path / "model", family, dtype=torch.bfloat16)
    script, file = ROOT / "benchmarks" / "speed" / "shared_weights.py", tmp_path / "figures.json"
    options = ["--sequences", "8", "--completion", "16", "--output", str(file)]
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    subprocess.run([sys.executable, str(script), "--model", model, *options], check=True, env=env, cwd=tmp_path)
    figures = json.loads(file.read_text())
    assert figures["shared"]["is_shared"] and not figures["copies"]["is_shared"]
    for way in figures.values():  # the second step is taken back
        assert way["vllm_has_moved"] == [True, False, True]
    for step, same in figures["copies"]["as_shared"].items():
        assert same == {"bits": True, "tokens": True, "logps": True}, step
