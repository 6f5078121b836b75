"""The model card: valid, says what was done, and its snippet runs against the model it describes."""

import ast
import builtins
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
from isopo_trl.checkpoints.model_card import _before, _code, _in_a_cell, _replaced
from isopo_trl.validation import ValidationCallback
from tests import tiny, training


LORA = {"peft_config": LoraConfig(r=2, target_modules="all-linear")}


def snippet(text: str) -> str:
    (block,) = re.findall(r"```python\n(.*?)```", text, flags=re.DOTALL)
    return block


@pytest.mark.parametrize("options", [{}, LORA], ids=["full", "lora"])
def test_the_snippet_runs_against_the_saved_model(tmp_path, options, capsys):
    trainer = training.build(tmp_path / "out", tiny.save(tmp_path / "base", "qwen3"), options=options)
    trainer.train()
    trainer.save_model()
    trainer.create_model_card()
    block = snippet((tmp_path / "out" / "README.md").read_text())
    assert f'model="{tmp_path / "out"}"' in block
    # What the model was not trained for is not asked, nor what was not meant to be published
    assert "goes here" in block and not any(row["prompt"] in block for row in trainer.train_dataset)
    prompt = [{"role": "system", "content": ""}, {"role": "user", "content": "Calculate 4 + 7."}]
    trainer.card_prompt = prompt
    trainer.create_model_card()
    block = snippet((tmp_path / "out" / "README.md").read_text())
    assert ast.literal_eval(re.search("prompt = (.*)", block).group(1)) == prompt
    names = {}
    exec(block, names)
    assert isinstance(names["output"]["generated_text"], str)
    assert capsys.readouterr().out.endswith(names["output"]["generated_text"] + "\n")
    # What it says is the trained model's, not the base model's
    loaded = dict(names["generator"].model.named_parameters())
    trained = [name for name, p in trainer.model.named_parameters() if p.requires_grad and "lora_B" in name] or [
        "model.norm.weight"
    ]
    for name in trained:
        short = name.removeprefix("base_model.model.")
        (match,) = [p for other, p in loaded.items() if other.removeprefix("base_model.model.") == short]
        assert torch.equal(match, dict(trainer.model.named_parameters())[name]), name


def test_a_model_without_chat_template_gets_a_snippet_in_plain_text(tmp_path):
    tokenizer = tiny.tokenizer()
    tokenizer.chat_template = None
    trainer = training.build(
        tmp_path / "out", tiny.save(tmp_path / "base", "qwen3"), options={"processing_class": tokenizer}
    )
    trainer.save_model()
    trainer.create_model_card()
    block = snippet((tmp_path / "out" / "README.md").read_text())
    assert "role" not in block
    exec(block, {})
    trainer.card_prompt = "What is {1} + '1' \\ \"1\"?\n"
    trainer.create_model_card()
    names = {"__builtins__": {**vars(builtins), "print": lambda _: None}}
    exec(snippet((tmp_path / "out" / "README.md").read_text()), names)
    assert names["prompt"] == trainer.card_prompt


def test_the_card_names_rule_settings_versions_and_paper(tmp_path):
    trainer = training.build(
        tmp_path,
        tiny.save(tmp_path / "base", "qwen3"),
        rule="fig4",
        regularization=0.5,
        fisher_samples=7,
        options=LORA,
    )
    trainer.create_model_card(model_name="a-model", dataset_name="openai/gsm8k", tags=["extra"])
    card = ModelCard.load(tmp_path / "README.md")
    assert {"trl", "isopo", "extra"} <= set(card.data.tags) and card.data.datasets == "openai/gsm8k"
    assert card.data.library_name == "peft" and card.data.pipeline_tag == "text-generation"
    text = card.text
    assert "# Model Card for a-model" in text and "None" not in text
    for row in ("`rule` | fig4", "`norm_power` | -1.0", "`relative_power` | -2.0", "`regularization` | 0.5"):
        assert f"| {row} |" in text, row
    for row in (
        "`fisher_samples` | 7",
        "`fisher_scope` | step",
        "`learning_rate` | 0.01",
        "`lr_scheduler_type` | linear",
        "`adapter` | LORA, r=2",
    ):
        assert f"| {row} |" in text, row
    for name, version in (("isopo-trl", isopo_trl), ("TRL", trl), ("PEFT", peft), ("Transformers", transformers)):
        assert re.search(rf"{re.escape(name)}\)?: {re.escape(version.__version__)}", text), name
    assert "huggingface.co/papers/2512.23353" in text and "abrahamsen2025isopo" in text
    assert str(tmp_path) not in text.replace(snippet(text), "")


