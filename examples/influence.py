"""
Which completions teach? Of one training step, those that help most and least on problems that are held back.

Without arguments it takes the model and the sums of `gsm8k.py`, trains for a few steps, and looks at the next one. It
takes a few minutes on a CPU, and asks nothing of the Hub.

    python examples/influence.py
    python examples/influence.py --table influence.csv --held_back 36
    python examples/influence.py --model_name_or_path Qwen/Qwen3-0.6B --dataset openai/gsm8k --use_peft \
        --steps_before 0 --held_back 64

Arguments are those of `gsm8k.py` and the ones below; `docs/influence.md` says what the figures mean. Three passes are
made, each by a trainer of its own on the same model: training as usual, for `--steps_before` steps; the gradient of
the expected reward of held-back problems; and one step that is not made, in which every completion's gradient is
measured against that.
"""

import csv
import json
import sys
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

import example_run
import gsm8k
import torch
from accelerate import PartialState
from preflight import check_machine, check_model
from transformers import PrinterCallback, ProgressCallback

from isopo_trl import ISOPOTrainer
from isopo_trl.token_weights.ratio_loss import signs


# What belongs to training, and not to the gradient of an expected reward: all of ISOPO's own settings, and these
OF_TRAINING = (
    *("beta", "router_aux_loss_coef", "entropy_coef", "use_adaptive_entropy", "sync_ref_model", "optim"),
    *("epsilon", "epsilon_high", "delta", "importance_sampling_level", "multi_objective_aggregation"),
    *("mask_truncated_completions", "top_entropy_quantile", "off_policy_mask_threshold", "num_train_epochs"),
    *("num_iterations", "steps_per_generation", "generation_batch_size"),
)
# A mean over completions of advantage times log-probability, divided by the longest length that is allowed
PLAIN = {"rule": "none", "loss_type": "dr_grpo", "scale_rewards": "none", "router_aux_loss_coef": 0.0}
DEFAULTS = {"gradient_accumulation_steps": 4, "save_strategy": "no", "output_dir": "outputs/influence"}


@dataclass
class InfluenceArguments(gsm8k.GSM8KArguments):
    """
    Arguments of this script, beside those of `gsm8k.py`.

    Args:
        held_back (`int`): problems, of those that are not trained on, whose expected reward counts.
        steps_before (`int`): steps of training before the one that is looked at.
        shown (`int`): completions that are printed, half of them those that help most.
        table (`str`, *optional*): a file that ends in `.csv` or `.json`, for all completions of the step.
    """

    held_back: int = field(default=24, metadata={"help": "Held-back problems whose expected reward counts."})
    steps_before: int = field(default=6, metadata={"help": "Steps of training before the one that is looked at."})
    shown: int = field(default=20, metadata={"help": "Completions to print, half of them those that help most."})
    table: str | None = field(default=None, metadata={"help": "File (.csv or .json) for all completions."})

    def __post_init__(self):
        super().__post_init__()
        if self.held_back < 1 or self.steps_before < 0 or self.shown < 2:
            raise ValueError(
                f"--held_back {self.held_back} must be at least 1, --steps_before {self.steps_before} at least 0, and "
                f"--shown {self.shown} at least 2."
            )
        if self.table is not None and Path(self.table).suffix not in (".csv", ".json"):
            raise ValueError(f"--table {self.table} must end in .csv or .json.")


@dataclass
class Completion:
    """
    One completion of the step, and what it teaches; `docs/influence.md` has the definitions.

    Args:
        prompt, completion (`str`): the texts.
        reward, advantage (`float`): as in training.
        tokens (`tuple[int]`): of the completion, which are not written.
        alignment (`float`): `<V_s, D>` over all layers.
        plain (`float`): `A_s <V_s, D>`, the influence without a rule.
        influence (`float`): `sum over layers of c_s <V_s, D>`, with the rule's coefficients.
    """

    prompt: str
    completion: str
    reward: float
    advantage: float
    alignment: float = 0.0
    plain: float = 0.0
    influence: float = 0.0
    tokens: tuple[int, ...] = field(default=(), repr=False)


class StepIsKnown(Exception):
    """All of a step's backward passes have been made, and nothing more is wanted of it."""


