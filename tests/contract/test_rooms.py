"""CONTRIBUTING's table of packages is complete."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
SRC = ROOT / "src"
FACES = {"src/ebbtide/__init__.py", "src/ebbtide/__main__.py"}
"""Modules that only pass on what others define."""


def listed(page: str) -> set[str]:
    """Return the paths in the first column of the table of packages."""
    table = page.partition("## Packages")[2].partition("\n## ")[0]
    cells = re.findall(r"^\| (`src/[^|]*) \|", table, re.MULTILINE)
    return {path.rstrip("/") for cell in cells for path in re.findall(r"`([^`]+)`", cell)}


def standing() -> set[str]:
    """Return the packages in the source: folders, and modules outside of folders."""
    core, recipes = SRC / "ebbtide", SRC / "ebbtide_recipes"
    rooms = [
        *core.glob("*.py"),
        *(f for f in core.iterdir() if f.is_dir()),
        *(f for f in recipes.iterdir() if f.is_dir()),
    ]
    return {room.relative_to(ROOT).as_posix() for room in rooms if room.name != "__pycache__"} - FACES


def test_the_table_lists_every_package_and_no_other() -> None:
    assert listed((ROOT / "CONTRIBUTING.md").read_text()) == standing()


def test_a_package_left_out_is_noticed() -> None:
    table = "## Packages\n\n| package | contents |\n| --- | --- |\n| `src/a/`, `src/b.py` | x |\n"
    page = f"{table}\n## More\n\n| `src/c` | y |\n"
    assert listed(page) == {"src/a", "src/b.py"}
