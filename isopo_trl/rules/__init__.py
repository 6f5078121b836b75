"""Rules: the coefficient `c_s` in front of each sequence's gradient `V_s` at a layer.

- `rule`: what a rule is, and what it makes of a layer's statistics.
- `non_interacting`: rules of the form `c_s = A_s f_s`, which need to say no more than `f`.
- `power`, `interacting`: the paper's.
- `spring`, `proma`: rules that look at a direction held from before; `direction`, where that comes from.
- `registry`: rules by name.
- `trial`: whether a rule of one's own is what it says.
- `ledger`, `running`: where a microbatch's coefficients go, and the running means that rules refer to.
"""

from ..geometry.cost import Needs
from .interacting import Interacting
from .non_interacting import MeanSquares, NonInteracting, Norms
from .power import PowerRule
from .proma import Proma
from .registry import make_rule, register_rule, rule_names
from .rule import Coefficients, Expectations, Rule
from .spring import Spring


__all__ = [
    "Coefficients",
    "Expectations",
    "Interacting",
    "MeanSquares",
    "Needs",
    "NonInteracting",
    "Norms",
    "PowerRule",
    "Proma",
    "Rule",
    "Spring",
    "make_rule",
    "register_rule",
    "rule_names",
]
