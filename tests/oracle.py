"""The oracle: ISOPO by its definition, in float64, with nothing of the package in it.

Every sequence is run alone, without padding. Each module's parameters get their gradient position by position: the
module is called again on the input of that one position, and autograd takes the position's cotangent back to the
parameters. So `G[t]` is the gradient of position t, `V = sum_t G[t]` that of the sequence, and the formulas of the
paper follow on flat vectors. Two uses of one parameter (tied embedding and head) are two entries.

A module whose gradient is taken per sequence has no positions: its `V` is what autograd gives for the sequence alone,
and the samples of its Fisher metric are the `V` of all sequences. Which parameters are one such module's is for the
test to say: `whole`, a list of parameters by name.
"""

import contextlib
import math
from dataclasses import dataclass, field

import torch


@dataclass
class Batch:
    """A left-padded prompt and a right-padded completion for each of B sequences, as TRL lays them out."""

    prompt_ids: torch.Tensor
    prompt_mask: torch.Tensor
    completion_ids: torch.Tensor
    completion_mask: torch.Tensor
    advantages: torch.Tensor
    extra: dict = field(default_factory=dict)

    @property
    def input_ids(self):
        return torch.cat([self.prompt_ids, self.completion_ids], dim=1)

    @property
    def attention_mask(self):
        return torch.cat([self.prompt_mask, self.completion_mask], dim=1)

    def for_trl(self):
        return {
            "prompt_ids": self.prompt_ids,
            "prompt_mask": self.prompt_mask,
            "completion_ids": self.completion_ids,
            "completion_mask": self.completion_mask,
            "advantages": self.advantages,
            "num_items_in_batch": self.completion_mask.sum(),
            **self.extra,
        }

    def part(self, rows):
        pick = {name: value[rows] for name, value in self.extra.items()}
        tensors = (self.prompt_ids, self.prompt_mask, self.completion_ids, self.completion_mask, self.advantages)
        return Batch(*(x[rows] for x in tensors), extra=pick)


def random_batch(prompts, completions, vocabulary, seed=0, advantages=None):
    """Sequences with the given prompt and completion lengths."""
    generator = torch.Generator().manual_seed(seed)
    B, P, C = len(prompts), max(prompts), max(max(completions), 1)
    prompt_ids = torch.zeros(B, P, dtype=torch.long)
    prompt_mask = torch.zeros(B, P, dtype=torch.long)
    completion_ids = torch.zeros(B, C, dtype=torch.long)
    completion_mask = torch.zeros(B, C, dtype=torch.long)
    for s, (p, c) in enumerate(zip(prompts, completions, strict=True)):
        # Few different tokens, so that sequences share some
        prompt_ids[s, P - p :] = torch.randint(3, min(vocabulary, 15), (p,), generator=generator)
        prompt_mask[s, P - p :] = 1
        completion_ids[s, :c] = torch.randint(3, min(vocabulary, 15), (c,), generator=generator)
        completion_mask[s, :c] = 1
    if advantages is None:
        advantages = torch.randn(B, generator=generator, dtype=torch.float64)
    return Batch(prompt_ids, prompt_mask, completion_ids, completion_mask, torch.as_tensor(advantages))


def token_weights(batch, loss_type="dapo", accumulation=1, max_completion_length=None):
    """What multiplies `-A log p` of each completion token in TRL's loss, on-policy, `[B, C]`."""
    mask = batch.completion_mask.double()
    B = len(mask)
    if loss_type == "grpo":
        weights = mask / mask.sum(1, keepdim=True).clamp(min=1) / B
    elif loss_type in ("dapo", "bnpo"):
        weights = mask / mask.sum().clamp(min=1)
    elif loss_type == "dr_grpo":
        weights = mask / (B * max_completion_length)
    elif loss_type == "luspo":
        weights = mask / B
    return weights / accumulation


def token_logps(model, batch):
    """Log-probabilities `[B, C]` of the completions' tokens, from a plain forward pass."""
    ids, C = batch.input_ids, batch.completion_ids.shape[1]
    logits = model(input_ids=ids, attention_mask=batch.attention_mask, use_cache=False).logits[:, :-1]
    return logits.log_softmax(-1).gather(-1, ids[:, 1:, None]).squeeze(-1)[:, -C:]


