"""Modules do not import each other in a cycle, in any package, type-only imports included."""

from __future__ import annotations

import ast
from pathlib import Path

SRC = Path(__file__).parents[2] / "src"


def imports_of(source: str) -> set[str]:
    """Return the names that a source text imports, and their possible modules; under ``TYPE_CHECKING`` too."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.ImportFrom) and node.module:
            found |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
        elif isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
    return found


def graph_of(sources: dict[str, str]) -> dict[str, set[str]]:
    """Return each module's imports of the others; a package's ``__init__`` counts only if imported from itself."""
    graph: dict[str, set[str]] = {}
    for module, source in sources.items():
        found = imports_of(source) & {*sources}
        packages = {name for name in found if any(other.startswith(f"{name}.") for other in found)}
        graph[module] = found - packages - {module}
    return graph


def circles(graph: dict[str, set[str]]) -> set[tuple[str, ...]]:
    """Return the sets of modules that reach themselves through each other."""
    reach = {module: set(targets) for module, targets in graph.items()}
    for via in graph:
        for targets in reach.values():
            if via in targets:
                targets |= reach[via]
    inside = {module for module in graph if module in reach[module]}
    return {tuple(sorted(o for o in inside if o in reach[m] and m in reach[o])) for m in inside}


def test_no_module_imports_itself_through_others() -> None:
    files = sorted(SRC.rglob("*.py"))
    names = {f: ".".join(f.relative_to(SRC).with_suffix("").parts).removesuffix(".__init__") for f in files}
    graph = graph_of({names[file]: file.read_text() for file in files})
    assert len(graph) > 200 and sum(map(len, graph.values())) > 500
    assert circles(graph) == set()


def test_a_circle_of_types_is_found() -> None:
    one = "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from room.two import Two\n"
    graph = graph_of({"room.one": one, "room.two": "from room import three", "room.three": "import room.one"})
    assert circles(graph) == {("room.one", "room.three", "room.two")}
    assert circles({**graph, "room.three": set()}) == set()
