"""TRL's loss in parts: its forward pass, the policy's loss of given outputs, and the terms without an advantage."""

import pytest
import torch
from peft import LoraConfig
from trl import GRPOTrainer

from isopo_trl.trl_seam.batch import Batch
from isopo_trl.trl_seam.loss import Outputs, TRLLoss, without_graph
from tests import oracle, training


def test_the_graph_of_a_loss_ends_before_the_model():
    weight = torch.ones(3, requires_grad=True)
    outputs = Outputs((2 * weight).unsqueeze(0), None, weight.sum())
    leaves = without_graph(outputs)
    loss = leaves.logps.square().sum() + 5 * leaves.aux_loss
    slope, of_balance = torch.autograd.grad(loss, [leaves.logps, leaves.aux_loss])
    assert slope.tolist() == [[4.0] * 3] and of_balance == 5 and weight.grad is None
    with torch.no_grad():
        assert not without_graph(outputs).logps.requires_grad
    # A load-balancing loss that nothing trained has a part in stays without a gradient
    assert not without_graph(outputs._replace(aux_loss=torch.ones(()))).aux_loss.requires_grad


def example(folder, **settings):
    options = {"peft_config": LoraConfig(r=2)}
    trainer = training.prepared(training.build(folder, options=options, **settings))
    batch = oracle.random_batch([3, 1, 5], [6, 5, 2], 100, advantages=torch.tensor([1.3, -0.7, 0.4])).for_trl()
    batch["ref_per_token_logps"] = torch.full(batch["completion_ids"].shape, -4.5)
    loss = TRLLoss(trainer, lambda batch: GRPOTrainer._compute_loss(trainer, trainer.model, batch))
    return trainer, Batch(batch), loss


def test_the_parts_are_trls_loss_and_figures_and_go_into_no_log(tmp_path):
    trainer, batch, loss = example(tmp_path, beta=0.3, entropy_coef=0.2)
    whole = GRPOTrainer._compute_loss(trainer, trainer.model, batch)
    logged = {name: values[-1] for name, values in trainer._metrics["train"].items()}
    trainer._metrics["train"].clear()
    outputs = loss.forward(batch)
    policy, figures = loss.of_policy(batch, outputs)
    terms, of_terms = loss.of_terms(batch.with_advantages(torch.zeros(3)), outputs)
    torch.testing.assert_close(policy + terms, whole)
    (of_policy,) = loss.policy_loss_figure(batch, outputs)
    assert of_policy == pytest.approx(policy.item(), abs=1e-6) and terms.abs() > 0.01
    assert logged["policy_loss"] == pytest.approx(of_policy + of_terms["policy_loss"][0], abs=1e-6)
    assert logged["kl"] == pytest.approx(of_terms["kl"][0]) and "kl" not in figures
    assert logged["entropy"] == pytest.approx(figures["entropy"][0])
    assert not trainer._metrics["train"]


def test_weights_of_tokens_multiply_their_part_of_the_loss(tmp_path):
    _, batch, loss = example(tmp_path)
    outputs, weights, slopes = loss.forward(batch), torch.rand(3, 6), []
    for each in (batch, batch.weighed(weights)):
        leaves = without_graph(outputs)
        slopes += torch.autograd.grad(loss.of_policy(each, leaves)[0], leaves.logps)
    plain, weighted = slopes
    torch.testing.assert_close(weighted, weights * plain)


def test_trainer_is_as_it_was_after_a_loss_that_fails(tmp_path):
    trainer, batch, _ = example(tmp_path, beta=0.3)
    before = dict(vars(trainer))

    def broken(batch):
        raise KeyError

    loss = TRLLoss(trainer, broken)
    for part in (loss.of_policy, loss.of_terms, loss.policy_loss_figure):
        with pytest.raises(KeyError):
            part(batch, None)
    with pytest.raises(KeyError):
        loss.forward(batch)
    assert vars(trainer).keys() == before.keys() and all(vars(trainer)[name] is before[name] for name in before)


def test_loss_without_a_forward_pass_is_refused(tmp_path):
    trainer, batch, _ = example(tmp_path)
    with pytest.raises(RuntimeError, match="made no forward pass by `_get_per_token_logps_and_entropies`"):
        TRLLoss(trainer, lambda batch: torch.zeros(())).forward(batch)
