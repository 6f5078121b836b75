"""What `fisher_norm.py` measures: the package's norms, and the divergence of a step, on a tiny model."""

import pytest
import torch

from tests import tiny


@pytest.fixture(scope="module")
def fisher_norm():
    import fisher_norm

    return fisher_norm


@pytest.fixture
def model(fisher_norm):
    torch.manual_seed(0)
    model = tiny.model("qwen3").double().eval()
    fisher_norm.untie(model)
    return model


@pytest.fixture
def batch(fisher_norm):
    generator = torch.Generator().manual_seed(0)
    lengths, prompts = [9, 6, 8, 11], [4, 3, 4, 5]
    rows = [torch.randint(3, 20, (length,), generator=generator).tolist() for length in lengths]
    return fisher_norm.padded(rows, prompts)


def gradients(fisher_norm, model, batch, name):
    """`V_s` of every sequence at one module, flat, `[m, parameters]`: each sequence alone, by autograd."""
    rows = []
    for s in range(len(batch.ids)):
        fisher_norm.sequence_gradient(model, batch, s)
        rows.append(torch.cat([p.grad.flatten() for p in model.get_submodule(name).parameters(recurse=False)]))
    return torch.stack(rows)


def test_completions_follow_their_prompts_and_end_where_they_end(fisher_norm):
    torch.manual_seed(0)
    tokenizer, model = tiny.tokenizer(), tiny.model("qwen3").eval()
    end = tokenizer.eos_token_id
    with torch.no_grad():
        model.lm_head.weight[end] = model.lm_head.weight.mean(0)  # ends often, and not at once
    questions = [[{"role": "user", "content": text}] for text in ("1 + 2", "1 + 2 + 3 + 4 + 5")]
    batch = fisher_norm.sampled(model, tokenizer, questions, generations=8, tokens=40)
    asked = [fisher_norm.prompt_ids(tokenizer, question)[0].tolist() for question in questions for _ in range(8)]
    assert batch.prompts == list(map(len, asked)) and len(set(batch.prompts)) == 2
    rows = [row[:length] for row, length in zip(batch.ids.tolist(), batch.lengths, strict=True)]
    assert [row[: len(prompt)] for row, prompt in zip(rows, asked, strict=True)] == asked
    completions = [tuple(row[len(prompt) :]) for row, prompt in zip(rows, asked, strict=True)]
    assert all(end not in c[:-1] and (c[-1] == end or len(c) == 40) for c in completions)
    assert {c[-1] == end for c in completions} == {True, False} and len(set(completions)) > 8


def test_norms_are_those_of_each_sequence_alone(fisher_norm, model, batch):
    names = fisher_norm.chosen_layers(model, 1)
    kinds = {name.split(".")[-1] for name, m in model.named_modules() if list(m.parameters(recurse=False))}
    assert {name.split(".")[-1] for name in names} == kinds and len(names) == len(kinds)
    norms = fisher_norm.package_norms(model, batch)
    for name in names:
        V = gradients(fisher_norm, model, batch, name)
        K = V @ V.t()
        reduced = (K.square().sum(0) / K.trace()).sqrt()
        torch.testing.assert_close(torch.tensor(norms[name]["norm"], dtype=V.dtype), V.norm(dim=1))
        torch.testing.assert_close(torch.tensor(norms[name]["fisher"]["reduced"][0], dtype=V.dtype), reduced)
        # Fewer positions than 64: all of them, whichever number is asked for
        (whole,) = norms[name]["fisher"]["all"]
        assert all(draw == pytest.approx(whole) for draw in norms[name]["fisher"]["64"])
        assert any(draw != pytest.approx(whole) for draw in norms[name]["fisher"]["16"])


def test_divergence_of_small_steps_is_the_fisher_metric(fisher_norm, model, batch):
    """Against the metric by its definition: the variance of the change of all log-probabilities along the step."""
    names = [name for name in fisher_norm.chosen_layers(model, 1) if name.endswith(("q_proj", "norm", "lm_head"))]
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    model.set_attn_implementation("eager")  # the fused one has no derivative along a direction
    rows = fisher_norm.measure(model, batch, names, others=1, target=1e-4)

    def variance(name, s, direction):
        """Of the changes in sequence `s`, summed over its completion."""

        def logits(weight):
            ids = batch.ids[s : s + 1, : batch.lengths[s]]
            called = torch.func.functional_call(model, {f"{name}.weight": weight}, (ids,), {"use_cache": False})
            return called.logits[0, batch.prompts[s] - 1 : -1]

        weight = before[f"{name}.weight"]
        value, slope = torch.func.jvp(logits, (weight,), (direction.view_as(weight),))
        p = value.softmax(-1)
        return ((p * slope.square()).sum(-1) - (p * slope).sum(-1).square()).sum().item()

    for row in rows:
        V = gradients(fisher_norm, model, batch, row["layer"])
        for s in range(4):
            expected = row["size"][s] ** 2 / 2 * variance(row["layer"], s, V[s])
            assert row["kl"][s] == pytest.approx(expected, rel=0.1)
            assert row["kl"][s] / row["half"][s] == pytest.approx(4, rel=0.1)
            assert 2e-5 < row["kl"][s] < 5e-4  # about what was aimed at
            # Of four completions, two per prompt, one of the other prompt is two places further on
            expected = row["size"][s] ** 2 / 2 * variance(row["layer"], (s + 2) % 4, V[s])
            assert row["others"][s] == pytest.approx(expected, rel=0.1)
    for name, p in model.named_parameters():
        torch.testing.assert_close(p, before[name], rtol=0, atol=0)
