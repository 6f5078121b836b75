"""
The oracle for mixtures of experts: [`~tests.oracle`] with each expert's matrices as layers of their own.

Again every sequence is run alone, and every module that holds trained parameters is called again on each of its
positions alone, here with all its arguments: for experts, those are the position's own choices and their weights. The
gradient of a stack of matrices at that position is then cut by expert.
"""

from dataclasses import dataclass

import torch
from peft.tuners.lora.layer import ParamWrapper

from isopo_trl.layers.experts import is_experts
from tests import oracle


@dataclass
class Unit:
    """A module that is called, the trained parameters that its call uses, and which layer each number belongs to."""

    called: torch.nn.Module
    parameters: dict[str, torch.nn.Parameter]
    labels: torch.Tensor  # [all numbers of the parameters], 0 .. layers - 1


def units(model):
    found, taken = {}, set()
    for name, module in model.named_modules():
        if isinstance(module, ParamWrapper) and module not in taken:  # the outermost of those around a module
            wrappers = [m for m in module.modules() if isinstance(m, ParamWrapper)]
            labels, trained, first = [], {}, 0
            for wrapper in wrappers:
                E = wrapper.num_experts
                for factor, side in ((wrapper.lora_A, "A"), (wrapper.lora_B, "B")):
                    (weight,) = [p for p in factor.parameters() if p.requires_grad]
                    trained[_name(model, weight)] = weight
                    rows, columns = weight.shape
                    if side == "A":  # [E r, d]
                        label = torch.arange(rows).unsqueeze(1).expand(rows, columns) // (rows // E)
                    else:  # [p, r E], the expert's number runs fastest
                        label = torch.arange(columns).expand(rows, columns) % E
                    labels.append(first + label.flatten())
                    first += E
                taken |= set(wrapper.modules())
            found[name] = Unit(module, trained, torch.cat(labels))
        if module in taken:
            continue
        own = {n: p for n, p in module.named_parameters(recurse=False) if p.requires_grad}
        if not own:
            continue
        trained = {f"{name}.{n}": p for n, p in own.items()}
        if is_experts(module):
            labels = []
            for n, p in own.items():
                label = torch.arange(len(p)) + (len(p) if n.startswith("down_proj") else 0)
                labels.append(label.view(-1, *[1] * (p.dim() - 1)).expand_as(p).flatten())
            labels = torch.cat(labels)
            labels = torch.unique(labels, return_inverse=True)[1]
        else:
            labels = torch.zeros(sum(p.numel() for p in own.values()), dtype=torch.long)
        found[name] = Unit(module, trained, labels)
    return found


def _name(model, parameter):
    return next(name for name, p in model.named_parameters() if p is parameter)


def position_gradients(model, batch, weights):
    """Per unit, `[B, T, numbers]`: the gradient of each position's loss-carrying call."""
    called = {name: (unit.called, list(unit.parameters.values())) for name, unit in units(model).items()}
    return oracle.position_gradients(model, batch, weights, units=called)


def expected_gradients(model, G, batch, rows, rule="fisher", histories=None, **settings):
    """`sum_s c_s V_s` of every trained parameter by its name, from `G`, the [`position_gradients`]."""
    if rows is None:
        rows = batch.attention_mask.reshape(-1).nonzero().squeeze(1)
    expected = {}
    for name, unit in units(model).items():
        per_position = G[name]
        total = torch.empty_like(per_position[0, 0])
        for layer in range(int(unit.labels.max()) + 1):
            of_layer = per_position[..., unit.labels == layer]
            V = of_layer.sum(1)
            samples = of_layer.flatten(0, 1)[rows]
            history = None if histories is None else histories.get((name, layer))
            total[unit.labels == layer] = (
                oracle.coefficients(V, samples, batch.advantages, rule, history=history, **settings) @ V
            )
        sizes = [p.numel() for p in unit.parameters.values()]
        for (full, p), part in zip(unit.parameters.items(), total.split(sizes), strict=True):
            expected[full] = expected.get(full, 0) + part.view_as(p)
    return expected


def worst_error(model, expected):
    """Largest relative error over all layers, each expert by itself; with the parameter's name."""
    errors = {}
    for name, unit in units(model).items():
        mine = torch.cat([p.grad.flatten() for p in unit.parameters.values()])
        right = torch.cat([expected[full].flatten() for full in unit.parameters])
        for layer in range(int(unit.labels.max()) + 1):
            here = unit.labels == layer
            size, difference = right[here].norm().item(), (mine[here] - right[here]).norm().item()
            errors[name, layer] = difference / size if size > 0 else difference
    worst = max(errors, key=lambda key: errors[key])
    return errors[worst], worst


def updated_means(model, G, batch, means, decay=0.9, **settings):
    """
    The running means of `fisher` after a step of one microbatch with all its positions as samples, per (unit, layer):
    a layer where no sequence has a gradient keeps those it had, which may be none.
    """
    rows = batch.attention_mask.reshape(-1).nonzero().squeeze(1)
    updated = dict(means)
    for name, unit in units(model).items():
        for layer in range(int(unit.labels.max()) + 1):
            of_layer = G[name][..., unit.labels == layer]
            V, samples = of_layer.sum(1), of_layer.flatten(0, 1)[rows]
            weight = samples.square().sum()
            F = ((samples @ V.T).square().sum(0) / weight).sqrt() if weight > 0 else torch.zeros(len(V))
            past = means.get((name, layer))
            real = oracle.without_noise(F.tolist(), None if past is None else past["fisher^2"])
            alive = torch.tensor(real) > 0
            if not alive.any():
                continue
            f = oracle.coefficients(V, samples, torch.ones(len(V)), "fisher", scale="paper", history=past, **settings)
            terms = {"fisher^2": F**2, "norm^2": V.square().sum(1), "fx": f * F, "x": F}
            now = {term: values[alive].mean().item() for term, values in terms.items()}
            updated[name, layer] = now if past is None else {t: decay * past[t] + (1 - decay) * now[t] for t in now}
    return updated
