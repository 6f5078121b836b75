"""
Train a small language model from scratch with ISOPO, on a CPU, in about a minute; nothing is downloaded.

The prompt is a digit and a colon, and the reward is the share of that digit in the completion: at first a tenth, by
chance. Everything below is what one would write with TRL's `GRPOTrainer`, but for the two names from `isopo_trl`.

    python examples/quickstart.py [--rule interacting] [--max_steps 60] [any other argument of ISOPOConfig]
"""

import sys

import torch
from datasets import Dataset
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast, PrinterCallback, TrainerCallback
from trl import TrlParser

from isopo_trl import ISOPOConfig, ISOPOTrainer


CHARACTERS = "0123456789:"
DEFAULTS = {
    "output_dir": "outputs/quickstart",
    "per_device_train_batch_size": 64,
    "num_generations": 8,
    "max_completion_length": 8,
    "max_steps": 80,
    "learning_rate": 3e-3,
    "lr_scheduler_type": "constant_with_warmup",
    "warmup_steps": 5,
    "logging_steps": 5,
    "save_strategy": "no",
    "report_to": "none",
    "disable_tqdm": "true",
    "gradient_checkpointing": "false",
    "bf16": "false",
}


def build_tokenizer():
    vocabulary = {token: index for index, token in enumerate(["<pad>", "</s>", *CHARACTERS])}
    backend = Tokenizer(models.WordLevel(vocabulary, unk_token="<pad>"))
    backend.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    backend.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(tokenizer_object=backend, pad_token="<pad>", eos_token="</s>", padding_side="left")


def build_model(tokenizer):
    torch.manual_seed(0)
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=len(tokenizer),
            hidden_size=64,
            intermediate_size=128,
            num_hidden_layers=2,
            num_attention_heads=4,
            max_position_embeddings=32,
            pad_token_id=tokenizer.pad_token_id,
            eos_token_id=tokenizer.eos_token_id,
            bos_token_id=None,
        )
    )


def share_of_the_digit(prompts, completions, **kwargs):
    return [
        completion.count(prompt[0]) / max(len(completion), 1)
        for prompt, completion in zip(prompts, completions, strict=True)
    ]


class PrintReward(TrainerCallback):
    def on_log(self, args, state, control, logs=None, **kwargs):
        if "reward" in logs:
            names = ("isopo/multiplier_mean", "isopo/multiplier_max", "isopo/effective_sequences")
            mean, largest, effective = (logs[name] for name in names)
            print(f"{state.global_step:5} {logs['reward']:7.3f} {mean:7.2f} {largest:7.2f} {effective:20.1f}")


def main():
    given = [argument for argument in sys.argv[1:] if argument.startswith("--")]
    given = {argument[2:].split("=")[0] for argument in given}
    defaults = [f"--{name}={value}" for name, value in DEFAULTS.items() if name not in given]
    (args,) = TrlParser(ISOPOConfig).parse_args_and_config(defaults + sys.argv[1:])

    tokenizer = build_tokenizer()
    trainer = ISOPOTrainer(
        model=build_model(tokenizer),
        reward_funcs=share_of_the_digit,
        args=args,
        train_dataset=Dataset.from_dict({"prompt": [f"{i % 10}:" for i in range(1000)]}),
        processing_class=tokenizer,
    )
    print(f"ISOPO, rule {args.rule!r}. What is trained, and how its statistics are computed:\n")
    trainer.isopo.print_coverage(args.per_device_train_batch_size, args.max_completion_length + 2)
    print(f"\n{'step':>5} {'reward':>7} {'f mean':>7} {'f max':>7} {'effective sequences':>20}")
    trainer.remove_callback(PrinterCallback)
    trainer.add_callback(PrintReward())
    trainer.train()

    model = trainer.model.eval()
    prompts = tokenizer([f"{digit}:" for digit in range(10)], return_tensors="pt")["input_ids"].to(model.device)
    completions = model.generate(prompts, max_new_tokens=8, do_sample=False)[:, 2:]
    print("\nGreedy completions after training:")
    for digit, completion in enumerate(tokenizer.batch_decode(completions, skip_special_tokens=True)):
        print(f"  {digit}: {completion}")


if __name__ == "__main__":
    main()
