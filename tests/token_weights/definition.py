"""Token weights by their definition, for gradients in float64.

As in `tests/oracle.py`, nothing of the package is in what is expected: ratios, sample sizes and filters are written
out here, token by token, from log-probabilities of each sequence alone.
"""

import dataclasses
import functools
import math

import pytest
import torch

from tests import oracle
from tests.gradients.test_oracle import build, check


# name: settings of the configuration
WEIGHTS = {
    "none": {},
    "sampler": {
        "token_weights": "sampler",
        "vllm_importance_sampling_mode": "token_truncate",
        "vllm_importance_sampling_clip_max": 1.5,
    },
    "p3o": {"token_weights": "p3o"},
    "p3o biased": {"token_weights": "p3o", "use_bias_correction_kl": False},
    "kpo": {"token_weights": "kpo"},
    "kpo wide": {"token_weights": "kpo", "epsilon": 0.15, "epsilon_high": 0.3},
    "kpo stopped": {"token_weights": "kpo", "epsilon": 0.15, "epsilon_high": 0.3, "kpo_stop_gradient": True},
    "kpo fixed": {"token_weights": "kpo", "epsilon": 0.15, "epsilon_high": 0.3, "kpo_gain": 0.3},
    "kpo published": {"token_weights": "kpo", "kpo_initial_variance": 0.0, "kpo_process_noise": 0.01},
}
ALL = 10_000


# Off-policy data


def forward(model, batch, temperature=1.0):
    """Log-probabilities and entropies `[B, C]` of completion tokens; each sequence alone, without padding."""
    P, C = batch.prompt_ids.shape[1], batch.completion_ids.shape[1]
    logps, entropies = torch.zeros(2, len(batch.advantages), C, dtype=torch.float64)
    for s in range(len(logps)):
        columns = batch.attention_mask[s].nonzero().squeeze(1)
        ids = batch.input_ids[s : s + 1, columns]
        with torch.no_grad():
            logits = model(input_ids=ids, position_ids=columns.unsqueeze(0), use_cache=False).logits[0, :-1]
        logits = (logits / temperature).log_softmax(-1)
        places = columns[1:] - P
        scored = places >= 0
        logps[s, places[scored]] = logits.gather(1, ids[0, 1:, None]).squeeze(1)[scored]
        entropies[s, places[scored]] = -(logits.exp() * logits).sum(1)[scored]
    return logps, entropies


def scored_tokens(batch):
    return batch.completion_mask * batch.extra.get("tool_mask", 1)


