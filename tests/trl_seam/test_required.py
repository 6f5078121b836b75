"""What is not as expected of TRL is found at import and named, and private names of TRL stand in the seam alone."""

import ast
import importlib
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from packaging.specifiers import SpecifierSet
from trl import GRPOTrainer

from isopo_trl.trl_seam.required import ANY_VERSION, TRL_RANGE, difference, verify_version


ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "isopo_trl"


# Versions


@pytest.mark.parametrize("version", ["1.16.0", "1.16.3", "1.16.0.dev0", "1.16.1rc1"])
def test_supported_versions_are_accepted(version):
    verify_version(version)


@pytest.mark.parametrize("version", ["1.15.0", "1.17.0.dev0", "2.0.0", None])
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


def test_version_is_checked_before_anything_is_imported():
    code = """
import importlib.metadata as metadata
real = metadata.version
metadata.version = lambda name: "1.15.2" if name == "trl" else real(name)
try:
    import isopo_trl
except ImportError as error:
    import sys
    print(error, "torch" in sys.modules, "trl" in sys.modules)
"""
    environment = {name: value for name, value in os.environ.items() if name != ANY_VERSION}
    environment["PYTHONPATH"] = str(ROOT)
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True)
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
        ("trl.GRPOTrainer._compute_loss", ("model", "inputs"), ("advantages",), None),
        ("trl.GRPOTrainer._calculate_rewards", ("inputs", "prompts"), (), None),  # through its decorator
        ("trl.trainer.utils.get_config_model_id", ("config",), (), None),
        ("trl.GRPOTrainer._draw", ("prompts",), ("rollout_func",), "trl.GRPOTrainer._draw does not exist"),
        ("no_such_package.function", (), (), "no_such_package.function does not exist"),
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
    message = str(error.value)
    assert message.startswith("TRL 1.16")
    for part in (
        "GRPOTrainer._generate_single_turn does not exist",
        "get_config_model_id does not exist",
        "_calculate_rewards takes (completions) instead of (inputs, prompts",
        "_compute_loss makes no use of",
        "importance_sampling_ratio",
        f'pip install "trl{TRL_RANGE}"',
    ):
        assert part in message, part


# May be named outside of the seam: methods that are overridden, or that transformers has
OF_TRANSFORMERS = {"_save_checkpoint", "_get_output_dir", "_get_train_sampler"}
OVERRIDDEN = {"_compute_loss", "_generate_and_score_completions", "_calculate_rewards", "_get_grad_norm"}
OVERRIDDEN |= {"_get_learning_rate", "_get_per_token_logps_and_entropies"}
OVERRIDDEN |= {"_prepare_inputs", "_load_from_checkpoint", "_load_best_model", "_issue_warnings_after_load"}
KEYS = re.compile(r"(prompt|completion|tool)_mask|\w+_per_token_logps|importance_sampling_ratio")
ROOMS_WITHOUT_KEYS = ("loss", "rewards", "token_weights")


def used(path, of_self=True):
    """Private names, those of `self` too or not, and keys of a batch that a file mentions."""
    nodes = list(ast.walk(ast.parse(path.read_text())))
    attributes = [node for node in nodes if isinstance(node, ast.Attribute) and re.match("_[a-z]", node.attr)]
    names = {node.attr for node in attributes if of_self or getattr(node.value, "id", "") != "self"}
    texts = {str(node.value) for node in nodes if isinstance(node, ast.Constant)}
    paths = {text.rpartition(".")[2] for text in texts if text.startswith("trl.")}
    names |= {text for text in texts | paths if re.fullmatch(r"_[a-z]\w+", text)}
    return names - {"_fields", "_replace"}, {text for text in texts if KEYS.fullmatch(text)}


def test_private_names_of_trl_stand_in_the_seam_alone():
    seam = [used(path, of_self=False) for path in (PACKAGE / "trl_seam").glob("*.py")]
    private, keys = (set.union(*names) for names in zip(*seam, strict=True))
    assert {"_metrics", "_generate", "_generate_single_turn", "_get_per_token_logps_and_entropies"} <= private
    assert {"sampling_per_token_logps", "old_per_token_logps", "importance_sampling_ratio", "tool_mask"} <= keys
    for path in (path for path in PACKAGE.rglob("*.py") if path.parent.name != "trl_seam"):
        names, own_keys = used(path)
        of_trl = {name for name in names if name in private or hasattr(GRPOTrainer, name)}
        assert of_trl <= OVERRIDDEN | OF_TRANSFORMERS, path
        if path.parent == PACKAGE or path.parent.name in ROOMS_WITHOUT_KEYS:
            assert own_keys == set(), path
