"""CAPO: tokens are gated by what loops over the vocabulary say that a plain step at the head does, in float64."""

import pytest
import torch
import trl.trainer.utils

from isopo_trl import ISOPOConfig
from isopo_trl.token_weights import named
from isopo_trl.token_weights.capo import changes
from isopo_trl.trl_seam.head import HeadFigures
from tests import oracle, training
from tests.gradients.test_oracle import build, check, trainer_for
from tests.token_weights.definition import (
    ALL,
    backward,
    log_ratios,
    normalisation,
    off_policy,
    ragged_batch,
    scored_tokens,
)


pytestmark = pytest.mark.usefixtures("float64_throughout")


def changes_by_loops(pi, y, h, A, eta):
    """`m_H` and `m_F` of the token `y` drawn from `pi` `[V]` after the hidden state `h` `[d]`."""
    v = [float(j == y) - p for j, p in enumerate(pi)]
    square = sum(x * x for x in h)
    u = [A * square * x for x in v]
    along = sum(x * z for x, z in zip(v, u, strict=True)) ** 2
    mean = sum(p * z for p, z in zip(pi, u, strict=True))
    variance = sum(p * z * z for p, z in zip(pi, u, strict=True)) - mean**2
    product = sum((A * x * z) ** 2 for x in v for z in h)  # <g, G> of g = G = A v h^T, entry by entry
    return eta * product + eta**2 / 2 * A * (along - variance), eta**2 / 2 * along


def by_loops(model, batch, temperature=1.0, eta=0.1):
    """`log p`, `m_H` and `m_F` `[3, B, C]` of the scored tokens; each sequence alone, without padding."""
    head = model.get_output_embeddings()
    found, P = torch.zeros(3, *batch.completion_ids.shape, dtype=torch.float64), batch.prompt_ids.shape[1]
    for s, A in enumerate(batch.advantages.tolist()):
        columns, states = batch.attention_mask[s].nonzero().squeeze(1), []
        ids = batch.input_ids[s : s + 1, columns]
        hook = head.register_forward_pre_hook(lambda module, args, states=states: states.append(args[0][0]))
        with torch.no_grad():
            logits = model(input_ids=ids, position_ids=columns.unsqueeze(0), use_cache=False).logits[0]
        hook.remove()
        for place, column in enumerate(columns.tolist()):
            if column < P or not scored_tokens(batch)[s, column - P]:
                continue
            pi, y = (logits[place - 1] / temperature).softmax(0).tolist(), ids[0, place].item()
            m = changes_by_loops(pi, y, states[0][place - 1].tolist(), A, eta)
            found[:, s, column - P] = torch.tensor([pi[y], *m], dtype=torch.float64)
            found[0, s, column - P] = found[0, s, column - P].log()
    return found


def test_changes_are_those_of_every_logit():
    generator = torch.Generator().manual_seed(3)
    logits = 3 * torch.randn(4, 5, 9, generator=generator, dtype=torch.float64)
    h = torch.randn(4, 5, 3, generator=generator, dtype=torch.float64)
    A = torch.tensor([[1.2], [-0.7], [0.0], [2.0]], dtype=torch.float64)
    y, pi = torch.randint(9, (4, 5), generator=generator), logits.softmax(-1)
    logps = logits.log_softmax(-1).gather(2, y.unsqueeze(2)).squeeze(2)
    head = HeadFigures(h.square().sum(2), pi.square().sum(2), pi.pow(3).sum(2))
    found = torch.stack(changes(logps, head, A, 0.3))
    expected = [
        [changes_by_loops(pi[s, t].tolist(), y[s, t], h[s, t].tolist(), A[s].item(), 0.3) for t in range(5)]
        for s in range(4)
    ]
    torch.testing.assert_close(
        found, torch.tensor(expected, dtype=torch.float64).permute(2, 0, 1), rtol=1e-12, atol=1e-14
    )


# Rates, and the shares of tokens that are within each bound: so that each gates some that the other does not, or some
# by which the objective would get worse
RATES = {0.1: (0.7, 0.6), 0.3: (0.5, 0.8)}


