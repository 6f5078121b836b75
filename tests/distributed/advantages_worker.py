"""Run by a launcher on two ranks: train with transforms of advantages, and write what came out.

advantages_worker.py OUTPUT NAMES...

Names are transforms with `+` between. A group has two completions and a rank three, so that one group is on both. All
prompts come again in the second of two generations.
"""

import functools
import sys

import torch

from isopo_trl import ISOPOConfig
from tests import tiny
from tests.advantages.test_training import Watched, distributions
from tests.distributed.process_group import full_weights, save_runs


def run(output, names):
    args = ISOPOConfig(
        f"{output}.trainer",
        advantage_transform=names.replace("+", ","),
        use_cpu=True,
        ddp_backend="gloo",
        bf16=False,
        report_to=[],
        disable_tqdm=True,
        per_device_train_batch_size=3,
        num_generations=2,
        max_completion_length=6,
        max_steps=2,
        learning_rate=0.01,
        logging_steps=1,
        save_strategy="no",
    )
    trainer = Watched(tiny.model("qwen3"), tiny.reward, args, tiny.prompts(3), processing_class=tiny.tokenizer())
    trainer.train()
    batches = trainer.generations
    return {
        "rewards": trainer.rewards,
        "prompts": [[row[row != tiny.IDS["pad_token_id"]].tolist() for row in b["prompt_ids"]] for b in batches],
        "entropies": [-(p.exp() * p).sum(1).mean().item() for p, _ in distributions(trainer, batches[0])],
        "advantages": [batch["advantages"].tolist() for batch in batches],
        "sizes": [sum(map(bool, microbatch)) for microbatch in trainer.microbatches],
        "state": trainer.transforms.state_dict(),
        "weights": torch.cat([p.flatten() for p in full_weights(trainer.model).values()]),
    }


if __name__ == "__main__":
    _, output, *runs = sys.argv
    save_runs(functools.partial(run, output), runs, output)
