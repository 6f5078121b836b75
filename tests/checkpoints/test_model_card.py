"""The model card: valid, says what was done, and its snippet runs against the model it describes."""

import ast
import re
from urllib.parse import quote
from xml.etree import ElementTree

import markdown
import peft
import pytest
import torch
import transformers
import trl
import yaml
from huggingface_hub import ModelCard
from peft import LoraConfig

import isopo_trl
from isopo_trl.validation import ValidationCallback, callback
from tests import tiny, training


LORA = {"peft_config": LoraConfig(r=2, target_modules="all-linear")}


def card_of(trainer, **names):
    """The text of a trainer's card."""
    trainer.create_model_card(**names)
    return ModelCard.load(f"{trainer.args.output_dir}/README.md").text


def snippet(text):
    (block,) = re.findall(r"```python\n(.*?)```", text, flags=re.DOTALL)
    return block


@pytest.mark.parametrize("options", [{}, LORA], ids=["full", "lora"])
def test_the_snippet_runs_against_the_saved_model(tmp_path, options, capsys):
    trainer = training.build(tmp_path / "out", tiny.save(tmp_path / "base", "qwen3"), options=options)
    trainer.train()
    trainer.save_model()
    block = snippet(card_of(trainer))
    # What the model was not trained for is not asked, nor what was not meant to be published
    assert "goes here" in block and not any(row["prompt"] in block for row in trainer.train_dataset)
    trainer.card_prompt = [{"role": "system", "content": ""}, {"role": "user", "content": "Calculate 4 + 7."}]
    names = {}
    exec(snippet(card_of(trainer)), names)
    assert names["prompt"] == trainer.card_prompt
    assert capsys.readouterr().out.endswith(names["output"]["generated_text"] + "\n")
    # What it says is the trained model's, not the base model's
    loaded = {name.removeprefix("base_model.model."): p for name, p in names["generator"].model.named_parameters()}
    for name, p in trainer.model.named_parameters():
        if p.requires_grad:
            assert torch.equal(p, loaded[name.removeprefix("base_model.model.")]), name


@pytest.mark.parametrize("prompt", [None, "What is {1} + '1' \\ \"1\"?\n"], ids=["no prompt", "prompt"])
def test_a_model_without_chat_template_gets_a_snippet_in_plain_text(prompt, tmp_path):
    tokenizer = tiny.tokenizer()
    tokenizer.chat_template = None
    model = tiny.save(tmp_path / "base", "qwen3")
    trainer = training.build(tmp_path / "out", model, options={"processing_class": tokenizer})
    trainer.save_model()
    trainer.card_prompt = prompt
    names = {}
    exec(snippet(card_of(trainer)), names)
    assert isinstance(names["prompt"], str) and prompt in (None, names["prompt"])


@pytest.mark.parametrize(
    "settings, rows, absent",
    [
        (
            {"rule": "fig4", "regularization": 0.5, "fisher_samples": 7, "options": LORA},
            {"rule": "fig4", "norm_power": -1.0, "relative_power": -2.0, "regularization": 0.5, "fisher_samples": 7}
            | {"fisher_scope": "step", "learning_rate": 0.01, "lr_scheduler_type": "linear", "adapter": "LORA, r=2"},
            ["kpo_", "epsilon"],
        ),
        ({"rule": "interacting"}, {"rule": "interacting", "regularization": 1.0}, ["fisher_power", "fisher_scope"]),
        (
            {"token_weights": "kpo", "kpo_process_noise": 1e-5, "reward_weights": [2.0]},
            {"token_weights": "kpo", "kpo_process_noise": 1e-05, "epsilon": 0.0003, "epsilon_high": 0.0004},
            [],
        ),
        ({}, {"token_weights": "none"}, ["kpo_", "epsilon"]),
    ],
    ids=["fig4", "interacting", "kpo", "default"],
)
def test_the_card_tells_the_rule_and_the_settings_that_matter(settings, rows, absent, tmp_path):
    text = card_of(training.build(tmp_path, "qwen3", **settings))
    assert not [row for row in (f"| `{name}` | {value} |" for name, value in rows.items()) if row not in text]
    assert not [name for name in absent if f"`{name}" in text]
    credit = "Tokens were weighted by [KPO](https://huggingface.co/papers/2602.10609)"
    assert (credit in text) == (rows.get("token_weights") == "kpo")


