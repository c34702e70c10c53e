"""The texts of the errors, word for word: people search for them, and they must say found, expected and hint."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import pytest

from ebbtide.base.errors import ConfigError, DataError, EbbtideError
from ebbtide.base.runs import read_events
from ebbtide.base.units import parse_size
from ebbtide.cli import VERBS, _function
from ebbtide.cli.arguments import read_arguments

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


CASES: dict[str, tuple[Raises, type[EbbtideError], str]] = {
    "no size": (
        lambda folder: parse_size("40 giga", name="host_budget"),
        ConfigError,
        "host_budget is '40 giga'; "
        "expected a size above zero, such as '40GiB', '40 GB', '512MiB' or a number of bytes\n"
        "hint: units are B, KB, MB, GB, TB, KiB, MiB, GiB, TiB",
    ),
    "no run folder": (
        lambda folder: read_events(folder / "run.jsonl"),
        DataError,
        "FOLDER/run.jsonl cannot be read (No such file or directory); expected a run folder with run.jsonl\n"
        "hint: give the folder that a run wrote (--output_dir, or the argument of track_memory)",
    ),
    "broken run file": (
        lambda folder: _events(folder, '{"t": 1, "event": "x"}\nbroken\n{"t": 2, "event": "y"}\n'),
        DataError,
        "line 2 of FOLDER/run.jsonl is b'broken'; expected one JSON object a line, with 't' and 'event'\n"
        "hint: the file was edited or damaged; only its last line may be incomplete",
    ),
    "unknown flag": (
        lambda folder: _flags("--modle", "x"),
        ConfigError,
        "unknown flag 'modle'; expected a flag of `ebbtide sft`\nhint: did you mean 'model'?",
    ),
    "unknown verb": (
        lambda folder: _function("comprae"),
        ConfigError,
        f"there is no verb 'comprae'; expected one of {', '.join(VERBS)}\nhint: did you mean 'compare'?",
    ),
    "flag that cannot be served": (
        lambda folder: _flags("--deepspeed", "zero2"),
        ConfigError,
        "--deepspeed zero2 is not supported in this release\nhint: leave it out",
    ),
    "flag without value": (
        lambda folder: _flags("--model"),
        ConfigError,
        "--model has no value; expected a value\nhint: `ebbtide sft --help` says what it takes",
    ),
    "flag missing": (
        lambda folder: _flags("--max_steps", "1"),
        ConfigError,
        "--model is missing; expected a value\nhint: `ebbtide sft --help` says what it takes",
    ),
    "no boolean": (
        lambda folder: _flags("--packing=maybe"),
        ConfigError,
        "--packing is 'maybe'; expected true or false\nhint: yes and no, on and off, 1 and 0 are read too",
    ),
    "no such file": (
        lambda folder: _flags(str(folder / "sft.yaml")),
        DataError,
        "there is no file 'FOLDER/sft.yaml'; expected ebbtide sft [file.yaml] [--flag value ...]\n"
        "hint: give a YAML file, or only flags",
    ),
    "file after flags": (
        lambda folder: _flags("--model", "x", "sft.yaml"),
        ConfigError,
        "'sft.yaml' stands alone; expected ebbtide sft [file.yaml] [--flag value ...]\nhint: the file comes first",
    ),
    "no boolean after a space": (
        lambda folder: _flags("--packing", "flase", "--model", "x"),
        ConfigError,
        "--packing is 'flase'; expected true or false\nhint: did you mean 'false'?",
    ),
    "empty value": (
        lambda folder: _flags("--model", " "),
        ConfigError,
        "--model is ' '; expected a value\nhint: leave model out for its default",
    ),
    "flag twice": (
        lambda folder: _flags("--model", "x", "--max_steps=1", "--max-steps", "2"),
        ConfigError,
        "--max-steps is given twice: 1, 2; expected one value\nhint: leave one out",
    ),
    "flag without hyphens": (
        lambda folder: _flags("model=x"),
        DataError,
        "there is no file 'model=x'; expected ebbtide sft [file.yaml] [--flag value ...]\n"
        "hint: flags begin with two hyphens: --model",
    ),
    "key twice": (
        lambda folder: _settings(folder, "model: x\nmax_steps: 1\nmodel: y\n"),
        DataError,
        "FOLDER/sft.yaml cannot be read: line 3: the key 'model' stands here a second time; "
        "expected a YAML file of `key: value` lines, each key once\n"
        "hint: indent with spaces, never with tabs, and put quotes around text with a colon in it",
    ),
    "tab in a file": (
        lambda folder: _settings(folder, "model: x\n\tmax_steps: 1\n"),
        DataError,
        "FOLDER/sft.yaml cannot be read: line 2: found character '\\t' that cannot start any token; "
        "expected a YAML file of `key: value` lines, each key once\n"
        "hint: indent with spaces, never with tabs, and put quotes around text with a colon in it",
    ),
    "number of the wrong kind in a file": (
        lambda folder: _settings(folder, "model: x\nmax-steps: true\n"),
        ConfigError,
        "max-steps in FOLDER/sft.yaml is 'True'; expected an integer\nhint: `ebbtide sft --help` says what it takes",
    ),
    "no number": (
        lambda folder: _flags("--model", "x", "--max_steps", "many"),
        ConfigError,
        "--max_steps is 'many'; expected an integer\nhint: `ebbtide sft --help` says what it takes",
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_the_error_says_exactly_this(name: str, tmp_path: Path) -> None:
    raises, kind, text = CASES[name]
    with pytest.raises(EbbtideError) as caught:
        raises(tmp_path)
    assert type(caught.value) is kind
    assert str(caught.value).replace(str(tmp_path), "FOLDER") == text
