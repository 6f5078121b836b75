"""
Random numbers that are a function of where they are used: of the seed, the step, the parameter and the element. So a
run repeats and resumes to the last bit, ranks agree without a word, and no generator has a state to be saved.
"""

import torch
from torch.distributed.tensor import DTensor, Shard


_INSTEAD = "use bf16_updates='exact', which takes any"
_64, _32 = 2**64 - 1, 2**32 - 1


def key(seed: int, step: int, parameter: int) -> int:
    """64 bits for a step of a parameter: the finaliser of SplitMix64 over one number after the other."""
    mixed = 0
    for number in (seed, step, parameter):
        mixed = (mixed + number + 0x9E3779B97F4A7C15) & _64
        mixed = (mixed ^ mixed >> 30) * 0xBF58476D1CE4E5B9 & _64
        mixed = (mixed ^ mixed >> 27) * 0x94D049BB133111EB & _64
        mixed ^= mixed >> 31
    return mixed


def noise(key: int, start: int, number: int, device: torch.device | str = "cpu") -> torch.Tensor:
    """
    Integers from 0 to 65535, `[number]` in int32, for the elements from `start` on: two for each of 32 bits, of which
    two rounds of multiplying and shifting are made in int64, where nothing overflows.
    """
    index = torch.arange(start >> 1, (start + number + 1) >> 1, device=device)
    above = index >> 32
    mixed = _mixed((index & _32).bitwise_xor_(key & _32))
    mixed = _mixed(mixed.add_(above).add_(key >> 32).bitwise_and_(_32))
    pairs = torch.stack([mixed & 0xFFFF, mixed >> 16], dim=1).to(torch.int32)
    return pairs.view(-1)[start & 1 :][:number]


def _mixed(x: torch.Tensor) -> torch.Tensor:
    x ^= x >> 16
    x.mul_(0x21F0AAAD).bitwise_and_(_32)
    x ^= x >> 15
    x.mul_(0x735A2D97).bitwise_and_(_32)
    x ^= x >> 15
    return x


def first_element(p: torch.Tensor, asks: str = "bf16_updates='stochastic'", instead: str = _INSTEAD) -> int:
    """
    Where this rank's part of a parameter begins, in elements of the whole; raises where that is not one piece.

    Args:
        p (`torch.Tensor`): the parameter.
        asks, instead (`str`): for the message, who needs to know, and what to do.
    """
    if not isinstance(p, DTensor):
        return 0
    cut = [(p.device_mesh, dim, place) for dim, place in enumerate(p.placements) if not place.is_replicate()]
    if not cut:
        return 0
    if len(cut) > 1 or type(cut[0][2]) is not Shard or cut[0][2].dim != 0:
        raise ValueError(
            f"{asks} needs weights that are cut between their rows, as FSDP2 does it, but one of shape "
            f"{list(p.shape)} is placed as {p.placements}: {instead}."
        )
    mesh, dim, _ = cut[0]
    rows = -(-p.size(0) // mesh.size(dim))
    return min(mesh.get_local_rank(dim) * rows, p.size(0)) * p.shape[1:].numel()
