"""
Token weights: how much each token's log-probability counts, apart from the sequences' coefficients.

One file for each weighting, chosen by `ISOPOConfig(token_weights=...)`; [`register`] adds one from outside.
"""

from .aspo import ASPO
from .bapo import BAPO
from .capo import CAPO
from .dcpo import DCPO
from .dppo import DPPO
from .gates import Gated
from .gtpo import GTPO
from .kpo import KPO
from .m2po import M2PO
from .none import NoWeighting
from .p3o import P3O
from .pspo import PSPO
from .ratio_loss import RatioLoss
from .ratios import batch_figures, log_ratios, ratio_sums
from .sampler import SamplerCorrection
from .weighting import WEIGHTINGS, Tokens, Unscaled, Weighted, Weighting, named, refusals, register


__all__ = ["Tokens", "Unscaled", "Weighted", "Weighting", "WEIGHTINGS", "named", "refusals", "register"]
__all__ += ["ASPO", "BAPO", "CAPO", "DCPO", "DPPO", "GTPO", "KPO", "M2PO", "P3O", "PSPO", "SamplerCorrection"]
__all__ += ["Gated", "NoWeighting", "RatioLoss", "batch_figures", "log_ratios", "ratio_sums"]
