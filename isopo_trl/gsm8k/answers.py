r"""
The number that a text gives as its answer, read as a teacher would read it: whole, or not at all.

A text declares where its answer stands by `####` or `\boxed{}`; the last declaration counts, and `####` before boxes.
A text that declares nothing answers with its last number. Numbers are fractions, without rounding, and the time to
read one is linear in the length of the text, whatever the text.
"""

import re
from fractions import Fraction


__all__ = ["extract_answer"]

CURRENCY = "$€£¥₹"
LONGEST_NUMBER = 100  # characters; Python refuses to read integers of more than 4300 digits
LONGEST_ANSWER = 1000  # characters of a declared one that are read
REACH = 256  # more than a number can take, written as \dfrac{...}{...}

# Plain signs for what Unicode and LaTeX have many of. A backslash that is left over is a formula that is not read.
_FRACTIONS = dict(zip("¼½¾⅓⅔⅕⅖⅗⅘⅙⅚⅛⅜⅝⅞", "14 12 34 13 23 15 25 35 45 16 56 18 38 58 78".split(), strict=True))
_PLAIN = str.maketrans(
    {
        **dict.fromkeys("‐‑‒–—―−﹣－", "-"),
        **dict.fromkeys("\u00a0\u2002\u2003\u2007\u2009\u200a\u202f\u3000", " "),
        **dict.fromkeys("≈≃≅→⇒", "="),
        **dict.fromkeys("·⋅∙", "×"),
        **{sign: f"\\frac{digits}" for sign, digits in _FRACTIONS.items()},
        "⁄": "/",
        "’": "'",
        "±": "\\",
        "π": "\\",
        "√": "\\",
        "＝": "=",
    }
)
_COMMANDS = {
    **dict.fromkeys("( ) [ ] ! left right displaystyle boxed fbox text mbox textbf textit textrm mathrm".split(), ""),
    **dict.fromkeys("mathbf mathit mathsf operatorname bf rm bold boldsymbol big Big".split(), ""),
    **dict.fromkeys([",", ";", ":", " ", "quad", "qquad"], " "),
    **dict.fromkeys("approx simeq to rightarrow Rightarrow implies".split(), "="),
    **dict.fromkeys(["times", "cdot", "ast"], "×"),
    **dict.fromkeys("dfrac tfrac cfrac frac".split(), "\\frac"),
    **{sign: sign for sign in "$%&#_"},
    "div": "÷",
    "circ": "°",
    "degree": "°",
    "euro": "€",
    "pounds": "£",
    "cent": "¢",
}
_COMMAND = re.compile(r"\\(?:([a-zA-Z]++) *+|(.))", re.DOTALL)
_BEFORE_FRACTION = re.compile(r"(?<=[0-9]) *(?=\\frac)")
_FRACTION = re.compile(r"\\frac *(\{[- 0-9.,]*\}|[0-9]) *(\{[- 0-9.,]*\}|[0-9])")
_FRACTION_OF_UNITS = re.compile(r"\\frac *\{\{([A-Za-z. ]+)\}\} *\{\{([A-Za-z. ]+)\}\}")  # of \text{km} and \text{h}
_POWER_OF_UNIT = re.compile(r"(?<=[A-Za-z])(\}?) *\^ *(?:\{ *-?[0-9] *\}|-?[0-9])|\^ *(?:\{ *° *\}|(?=°))")
_SUBSCRIPT = re.compile(r"(?<=[A-Za-z])_(?:\{\w*\}|\w)")
_BRACES = str.maketrans("", "", "{}")

