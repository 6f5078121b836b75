"""GSM8K's format: what is read, what is refused and in which words, and the prompts made of it."""

import json

import pytest
from datasets import Dataset

from isopo_trl.gsm8k.data import as_prompts, checked, load_gsm8k, read_problems


ROWS = [{"question": f"What is {n} + 1?", "answer": f"{n} + 1 = {n + 1}\n#### {n + 1}"} for n in range(20)]


def write(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def test_a_file_is_read_and_its_last_tenth_held_out(tmp_path):
    train, test = load_gsm8k(write(tmp_path / "problems.jsonl", ROWS))
    assert train.to_list() == ROWS[:18] and test.to_list() == ROWS[18:]


def test_a_small_file_still_has_a_problem_to_validate_with(tmp_path):
    train, test = load_gsm8k(write(tmp_path / "problems.jsonl", ROWS[:3]))
    assert (len(train), len(test)) == (2, 1)


def test_a_folder_is_read_split_by_split(tmp_path):
    write(tmp_path / "train.jsonl", ROWS[:5])
    write(tmp_path / "test.jsonl", ROWS[5:7])
    train, test = load_gsm8k(str(tmp_path))
    assert train.to_list() == ROWS[:5] and test.to_list() == ROWS[5:7]


def test_other_columns_blank_lines_and_bare_numbers_are_taken(tmp_path):
    path = tmp_path / "problems.jsonl"
    path.write_text('\n{"question": "1 + 1?", "answer": 2, "level": "easy"}\n\n{"question": "é?", "answer": "1,000"}')
    assert read_problems(str(path)).to_list() == [
        {"question": "1 + 1?", "answer": "2"},
        {"question": "é?", "answer": "1,000"},
    ]


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ('{"question": "1 + 1?", "answer": "#### 2"', "line 2 is not valid JSON"),
        ("[1, 2]", "line 2 is not a JSON object"),
        ('{"question": "1 + 1?"}', "line 2 has no 'answer' (it has question)"),
        ('{"problem": "1 + 1?", "answer": "2"}', "line 2 has no 'question' (it has problem, answer)"),
        ('{"question": "", "answer": "2"}', "line 2 has no 'question'"),
        ('{"question": "1 + 1?", "answer": "two"}', "line 2 has an answer without a number: 'two'"),
        ('{"question": "1 + 1?", "answer": "#### two, or 2"}', None),
        ('{"question": "1 + 1?", "answer": "2\\n#### none"}', "line 2 has an answer without a number"),
    ],
)
def test_a_bad_line_is_named(tmp_path, line, words):
    path = tmp_path / "problems.jsonl"
    path.write_text(json.dumps(ROWS[0]) + "\n" + line + "\n")
    if words is None:
        assert len(read_problems(str(path))) == 2
        return
    with pytest.raises(ValueError) as error:
        read_problems(str(path))
    assert words in str(error.value) and str(path) in str(error.value)


def test_files_that_cannot_be_read_are_named(tmp_path):
    with pytest.raises(ValueError, match="absent.jsonl cannot be read"):
        load_gsm8k(str(tmp_path / "absent.jsonl"))
    with pytest.raises(ValueError, match="is empty"):
        load_gsm8k(write(tmp_path / "empty.jsonl", []))
    with pytest.raises(ValueError, match="at least 2 are needed"):
        load_gsm8k(write(tmp_path / "one.jsonl", ROWS[:1]))
    (tmp_path / "bytes.jsonl").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ValueError, match="not a text in UTF-8"):
        load_gsm8k(str(tmp_path / "bytes.jsonl"))
    (tmp_path / "folder").mkdir()
    write(tmp_path / "folder" / "train.jsonl", ROWS)
    with pytest.raises(ValueError, match="test.jsonl does not exist"):
        load_gsm8k(str(tmp_path / "folder"))


def test_a_data_set_that_is_nowhere_gives_one_sentence():
    with pytest.raises(ValueError, match="'no/such-data' is neither a file nor could it be loaded from the Hub"):
        load_gsm8k("no/such-data")


def test_a_data_set_of_other_columns_or_without_a_number_is_refused():
    with pytest.raises(ValueError, match="no column 'question', only prompt, answer"):
        checked(Dataset.from_list([{"prompt": "1 + 1?", "answer": "2"}]), "some/data, train")
    rows = [ROWS[0], {"question": "Who?", "answer": "Nobody."}]
    with pytest.raises(ValueError, match="some/data, train, row 1 has an answer without a number: 'Nobody.'"):
        checked(Dataset.from_list(rows), "some/data, train")


def test_prompts_are_conversations_or_text_and_keep_the_answer():
    problems = Dataset.from_list(ROWS[:2])
    first = as_prompts(problems, "Be brief.")[0]
    assert first == {
        "prompt": [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "What is 0 + 1?"}],
        "answer": ROWS[0]["answer"],
    }
    assert as_prompts(problems, "")[0]["prompt"][0] == {"role": "system", "content": ""}
    plain = as_prompts(problems, "Be brief.", chat=False)[0]["prompt"]
    assert plain.startswith("Be brief.\n") and "What is 0 + 1?" in plain


def test_a_template_says_what_the_user_says():
    problems, template = Dataset.from_list(ROWS[:1]), "{question} Write it in \\boxed{}."
    text = "What is 0 + 1? Write it in \\boxed{}."
    assert as_prompts(problems, None, template=template)[0]["prompt"] == [{"role": "user", "content": text}]
    assert as_prompts(problems, "Be brief.", template=template)[0]["prompt"] == [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": text},
    ]
    assert as_prompts(problems, None, chat=False, template=template)[0]["prompt"] == text
    assert as_prompts(problems, "Be brief.", chat=False, template=template)[0]["prompt"] == f"Be brief.\n\n{text}"
    with pytest.raises(ValueError, match="'{}' has no place for the question: write {question}"):
        as_prompts(problems, template="{}")


def test_plain_text_is_the_same_with_an_empty_instruction_and_without_one():
    problems = Dataset.from_list(ROWS[:1])
    expected = "Problem: What is 0 + 1?\nSolution:"
    assert as_prompts(problems, "", chat=False)[0]["prompt"] == expected
    assert as_prompts(problems, None, chat=False)[0]["prompt"] == expected