def off_policy(model, batch, spread=0.6, seed=0, temperature=1.0):
    """Give the batch a sampler whose log-probabilities differ, and are nonsense where no token is scored."""
    logps, _ = forward(model, batch, temperature)
    noise = torch.randn(logps.shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    scored = scored_tokens(batch)
    batch.extra["sampling_per_token_logps"] = torch.where(scored.bool(), logps - spread * noise, -50.0)
    batch.extra["num_items_in_batch"] = scored.sum()
    return batch


def ragged_batch(model, spread=0.6):
    """
    Sequences of all lengths, one of them empty, one with an advantage of zero; a tool's tokens inside two completions,
    and tokens for which the sampler gave no log-probability.
    """
    advantages = torch.tensor([0.8, -1.1, -0.5, 0.0, 1.3, 0.7], dtype=torch.float64)
    batch = oracle.random_batch([3, 1, 5, 4, 2, 3], [6, 8, 1, 4, 0, 5], 100, advantages=advantages)
    tool_mask = torch.ones_like(batch.completion_mask)
    tool_mask[0, 2] = tool_mask[1, 0] = tool_mask[1, 4] = tool_mask[1, 5] = 0
    batch.extra["tool_mask"] = tool_mask
    batch = off_policy(model, batch, spread, seed=18)
    for place in ((0, 1), (1, 6), (3, 0), (0, 2), (4, 1)):  # the last two are not scored
        batch.extra["sampling_per_token_logps"][place] = math.nan
    return batch


# Token weights by their definition


def normalisation(batch, loss_type="dapo", accumulation=1, max_completion_length=8):
    scored = dataclasses.replace(batch, completion_mask=scored_tokens(batch))
    return oracle.token_weights(scored, loss_type, accumulation, max_completion_length)


def log_ratios(logps, batch):
    """`z` `[B, C]`, zero where nothing is scored, or nothing known."""
    z = logps - batch.extra["sampling_per_token_logps"]
    return torch.where(scored_tokens(batch).bool() & ~z.isnan(), z, 0.0)


def effective_sample_size(logps, batches):
    r = torch.cat([log_ratios(*pair)[scored_tokens(pair[1]).bool()] for pair in zip(logps, batches, strict=True)])
    r = r.exp()
    return r.sum() ** 2 / (len(r) * r.square().sum())


def kpo_objective(
    leaf, batch, n, advantages, low=0.0003, high=0.0004, gain=None, variance=1.0, noise=1e-6, stop=False
):
    """The clipped objective of filtered ratios, from the log-probabilities `leaf` `[B, C]`."""
    sampler, scored = batch.extra["sampling_per_token_logps"], scored_tokens(batch)
    objective = 0.0
    for s in range(len(leaf)):
        rho, P, A = 0.0, variance, advantages[s]
        for t in range(leaf.shape[1]):
            if not scored[s, t]:
                continue
            z = leaf[s, t] - (leaf[s, t].detach() if sampler[s, t].isnan() else sampler[s, t])
            P = P + noise
            K = P / (P + 1.0)
            P = (1.0 - K) * P
            K = K if gain is None else gain
            rho = (1.0 - K) * rho + K * z
            ratio = rho.exp()
            if stop:  # the filtered ratio as a number, times what has the gradient of this token alone
                ratio = ratio.detach() * (leaf[s, t] - leaf[s, t].detach()).exp()
            clipped = min(max(ratio, ratio.new_tensor(1 - low)), ratio.new_tensor(1 + high))
            objective = objective + n[s, t] * min(ratio * A, clipped * A)
    return objective


@dataclasses.dataclass
class Expected:
    """
    What `-log p` of each token is multiplied by in `V_s`, and, apart from the rules, in the pull; the advantages that
    the coefficients are made of; the value of the loss.
    """

    weights: torch.Tensor
    pull: torch.Tensor | None
    advantages: torch.Tensor
    loss: float


def definition(logps, batch, n, name, ess=None):
    A = batch.advantages
    method, _, variant = name.partition(" ")
    if method == "none":
        return Expected(n, None, A, -(n * A.unsqueeze(1)).sum().item())
    z = log_ratios(logps, batch)
    r = z.exp()
    if method == "sampler":
        weights = n * r.clamp(max=1.5)
        return Expected(weights, None, A, -(weights * A.unsqueeze(1)).sum().item())
    if method == "p3o":
        ess = effective_sample_size([logps], [batch]) if ess is None else ess
        weights = n * torch.where(r < ess, r, ess)
        slope, kl = (1 - 1 / r, 1 / r - 1 + z) if variant else (r * z, r * z - r + 1)
        loss = -(weights * A.unsqueeze(1)).sum() + (1 - ess) * (n * kl).sum()
        return Expected(weights, -n * (1 - ess) * slope, A, loss.item())
    wide = {"low": 0.15, "high": 0.3}
    settings = {
        "": {},
        "wide": wide,
        "stopped": {**wide, "stop": True},
        "fixed": {**wide, "gain": 0.3},
        "published": {"variance": 0.0, "noise": 0.01},
    }[variant]
    leaf = logps.clone().requires_grad_()
    sign = torch.where(A < 0, -1.0, 1.0).double()
    # All of it may be clipped
    (weights,) = torch.autograd.grad(kpo_objective(leaf, batch, n, sign, **settings) + 0 * leaf.sum(), leaf)
    return Expected(weights, None, A.abs(), -kpo_objective(leaf, batch, n, A, **settings).item())


@dataclasses.dataclass
class Reference:
    """The batch, what is expected of it, and the gradients of each position, of `V` and of the pull."""

    batch: oracle.Batch
    expected: Expected
    G: dict
    pull: dict | None

    def gradients(self, model, rows, rule, **settings):
        """`sum_s c_s V_s`, and the pull as it is."""
        batch = dataclasses.replace(self.batch, advantages=self.expected.advantages)
        total = oracle.expected_gradients(model, self.G, batch, rows, rule, **settings)
        if self.pull is not None:
            batch = dataclasses.replace(batch, advantages=torch.ones_like(batch.advantages))
            pull = oracle.expected_gradients(model, self.pull, batch, None, "none")
            total = {p: gradient + pull[p] for p, gradient in total.items()}
        return total


def refer(model, batch, name, n, ess=None, temperature=1.0):
    expected = definition(forward(model, batch, temperature)[0], batch, n, name, ess)
    G = oracle.position_gradients(model, batch, expected.weights, temperature)
    pull = None
    if expected.pull is not None:
        pull = oracle.position_gradients(model, batch, expected.pull, temperature)
    model.zero_grad()
    return Reference(batch, expected, G, pull)


@functools.cache
def reference(family, lora, name, tie=None, loss_type="dapo", spread=0.6):
    model = build(family, lora, tie)
    batch = ragged_batch(model, spread)
    return refer(model, batch, name, normalisation(batch, loss_type))


def backward(trainer, batch):
    """Loss and gradients as the trainer makes them; returns the loss and the sampled rows."""
    loss = trainer.compute_loss(trainer.model, batch.for_trl())
    loss.backward()
    samples = trainer.isopo.current.samples
    trainer.isopo.end()
    return loss.item(), None if samples is None else samples.rows[~samples.absent]


def compare(model, trainer, expected, rule, **settings):
    loss, rows = backward(trainer, expected.batch)
    if trainer.args.fisher_samples == ALL:
        rows = None  # the oracle takes all real positions
    check(model, expected.gradients(model, rows, rule, **settings))
    assert loss == pytest.approx(expected.expected.loss, rel=1e-9, abs=1e-12)
