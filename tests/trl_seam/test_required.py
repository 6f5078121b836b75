"""The seam to TRL: what is not as expected is found at import and named; what is borrowed is given back."""

import ast
import importlib
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from packaging.specifiers import SpecifierSet
from trl import GRPOTrainer

from isopo_trl.trl_seam.batch import Batch
from isopo_trl.trl_seam.generation import without_old_policy
from isopo_trl.trl_seam.loans import borrowed, intercepted
from isopo_trl.trl_seam.loss import LossInput, Outputs, weighed_loss
from isopo_trl.trl_seam.required import ANY_VERSION, TRL_RANGE, difference, verify_version
from tests import tiny, training


ROOT = Path(__file__).parents[2]


# Versions


@pytest.mark.parametrize("version", ["1.16.0", "1.16.3", "1.16.0.dev0", "1.16.1rc1"])
def test_supported_versions_are_accepted(version):
    verify_version(version)


@pytest.mark.parametrize("version", ["1.15.0", "1.17.0", "1.17.0.dev0", "2.0.0", "0.29.0", None])
def test_other_versions_are_refused_with_what_to_install(version, monkeypatch):
    monkeypatch.delenv(ANY_VERSION, raising=False)
    with pytest.raises(ImportError) as error:
        verify_version(version)
    message = str(error.value)
    assert f'pip install "trl{TRL_RANGE}"' in message and (version or "not installed") in message


def test_newest_version_can_be_tried(monkeypatch):
    monkeypatch.setenv(ANY_VERSION, "1")
    verify_version("1.99.0")
    with pytest.raises(ImportError, match="not installed"):
        verify_version(None)


def run(code):
    environment = {name: value for name, value in os.environ.items() if name != ANY_VERSION}
    environment["PYTHONPATH"] = str(ROOT)
    return subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True)


def test_version_is_checked_before_anything_is_imported():
    done = run("""
import importlib.metadata as metadata
real = metadata.version
metadata.version = lambda name: "1.15.2" if name == "trl" else real(name)
try:
    import isopo_trl
except ImportError as error:
    import sys
    print(error, "torch" in sys.modules, "trl" in sys.modules)
""")
    assert "found 1.15.2" in done.stdout and done.stdout.strip().endswith("False False"), done.stderr


def test_range_is_the_same_wherever_it_stands():
    texts = [ROOT / "setup.cfg", ROOT / "README.md", ROOT / "CONTRIBUTING.md", *(ROOT / "docs").glob("*.md")]
    texts += [path for path in (ROOT / "scripts").iterdir() if path.is_file()]
    ranges = {path.name: re.findall(r"\btrl *([<>=~!][^\"'`\s;]*)", path.read_text()) for path in texts}
    assert ranges["setup.cfg"] == [TRL_RANGE]
    assert {found for each in ranges.values() for found in each} == {TRL_RANGE}
    for path in texts:
        for version in re.findall(r"\bTRL (\d+\.\d+)", path.read_text()):
            assert version in SpecifierSet(TRL_RANGE), f"{path.name}: TRL {version}"


# Names and signatures


@pytest.mark.parametrize(
    "path, parameters, mentions, expected",
    [
        ("trl.GRPOTrainer._generate", ("prompts",), ("rollout_func",), None),
        ("trl.GRPOTrainer._compute_loss", ("model", "inputs"), (), None),
        ("trl.GRPOTrainer._calculate_rewards", ("inputs", "prompts"), (), None),  # through its decorator
        ("trl.trainer.utils.get_config_model_id", ("config",), (), None),
        ("trl.GRPOTrainer._draw", (), (), "trl.GRPOTrainer._draw does not exist"),
        ("trl.GRPOTrainer._draw", ("prompts",), ("rollout_func",), "trl.GRPOTrainer._draw does not exist"),
        ("trl.nowhere.function", (), (), "trl.nowhere.function does not exist"),
        ("no_such_package.function", (), (), "no_such_package.function does not exist"),
        (
            "trl.GRPOTrainer._compute_loss",
            ("model", "batch"),
            (),
            "trl.GRPOTrainer._compute_loss takes (model, inputs) instead of (model, batch, ...)",
        ),
        (
            "trl.GRPOTrainer._generate",
            ("prompts", "images"),
            (),
            "trl.GRPOTrainer._generate takes (prompts) instead of (prompts, images, ...)",
        ),
        (
            "trl.GRPOTrainer._compute_loss",
            (),
            ("advantages", "token_weight", "_use_sampler"),
            "trl.GRPOTrainer._compute_loss makes no use of token_weight, _use_sampler",
        ),
    ],
)
def test_difference_is_said_in_words(path, parameters, mentions, expected):
    assert difference(path, *parameters, mentions=mentions) == expected