_DECIMAL = r"""
    (?:
        # 1,234  1 234
        (?: [1-9][0-9]{0,2} (?: (?>(?:,[0-9]{3})+) | (?>(?:[ ][0-9]{3})+) (?![0-9/-]|[ ]/) ) | [0-9]++ )
        (?>(?: \.[0-9]++ )?)
        | (?<![\w.]) \.[0-9]++                                                                      # .5
    )
    (?>(?: [eE][-+]?[0-9]{1,2}+ )?)
"""
# A number, or else the whole run of digits and separators that is none ("12,34", "1.2.3", "1/2/3"), in which case no
# group is set: the parts of such a run are not numbers either. No quantifier over digits gives back what it has taken;
# repeated groups are atomic for that, since Python before 3.11.5 matches possessive ones wrongly.
_NUMBER = re.compile(
    rf"""
    (?=[.0-9])
    (?:
        (?>(?: ([0-9]++) [ ]{{1,2}}+ (?=[0-9]++/) )?)                        # the 2 of 2 1/2
        ({_DECIMAL})
        (?>(?: [ ]?/[ ]? ({_DECIMAL}) | [ ]?[×x*][ ]?10\^([-+]?[0-9]{{1,2}}+) )?)
        (?! [.,]?[0-9] | [ ]?/[ ]?-?[0-9] | [eE][-+]?[0-9] )
        | (?>(?: (?<![\w.]) \. )?) [0-9][0-9.,]*+ (?>(?: (?: [ ]?/[ ]?-? | [eE][-+]? ) [0-9.,]++ )*)
    )
    """,
    re.VERBOSE,
)
_USUAL = re.compile(rf" *+-?[{CURRENCY}]?([1-9][0-9]{{0,2}}+(?>(?:,[0-9]{{3}}){{1,20}})|[0-9]{{1,90}}+)\.?\s*+")
_FOREIGN_DIGIT = re.compile(r"(?![0-9])\d")
# In a reversed text: the last digit or fraction, and before it whatever can belong to its number, \frac included
_OF_A_NUMBER = rf"[-−–+0-9.,/ {CURRENCY}eE\\{{}}!fracdt]{{0,{REACH - 1}}}"
_TAIL = re.compile(rf"[\d{''.join(_FRACTIONS)}]{_OF_A_NUMBER}")
_ASCII_TAIL = re.compile(rf"[0-9]{_OF_A_NUMBER}")
# What most texts end in, read sooner: a number between two words, or between a word and the end
_USUAL_TAIL = re.compile(
    rf"((?>(?:[0-9]{{3}},){{1,20}})[0-9]{{0,2}}[1-9]|[0-9]{{1,30}}+)[{CURRENCY}]?+ "
    r"(?!su|ev)[A-Za-z]{2,20}+(?![A-Za-z\\])"
)
_USUAL_END = re.compile(r"\.?(?:\s*\Z| [a-z][a-z])")
_BEFORE_TAIL, _AFTER_TAIL = 24, 8  # characters: what precedes a number in braces, and what could be glued to it

# Of a declared answer
_CALCULATION = re.compile(r"<<[^<>]*+>>")
_REMARK_IN_PARENTHESES = re.compile(r"(?<=[\w.,%$*]) +\((?=[^()]*[A-Za-z+*/=×-])[^()]*\)")
_DIGIT = re.compile(r"[0-9]")
_LABELLED = re.compile(r"[^\w\\]*+[^\W\d_]")
_LABEL = re.compile(
    r"(?<![0-9]):|:(?![0-9])|(?<!which )(?<!that )(?<!this )(?<!there )\b(?:is|are|was|were|be|equals)\b"
)
_REMARK = re.compile(
    r"\b(?:for|in|per|each|every|which|because|since|as|after|at|if|when|with|on|during|within)\b"
    r"|\bto (?=[a-z])|(?<=[a-z] )of\b|[.;!] +[A-Za-z]"
)
_WORD_OR_FORMULA = re.compile(r"[A-Za-z\\]")
# Directly after a number: what makes it part of a formula
_CONTINUED = re.compile(r"[*_]*(?:\(| *[\^\\+×÷²³¹⁰⁴-⁹]| \* | *- ?[A-Za-z]\b|[A-Za-z]++[0-9])")
# Directly before it
_MARKUP = " *_`\"'([<>~"
_CODE = re.compile(r"\b(?:USD|EUR|GBP|JPY|INR|CNY|CAD|AUD|CHF|RM|Rs)$")
_UNKNOWN = re.compile(r"\b[A-Za-z] *[-+*×÷/^]$")
_NEGATIVE = re.compile(r"\b(?:minus|negative)$", re.IGNORECASE)
# Between two numbers of a text: an operator that makes one formula of them, a range, a time
_JOINED = re.compile(rf"[)\]%°]*(?:[-+/×÷:'_^]|\*\*?)[({CURRENCY}]*|[)\]%°]* +(?:[-+/×÷^]|\*\*?) +[({CURRENCY}]*")


