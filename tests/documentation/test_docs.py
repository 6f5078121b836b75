"""What the README and the pages in docs/ show and say is so, and the site that is built from them works."""

import contextlib
import dataclasses
import functools
import http.server
import importlib.metadata
import importlib.util
import inspect
import io
import json
import os
import re
import runpy
import shlex
import shutil
import subprocess
import sys
import threading
from html import unescape
from html.parser import HTMLParser
from pathlib import Path
from unittest.mock import patch
from urllib.parse import unquote, urldefrag, urljoin, urlparse

import pytest
import yaml
from accelerate.commands.launch import launch_command_parser
from filelock import FileLock
from transformers import TrainingArguments
from transformers.integrations.integration_utils import INTEGRATION_TO_CALLBACK
from trl import GRPOConfig

from isopo_trl import ISOPO, ISOPOConfig, __version__
from isopo_trl.advantages import TRANSFORMS
from isopo_trl.layers.registry import _REGISTERED as LAYERS
from isopo_trl.rules.registry import _REGISTERED as RULES
from isopo_trl.token_weights import WEIGHTINGS
from isopo_trl.token_weights.ratio_loss import LOSS_TYPES
from isopo_trl.validation import callback
from tests import oracle, tiny, training
from tests.trainer.test_sampling import with_vllm


ROOT = Path(__file__).parents[2]
DOCS = sorted((ROOT / "docs").glob("*.md"))
PAGES = [ROOT / "README.md", *DOCS]
NAMES = [page.name for page in PAGES]


def text_of(name):
    return (ROOT / name if name == "README.md" else ROOT / "docs" / name).read_text()


def blocks(name, language):
    return re.findall(rf"^```{language}\n(.*?)^```$", text_of(name), flags=re.DOTALL | re.MULTILINE)


def unfenced(text):
    return re.sub(r"^```.*?^```$", "", text, flags=re.DOTALL | re.MULTILINE)


def prose(text):
    """A text without its code blocks."""
    return re.sub(r"^ {4}.*\n", "", unfenced(text), flags=re.MULTILINE)


# Python blocks: one namespace a page, from the first block to the last


# What a block that trains gets on top of its settings
SMALL = {
    "use_cpu": True,
    "bf16": False,
    "max_steps": 1,
    "max_completion_length": 8,
    "per_device_train_batch_size": 8,
    "save_strategy": "no",
    "report_to": [],
    "disable_tqdm": True,
}


@pytest.fixture(scope="module")
def stand_ins(tmp_path_factory):
    """What is said in place of the names of the Hub."""
    folder = tmp_path_factory.mktemp("hub")
    data = folder / "data.jsonl"
    data.write_text("".join(json.dumps({"prompt": prompt}) + "\n" for prompt in tiny.prompts(16)["prompt"]))
    problems = folder / "problems.jsonl"
    problems.write_text("".join(json.dumps({"question": f"{n} + 1?", "answer": n + 1}) + "\n" for n in range(12)))
    return {
        '"Qwen/Qwen3-0.6B"': repr(tiny.save(folder / "model", "qwen3")),
        '"trl-lib/tldr", split=': f'"json", data_files={str(data)!r}, split=',
        'load_gsm8k("openai/gsm8k")': f"load_gsm8k({str(problems)!r})",
    }


def matches(printed, shown):
    """Whether a text is what the page shows of it, but for white space and what `...` stands for."""
    parts = [re.escape(" ".join(part.split())) for part in shown.split("...")]
    return re.fullmatch(" ?.*? ?".join(parts), " ".join(printed.split())) is not None


@pytest.fixture
def registries():
    """What a page registers is gone after its test."""
    with patch.dict(RULES), patch.dict(LAYERS), patch.dict(WEIGHTINGS), patch.dict(TRANSFORMS):
        yield