def test_changed_trl_is_refused_with_all_that_is_missing(monkeypatch):
    monkeypatch.delattr(GRPOTrainer, "_generate_single_turn")
    monkeypatch.delattr("trl.trainer.utils.get_config_model_id")
    monkeypatch.setattr(GRPOTrainer, "_calculate_rewards", lambda self, completions: None)
    monkeypatch.setattr(GRPOTrainer, "_compute_loss", lambda self, model, inputs: self._get_logps(model))
    # What an import of the package begins with, once more
    for name in [name for name in sys.modules if name.startswith("isopo_trl.trl_seam")]:
        monkeypatch.delitem(sys.modules, name)
    with pytest.raises(ImportError) as error:
        importlib.import_module("isopo_trl.trl_seam")
    last = str(error.value)
    assert last.startswith("TRL 1.16")
    for part in (
        "GRPOTrainer._generate_single_turn does not exist",
        "get_config_model_id does not exist",
        "_calculate_rewards takes (completions) instead of (inputs, prompts",
        "_compute_loss makes no use of",
        "importance_sampling_ratio",
        f'pip install "trl{TRL_RANGE}"',
    ):
        assert part in last, part


# May be named outside of the seam, where they are overridden
OF_TRANSFORMERS = {"_save_checkpoint", "_load_optimizer_and_scheduler", "_get_output_dir"}
OVERRIDDEN = {"_compute_loss", "_generate_and_score_completions", "_calculate_rewards", "_get_grad_norm"}
OVERRIDDEN |= {"_prepare_inputs", "_load_from_checkpoint", "_load_best_model", "_issue_warnings_after_load"}
KEYS = re.compile(r"(prompt|completion|tool)_mask|\w+_per_token_logps|importance_sampling_ratio")


def used(path):
    """Private attributes, and keys of a batch, that a file names."""
    nodes = list(ast.walk(ast.parse(path.read_text())))
    attributes = {node.attr for node in nodes if isinstance(node, ast.Attribute) and re.match("_[a-z]", node.attr)}
    texts = {str(node.value) for node in nodes if isinstance(node, ast.Constant)}
    paths = {text.rpartition(".")[2] for text in texts if text.startswith("trl.")}
    private = {text for text in texts | paths if re.fullmatch(r"_[a-z]\w+", text)}
    return attributes | private, {text for text in texts if KEYS.fullmatch(text)}


def test_private_names_of_trl_stand_in_the_seam_alone():
    package = ROOT / "isopo_trl"
    seam = [used(path) for path in (package / "trl_seam").glob("*.py")]
    private, keys = (set.union(*names) for names in zip(*seam, strict=True))
    assert {"_metrics", "_generate", "_generate_single_turn", "_get_per_token_logps_and_entropies"} <= private
    assert {"sampling_per_token_logps", "old_per_token_logps", "importance_sampling_ratio", "tool_mask"} <= keys
    folders = ("loss", "rewards", "token_weights")
    files = [path for folder in folders for path in (package / folder).glob("*.py")]
    for path in [package / "trainer.py", package / "config.py", *files]:
        own_private, own_keys = used(path)
        assert (own_private & private) <= OVERRIDDEN, path.name
        assert own_keys == set(), path.name
        # Nor anything else that a trainer of TRL's has
        assert {name for name in own_private if hasattr(GRPOTrainer, name)} <= OVERRIDDEN | OF_TRANSFORMERS, path.name


# What is borrowed


class Owner:
    one, two = 1, 2


def test_borrowed_settings_are_given_back_whatever_happens():
    owner = Owner()
    owner.one = 10
    with pytest.raises(KeyError), borrowed(owner, one=3, two=4):
        assert (owner.one, owner.two) == (3, 4)
        with borrowed(owner, one=5):
            assert owner.one == 5
        assert owner.one == 3
        raise KeyError
    assert (owner.one, owner.two) == (10, 2)


class Caller:
    def method(self, x, y=0):
        return x + y


def test_intercepted_method_is_as_it_was_afterwards():
    caller = Caller()
    with intercepted(caller, "method", lambda method, x, y=0: 10 * method(x, y=y)):
        assert caller.method(1, y=2) == 30
        with intercepted(caller, "method", lambda method, x: -method(x)):
            assert caller.method(1) == -10
        assert caller.method(1) == 10
    assert caller.method(1) == 1 and "method" not in caller.__dict__
    with pytest.raises(KeyError), intercepted(caller, "method", lambda method: None):
        raise KeyError
    assert caller.method(1) == 1 and "method" not in caller.__dict__


