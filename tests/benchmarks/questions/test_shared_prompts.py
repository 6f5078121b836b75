"""What sharing prompts could save is counted position by position."""

import json

import pytest

from tests import tiny


@pytest.fixture(scope="module")
def shared_prompts(importable):
    import shared_prompts

    return shared_prompts


def test_shares_are_those_of_a_group_counted_one_by_one(shared_prompts):
    prompt, completion, group, head = 3, 5, 4, 0.5
    # Each position's work of a forward pass, in the first completion of the group and in the others
    row = [1 + head * (position >= prompt) for position in range(prompt + completion)]
    repeated, cost = (group - 1) * sum(row[:prompt]), group * sum(row)
    found = shared_prompts.shares(prompt, completion, group, head)
    expected = ((group - 1) * prompt / (group * len(row)), repeated / cost, repeated / (3 * cost))
    assert tuple(found) == pytest.approx(expected)


def test_the_table_is_of_the_prompts_of_the_file_and_of_the_models_own_matrices(
    shared_prompts, tmp_path, monkeypatch, capsys
):
    model, folder = tiny.model("qwen3", tie=False), tiny.save(tmp_path / "model", "qwen3")
    layers = sum(p.numel() for p in model.model.layers.parameters() if p.dim() == 2)
    assert shared_prompts.head_to_decoder(model.config) == pytest.approx(model.lm_head.weight.numel() / layers)
    rows = [{"question": question, "answer": "#### 2"} for question in ("1 + 1?", "What is 1 + 1?")]
    (tmp_path / "train.jsonl").write_text("\n".join(map(json.dumps, rows)))
    command = ["--data", tmp_path, "--model", folder, "--completions", 10, "--output", tmp_path / "out.json"]
    monkeypatch.setattr("sys.argv", ["shared_prompts.py", *map(str, command)])
    shared_prompts.main()
    figures = json.loads((tmp_path / "out.json").read_text())
    first, second = shared_prompts.prompt_lengths(str(tmp_path), str(folder))
    assert second - first == len("What is ") and figures["prompt"] == (first + second) / 2
    assert f"{figures['completions']['10.0']['positions']:.3f}" in capsys.readouterr().out
