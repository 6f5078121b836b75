"""How good a policy is and how far it has moved: measured and shown while it trains, and compared between runs."""

from .callback import ValidationCallback
from .curves import curve, draw, read_log
from .moved_weights import MovedWeights
from .progress import ProgressTable


__all__ = ["MovedWeights", "ProgressTable", "ValidationCallback", "curve", "draw", "read_log"]
