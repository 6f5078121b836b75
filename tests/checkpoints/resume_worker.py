"""Run as a process of its own, which can be killed: train and log every step.

resume_worker.py FOLDER LOG RULE [killed|resumed]
"""

import json
import os
import signal
import sys

import torch
from transformers import TrainerCallback

from isopo_trl import ISOPOConfig, ISOPOTrainer
from tests import tiny


class Log(TrainerCallback):
    """Writes each step's figures as they come, so that a killed run leaves them behind."""

    def __init__(self, path, last=None):
        self.path = path
        self.last = last  # the step at which the process is killed, by itself: nobody needs to be in time

    def on_log(self, args, state, control, logs, **kwargs):
        if "loss" in logs:
            kept = {name: value for name, value in logs.items() if "time" not in name}
            with open(self.path, "a") as file:
                file.write(json.dumps({"step": state.global_step, **kept}) + "\n")
            if state.global_step == self.last:
                os.kill(os.getpid(), signal.SIGKILL)


def main(folder, log, rule, fate=None):
    args = ISOPOConfig(
        str(folder),
        rule=rule,
        regularization=0.5,
        use_cpu=True,
        bf16=False,
        report_to=[],
        disable_tqdm=True,
        per_device_train_batch_size=4,
        gradient_accumulation_steps=2,
        num_generations=4,
        max_completion_length=8,
        max_steps=8,
        save_steps=3,
        learning_rate=1e-2,
        logging_steps=1,
    )
    trainer = ISOPOTrainer(
        tiny.model("qwen3"),
        tiny.reward,
        args,
        tiny.prompts(64),
        processing_class=tiny.tokenizer(),
        callbacks=[Log(log, last=5 if fate == "killed" else None)],  # two steps past the first checkpoint
    )
    trainer.train(resume_from_checkpoint=fate == "resumed")
    torch.save(trainer.model.state_dict(), f"{log}.pt")


if __name__ == "__main__":
    torch.set_num_threads(1)
    main(*sys.argv[1:])
