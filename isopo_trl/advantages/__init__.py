"""
Advantages: what becomes of a group's rewards between the reward functions and the loss.

One file for each transform, chosen by `ISOPOConfig(advantage_transform=...)`; [`register`] adds one from outside.
"""

from .chain import Chain
from .cppo import CPPO
from .dcpo import DCPO
from .empg import EMPG
from .g2rl import G2RL
from .gtpo import GTPO
from .normalisation import normalised, totals
from .pacs import PACS
from .redit import ReDit
from .rollout import Measured
from .simpletir import SimpleTIR
from .transform import STAGES, TRANSFORMS, Generation, Rollout, Transform, named, refusals, register


__all__ = ["STAGES", "TRANSFORMS", "Chain", "Generation", "Measured", "Rollout", "Transform"]
__all__ += ["CPPO", "DCPO", "EMPG", "G2RL", "GTPO", "PACS", "ReDit", "SimpleTIR"]
__all__ += ["named", "normalised", "refusals", "register", "totals"]
