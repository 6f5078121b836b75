"""
The tables of docs/settings.md have every setting and every method, with what the code says of them.

`python -m tests.documentation.test_settings` fills them in: types, defaults and sentences are those of the code, links
are the page's. What has no row yet gets one below its neighbour, with the link of that.
"""

import inspect
import re
from pathlib import Path

from trl import GRPOConfig

from isopo_trl import ISOPO, ISOPOConfig, gsm8k
from isopo_trl.validation import MovedWeights, ProgressTable, ValidationCallback


PAGE = Path(__file__).parents[2] / "docs" / "settings.md"
SENTENCE = r".+?(?:\.(?= [A-Z])|$)"


def public(holder):
    """Functions and classes of a class or module, without what is private."""
    return {name: member for name, member in vars(holder).items() if callable(member) and name[0] != "_"}


def first_sentence(member):
    paragraph = " ".join(inspect.getdoc(member).split("\n\n")[0].split())
    plain = re.sub(r" \(see \[.*?\)", "", paragraph)
    plain = re.sub(r"\[`~?(?:\w+\.)*(\w+)`\]", r"`\1`", plain)
    return re.match(r".+?(?=[.:;](?: |$)|$)", plain)[0]


def of_setting(field, annotation):
    """
    Values, default and meaning of a setting, by its help: `Meaning: "value" or "value". If `None`, ...`, or with a
    list, `Possible values are: - "value": ...`.
    """
    text = field.metadata["help"]
    meaning, _, named = re.match(SENTENCE, text)[0].partition(': `"')
    listed = re.findall(r' - ((?:`"\w+"`(?:, )?)+):', text)
    values = re.findall(r'"(\w+)"', f'"{named}' if named else " ".join(listed))
    kind = annotation.__name__ if isinstance(annotation, type) else str(annotation)
    types = [name for name in kind.split(" | ") if name != "None" and not (name == "str" and values)]
    shown = ", ".join([*(f"`{name}`" for name in types), *(f'`"{value}"`' for value in values)])
    otherwise = re.search(r"If `None`, (.+?)[.;](?: |$)", text)
    default = f'`"{field.default}"`' if isinstance(field.default, str) else f"`{field.default}`"
    return [shown, f"{default}: {otherwise[1]}" if otherwise else default, meaning.removesuffix(".")]


def code():
    """For each row's name, the cells between it and its link."""
    before = GRPOConfig.__dataclass_fields__
    fields = {
        name: of_setting(field, ISOPOConfig.__annotations__[name])  # parsers change the type of a field
        for name, field in ISOPOConfig.__dataclass_fields__.items()
        if name not in before or field.default != before[name].default
    }
    members = {**public(ISOPO), **public(gsm8k), "ValidationCallback": ValidationCallback}
    members |= {"MovedWeights": MovedWeights, "ProgressTable": ProgressTable}
    return fields | {name: [first_sentence(member)] for name, member in members.items()}


def filled(page):
    lines, above = page.splitlines(), None
    for name, cells in code().items():
        rows = {match[1]: number for number, line in enumerate(lines) if (match := re.match(r"\| `(\w+)` \|", line))}
        link = lines[rows.get(name, rows.get(above))].rstrip(" |").rpartition("|")[2].strip()
        row = " | ".join(["", f"`{name}`", *cells, link, ""]).strip()
        if name in rows:
            lines[rows[name]] = row
        else:
            lines.insert(rows[above] + 1, row)
        above = name
    return "\n".join(lines) + "\n"


def test_tables_are_those_of_the_code():
    """If not: `python -m tests.documentation.test_settings` writes them."""
    page = PAGE.read_text()
    assert page == filled(page), "run `python -m tests.documentation.test_settings`"
    assert {*re.findall(r"^\| `(\w+)` \|", page, flags=re.MULTILINE)} == code().keys()


if __name__ == "__main__":
    PAGE.write_text(filled(PAGE.read_text()))