@pytest.mark.parametrize("name", [name for name in NAMES if blocks(name, "python")])
def test_python_blocks_run(name, stand_ins, registries, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    names = {"SMALL": SMALL}
    pattern = r"^```python\n(.*?)^```$(?:\n\n((?: {4}[^\n]*\n)+))?"  # and what it prints, indented
    trained = 0
    for block, shown in re.findall(pattern, text_of(name), flags=re.DOTALL | re.MULTILINE):
        code = block
        for hub, local in stand_ins.items():
            code = code.replace(hub, local)
        if ".train()" in code:
            code = code.replace('output_dir="outputs"', 'output_dir="outputs", **SMALL')
            code = code.replace('"output_dir": "outputs"', '"output_dir": "outputs", **SMALL')
        with contextlib.redirect_stdout(io.StringIO()) as out:
            exec(compile(code, name, "exec"), names)
        if ".train()" in code:
            assert names["trainer"].state.global_step == 1
            trained += 1
        elif shown:
            assert matches(out.getvalue(), shown), out.getvalue()
    assert trained == len([block for block in blocks(name, "python") if ".train()" in block])


# Commands


PROGRAMS = ("python ", "accelerate launch ", "./")


def commands(name):
    """The lines of a page's shell blocks, and of its indented ones, that run one of `PROGRAMS`."""
    indented = "\n".join(re.findall(r"^ {4}(.*)", unfenced(text_of(name)), flags=re.MULTILINE))
    lines = "\n".join([*blocks(name, "bash"), indented]).replace("\\\n", " ").splitlines()
    lines = [re.sub(r"^\s*(?:[A-Z_]+=\S* )*", "", line) for line in lines]  # without variables of the environment
    return [line for line in lines if line.startswith(PROGRAMS)]


@functools.cache
def help_of(script, *command):
    """What the script prints; in this process, which has imported most of what takes a script seconds to."""
    said = io.StringIO()
    with pytest.MonkeyPatch.context() as patch, contextlib.redirect_stdout(said), pytest.raises(SystemExit) as end:
        patch.setenv("COLUMNS", "200")
        patch.setattr(sys, "argv", [script, *command, "--help"])
        patch.syspath_prepend((ROOT / script).parent)
        runpy.run_path(str(ROOT / script), run_name="__main__")
    assert not end.value.code, said.getvalue()
    return said.getvalue()


def check_script(script, arguments):
    assert (ROOT / script).is_file(), script
    command = arguments[:1] if "add_subparsers" in (ROOT / script).read_text() else []
    options = help_of(script, *command).partition("options:")[2]  # not what its own examples use
    known = set(re.findall(r"--[\w-]+", options))
    if "TrlParser" in (ROOT / script).read_text():
        known.add("--config")  # which it takes without telling
    for argument in arguments:
        if argument.startswith("--"):
            assert argument.split("=")[0] in known, f"{script} has no {argument}"
        elif argument.endswith(".yaml"):
            assert yaml.safe_load((ROOT / argument).read_text())


@pytest.mark.parametrize("name", [name for name in NAMES if commands(name)])
def test_commands_name_what_exists(name):
    for command in commands(name):
        program, *arguments = shlex.split(command)
        if program == "python":
            check_script(arguments[0], arguments[1:])
        elif program == "accelerate":
            launched = launch_command_parser().parse_args(arguments[1:])
            if launched.config_file:
                assert yaml.safe_load((ROOT / launched.config_file).read_text())["distributed_type"]
            check_script(launched.training_script, launched.training_script_args)
        else:
            assert os.access(ROOT / program, os.X_OK), program


@pytest.mark.parametrize("name", NAMES)
def test_extras_exist(name):
    extras = (ROOT / "setup.cfg").read_text().partition("[options.extras_require]")[2]
    for extra in re.findall(r'"\.\[(\w+)\]"', text_of(name)):
        assert re.search(rf"^{extra} =$", extras, re.MULTILINE), extra


@pytest.mark.parametrize("name", NAMES)
def test_yaml_blocks_parse(name):
    for block in blocks(name, "ya?ml"):
        assert yaml.safe_load(block) is not None


def test_the_notebook_is_run_by_what_the_extra_for_tests_installs():
    text = (ROOT / "CONTRIBUTING.md").read_text()
    extra = (ROOT / "setup.cfg").read_text().partition("\ntest =\n")[2].partition("\nbenchmark =")[0].split()
    for command in re.findall(r"^ {4}jupyter (\S+) .*\.ipynb$", text, flags=re.MULTILINE):
        scripts = importlib.metadata.entry_points(group="console_scripts", name=f"jupyter-{command}")
        assert {script.dist.name for script in scripts} & {*extra}, command
        break
    else:
        raise AssertionError("no command")


# What pages say of the code


def test_a_number_of_fields_is_that_of_the_configuration():
    own = len(ISOPOConfig.__dataclass_fields__.keys() - GRPOConfig.__dataclass_fields__.keys())
    words = "two three four five six seven eight nine ten eleven twelve thirteen fourteen fifteen".split()
    numbers = {word: number for number, word in enumerate(words, 2)}
    for page in PAGES:
        for word in re.findall(
            r"(\w+) (?:more )?(?:fields|settings) more|(\w+) more (?:fields|settings)", page.read_text()
        ):
            word = "".join(word).lower()
            if word in numbers or word.isdigit():
                assert numbers.get(word, word) in (own, str(own)), f"{page.name}: {word}"


def test_numbers_of_the_readme_are_those_of_the_figures_that_it_links():
    """Which are made from the runs' files, or committed with the command that printed them."""
    rows = table("README.md", "What has been measured")
    assert len(rows) >= 5
    for claim, figures, n in rows:
        path, _, anchor = re.search(r"\]\(([^)]+)\)", claim)[1].partition("#")
        page = (ROOT / path).read_text()
        sections = {slug(part.partition("\n")[0]): part for part in page.split("\n## ")}
        there = re.findall(r"[\d.]*\d", sections[anchor] if anchor else page)
        claimed = re.findall(r"[\d.]*\d", re.sub(r"`[^`]*`", "", figures))
        assert claimed and {*claimed} <= {*there}, claim
        # With an interval, in the very words of the report
        seeds = re.fullmatch(r"(\d+) seeds", n)
        for figure in re.findall(r"[-+][\d.]+ \[[^]]+\]", figures):
            assert seeds and f"{figure}, n = {seeds[1]}" in sections[anchor], claim


def test_the_readme_is_one_screen():
    assert len(text_of("README.md").partition("\n## Contributing")[0].split()) <= 500


def test_the_first_page_begins_with_the_use_and_its_two_lines_are_those_of_its_script():
    page = text_of("index.md")
    (diff,) = blocks("index.md", "diff")
    assert page.index("![") < page.index(diff) < page.index("pip install") < page.index("```math")
    removed, added = ([line[1:] for line in diff.splitlines() if line.startswith(sign)] for sign in "-+")
    assert len(added) == 2 and {*added} <= {*blocks("index.md", "python")[0].splitlines()}
    renamed = [line.replace("GRPO", "ISOPO").replace("from trl", "from isopo_trl") for line in removed]
    assert renamed == added


def test_sample_of_the_quick_start_shows_its_first_problems_and_leaves_none_out():
    spec = importlib.util.spec_from_file_location("embedded_sums", ROOT / "examples" / "embedded.py")
    embedded = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(embedded)
    shown = re.findall(r"^ {6}(.*)\n {8}before: ", text_of("gsm8k.md"), flags=re.MULTILINE)
    assert len(shown) >= 2 and shown == embedded.sums("test")["question"][: len(shown)]


def test_trackers_are_those_that_transformers_knows():
    named = set(re.findall(r'`report_to="(\w+)"`', text_of("metrics.md")))
    assert named >= {"trackio", "wandb", "tensorboard"} and named <= INTEGRATION_TO_CALLBACK.keys()


def test_version_changelog_and_citation_agree():
    changelog = (ROOT / "CHANGELOG.md").read_text()
    released = dict(re.findall(r"^## \[(\d+\.\d+\.\d+)\] - (\d{4}-\d\d-\d\d)$", changelog, flags=re.MULTILINE))
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    newest = next(iter(released), None)
    assert citation.get("version") == newest
    assert newest is None or str(citation["date-released"]) == released[newest]
    if __version__ != newest:
        unreleased = changelog.partition("\n## [Unreleased]\n")[2].partition("\n## ")[0]
        assert f"To be {__version__}" in unreleased and __version__ not in released


# Links, as they are valid in the repository


def slug(heading):
    return re.sub(r"[^\w\- ]", "", heading.lower().replace("`", "")).strip().replace(" ", "-")


def anchors(path):
    text = prose(path.read_text())
    return {slug(heading) for heading in re.findall(r"^#+ (.+)$", text, flags=re.MULTILINE)}


@pytest.mark.parametrize("page", [*PAGES, ROOT / "CHANGELOG.md", ROOT / "CONTRIBUTING.md"], ids=lambda page: page.name)
def test_links_lead_somewhere(page):
    for link in re.findall(r"\]\(([^)\s]+)\)", prose(page.read_text())):
        if urlparse(link).scheme:
            assert link.startswith("https://"), link
            continue
        path, _, anchor = link.partition("#")
        target = (page.parent / path).resolve() if path else page
        assert target.is_file(), link
        if anchor:
            assert anchor in anchors(target), link


def test_every_file_is_on_the_map():
    page = text_of("inside.md")
    for folder in ("isopo_trl", "isopo_trl/layers", "examples"):
        files = [path.name for path in (ROOT / folder).glob("*.py") if path.name != "__init__.py"]
        rooms = [f"{path.parent.name}/" for path in (ROOT / folder).glob("*/__init__.py")]
        assert [name for name in [*files, *rooms] if name not in page] == [], f"of {folder}"


def test_every_page_is_in_the_navigation():
    navigation = (ROOT / "mkdocs.yml").read_text().partition("\nnav:\n")[2].partition("\nnot_in_nav:")[0]
    assert [page.name for page in DOCS if f": {page.name}\n" not in navigation + "\n"] == []


# The settings of GRPO


def table(name, heading):
    """Rows of the first table under a heading, as lists of cells."""
    section = text_of(name).partition(f"\n## {heading}\n")[2].partition("\n## ")[0]
    rows = [line.strip("|").split("|") for line in section.splitlines() if line.startswith("|")]
    return [[cell.strip() for cell in row] for row in rows[2:]]


def documented(heading):
    return {
        setting: row[1]
        for row in table("from_grpo.md", heading)
        for setting in re.findall(r"`(\w+)`", row[0])
        if row[1]
    }


OWN = {field.name for field in dataclasses.fields(GRPOConfig)}
OWN -= {field.name for field in dataclasses.fields(TrainingArguments)}
STATUS = documented("Every setting of GRPOConfig")
# A value that is not the default, where one more or the opposite will not do
VALUES = {
    "top_p": 0.9,
    "model_init_kwargs": {"dtype": "float32"},
    "num_generations": 2,
    "num_generations_eval": 4,
    "ds3_gather_for_generation": False,
    "pad_to_multiple_of": 8,
    "generation_batch_size": 6,
    "steps_per_generation": 2,
    "min_p": 0.1,
    "generation_kwargs": {"length_penalty": 0.9},
    "chat_template_kwargs": {"enable_thinking": False},
    "cache_implementation": "dynamic",
    "transformers_continuous_batching_config": {"max_batch_tokens": 64},
    "vllm_mode": "server",
    "vllm_model_impl": "transformers",
    "vllm_structured_outputs_regex": "[0-9]+",
    "vllm_server_base_url": "http://localhost:8000",
    "vllm_server_host": "localhost",
    "vllm_max_model_length": 512,
    "vllm_importance_sampling_mode": "token_truncate",
    "vllm_importance_sampling_clip_min": 0.5,
    "vllm_importance_sampling_cap": 2.0,
    "reward_weights": [2.0],
    "scale_rewards": "none",
    "importance_sampling_level": "sequence",
    "delta": 2.0,
    "epsilon_high": 0.28,
    "router_aux_loss_coef": 0.01,
    "max_tool_calling_iterations": 3,
    "num_completions_to_print": 2,
    "log_completions_hub_repo": "completions",
}
# What a setting needs beside it
BESIDE = {
    "num_generations": {"per_device_train_batch_size": 2},
    "generation_batch_size": {"per_device_train_batch_size": 3},
    "sync_ref_model": {"beta": 0.1},
    "log_completions_hub_repo": {"log_completions": True},
}


def other_value(name):
    if name in VALUES:
        return VALUES[name]
    default = ISOPOConfig.__dataclass_fields__[name].default
    if isinstance(default, bool):
        return not default
    assert isinstance(default, (int, float)), f"{name}: a value for this test is missing"
    return default + 1 if isinstance(default, int) else default + 0.1


def configuration(**settings):
    return ISOPOConfig("unused", **{**training.SETTINGS, **settings})


def test_every_setting_of_grpo_is_in_the_table():
    assert OWN == STATUS.keys()
    assert set(STATUS.values()) == {"kept", "in part"}


@pytest.mark.filterwarnings("ignore:.*deprecated:FutureWarning")
@pytest.mark.parametrize("name", [name for name, status in STATUS.items() if status == "kept"])
def test_setting_is_taken_as_the_table_says(name):
    value = other_value(name)
    assert value != ISOPOConfig.__dataclass_fields__[name].default
    assert getattr(configuration(**{**BESIDE.get(name, {}), name: value}), name) == value


# What is accepted, and what is refused with which message
IN_PART = {
    "off_policy_mask_threshold": (
        {"off_policy_mask_threshold": 0.5},
        {"off_policy_mask_threshold": 0.5, "token_weights": "kpo"},
    ),
    "multi_objective_aggregation": (
        {"multi_objective_aggregation": "normalize_then_sum"},
        {"multi_objective_aggregation": "normalize_then_sum", "beta": 0.1, "kl_in_reward": True},
    ),
    "scale_rewards": (
        {"scale_rewards": "none", "advantage_transform": "redit"},
        {"scale_rewards": "none", "advantage_transform": "dcpo"},
    ),
    "loss_type": ({"loss_type": "cispo"}, {"loss_type": "cispo", "token_weights": "p3o"}),
    "epsilon": ({"epsilon": 0.1, "token_weights": "kpo"}, {"epsilon": 0.1, "token_weights": "p3o"}),
    "epsilon_high": ({"epsilon_high": 0.28}, {"epsilon_high": 0.28, "token_weights": "sampler"}),
    "delta": ({"delta": 2.0}, {"delta": 2.0, "token_weights": "kpo"}),
    "importance_sampling_level": (
        {"importance_sampling_level": "sequence"},
        {"importance_sampling_level": "sequence", "token_weights": "p3o"},
    ),
}


@pytest.mark.parametrize("name", [name for name, status in STATUS.items() if status == "in part"])
def test_setting_is_taken_in_part_as_the_table_says(name, tmp_path):
    accepted, refused = IN_PART[name]
    if accepted is not None:
        configuration(**accepted)
    with pytest.raises(ValueError, match=name):
        training.build(tmp_path, **refused)


def test_loss_types_are_those_of_the_table():
    (row,) = [row for row in table("from_grpo.md", "Every setting of GRPOConfig") if row[0] == "`loss_type`"]
    normalised, of_the_ratio = (re.findall(r"`(\w+)`", part) for part in row[2].split(". "))
    for loss_type in normalised:
        configuration(loss_type=loss_type, token_weights="p3o")
    for loss_type in of_the_ratio[:3]:
        configuration(loss_type=loss_type)
        with pytest.raises(ValueError, match="loss_type"):
            configuration(loss_type=loss_type, token_weights="p3o")
    assert {*normalised, *of_the_ratio[:3]} == {*LOSS_TYPES}


def test_training_arguments_are_refused_as_the_table_says():
    status = documented("Settings of TrainingArguments")
    values = {"torch_compile_backend": "eager", "torch_compile_mode": "default"}
    for name in [name for name, value in status.items() if value == "refused"]:
        with pytest.raises(ValueError, match=name.removesuffix("_backend").removesuffix("_mode")):
            configuration(**{name: values.get(name, True)})
    assert status["gradient_checkpointing"] == "kept" and configuration(gradient_checkpointing=True)


def test_levels_of_importance_sampling_have_one_gradient(tmp_path):
    batch = oracle.random_batch([3, 1, 5, 4], [6, 8, 1, 4], 100)
    batch.advantages = batch.advantages.float()
    one, other = (
        training.gradients(
            training.prepared(training.build(tmp_path, importance_sampling_level=level, loss_type="grpo")),
            batch.for_trl(),
        )[1]
        for level in ("token", "sequence")
    )
    assert training.distance(one, other) < 1e-5


# Rules and metrics


def test_keeping_small_norms_matters_to_the_scale_of_the_paper_alone(tmp_path):
    batch = oracle.random_batch([3, 1, 5, 4], [6, 8, 1, 4], 100)
    batch.advantages = batch.advantages.float()
    for scale, same in (("relative", True), ("paper", False)):
        one, other = (
            training.gradients(
                training.prepared(training.build(tmp_path, scale=scale, regularization=1.0, keep_small=keep)),
                batch.for_trl(),
            )[1]
            for keep in (False, True)
        )
        assert (training.distance(one, other) < 1e-5) == same


def metric_names():
    """Names in the first columns of the tables of the page, `<function>` being any."""
    rows = re.findall(r"^\| (`.*?) \|", text_of("metrics.md"), flags=re.MULTILINE)
    return {name for row in rows for name in re.findall(r"`([^`]+)`", row)}


def is_listed(name, listed):
    return name in listed or re.sub(r"^rewards/.+/", "rewards/<function>/", name) in listed


@pytest.mark.filterwarnings("ignore:You are using 'rollout_func'")
def test_every_metric_is_on_the_page_and_is_logged(tmp_path):
    listed, logged = metric_names(), set()
    runs = [{"rule": rule} for rule in ("fisher", "fig4", "none")]
    runs += [{"rule": "interacting", "per_device_train_batch_size": 6}]  # two prompts in a microbatch
    runs += [{"loss_type": loss_type} for loss_type in ("cispo", "vespo")]
    runs[0]["skip_zero_advantage"] = True
    runs += [{"target_kl": 1e-3, "num_iterations": 2, "advantage_transform": "dcpo,simpletir"}]
    for settings in [*runs, {"beta": 0.1, "kl_in_reward": True, "entropy_coef": 0.1}]:
        model = tiny.save(tmp_path / "model", "qwen3") if "beta" in settings else "qwen3"
        trainer = training.build(tmp_path, model, max_steps=1, **settings)
        trainer.train()
        logged |= trainer.state.log_history[0].keys()
    trainer = with_vllm(tmp_path, training.ISOPOTrainer, "token_truncate", max_steps=1)
    trainer.vllm_generation = type("NoVLLM", (), {"sync_weights": lambda self: None})()
    trainer.train()
    logged |= trainer.state.log_history[0].keys()
    assert [name for name in logged - {"step"} if not is_listed(name, listed)] == []
    own = {name for name in listed if name.startswith(("isopo/", "sampling/", "step/", "advantages/"))}
    assert own - {"isopo/noise_scale"} <= logged  # which three sequences may not show


def test_metrics_of_the_validation_are_on_the_page():
    in_code = set(re.findall(r'"(validation/\w+)"', inspect.getsource(callback)))
    assert in_code == {name for name in metric_names() if name.startswith("validation/")}


# The site


REMOTE = "https://someone:secret@example.org/isopo-trl.git"
CLONED = {"GIT_CONFIG_COUNT": "1", "GIT_CONFIG_KEY_0": "remote.origin.url", "GIT_CONFIG_VALUE_0": REMOTE}


@pytest.fixture(scope="session")
def site(tmp_path_factory):
    """Built once, for all processes of the suite."""
    for package in ("mkdocs", "material", "mkdocstrings_handlers.python", "latex2mathml"):
        if importlib.util.find_spec(package.partition(".")[0]) is None:
            pytest.skip(f"the site needs {package}: pip install -e '.[docs]'")
    folder = tmp_path_factory.getbasetemp()
    folder = (folder.parent if "PYTEST_XDIST_WORKER" in os.environ else folder) / "site"
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(folder)]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "NO_MKDOCS_2_WARNING": "1", **CLONED}
    with FileLock(f"{folder}.lock"):
        if not folder.exists():
            done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
            assert done.returncode == 0, done.stderr[-3000:]
            assert "WARNING" not in done.stderr, done.stderr
    return folder