def test_settings_of_the_weighting_are_told_where_it_is_used(tmp_path):
    def text(folder, **settings):
        training.build(tmp_path / folder, "qwen3", **settings).create_model_card()
        return (tmp_path / folder / "README.md").read_text()

    used = text("kpo", token_weights="kpo", kpo_process_noise=1e-5)
    assert "Tokens were weighted by [KPO](https://huggingface.co/papers/2602.10609)" in used
    for row in (
        "`token_weights` | kpo",
        "`kpo_process_noise` | 1e-05",
        "`epsilon` | 0.0003",
        "`epsilon_high` | 0.0004",
    ):
        assert f"| {row} |" in used, row
    unused = text("none")
    assert "| `token_weights` | none |" in unused
    assert not any(words in unused for words in ("Tokens were weighted", "kpo_", "`epsilon"))


def test_the_front_matter_is_valid_yaml(tmp_path):
    trainer = training.build(tmp_path, tiny.save(tmp_path / "base", "qwen3"), rule="interacting")
    trainer.create_model_card()
    _, front, body = (tmp_path / "README.md").read_text().split("---\n", 2)
    front = yaml.safe_load(front)
    assert front["library_name"] == "transformers" and "licence" not in front and "license" not in front
    assert "| `rule` | interacting |" in body and "`fisher_power`" not in body and "| `regularization` | 1.0 |" in body


def test_any_name_is_shown_as_it_is(tmp_path):
    odd = "a \"b\" 'c' <script>alert(1)</script> & | `d` [e](f) *g* \\ {{ h }}: # i"
    folder = tmp_path / 'out "quoted" <b>'
    trainer = training.build(folder, "qwen3")
    trainer.model.config._name_or_path = f"someone/{odd}"
    trainer.create_model_card(model_name=f"{odd}\nsecond line", dataset_name=odd, tags=[odd])
    content = (folder / "README.md").read_text()
    _, front, body = content.split("---\n", 2)
    front = yaml.safe_load(front)
    assert front["model_name"] == f"{odd}\nsecond line" and front["datasets"] == odd and odd in front["tags"]
    assert front["base_model"] == f"someone/{odd}"
    page = ElementTree.fromstring(f"<page>{markdown.markdown(body, extensions=['fenced_code', 'tables'])}</page>")
    assert not {"script", "b", "em"} & {element.tag for element in page.iter()}
    assert page.find("h1").text == f"Model Card for {odd} second line"
    links = {"".join(link.itertext()): link.get("href") for link in page.iter("a")}
    assert links[odd] == f"https://huggingface.co/datasets/{quote(odd)}"
    assert links[f"someone/{odd}"] == f"https://huggingface.co/{quote(f'someone/{odd}')}"
    calls = [node for node in ast.walk(ast.parse(snippet(content))) if isinstance(node, ast.Call)]
    (model,) = [argument.value.value for call in calls for argument in call.keywords if argument.arg == "model"]
    assert model == str(folder)


def test_names_are_code_and_values_are_cells_of_markdown():
    assert _code("plain") == "`plain`" and _code("a `b``c` ") == "``` a `b``c` ```"
    assert _in_a_cell("a | <b>\nc") == "a \\| &lt;b&gt; c" and _in_a_cell(0.5) == "0.5"


def test_what_was_validated_is_told(tmp_path):
    trainer = training.build(tmp_path, tiny.save(tmp_path / "base", "qwen3"))
    trainer.add_callback(ValidationCallback(trainer, tiny.prompts(2), lambda completions, **_: [0.25, 0.75], steps=1))
    trainer.train()
    trainer.create_model_card()
    text = (tmp_path / "README.md").read_text()
    assert "In 2 optimizer steps its greedy accuracy on the validation set went from 50.0% to 50.0%, at " in text


def test_a_checkpoint_has_the_card_too(tmp_path):
    trainer = training.build(tmp_path, tiny.save(tmp_path / "base", "qwen3"), save_strategy="steps", save_steps=2)
    trainer.train()
    assert "| `rule` | fisher |" in (tmp_path / "README.md").read_text()


def test_a_template_of_trl_with_other_headings_still_gets_everything():
    assert _replaced("# Title\n", "## Quick start", "body") == "# Title\n\n## Quick start\n\nbody\n"
    assert _replaced("a\n## Quick start\nold\n## Next\nb", "## Quick start", "new") == (
        "a\n## Quick start\n\nnew\n\n## Next\nb"
    )
    assert _before("text", "### Framework versions", "more") == "text\n\nmore"