def packed(batch, weights, dtype=torch.float64):
    """
    The sequences two to a row: tokens, sequences' numbers (-1 is padding), position ids and weights of tokens, all
    `[rows, T]`, and an attention mask of the `dtype` that keeps sequences apart.
    """
    B, P = batch.prompt_ids.shape
    T = batch.input_ids.shape[1]
    real = batch.attention_mask.bool()

    def laid_out(x, fill):
        rows = [torch.cat([x[s][real[s]] for s in range(first, min(first + 2, B))]) for first in range(0, B, 2)]
        return torch.nn.utils.rnn.pad_sequence(rows, batch_first=True, padding_value=fill)

    numbers = laid_out(torch.arange(B).unsqueeze(1).expand(B, T), -1)
    apart = (numbers.unsqueeze(2) != numbers.unsqueeze(1)) | torch.ones(2 * [numbers.shape[1]]).triu(1).bool()
    mask = torch.zeros(apart.shape, dtype=dtype).masked_fill(apart, torch.finfo(dtype).min).unsqueeze(1)
    weights = torch.cat([weights.new_zeros(B, P), weights], 1)
    return laid_out(batch.input_ids, 0), numbers, laid_out(torch.arange(T).expand(B, T), 0), laid_out(weights, 0), mask


@contextlib.contextmanager
def float64_throughout():
    """Models go to float32 in places, whatever they are given; here they cannot."""
    kept = torch.Tensor.float, torch.float, torch.float32
    torch.Tensor.float, torch.float, torch.float32 = torch.Tensor.double, torch.float64, torch.float64
    try:
        yield
    finally:
        torch.Tensor.float, torch.float, torch.float32 = kept


# Gradients of single positions


def trained_modules(model):
    return {name: module for name, module in model.named_modules() if trained(module)}


def trained(module):
    return [p for p in module.parameters(recurse=False) if p.requires_grad]


@contextlib.contextmanager
def remembered(modules):
    """All calls of the modules, by name: `(args, kwargs, outputs)`, where outputs have a gradient after a backward."""
    seen, handles = {name: [] for name in modules}, []
    for name, module in modules.items():

        def remember(module, args, kwargs, output, calls=seen[name]):
            several = isinstance(output, tuple)
            outputs = list(map(_copied, output if several else (output,)))
            for y in outputs:
                if isinstance(y, torch.Tensor) and y.requires_grad:
                    y.retain_grad()
            calls.append(([_detached(x) for x in args], {n: _detached(x) for n, x in kwargs.items()}, outputs))
            handed = tuple(map(_copied, outputs))  # since some families go on in place
            return handed if several else handed[0]

        handles.append(module.register_forward_hook(remember, with_kwargs=True))
    try:
        yield seen
    finally:
        for handle in handles:
            handle.remove()


def _copied(x):
    return x.clone() if isinstance(x, torch.Tensor) else x


def _detached(x):
    return x.detach() if isinstance(x, torch.Tensor) else x


def at_positions(module, parameters, calls, positions, experts=1):
    """`[positions, numbers]`: the module is called again on each position of its only call that has a gradient."""
    calls = [call for call in calls if any(isinstance(y, torch.Tensor) and y.grad is not None for y in call[2])]
    assert len(calls) == 1, f"{len(calls)} calls"
    ((args, kwargs, outputs),) = calls
    if type(module) is torch.nn.Linear and experts == 1 and {*parameters} <= {*trained(module)} and args:
        a, g = args[0], outputs[0].grad
        if a.dtype == torch.float64 and a.shape[:-1].numel() == positions:  # the same, faster, see `test_oracle.py`
            a, g = a.reshape(positions, -1), g.reshape(positions, -1)
            of = {module.weight: torch.einsum("tp,td->tpd", g, a).flatten(1), module.bias: g}
            return torch.cat([of[p] for p in parameters], dim=1)
    rows = []
    for t in range(positions):

        def at(x, t=t):
            return _at(x, t, positions, experts)

        ys = module(*map(at, args), **{name: at(x) for name, x in kwargs.items()})
        pairs = [
            (y, at(whole.grad))
            for y, whole in zip(ys if isinstance(ys, tuple) else (ys,), outputs, strict=True)
            if isinstance(whole, torch.Tensor) and whole.grad is not None
        ]
        here, there = zip(*pairs, strict=True)
        gradients = torch.autograd.grad(here, parameters, there, allow_unused=True)
        flat = zip(parameters, gradients, strict=True)
        rows.append(torch.cat([(torch.zeros_like(p) if g is None else g).flatten() for p, g in flat]))
    return torch.stack(rows)


def _at(x, t, positions, experts):
    if not isinstance(x, torch.Tensor):
        return x
    if experts > 1 and x.dim():  # all positions of one expert, then those of the next
        return x.view(experts, positions, -1)[:, t]
    for axis in (0, 1) if x.dim() == 2 else (1, 2, 0, 3):
        if axis < x.dim() and x.shape[axis] == positions:
            return x.narrow(axis, t, 1)
    return x  # the same for all positions; what is not is noticed by the sum over them


