"""The texts of the errors: type, facts and the presence of a hint."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import pytest

from ebbtide.base.errors import ConfigError, DataError, EbbtideError
from ebbtide.base.runs import read_events
from ebbtide.base.units import parse_size
from ebbtide.cli import _function
from ebbtide.cli.arguments import read_arguments
from tests.helpers.texts import lacks

Raises = Callable[[Path], Any]


@dataclass(frozen=True, kw_only=True)
class Flags:
    model: str
    max_steps: int = 1
    packing: bool = False
    unsupported: ClassVar[dict[str, str]] = {"deepspeed": "leave it out"}


def _flags(*arguments: str) -> Any:
    return read_arguments(Flags, arguments, prog="ebbtide sft")


def _events(folder: Path, text: str) -> Any:
    (folder / "run.jsonl").write_text(text)
    return read_events(folder / "run.jsonl")


def _settings(folder: Path, text: str) -> Any:
    (folder / "sft.yaml").write_text(text)
    return _flags(str(folder / "sft.yaml"))


CASES: dict[str, tuple[Raises, type[EbbtideError], tuple[str, ...]]] = {
    "no size": (
        lambda folder: parse_size("40 giga", name="host_budget"),
        ConfigError,
        (
            "host_budget",
            "'40 giga'",
            "'40GiB'",
            "'40 GB'",
            "'512MiB'",
        ),
    ),
    "no run folder": (
        lambda folder: read_events(folder / "run.jsonl"),
        DataError,
        (
            "FOLDER/run.jsonl",
            "--output_dir",
            "track_memory",
        ),
    ),
    "broken run file": (
        lambda folder: _events(folder, '{"t": 1, "event": "x"}\nbroken\n{"t": 2, "event": "y"}\n'),
        DataError,
        (
            "2",
            "FOLDER/run.jsonl",
            "'broken'",
            "'t'",
            "'event'",
        ),
    ),
    "unknown flag": (
        lambda folder: _flags("--modle", "x"),
        ConfigError,
        (
            "'modle'",
            "`ebbtide sft`",
            "'model'",
        ),
    ),
    "unknown verb": (
        lambda folder: _function("comprae"),
        ConfigError,
        (
            "'comprae'",
            "'compare'",
        ),
    ),
    "flag that cannot be served": (
        lambda folder: _flags("--deepspeed", "zero2"),
        ConfigError,
        ("--deepspeed zero2",),
    ),
    "flag without value": (
        lambda folder: _flags("--model"),
        ConfigError,
        (
            "--model",
            "`ebbtide sft --help`",
        ),
    ),
    "flag missing": (
        lambda folder: _flags("--max_steps", "1"),
        ConfigError,
        (
            "--model",
            "`ebbtide sft --help`",
        ),
    ),
    "no boolean": (
        lambda folder: _flags("--packing=maybe"),
        ConfigError,
        (
            "--packing",
            "'maybe'",
            "1",
            "0",
        ),
    ),
    "no such file": (
        lambda folder: _flags(str(folder / "sft.yaml")),
        DataError,
        (
            "'FOLDER/sft.yaml'",
            "[file.yaml]",
            "[--flag value ...]",
        ),
    ),
    "file after flags": (
        lambda folder: _flags("--model", "x", "sft.yaml"),
        ConfigError,
        (
            "'sft.yaml'",
            "[file.yaml]",
            "[--flag value ...]",
        ),
    ),
    "no boolean after a space": (
        lambda folder: _flags("--packing", "flase", "--model", "x"),
        ConfigError,
        (
            "--packing",
            "'flase'",
            "'false'",
        ),
    ),
    "empty value": (
        lambda folder: _flags("--model", " "),
        ConfigError,
        (
            "--model",
            "' '",
        ),
    ),
    "flag twice": (
        lambda folder: _flags("--model", "x", "--max_steps=1", "--max-steps", "2"),
        ConfigError,
        (
            "--max",
            "1",
            "2",
        ),
    ),
    "flag without hyphens": (
        lambda folder: _flags("model=x"),
        DataError,
        (
            "'model=x'",
            "[file.yaml]",
            "[--flag value ...]",
            "--model",
        ),
    ),
    "key twice": (
        lambda folder: _settings(folder, "model: x\nmax_steps: 1\nmodel: y\n"),
        DataError,
        (
            "FOLDER/sft.yaml",
            "3",
            "'model'",
            "`key: value`",
        ),
    ),
    "tab in a file": (
        lambda folder: _settings(folder, "model: x\n\tmax_steps: 1\n"),
        DataError,
        (
            "FOLDER/sft.yaml",
            "2",
            "'\\t'",
            "`key: value`",
        ),
    ),
    "number of the wrong kind in a file": (
        lambda folder: _settings(folder, "model: x\nmax-steps: true\n"),
        ConfigError,
        (
            "FOLDER/sft.yaml",
            "'True'",
            "`ebbtide sft --help`",
        ),
    ),
    "no number": (
        lambda folder: _flags("--model", "x", "--max_steps", "many"),
        ConfigError,
        (
            "--max_steps",
            "'many'",
            "`ebbtide sft --help`",
        ),
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_the_error_has_the_facts_and_a_hint(name: str, tmp_path: Path) -> None:
    raises, kind, facts = CASES[name]
    with pytest.raises(EbbtideError) as caught:
        raises(tmp_path)
    assert type(caught.value) is kind
    assert lacks(str(caught.value).replace(str(tmp_path), "FOLDER"), facts) == []


def test_a_fact_and_a_hint_that_are_not_there_are_missed() -> None:
    assert lacks("x is 3; expected 4\nhint: pass 4", ("x", "3")) == []
    assert lacks("x is 3; expected 4", ("x", "5")) == ["5", "hint"]
