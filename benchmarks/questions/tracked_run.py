"""
A short run for a tracker to show: the small task of `off_policy.py`, `fisher` with a target for its steps, on a CPU.

    python benchmarks/questions/tracked_run.py --report-to trackio     # then: trackio show --project isopo
    python benchmarks/questions/tracked_run.py --report-to tensorboard # then: tensorboard --logdir outputs/tracked_run

The tracker's package must be installed; `wandb` works in the same way. docs/metrics.md shows what comes of it.
"""

import argparse
import copy

from datasets import Dataset
from off_policy import LENGTH, PROMPTS, base_model, share_of_right, tokenizer

from isopo_trl import ISOPOConfig, ISOPOTrainer


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--report-to", default="none", help="trackio, tensorboard, wandb or another of transformers'")
    parser.add_argument("--steps", type=int, default=60, help="optimizer steps")
    parser.add_argument("--learning-rate", type=float, nargs="+", default=[2e-4, 2e-3], help="of one run each")
    options = parser.parse_args()
    for rate in options.learning_rate:
        args = ISOPOConfig(
            output_dir=f"outputs/tracked_run/lr{rate:g}",
            run_name=f"fisher, target_kl, from {rate:g}",
            project="isopo",
            report_to=options.report_to,
            target_kl=3e-3,
            step_kl_share=0.25,
            learning_rate=rate,
            lr_scheduler_type="constant",
            max_steps=options.steps,
            logging_steps=1,
            save_strategy="no",
            per_device_train_batch_size=64,
            num_generations=8,
            max_completion_length=LENGTH + 1,
            gradient_checkpointing=False,
            use_cpu=True,
            bf16=False,
        )
        data = Dataset.from_dict({"prompt": PROMPTS * 100})
        trainer = ISOPOTrainer(copy.deepcopy(base_model(0)), share_of_right, args, data, processing_class=tokenizer())
        trainer.train()


if __name__ == "__main__":
    main()
