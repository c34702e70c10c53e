"""The docstrings of public names teach: each example runs, and every function lists its exceptions."""

from __future__ import annotations

import inspect
import re
import textwrap
from pathlib import Path

import pytest
import torch

import ebbtide
from ebbtide.base.errors import DataError

TEACHING = (
    "Auto",
    "enable_activation_offloading",
    "load_sharded",
    "make_plan",
    "offload_saved_tensors",
    "track_memory",
)
FUNCTIONS = [*TEACHING, "register_recompute", "save_sharded"]


def example(doc: str) -> str:
    """Return the code after ``Example::`` of a docstring."""
    found = re.search(r"^Example::\n\n((?:    .*\n|\n)+)", doc, re.MULTILINE)
    return textwrap.dedent(found[1]) if found else ""


@pytest.mark.parametrize("name", TEACHING)
def test_the_example_runs(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    code = example(inspect.getdoc(getattr(ebbtide, name)) or "")
    assert "ebbtide." in code
    exec(compile(code, name, "exec"), {"ebbtide": ebbtide, "torch": torch})


@pytest.mark.parametrize("name", FUNCTIONS)
def test_arguments_and_errors_are_described(name: str) -> None:
    doc = inspect.getdoc(getattr(ebbtide, name)) or ""
    assert "\nArgs:\n" in doc and "\nRaises:\n" in doc
    arguments = doc.partition("\nArgs:\n")[2]
    parameters = inspect.signature(getattr(ebbtide, name)).parameters
    assert [p for p in parameters if not re.search(rf"^    \**{p}: ", arguments, re.MULTILINE)] == []


@pytest.mark.parametrize(
    ("name", "arguments", "file"),
    [
        ("enable_activation_offloading", (torch.nn.Linear(1, 1),), "policy"),
        ("make_plan", (torch.nn.Linear(1, 1), torch.ones(1)), "machine"),
        ("offload_saved_tensors", (), "policy"),
    ],
)
def test_the_error_for_a_file_is_described(name: str, arguments: tuple[object, ...], file: str, tmp_path: Path) -> None:
    with pytest.raises(DataError):
        getattr(ebbtide, name)(*arguments, **{file: str(tmp_path / "none.json")})
    assert "DataError:" in (inspect.getdoc(getattr(ebbtide, name)) or "").partition("\nRaises:\n")[2]


def test_a_docstring_without_an_example_has_none() -> None:
    assert example("Say.\n\nArgs:\n    x: Y.") == ""
    assert example("Say.\n\nExample::\n\n    x = 1\n    y = 2\n\nArgs:\n    x: Y.\n") == "x = 1\ny = 2\n\n"
