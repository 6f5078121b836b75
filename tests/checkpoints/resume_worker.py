"""Run as a process of its own, which can be killed: train and log every step.

resume_worker.py FOLDER LOG [killed|resumed]
"""

import json
import os
import signal
import sys

import torch
from transformers import TrainerCallback

from tests import tiny, training


SETTINGS = {
    "rule": "fig4",
    "regularization": 0.5,
    "per_device_train_batch_size": 4,
    "gradient_accumulation_steps": 2,
    "num_generations": 4,
    "max_steps": 8,
    "save_strategy": "steps",
    "save_steps": 3,
}


class Log(TrainerCallback):
    """Writes each step's figures as they come, so that a killed run leaves them behind."""

    def __init__(self, path, last):
        self.path = path
        self.last = last  # the step at which the process is killed, by itself: nobody needs to be in time

    def on_log(self, args, state, control, logs, **kwargs):
        if "loss" in logs:
            figures = {name: value for name, value in logs.items() if "time" not in name}
            with open(self.path, "a") as file:
                file.write(json.dumps({"step": state.global_step, **figures}) + "\n")
            if state.global_step == self.last:
                os.kill(os.getpid(), signal.SIGKILL)


def main(folder, log, fate=None):
    callback = Log(log, last=5 if fate == "killed" else None)  # two steps past the first checkpoint
    trainer = training.build(folder, data=tiny.prompts(64), options={"callbacks": [callback]}, **SETTINGS)
    trainer.train(resume_from_checkpoint=fate == "resumed")
    torch.save(trainer.model.state_dict(), f"{log}.pt")


if __name__ == "__main__":
    torch.set_num_threads(1)
    main(*sys.argv[1:])
