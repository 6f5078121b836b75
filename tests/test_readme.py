"""What the README shows works as it stands."""

import os
import re
import subprocess
import sys
from pathlib import Path

import torch

from tests import oracle, tiny


ROOT = Path(__file__).parents[1]


def code_blocks():
    return re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), flags=re.DOTALL)


def test_the_loop_without_the_trainer_runs():
    (block,) = [block for block in code_blocks() if "isopo.microbatch" in block]
    model = tiny.model("qwen3")
    start = {name: p.clone() for name, p in model.named_parameters()}
    batches = []
    for seed in range(3):
        batch = oracle.random_batch([3, 1, 5, 4], [6, 8, 1, 4], 100, seed=seed)
        no_completion = torch.zeros_like(batch.prompt_mask)
        batches.append(
            {
                "input_ids": batch.input_ids,
                "attention_mask": batch.attention_mask,
                "completion_mask": torch.cat([no_completion, batch.completion_mask], dim=1),
                "advantages": batch.advantages.float(),
            }
        )
    names = {"model": model, "batches": batches, "optimizer": torch.optim.AdamW(model.parameters(), lr=1e-3)}
    exec(block, names)
    assert all(names["isopo"]._running.known)
    for name, p in model.named_parameters():
        assert torch.isfinite(p).all() and not torch.equal(p, start[name]), name


def test_the_other_blocks_are_valid_and_name_what_exists():
    for block in code_blocks():
        compile(block, "README.md", "exec")
        for names in re.findall(r"from isopo_trl import (.*)", block):
            exec(f"from isopo_trl import {names}", {})


def test_the_quick_start_runs(tmp_path):
    command = [sys.executable, str(ROOT / "examples" / "quickstart.py"), "--max_steps=2", "--logging_steps=1"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-2000:]
    assert "model.layers.0.self_attn.q_proj.weight" in done.stdout
    assert "Greedy completions after training" in done.stdout
