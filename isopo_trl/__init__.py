"""
ISOPO (Isometric Policy Optimization, arXiv 2512.23353) for Hugging Face TRL.

What may be added from outside:

- a rule, by `isopo_trl.rules.register_rule`: the coefficient of a sequence's gradient at a layer;
- a token weight, by `isopo_trl.token_weights.register`: how much a token of off-policy data counts;
- a kind of layer, by `isopo_trl.layers.register_layer`: how the gradients of a module are taken per sequence.
"""

from . import trl_seam  # noqa: F401  # first: says what is wrong with the TRL that is installed, if anything is
from .config import ISOPOConfig
from .isopo import ISOPO
from .trainer import ISOPOTrainer


__version__ = "0.1.0"

__all__ = ["ISOPO", "ISOPOConfig", "ISOPOTrainer", "__version__"]
