"""What becomes of the loss's forward pass: what TRL's loss is given for each weighting, and what counts as broken."""

import math

import torch

from isopo_trl import ISOPOConfig
from isopo_trl.loss.forward import broken_sequences, weigh
from isopo_trl.token_weights import NoWeighting
from isopo_trl.token_weights.ratio_loss import weighting_for
from isopo_trl.trl_seam.batch import Batch
from isopo_trl.trl_seam.loss import Outputs
from tests import training


MASK = torch.tensor([[1, 1, 1], [1, 1, 0]])
LOGPS = torch.tensor([[-1.0, -2.0, -3.0], [-2.0, -1.0, -5.0]], requires_grad=True)
BEHAVIOUR = torch.tensor([[-1.5, -2.0, math.nan], [-2.0, -1.1, -math.inf]])


def weighed(**settings):
    args = ISOPOConfig("unused", **training.SETTINGS, **settings)
    batch = Batch({"completion_mask": MASK, "old_per_token_logps": torch.zeros(2, 3)})
    weighting, outputs = weighting_for(args)(args), Outputs(LOGPS, None, None)
    return weigh(weighting, batch, outputs, BEHAVIOUR, torch.tensor([1.0, -1.0]))


def test_only_scored_tokens_make_a_sequence_broken():
    logps = torch.tensor([[-1.0, -2.0, math.nan], [-1.0, -1.0, -math.inf], [math.inf, math.nan, -1.0]])
    batch = Batch({"completion_mask": torch.tensor([[1, 1, 1], [1, 1, 0], [0, 0, 1]])})
    assert broken_sequences(logps, batch) == 1
    batch["tool_mask"] = torch.tensor([[1, 1, 0], [1, 1, 1], [1, 1, 1]])
    assert broken_sequences(logps, batch) == 0


def test_a_ratio_is_taken_to_the_policy_that_drew_and_so_is_the_mask():
    old = torch.tensor([[-1.5, -2.0, -3.0], [-2.0, -1.1, -5.0]])  # what nobody knows, or scores, is the policy's own
    result = weighed(epsilon=0.2)
    torch.testing.assert_close(result.batch.old_logps, old)
    torch.testing.assert_close(result.batch.sampler_logps, old)
    assert result.outputs.logps is LOGPS and not result.batch.has_weights


def test_a_ratio_of_a_weightings_own_stands_in_for_the_log_probabilities():
    result = weighed(token_weights="kpo", kpo_gain=1.0)
    torch.testing.assert_close(result.outputs.logps, torch.tensor([[0.5, 0.0, 0.0], [0.0, 0.1, 0.1]]))
    assert result.outputs.logps.requires_grad and not result.batch.old_logps.any()


def test_weights_are_a_leaf_where_a_term_without_an_advantage_needs_their_derivative():
    result = weighed(token_weights="p3o")
    assert result.weights is result.batch["importance_sampling_ratio"] and result.weights.is_leaf
    assert result.weights.requires_grad and result.batch.old_logps is None
    with torch.no_grad():
        assert weighed(token_weights="p3o").weights is None
    assert weighed(token_weights="sampler").weights is None


def test_without_weights_the_ratio_is_one_whatever_trl_has_scored():
    batch = Batch({"completion_mask": MASK, "old_per_token_logps": torch.zeros(2, 3)})
    weighting = NoWeighting(ISOPOConfig("unused", **training.SETTINGS))
    outputs = Outputs(LOGPS, None, None)
    # For the divergence to the reference, somebody else may ask what drew the tokens
    assert weigh(weighting, batch, outputs, BEHAVIOUR, torch.ones(2)).batch.old_logps is None
    assert weigh(weighting, batch, outputs, None, torch.ones(2)).batch is batch
