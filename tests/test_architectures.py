"""The table in docs/architectures.md, family by family; `python -m tests.architectures` writes it."""

import pytest
import torch

from isopo_trl import ISOPO
from tests import architectures


# The latter two by what stands out in them: a head that is called `decoder`, a refusal
QUICK = ["bloom", "ctrl", "rwkv", "olmo2", "granitemoe", "modernbert-decoder", "biogpt"]
LINES = {
    line.split(" | ")[0].removeprefix("| "): line
    for line in architectures.PAGE.read_text().split(architectures.BEGIN)[1].splitlines()
    if line.startswith("| ")
}
LINES.pop("family")


@pytest.mark.usefixtures("float64_throughout")
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("family", QUICK)  # not the whole line: other versions may have other words
def test_a_family_is_what_the_table_says(family):
    outcome = architectures.examine(family)
    assert f"| {outcome.verdict} |" in LINES[family], outcome.reason


@pytest.mark.slow
@pytest.mark.usefixtures("float64_throughout")
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("family", [family for family in architectures.FAMILIES if family not in QUICK])
def test_no_other_family_has_a_wrong_gradient(family):
    outcome = architectures.examine(family)
    assert outcome.verdict != "WRONG", outcome.reason
    if family in LINES:
        assert f"| {outcome.verdict} |" in LINES[family], outcome.reason


def test_the_table_has_no_wrong_gradient():
    assert len(LINES) > 100
    assert not [line for line in LINES.values() if "| WRONG |" in line]


@pytest.mark.usefixtures("float64_throughout")
def test_a_wrong_gradient_would_be_noticed(monkeypatch):
    """An advantage that is off by a millionth."""
    begin = ISOPO.begin

    def other(self, advantages, **kwargs):
        return begin(self, advantages * torch.tensor([1.0, 1.0, 1 + 1e-6]), **kwargs)

    monkeypatch.setattr(ISOPO, "begin", other)
    outcome = architectures.examine("olmo2")
    assert outcome.verdict == "WRONG" and outcome.reason.startswith("none, ")
