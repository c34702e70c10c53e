"""The built-in data set: large enough, the same every time, made without importing anything."""

from __future__ import annotations

import os
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest

from ebbtide.base.errors import DataError
from ebbtide_recipes.sft import pydoc

SOURCE = Path(pydoc.__file__).parents[2]


def test_there_are_enough_rows_and_every_one_is_whole() -> None:
    rows = pydoc.rows()
    assert len(rows) >= 2000
    assert all(row["question"].startswith("What does `") and "\n\n" in row["answer"] for row in rows)
    assert len({row["question"] for row in rows}) == len(rows)


def test_a_known_function_has_its_signature_and_docstring() -> None:
    import textwrap

    (row,) = (row for row in pydoc.rows() if row["question"] == "What does `textwrap.dedent` do?")
    assert row["answer"].startswith("def textwrap.dedent(text)\n\n")
    assert (textwrap.dedent.__doc__ or "").strip().splitlines()[0] in row["answer"]


def test_methods_and_classes_are_there_and_private_names_are_not() -> None:
    questions = {row["question"] for row in pydoc.rows()}
    assert "What does `fractions.Fraction` do?" in questions
    assert "What does `fractions.Fraction.limit_denominator` do?" in questions
    assert not any("._" in question for question in questions)


def test_the_seed_shuffles_and_nothing_else_does() -> None:
    assert pydoc.rows(1) == pydoc.rows(1)
    assert pydoc.rows(1) != pydoc.rows(2)
    assert sorted(map(str, pydoc.rows(1))) == sorted(map(str, pydoc.rows(2)))


def test_another_process_makes_the_same_rows_and_imports_none_of_the_modules() -> None:
    program = (
        "import sys, hashlib; from ebbtide_recipes.sft import pydoc; rows = pydoc.rows(3);"
        "assert not {'turtle', 'tkinter', 'xmlrpc', 'wsgiref'} & set(sys.modules);"
        "print(hashlib.sha256(repr(rows).encode()).hexdigest())"
    )
    made = {
        subprocess.run(
            [sys.executable, "-c", program],
            env={**os.environ, "PYTHONPATH": str(SOURCE), "PYTHONHASHSEED": seed},
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        for seed in ("1", "2")
    }
    assert len(made) == 1


def test_a_python_without_sources_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sysconfig, "get_paths", lambda: {"stdlib": str(tmp_path)})
    with pytest.raises(DataError, match="no Python sources in"):
        pydoc.rows()
