"""``ebbtide report``: text, HTML, Chrome trace or JSON from a run folder."""

from __future__ import annotations

import dataclasses
import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal, cast, get_args

from ebbtide.base.errors import ConfigError, DataError, nearest
from ebbtide.base.runs import EVENTS_FILE, REPORT_FILE, SUMMARY_FILE
from ebbtide.cli.merge import latest_complete_round
from ebbtide.cli.parsing import Parser, choice
from ebbtide.report import Run, as_values, chrome_trace, html, load_run, text
from ebbtide.report.table import headline
from ebbtide.report.text import grid
from ebbtide.track import write_summary

Format = Literal["text", "html", "trace", "json"]
_DEFAULT_FILES = {"html": REPORT_FILE, "trace": "trace.json"}


def report(
    run_folder: Path, *, format: Format = "text", output: Path | None = None, force: bool = False
) -> Path | None:
    """Report on a run folder, or on the folder of a comparison.

    A run that was killed has no ``summary.json``; it is made here.

    Args:
        run_folder: What a run or ``ebbtide compare`` wrote.
        format: ``text`` and ``json`` are printed unless ``output`` is given; ``html`` and ``trace`` are files in the
            run folder unless it is. A comparison has ``text`` and ``html``.
        output: The file to write.
        force: Make ``summary.json`` again, and replace ``output`` if it is there.

    Returns:
        The file written, ``None`` if the report was printed.

    Raises:
        DataError: The folder holds no run, or a damaged one; or ``output`` already exists.
        ConfigError: A format that a comparison does not have.
    """
    if not run_folder.is_dir():
        what = "is a file" if run_folder.exists() else "is not there"
        raise DataError(
            f"run folder {str(run_folder)!r} {what}",
            expected="the folder of a run or of `ebbtide compare`",
            hint=nearest(run_folder.name, _neighbours(run_folder)) or "pass the folder of --output_dir or --out",
        )
    target = output if output is not None else _default_file(run_folder, format)
    if target is not None:
        _check_target(target, replaces=output is None or force)
    comparison = _comparison(run_folder)
    if comparison is not None:
        return _report_comparison(run_folder, comparison, format, target)
    if (run_folder / EVENTS_FILE).exists() and (force or not (run_folder / SUMMARY_FILE).exists()):
        write_summary(run_folder)
    run_ = load_run(run_folder)
    if format == "html" and target is not None:
        return html([run_], target)
    if format == "text":
        return _put(text(run_), target)
    values = chrome_trace(run_) if format == "trace" else as_values(run_)
    return _put(json.dumps(values, indent=None if format == "trace" else 1, allow_nan=False) + "\n", target)


def _default_file(folder: Path, format: Format) -> Path | None:
    return folder / _DEFAULT_FILES[format] if format in _DEFAULT_FILES else None


def _neighbours(folder: Path) -> list[str]:
    return [other.name for other in folder.parent.iterdir() if other.is_dir()] if folder.parent.is_dir() else []


def _check_target(target: Path, *, replaces: bool) -> None:
    """Refuse a file that cannot be written, before anything is read."""
    if target.is_dir() or not target.parent.is_dir():
        what = "is a folder" if target.is_dir() else f"cannot be written: there is no folder {str(target.parent)!r}"
        raise DataError(f"{target} {what}", expected="a file in an existing folder", hint="name one with --output")
    if target.exists() and not replaces:
        raise DataError(f"{target} already exists", expected="a new file", hint="pass --force to replace it")
    if not os.access(target if target.exists() else target.parent, os.W_OK):
        raise DataError(f"{target} cannot be written", expected="a writable file", hint="choose another with --output")


def _put(words: str, target: Path | None) -> Path | None:
    if target is None:
        print(words, end="")
    else:
        target.write_text(words, encoding="utf-8")
    return target


def _comparison(folder: Path) -> dict[str, Any] | None:
    """Return the summary of a comparison; ``None`` if the folder is not one's."""
    path = folder / SUMMARY_FILE
    if (folder / EVENTS_FILE).exists() or not path.exists():
        return None
    try:
        summary: object = json.loads(path.read_text())
    except ValueError:
        return None
    if not isinstance(summary, dict) or "modes" not in summary:
        return None
    return cast("dict[str, Any]", summary)


def _report_comparison(folder: Path, summary: dict[str, Any], format: Format, target: Path | None) -> Path | None:
    modes = [str(mode["mode"]) for mode in summary["modes"]]
    if format == "text":
        lines = grid(headline(summary["modes"], modes))
        return _put("\n".join(lines) + "\n", target)
    if format == "html" and target is not None:
        return html(_last_round(folder, modes), target, comparison=summary)
    raise ConfigError(
        f"{folder} holds a comparison and format is {format!r}",
        expected="text or html",
        hint=f"summary.json in it is JSON; for one run name its folder, such as {folder}/round-1/{modes[0]}",
    )


def _last_round(folder: Path, modes: Sequence[str]) -> list[Run]:
    """Return the runs of the last round in which all modes ended well, or what the last rounds have."""
    rounds: dict[int, dict[str, Run]] = {}
    for turn in folder.glob("round-*"):
        for mode in modes:
            if (turn / mode / SUMMARY_FILE).exists():
                found = dataclasses.replace(load_run(turn / mode), name=mode)
                if found.summary.get("status") == "ok":
                    rounds.setdefault(int(turn.name.rpartition("-")[2]), {})[mode] = found
    return latest_complete_round(rounds, modes)


def run(argv: Sequence[str]) -> int:
    """Report as the arguments say: ``ebbtide report FOLDER [--format F] [--output FILE] [--force]``.

    Args:
        argv: The arguments after ``report``.

    Returns:
        The exit code.

    Raises:
        ConfigError: An argument that cannot be read.
        DataError: As ``report``.
    """
    parser = Parser(prog="ebbtide report", description="A report of a run folder, or of a comparison.")
    parser.add_argument("run_folder", type=Path, help="folder of a run or of `ebbtide compare`")
    formats = cast("tuple[str, ...]", get_args(Format))
    listed = f"one of {', '.join(formats)} (default: %(default)s)"
    parser.add_argument("--format", metavar="NAME", default="html", help=listed)
    parser.add_argument("--output", metavar="FILE", type=Path, help="file to write")
    parser.add_argument("--force", action="store_true", help="write summary.json again; replace --output")
    try:
        own = parser.read(argv)
    except SystemExit:  # --help has been printed
        return 0
    format_ = cast("Format", choice("--format", own.format, formats))
    path = report(own.run_folder, format=format_, output=own.output, force=own.force)
    if path is not None:
        print(path)
    return 0
