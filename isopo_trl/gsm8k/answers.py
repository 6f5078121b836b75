r"""
The number that a text gives as its answer, read as a teacher would read it: whole, or not at all.

Numbers are fractions, without rounding. Patterns see a thousand characters at most, so that the time to read an answer
is linear in the length of the text, whatever the text.
"""

import re
from fractions import Fraction
from unicodedata import normalize


LONGEST_NUMBER = 100  # characters; Python refuses to read integers of more than 4300 digits
LONGEST_ANSWER = 1000  # characters of a declared answer that are read
BEFORE_LAST, AFTER_LAST = 128, 32  # characters that are read around the last digit of a text without such an answer

# One sign for what Unicode and LaTeX have many of; `√` stands for a formula, which is not read
_SAME = {"-": "‐‑‒–—―−﹣－", " ": "\u00a0\u2007\u2009\u202f", "=": "≈→⇒", "×": "·⋅", "/": "⁄", "√": "±π"}
_SIGNS = str.maketrans(
    {sign: plain for plain, signs in _SAME.items() for sign in signs}
    | {power: "^" + normalize("NFKC", power) for power in "²³"}
    | {part: "\\frac" + normalize("NFKC", part).replace("⁄", "") for part in "¼½¾⅓⅔⅕⅖⅗⅘⅙⅚⅛⅜⅝⅞"}
)
_PART, _UNIT = r" *(?:\{([- 0-9.,]+)\}|([0-9]))", r" *\{+([A-Za-z. ]+)\}+"
_LATEX = (
    (r"\\([$%])", r"\1"),
    (r"~|\\(?:[,;: ]|q?quad\b)", " "),
    (r"\\(?:(?:(?:text|math)[a-z]*|[fm]box|boxed|left|right|displaystyle)(?![A-Za-z])|[()\[\]!])", ""),
    (r"\\(?:approx|[rR]ightarrow)(?![A-Za-z])", "="),
    (r"\\(?:times|cdot)(?![A-Za-z])", "×"),
    (r"\^?\{?\\circ(?![A-Za-z])", "°"),
    (r"(?<=[0-9]) *(?=\\[dt]?frac)", " "),  # 2\frac{1}{2}
    (rf"\\[dt]?frac{_PART}{_PART}", r"\1\2/\3\4 "),
    (rf"\\[dt]?frac{_UNIT}{_UNIT}", r"\1/\2"),  # \frac{\text{km}}{\text{h}}
    (r"\\[A-Za-z]* *", "√"),  # any other command
    (r"[{}]", ""),
    (r"(?<=[0-9]) ?[×x*] ?10\^(?=[-+]?[0-9]{1,2}(?![0-9]))", "e"),
)

# A number, or else the whole run of digits and separators that is none ("12,34", "1.2.3", "1/2/3"), in which case no
# group is set. Digits within a name or power (x_1, m2, cm^2) are neither; after a currency's code they are a number.
_NUMBER = re.compile(
    r"""
    (?=[.0-9]) (?: (?<=USD|EUR|GBP|INR) | (?<=Rs) | (?<![A-Za-z0-9]) ) (?<![A-Za-z][_^]) (?<![0-9][.,_^])
    (?:
        (?: ([0-9]+) [ ]{1,2} (?=[0-9]+/[0-9]) )?                                                    # the 2 of 2 1/2
        (
            (?: [1-9][0-9]{0,2} (?: (?:,[0-9]{3})+ | (?:[ ][0-9]{3})+ (?![-0-9]|[ ]?/) ) | [0-9]+ )  # 1,234  1 234  12
            (?: [ ]?/[ ]? (?=0*[1-9]) [0-9]+ | (?: \.[0-9]+ )? (?: [eE][-+]?[0-9]{1,2} )? )
            | (?<![\w.]) \.[0-9]+                                                                  # .5
        )
        (?! [.,]?[0-9] | [ ]?/[ ]?-?[0-9] | [eE][-+]?[0-9] )
        | (?: (?<![\w.]) \. )? [0-9][0-9.,]* (?: (?: [ ]?/[ ]?-? | [eE][-+]? ) [0-9.,]+ )*
    )
    """,
    re.VERBOSE,
)
_CURRENCY = "$€£¥₹"
# Directly before a number, and directly after it: an operator that makes it part of a formula
_FORMULA_BEFORE = rf"(?:[×÷/^√]|[-|]-|(?<=\w)\+| \+(?= )|\b[A-Za-z] *-(?= ))[ *_`\"'(\[<>~{_CURRENCY}]*\Z"
_FORMULA_AFTER = re.compile(r"[*_]*(?:\(| *[\^√+×÷]| \* | *- ?[A-Za-z]\b|_[A-Za-z0-9]|[A-Za-z]+[0-9])")
# Between two numbers of a text, with blanks on both sides or neither: an operator, the dash of a range, a time's colon
_JOINED = re.compile(rf"[)\]%°]*(?:[:'’_]|( *)[-+*/×÷^]+\1)[({_CURRENCY}]*")
# A minus that a blank separates from its number is a dash or a bullet, unless the answer or a side begins with it
_MINUS = r"(?:(?:\A|[=:(])[^a-z0-9\n#]*-[^a-z0-9\n#]*|(?<![a-z0-9)\]%])-[^a-z0-9\s]*|\b(?:minus|negative)\W*)\Z"
# Of a declared answer: what goes before the number, and what may follow it
_LABEL = r"\W*[A-Za-z].*?(?:(?<!\d):|:(?!\d)|(?<!which |there )(?<!that )\b(?:is|are|was|were|be|equals)\b)(?=.*\d)"
_PARENTHESIS = r"(?<=[\w.,%$*]) +\((?=[^()]*[A-Za-z+*/=×-])[^()]*\)"
_REMARK = re.compile(
    r"\b(?:for|in|per|each|every|which|because|since|as|after|at|if|when|with|on|during|within)\b"
    r"|\bto (?=[a-z])|(?<=[a-z] )of\b|[.;!] +[A-Za-z]"
)


