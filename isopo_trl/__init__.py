"""ISOPO (Isometric Policy Optimization, arXiv 2512.23353) for Hugging Face TRL."""

from . import trl_seam  # noqa: F401  # first: says what is wrong with the TRL that is installed, if anything is
from .config import ISOPOConfig
from .isopo import ISOPO
from .trainer import ISOPOTrainer


__version__ = "0.1.0"

__all__ = ["ISOPO", "ISOPOConfig", "ISOPOTrainer", "__version__"]
