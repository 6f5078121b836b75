"""The model card: TRL's, with the rule and its settings, more versions, and a snippet that runs."""

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
from transformers import TrainerState

from ..advantages import Chain
from ..config import ISOPOConfig
from ..isopo import ISOPO
from ..token_weights import Weighting
from ..token_weights.ratio_loss import BY_RATIO, RANGE


# Shown of every run, beside the settings of the rule and the changed ones
_SETTINGS = (
    *("regularization_decay", "fisher_samples", "fisher_scope", "token_weights", "loss_type"),
    *("learning_rate", "lr_scheduler_type", "max_steps", "num_train_epochs"),
    *("num_generations", "per_device_train_batch_size", "gradient_accumulation_steps"),
    *("temperature", "max_completion_length", "max_grad_norm", "use_vllm", "seed"),
)
# Without a `card_prompt`: prompts of the training set may not be for everybody to read
_QUESTION = "A question of the kind that this model was trained on goes here."
# What TRL writes before its training procedure is replaced; its procedure, versions and citations are taken over
_CARD = """
# Model Card for {name}

This model is a fine-tuned version of {base}{data}.
It has been trained using [TRL](https://github.com/huggingface/trl).

## Quick start

```python
from transformers import pipeline

prompt = {prompt}
generator = pipeline("text-generation", model={model})
output = generator(prompt, max_new_tokens=128, return_full_text=False)[0]
print(output["generated_text"])
```

## Training procedure

{procedure}

Each sequence's gradient was rescaled, layer by layer, by the rule {rule} of
[ISOPO](https://huggingface.co/papers/2512.23353), as the package isopo-trl implements it.
{credit}
{outcome}

### Settings

| setting | value |
|---|---|
{settings}

### Framework versions

- ISOPO for TRL (isopo-trl): {version}
- PEFT: {peft}
{rest}"""


def write(path: str, model_name: str | None, trainer: Any) -> None:
    """Rewrite the card that TRL has written to `path` about a trainer's model, called `model_name`."""
    args, model, hub_id = trainer.args, trainer.model, trainer.hub_model_id
    card = ModelCard.load(path)
    card.data.pop("licence", None)  # TRL writes the word "license" there
    card.data.pipeline_tag = "text-generation"
    base, data = card.data.get("base_model"), card.data.get("datasets")
    folder = os.path.basename(model.config._name_or_path)  # TRL names no base model that is a folder
    prompt = trainer.card_prompt
    if prompt is None:
        has_chat = bool(getattr(trainer.processing_class, "chat_template", None))
        prompt = [{"role": "user", "content": _QUESTION}] if has_chat else _QUESTION
    settings = _settings(args, trainer.isopo, trainer.weighting, trainer.transforms)
    if is_peft_model(model):
        card.data.library_name = "peft"
        adapter = model.active_peft_config
        settings["adapter"] = f"{adapter.peft_type.value}, r={getattr(adapter, 'r', None)}"
    procedure, _, rest = card.text.rpartition("## Training procedure")[2].partition("### Framework versions")
    card.text = _CARD.format(
        name=_plain(model_name or hub_id or os.path.basename(os.path.abspath(args.output_dir or ""))),
        base=_link(base) if base else _plain(folder) or "a model without a name",
        data=f" on the {_link(data, 'datasets/')} dataset" if data else "",
        prompt=json.dumps(prompt, ensure_ascii=False),  # texts, lists and objects of JSON are Python as well
        model=json.dumps(str(hub_id or args.output_dir), ensure_ascii=False),
        procedure=procedure.strip(),
        rule=_plain(trainer.isopo.rule.name),
        credit=" ".join(filter(None, (trainer.weighting.credit, trainer.transforms.credit))),
        outcome=_outcome(trainer.state),
        settings="\n".join(f"| `{name}` | {_plain(str(value))} |" for name, value in settings.items()),
        version=_version(),
        peft=peft.__version__,
        rest=rest.lstrip(),
    )
    card.save(path)


def _settings(args: ISOPOConfig, isopo: ISOPO, weighting: Weighting, transforms: Chain) -> dict[str, Any]:
    """Settings of a run by name: the rule's, the weighting's, some of every run, and the changed ones."""
    rule = isopo.rule
    changeable = (*ISOPOConfig.__annotations__, *RANGE, *BY_RATIO.get(args.loss_type, ()))
    changed = [name for name in changeable if getattr(args, name) != getattr(ISOPOConfig, name, None)]
    values = {
        "rule": rule.name,
        **{name: value for name, value in rule.settings.items() if name != "name"},
        **{name: getattr(args, name) for name in (*weighting.settings, *weighting.defaults, *_SETTINGS, *changed)},
        **transforms.chosen(),
        "fisher_scope": isopo.fisher_scope if rule.needs.overlap else None,
    }
    return {name: getattr(value, "value", value) for name, value in values.items() if value is not None}


def _outcome(state: TrainerState) -> str:
    """A sentence on the accuracy before and after training, and nothing where it was not measured."""
    accuracies, divergences = (
        [line[name] for line in state.log_history if name in line] for name in ("validation/accuracy", "validation/kl")
    )
    if not accuracies:
        return ""
    kl = f", at {divergences[-1]:.3f} nats per completion from where it started" if divergences else ""
    return (
        f"In {state.global_step} optimizer steps its greedy accuracy on the validation set went from "
        f"{accuracies[0]:.1%} to {accuracies[-1]:.1%}{kl}."
    )


def _version() -> str:
    """The version of isopo-trl."""
    try:
        return version("isopo-trl")
    except PackageNotFoundError:
        return "a source tree"


def _link(name: str, kind: str = "") -> str:
    """A link of Markdown to a page of the Hub."""
    return f"[{_plain(name)}](https://huggingface.co/{kind}{quote(name)})"


def _plain(text: str) -> str:
    """Text as Markdown that shows it as it is, on one line, in a cell of a table too."""
    return re.sub(r"[\\`*\[\]|]", r"\\\g<0>", html.escape(" ".join(text.split()), quote=False))