def test_trainer_is_as_it_was_after_a_loss_that_fails(tmp_path):
    trainer = training.build(tmp_path, token_weights="p3o", gradient_accumulation_steps=2, steps_per_generation=4)
    before = {name: value for name, value in vars(trainer).items() if not name.startswith("_")}
    batch = Batch()
    with pytest.raises(KeyError), weighed_loss(trainer, batch, lambda logps: (None, None)):
        assert trainer.use_vllm is False and trainer.vllm_importance_sampling_correction is False
        raise KeyError
    with pytest.raises(KeyError), without_old_policy(trainer, single_turn=None, generated=lambda rollout: True):
        assert trainer.args.gradient_accumulation_steps == 4
        raise KeyError
    assert trainer.args.gradient_accumulation_steps == 2
    after = {name: value for name, value in vars(trainer).items() if not name.startswith("_")}
    assert after.keys() == before.keys() and all(after[name] is before[name] for name in before)
    assert "_generate" not in vars(trainer) and "_get_per_token_logps_and_entropies" not in vars(trainer)


def test_the_graph_of_a_loss_ends_before_the_model():
    weight = torch.ones(3, requires_grad=True)
    outputs = Outputs((2 * weight).unsqueeze(0), None, weight.sum())
    given = LossInput()
    cut = given.cut(outputs)
    slope, of_balance = torch.autograd.grad(cut.logps.square().sum() + 5 * cut.aux_loss, [given.leaf, given.aux_loss])
    assert weight.grad is None and given.with_graph is outputs.logps and of_balance == 5
    given.with_graph.backward(slope)
    assert weight.grad.tolist() == [8.0] * 3
    with torch.no_grad():
        assert not given.cut(outputs).logps.requires_grad
    # A loss that nothing trained has a part in, and none
    assert not given.cut(outputs._replace(aux_loss=torch.ones(()))).aux_loss.requires_grad
    assert given.cut(outputs._replace(aux_loss=None)).aux_loss is None


@pytest.mark.parametrize("wanted", [False, True])
def test_accumulation_is_given_back_halfway_where_the_old_policy_is_wanted(wanted, tmp_path):
    seen = []

    class Watch(GRPOTrainer):
        def _calculate_rewards(self, *args):
            seen.append(self.args.gradient_accumulation_steps)
            return super()._calculate_rewards(*args)

    settings = {"gradient_accumulation_steps": 2, "steps_per_generation": 4}
    trainer = training.build(tmp_path, kind=Watch, **settings)
    rollouts = []

    def generated(rollout):
        rollouts.append(rollout)
        return wanted

    with without_old_policy(trainer, single_turn=None, generated=generated):
        batch = trainer._generate_and_score_completions([dict(row) for row in tiny.prompts(3)])
    assert seen == [2 if wanted else 4] and ("old_per_token_logps" in batch) == wanted
    (rollout,) = rollouts
    assert [len(ids) for ids in rollout.completion_ids] == batch["completion_mask"].sum(1).tolist()
    assert [len(ids) for ids in rollout.prompt_ids] == batch["prompt_mask"].sum(1).tolist()
    assert rollout.logps is None and rollout.tool_mask is None and len(rollout.completions) == 3


def test_generation_that_returns_something_else_is_refused(tmp_path):
    class Short(GRPOTrainer):
        def _generate(self, prompts):
            return super()._generate(prompts)[:7]

    trainer = training.build(tmp_path, kind=Short)
    with pytest.raises(RuntimeError, match="7 values instead of 8"):
        with without_old_policy(trainer, single_turn=None, generated=lambda rollout: False):
            trainer._generate_and_score_completions([dict(row) for row in tiny.prompts(3)])


# The batch


def test_batch_is_a_copy_with_names():
    given = {
        "advantages": torch.tensor([1.0, -1.0]),
        "prompt_mask": torch.tensor([[0, 1], [1, 1]]),
        "completion_mask": torch.tensor([[1, 1, 0], [1, 1, 1]]),
        "tool_mask": torch.tensor([[1, 0, 1], [1, 1, 1]]),
        "old_per_token_logps": torch.zeros(2, 3),
    }
    batch = Batch(given)
    assert batch.attention_mask.tolist() == [[0, 1, 1, 1, 0], [1, 1, 1, 1, 1]]
    assert batch.scored.tolist() == [[1, 0, 0], [1, 1, 1]] and batch.sampler_logps is None
    weights = torch.full((2, 3), 0.5)
    batch.set_weights(weights, None)
    assert batch["importance_sampling_ratio"] is weights and batch.old_logps is None
    batch.set_weights(None, torch.full((2, 3), 0.1))
    assert batch.old_logps.tolist() == [[0.0] * 3] * 2
    batch.advantages = torch.zeros(2)
    assert given["advantages"].tolist() == [1.0, -1.0] and len(given) == 5