class Page(HTMLParser):
    """Links, what is loaded without a click, ids and text of a page."""

    def __init__(self, path):
        super().__init__()
        self.links, self.loaded, self.ids, self.text = [], [], set(), []
        self.feed(path.read_text())

    def handle_starttag(self, tag, attributes):
        attributes = dict(attributes)
        if "id" in attributes:
            self.ids.add(attributes["id"])
        if tag == "a" and attributes.get("href"):
            self.links.append(attributes["href"])
        elif tag == "link" and attributes.get("rel") not in ("canonical", "prev", "next"):
            self.loaded.append(attributes["href"])
        elif attributes.get("src"):
            self.loaded.append(attributes["src"])

    def handle_data(self, data):
        self.text.append(data)


def pages_of(site):
    return {path.relative_to(site).as_posix(): Page(path) for path in site.rglob("*.html") if path.name != "404.html"}


def test_site_has_every_page_and_asks_nobody_else(site):
    pages = pages_of(site)
    assert {f"{page.stem}.html" for page in DOCS} <= pages.keys()
    assert {"CHANGELOG.html", "benchmarks/RESULTS.html", "benchmarks/NOTES.html"} <= pages.keys()
    for name, page in pages.items():
        assert page.loaded and not any(urlparse(source).netloc for source in page.loaded), name


