"""ISOPO (Isometric Policy Optimization, arXiv 2512.23353) for Hugging Face TRL."""

from importlib.metadata import PackageNotFoundError, version

from packaging.version import Version


__version__ = "0.1.0"

TRL_VERSIONS = ("1.16.0", "2.0.0")  # from, and below


def _check_trl() -> None:
    needed = f"isopo_trl {__version__} needs TRL >= {TRL_VERSIONS[0]} and < {TRL_VERSIONS[1]}"
    install = f'install it with `pip install "trl>={TRL_VERSIONS[0]},<{TRL_VERSIONS[1]}"`.'
    try:
        found = version("trl")
    except PackageNotFoundError:
        raise ImportError(f"{needed}, but TRL is not installed: {install}") from None
    if not Version(TRL_VERSIONS[0]) <= Version(Version(found).base_version) < Version(TRL_VERSIONS[1]):
        raise ImportError(f"{needed}, but found {found}: {install}")


_check_trl()

from .config import ISOPOConfig  # noqa: E402
from .isopo import ISOPO  # noqa: E402
from .trainer import ISOPOTrainer  # noqa: E402


__all__ = ["ISOPO", "ISOPOConfig", "ISOPOTrainer", "__version__"]