def extract_answer(text: str) -> Fraction | None:
    r"""
    The number that a text gives as its answer: on the line after the last `####` (blank lines are skipped), else in
    the last `\boxed{}`, else the last one of the text.

    **A number** is written as `1234`, `1,234`, `1 234`, `0.5`, `.50`, `5.`, `1e5`, `1.2 × 10^3`, `3/4`, `30 / 5`,
    `2 1/2`, `2½` or `\frac{3}{4}` (also `\dfrac` and `\tfrac`), with a minus (any of Unicode's, or the word `minus` or
    `negative`), and beside a currency sign, a percent sign (`50%` is 50), Markdown's or LaTeX's markup, or words.
    Words are not calculated with: `2 dozen` is 2, `1.5 million` is 1.5. A minus that a space separates from its number
    is a sign where the answer begins with it or after `=`, `:` or `(`; elsewhere it is a dash or the bullet of a list.

    **A declared answer** holds one number. Of an equation, it is the one after the last `=` (or `≈`, or an arrow),
    but where only a name or a calculation stands there, the one before it: `10 + 62 = 72` and `72 = x` are 72. A label
    that ends in a colon, `is` or `are` goes first: `Step 5: 72` is 72. A remark may follow: in parentheses, as a
    further sentence, or after a word such as `for`, `in`, `each` or `which`, as in `72 dollars for 2 weeks`. Where two
    numbers remain, there is no answer, whether they are a range (`70-72`), a ratio or time (`3:2`), a calculation
    (`10 + 62`), a list, two units (`5 feet 6 inches`), or a sentence that leaves open which one is meant.
    Without a number in that place there is no answer either, whatever number stands elsewhere, nor in a box that is
    not closed within 1000 characters. Of a line, the first 1000 characters are read.

    **What cannot be read whole is not read in part**: `12,34`, `1.2.3`, `1/2/3`, `1_000`, `0x48`, `2^{10}`,
    `\sqrt{72}`, `72\pi`, exponents of more than two digits, `1/0`, numbers written with more than 100 characters, and
    digits other than 0 to 9 give no answer; nor, at the end of a text that declares none, does `70-72` or `60 + 12`.

    Args:
        text (`str`): the text, of any length.

    Returns:
        `Fraction`: the answer, or `None` where there is none.
    """
    number = read_answer(text)
    return None if number is None else Fraction(number)


def read_answer(text: str) -> int | Fraction | None:
    """As `extract_answer`; integers as they are, which are faster to compare."""
    declared = declared_answer(text)
    if declared is None:
        return _last_number(text)
    if usual := _USUAL.fullmatch(declared):
        value = int(usual[1].replace(",", ""))
        return -value if "-" in declared else value
    return _declared_number(declared)


def is_only_a_number(line: str) -> bool:
    """Whether a line has a number that can be read, and beside it a currency and a percent sign or full stop alone."""
    if _USUAL.fullmatch(line):
        return True
    if len(line) > REACH or _declared_number(line) is None:
        return False
    line = _plain(line)
    match = _NUMBER.search(line)
    return match is not None and bool(
        re.fullmatch(rf"(?:-? ?[{CURRENCY}]? ?|[{CURRENCY}] ?- ?)", line[: match.start()])
        and line[match.end() :].rstrip() in ("", ".", "%")
    )


def after_marker(text: str) -> str | None:
    """The first line with text on it after the last `####`; `None` without a `####`."""
    marker = text.rfind("####")
    return None if marker < 0 else text[marker + 4 :].lstrip().partition("\n")[0]


def declared_answer(text: str) -> str | None:
    """What stands in the place that the text declares as its answer's; `None` where it declares none."""
    line = after_marker(text)
    if line is not None:
        return line
    start = text.rfind("\\boxed{") + len("\\boxed{")
    if start < len("\\boxed{"):
        return None
    box = text[start : start + LONGEST_ANSWER]
    end = box.find("}")
    while end >= 0 and box.count("{", 0, end) > box.count("}", 0, end):
        end = box.find("}", end + 1)
    return box[: max(end, 0)]


def _declared_number(declared: str) -> int | Fraction | None:
    if len(declared) > LONGEST_ANSWER:  # not within a number
        declared = declared[:LONGEST_ANSWER].rpartition(" ")[0]
    if not declared.isascii() and _FOREIGN_DIGIT.search(declared):
        return None
    text = _CALCULATION.sub("", _plain(declared))
    digit = _DIGIT.search(text)
    if digit is None:
        return None
    text = text[: digit.start()] + _REMARK_IN_PARENTHESES.sub(" ", text[digit.start() :])
    rest, equals, side = text.rpartition("=")
    if equals and _one_number(side) is None and _names_or_calculates(side):
        side = rest.rpartition("=")[2]
    return _one_number(side)


def _names_or_calculates(side: str) -> bool:
    """Whether a side of an equation is such that the other one may be the result: `x`, or `60 + 12`."""
    if _DIGIT.search(side) is None:
        return any(character.isalpha() for character in side) and "\\" not in side
    numbers = list(_NUMBER.finditer(side))
    return len(numbers) > 1 and all(number[2] for number in numbers) and not _WORD_OR_FORMULA.search(side)


