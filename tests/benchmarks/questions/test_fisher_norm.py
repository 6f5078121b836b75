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


def test_completions_are_the_models_own_and_end_where_they_end(fisher_norm, monkeypatch):
    torch.manual_seed(0)
    tokenizer = tiny.tokenizer()
    model = tiny.model("qwen3").eval()
    with torch.no_grad():
        model.lm_head.weight[tokenizer.eos_token_id] = model.lm_head.weight.mean(0)  # ends often, and not at once
    questions = [[{"role": "user", "content": text}] for text in ("1 + 2", "1 + 2 + 3 + 4 + 5")]
    seen, generate = [], model.generate
    monkeypatch.setattr(
        model,
        "generate",
        lambda ids, attention_mask, **options: (
            seen.extend(row[mask.bool()].tolist() for row, mask in zip(ids, attention_mask, strict=True))
            or generate(ids, attention_mask=attention_mask, **options)
        ),
    )
    batch = fisher_norm.sampled(model, tokenizer, questions, generations=8, tokens=40)
    asked = [fisher_norm.prompt_ids(tokenizer, question)[0].tolist() for question in questions for _ in range(8)]
    assert seen == asked  # padding is masked, and nothing else
    assert batch.prompts == [len(prompt) for prompt in asked] and len(set(batch.prompts)) == 2
    completions = []
    for row, length, prompt in zip(batch.ids.tolist(), batch.lengths, asked, strict=True):
        assert row[: len(prompt)] == prompt
        completions.append(tuple(row[len(prompt) : length]))
    ends = [
        completion.index(tokenizer.eos_token_id) for completion in completions if tokenizer.eos_token_id in completion
    ]
    ended = [completion for completion in completions if completion[-1] == tokenizer.eos_token_id]
    assert 0 < len(ends) == len(ended) and ends == [len(completion) - 1 for completion in ended]
    assert all(len(completion) == 40 for completion in completions if completion not in ended)
    assert len(set(completions)) > 8


def test_norms_are_those_of_each_sequence_alone(fisher_norm, model, batch):
    names = fisher_norm.chosen_layers(model, 1)
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


def test_other_sequences_are_those_of_other_prompts(fisher_norm, model, batch, monkeypatch):
    """Of four completions, two per prompt, the other one is measured two places further on."""
    asked = []
    own = fisher_norm.Divergence.__call__
    monkeypatch.setattr(
        fisher_norm.Divergence, "__call__", lambda self, s, cut=0: asked.append(s) or own(self, s, cut)
    )
    fisher_norm.measure(model, batch, ["lm_head"], others=1, target=1e-4)
    assert [(a, b) for a, b in zip(asked, asked[1:], strict=False) if abs(a - b) == 2] == [
        (0, 2),
        (2, 0),
        (1, 3),
        (3, 1),
        (2, 0),
        (0, 2),
        (3, 1),
        (1, 3),
    ]


def test_every_kind_of_layer_is_chosen_and_of_blocks_as_many_as_asked_for(fisher_norm, model):
    names = fisher_norm.chosen_layers(model, 1)
    kinds = [name.split(".")[-1] for name in names]
    expected = {name.split(".")[-1] for name, m in model.named_modules() if list(m.parameters(recurse=False))}
    assert set(kinds) == expected and kinds.count("q_proj") == 1


def test_blocks_below_a_step_are_passed_over_without_a_difference(fisher_norm, model, batch):
    blocks, prefix = fisher_norm.decoder_blocks(model)
    last = len(blocks) - 1
    divergence = fisher_norm.Divergence(model, batch, {0, last})
    weight = model.get_submodule(f"{prefix}{last}.mlp.down_proj").weight
    assert divergence(1, last) == pytest.approx(0, abs=1e-12)
    with fisher_norm.stepped([weight], [torch.randn_like(weight)], 0.1):
        whole, cut = divergence(1), divergence(1, last)
    assert whole > 1e-6 and cut == pytest.approx(whole, rel=1e-9)


def test_divergence_of_small_steps_is_the_fisher_metric(fisher_norm, model, batch):
    """Against the metric by its definition: the variance of the change of all log-probabilities along the step."""
    names = [name for name in fisher_norm.chosen_layers(model, 1) if name.endswith(("q_proj", "norm", "lm_head"))]
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    model.set_attn_implementation("eager")  # the fused one has no derivative along a direction
    rows = fisher_norm.measure(model, batch, names, others=1, target=1e-4)
    for row in rows:
        V = gradients(fisher_norm, model, batch, row["layer"])
        for s, length in enumerate(batch.lengths):
            ids, start = batch.ids[s : s + 1, :length], batch.prompts[s] - 1

            def logits(weight, ids=ids, start=start, name=row["layer"]):
                called = torch.func.functional_call(model, {f"{name}.weight": weight}, (ids,), {"use_cache": False})
                return called.logits[0, start:-1]

            weight = before[f"{row['layer']}.weight"]
            value, slope = torch.func.jvp(logits, (weight,), (V[s].view_as(weight),))
            p = value.softmax(-1)
            variance = (p * slope.square()).sum(-1) - (p * slope).sum(-1).square()
            expected = row["size"][s] ** 2 / 2 * variance.sum().item()
            assert row["kl"][s] == pytest.approx(expected, rel=0.1)
            assert row["kl"][s] / row["half"][s] == pytest.approx(4, rel=0.1)
            assert 2e-5 < row["kl"][s] < 5e-4  # about what was aimed at
    for name, p in model.named_parameters():
        torch.testing.assert_close(p, before[name], rtol=0, atol=0)
