"""Rules by name: registering one from outside, and making one from its name and settings."""

from dataclasses import dataclass

import pytest

from isopo_trl import ISOPOConfig
from isopo_trl.geometry.cost import Needs
from isopo_trl.rules import Interacting, NonInteracting, PowerRule, make_rule, register_rule, registry, rule_names


@pytest.fixture(autouse=True)
def registered(monkeypatch):
    """What a test registers is gone after it."""
    monkeypatch.setattr(registry, "_REGISTERED", dict(registry._REGISTERED))


@dataclass(frozen=True, kw_only=True)
class Own(NonInteracting):
    """`f = strength`."""

    strength: float = 2.0
    twice: bool = False
    needs = Needs(norm=True)
    degree = 0.0

    def multiplier(self, norms, mean_squares):
        return self.strength * (norms.norm > 0)


def test_a_class_is_registered_by_a_decorator_and_stays_itself():
    assert register_rule("own")(Own) is Own
    assert "own" in rule_names()
    assert make_rule("own") == Own(name="own")
    assert make_rule("own", strength=3.0, scale="paper") == Own(name="own", strength=3.0, scale="paper")


def test_a_class_or_a_function_may_be_registered_with_settings_of_its_own_by_several_names():
    register_rule("own", Own)
    register_rule("strong", strength=5.0)(Own)
    register_rule("strong_paper", Own, strength=5.0, scale="paper")
    register_rule("half", lambda name="", scale="relative", strength=1.0: Own(name=name, strength=strength / 2))
    assert make_rule("own").strength == 2 and make_rule("strong").strength == 5
    assert make_rule("strong", strength=7.0) == Own(name="strong", strength=7.0)
    assert make_rule("strong_paper") == Own(name="strong_paper", strength=5.0, scale="paper")
    assert make_rule("strong_paper", scale="relative").scale == "relative"
    assert make_rule("half", strength=3.0) == Own(name="half", strength=1.5)


def test_a_registered_rule_is_one_that_the_configuration_takes(tmp_path):
    with pytest.raises(ValueError, match="rule='own' is unknown"):
        ISOPOConfig(str(tmp_path), rule="own", use_cpu=True, bf16=False)
    register_rule("own", Own)
    config = ISOPOConfig(str(tmp_path), rule="own", scale="paper", use_cpu=True, bf16=False)
    assert config._rule() == Own(name="own", scale="paper")
    with pytest.raises(ValueError, match="fisher_power=-1.0 has no meaning for rule='own'"):
        ISOPOConfig(str(tmp_path), rule="own", fisher_power=-1.0, use_cpu=True, bf16=False)


def test_a_name_that_is_taken_is_refused_and_the_rule_stays():
    with pytest.raises(ValueError, match="There is a rule 'interacting' already, by .*Interacting.*another name"):
        register_rule("interacting", Own)
    assert type(make_rule("interacting")) is Interacting
    # Nor does the same class with other settings take the place of a rule
    with pytest.raises(ValueError, match="There is a rule 'npg' already, by .*PowerRule.*another name"):
        register_rule("npg", PowerRule, fisher_power=-0.5)
    assert make_rule("npg").exponents == (0, 0, -2)


def test_a_cell_of_a_notebook_may_run_again():
    cell = """
from dataclasses import dataclass
@register_rule("own")
@dataclass(frozen=True, kw_only=True)
class Again(Own):
    strength: float = {}
"""
    names = {"register_rule": register_rule, "Own": Own, "__name__": "__main__"}
    exec(cell.format(2.0), names)
    exec(cell.format(3.0), names)
    assert make_rule("own").strength == 3  # by what the cell says now
    with pytest.raises(ValueError, match="There is a rule 'own' already, by __main__.Again"):
        register_rule("own", Own)
    for _ in range(2):
        register_rule("strong", Own, strength=5.0)
    assert make_rule("strong").strength == 5


def test_an_unknown_rule_or_setting_is_answered_with_the_choices():
    register_rule("own", Own)
    with pytest.raises(ValueError, match="rule='fischer' is unknown: choose one of ") as error:
        make_rule("fischer")
    for name in ("fisher", "npg", "fig4", "euclidean", "none", "interacting", "own"):
        assert repr(name) in str(error.value)
    with pytest.raises(ValueError, match="radius=1.0 has no meaning for rule='own', whose settings are scale, streng"):
        make_rule("own", radius=1.0)
    with pytest.raises(ValueError, match="whose settings are scale, regularization:"):
        make_rule("interacting", fisher_power=0.0)  # zero is a value like any other


def test_none_and_false_may_be_given_to_a_rule_that_does_not_have_the_setting():
    register_rule("own", Own)
    register_rule("strong", Own, strength=5.0, twice=True)
    strong = Own(name="strong", strength=5.0, twice=True)
    assert make_rule("strong", strength=None, scale=None, fisher_power=None) == strong
    assert make_rule("own", keep_small=False) == Own(name="own")
    assert not make_rule("strong", twice=False).twice  # false counts where there is the setting
    assert make_rule("fig4", norm_power=None).exponents == (0, -1, -2)


def test_a_rule_that_is_an_object_is_taken_as_it_is():
    rule = Own(strength=3.0)
    assert make_rule(rule) is rule and make_rule(rule, strength=None) is rule
    with pytest.raises(ValueError, match="strength, scale cannot be given beside a rule that is an object"):
        make_rule(rule, strength=4.0, scale="paper")
