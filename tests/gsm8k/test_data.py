"""GSM8K's format: what is read, what is refused and in which words, and the prompts made of it."""

import json

import pytest
from datasets import Dataset

from isopo_trl.gsm8k.data import as_prompts, load_gsm8k, read_problems, verified


ROWS = [{"question": f"What is {n} + 1?", "answer": f"{n} + 1 = {n + 1}\n#### {n + 1}"} for n in range(20)]


def write(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


@pytest.mark.parametrize(("size", "kept"), [(20, 18), (2, 1)])
def test_a_file_is_read_and_its_last_tenth_held_out(size, kept, tmp_path):
    train, test = load_gsm8k(write(tmp_path / "problems.jsonl", ROWS[:size]))
    assert train.to_list() == ROWS[:kept] and test.to_list() == ROWS[kept:size]


def test_a_folder_is_read_split_by_split(tmp_path):
    write(tmp_path / "train.jsonl", ROWS[:5])
    with pytest.raises(ValueError, match="test.jsonl does not exist"):
        load_gsm8k(str(tmp_path))
    write(tmp_path / "test.jsonl", ROWS[5:7])
    train, test = load_gsm8k(str(tmp_path))
    assert train.to_list() == ROWS[:5] and test.to_list() == ROWS[5:7]


def test_other_columns_blank_lines_and_bare_numbers_are_taken(tmp_path):
    path = tmp_path / "problems.jsonl"
    path.write_text('\n{"question": "1 + 1?", "answer": 2, "level": "easy"}\n\n{"question": "é?", "answer": "1,000"}')
    rows = [{"question": "1 + 1?", "answer": "2"}, {"question": "é?", "answer": "1,000"}]
    assert read_problems(str(path)).to_list() == rows


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (None, "problems.jsonl cannot be read"),
        (b"", "problems.jsonl is empty"),
        (b"\xff\xfe\x00", "problems.jsonl is not a text in UTF-8"),
        (b'{"question": "?", "answer": 1}', "problems.jsonl has 1 problems: at least 2 are needed"),
        (b'\n{"question": "?"', "problems.jsonl, line 2 is not valid JSON"),
        (b"\n[1, 2]", "problems.jsonl, line 2 is not a JSON object"),
        (b'\n{"question": "?"}', r"line 2 has no 'answer' \(it has question\)"),
        (b'\n{"problem": "?", "answer": "2"}', r"line 2 has no 'question' \(it has problem, answer\)"),
        (b'\n{"question": "", "answer": "2"}', "line 2 has no 'question'"),
        (b'\n{"question": "?", "answer": "2 #### none"}', "line 2 has an answer without a number: '2 #### none'"),
    ],
)
def test_what_cannot_be_read_is_named(content, words, tmp_path):
    path = tmp_path / "problems.jsonl"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(ValueError, match=words):
        load_gsm8k(str(path))


def test_data_sets_that_are_nowhere_or_have_other_columns_or_no_number_are_refused():
    with pytest.raises(ValueError, match="'no/such-data' is neither a file nor could it be loaded from the Hub"):
        load_gsm8k("no/such-data")
    with pytest.raises(ValueError, match="no column 'question', only prompt, answer"):
        verified(Dataset.from_list([{"prompt": "1 + 1?", "answer": "2"}]), "some/data, train")
    rows = [ROWS[0], {"question": "Who?", "answer": "Nobody."}]
    with pytest.raises(ValueError, match="some/data, train, row 1 has an answer without a number: 'Nobody.'"):
        verified(Dataset.from_list(rows), "some/data, train")


@pytest.mark.parametrize("template", [None, "{question} Write it in \\boxed{}."])
@pytest.mark.parametrize("instruction", ["Be brief.", "", None])
def test_prompts_are_conversations_or_text_and_keep_the_answer(instruction, template):
    problems, (first, *_) = Dataset.from_list(ROWS[:2]), ROWS
    system = [] if instruction is None else [{"role": "system", "content": instruction}]
    said = (template or "{question}").replace("{question}", first["question"])
    expected = {"prompt": [*system, {"role": "user", "content": said}], "answer": first["answer"]}
    assert as_prompts(problems, instruction, template=template)[0] == expected
    text = said if template else f"Problem: {said}\nSolution:"
    plain = as_prompts(problems, instruction, chat=False, template=template)[0]["prompt"]
    assert plain == (f"{instruction}\n\n{text}" if instruction else text)


def test_a_template_without_a_place_for_the_question_is_refused():
    with pytest.raises(ValueError, match="'{}' has no place for the question: write {question}"):
        as_prompts(Dataset.from_list(ROWS[:1]), template="{}")