def test_links_and_pictures_of_the_site_lead_somewhere(site):
    pages = pages_of(site)
    for name, page in pages.items():
        for link in [*page.links, *page.loaded]:
            if urlparse(link).scheme or link.startswith("data:"):
                continue
            target, anchor = urldefrag(urljoin(f"/{name}", link))
            target = unquote(urlparse(target).path).lstrip("/") or "index.html"
            assert (site / target).is_file(), f"{name}: {link}"
            if anchor and target in pages:
                assert unquote(anchor) in pages[target].ids, f"{name}: {link}"


def test_reference_has_every_setting_and_method(site):
    text = " ".join(Page(site / "reference.html").text)
    own = ISOPOConfig.__dataclass_fields__.keys() - GRPOConfig.__dataclass_fields__.keys()
    methods = [name for name, member in vars(ISOPO).items() if callable(member) and not name.startswith("_")]
    assert "unscaled" in methods
    for name in [*own, *methods, "gsm8k_reward", "ValidationCallback"]:
        assert name in text, name
    assert "[`" not in text and "*optional*" not in text  # references and types are made into something


def test_formulas_are_formulas(site):
    for name in ("index.html", "rules.html", "inside.html"):
        html = (site / name).read_text()
        assert "<math" in html and "$`" not in html and "FORMULA" not in html


