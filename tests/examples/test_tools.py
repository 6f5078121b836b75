"""`examples/tools.py`: a calculator that runs nothing but arithmetic, templates for TRL's tool loop, a run."""

import json
import re
import sys
from pathlib import Path

import pytest
from trl.chat_template_utils import is_chat_template_prefix_preserving, parse_response, supports_tool_calling

from tests import tiny


EXAMPLES = Path(__file__).parents[2] / "examples"


@pytest.fixture(scope="module")
def tools():
    sys.path.insert(0, str(EXAMPLES))
    try:
        import tools

        yield tools
    finally:
        sys.path.remove(str(EXAMPLES))


# The calculator


@pytest.mark.parametrize(
    ("expression", "value"),
    [
        ("417 * 283", "118011"),
        (" 12 * (3 + -4) ", "-12"),
        ("6 / 2", "3"),
        ("1 / 3", "0.333333333333"),
        ("17 // 5 + 17 % 5", "5"),
        ("2 ** 0.5 * 2 ** -1", "0.707106781187"),
        ("10 ** 50 % 7", str(10**50 % 7)),
        ("2 ** -10 ** 40", "0"),
        (7, "7"),
    ],
)
def test_the_calculator_computes(expression, value, tools):
    assert tools.calculator(expression) == value


@pytest.mark.parametrize(
    ("expression", "said"),
    [
        ("9**9**9", "larger than 1e+50"),
        ("9.5**9**9", "larger than 1e+50"),
        ("10**49 * 11 * 10", "larger than 1e+50"),
        ("1e400", "larger than 1e+50"),
        ("(1 / 10**20) ** -9", "larger than 1e+50"),
        ("0.5 ** -10**30", "larger than 1e+50"),
        ("1 / (2 - 2)", "division by zero"),
        ("(-8) ** 0.5", "not a real number"),
        ("__import__('os').getcwd()", "only numbers"),
        ("abs(-1)", "only numbers"),
        ("True + 1", "only numbers"),
        ("1 if 1 else 2", "only numbers"),
        ("1 << 9999", "only numbers"),
        ("'9' * 9", "only numbers"),
        ("12,345", "only numbers"),
        ("2 +", "not an arithmetic expression"),
        ("(" * 150, "not an arithmetic expression"),
        ("1\0", "not an arithmetic expression"),
        ("", "has 0 characters: give 1 to 200"),
        ("1" * 201, "has 201 characters"),
    ],
)
def test_the_calculator_refuses_the_rest_in_a_sentence(expression, said, tools):
    with pytest.raises(ValueError) as error:
        tools.calculator(expression)
    assert said in str(error.value) and "\n" not in str(error.value)


# Templates


@pytest.fixture(scope="module")
def tokenizer(tools):
    """The tiny one, with the tokens and templates of the small model."""
    result = tiny.tokenizer()
    result.add_special_tokens({"additional_special_tokens": ["<|im_start|>", "<|im_end|>"]})
    result.eos_token = "<|im_end|>"
    result.chat_template, result.response_template = tools.CHAT_TEMPLATE, tools.RESPONSE_TEMPLATE
    return result


def test_what_is_shown_is_what_trl_reads_and_builds(tools, tokenizer):
    assert supports_tool_calling(tokenizer) and is_chat_template_prefix_preserving(tokenizer)
    row = tools.products("train")[0]
    for calls in (True, False):
        messages = tools.worked(row, calls)
        whole = tokenizer.apply_chat_template(
            messages, tools=[tools.calculator], return_dict=True, return_assistant_tokens_mask=True
        )
        prompt = tokenizer.apply_chat_template(
            row["prompt"], tools=[tools.calculator], add_generation_prompt=True, return_dict=False
        )
        ids, said = whole["input_ids"], whole["assistant_masks"]
        assert ids[: len(prompt)] == prompt and not any(said[: len(prompt)])
        turns = tokenizer.decode([token for token, own in zip(ids, said, strict=True) if own]).split("<|im_end|>")
        assert turns.pop() == "" and turns[-1] == row["answer"] and len(turns) == 1 + calls
        first = ids[len(prompt) : ids.index(tokenizer.eos_token_id, len(prompt)) + 1]
        parsed = parse_response(tokenizer, first, prefix=prompt, tools=[tools.calculator])
        assert (
            parsed.get("tool_calls") == messages[1].get("tool_calls") and parsed["content"] == messages[1]["content"]
        )
    assert "calculator(expression): Value of an arithmetic expression." in tokenizer.decode(prompt)


def test_problems_are_products_that_are_not_in_both_parts(tools):
    train, test = tools.products("train"), tools.products("test")
    assert len(set(train["expression"])) == len(train) and len(test) == 200
    assert not set(train["expression"]) & set(test["expression"])
    assert all(tools.calculator(row["expression"]) == row["answer"] for row in test)


def test_calls_are_counted_and_the_last_message_is_rewarded(tools):
    def says(text, *others):
        return {"role": "assistant", "content": text, **dict(others)}

    call = says("", ("tool_calls", [{"type": "function"}]))
    number, error = ({"role": "tool", "content": text} for text in ("12", "{'error': 'division by zero'}"))
    completions = [[call, number, says("12")], [call, error, says("12")], [says("<tool_call>{13")], [call, number]]
    completions += [[says("13")]]
    figures = {}
    rewards = tools.right_number(completions, ["12"] * 5, log_metric=figures.__setitem__)
    assert rewards == [1.0, 1.0, 0.0, 0.0, 0.0] and figures == {"calls/tried": 0.8, "calls/valid": 0.4}


# A run


def test_a_run_logs_calls_and_validates(tools, tokenizer, tmp_path, capfd):
    model = tiny.model("qwen3")
    model.resize_token_embeddings(len(tokenizer))
    model.config.eos_token_id = model.generation_config.eos_token_id = tokenizer.eos_token_id
    for part in (model, tokenizer):
        part.save_pretrained(tmp_path / "model")
    arguments = [f"--model_name_or_path={tmp_path / 'model'}", f"--output_dir={tmp_path / 'out'}", "--shown_steps=1"]
    arguments += ["--max_steps=1", "--per_device_train_batch_size=2", "--num_generations=2", "--validation_size=2"]
    assert tools.main([*arguments, "--max_completion_length=4", "--save_strategy=no"]) == 0
    log = json.loads((tmp_path / "out" / "trainer_state.json").read_text())["log_history"]
    assert [line["step"] for line in log if "validation/accuracy" in line] == [0, 1]
    (line,) = (line for line in log if "reward" in line)
    assert line["calls/tried"] == line["calls/valid"] == line["tools/call_frequency"] == 0
    printed = capfd.readouterr()
    assert "shown    1  loss " in printed.out and (tmp_path / "out" / "curves.png").exists()
    assert re.search(r"calls   valid  trend$", printed.out, re.MULTILINE), printed.out
    assert re.search(r"^ *1/1 .*  0\.000   0\.000  .$", printed.out, re.MULTILINE), printed.out
    assert tools.main([*arguments, "--validation_size=201"]) == 2
    assert "tools.py: --shown_steps 1 must be at least 0" in capfd.readouterr().err
