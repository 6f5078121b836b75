"""How good a policy is and how far it has moved: measured while it trains, and compared between runs."""

from .callback import ValidationCallback
from .curves import curve, draw, read_log
from .moved_weights import MovedWeights


__all__ = ["MovedWeights", "ValidationCallback", "curve", "draw", "read_log"]