@pytest.fixture(scope="module")
def hooks():
    for package in ("mkdocs", "griffe", "latex2mathml"):
        pytest.importorskip(package, reason="pip install -e '.[docs]'")
    spec = importlib.util.spec_from_file_location("hooks_of_the_site", ROOT / "docs" / "hooks.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_names_of_functions_have_room_in_formulas(hooks):
    gap = re.compile(r"<mspace[^>]*>")
    for text, expected in (
        (r"A \log \pi", "A_log_\u03c0"),
        (r"z_t = \log r_t", "zt=log_rt"),
        (r"r_t \nabla \log \pi_t", "rt\u2207_log_\u03c0t"),
        (r"\log(T / k)", "log(T/k)"),
    ):
        assert unescape(re.sub(r"<[^>]*>", "", gap.sub("_", hooks.formula(text, "inline")))) == expected


def test_parts_of_a_formula_can_be_put_below_each_other(hooks):
    html = hooks.displayed(r"a = b, \qquad c = \frac{d}{e}, \qquad f")
    assert html.count('<div class="part"><math') == 3 and html.count("</math></div>") == 3


@pytest.mark.parametrize(
    ("source", "remote", "address"),
    [
        ("", "git@host.org:someone/isopo.git", "https://host.org/someone/isopo"),
        ("", "https://someone:secret@host.org/someone/isopo.git", "https://host.org/someone/isopo"),
        ("    Source = https://host.org/us/isopo\n", "https://elsewhere.org/fork", "https://host.org/us/isopo"),
        ("", "/srv/git/isopo", None),
        ("", "", None),
    ],
)
def test_repository_is_linked_without_secrets(hooks, source, remote, address):
    settings = f"[metadata]\nproject_urls =\n{source}    Paper = https://arxiv.org/abs/2512.23353\n"
    assert hooks.repository(settings, remote) == address


def test_first_page_and_footer_lead_to_the_repository(hooks, site):
    if shutil.which("git") is None:
        pytest.skip("no git, which knows where the clone comes from")
    address = hooks.repository((ROOT / "setup.cfg").read_text(), REMOTE)
    assert Page(site / "index.html").links.count(address) == 2
    assert not any("secret" in path.read_text() for path in site.rglob("*.html"))


# The site in a browser


HOUR = 3600  # where the driver asks for a limit; no machine is as slow as that


class Quiet(http.server.SimpleHTTPRequestHandler):
    def log_message(self, *args):
        pass


@pytest.fixture(scope="module")
def address(site):
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), functools.partial(Quiet, directory=str(site)))
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    server.server_close()


