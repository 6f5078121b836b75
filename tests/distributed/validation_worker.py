"""Run by a launcher on one or two ranks: train with a `ValidationCallback` and write what it measured, and of what.

validation_worker.py OUTPUT MODE-WEIGHTS... with the mode one of ddp, fsdp2, zero3, and the weights full or lora

Every run is a real `ISOPOTrainer.train()`, for `fsdp2` that of a trainer which is told to shard on CPUs. With
`zero3-full`, generation gathers one layer after the other, not the whole model as by default.
"""

import sys
from functools import partial

from peft import LoraConfig

from isopo_trl import ISOPOConfig, ISOPOTrainer
from isopo_trl.validation import MovedWeights, ValidationCallback
from tests import tiny
from tests.distributed.process_group import WORLD, Sharded, full_weights, save_runs


ROWS, KL_ROWS = 5, 3  # shares of two ranks: 3 and 2 rows, 2 and 1


class Watching(ValidationCallback):
    """Keeps the weights before and after each validation, and the completions that it made."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.record = []

    def validate(self):
        model = self.trainer.model
        self.record.append({"weights": full_weights(model), "completed": []})
        figures = super().validate()
        self.record[-1] |= {"weights_after": full_weights(model), "training": model.training}
        return figures

    def _complete(self, rows):
        generated = super()._complete(rows)
        self.record[-1]["completed"].append((generated.prompt_ids, generated.completion_ids))
        return generated

    def _write_curves(self):
        """Nowhere: a picture takes longer than a validation."""


def build(weights):
    """The model before training, and what the trainer makes of it."""
    model = tiny.model("qwen3", tie=False)
    return model, LoraConfig(r=2, lora_alpha=8, target_modules="all-linear") if weights == "lora" else None


def train(output, mode, weights):
    config = {"zero_optimization": {"stage": 3}, "zero_allow_untested_optimizer": True}
    config |= {"train_micro_batch_size_per_gpu": 2, "gradient_accumulation_steps": 1}
    args = ISOPOConfig(
        f"{output}.{mode}-{weights}",
        use_cpu=True,
        ddp_backend="gloo" if WORLD > 1 else None,
        bf16=False,
        report_to=[],
        disable_tqdm=True,
        per_device_train_batch_size=2,
        num_generations=2,
        max_completion_length=6,
        max_steps=2,
        optim="sgd",
        learning_rate=0.5,
        lr_scheduler_type="constant",
        save_strategy="no",
        deepspeed=config if mode == "zero3" else None,
        ds3_gather_for_generation=weights == "lora",
    )
    model, adapter = build(weights)
    trainer = (Sharded if mode == "fsdp2" else ISOPOTrainer)(
        model,
        tiny.reward,
        args,
        tiny.prompts(8),
        processing_class=tiny.tokenizer(),
        peft_config=adapter,
    )
    # One row per pass: more than one pass, after which parameters may stay gathered
    callback = Watching(trainer, tiny.prompts(ROWS), tiny.reward, steps=2, batch_size=1, kl_prompts=KL_ROWS)
    trainer.add_callback(callback)
    moved = None if mode == "zero3" else MovedWeights(trainer, threshold=0.001)
    if moved is not None:
        trainer.add_callback(moved)
    trainer.train()
    result = {"history": callback.history, "record": callback.record, "wrapped": type(trainer.model_wrapped).__name__}
    return result if moved is None else {**result, "moved": moved.measure()}


def main(output, *runs):
    save_runs(partial(train, output), runs, output)


if __name__ == "__main__":
    main(*sys.argv[1:])
