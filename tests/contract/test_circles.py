"""Modules of a room do not import each other in a circle, type-only imports included."""

from __future__ import annotations

import ast
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2] / "src" / "ebbtide"

ROOMS = ["engine"]
"""Rooms that are free of circles; a room that becomes so is added."""


def imports_of(source: str, room: str) -> set[str]:
    """Return the modules of a room that a source text imports, under ``TYPE_CHECKING`` too."""
    found = {node.module for node in ast.walk(ast.parse(source)) if isinstance(node, ast.ImportFrom) and node.module}
    return {name for name in found if name.startswith(f"ebbtide.{room}.")}


def graph_of(room: str) -> dict[str, set[str]]:
    """Return what each module of a room imports of it."""
    files = sorted((ROOT / room).rglob("*.py"))
    names = {f: ".".join(f.relative_to(ROOT.parent).with_suffix("").parts).removesuffix(".__init__") for f in files}
    return {names[f]: imports_of(f.read_text(), room) - {names[f]} for f in files}


@pytest.mark.parametrize("room", ROOMS)
def test_no_module_imports_itself_through_others(room: str) -> None:
    graph = graph_of(room)
    assert len(graph) > 5 and any(graph.values())
    try:
        tuple(TopologicalSorter(graph).static_order())
    except CycleError as error:
        pytest.fail(" -> ".join(error.args[1]))


def test_a_circle_of_types_is_found() -> None:
    one = "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from ebbtide.engine.two import Two\n"
    graph = {"ebbtide.engine.one": imports_of(one, "engine"), "ebbtide.engine.two": {"ebbtide.engine.one"}}
    with pytest.raises(CycleError):
        tuple(TopologicalSorter(graph).static_order())