@pytest.fixture(scope="module")
def browser(tmp_path_factory):
    programs = ("chromium", "chromium-browser", "google-chrome")
    chrome = os.environ.get("CHROME") or next(filter(None, map(shutil.which, programs)), None)
    if chrome is None:
        pytest.skip("no browser: install chromium, or set CHROME to its path")
    driver = os.environ.get("CHROMEDRIVER") or shutil.which("chromedriver")
    if driver is None:
        pytest.skip("no chromedriver: install chromium-driver, or set CHROMEDRIVER to its path")
    if importlib.util.find_spec("selenium") is None:
        pytest.skip("no selenium: pip install selenium")
    from selenium import webdriver

    options = webdriver.ChromeOptions()
    options.binary_location = chrome
    for argument in (
        "--headless=new",
        "--no-sandbox",
        "--disable-gpu",
        "--disable-dev-shm-usage",
        "--disable-background-networking",
        "--disable-component-update",
        "--disable-sync",
        "--no-first-run",
        "--host-resolver-rules=MAP * ~NOTFOUND, EXCLUDE 127.0.0.1",
        "--window-size=1400,1000",
        f"--user-data-dir={tmp_path_factory.mktemp('browser')}",
    ):
        options.add_argument(argument)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL", "performance": "ALL"})
    driver = webdriver.Chrome(options=options, service=webdriver.ChromeService(driver))
    driver.set_page_load_timeout(HOUR)
    yield driver
    driver.quit()