@pytest.mark.parametrize(
    ("lora", "rule", "rate"),
    [(False, "fisher", 0.1), (True, "fisher", 0.3), (False, "none", 0.3), (True, "none", 0.1)],
)
def test_gradient_is_the_definition(lora, rule, rate, tmp_path):
    model = build("llama", lora)
    batch = ragged_batch(model)
    scored, (logps, of_objective, of_policy) = scored_tokens(batch).bool(), by_loops(model, batch, eta=rate)
    within, near = RATES[rate]
    tau_h, tau_f = of_objective.abs()[scored].quantile(within).item(), of_policy[scored].quantile(near).item()
    high, far = of_objective.abs() >= tau_h, of_policy >= tau_f
    assert (high & ~far)[scored].any() and (~high & ~far)[scored].any()
    assert (far & ~high)[scored].any() if rate == 0.1 else (high & ~far & (of_objective < 0))[scored].any()
    z, n = log_ratios(logps, batch), normalisation(batch)
    weights = n * z.exp().masked_fill(high | far, 0)
    expected = oracle.expected_gradients(model, oracle.position_gradients(model, batch, weights), batch, None, rule)
    model.zero_grad()
    settings = {"token_weights": "capo", "capo_tau_h": tau_h, "capo_tau_f": tau_f, "learning_rate": rate}
    trainer = trainer_for(model, tmp_path, rule=rule, fisher_samples=ALL, **settings)
    loss, _ = backward(trainer, batch)
    check(model, expected)
    assert loss == pytest.approx(-(weights * batch.advantages.unsqueeze(1)).sum().item(), rel=1e-9)
    gated = trainer.weighting.step()["gated"].item()
    assert gated == pytest.approx(((high | far) & scored).sum().item() / scored.sum().item())


@pytest.mark.parametrize("compact", [False, True], ids=["every position", "scored rows alone"])
def test_figures_of_the_head_are_those_of_its_logits(compact, tmp_path, monkeypatch):
    """With a soft cap and at another temperature; with Triton, TRL hands its head only the scored rows."""
    monkeypatch.setattr(trl.trainer.utils, "_use_triton", lambda device: compact)
    model = build("gemma2")
    batch = off_policy(model, oracle.random_batch([3, 1, 4], [5, 2, 4], 100), temperature=0.6)
    logps, *expected = by_loops(model, batch, temperature=0.6)
    trainer = trainer_for(model, tmp_path, token_weights="capo", temperature=0.6, learning_rate=0.1)
    seen, weigh = [], trainer.weighting.weigh
    monkeypatch.setattr(trainer.weighting, "weigh", lambda tokens: seen.append(tokens) or weigh(tokens))
    backward(trainer, batch)
    (tokens,) = seen
    found = changes(tokens.logps.detach(), tokens.head, batch.advantages.unsqueeze(1), tokens.learning_rate)
    scored = batch.completion_mask.bool()
    torch.testing.assert_close(tokens.logps.detach()[scored], logps[scored])
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one[scored], other[scored], rtol=1e-9, atol=0)


@pytest.mark.parametrize("settings", [{}, {"target_kl": 1e-3}], ids=["scheduled", "controlled"])
def test_the_rate_is_that_with_which_the_step_is_made(settings, tmp_path, monkeypatch):
    """Each step's, of the schedule or as the controller has learned it until then; in an evaluation the next one's."""
    settings = {"token_weights": "capo", "rule": "none", "optim": "sgd", "learning_rate": 1e-3, **settings}
    trainer = training.build(tmp_path, max_steps=3, gradient_accumulation_steps=2, **settings)
    seen, weigh = [], trainer.weighting.weigh
    monkeypatch.setattr(trainer.weighting, "weigh", lambda tokens: seen.append(tokens) or weigh(tokens))
    control, made = trainer.step_control, []
    if control is not None:
        prepare = control.prepare
        monkeypatch.setattr(control, "prepare", lambda step: (prepare(step), made.append(control._applied)))
    logs = training.train(trainer)
    rates = [tokens.learning_rate for tokens in seen]
    assert len(rates) == 6 and rates[::2] == rates[1::2]
    if settings.get("target_kl") is None:
        assert rates[::2] == pytest.approx([1e-3, 1e-3 * 2 / 3, 1e-3 / 3])
    else:
        assert rates[0] == pytest.approx(1e-3) and len(set(rates)) == 3 and rates[::2] == made
    assert all(0 <= log["off_policy/gated"] <= 1 for log in logs)


def test_without_the_figures_there_are_no_weights():
    settings = {**training.SETTINGS, "token_weights": "capo"}
    own = named("capo")(ISOPOConfig("unused", **settings))
    x = torch.zeros(1, 2)
    with pytest.raises(ValueError, match="pass `head` and `learning_rate`"):
        own(x, x, torch.ones(1, 2).long(), torch.ones(1))
