"""The layout of the package: five files at its top, and imports that go one way."""

import ast
from pathlib import Path

import isopo_trl


PACKAGE = Path(isopo_trl.__file__).parent
# From the ground up: a room imports those before it, and nothing else
FLOORS = [
    *("settings", "geometry", "trl_seam", "rules", "kernels", "fisher_rows", "microbatch", "layers", "isopo"),
    *("integrations", "token_weights", "loss", "advantages", "step_size", "narrow_weights", "rewards", "config"),
    *("checkpoints", "gsm8k", "coding", "validation", "trainer"),
]
AT_THE_TOP = {"__init__", "config", "trainer", "isopo", "microbatch"}


def module_of(path: Path) -> tuple[str, ...]:
    """A file's parts below the package: `("layers", "linear")`, and a folder's own for its `__init__`."""
    parts = path.relative_to(PACKAGE).with_suffix("").parts
    return parts[:-1] if parts[-1] == "__init__" else parts


MODULES = {module_of(path): path for path in PACKAGE.rglob("*.py")}


def imported(module: tuple[str, ...]) -> set[tuple[str, ...]]:
    """The package's modules that a module imports: at its top, in functions, or for type checkers alone."""
    path = MODULES[module]
    package = module if path.stem == "__init__" else module[:-1]
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and (node.level or str(node.module).startswith("isopo_trl")):
            base = package[: len(package) - node.level + 1] if node.level else ()
            named = tuple(str(node.module).removeprefix("isopo_trl").strip(".").split(".")) if node.module else ()
            target = (*base, *(part for part in named if part))
            # What is imported may be a module itself
            found |= {(*target, alias.name) if (*target, alias.name) in MODULES else target for alias in node.names}
        elif isinstance(node, ast.Import):
            names = [alias.name for alias in node.names if alias.name.split(".")[0] == "isopo_trl"]
            found |= {tuple(name.split(".")[1:]) for name in names}
    return found - {module}


def test_no_file_stands_alone_at_the_top_but_the_five():
    assert {path.stem for path in PACKAGE.glob("*.py")} == AT_THE_TOP
    rooms = {path.name for path in PACKAGE.iterdir() if path.is_dir() and path.name != "__pycache__"}
    assert rooms | AT_THE_TOP == {*FLOORS, "__init__"}


def test_no_import_goes_upwards():
    offenders = [
        f"{'.'.join(module)} imports {'.'.join(other) or 'isopo_trl'}, which lies above it"
        for module in filter(None, MODULES)
        for other in imported(module)
        if not other or FLOORS.index(other[0]) > FLOORS.index(module[0])
    ]
    assert not offenders, "\n".join(offenders)


def test_no_import_goes_in_a_circle():
    graph = {module: imported(module) for module in MODULES}
    done: set[tuple[str, ...]] = set()

    def visit(module: tuple[str, ...], way: tuple[tuple[str, ...], ...]) -> None:
        assert module not in way, " -> ".join(".".join(step) or "isopo_trl" for step in (*way, module))
        if module not in done:
            for other in graph[module]:
                visit(other, (*way, module))
            done.add(module)

    for module in graph:
        visit(module, ())


def test_every_room_says_in_its_first_sentence_what_lives_there():
    for room in {module[0] for module in MODULES if len(module) > 1}:
        text = ast.get_docstring(ast.parse((PACKAGE / room / "__init__.py").read_text()))
        assert text and text.split("\n\n")[0].rstrip().endswith((".", ":")), room
