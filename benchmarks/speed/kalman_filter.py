"""
KPO's filter: how long the scan takes, and how well it agrees with a Kalman filter done step by step.

    python benchmarks/speed/kalman_filter.py                                   # small enough for a CPU
    python benchmarks/speed/kalman_filter.py --sequences 64 --length 16384     # for one GPU

Time is that of the filter and of its gradient, medians over the rounds, beside a loop over tokens. Agreement is taken
on 198 sequences of up to 4096 tokens with random log-ratios: mean squared error and largest error of the filtered
log-ratios against the state of the Kalman filter (prediction and update of state and variance), in float32 as well as
in float64.
"""

import argparse
import json
import statistics
import time

import torch
from setting import DEVICE, environment, synchronize

from isopo_trl.token_weights.kpo import filtered, kalman_gains, token_gains


AGREEMENT = (198, 4096)


def observations(sequences: int, length: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Log-ratios such as a few optimizer steps make, a slow drift and noise, and a mask of ragged completions."""
    generator = torch.Generator().manual_seed(0)
    drift = (torch.randn(sequences, length, generator=generator, dtype=torch.float64) * 1e-3).cumsum(1)
    z = drift + torch.randn(sequences, length, generator=generator, dtype=torch.float64) * 0.1
    lengths = torch.randint(length // 8, length + 1, (sequences, 1), generator=generator)
    mask = torch.arange(length) < lengths
    return (z * mask).to(DEVICE), mask.to(DEVICE)


def kalman_filter(z: torch.Tensor, initial_variance: float = 1.0, process_noise: float = 1e-6) -> torch.Tensor:
    """The filter as textbooks have it, one token after the other."""
    state = torch.zeros_like(z[:, 0])
    variance = torch.full_like(state, initial_variance)
    states = []
    for observation in z.unbind(1):
        predicted = variance + process_noise
        gain = predicted / (predicted + 1)
        state = state + gain * (observation - state)
        variance = (1 - gain) * predicted
        states.append(state)
    return torch.stack(states, 1)


def loop(z: torch.Tensor, gains: torch.Tensor) -> torch.Tensor:
    """The scheduled average, one token after the other."""
    rho, states = torch.zeros_like(z[:, 0]), []
    for observation, gain in zip(z.unbind(1), gains.unbind(1), strict=True):
        rho = (1 - gain) * rho + gain * observation
        states.append(rho)
    return torch.stack(states, 1)


def median_time(function, z: torch.Tensor, gains: torch.Tensor, repeats: int, backward: bool) -> float:
    times = []
    for _ in range(repeats + 2):  # two to warm up
        z = z.detach().requires_grad_(backward)
        synchronize()
        start = time.perf_counter()
        rho = function(z, gains)
        if backward:
            rho.backward(torch.ones_like(rho))
        synchronize()
        times.append(time.perf_counter() - start)
    return statistics.median(times[2:])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sequences", type=int, default=16)
    parser.add_argument("--length", type=int, default=2048)
    parser.add_argument("--repeats", type=int, default=20)
    parser.add_argument("--output", help="JSON file for the figures")
    options = parser.parse_args()
    print(*(f"{name}: {value}" for name, value in environment().items()), sep=", ")
    results: dict[str, float] = {}

    z, mask = observations(options.sequences, options.length)
    z, gains = z.float(), token_gains(mask, kalman_gains(options.length))
    for name, function, repeats in (("scan", filtered, options.repeats), ("loop", loop, 1)):
        for backward in (False, True):
            label = f"{name}, {'with its gradient' if backward else 'forward'}"
            results[label] = 1e3 * median_time(function, z, gains.to(z.dtype), repeats, backward)
            print(f"{label:24} {results[label]:10.3f} ms   {options.sequences} x {options.length}")

    z, mask = observations(*AGREEMENT)
    average = filtered(z, token_gains(mask, kalman_gains(AGREEMENT[1])))
    for dtype in (torch.float32, torch.float64):
        error = ((kalman_filter(z.to(dtype)).double() - average) * mask).double()
        name = f"Kalman filter in {str(dtype).removeprefix('torch.')}"
        results[f"{name}, mse"] = (error.square().sum() / mask.sum()).item()
        results[f"{name}, largest"] = error.abs().max().item()
        mse, largest = results[f"{name}, mse"], results[f"{name}, largest"]
        print(f"{name}: mean squared error {mse:.2e}, largest error {largest:.2e}")
    if options.output:
        with open(options.output, "w") as file:
            json.dump({"environment": environment(), "results": results}, file, indent=1)


if __name__ == "__main__":
    main()
