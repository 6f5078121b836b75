"""Scripts take from one another, and from the package, what is there: most of them are too slow to be run here."""

import ast
import importlib
import importlib.util
from pathlib import Path

import pytest


ROOT = Path(__file__).parents[2]
SCRIPTS = sorted([*ROOT.glob("benchmarks/*/*.py"), *ROOT.glob("examples/*.py")])


def bound(statements) -> set[str]:
    """Names that a module's statements bind, those inside of its functions and classes aside."""
    names: set[str] = set()
    for node in statements:
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            names.add(node.name)
        elif isinstance(node, ast.Import | ast.ImportFrom):
            names |= {alias.asname or alias.name.partition(".")[0] for alias in node.names}
        else:
            names |= {x.id for x in ast.walk(node) if isinstance(x, ast.Name) and isinstance(x.ctx, ast.Store)}
            for part in ("body", "orelse", "finalbody"):
                names |= bound(getattr(node, part, []))
    return names


TREES = {path: ast.parse(path.read_text()) for path in SCRIPTS}
LOCAL = {path.stem: bound(tree.body) for path, tree in TREES.items()}


def is_ours(module: str | None) -> bool:
    return module is not None and (module in LOCAL or module.partition(".")[0] == "isopo_trl")


def is_module(name: str) -> bool:
    try:
        return importlib.util.find_spec(name) is not None
    except ModuleNotFoundError:  # what stands before the last dot is no package
        return False


def has(module: str, name: str) -> bool:
    if module in LOCAL:
        return name in LOCAL[module]
    return hasattr(importlib.import_module(module), name) or is_module(f"{module}.{name}")


@pytest.mark.parametrize("path", SCRIPTS, ids=lambda path: path.stem)
def test_a_script_finds_what_it_takes_from_others(path):
    nodes = list(ast.walk(TREES[path]))
    modules: dict[str, str] = {}  # by the names that they have in the script
    taken: list[tuple[str, str]] = []
    for node in nodes:
        if isinstance(node, ast.Import):
            modules |= {alias.asname or alias.name: alias.name for alias in node.names if is_ours(alias.name)}
        elif isinstance(node, ast.ImportFrom) and is_ours(node.module):
            taken += [(node.module, alias.name) for alias in node.names]
            inner = {alias.asname or alias.name: f"{node.module}.{alias.name}" for alias in node.names}
            modules |= {name: module for name, module in inner.items() if is_module(module)}
    # What a variable of the same name has is another matter
    others = {node.id for node in nodes if isinstance(node, ast.Name) and not isinstance(node.ctx, ast.Load)}
    others |= {node.arg for node in nodes if isinstance(node, ast.arg)}
    for node in nodes:
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id not in others:
            taken += [(modules[name], node.attr) for name in [node.value.id] if name in modules]
    assert not [f"{module}.{name}" for module, name in taken if not has(module, name)]
