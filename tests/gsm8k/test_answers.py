"""Answers are read as a person would read them, whole or not at all, out of texts written by hand or to do harm."""

import re
import time
from decimal import Decimal
from fractions import Fraction
from pathlib import Path

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from isopo_trl.gsm8k import answers, extract_answer, format_reward, gsm8k_reward


HALF = Fraction(1, 2)
SOLUTION = "She sells 16 - 3 - 4 = <<16-3-4=9>>9 eggs a day.\nThat makes 9 * 2 = $<<9*2=18>>18.\n#### 18"

NUMBERS = [
    ("18", 18),
    ("0", 0),
    ("007", 7),
    ("+18", 18),
    ("5.", 5),
    ("5.00", 5),
    ("0.5", HALF),
    (".50", HALF),
    ("0.1", Fraction(1, 10)),
    ("1,000", 1000),
    ("1,234,567", 1234567),
    ("12,345.67", Fraction(1234567, 100)),
    ("$5.00", 5),
    ("\\$5.00", 5),
    ("€ 5", 5),
    ("50%", 50),
    ("50\\%", 50),
    ("-3", -3),
    ("- 3", -3),
    ("−3", -3),  # U+2212
    ("–3", -3),  # U+2013
    ("-.5", -HALF),
    ("-$5", -5),
    ("- $5", -5),
    ("$-5", -5),
    ("-₹1,000", -1000),
    ("(-3)", -3),
    ("1/2", HALF),
    ("-1/2", -HALF),
    ("30 / 5", 6),
    ("3.5/0.5", 7),
    ("1,000/4", 250),
    ("18/hour", 18),
    ("2 1/2", Fraction(5, 2)),
    ("-2 1/2", Fraction(-5, 2)),
    ("\\frac{3}{4}", Fraction(3, 4)),
    ("\\dfrac{3}{4}", Fraction(3, 4)),
    ("\\tfrac{ 3 }{ 4 }", Fraction(3, 4)),
    ("\\frac34", Fraction(3, 4)),
    ("-\\frac{3}{4}", Fraction(-3, 4)),
    ("\\frac{-3}{4}", Fraction(-3, 4)),
    ("2\\frac{1}{2}", Fraction(5, 2)),
    ("2 \\frac{1}{2}", Fraction(5, 2)),
    ("1{,}234", 1234),
    ("1\\,234", 1234),
    ("1,\\!234", 1234),
    ("1e5", 100000),
    ("1.5E+3", 1500),
    ("1e-3", Fraction(1, 1000)),
    ("1e", 1),
    ("1 234", 1234),
    ("1 234 567.5", Fraction(2469135, 2)),
    ("1\u202f234", 1234),
    ("1\\ 234", 1234),
    ("1.2 × 10^3", 1200),
    ("1.2 \\times 10^{-3}", Fraction(12, 10**4)),
    ("½", HALF),
    ("2½", Fraction(5, 2)),
    ("-2½", Fraction(-5, 2)),
    ("\u201172", -72),
    ("\uff0d72", -72),
    ("-{72}", -72),
    ("-(72)", -72),
    ("minus 72", -72),
    ("USD72", 72),
    ("Rs.72", 72),
    ("**72**", 72),
    ("__72__", 72),
    ("72 \\text{ cm}^{2}", 72),
    ("72 cm²", 72),
    ("72^\\circ", 72),
    ("\\mathrm{72}", 72),
    ("9" * 100, 10**100 - 1),
]

NOT_NUMBERS = [
    "",
    " ",
    "none",
    ".",
    "-",
    "$",
    "12,34",
    "1,2,3",
    "1,234,56",
    "1234,567",
    "0,5",
    "0,500",
    "1.2.3",
    ".5.5",
    "1/2/3",
    "1 / 2 / 3",
    "3/-4",
    "3 7/4",
    "1/0",
    "1/0.00",
    "0/0",
    "\\frac{1}{0}",
    "1e100",
    "1e5e5",
    "9" * 101,
    "0." + "9" * 5000,
    "9" * 5000 + "/7",
    "9" + ",999" * 25,
    "9" + ",999" * 5000,
    "so it is 9" + ",999" * 5000,
    "1_000",
    "1'000",
    "0x48",
    "7２",
    "７2",
    "18²",
    "2^10",
    "2^{10}",
    "2**10",
    "x_1",
    "x^2",
    "\\sqrt{72}",
    "3\\sqrt{2}",
    "\\frac{x}{72}",
    "72\\pi",
    "72π",
    "±72",
    "|-72|",
    "70-72",
    "70 – 72",
    "60 + 12",
    "6 \\times 12",
    "3:2",
    "2024-05-12",
    "x - 72",
    "١٢",
    "四",
    "１２",
    "²",
    "\ud800",
    "\0",
]

