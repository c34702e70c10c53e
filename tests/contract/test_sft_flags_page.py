"""The page of flags is generated from the config, never written by hand."""

from __future__ import annotations

import dataclasses
import tempfile
from pathlib import Path

import pytest

from ebbtide.base.errors import DiskError
from ebbtide.config import Auto
from ebbtide.store import location
from tests.contract.sft_flags_page import CONFIGS, FOLDER, page, rows_of

FLAGS = [(verb, field.name) for verb, config in CONFIGS.items() for field in dataclasses.fields(config)]


@pytest.mark.parametrize("verb", CONFIGS)
def test_the_page_is_what_the_config_gives(verb: str) -> None:
    hint = f"run `python -m tests.contract.sft_flags_page {verb} > docs/reference/{verb}-flags.md`"
    assert (FOLDER / f"{verb}-flags.md").read_text() == page(verb), hint


@pytest.mark.parametrize(("verb", "name"), FLAGS)
def test_every_flag_says_what_it_does(verb: str, name: str) -> None:
    row = next(line for line in rows_of(verb) if line.startswith(f"| `--{name}` |"))
    assert len(row.split("|")[4].strip()) > 10


@pytest.mark.parametrize("verb", [verb for verb in CONFIGS if verb != "sft"])
def test_flags_that_differ_between_recipes_are_on_both_pages(verb: str) -> None:
    for row in set(rows_of(verb)) ^ set(rows_of("sft")):
        assert row in page(verb if row in rows_of(verb) else "sft")


@pytest.mark.parametrize("verb", CONFIGS)
def test_a_recipe_names_its_page(verb: str) -> None:
    assert CONFIGS[verb].page == f"docs/reference/{verb}-flags.md"


@pytest.mark.parametrize("verb", CONFIGS)
def test_a_default_that_the_help_names_is_that_of_the_code(verb: str, monkeypatch: pytest.MonkeyPatch) -> None:
    tried: list[str] = []

    def refuse(path: str) -> Path:
        tried.append(path)
        raise DiskError("not on a disk", expected="a disk", hint="-")

    monkeypatch.setattr(location, "check_directory", refuse)
    monkeypatch.setattr(Path, "mkdir", lambda *_, **__: None)
    with pytest.raises(DiskError):
        location.default_directory()
    about = {row.split("`")[1]: row for row in rows_of(verb)}
    assert f"default: {Auto().max_slowdown:g}," in about["--max_slowdown"]
    named = about["--disk_path"].replace("the temporary directory", tempfile.gettempdir())
    assert f"first of {tried[0]}, {tried[1]} and {tried[2]} that is on a disk" in named and len(tried) == 3
