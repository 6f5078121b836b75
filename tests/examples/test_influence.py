"""`examples/influence.py`: its direction and figures, what it writes, and one sentence for whatever cannot work."""

import csv
import json
import sys
from pathlib import Path

import pytest
import torch

from tests import tiny


EXAMPLES = Path(__file__).parents[2] / "examples"
ROWS = [{"question": f"What is {n} + 1?", "answer": f"{n} + 1 = {n + 1}\n#### {n + 1}"} for n in range(12)]
QUICK = ["--per_device_train_batch_size=4", "--num_generations=2", "--max_completion_length=4", "--held_back=4"]
NUMBERS = ("reward", "advantage", "alignment", "plain", "influence")


@pytest.fixture(scope="module")
def influence():
    sys.path.insert(0, str(EXAMPLES))
    try:
        import influence

        yield influence
    finally:
        sys.path.remove(str(EXAMPLES))


@pytest.fixture
def given(tmp_path, influence, monkeypatch):
    """Arguments for a tiny model and small files of problems, and a reward that its noise can have."""
    for name in ("train", "test"):
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in ROWS))

    def reward(completions, **_):
        return tiny.reward([message["content"] for (message,) in completions])

    monkeypatch.setattr(influence.gsm8k, "correctness", lambda script_args: reward)
    model = tiny.save(tmp_path / "model", "qwen3")
    return [f"--model_name_or_path={model}", f"--dataset={tmp_path}", f"--output_dir={tmp_path / 'out'}", *QUICK]


def test_a_run_shows_the_completions_of_a_step_and_what_each_does_to_held_back_problems(
    influence, given, tmp_path, capfd, monkeypatch
):
    seen = {}

    class Seen(influence.Influence):
        def training_step(self, *args, **kwargs):
            try:
                return super().training_step(*args, **kwargs)
            finally:
                if self.accelerator.sync_gradients:
                    seen["step"] = {name: p.grad.clone() for name, p in self.model.named_parameters()}

    def direction(*args, of=influence.direction):
        seen["model"] = args[1]
        seen["start"] = {name: p.detach().clone() for name, p in args[1].named_parameters()}
        seen["D"], seen["held_back"] = of(*args)
        return seen["D"], seen["held_back"]

    monkeypatch.setattr(influence, "Influence", Seen)
    monkeypatch.setattr(influence, "direction", direction)
    table = tmp_path / "table.csv"
    assert influence.main([*given, "--steps_before=1", "--shown=6", "--format_weight=0", f"--table={table}"]) == 0
    printed = capfd.readouterr().out
    assert "Held back: 8 completions" in printed and "The step: 16 completions" in printed
    assert printed.count(" -> ") == 6 and "The 3 completions that help least" in printed
    with open(table, newline="") as file:
        rows = [{**row, **{name: float(row[name]) for name in NUMBERS}} for row in csv.DictReader(file)]
    assert [row["influence"] for row in rows] == sorted((row["influence"] for row in rows), reverse=True)
    assert all(row["plain"] == pytest.approx(row["advantage"] * row["alignment"], rel=1e-4) for row in rows)
    assert all(row["reward"] == pytest.approx(tiny.reward([row["completion"]])[0], abs=1e-5) for row in rows)
    # Together they are what the step's gradient does, and nothing has moved
    together = sum(float((seen["D"][name] * x).sum()) for name, x in seen["step"].items())
    assert sum(row["influence"] for row in rows) == pytest.approx(together, rel=1e-3)
    for name, p in seen["model"].named_parameters():
        assert torch.equal(p, seen["start"][name]), name


def test_the_direction_is_the_gradient_of_the_expected_reward_and_no_setting_of_training_is_in_it(influence, given):
    """By autograd through the log-probabilities of whole completions, each counted the same."""
    words = ["--loss_type=dapo", "--beta=0.1", "--rule=interacting", "--top_entropy_quantile=0.5"]
    words += ["--mask_truncated_completions=true", "--format_weight=0"]
    settings = {"held_back": 4} | influence.gsm8k.read_settings([*given, *words], influence.InfluenceArguments)
    arguments = influence.example_run.parsed(influence.InfluenceArguments, settings)
    _, held_out, tokenizer = influence.gsm8k.load(*arguments)
    model = tiny.model("qwen3")
    D, completions = influence.direction(settings, model, held_out.select(range(4)), tokenizer)
    assert len(completions) == 8 and len({c.prompt for c in completions}) == 4
    rewards = torch.tensor([c.reward for c in completions]).view(4, 2)
    weights = (rewards - rewards.mean(1, keepdim=True)).flatten() * 2 / 8  # 2 / (2 - 1) and a mean over 8
    questions = {row["prompt"][-1]["content"]: row["prompt"] for row in held_out}
    total = 0
    for c, weight in zip(completions, weights, strict=True):
        prompt = tokenizer.apply_chat_template(questions[c.prompt], add_generation_prompt=True, tokenize=True)
        prompt = prompt["input_ids"] if not isinstance(prompt, list) else prompt
        ids = torch.tensor([[*prompt, *c.tokens]])
        logps = model(ids).logits[0, :-1].log_softmax(-1).gather(1, ids[0, 1:, None])
        total = total - weight * logps[len(prompt) - 1 :].sum()
    expected = torch.autograd.grad(total, list(model.parameters()))
    for (name, _), x in zip(model.named_parameters(), expected, strict=True):
        torch.testing.assert_close(D[name], x, rtol=1e-3, atol=1e-5 * float(x.abs().max()), msg=name)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--rule=spring"], "rule='spring' has a direction of its own"),
        (["--trainer=grpo"], "--trainer grpo has no gradients of single completions"),
        (["--held_back=3"], "give a multiple of 2"),
        (["--held_back=14"], "more than the 12 problems"),
        (["--table=table.txt"], "--table table.txt must end in .csv or .json"),
    ],
    ids=str,
)
def test_what_cannot_work_is_said_in_a_sentence(words, said, influence, given, capfd):
    assert influence.main([*given, *words]) == 2
    assert said in capfd.readouterr().err