IN_TEXTS = [
    # After the last ####
    (SOLUTION, 18),
    ("#### 18", 18),
    ("####18", 18),
    ("##### 18", 18),
    ("####\n\n18\n", 18),
    ("#### **18**", 18),
    ("#### $\\boxed{18}$", 18),
    ("#### 18 dollars for 2 weeks", 18),
    ("#### The answer is 18.", 18),
    ("#### x = - 3", -3),
    ("#### 1, 2, 3", None),
    ("#### 18\nwhich is 9 twice", 18),
    ("#### 18\n#### 20", 20),
    ("#### 18\n\nQuestion: 1 + 1?\n#### 2", 2),
    ("\\boxed{20}\n#### 18", 18),
    ("#### 18\n\\boxed{20}", 18),
    ("18\n####", None),
    ("18\n#### I do not know", None),
    ("#### 18\n#### or not?", None),
    ("\\boxed{18}\n#### see above", None),
    ("#### Answer\n18", None),
    ("#### 12,34 or 5", None),
    # Of an equation, after a label, before a remark
    ("#### 10 + 62 = 72", 72),
    ("#### 3 * 24 = 72", 72),
    ("#### 72 = x", 72),
    ("#### 72 = 60 + 12", 72),
    ("#### 60 + 12 = 70 + 2", None),
    ("#### 10 + 62 =", None),
    ("#### x = 12,34", None),
    ("#### 5 = 12,34", None),
    ("#### 500 / 7 ≈ 71", 71),
    ("#### Step 5: 72", 72),
    ("#### Step 5: the total for 3 shirts is $72", 72),
    ("#### 72, which is 6 times 12", 72),
    ("#### 72 (since 100 = 72 + 28)", 72),
    ("#### 3 (24)", None),
    ("#### 3(24)", None),
    ("#### 72 or 73", None),
    ("#### 5 feet 6 inches", None),
    ("#### The 3 friends have 72 apples", None),
    ("#### 72 " + "apples " * 1000 + "= 5", 72),
    ("#### " + "9" * 2000, None),
    ("\\boxed{x_1 = 72}", 72),
    ("\\boxed{72 \\frac{\\text{km}}{\\text{h}}}", 72),
    # In the last box
    ("It is \\boxed{18}.", 18),
    ("\\boxed{18}, in 2 weeks", 18),
    ("\\boxed{20} no, \\boxed{18}", 18),
    ("\\boxed{x = 18}", 18),
    ("\\boxed{18\\text{ cm}^2}", 18),
    ("\\boxed{\\text{about } \\frac{1}{2} {cup}} of 3", HALF),
    ("\\boxed{\\$1{,}234}", 1234),
    ("\\boxed{20} so 18 is \\boxed{}", None),
    ("5 \\boxed{none} 6", None),
    ("5 \\boxed{18", None),
    ("\\boxed{{18}", None),
    # The last number
    ("9 * 2 = 18 dollars.", 18),
    ("So she makes 18", 18),
    ("She has 9. She makes $18.", 18),
    ("They are 1, 2, 3", 3),
    ("1 2 3", 3),
    ("5..7", 7),
    ("16-3", None),
    ("16 - 3", None),
    ("x-3", 3),
    ("(16)-3", None),
    ("50%-3", None),
    ("16-$3", None),
    ("from 10–20", None),
    ("the change is -3.", -3),
    ("the change is = - 3", -3),
    ("Things:\n- 3 apples", 3),
    ("\n- 3 apples", 3),
    ("<<16-3=13>>13", 13),
    ("it is -\\frac{3}{4} of it", Fraction(-3, 4)),
    ("take 2 1/2 cups", Fraction(5, 2)),
    ("10 - \\frac{3}{4}", None),
    ("total.18", 18),
    ("wait...18", 18),
    ("18 of 12,34", None),
    ("18, then 1/0", None),
    ("18, then " + "9" * 101, None),
    ("no number", None),
]


@pytest.mark.parametrize(("text", "value"), NUMBERS)
def test_a_number_is_read_in_each_of_the_three_places(text, value):
    assert extract_answer(text) == value
    assert extract_answer(f"5 and 6\n#### {text}\n") == value
    assert extract_answer(f"5 and $\\boxed{{{text}}}$ and 6") == value
    if not text.startswith("- "):  # a subtraction or a bullet, in prose
        assert extract_answer(f"5 and 6, so it is {text} altogether") == value


@pytest.mark.parametrize("text", NOT_NUMBERS)
def test_what_is_not_a_number_is_not_read_in_part(text):
    assert extract_answer(text) is None
    assert extract_answer(f"5 and 6\n#### {text}") is None
    assert extract_answer(f"5 and \\boxed{{{text}}} and 6") is None


@pytest.mark.parametrize(("text", "value"), IN_TEXTS)
def test_the_answer_stands_where_the_text_declares_it(text, value):
    assert extract_answer(text) == value