def position_gradients(model, batch, weights, temperature=1.0, rounding=1e-8, whole=None, inputs=None, units=None):
    """
    Per use of trained parameters, per sequence: `G` `[B, positions, numbers]`, with the columns of the padded batch as
    positions (zero where there is none).

    Args:
        rounding: what the model's own arithmetic may lose; `None` where it loses too much for autograd's whole to be
            compared with the sum.
        whole: by name, parameters that have one position.
        inputs: `inputs(s, columns)` are the model's for sequence s beside its tokens; by default the columns as
            positions.
        units: by name, a module that is called and the parameters that its call uses; by default every module that has
            trained parameters, and those.
    """
    whole = whole or {}
    apart = {p for parameters in whole.values() for p in parameters}
    units = units or {name: (module, trained(module)) for name, module in trained_modules(model).items()}
    units = {name: unit for name, unit in units.items() if not apart.issuperset(unit[1])}
    T, P = batch.input_ids.shape[1], batch.prompt_ids.shape[1]
    result = {name: [] for name in (*units, *whole)}
    for s in range(len(weights)):
        columns = batch.attention_mask[s].nonzero().squeeze(1)
        ids = batch.input_ids[s : s + 1, columns]
        others = {"position_ids": columns.unsqueeze(0)} if inputs is None else inputs(s, columns)
        with remembered({name: module for name, (module, _) in units.items()}) as seen:
            logits = model(input_ids=ids, use_cache=False, **others).logits[0, -len(columns) : -1] / temperature
        logps = logits.log_softmax(-1).gather(1, ids[0, 1:, None]).squeeze(1)
        scored = columns[1:] >= P
        model.zero_grad()
        (-(logps[scored] * weights[s, columns[1:][scored] - P]).sum()).backward()
        for name, parameters in whole.items():
            result[name].append(torch.cat([p.grad.reshape(1, -1) for p in parameters], dim=1))
        totals = {}
        for name, (module, parameters) in units.items():
            G = at_positions(module, parameters, seen[name], len(columns))
            result[name].append(G.new_zeros(T, G.shape[1]).index_copy(0, columns, G))
            for p, total in zip(parameters, G.sum(0).split([p.numel() for p in parameters]), strict=True):
                totals[p] = totals.get(p, 0) + total
        for p, total in totals.items() if rounding is not None else ():  # agrees with autograd on the whole
            torch.testing.assert_close(total, p.grad.reshape(-1), rtol=rounding, atol=1e-4 * rounding)
    return {name: torch.stack(rows) for name, rows in result.items()}


# The formulas


EXPONENTS = {
    "fisher": (-1, 0, 0),
    "npg": (0, 0, -2),
    "fig4": (0, -1, -2),
    "euclidean": (0, -1, 0),
    "none": (0, 0, 0),
}


# A norm of less than 256 units of rounding of float64, beside the root mean square of the others, is no gradient
NOISE = 2.0**-44


def without_noise(norms, running_mean_square=None, level=NOISE):
    """The norms of a microbatch, with 0 for those that are rounding noise; what is not finite is left as it is."""
    finite = [x for x in norms if math.isfinite(x)]
    largest = max(sum(x * x for x in finite) / len(norms), running_mean_square or 0.0)
    return [0.0 if x < level * largest**0.5 else x for x in norms]