def wait_for(browser, condition):
    from selenium.webdriver.support.ui import WebDriverWait

    return WebDriverWait(browser, HOUR).until(condition)


def heading(browser):
    return browser.find_element("css selector", "article h1").text.rstrip("¶ ")


def assert_nothing_went_wrong(browser, address):
    """No error on the console, no failed request, and none to another host, since the last time."""
    assert [entry for entry in browser.get_log("browser") if entry["level"] == "SEVERE"] == []
    requests = {}
    for entry in browser.get_log("performance"):
        message = json.loads(entry["message"])["message"]
        event, parameters = message["method"], message["params"]
        if event == "Network.requestWillBeSent" and parameters["documentURL"].startswith(address):
            url = requests[parameters["requestId"]] = parameters["request"]["url"]
            assert url.startswith((f"{address}/", "data:", "blob:")), url
        elif parameters.get("requestId") not in requests:  # of the page that the browser begins with
            continue
        elif event == "Network.responseReceived":
            assert parameters["response"]["status"] < 400, parameters["response"]["url"]
        elif event == "Network.loadingFailed" and not parameters.get("canceled"):
            assert parameters["errorText"] == "net::ERR_ABORTED", requests[parameters["requestId"]]
    assert requests


@contextlib.contextmanager
def window(browser, width):
    """The page as in a window of this width, the narrow ones as on a phone."""
    size = {"width": width, "height": 900, "deviceScaleFactor": 1, "mobile": width < 600}
    browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
    yield
    browser.execute_cdp_cmd("Emulation.clearDeviceMetricsOverride", {})