def extract_answer(text: str) -> Fraction | None:
    r"""
    The number that a text gives as its answer: on the line after the last `####` (blank lines are skipped), else in
    the last `\boxed{}`, else the last one of the text. `None` where there is no number in that place, whatever number
    stands elsewhere, and where it cannot be read whole.

    [What is an answer](gsm8k.md#what-is-an-answer) has examples. Of a line or box, 1000 characters are read; a number
    has 100 of them at most, and an exponent two digits.
    """
    declared = declared_answer(text)
    return _last_number(text) if declared is None else _declared_number(declared)


def is_only_a_number(line: str) -> bool:
    """Whether a line has a number that can be read, and beside it a currency and a percent sign or full stop alone."""
    text = _plain(line) if len(line) <= LONGEST_ANSWER else ""
    number = _NUMBER.search(text)
    if number is None or _value(number, text) is None:
        return False
    before, after = text[: number.start()], text[number.end() :].rstrip()
    return bool(re.fullmatch(rf"[ \t]*-? ?[{_CURRENCY}]? ?-? ?", before)) and after in ("", ".", "%")


def declared_answer(text: str) -> str | None:
    """The line after the last `####`, else what the last box holds; `None` for a text without either."""
    _, marker, rest = text.rpartition("####")
    if marker:
        line = rest.lstrip().partition("\n")[0]
        return line if len(line) <= LONGEST_ANSWER else line[:LONGEST_ANSWER].rpartition(" ")[0]
    _, box, rest = text.rpartition("\\boxed{")
    if not box:
        return None
    depth = 1
    for place, character in enumerate(rest[:LONGEST_ANSWER]):
        depth += (character == "{") - (character == "}")
        if depth == 0:
            return rest[:place]
    return ""


def _declared_number(declared: str) -> Fraction | None:
    text = re.sub("<<[^<>]*>>", "", _plain(declared))  # GSM8K's calculations
    text = re.sub("[0-9].*", lambda rest: re.sub(_PARENTHESIS, " ", rest[0]), text, count=1)
    rest, _, side = text.rpartition("=")
    number, other = _one_number(side), rest.rpartition("=")[2]
    return _one_number(other) if number is None and is_only_a_number(other) else number


def _one_number(text: str) -> Fraction | None:
    """The number of an answer without `=`: label, number, unit, remark."""
    while label := re.match(_LABEL, text):
        text = text[label.end() :]
    numbers = list(_NUMBER.finditer(text))
    if len(numbers) > 1:
        remark = _REMARK.search(text, numbers[0].end(), numbers[1].start())
        if remark is None:
            return None
        text = text[: remark.start()]
    return _value(numbers[0], text) if numbers and "√" not in text else None


def _last_number(text: str) -> Fraction | None:
    last_digit = re.search(r"[\d¼-¾⅐-⅞]", text[::-1])
    if last_digit is None:
        return None
    end = len(text) - last_digit.start()
    text = _plain(text[max(end - BEFORE_LAST, 0) : end + AFTER_LAST])
    numbers = list(_NUMBER.finditer(text))
    if not numbers or len(numbers) > 1 and _JOINED.fullmatch(text, numbers[-2].end(), numbers[-1].start()):
        return None
    return _value(numbers[-1], text)


def _plain(text: str) -> str:
    """A text with one sign for each thing, and LaTeX's ways to write a number in plain text."""
    if not text.isascii():
        text = re.sub(r"(?![0-9])\d", "0√", text.translate(_SIGNS))  # a digit of another script is not read
    if re.search(r"[\\{^]", text):
        for pattern, plain in _LATEX:
            text = re.sub(pattern, plain, text)
    return text


def _value(match: re.Match[str], text: str) -> Fraction | None:
    """The value of a match of `_NUMBER` in a text, which may end sooner than the one that was searched."""
    before = text[: match.start()][-20:]  # enough for a minus
    whole, number = match.groups()
    if number is None or len(match[0]) > LONGEST_NUMBER:
        return None
    if re.search(_FORMULA_BEFORE, before) or _FORMULA_AFTER.match(text, match.end()):
        return None
    value = Fraction(number.replace(",", "").replace(" ", ""))
    if whole and value >= 1:
        return None
    value += int(whole or 0)
    return -value if re.search(_MINUS, before, re.IGNORECASE) else value
