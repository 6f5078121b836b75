"""What runs leave behind: logs, good and broken, and pictures."""

import json
import os
import struct

from isopo_trl.validation.curves import CURVES


REWARD, _, ACCURACY, KL, STEP_KL, RATE = CURVES


def log(*names, steps=3, shift=0.0):
    """A log as the trainer writes it: a line for the figures of training, one for those of validation."""
    lines = []
    for step in range(steps):
        for kind in ([REWARD, STEP_KL, RATE], [ACCURACY, KL]):
            line = {name: shift + 0.1 * step + len(name) for name in kind if name in names}
            lines += [{**line, "epoch": step / 10, "step": step}] if line else []
    return [*lines, {"train_runtime": 1.0, "step": steps}]


def write(folder, lines, age=0):
    """The log in a folder of its own; `age` in seconds."""
    folder.mkdir(parents=True, exist_ok=True)
    file = folder / "trainer_state.json"
    file.write_text(json.dumps({"log_history": lines, "global_step": 3}))
    os.utime(file, (1_000_000 - age, 1_000_000 - age))
    return folder


NOT_A_LOG = "is not a trainer_state.json of a Trainer"
BROKEN = {
    "no file": (None, "There is no "),
    "binary": (b"\xff\xfe\x00\x80", "cannot be read"),
    "broken": (b'{"log_history": [', NOT_A_LOG),
    "list": (b"[1, 2]", NOT_A_LOG),
    "other keys": (b'{"history": []}', NOT_A_LOG),
    "null log": (b'{"log_history": null}', NOT_A_LOG),
    "log of text": (b'{"log_history": ["reward"]}', NOT_A_LOG),
    "line without step": (b'{"log_history": [{"reward": 1.0}]}', NOT_A_LOG),
    "empty log": (b'{"log_history": []}', "has none of reward, eval_reward, validation/accuracy, .* but nothing"),
    "another trainer": (
        b'{"log_history": [{"loss": 1.0, "step": 1}]}',
        "has none of reward, .* but loss: is it",
    ),
}


def broken(folder, case):
    content, message = BROKEN[case]
    file = folder / "trainer_state.json"
    if content is not None:
        file.write_bytes(content)
    return file, message


def png_size(path):
    content = path.read_bytes()
    assert content[:8] == b"\x89PNG\r\n\x1a\n" and content[-8:-4] == b"IEND"
    return struct.unpack(">II", content[16:24])


def names_of_lines(panel):
    """The texts beside a panel."""
    return [text for text in panel.texts if text.get_text()]
