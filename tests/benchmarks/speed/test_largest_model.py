"""The largest model that trains is found by training, and limits that cannot be enough are not tried."""

import json
import re

import pytest
import torch


GIB = 2**30


@pytest.fixture(scope="module")
def largest_model(importable):
    import largest_model

    return largest_model


def test_a_case_that_fits_makes_its_steps_and_a_limit_below_what_is_sure_is_not_tried(
    largest_model, tmp_path, monkeypatch, capsys
):
    file = tmp_path / "largest.json"
    sure = 8 * largest_model.numbers("tiny") / GIB
    command = "--shapes tiny --methods plain-float32 --sequences 2 --length 16 --steps 2 --accumulation 1 --limits"
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(
        "sys.argv", ["largest_model.py", *command.split(), f"{0.9 * sure}", "24", "--output", str(file)]
    )
    largest_model.main()
    found = json.loads(file.read_text())["results"]["plain-float32"]["tiny"]
    assert found["limit"] == 24 and found["seconds"] > 0
    assert len(re.findall(r"^\| `fisher`, plain steps, float32 \| 24 GB", capsys.readouterr().out, re.MULTILINE)) == 1


def test_a_case_without_enough_memory_goes_on_to_the_next_limit(largest_model, monkeypatch):
    options = type("Options", (), {"limits": [24, 48, 80]})
    tried = []

    def train(*_):
        tried.append(len(tried))
        if len(tried) < 2:
            raise torch.OutOfMemoryError("out of memory")
        return {"seconds": 1.0}

    monkeypatch.setattr(largest_model, "train", train)
    # 8B parameters of 8 bytes do not fit in 48 GB
    assert largest_model.smallest("plain-float32", "8b", options) == {"limit": None} and len(tried) == 1
    assert largest_model.smallest("plain-float32", "4b", options) == {"limit": 48, "seconds": 1.0}
