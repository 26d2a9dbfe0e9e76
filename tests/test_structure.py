"""The house has storeys: what is below knows nothing of what is above, and the files stay short enough to be read."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
STOREYS = (
    ("types", "errors", "masking", "deadlines", "threads"),
    ("config",),
    ("data", "folder", "agents", "algorithms"),
    ("workers",),
    ("monitor",),
    ("checks",),
    ("controller",),
    ("history", "doctor", "simulation", "finetune"),
    ("cli",),
)
"""From the bottom up. A module imports from its own storey and those below, and no import is part of a circle."""
IN_CONTROLLER = (
    ("facts", "signal"),
    ("state", "reader", "codec", "server", "ranks"),
    ("scheduler", "ledger", "router"),
    ("log", "calls", "broadcast"),
    ("fleet", "rollout"),
    ("weights", "watchdog"),
    ("cluster",),
    ("evaluation", "servers", "report"),
    ("train",),
    ("controller",),
)
LINES = {"": 15_970, "controller": 4_360}
"""Lines of the whole package and of the controller, which may shrink: the goals are 14,800 and 3,500."""
FUNCTION_LINES = 60


def modules() -> dict[str, Path]:
    """Dotted name below `areal` -> file."""
    found = {}
    for path in sorted((ROOT / "areal").rglob("*.py")):
        parts = path.relative_to(ROOT / "areal").with_suffix("").parts
        found[".".join(part for part in parts if part != "__init__")] = path
    return found


MODULES = modules()


def imports(name: str) -> Iterator[str]:
    """The modules below `areal` that a module imports, also inside functions. Those for types only do not count."""
    tree = ast.parse(MODULES[name].read_text(encoding="utf-8"))
    typing_only = {
        id(node)
        for branch in ast.walk(tree)
        if isinstance(branch, ast.If) and "TYPE_CHECKING" in ast.unparse(branch.test)
        for node in ast.walk(branch)
    }
    for node in ast.walk(tree):
        if id(node) in typing_only:
            continue
        if isinstance(node, ast.Import):
            yield from (alias.name.removeprefix("areal.") for alias in node.names if alias.name.startswith("areal."))
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "areal":
            home = (node.module or "").removeprefix("areal").removeprefix(".")
            for alias in node.names:
                inner = f"{home}.{alias.name}".lstrip(".")
                yield inner if inner in MODULES else home


def storey(head: str, storeys: tuple[tuple[str, ...], ...]) -> int:
    (number,) = (number for number, names in enumerate(storeys) if head in names)
    return number


@pytest.mark.parametrize("name", [name for name in MODULES if name not in ("", "__main__")])
def test_no_module_imports_from_a_higher_storey(name: str) -> None:
    head, _, rest = name.partition(".")
    for imported in imports(name):
        below, _, inner = imported.partition(".")
        if below == head == "controller" and rest:
            assert storey(inner, IN_CONTROLLER) <= storey(rest, IN_CONTROLLER), f"{name} imports {imported}"
        assert storey(below, STOREYS) <= storey(head, STOREYS), f"{name} imports {imported}"


def test_no_circle() -> None:
    graph = {name: {inner for inner in imports(name) if inner != name} for name in MODULES if name}
    list(TopologicalSorter(graph).static_order())  # raises CycleError, which names the circle


def test_the_controller_names_no_engine() -> None:
    for name, path in MODULES.items():
        if name.startswith("controller"):
            text = path.read_text(encoding="utf-8").lower()
            assert not [engine for engine in ("sglang", "megatron", "vllm") if engine in text], name


@pytest.mark.parametrize("folder", LINES)
def test_the_house_stays_small(folder: str) -> None:
    lines = sum(len(path.read_text().splitlines()) for name, path in MODULES.items() if name.startswith(folder))
    assert lines <= LINES[folder]


@pytest.mark.parametrize("name", MODULES)
def test_no_function_is_too_long(name: str) -> None:
    for node in ast.walk(ast.parse(MODULES[name].read_text(encoding="utf-8"))):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            lines = (node.end_lineno or 0) - node.lineno + 1
            assert lines <= FUNCTION_LINES, f"{name}.{node.name} has {lines} lines"