def test_the_card_names_versions_and_paper_and_not_where_the_model_lay(tmp_path):
    trainer = training.build(tmp_path, tiny.save(tmp_path / "base", "qwen3"), options=LORA)
    text = card_of(trainer, model_name="a-model", dataset_name="openai/gsm8k", tags=["extra"])
    data = yaml.safe_load((tmp_path / "README.md").read_text().split("---\n")[1])
    assert {"trl", "isopo", "extra"} <= set(data["tags"]) and data["datasets"] == "openai/gsm8k"
    assert (data["library_name"], data["pipeline_tag"]) == ("peft", "text-generation")
    assert "licence" not in data and "license" not in data
    assert "# Model Card for a-model" in text and "fine-tuned version of base on" in text and "None" not in text
    for name, package in (("isopo-trl", isopo_trl), ("TRL", trl), ("PEFT", peft), ("Transformers", transformers)):
        assert re.search(rf"{re.escape(name)}\)?: {re.escape(package.__version__)}", text), name
    for paper in ("huggingface.co/papers/2512.23353", "{abrahamsen2025isopo,", "{vonwerra2020trl,"):
        assert paper in text
    assert str(tmp_path) not in text.replace(snippet(text), "")


def test_any_name_is_shown_as_it_is(tmp_path):
    odd = "a \"b\" 'c' <script>alert(1)</script> & | `d` [e](f) *g* \\ {{ h }}: # i"
    folder = tmp_path / 'out "quoted" <b>'
    trainer = training.build(folder, "qwen3")
    trainer.model.config._name_or_path = f"someone/{odd}"
    text = card_of(trainer, model_name=f"{odd}\nsecond line", dataset_name=odd, tags=[odd])
    data = yaml.safe_load((folder / "README.md").read_text().split("---\n")[1])
    assert data["model_name"] == f"{odd}\nsecond line" and data["datasets"] == odd and odd in data["tags"]
    assert data["base_model"] == f"someone/{odd}"
    page = ElementTree.fromstring(f"<page>{markdown.markdown(text, extensions=['fenced_code', 'tables'])}</page>")
    assert not {"script", "b", "em"} & {element.tag for element in page.iter()}
    assert page.find("h1").text == f"Model Card for {odd} second line"
    links = {"".join(link.itertext()): link.get("href") for link in page.iter("a")}
    assert links[odd] == f"https://huggingface.co/datasets/{quote(odd)}"
    assert links[f"someone/{odd}"] == f"https://huggingface.co/{quote(f'someone/{odd}')}"
    calls = [node for node in ast.walk(ast.parse(snippet(text))) if isinstance(node, ast.Call)]
    (model,) = [argument.value.value for call in calls for argument in call.keywords if argument.arg == "model"]
    assert model == str(folder)


def test_a_run_that_saves_and_validates_leaves_a_card_with_its_accuracy(tmp_path, monkeypatch):
    monkeypatch.setattr(callback, "is_matplotlib_available", lambda: False)  # nobody looks at a picture
    trainer = training.build(tmp_path, tiny.save(tmp_path / "base", "qwen3"), save_strategy="steps", save_steps=2)
    trainer.add_callback(ValidationCallback(trainer, tiny.prompts(2), lambda completions, **_: [0.25, 0.75], steps=1))
    trainer.train()
    assert "| `rule` | fisher |" in (tmp_path / "README.md").read_text()
    assert "In 2 optimizer steps its greedy accuracy on the validation set went from 50.0% to 50.0%, at " in card_of(
        trainer
    )