def _one_number(text: str) -> int | Fraction | None:
    """The number of an answer without `=`: label, number, unit, remark."""
    last_digit = max(text.rfind(digit) for digit in "0123456789")
    start = 0
    while _LABELLED.match(text, start) and (label := _LABEL.search(text, start, last_digit)):
        start = label.end()
    text = text[start:]
    numbers = [match for match in _NUMBER.finditer(text) if not _in_a_word(text, match.start())]
    if not numbers or numbers[0].end() - numbers[0].start() > LONGEST_NUMBER:
        return None
    first = numbers[0]
    if len(numbers) > 1:
        remark = _REMARK.search(text, first.end(), numbers[1].start())
        if remark is None:
            return None
        text = text[: remark.start()]
    if "\\" in text:
        return None
    return _value(first, text)


def _last_number(text: str) -> int | Fraction | None:
    """The last number of a text that declares no answer."""
    reverse = text[::-1]
    tail = (_ASCII_TAIL if text.isascii() else _TAIL).search(reverse)
    if tail is None or _FOREIGN_DIGIT.match(tail[0]):
        return None
    end = len(text) - tail.start()
    usual = _USUAL_TAIL.match(reverse, tail.start())
    if usual and _USUAL_END.match(text, end, end + _AFTER_TAIL):
        return int(usual[1][::-1].replace(",", ""))
    text = _plain(text[max(len(text) - tail.end() - _BEFORE_TAIL, 0) : end + _AFTER_TAIL])
    previous = last = None
    for match in _NUMBER.finditer(text):
        previous, last = last, match
    if last is None or _in_a_word(text, last.start()):
        return None
    if previous is not None and _JOINED.fullmatch(text, previous.end(), last.start()):
        return None
    return _value(last, text)


def _plain(text: str) -> str:
    """A text with one sign for each thing, and LaTeX's ways to write a number in plain text."""
    if not text.isascii():
        text = text.translate(_PLAIN)
    if "\\" not in text and "{" not in text and "^" not in text and "_" not in text and "~" not in text:
        return text
    text = text.replace("{,}", ",").replace("~", " ")
    text = _COMMAND.sub(lambda match: _COMMANDS.get(match[1] or match[2], "\\"), text)
    text = _BEFORE_FRACTION.sub(" ", text)
    text = _FRACTION.sub(lambda match: "{}/{} ".format(*(part.strip("{ }") for part in match.groups())), text)
    text = _FRACTION_OF_UNITS.sub(r"\1/\2", text)
    return _SUBSCRIPT.sub("", _POWER_OF_UNIT.sub(r"\1", text)).translate(_BRACES)


def _value(match: re.Match[str], text: str) -> int | Fraction | None:
    """The value of a match of `_NUMBER` in a text, which may end sooner than the one that was searched."""
    if match.end() - match.start() > LONGEST_NUMBER or _CONTINUED.match(text, match.end()):
        return None
    after = text[match.end() : match.end() + 1]
    if after.isnumeric() or after == "_" and text[match.end() + 1 : match.end() + 2].isalnum():
        return None
    whole, number, denominator, power = match.groups()
    sign = _sign(text[: match.start()])
    if number is None or sign is None:
        return None
    value = _decimal(number)
    if denominator is not None:
        divisor = _decimal(denominator)
        if divisor == 0:
            return None
        value = Fraction(value) / divisor
    if power is not None:
        value *= Fraction(10) ** int(power)
    if whole is not None:
        if value >= 1:
            return None
        value += int(whole)
    return sign * value


def _decimal(text: str) -> int | Fraction:
    digits = text.replace(",", "").replace(" ", "")
    return int(digits) if digits.isdigit() else Fraction(digits)


def _in_a_word(text: str, start: int) -> bool:
    """Whether the digits that start here belong to a name, such as `x_1` or `0x48`; a currency's code is none."""
    before = text[max(start - 8, 0) : start].rstrip("_")
    return before[-1:].isalnum() and not _CODE.search(before)


def _sign(before: str) -> int | None:
    """The sign of a number, by the text before it; `None` where it is part of a formula."""
    lead = before.rstrip(_MARKUP + CURRENCY)
    if lead[-1:] not in ("-", "+", "\\", "^", "×", "÷", "/"):
        return -1 if lead[-1:].isalpha() and _NEGATIVE.search(lead[-10:]) else 1
    spaced = before.startswith(" ", len(lead))
    if lead[-1] == "+":
        return 1 if len(lead) == 1 or (not spaced and not lead[-2].isalnum()) else None
    if lead[-1] != "-":
        return None
    name = _UNKNOWN.search(lead[-6:])
    lead = lead[:-1]
    if not lead.strip(_MARKUP + CURRENCY):
        return -1
    if lead.endswith(("-", "|")) or (name and spaced):
        return None
    if spaced:
        return -1 if lead.rstrip(" ")[-1:] in "=:(" else 1
    return 1 if lead[-1].isalnum() or lead[-1] in ")]}%" else -1
