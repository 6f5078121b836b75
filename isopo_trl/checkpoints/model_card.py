"""What a model card says beyond TRL's: the rule and its settings, versions, and a snippet that runs."""

import html
import json
import os
import re
from importlib.metadata import PackageNotFoundError, version
from typing import Any
from urllib.parse import quote

import peft
from accelerate.utils import is_peft_model
from huggingface_hub import ModelCard

from ..config import ISOPOConfig
from ..token_weights.ratio_loss import BY_RATIO, RANGE


# Shown of every run, beside the settings of the rule and those that were changed
_SETTINGS = (
    "regularization_decay",
    "fisher_samples",
    "fisher_scope",
    "token_weights",
    "loss_type",
    "learning_rate",
    "lr_scheduler_type",
    "max_steps",
    "num_train_epochs",
    "num_generations",
    "per_device_train_batch_size",
    "gradient_accumulation_steps",
    "temperature",
    "max_completion_length",
    "max_grad_norm",
    "use_vllm",
    "seed",
)
# Where the trainer has no `card_prompt`: prompts of the training set may not be for everybody to read
_QUESTION = "A question of the kind that this model was trained on goes here."
_SNIPPET = """\
from transformers import pipeline

prompt = {prompt}
generator = pipeline("text-generation", model={model})
output = generator(prompt, max_new_tokens=128, return_full_text=False)[0]
print(output["generated_text"])"""


def write(path: str, model_name: str | None, trainer: Any) -> None:
    """Rewrite the card that TRL has written to `path`."""
    card = ModelCard.load(path)
    card.data.pop("licence", None)  # TRL writes the word "license" there
    card.data.pipeline_tag = "text-generation"
    if is_peft_model(trainer.model):
        card.data.library_name = "peft"
    name = model_name or trainer.hub_model_id or os.path.basename(os.path.abspath(trainer.args.output_dir or ""))
    base = os.path.basename(trainer.model.config._name_or_path)  # where TRL has left it out, it is a path
    text = card.text
    text = text.replace(f"# Model Card for {model_name}", f"# Model Card for {_plain(name)}", 1)
    text = text.replace("[None](https://huggingface.co/None)", _code(base) if base else "a model without a name")
    for kind, page in (("base_model", ""), ("datasets", "datasets/")):
        given = card.data.get(kind)
        if isinstance(given, str):
            link = f"[{_plain(given)}](https://huggingface.co/{page}{quote(given)})"
            text = text.replace(f"[{given}](https://huggingface.co/{page}{given})", link)
    text = _replaced(text, "## Quick start", _quick_start(trainer))
    text = _before(text, "### Framework versions", _procedure(trainer))
    text = _before(text, "- TRL:", _versions())
    card.text = text
    card.save(path)


def _quick_start(trainer: Any) -> str:
    tokenizer: Any = trainer.processing_class
    prompt: Any = trainer.card_prompt
    if prompt is None:
        prompt = _QUESTION
        if getattr(tokenizer, "chat_template", None):
            prompt = [{"role": "user", "content": _QUESTION}]
    model = trainer.hub_model_id or trainer.args.output_dir
    # Of JSON, texts, lists and objects are Python as well
    written = [json.dumps(value, ensure_ascii=False) for value in (prompt, str(model))]
    return f"```python\n{_SNIPPET.format(prompt=written[0], model=written[1])}\n```"


def _procedure(trainer: Any) -> str:
    args, rule = trainer.args, trainer.isopo.rule
    weighting = trainer.weighting
    rows = {
        "rule": rule.name,
        **{name: value for name, value in rule.settings.items() if name != "name"},
        **{name: getattr(args, name) for name in (*weighting.settings, *weighting.defaults)},
        **{name: getattr(args, name) for name in _SETTINGS},
        **_changed(args),
        "fisher_scope": trainer.isopo.fisher_scope if rule.needs.overlap else None,
    }
    if is_peft_model(trainer.model):
        config = trainer.model.active_peft_config
        rows["adapter"] = f"{config.peft_type.value}, r={getattr(config, 'r', None)}"
    shown = {name: getattr(value, "value", value) for name, value in rows.items() if value is not None}
    table = "\n".join(f"| `{name}` | {_in_a_cell(value)} |" for name, value in shown.items())
    sentences = [
        f"Each sequence's gradient was rescaled, layer by layer, by the rule {_code(rule.name)} of "
        "[ISOPO](https://huggingface.co/papers/2512.23353), as the package isopo-trl implements it.",
        weighting.credit,
        _outcome(trainer),
    ]
    text = " ".join(filter(None, sentences))
    return f"{text}\n\n### Settings\n\n| setting | value |\n|---|---|\n{table}\n\n"


def _changed(args: ISOPOConfig) -> dict[str, Any]:
    """Of the settings of `ISOPOConfig`, and of the clipping range, those that are not at their defaults."""
    names = (*ISOPOConfig.__annotations__, *RANGE, *BY_RATIO.get(args.loss_type, ()))
    return {name: getattr(args, name) for name in names if getattr(args, name) != getattr(ISOPOConfig, name, None)}


def _outcome(trainer: Any) -> str:
    log = trainer.state.log_history
    accuracies = [line["validation/accuracy"] for line in log if "validation/accuracy" in line]
    divergences = [line["validation/kl"] for line in log if "validation/kl" in line]
    if not accuracies:
        return ""
    kl = f", at {divergences[-1]:.3f} nats per completion from where it started" if divergences else ""
    return (
        f"In {trainer.state.global_step} optimizer steps its greedy accuracy on the validation set went from "
        f"{accuracies[0]:.1%} to {accuracies[-1]:.1%}{kl}."
    )


def _versions() -> str:
    try:
        own = f"- ISOPO for TRL (isopo-trl): {version('isopo-trl')}\n"
    except PackageNotFoundError:  # a source tree that is not installed
        own = ""
    return f"{own}- PEFT: {peft.__version__}\n"


def _plain(name: str) -> str:
    """A name as text of Markdown that shows it as it is, on one line."""
    return re.sub(r"[\\`*\[\]]", r"\\\g<0>", html.escape(" ".join(name.split()), quote=False))


def _code(name: str) -> str:
    """A name as code of Markdown, within more backticks than it has in a row."""
    ticks = "`" * (1 + max(map(len, re.findall("`+", name)), default=0))
    return f"{ticks} {' '.join(name.split())} {ticks}" if "`" in name else f"`{' '.join(name.split())}`"


def _in_a_cell(value: Any) -> str:
    """A value as text in a table of Markdown."""
    return html.escape(" ".join(str(value).split()), quote=False).replace("|", "\\|")


def _replaced(text: str, heading: str, body: str) -> str:
    """`text` with what stands under `heading` replaced, or with the section added if there is none."""
    start = text.find(heading)
    if start < 0:
        return f"{text.rstrip()}\n\n{heading}\n\n{body}\n"
    start += len(heading)
    following = re.search(r"^## ", text[start:], flags=re.MULTILINE)
    end = start + following.start() if following else len(text)
    return f"{text[:start]}\n\n{body}\n\n{text[end:]}"


def _before(text: str, mark: str, addition: str) -> str:
    place = text.find(mark)
    if place < 0:
        return f"{text.rstrip()}\n\n{addition}"
    return text[:place] + addition + text[place:]