# What lies to the right of the window and cannot be scrolled to, what can be but does not show it, and formulas that
# have to be scrolled on a desktop
STICKS_OUT = """
const right = document.documentElement.clientWidth;
const scrolls = element => {
    for (; element && element.tagName != "BODY"; element = element.parentElement)
        if (["auto", "scroll"].includes(getComputedStyle(element).overflowX)) return true;
    return false;
};
const found = [...document.querySelectorAll("article *")].filter(element => {
    const box = element.getBoundingClientRect();
    return box.width && box.height && box.right > right + 1 && !scrolls(element);
}).map(element => element.tagName + ": " + element.textContent.slice(0, 60));
if (document.documentElement.scrollWidth > right) found.push("the page");
for (const element of document.querySelectorAll(".md-typeset__scrollwrap, .formula, .formula .part")) {
    if (element.scrollWidth <= element.clientWidth) continue;
    const shadow = getComputedStyle(element).backgroundImage.includes("gradient");
    if (!shadow) found.push("no shadow: " + element.textContent);
    if (right > 1000 && element.matches(".formula, .part")) found.push("wide: " + element.textContent);
}
return found;
"""


def test_pages_load_in_a_browser(browser, address, site):
    for name in pages_of(site):
        browser.get(f"{address}/{name}")
        wait_for(browser, lambda browser: browser.execute_script("return document.readyState") == "complete")
        assert heading(browser), name
        pictures = "return [...document.images].map(image => [image.src, image.complete, image.naturalWidth])"
        for source, complete, width in browser.execute_script(pictures):
            assert complete and width > 0, source
        formulas = "return [...document.querySelectorAll('math')].map(math => math.getBoundingClientRect().width)"
        assert all(width > 0 for width in browser.execute_script(formulas)), name
        for width in (1280, 390):
            with window(browser, width):
                outside = browser.execute_script(STICKS_OUT)
                assert outside == [], f"{name}, {width} wide"
        assert_nothing_went_wrong(browser, address)


def test_colours_can_be_switched_and_plots_follow(browser, address):
    browser.get(f"{address}/speed.html")
    colour = "return getComputedStyle(document.body).backgroundColor"
    turned = "return getComputedStyle(document.querySelector('article img')).filter"
    before = browser.execute_script(colour)
    scheme = "return document.body.getAttribute('data-md-color-scheme')"
    assert ("invert" in browser.execute_script(turned)) == (browser.execute_script(scheme) == "slate")
    label = next(
        label
        for label in browser.find_elements("css selector", "form.md-header__option label")
        if label.is_displayed()
    )
    label.click()
    wait_for(browser, lambda browser: browser.execute_script(colour) != before)
    assert ("invert" in browser.execute_script(turned)) == (browser.execute_script(scheme) == "slate")
    assert_nothing_went_wrong(browser, address)