def coefficients(
    V, G_samples, A, rule, regularization=None, keep_small=False, scale="relative", history=None, own=None
):
    """
    The coefficient of each sequence by the formulas: `V` `[m, parameters]`, `G_samples` `[n, parameters]`.

    `history` gives the running means by name; without it they are the microbatch's own. `regularization` is that of
    the rule's default if `None`. `own` `[n, m]`, if given, says which samples are a sequence's own: these do not count
    for it.
    """
    N = [v.norm().item() for v in V]
    if rule == "proma":  # with nothing accumulated before
        return A.to(V.dtype)
    if rule == "spring":  # without a direction
        rule, scale = "interacting", "paper"
    if rule == "interacting":
        N = without_noise(N, None if history is None else history["norm^2"])
        alive = [s for s in range(len(V)) if N[s] > 0]
        if not alive:
            return torch.zeros(len(V), dtype=V.dtype)
        K = V[alive] @ V[alive].T
        mean = K.trace().item() / len(alive) if history is None else history["norm^2"]
        c0 = (1.0 if regularization is None else regularization) * mean
        solution = torch.linalg.solve(K + c0 * torch.eye(len(alive), dtype=V.dtype), A[alive].to(V.dtype))
        c = torch.zeros(len(V), dtype=V.dtype)
        c[alive] = solution * (c0 if scale == "relative" else 1)
        return c
    exponents = rule if isinstance(rule, tuple) else EXPONENTS[rule]
    default = 1.0 if sum(map(abs, exponents)) > 2 else 0.1
    lam = default if regularization is None and any(exponents) else regularization or 0.0
    F, weights = fisher_norms(V, G_samples, own), weights_of(V, G_samples, own)
    F, N = (
        without_noise(x, None if history is None else history.get(name))
        for name, x in (("fisher^2", F), ("norm^2", N))
    )
    values = {"fisher": F, "norm": N, "relative": [f / n if n > 0 else 0.0 for f, n in zip(F, N, strict=True)]}
    used = [name for name, e in zip(values, exponents, strict=True) if e]
    looked_at = {"fisher": ["fisher"], "norm": ["norm"], "relative": ["fisher", "norm"]}
    looked_at = {stat for name in used for stat in looked_at[name]}
    alive = [s for s in range(len(V)) if all(values[stat][s] > 0 for stat in looked_at)]

    def mean(name, numbers):
        if history is not None:
            return history[name]
        return sum(numbers[s] for s in alive) / max(len(alive), 1)

    f = []
    for s in range(len(V)):
        product = 1.0
        for name, exponent in zip(values, exponents, strict=True):
            if exponent == 0:
                continue
            level = lam * mean(f"{name}^2", [x * x for x in values[name]])
            x = values[name][s]
            if lam == 0:
                regular = x
            elif keep_small:
                regular = (x * x / level + 1) ** 0.5 if level > 0 else 0.0
            else:
                regular = (x * x + level) ** 0.5
            product *= regular**exponent if regular > 0 else 0.0
        f.append(product)
    if scale == "relative" and used:
        x = F if "fisher" in looked_at else N
        numerator = mean("fx", [a * b for a, b in zip(f, x, strict=True)])
        f = [value * mean("x", x) / numerator if numerator > 0 else 0.0 for value in f]
    if "fisher" in looked_at:  # where nothing is known of F, a sequence gets the mean multiplier
        middle = 1.0 if scale == "relative" else 0.0 if history is None else history["fx"] / history["x"]
        f = [value if weight > 0 else middle for value, weight in zip(f, weights, strict=True)]
    return A.to(V.dtype) * torch.tensor(f, dtype=V.dtype)


def others(V, samples, own):
    """The samples that count for each sequence."""
    return [samples if own is None else samples[~own[:, s]] for s in range(len(V))]


def weights_of(V, samples, own=None):
    return [rows.square().sum().item() for rows in others(V, samples, own)]


def fisher_norms(V, samples, own=None):
    """`F_s` of each sequence; 0 where nothing is known of it."""
    pairs = zip(V, others(V, samples, own), weights_of(V, samples, own), strict=True)
    return [((rows @ v).square().sum().item() / weight) ** 0.5 if weight > 0 else 0.0 for v, rows, weight in pairs]


def expected_gradients(model, G, batch, rows, rule="fisher", histories=None, whole=None, **settings):
    """
    `sum_s c_s V_s` for every trained parameter: a dict by parameter, uses of the same parameter added up.

    Args:
        G: from [`position_gradients`].
        rows: sampled positions, numbers `b * T + t`; `None` for all real positions.
        whole: as for [`position_gradients`].
    """
    whole = whole or {}
    if rows is None:
        rows = batch.attention_mask.reshape(-1).nonzero().squeeze(1)
    expected = {}
    modules = trained_modules(model)
    for name in G:
        V = G[name].sum(1)
        samples = V if name in whole else G[name].reshape(-1, V.shape[1])[rows]
        history = None if histories is None else histories[name]
        c = coefficients(V, samples, batch.advantages, rule, history=history, **settings)
        parameters = whole[name] if name in whole else trained(modules[name])
        flat = iter((c @ V).split([p.numel() for p in parameters]))
        for p in parameters:
            gradient = next(flat).view_as(p)
            expected[p] = expected[p] + gradient if p in expected else gradient
    return expected


def worst_error(model, expected):
    """Largest relative error over parameters of `p.grad` against what is expected, with the parameter's name."""
    errors = {}
    for name, p in model.named_parameters():
        if p.requires_grad:
            assert p.grad is not None, f"{name} has no gradient"
            size = expected[p].norm()
            difference = (p.grad.double() - expected[p]).norm()
            errors[name] = (difference / size if size > 0 else difference).item()
    worst = max(errors, key=lambda name: errors[name])
    return errors[worst], worst
