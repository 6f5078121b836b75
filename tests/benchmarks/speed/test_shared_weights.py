"""Shared weights with vLLM itself: what it reads and generates after each step is what it would have been sent."""

import importlib.util
import json
import os
import subprocess
import sys
from contextlib import nullcontext
from pathlib import Path

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from tests import tiny


ROOT = Path(__file__).parents[3]
# Heads of a size that vLLM has kernels for
SIZE = {"hidden_size": 128, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 2, "head_dim": 64}
SIZE |= {"num_key_value_heads": 1, "vocab_size": tiny.SIZE["vocab_size"], "max_position_embeddings": 512}


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="needs vLLM, for a GPU or a CPU")
@pytest.mark.parametrize(("family", "tied"), [("llama", False), ("qwen2", True), ("qwen3", False)])
def test_vllm_generates_with_the_weights_of_each_step_as_if_they_had_been_sent(tmp_path, family, tied):
    config = AutoConfig.for_model(family, **SIZE, **tiny.IDS, tie_word_embeddings=tied)
    model, file = tmp_path / "model", tmp_path / "figures.json"
    AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).save_pretrained(model)
    tiny.tokenizer().save_pretrained(model)
    script = ROOT / "benchmarks" / "speed" / "shared_weights.py"
    options = ["--model", str(model), "--sequences", "8", "--completion", "16", "--output", str(file)]
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    subprocess.run([sys.executable, str(script), *options], check=True, env=env, cwd=tmp_path)
    figures = json.loads(file.read_text())
    assert figures["shared"]["is_shared"] and not figures["copies"]["is_shared"]
    for way in figures.values():  # the second step is taken back
        assert way["vllm_has_moved"] == [True, False, True]
    compared = figures["copies"]["as_shared"]
    assert compared == {f"step{number}": {"bits": True, "tokens": True, "logps": True} for number in range(4)}


@pytest.mark.parametrize(("failing", "code"), [(("shared", "copies"), 1), (("copies",), None)], ids=str)
def test_it_fails_where_every_way_has_failed(failing, code, importable, tmp_path, monkeypatch):
    import shared_weights

    def run(way, folder):
        if way not in failing:
            (folder / f"{way}.json").write_text("{}")
        return subprocess.CompletedProcess([], 3 if way in failing else 0)

    file = tmp_path / "figures.json"
    monkeypatch.setattr(shared_weights, "run", run)
    monkeypatch.setattr(sys, "argv", ["shared_weights.py", "--model", "unused", "--output", str(file)])
    with pytest.raises(SystemExit) if code else nullcontext() as info:
        shared_weights.main()
    assert code is None or info.value.code == code
    assert {way for way, figures in json.loads(file.read_text()).items() if figures == {"exit": 3}} == set(failing)
