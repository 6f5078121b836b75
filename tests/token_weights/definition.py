"""Token weights by their definition, for gradients in float64.

As in `tests/oracle.py`, nothing of the package is in what is expected: ratios, sample sizes and filters are written
out here, token by token, from log-probabilities of each sequence alone.
"""

import dataclasses
import functools
import math

import pytest
import torch

from tests import oracle, training
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
    # A random model's probabilities are near 1 / 100, for which the defaults are wide
    "dppo_tv": {"token_weights": "dppo_tv", "dppo_delta": 0.002, "dppo_cap": 1.5},
    "dppo_kl": {"token_weights": "dppo_kl", "dppo_delta": 0.0005, "dppo_cap": 1.5},
    "m2po": {"token_weights": "m2po"},
    "dcpo": {"token_weights": "dcpo", "epsilon": 0.002, "epsilon_high": 0.003},
    "aspo": {"token_weights": "aspo"},
    "pspo": {"token_weights": "pspo"},
    "bapo": {"token_weights": "bapo", "bapo_target": 1.05},
}
# Methods of the field that are weights without gradient, and the numbers that their sources give them
METHODS = {
    "dppo_tv": {"dppo_delta": 0.15, "dppo_cap": 20.0},
    "dppo_kl": {"dppo_delta": 0.05, "dppo_cap": 20.0},
    "m2po": {"m2po_budget": 0.04},
    "dcpo": {"epsilon": 0.16, "epsilon_high": 0.2},
    "aspo": {"epsilon": 0.2, "epsilon_high": 0.2},
    "pspo": {"pspo_alpha": 0.1},
    "bapo": {"bapo_target": 1.0},
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
class Token:
    """A scored token: its log-probability, the sampler's (or its own, where there is none), and the advantage."""

    log_p: float
    log_q: float
    A: float

    @property
    def r(self):
        return math.exp(self.log_p - self.log_q)


def m2po_bound(tokens, tau):
    """`t`, so that ratios are clipped to `(e^-t, e^t)`, as its square; infinity for no clipping."""
    v = sorted(math.log(x.r) ** 2 for x in tokens if (x.A > 0 and x.r > 1) or (x.A < 0 and x.r < 1))
    n = len(v)
    if n == 0 or sum(v) / n <= tau:
        return math.inf
    for k in range(n):
        if v[k] * (n - k - 1) + sum(v[: k + 1]) >= tau * n:
            return v[k - 1] if k else 0.0
    raise AssertionError("no place is over the budget, and all together are")


def bapo_bounds(tokens, target):
    low, high = 0.6, 1.2

    def ratio():
        positive = sum(x.A * min(x.r, high) for x in tokens if x.A > 0)
        negative = sum(-x.A * max(x.r, low) for x in tokens if x.A < 0)
        return positive / (negative + 1e-8) if negative > 0 else math.inf

    while ratio() < target and low < 0.8 - 1e-6:
        low += 0.05
    while ratio() < target and high < 2.0 - 1e-6:
        high += 0.05
    return low, high


def method_weight(method, x, settings, tokens):
    """What the method makes of the token `x` among the `tokens` of the step so far."""
    r, p, q, s = x.r, math.exp(x.log_p), math.exp(x.log_q), settings
    if method == "dppo_tv":
        away = p - q > s["dppo_delta"] if x.A > 0 else p - q < -s["dppo_delta"]
        return 0.0 if away else min(r, s["dppo_cap"])
    if method == "dppo_kl":
        D = q * math.log(q / p) + (1 - q) * (math.log(1 - q + 1e-8) - math.log(1 - p + 1e-8))
        away = D > s["dppo_delta"] and (p > q if x.A > 0 else p < q)
        return 0.0 if away else min(r, s["dppo_cap"])
    if method == "pspo":
        return (1 - s["pspo_alpha"]) * r
    if method == "aspo":
        if x.A > 0:
            return 0.0 if r > 1 + s["epsilon_high"] else min(1 / r, 3.0)
        return 0.0 if x.A < 0 and r < 1 - s["epsilon"] else min(r, 3.0)
    if method == "m2po":
        harmful = (x.A > 0 and r > 1) or (x.A < 0 and r < 1)
        return 0.0 if harmful and math.log(r) ** 2 > m2po_bound(tokens, s["m2po_budget"]) else r
    if method == "dcpo":
        low, dual = 0.5 + 0.5 * math.sqrt(max(1 - 4 * s["epsilon"] / q, 0)), 10.0
        high = min(0.5 + 0.5 * math.sqrt(1 + 4 * s["epsilon_high"] / q), 10.0)
    else:
        assert method == "bapo"
        (low, high), dual = bapo_bounds(tokens, s["bapo_target"]), 3.0
    return 0.0 if (x.A > 0 and r > high) or (x.A < 0 and (r < low or r > dual)) else r


def gtpo_weights(ids, scored, advantages, prompts):
    """The weights `[B, C]` of completions `ids` `[B, C]`; 0 where nothing is scored."""
    weights = scored.double()
    ends = [max((t + 1 for t in range(ids.shape[1]) if scored[s, t]), default=0) for s in range(len(ids))]

    def token(s, place, turned):
        t = ends[s] - 1 - place if turned else place
        return ids[s, t].item() if 0 <= t < ends[s] and scored[s, t] else None

    for s in range(len(ids)):
        group = [other for other in range(len(ids)) if prompts[other] == prompts[s]] if advantages[s] != 0 else []
        for turned in (False, True):
            for place in range(ends[s]):
                same = [u for u in group if token(s, place, turned) is not None]
                same = [u for u in same if token(u, place, turned) == token(s, place, turned)]
                if not any(advantages[u] > 0 for u in same) or not any(advantages[u] < 0 for u in same):
                    break
                weights[s, ends[s] - 1 - place if turned else place] *= 2 if advantages[s] > 0 else 0
    return weights


def scored_as_tokens(logps, sampler, scored, advantages):
    """Each scored token of `[B, C]` by its place."""
    return {
        (s, t): Token(
            logps[s, t].item(), (logps if sampler[s, t].isnan() else sampler)[s, t].item(), advantages[s].item()
        )
        for s, t in scored.nonzero().tolist()
    }


def tokens_of(logps, batch):
    return scored_as_tokens(logps, batch.extra["sampling_per_token_logps"], scored_tokens(batch), batch.advantages)


def method_weights(method, settings, tokens, shape, before=()):
    """The weights `[B, C]` of a microbatch's `tokens`, by their places; `before` are the step's before it."""
    weights, of_step = torch.zeros(shape, dtype=torch.float64), [*before, *tokens.values()]
    for place, x in tokens.items():
        weights[place] = method_weight(method, x, {**METHODS[method], **settings}, of_step)
    return weights


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


def definition(logps, batch, n, name, ess=None, before=()):
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
    if method == "gtpo":
        weights = n * gtpo_weights(batch.completion_ids, scored_tokens(batch), A, batch.extra["prompt_numbers"])
        return Expected(weights, None, A, -(weights * A.unsqueeze(1)).sum().item())
    if method in METHODS:
        tokens, earlier = tokens_of(logps, batch), [x for pair in before for x in tokens_of(*pair).values()]
        weights = n * method_weights(method, WEIGHTS[name], tokens, logps.shape, earlier)
        return Expected(weights, None, A, -(weights * A.unsqueeze(1)).sum().item())
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


def refer(model, batch, name, n, ess=None, temperature=1.0, before=()):
    """`ess` and `before`, pairs of log-probabilities and batches: what the step has seen until then."""
    expected = definition(forward(model, batch, temperature)[0], batch, n, name, ess, before)
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
    rows = training.sampled_rows(trainer.isopo.current, batch.prompt_ids.shape[1])
    trainer.isopo.end()
    return loss.item(), rows


def compare(model, trainer, expected, rule, **settings):
    loss, rows = backward(trainer, expected.batch)
    if trainer.args.fisher_samples == ALL:
        rows = None  # the oracle takes all real positions
    check(model, expected.gradients(model, rows, rule, **settings))
    assert loss == pytest.approx(expected.expected.loss, rel=1e-9, abs=1e-12)
