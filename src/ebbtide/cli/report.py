"""``ebbtide report``: text, HTML, Chrome trace or JSON from a run folder, or a comparison of several runs."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
from collections import defaultdict
from collections.abc import Generator, Sequence
from pathlib import Path
from typing import Any, Literal, cast, get_args

from ebbtide.base.errors import ConfigError, DataError, EbbtideError
from ebbtide.base.files import check_writable, near, write_text
from ebbtide.base.runs import EVENTS_FILE, REPORT_FILE, SUMMARY_FILE, check_schema
from ebbtide.cli.merge import latest_complete_round
from ebbtide.cli.parsing import Parser, choice
from ebbtide.report import Run, as_values, chrome_trace, comparison_text, load_run, page, text
from ebbtide.report.table import plain_of
from ebbtide.track import summarise, write_summary

Format = Literal["text", "html", "trace", "json"]
_READABLE = "ask its owner, or copy it to a folder of your own"
_DEFAULT_FILES = {"html": REPORT_FILE, "trace": "trace.json"}


def report(
    folder: Path, *more: Path, format: Format = "text", output: Path | None = None, force: bool = False
) -> Path | None:
    """Report on a run folder or on the folder of a comparison, or compare several runs.

    The missing ``summary.json`` of a killed run is written here. The baseline of several runs is that of the mode
    ``plain``, else the first.

    Args:
        folder: What a run or ``ebbtide compare`` wrote.
        more: Folders of more runs; then all are of runs.
        format: ``text`` and ``json`` are printed by default; ``html`` and ``trace`` are written into the run folder,
            ``html`` of several runs into the last one, as ``against-FIRST.html``. A comparison, and several runs, have
            ``text`` and ``html``.
        output: The file to write; ``-`` prints.
        force: Rewrite ``summary.json``, and replace an existing ``output``.

    Returns:
        The written file; ``None`` if the report was printed.

    Raises:
        DataError: A folder holds no run, a damaged one or a later ebbtide's, may not be read, or ``output`` exists.
        ConfigError: The format does not exist for them; of several, a folder twice, or that of a comparison.
    """
    folders = folder, *more
    for each in folders:
        _check_folder(each)
    files = {"html": f"against-{folder.resolve().name}.html"} if more else _DEFAULT_FILES
    target = _target(output, folders[-1] / files[format] if format in files else None, force)
    if more:
        words = _words_of_runs(folders, format, force)
    elif (comparison := _comparison(folder)) is None:
        words = _read(folder, format, force)[1]
    else:
        with _sound(folder):
            words = _words_of_comparison(folder, comparison, format)
    if target is None:
        print(words, end="")
    else:
        write_text(target, words)
    return target


def _check_folder(folder: Path) -> None:
    if not folder.is_dir():
        what = "is a file" if folder.exists() else "does not exist"
        raise DataError(
            f"run folder {str(folder)!r} {what}",
            expected="the folder of a run or of `ebbtide compare`",
            hint=near(folder, "*/") or "pass the folder of --output_dir or --out",
        )
    if not os.access(folder, os.R_OK | os.X_OK):
        raise DataError(
            f"run folder {str(folder)!r} may not be read", expected="a folder that you may read", hint=_READABLE
        )


@contextlib.contextmanager
def _sound(folder: Path) -> Generator[None, None, None]:
    """Raise an error that names the folder where its files hold values of other types than ebbtide writes.

    Raises:
        DataError: They do.
    """
    try:
        yield
    except EbbtideError:
        raise
    except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as error:
        raise DataError(
            f"the files in {folder} hold something that ebbtide does not write ({type(error).__name__}: {error})",
            expected=f"{EVENTS_FILE} and {SUMMARY_FILE} as they were written",
            hint=f"if {SUMMARY_FILE} was edited, --force makes it again; if nothing was, please report this as a bug",
        ) from error


def _read(folder: Path, format: Format, force: bool = False) -> tuple[Run, str]:
    """Read a run; also return its report.

    Raises:
        DataError: It is damaged.
    """
    with _sound(folder):
        run_ = _loaded(folder, force)
        if format == "html":
            return run_, page([run_])
        if format == "text":
            return run_, text(run_)
        values = chrome_trace(run_) if format == "trace" else as_values(run_)
        return run_, json.dumps(values, indent=None if format == "trace" else 1, allow_nan=False) + "\n"


def _loaded(folder: Path, force: bool) -> Run:
    """Read a run; a killed one has no summary yet, and one that trains has gone on since its last one."""
    events, summary = folder / EVENTS_FILE, folder / SUMMARY_FILE
    place = folder.resolve()  # OUT/round-N/MODE in a comparison, which sets the warm-up
    modes: list[dict[str, Any]] = []
    with contextlib.suppress(DataError):  # a damaged one is another folder's
        modes = (_comparison(place.parent.parent) or {"modes": []})["modes"]
    warm_up = next((mode.get("warm_up_steps") for mode in modes if mode["mode"] == place.name), None)
    warm_up = warm_up if isinstance(warm_up, int) else None  # a median of rounds that differ is none
    if events.exists() and (force or not summary.exists() or events.stat().st_mtime_ns > summary.stat().st_mtime_ns):
        try:
            write_summary(folder, warm_up=warm_up)
        except OSError:  # of a folder that may only be read
            return load_run(folder, summary=summarise(folder, warm_up=warm_up))
    return load_run(folder)


def _target(output: Path | None, default: Path | None, force: bool) -> Path | None:
    """Return the file to write, checked before anything is read; ``None``: print."""
    target = default if output is None else None if str(output) == "-" else output
    if target is not None:
        check_writable(target, str(target), hint="name one with --output")
        if target.exists() and output is not None and not force:
            raise DataError(f"{target} already exists", expected="a new file", hint="pass --force to replace it")
    return target


def _words_of_runs(folders: Sequence[Path], format: Format, force: bool) -> str:
    for folder in folders:
        if _comparison(folder) is not None:
            raise ConfigError(f"{folder} holds a comparison", expected="folders of runs", hint="name it alone")
    if len({folder.resolve() for folder in folders}) < len(folders):
        raise ConfigError("a folder is named twice", expected="folders of different runs", hint="name each one once")
    if format not in ("text", "html"):
        raise ConfigError(f"format is {format!r} for several runs", expected="text or html", hint="name one folder")
    runs = [_read(folder, format, force)[0] for folder in folders]
    by_mode = [run.name for run in runs]
    names = by_mode if len(set(by_mode)) == len(runs) else [folder.resolve().name for folder in folders]
    names = names if len(set(names)) == len(runs) else [str(folder) for folder in folders]
    runs = [dataclasses.replace(run, name=name) for run, name in zip(runs, names, strict=True)]
    named = {run.name: run.summary for run in runs}
    baseline = plain_of(named) or names[0]
    return page(runs, baseline=baseline) if format == "html" else comparison_text(named, runs, baseline)


def _comparison(folder: Path) -> dict[str, Any] | None:
    """Return the summary of a comparison; ``None`` if the folder holds none.

    Raises:
        DataError: It is damaged.
    """
    path = folder / SUMMARY_FILE
    if (folder / EVENTS_FILE).exists() or not path.exists():
        return None
    try:
        summary: object = json.loads(path.read_text())
    except OSError as error:
        raise DataError(
            f"{path} cannot be read ({error.strerror})", expected="the summary of a comparison", hint=_READABLE
        ) from error
    except ValueError:
        return None
    if not isinstance(summary, dict) or "modes" not in summary:
        return None
    found = cast("dict[str, Any]", summary)
    check_schema(found, path)
    modes = cast("list[object]", found["modes"] if isinstance(found["modes"], list) else [])
    if not modes or not all(isinstance(mode, dict) and isinstance(mode.get("mode"), str) for mode in modes):
        raise DataError(
            f"{path} is damaged: its modes are {found['modes']!r:.60}",
            expected="a list of objects, each with a mode's name",
            hint=f"for one run name its folder, such as {folder}/round-1/plain",
        )
    return found


def _words_of_comparison(folder: Path, summary: dict[str, Any], format: Format) -> str:
    modes = [str(mode["mode"]) for mode in summary["modes"]]
    if format not in ("text", "html"):
        raise ConfigError(
            f"{folder} holds a comparison and format is {format!r}",
            expected="text or html",
            hint=f"summary.json in it is JSON; for one run name its folder, such as {folder}/round-1/{modes[0]}",
        )
    runs, damaged = _last_round(folder, modes, format)
    for mode in summary["modes"]:
        mode["failures"] = [*(mode.get("failures") or ()), *damaged.get(mode["mode"], ())]
    if format == "html":
        return page(runs, comparison=summary)
    return comparison_text(dict(zip(modes, summary["modes"], strict=True)), runs)


def _last_round(folder: Path, modes: Sequence[str], format: Format) -> tuple[list[Run], dict[str, list[str]]]:
    """Return the runs of the last round in which all modes succeeded, else the last run of each mode.

    A damaged run is left out; also return, by mode, which ones were, and why.
    """
    rounds: dict[int, dict[str, Path]] = {}
    for part in folder.glob("round-*"):
        number = part.name.removeprefix("round-")
        for mode in modes if number.isdecimal() else ():
            if (part / mode / SUMMARY_FILE).exists():
                rounds.setdefault(int(number), {})[mode] = part / mode
    runs: dict[Path, Run] = {}
    damaged: dict[str, list[str]] = defaultdict(list)
    while unread := [path for path in latest_complete_round(rounds, modes) if path not in runs]:
        path, number = unread[0], int(unread[0].parent.name.removeprefix("round-"))
        try:
            run_ = _read(path, format)[0]
        except DataError as error:
            damaged[path.name].append(f"round {number} is left out: {error.found}")
        else:
            if run_.summary.get("status") == "ok":
                runs[path] = dataclasses.replace(run_, name=path.name)
                continue
        del rounds[number][path.name]
    return [runs[path] for path in latest_complete_round(rounds, modes)], damaged


def run(argv: Sequence[str]) -> int:
    """Print or write a report: ``ebbtide report FOLDER... [--format F] [--output FILE] [--force]``.

    Raises:
        ConfigError: An argument that cannot be read.
        DataError: As ``report``.
    """
    about = "Report on a run folder or a comparison, or compare several runs."
    parser = Parser(prog="ebbtide report", description=about)
    listed = "folder of a run or of `ebbtide compare`; folders of several runs to compare them"
    parser.add_argument("run_folder", type=Path, nargs="+", help=listed)
    formats = cast("tuple[str, ...]", get_args(Format))
    listed = f"one of {', '.join(formats)} (default: %(default)s)"
    parser.add_argument("--format", metavar="NAME", default="html", help=listed)
    parser.add_argument("--output", metavar="FILE", type=Path, help="file to write; - prints")
    parser.add_argument(
        "--force", action="store_true", help="replace the file of --output; also write summary.json from the record"
    )
    own = parser.read(argv)
    format_ = cast("Format", choice("--format", own.format, formats))
    path = report(*cast("list[Path]", own.run_folder), format=format_, output=own.output, force=own.force)
    if path is not None:
        print(path)
    return 0
