"""The tables in docs/architectures.md, family by family; `python -m tests.gradients.architectures` writes them."""

import pytest
import torch

from isopo_trl import ISOPO
from tests.gradients import architectures, vision_families


# By what stands out in them: a norm of the embedding, recurrence, experts, a head that is called `decoder`, positions
QUICK = ["bloom", "rwkv", "granitemoe", "modernbert-decoder", "biogpt"]
QUICK_WITH_IMAGES = ["qwen2_vl"]  # patches in a grid
VERDICTS = {"exact", "refused", "fails", "not examined", ""}


def lines(table):
    """Cells of a table's lines by family: a verdict for each way of training, then the rest."""
    rows = [architectures.cells(line) for line in architectures.table(table) if line.startswith("| ")]
    return {name: rest for name, *rest in rows[1:]}


LINES, WITH_IMAGES = lines("causal"), lines("vision")


def check(outcomes, cells):
    """
    Not the whole line: other versions may have other words. And not where nothing was examined: whether a sequence has
    the same loss alone as in a batch is for some families a question of the processor's rounding.
    """
    if cells[0] == "not examined":
        return
    for (way, outcome), verdict in zip(outcomes.items(), cells, strict=False):
        assert outcome.verdict == verdict, f"{way}: {outcome.reason}"


@pytest.mark.usefixtures("float64_throughout")
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("family", QUICK)
def test_a_family_is_what_the_table_says(family):
    check(architectures.examine(family), LINES[family])


@pytest.mark.slow
@pytest.mark.usefixtures("float64_throughout")
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("family", [family for family in architectures.FAMILIES if family not in QUICK])
def test_no_other_family_has_a_wrong_gradient(family):
    outcomes = architectures.examine(family)
    assert not [outcome.reason for outcome in outcomes.values() if outcome.verdict == "WRONG"]
    if family in LINES:
        check(outcomes, LINES[family])


@pytest.mark.usefixtures("float64_throughout")
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    "family",
    [
        pytest.param(family, marks=[] if family in QUICK_WITH_IMAGES else pytest.mark.slow)
        for family in vision_families.FAMILIES
    ],
)
def test_a_family_with_images_is_what_the_table_says(family):
    outcomes = vision_families.examine(family)
    assert not [outcome.reason for outcome in outcomes.values() if outcome.verdict == "WRONG"]
    if family in WITH_IMAGES:
        check(outcomes, WITH_IMAGES[family])


def test_the_tables_have_no_wrong_gradient():
    assert len(LINES) > 100 and len(WITH_IMAGES) > 50
    for table, ways in ((LINES, architectures.WAYS), (WITH_IMAGES, vision_families.WAYS)):
        for name, cells in table.items():
            assert VERDICTS.issuperset(cells[: len(ways)]), name


@pytest.mark.usefixtures("float64_throughout")
def test_a_wrong_gradient_would_be_noticed(monkeypatch):
    """An advantage that is off by a millionth."""
    begin = ISOPO.begin

    def other(self, advantages, **kwargs):
        return begin(self, advantages * torch.tensor([1.0, 1.0, 1 + 1e-6]), **kwargs)

    monkeypatch.setattr(ISOPO, "begin", other)
    outcomes = architectures.examine("olmo2", ways=("full",))
    for outcome in outcomes.values():
        assert outcome.verdict == "WRONG" and outcome.reason.startswith("none, ")
