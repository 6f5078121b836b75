"""
Token weights: how much each token's log-probability counts, apart from the sequences' coefficients.

One file for each weighting, chosen by `ISOPOConfig(token_weights=...)`; [`register`] adds one from outside.
"""

from .kpo import KPO
from .none import NoWeighting
from .p3o import P3O
from .ratio_loss import RatioLoss
from .ratios import batch_figures, log_ratios, ratio_sums
from .sampler import SamplerCorrection
from .weighting import WEIGHTINGS, Tokens, Unscaled, Weighted, Weighting, named, refusals, register


__all__ = [
    "KPO",
    "P3O",
    "WEIGHTINGS",
    "NoWeighting",
    "RatioLoss",
    "SamplerCorrection",
    "Tokens",
    "Unscaled",
    "Weighted",
    "Weighting",
    "batch_figures",
    "log_ratios",
    "named",
    "ratio_sums",
    "refusals",
    "register",
]
