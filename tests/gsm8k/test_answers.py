"""Answers are read as a person would read them, whole or not at all, out of texts written by hand or to do harm."""

import re
import time
from decimal import Decimal
from fractions import Fraction
from pathlib import Path

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from isopo_trl.gsm8k import extract_answer, format_reward, gsm8k_reward


# Ways to write each number, two blanks apart
NUMBERS = {
    18: "18  018  +18  18.  18.00  $18  \\$18  € 18  USD18  Rs.18  18%  18\\%  18/hour  18e  36/2  36 / 2",
    72: "**72**  __72__  (72)  72 \\text{ cm}^{2}  72 cm²  72^\\circ  \\mathrm{72}  72 \\frac{\\text{km}}{\\text{h}}",
    1234: "1234  1,234  1 234  1{,}234  1\\,234  1\\ 234  1,\\!234  1\u202f234  1.234e3  1.234E+3",
    1200: "1200  1.2 × 10^3  1.2 \\times 10^{3}  12e2",
    1234567: "1,234,567  1 234 567",
    10**100 - 1: "9" * 100,
    Fraction(12): "1200e-2  12,000/1000",
    Fraction(1, 2): "0.5  .50  1/2  \\frac{1}{2}  \\dfrac{1}{2}  \\tfrac{ 1 }{ 2 }  \\frac12  ½  1⁄2",
    Fraction(5, 2): "2.5  5/2  2 1/2  2\\frac{1}{2}  2 \\frac{1}{2}  2½",
    -18: "-18  −18  –18  \u201118  \uff0d18  -$18  $-18  -₹18  (-18)  -(18)  -{18}  minus 18  -36/2",
    Fraction(-1, 2): "-.5  -1/2  -½  -\\frac{1}{2}  \\frac{-1}{2}",
}

# Two blanks apart, too: what is not a number, or more than one
NOT_NUMBERS = (
    "none  .  -  $  12,34  1,2,3  1,234,56  1234,567  0,5  1.2.3  .5.5  1/2/3  1 / 2 / 3  3/-4  3 7/4  1/0  1/0.00  "
    "\\frac{1}{0}  1e100  1e5e5  1_000  1'000  0x48  7２  ７2  １２  १२  72７ eggs  18²  2^10  2^{10}  2**10  x_1  "
    "x^2  \\sqrt{72}  3\\sqrt{2}  \\frac{x}{72}  \\frac{72}{x}  72\\pi  72π  72π eggs  ±72  |-72|  70-72  70 – 72  "
    "60 + 12  6 \\times 12  3:2  2024-05-12  x - 72  \ud800  \0"
).split("  ") + ["", " ", "9" * 101, "0." + "9" * 5000, "9" * 5000 + "/7", "9" + ",999" * 25, "9" + ",999" * 5000]

IN_TEXTS = [
    # After the last ####
    ("####18", 18),
    ("####\n\n18\n", 18),
    ("#### 18\nwhich is 9 twice", 18),
    ("#### 18\n#### 20", 20),
    ("#### 18\n\\boxed{20}", 18),
    ("18\n####", None),
    ("18\n#### I do not know", None),
    ("\\boxed{18}\n#### see above", None),
    ("#### Answer\n18", None),
    ("#### 72 " + "apples " * 1000 + "= 5", 72),
    ("#### " + "9" * 2000, None),
    # In the last box
    ("\\boxed{18}, in 2 weeks", 18),
    ("\\boxed{20} no, \\boxed{18}", 18),
    ("\\boxed{\\text{about } \\frac{1}{2} {cup}} of 3", Fraction(1, 2)),
    ("\\boxed{20} so 18 is \\boxed{}", None),
    ("5 \\boxed{18", None),
    ("\\boxed{{18}", None),
    # Of an equation, after a label, before a remark
    ("#### 60 + 12 = 70 + 2 = 72", 72),
    ("#### <<60+12=72>>72", 72),
    ("#### 72 = 60 + 12", 72),
    ("#### 10 + 62 =", None),
    ("#### x = 12,34", None),
    ("#### If we divide both sides by 4, we get x = 8, so she has 8", None),
    ("#### Step 5: the total for 3 shirts was $72", 72),
    ("#### 72. That is 6 * 12.", 72),
    ("#### 72 (since 100 = 72 + 28)", 72),
    ("#### seventy-two (72 apples)", 72),
    ("#### 3 (24)", None),
    ("#### 3(24)", None),
    ("#### 10 - (3 + 1)", None),
    # A minus that a blank separates from its number
    ("#### - 3", -3),
    ("#### x = - 3", -3),
    ("#### Answer - 3", 3),
    ("Things:\n- 3 apples", 3),
    # The last number
    ("<<16-3=13>>13", 13),
    ("They are 1, 2, 3", 3),
    ("Week 2 **18**", 18),
    ("It covers 18 m2", 18),
    ("x-3", 3),
    ("wait...18", 18),
    ("(16)-3", None),
    ("50%-3", None),
    ("10 - \\frac{3}{4}", None),
    ("18 of 12,34", None),
    ("18, then 1/0", None),
    ("5 and １２", None),
]


@pytest.mark.parametrize(("text", "value"), [(text, n) for n in NUMBERS for text in NUMBERS[n].split("  ")])
def test_a_number_is_read_in_each_of_the_three_places(text, value):
    assert extract_answer(text) == value and type(extract_answer(text)) is Fraction
    assert extract_answer(f"5 and 6\n#### {text}\n") == value
    assert extract_answer(f"5 and $\\boxed{{{text}}}$ and 6") == value
    assert extract_answer(f"5 and 6, so it is {text} altogether") == value