def test_the_answer_is_a_fraction():
    assert type(extract_answer("18")) is type(extract_answer("#### 1/2")) is Fraction


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
    st.tuples(fractions, st.sampled_from([str, lambda v: f"{v.numerator} / {v.denominator}", mixed])),
    st.tuples(
        fractions,
        st.sampled_from(
            [
                lambda v: f"\\frac{{{v.numerator}}}{{{v.denominator}}}",
                lambda v: f"{'-' if v < 0 else ''}\\dfrac{{{abs(v.numerator)}}}{{{v.denominator}}}",
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


@given(st.text(), st.text(alphabet="0123456789.,/-−+$%#eE \n\\boxed{}frac"))
def test_no_text_raises(anything, likely):
    for text in (anything, likely, f"{anything}#### {likely}", f"\\boxed{{{likely}}}{anything}"):
        value = extract_answer(text)
        assert value is None or type(value) is Fraction
        assert gsm8k_reward([text], [1], prompts=[anything]) in ([0.0], [1.0])
        assert gsm8k_reward([text], [1]) == [float(value == 1)]


@given(st.text(alphabet="019.,/-$% \n#x", max_size=12), st.sampled_from(["", "x\n", "#", " "]))
@example("#### 1", "")
def test_what_has_the_format_has_an_answer(likely, before):
    text = f"{before}#### {likely}"
    if format_reward([text]) == [1.0]:
        assert extract_answer(text) is not None
        assert "\n" not in likely.strip() and "x" not in likely and "#" not in likely


@given(st.integers(0, 2000), st.integers(0, 2000), st.sampled_from(["x", " ", "#", "(", "\n"]))
def test_what_surrounds_a_number_at_any_distance_is_left_alone(before, after, filler):
    assert extract_answer(filler * before + " 1,234 " + filler * after) == (
        None if filler == "#" and after >= 4 else 1234
    )


@given(
    st.text(alphabet="01289,.$ -+*=^xas\nminu\\t", max_size=16),
    st.sampled_from([" us 7", " is $1,234", " so 12 is", ""]),
)
@example("", "as minus 7")
@example("6 ", "\\times 12")
@example("a", " have 1,234 x 2")
def test_what_is_read_sooner_is_read_the_same(before, after):
    """As it is without the shorter ways."""
    for text in (before + after, f"#### {before}", f"#### {after}"):
        declared = answers.declared_answer(text)
        if declared is not None and answers._USUAL.fullmatch(declared):
            assert answers.read_answer(text) == answers._declared_number(declared)
        elif declared is None:
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(answers, "_USUAL_TAIL", re.compile("(?!)"))
                expected = answers.read_answer(text)
            assert answers.read_answer(text) == expected


MEGABYTES = [
    "1," * 500_000,
    "1, " * 333_333,
    "1.1," * 250_000,
    ",111" * 250_000,
    "9" * 1_000_000,
    "9 " * 500_000,
    "1/" * 500_000,
    "1 / " * 250_000,
    "1e" * 500_000,
    "-" * 1_000_000,
    "- $ " * 250_000,
    "(" * 1_000_000,
    "#" * 1_000_000,
    "# " * 500_000,
    "{" * 1_000_000,
    "{}" * 500_000,
    "}" * 1_000_000,
    "\\boxed{" * 142_857,
    "\\frac{" * 166_666,
    "\\frac{1}" * 125_000,
    "\\frac 1 " * 125_000,
    "\\" * 1_000_000,
    "x" * 1_000_000,
    " " * 1_000_000,
    "\n" * 1_000_000,
    "²" * 1_000_000,
    "=" * 1_000_000,
    "x = 1 = " * 125_000,
    "is 1 are " * 111_111,
    "x: " * 333_333,
    "1 (" * 333_333,
    "1 (a) " * 166_666,
    "111 " * 250_000,
    "½" * 1_000_000,
    "a^2 " * 250_000,
]


@pytest.mark.parametrize("text", MEGABYTES, ids=lambda text: ascii(text[:8]))
def test_time_is_linear_in_the_length_of_a_text(text):
    def seconds(part):
        start = time.process_time()
        for before in ("", "5 ", "#### ", "\\boxed{", "5 #### -", "-\\frac{"):
            gsm8k_reward([before + part, part + before, before + part + "}"], [1, "1", "#### 1"], prompts=[part] * 3)
            format_reward([before + part, part + before])
        return time.process_time() - start

    short = text[: len(text) // 100]
    # As many characters in a hundred pieces; a quadratic time would be a hundred times longer for the whole
    assert seconds(text) < 30 * sum(seconds(short) for _ in range(100))


def test_the_page_says_what_is_read():
    page = (Path(__file__).parents[2] / "docs" / "gsm8k.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| (.*) \| (.*) \|$", page.split("## What is an answer")[1], re.MULTILINE)[1:]
    assert len(rows) == 10
    for texts, meaning in rows:
        value = None if meaning.startswith("no answer") else Fraction(meaning.partition(":")[0])
        for text in re.findall(r"`(.*?)`", texts):
            assert extract_answer(f"5\n#### {text}") == extract_answer(f"5 \\boxed{{{text}}} 6") == value, text


def test_no_group_is_repeated_possessively_which_python_before_3_11_5_gets_wrong():
    """There, `(?:ab?)?+` and the like match other texts, and rewards would depend on the patch release of Python."""
    patterns = {name: value.pattern for name, value in vars(answers).items() if isinstance(value, re.Pattern)}
    assert len(patterns) > 10
    repeated = re.compile(r"\)(?:[?*+]|\{[0-9,]+\})\+")
    assert [name for name, pattern in patterns.items() if repeated.search(pattern)] == []
