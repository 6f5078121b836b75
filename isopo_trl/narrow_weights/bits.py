"""
Float32 values in 16 bits: as the nearest bf16 and a remainder, or rounded to one of the two next to them.

The bits of a float32 value, taken as an integer, are `65536 upper + remainder`, where `upper` are the bits of a bf16.
This is the nearest one if the remainder is from -32768 to 32767, which is all that 16 bits hold. So a value half-way
between two bf16 always goes to the larger magnitude. PyTorch's rounding takes the even one: the two differ for half
of these values, which are one in 65,536, and both are as near.
"""

import torch


def split(wide: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """
    The nearest bf16 of float32 values, and the int16 remainders with which [`join`] makes the same values again, to
    the last bit. Beyond the largest bf16 the nearest is infinite, and its remainder still leads back.
    """
    bits = torch.where(wide.isnan(), torch.nan, wide).view(torch.int32)  # one of the NaNs, which has room above it
    upper = (bits + 2**15) >> 16
    remainder = bits - (upper << 16)
    return upper.to(torch.int16).view(torch.bfloat16), remainder.to(torch.int16)


def join(narrow: torch.Tensor, remainder: torch.Tensor) -> torch.Tensor:
    """The float32 values that [`split`] was given."""
    return ((narrow.view(torch.int16).to(torch.int32) << 16) + remainder).view(torch.float32)


def rounded(wide: torch.Tensor, noise: torch.Tensor) -> torch.Tensor:
    """
    Float32 values as one of the two bf16 next to them: where the noise is evenly distributed, the mean is the value.

    Args:
        wide (`torch.Tensor`): float32 values.
        noise (`torch.Tensor`): of the same shape, integers from 0 to 65535.
    """
    narrow = ((wide.view(torch.int32) + noise) >> 16).to(torch.int16).view(torch.bfloat16)
    return torch.where(wide.isfinite(), narrow, wide.to(torch.bfloat16))
