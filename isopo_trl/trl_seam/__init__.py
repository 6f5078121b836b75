"""
The seam to TRL: every name through which isopo_trl reaches into TRL where TRL promises nothing, by subject.

What is private is looked up with [`~required.require`], which notes what is missing or has another signature. Here it
is raised, so that a TRL that has changed is found at import, and not by a wrong gradient. The methods that
[`ISOPOTrainer`] overrides stand in `trainer.py`, as they must; their signatures are checked here.
"""

from . import required  # isort: skip  # first: says which TRL is needed, before anything that takes seconds to import
from . import batch, generation, head, loans, log, loss, rewards, scoring, trainer, vllm


required.raise_for_missing()
head.dispatch()

__all__ = ["batch", "generation", "head", "loans", "log", "loss", "required", "rewards", "scoring", "trainer", "vllm"]