class UnmadeStep(ISOPOTrainer):
    """A trainer that notes the completions of its first step, and does not make it."""

    completions: list[Completion]

    def look(self) -> None:
        """Go as far as the step's gradient."""
        self.completions = []
        for callback in (PrinterCallback, ProgressCallback):
            self.remove_callback(callback)
        try:
            self.train()
        except StepIsKnown:
            pass

    def training_step(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        loss = super().training_step(*args, **kwargs)
        if self.accelerator.sync_gradients:
            raise StepIsKnown
        return loss

    def _calculate_rewards(self, inputs, prompts, completions, completion_ids_list) -> torch.Tensor:
        rewards = super()._calculate_rewards(inputs, prompts, completions, completion_ids_list)
        total = (rewards * self.reward_weights.to(rewards.device)).nansum(1)
        self._seen = list(zip(prompts, completions, completion_ids_list, total.tolist(), strict=True))
        return rewards

    def _generate_and_score_completions(self, inputs: list[dict[str, Any]]) -> dict[str, Any]:
        batch = super()._generate_and_score_completions(inputs)
        first = len(self.completions)
        for (prompt, completion, tokens, reward), advantage in zip(
            self._seen, batch["advantages"].tolist(), strict=True
        ):
            texts = [text if isinstance(text, str) else text[-1]["content"] for text in (prompt, completion)]
            self.completions.append(Completion(*texts, reward, advantage, tokens=tuple(tokens)))
        # By which they are known again in microbatches
        batch["number"] = torch.arange(first, len(self.completions), device=batch["advantages"].device)
        return batch


class Influence(UnmadeStep):
    """Measures the gradient of each completion against the direction that is held."""

    def compute_loss(self, model, inputs, *args: Any, **kwargs: Any):
        self._inputs = inputs
        return super().compute_loss(model, inputs, *args, **kwargs)

    def training_step(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        try:
            return super().training_step(*args, **kwargs)
        finally:
            if self._inputs:
                self._note(self._inputs["number"].tolist(), self._inputs["advantages"].cpu())
            self._inputs = {}

    def _note(self, numbers: list[int], advantages: torch.Tensor) -> None:
        # The loss of the trainer contains the signs of the advantages, and so does what it is projected as
        projected = torch.stack([*self.isopo.projections().values()]).sum(0)
        alignments = signs(advantages, self.loss_type) * projected
        columns = (alignments, advantages * alignments, self.isopo.influences())
        for number, *values in zip(numbers, *(column.tolist() for column in columns), strict=True):
            known = self.completions[number]
            known.alignment, known.plain, known.influence = values


# The three passes


def built(arguments: tuple[Any, ...], data: Any, tokenizer: Any, **others: Any) -> Any:
    """A trainer of these arguments."""
    return example_run.build(*arguments, data, tokenizer, *gsm8k.rewards(arguments[0]), **others)


def train(settings: dict[str, Any], data: Any, tokenizer: Any) -> ISOPOTrainer:
    """The trainer of the arguments, after `--steps_before` steps."""
    arguments = example_run.parsed(InfluenceArguments, {**settings, "max_steps": max(1, settings["steps_before"])})
    trainer = built(arguments, data, tokenizer)
    trainer.isopo.hold(None)  # refused where the rule has a direction of its own
    if settings["steps_before"]:
        trainer.add_callback(example_run.Progress(trainer, gsm8k.correctness(arguments[0]).__name__))
        trainer.train()
    trainer.isopo.detach()
    return trainer


def direction(settings: dict[str, Any], model: Any, data: Any, tokenizer: Any) -> tuple[dict[str, torch.Tensor], list]:
    """
    `D`, the gradient of the expected reward of held-back problems with its sign turned, by the names of parameters,
    and the completions that it is of.
    """
    left_out = {*example_run.OWN, *OF_TRAINING}
    kept = {name: value for name, value in settings.items() if name not in left_out}
    passes, seed = completions_of(settings) // settings["per_device_train_batch_size"], settings.get("seed", 42)
    kept |= PLAIN | {"gradient_accumulation_steps": passes, "max_steps": 1, "learning_rate": 1e-6, "seed": seed + 2}
    arguments = example_run.parsed(InfluenceArguments, kept)
    trainer = built(arguments, data, tokenizer, model=model, kind=UnmadeStep)
    trainer.look()
    # Each reward is a part of its group's mean, by which the gradient is too short
    generations = arguments[1].num_generations
    scale = arguments[1].max_completion_length * generations / (generations - 1)
    found = {name: scale * p.grad for name, p in model.named_parameters() if p.grad is not None}
    trainer.isopo.detach()
    model.zero_grad()
    return found, trainer.completions


def influence(
    settings: dict[str, Any], trained: ISOPOTrainer, D: dict[str, torch.Tensor], data: Any, tokenizer: Any
) -> list[Completion]:
    """The completions of the step that training would make next, on problems drawn anew."""
    of_step = {"max_steps": 1, "seed": settings.get("seed", 42) + 1, "skip_zero_advantage": bool(trained.skipping)}
    arguments = example_run.parsed(InfluenceArguments, {**settings, **of_step})
    trainer = built(arguments, data, tokenizer, model=trained.model, kind=Influence)
    if settings["steps_before"]:
        trainer.isopo.load_state_dict(trained.isopo.state_dict())  # the running means
    trainer.isopo.hold(D)
    trainer.look()
    return trainer.completions


def completions_of(settings: dict[str, Any]) -> int:
    """Of the held-back problems; raises unless they fill whole passes."""
    generations, size = settings["num_generations"], settings["per_device_train_batch_size"]
    count = settings["held_back"] * generations
    if count % size:
        step = next(n for n in range(1, size + 1) if n * generations % size == 0)
        raise ValueError(
            f"--held_back {settings['held_back']} problems have {count} completions, which are no whole number of "
            f"passes of {size} (--per_device_train_batch_size): give a multiple of {step}."
        )
    return count


def check(settings: dict[str, Any], problems: int) -> None:
    """Raise for what cannot be looked at."""
    refusals = [
        (settings.get("trainer") == "grpo", "--trainer grpo has no gradients of single completions: leave it out."),
        (
            settings.get("use_vllm") and settings.get("vllm_mode", "colocate") == "colocate",
            "--use_vllm would start an engine for each of the three trainers: leave it out, or use a server "
            "(--vllm_mode server).",
        ),
        (
            PartialState().num_processes > 1,
            "a completion is noted by the process that it is on: start one process, without `accelerate launch`.",
        ),
        (
            problems < settings["held_back"],
            f"--held_back {settings['held_back']} is more than the {problems} problems that are not trained on.",
        ),
    ]
    for wrong, message in refusals:
        if wrong:
            raise ValueError(message)
    completions_of(settings)


# What is shown


def report(completions: list[Completion], held_back: list[Completion], shown: int) -> None:
    """Print the completions that help most and least."""
    ordered = sorted(completions, key=lambda c: -c.influence)
    teaching = [c for c in ordered if c.influence != 0]
    mean = sum(c.reward for c in held_back) / len(held_back)
    example_run.say(f"\nHeld back: {len(held_back)} completions, mean reward {mean:.3f}.")
    example_run.say(
        f"The step: {len(completions)} completions, {len(teaching)} of them with an influence, which is positive for "
        f"{sum(c.influence > 0 for c in teaching)}."
    )
    half = min(shown, len(ordered)) // 2
    for title, rows in (("help most", ordered[:half]), ("help least", ordered[::-1][:half])):
        example_run.say(f"\nThe {half} completions that {title}:\n influence  A <V, D>    <V, D>  advantage  reward")
        for c in rows:
            example_run.say(
                f"{c.influence:10.3g}{c.plain:10.3g}{c.alignment:10.3g}{c.advantage:11.2f}{c.reward:8.2f}  "
                f"{c.prompt.strip().splitlines()[-1]} -> {c.completion!r}"
            )


def write(completions: list[Completion], path: str) -> None:
    """All completions as a file, those that help most first."""
    columns = [each.name for each in fields(Completion) if each.name != "tokens"]
    rows = [{name: getattr(c, name) for name in columns} for c in sorted(completions, key=lambda c: -c.influence)]
    with open(path, "w", encoding="utf-8", newline="") as file:
        if path.endswith(".json"):
            json.dump(rows, file, indent=1, ensure_ascii=False)
        else:
            writer = csv.DictWriter(file, columns)
            writer.writeheader()
            writer.writerows(rows)


def main(arguments: list[str]) -> int:
    try:
        example_run.one_voice()
        settings = gsm8k.read_settings(arguments, InfluenceArguments, **DEFAULTS)
        own = {each.name: each.default for each in fields(InfluenceArguments)}
        settings = {name: own[name] for name in ("held_back", "steps_before")} | settings
        script_args, args, model_args = example_run.parsed(InfluenceArguments, settings)
        example_run.use_all_cores(args)
        check_machine(args)
        check_model(model_args.model_name_or_path, args.trust_remote_code, saved=False)
        problems, held_out, tokenizer = gsm8k.load(script_args, args, model_args)
        settings["model_name_or_path"] = model_args.model_name_or_path
        settings["per_device_train_batch_size"] = args.per_device_train_batch_size
        check(settings, len(held_out))
        trained = train(settings, problems, tokenizer)
    except example_run.REFUSALS as error:
        return example_run.refuse("influence.py", str(error), error)
    held_out = held_out.select(range(settings["held_back"]))
    D, held_back = direction(settings, trained.model, held_out, tokenizer)
    completions = influence(settings, trained, D, problems, tokenizer)
    report(completions, held_back, script_args.shown)
    if script_args.table:
        write(completions, script_args.table)
        example_run.say(f"\nAll {len(completions)} completions: {script_args.table}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
