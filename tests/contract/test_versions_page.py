"""The page of versions: its bounds are those of ``pyproject.toml``, and its pins those of ``constraints.txt``."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import pytest

from ebbtide.base import extras

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs/reference/versions.md").read_text(encoding="utf-8")
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]


def bounds(requirements: list[str]) -> dict[str, str]:
    """Return the lower bound of each requirement except the project's own extras; every other one must have a bound."""
    found: dict[str, str] = {}
    for requirement in requirements:
        name, _, bound = requirement.partition(">=")
        if not name.startswith("ebbtide"):
            found[re.sub(r"\[.*\]", "", name)] = bound
    return found


def claimed() -> dict[str, str]:
    """Requirements of users: the core and every extra except those of developers."""
    extras_of = PROJECT["optional-dependencies"]
    lists = [PROJECT["dependencies"], *(needs for extra, needs in extras_of.items() if extra not in ("dev", "docs"))]
    return bounds([requirement for needs in lists for requirement in needs])


def told(page: str) -> dict[str, tuple[str, str]]:
    """Return package → (oldest, pinned) of the page's table of bounds."""
    rows = re.findall(r"^\| `([\w-]+)` \| ([\d.]+) \| ([\d.]+) \|", page, re.MULTILINE)
    return {name: (oldest, pinned) for name, oldest, pinned in rows}


def test_the_bounds_are_those_of_the_project() -> None:
    expected = claimed()
    assert {"torch", "transformers", "bitsandbytes"} <= expected.keys()
    assert all(expected.values()), "a package without a bound"
    assert {name: oldest for name, (oldest, _) in told(PAGE).items()} == expected
    assert f"Python {PROJECT['requires-python'].removeprefix('>=')} and newer" in PAGE


def test_the_pins_are_those_everything_is_tested_with() -> None:
    lines = (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()
    pins = {name.lower(): version for name, _, version in (line.partition("==") for line in lines)}
    assert {name: pinned for name, (_, pinned) in told(PAGE).items()} == {n: pins[n.lower()] for n in told(PAGE)}


def test_no_package_has_two_bounds() -> None:
    everything = [PROJECT["dependencies"], *PROJECT["optional-dependencies"].values()]
    for name in claimed():
        found = {bounds(needs)[name] for needs in everything if name in bounds(needs)}
        assert len(found) == 1, (name, found)


@pytest.mark.parametrize("name", ["torch", "transformers", "trl"])
def test_what_is_refused_at_first_use_is_what_is_older_than_the_bound(name: str) -> None:
    assert extras.oldest(name) == claimed()[name], "reinstall the project: its metadata is older than its bounds"


def test_another_bound_would_be_found() -> None:
    assert bounds(["torch>=2.12", "ebbtide[cli,track]", "pyright[nodejs]>=1.1", "rich"]) == {
        "torch": "2.12",
        "pyright": "1.1",
        "rich": "",
    }
    page = "| package | oldest | pinned | for |\n| --- | ---: | ---: | --- |\n| `torch` | 2.12 | 2.13.0 | all |\n"
    assert told(page) == {"torch": ("2.12", "2.13.0")}
