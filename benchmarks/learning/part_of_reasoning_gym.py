"""
The part of reasoning-gym that the matrix's tasks need, as a folder for a machine on which nothing can be installed.

    python benchmarks/learning/part_of_reasoning_gym.py --output outputs/part_of_reasoning_gym
    PYTHONPATH=outputs/part_of_reasoning_gym python benchmarks/learning/learning.py run ...   # over there

The package imports all of its hundred tasks, and with them eleven packages, some of them compiled. The folder has its
modules unchanged, but imports those of some tasks alone, which takes PyYAML, and NumPy or SymPy where these use it.
"""

import argparse
import shutil
from pathlib import Path

import yaml


HERE = Path(__file__).resolve().parent


def tasks_of_the_matrix() -> list[str]:
    content = yaml.safe_load((HERE / "matrix.yaml").read_text())
    return [task for settings in content["tasks"].values() for task in settings.get("tasks", ())]


def copy_part(tasks: list[str], folder: Path) -> None:
    """Write `folder/reasoning_gym`, which knows these tasks alone."""
    import reasoning_gym
    from reasoning_gym.factory import DATASETS

    unknown = [task for task in tasks if task not in DATASETS]
    if unknown:
        raise ValueError(f"reasoning-gym has no task {', '.join(unknown)}.")
    source, part = Path(str(reasoning_gym.__file__)).parent, folder / "reasoning_gym"
    shutil.rmtree(part, ignore_errors=True)
    modules = [DATASETS[task][0].__module__.split(".", 1)[1] for task in tasks]  # algorithmic.spell_backward
    kinds = {module.partition(".")[0] for module in modules}
    for path in [
        *source.glob("*.py"),
        *(p for kind in ("coaching", "data", *kinds) for p in source.glob(f"{kind}/**/*.py")),
    ]:
        target = part / path.relative_to(source)
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(path, target)
    # What these modules read; all names of files stand in them
    texts = [(source / f"{module.replace('.', '/')}.py").read_text(encoding="utf-8") for module in modules]
    for path in (source / "data").iterdir():
        if path.suffix != ".py" and any(path.name in text for text in texts):
            shutil.copyfile(path, part / "data" / path.name)
    for kind in kinds:
        (part / kind / "__init__.py").write_text("")
    imports = "".join(f"from .{kind} import {name}\n" for kind, _, name in (m.partition(".") for m in modules))
    (part / "__init__.py").write_text(f"{imports}from .factory import create_dataset, get_score_answer_fn\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tasks", nargs="+", help="of reasoning-gym; those of the matrix by default")
    parser.add_argument("--output", type=Path, required=True, help="folder for PYTHONPATH")
    options = parser.parse_args()
    copy_part(options.tasks or tasks_of_the_matrix(), options.output)
    size = sum(path.stat().st_size for path in options.output.rglob("*") if path.is_file())
    print(f"{options.output}: {size / 2**20:.1f} MiB")


if __name__ == "__main__":
    main()
