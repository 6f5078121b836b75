"""Runs that were interrupted: their settings, and what may have become of their files."""

from pathlib import Path


SETTINGS = {"save_strategy": "steps", "save_steps": 1, "max_completion_length": 3}


def cut(path: Path) -> None:
    """Leave the first half of a file."""
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def flip(path: Path) -> None:
    """Change one bit in the middle of a file."""
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)