@pytest.mark.parametrize("text", NOT_NUMBERS)
def test_what_is_not_a_number_is_not_read_in_part(text):
    assert extract_answer(text) is None
    assert extract_answer(f"5 and 6\n#### {text}") is None
    assert extract_answer(f"5 and \\boxed{{{text}}} and 6") is None


@pytest.mark.parametrize(("text", "value"), IN_TEXTS)
def test_the_answer_stands_where_the_text_declares_it(text, value):
    assert extract_answer(text) == value


def test_the_page_says_what_is_read():
    page = (Path(__file__).parents[2] / "docs" / "gsm8k.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| (.*) \| (.*) \|$", page.split("## What is an answer")[1], re.MULTILINE)[1:]
    assert len(rows) == 10
    for texts, meaning in rows:
        value = None if meaning.startswith("no answer") else Fraction(meaning.partition(":")[0])
        for text in re.findall(r"`(.*?)`", texts):
            assert extract_answer(f"5\n#### {text}") == extract_answer(f"5 \\boxed{{{text}}} 6") == value, text


# Each way to write a number, with the denominators that it is able to write

integers = st.integers(-(10**30), 10**30)
cents = st.builds(lambda n: Fraction(n, 100), st.integers(-(10**12), 10**12))
fractions = st.builds(Fraction, st.integers(-(10**20), 10**20), st.integers(1, 10**20))


def mixed(value, separator=" {}/{}"):
    whole, part = divmod(abs(value), 1)
    sign = "-" if value < 0 else ""
    return f"{sign}{whole}{separator.format(part.numerator, part.denominator)}"


written = st.one_of(
    st.tuples(integers, st.sampled_from([str, "{:,}".format, "{}.".format, "{:,}.00".format, "{:,}%".format])),
    st.tuples(cents, st.sampled_from([lambda v: f"{Decimal(int(v * 100)) / 100:,f}", lambda v: f"{int(v * 100)}e-2"])),
    st.tuples(
        fractions,
        st.sampled_from(
            [
                str,
                lambda v: f"{v.numerator} / {v.denominator}",
                lambda v: f"\\frac{{{v.numerator}}}{{{v.denominator}}}",
                mixed,
                lambda v: mixed(v, "\\frac{{{}}}{{{}}}"),
            ]
        ),
    ),
).map(lambda pair: (Fraction(pair[0]), pair[1](pair[0])))
signs = st.sampled_from([lambda text: text, lambda text: re.sub("^-", "−", text), "${}".format])
places = st.sampled_from(["{}", "1 + 1 = 2\n#### {}", "#### {} dollars", "so \\boxed{{{}}}.", "5, so it is {} eggs."])


@given(written, signs, places)
def test_a_number_is_read_back_exactly(number, sign, place):
    value, text = number
    text = place.format(sign(text))
    assert extract_answer(text) == value
    assert gsm8k_reward([text] * 2, [str(value), str(value + 1)]) == [1.0, 0.0]


@settings(max_examples=40)
@given(st.text(), st.text(alphabet="0123456789.,/-−+$%#eE \n\\boxed{}frac"))
def test_no_text_raises(anything, likely):
    for text in (anything, likely, f"{anything}#### {likely}", f"\\boxed{{{likely}}}{anything}"):
        value = extract_answer(text)
        assert value is None or type(value) is Fraction
        assert gsm8k_reward([text], [1], prompts=[anything]) in ([0.0], [1.0])


@given(st.text(alphabet="019.,/-$% \n#x", max_size=12), st.sampled_from(["", "x\n", "#", " "]))
@example("1", "")
def test_what_has_the_format_has_an_answer(likely, before):
    text = f"{before}#### {likely}"
    if format_reward([text]) == [1.0]:
        assert extract_answer(text) is not None
        assert "\n" not in likely.strip() and "x" not in likely and "#" not in likely


@given(st.integers(0, 2000), st.integers(0, 2000), st.sampled_from(["x", " ", "(", "\n"]))
def test_what_surrounds_a_number_at_any_distance_is_left_alone(before, after, filler):
    assert extract_answer(filler * before + " 1,234 " + filler * after) == 1234


LENGTH = 200_000
SLOW = (
    "1,  1,␠  1.1,  9  9␠  1/  1␠1/1␠  1e  -  -␠$␠  (  #  {  {}  \\boxed{  \\frac{1}  \\  x  ␠  \n  ²  ½  ７  =  "
    "x␠=␠1␠=␠  is␠1␠are␠  x:␠  x:1  1␠(a)␠  (a␠  111␠  a^2␠  <<"
).split("  ")


@pytest.mark.parametrize("piece", SLOW)
def test_time_is_linear_in_the_length_of_a_text(piece):
    def seconds(part):
        start = time.process_time()
        for before in ("", "5 ", "#### ", "\\boxed{", "-\\frac{"):
            gsm8k_reward([before + part, part + before, before + part + "}"], [1, "1", "#### 1"], prompts=[part] * 3)
            format_reward([before + part, part + before])
        return time.process_time() - start

    piece = piece.replace("␠", " ")
    text = piece * (LENGTH // len(piece))
    short = text[: LENGTH // 100]
    # As many characters in a hundred pieces; a quadratic time would be a hundred times longer for the whole
    assert seconds(text) < 30 * sum(seconds(short) for _ in range(100))
