"""Functions in Python: problems with tests, and a reward for passing them, in processes that can only compute."""

from .confined import literal
from .problems import as_prompts, human_eval, make_problems
from .rewards import CodeReward, as_program
from .sandbox import Limits


__all__ = ["CodeReward", "Limits", "as_program", "as_prompts", "human_eval", "literal", "make_problems"]
