"""The table of memory is that of whole models, and of the GPUs that they fit."""

import json
import re

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM


GIB = 2**30


@pytest.fixture(scope="module")
def memory(importable):
    import memory

    return memory


def test_what_is_counted_is_that_of_the_whole_model(memory, tmp_path, monkeypatch, capsys):
    file = tmp_path / "memory.json"
    command = "--shapes tiny --depths 1 2 --microbatches 2x16 --lora 0 4 --dtype float32 --output"
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.argv", ["memory.py", *command.split(), str(file)])
    memory.main()
    results = json.loads(file.read_text())["results"]
    sizes = {"hidden_size": 256, "intermediate_size": 768, "num_hidden_layers": 4, "vocab_size": 4096, "head_dim": 64}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "tie_word_embeddings": False}
    config = AutoConfig.for_model("qwen3", **sizes, **heads)
    model = AutoModelForCausalLM.from_config(config, dtype="float32")
    numbers = sum(p.numel() for p in model.parameters())
    linear = [m for name, m in model.named_modules() if m.__class__.__name__ == "Linear" and name != "lm_head"]
    factors = sum(4 * (m.in_features + m.out_features) for m in linear)
    # A weight, its gradient and AdamW's two, of four bytes each
    counted = {"TINY, full": 4 * 4 * numbers, "TINY, LoRA r=4": 4 * (numbers + 4 * factors)}
    for model, expected in counted.items():
        for found in (by_method[m] for by_method in results[model].values() for m in ("grpo", "fisher")):
            assert found > expected if torch.cuda.is_available() else found == expected, model
    rows = re.findall(r"^\| TINY .*$", capsys.readouterr().out, flags=re.MULTILINE)
    assert len(rows) == 2 and rows[0].endswith(" 24 GB |")
    # What the file has is not measured again, and not mixed with what was measured otherwise
    monkeypatch.setattr(memory, "figures", None)
    memory.main()
    assert json.loads(file.read_text())["results"] == results
    monkeypatch.setattr("sys.argv", ["memory.py", *command.replace("2x16", "2x8").split(), str(file)])
    with pytest.raises(SystemExit, match="made in another way"):
        memory.main()


def test_a_gpu_is_named_that_has_room_to_spare(memory):
    assert memory.smallest_gpu(21 * GIB) == "24 GB" and memory.smallest_gpu(22 * GIB) == "40 GB"
    assert memory.smallest_gpu(100 * GIB) == "141 GB" and memory.smallest_gpu(130 * GIB) == "none of them"


def test_shapes_have_the_sizes_that_their_names_say(memory):
    import setting

    for shape in ("0.6b", "1.7b", "4b", "8b", "14b"):
        hidden, intermediate, layers, heads, kv_heads, vocabulary = setting.SHAPES[shape]
        attention = 128 * hidden * (2 * heads + 2 * kv_heads)
        numbers = layers * (attention + 3 * hidden * intermediate) + vocabulary * hidden * (
            2 - (shape in setting.TIED)
        )
        assert numbers / 1e9 == pytest.approx(float(shape.removesuffix("b")), rel=0.06), shape
