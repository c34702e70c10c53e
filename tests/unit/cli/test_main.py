"""The command line's surface: verbs, exit codes, light start."""

from __future__ import annotations

import builtins
import errno
import os
import signal
import subprocess
import sys
import threading
import types
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest

import ebbtide.cli as cli
from ebbtide.base.errors import (
    CapError,
    ConfigError,
    DataError,
    DiskError,
    DiskFullError,
    EbbtideError,
    RestoreError,
    TargetError,
)
from ebbtide.cli import versions

SOURCE = Path(cli.__file__).parents[2]


@pytest.fixture
def verb(monkeypatch: pytest.MonkeyPatch) -> Callable[[Callable[[Sequence[str]], int]], None]:
    def install(function: Callable[[Sequence[str]], int]) -> None:
        module = types.ModuleType("ebbtide.cli.sft")
        module.run = function
        monkeypatch.setitem(sys.modules, "ebbtide.cli.sft", module)
        monkeypatch.setitem(cli.VERBS, "sft", cli.Verb(does="tests"))

    return install


def test_the_verbs_of_this_release_are_listed_and_no_others(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["--help"]) == 0
    listed = [line.split()[0] for line in capsys.readouterr().out.splitlines() if line.startswith("  ")]
    assert listed == ["sft", "grpo", "video", "run", "compare", "plan", "report", "doctor"] == list(cli.VERBS)


def test_every_verb_leads_to_a_module() -> None:
    for name in cli.VERBS:
        assert callable(cli._function(name)), name


def test_no_verb_shows_the_overview_and_fails(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main([]) == 2
    shown = capsys.readouterr()
    assert "usage: ebbtide VERB" in shown.err
    assert shown.out == ""


def test_an_unknown_verb_names_the_nearest(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["compair"]) == 2
    assert "error: there is no verb 'compair'" in (err := capsys.readouterr().err)
    assert "did you mean 'compare'" in err


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (ConfigError, 2),
        (DataError, 2),
        (TargetError, 2),
        (CapError, 1),
        (DiskError, 1),
        (DiskFullError, 1),
        (RestoreError, 1),
    ],
)
def test_errors_are_two_lines_and_a_code(
    verb: Callable, capsys: pytest.CaptureFixture[str], error: type[EbbtideError], code: int
) -> None:
    def fail(argv: Sequence[str]) -> int:
        raise error("it is so", expected="it to be other", hint="do this")

    verb(fail)
    assert cli.main(["sft"]) == code
    assert capsys.readouterr().err == "error: it is so; expected it to be other\nhint: do this\n"


def test_ctrl_c_is_one_line_and_130(verb: Callable, capsys: pytest.CaptureFixture[str]) -> None:
    def interrupted(argv: Sequence[str]) -> int:
        raise KeyboardInterrupt

    verb(interrupted)
    assert cli.main(["sft"]) == 130
    assert capsys.readouterr().err == "interrupted\n"


@pytest.mark.parametrize(
    ("argv", "reader", "code"),
    [
        (["report"], False, 0),
        (["sft", "--help"], False, 0),
        (["sft"], False, None),
        (["sft"], True, None),
        (["report"], True, None),
    ],
)
def test_only_a_reader_of_printed_words_may_go(
    verb: Callable, monkeypatch: pytest.MonkeyPatch, argv: list[str], reader: bool, code: int | None
) -> None:
    def broken(arguments: Sequence[str]) -> int:
        if reader:
            raise BrokenPipeError  # a tracker's socket
        print("words", flush=True)
        return 0

    verb(broken)
    monkeypatch.setattr("ebbtide.cli.report.run", broken)
    ends = os.pipe()
    if not reader:
        os.close(ends[0])
    with open(ends[1], "w") as output:
        monkeypatch.setattr(sys, "stdout", output)
        with nullcontext() if code is not None else pytest.raises(BrokenPipeError):
            assert cli.main(argv) == code
    if reader:
        os.close(ends[0])


@pytest.mark.parametrize("flush", [True, False])
def test_a_full_disk_behind_the_output_is_one_error(
    verb: Callable, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], flush: bool
) -> None:
    verb(lambda argv: print("words", flush=flush) or 0)
    with open("/dev/full", "w") as output:
        monkeypatch.setattr(sys, "stdout", output)
        assert cli.main(["sft"]) == 1
        output.flush()  # of words that the interpreter would write at its exit
    assert capsys.readouterr().err.startswith("error: standard output, or a file, cannot be written (No space")


def test_a_full_disk_is_one_error_and_another_systems_error_a_bug(
    verb: Callable, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    def fail(argv: Sequence[str]) -> int:
        raise OSError(int(argv[0]), "the reason", str(tmp_path / "file"))

    verb(fail)
    assert cli.main(["sft", str(errno.EDQUOT)]) == 1
    assert capsys.readouterr().err.startswith(f"error: {tmp_path / 'file'} cannot be written (the reason)")
    with pytest.raises(OSError):
        cli.main(["sft", str(errno.EIO)])


@pytest.mark.parametrize("argv", [["report", "x" * 300], ["doctor", "--out", "x" * 300 + ".json"]])
def test_a_name_that_no_file_can_have_is_bad_input(argv: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(argv) == 2
    assert capsys.readouterr().err.startswith(f"error: {argv[-1]!r} is no file's name (File name too long)\nhint: ")


@pytest.mark.parametrize("argv", [["report", "RUN"], ["compare", "--out", "RUN", "--", "true"]])
def test_a_folder_that_may_not_be_entered_is_bad_input(
    argv: list[str], capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Root may enter all of them, so the system's refusal is made up."""
    stat, run = os.stat, str(tmp_path / "run")

    def refuse(path: Any, **options: Any) -> os.stat_result:
        if str(path).startswith(run):
            raise PermissionError(errno.EACCES, "Permission denied", str(path))
        return stat(path, **options)

    monkeypatch.setattr(os, "stat", refuse)
    assert cli.main([run if word == "RUN" else word for word in argv]) == 2
    assert capsys.readouterr().err.startswith(f"error: {run!r} may not be used (Permission denied)\nhint: ")


@pytest.mark.parametrize("argv", [["--help"], ["report", "/nowhere"]])
def test_a_process_without_output_has_its_exit_code(argv: list[str]) -> None:
    """As started by some schedulers, with the three streams closed."""
    command = [sys.executable, "-m", "ebbtide", *argv]
    closed = subprocess.run(["sh", "-c", 'exec "$@" <&- >&- 2>&-', "sh", *command], env=os.environ, timeout=60)
    assert closed.returncode == (0 if argv == ["--help"] else 2)


def test_sigterm_is_one_line_and_143(verb: Callable, capsys: pytest.CaptureFixture[str]) -> None:
    closed: list[bool] = []

    def terminated(argv: Sequence[str]) -> int:
        try:
            signal.raise_signal(signal.SIGTERM)
        finally:
            signal.raise_signal(signal.SIGTERM)  # a second one does not disturb the cleanup
            closed.append(True)
        return 0

    before = signal.getsignal(signal.SIGTERM)
    verb(terminated)
    assert cli.main(["sft"]) == 143
    assert capsys.readouterr().err == "terminated\n"
    assert closed == [True]
    assert signal.getsignal(signal.SIGTERM) is before


@pytest.mark.parametrize(("status", "code"), [(None, 1), (0, 1), ("", 1), (3, 3), ("no model", "no model")])
def test_code_that_ends_the_process_does_not_look_like_success(
    verb: Callable, capsys: pytest.CaptureFixture[str], status: object, code: object
) -> None:
    def leaves(argv: Sequence[str]) -> int:
        sys.exit(status)  # pyright: ignore[reportArgumentType]

    verb(leaves)
    if code == 1:
        assert cli.main(["sft"]) == 1
        assert f"exit({status!r}) was called during `ebbtide sft`" in capsys.readouterr().err
    else:
        with pytest.raises(SystemExit) as caught:
            cli.main(["sft"])
        assert caught.value.code == code
    assert cli.main(["report", "--help"]) == cli.main(["report", "-h"]) == 0


def test_in_another_thread_signals_are_left_alone(verb: Callable) -> None:
    codes: list[int] = []
    verb(lambda argv: 5)
    thread = threading.Thread(target=lambda: codes.append(cli.main(["sft"])))
    thread.start()
    thread.join(timeout=60)
    assert codes == [5]


def test_the_package_runs_as_a_module() -> None:
    result = subprocess.run(
        [sys.executable, "-m", "ebbtide", "--help"],
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": str(SOURCE)},
        check=False,
    )
    assert (result.returncode, result.stderr) == (0, "")
    assert result.stdout.startswith("usage: ebbtide VERB")


@pytest.mark.parametrize("argv", [["--help"], *([verb, "--help"] for verb in cli.VERBS)])
def test_help_reads_well_at_80_columns(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], argv: list[str]
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setenv("NO_COLOR", "1")
    assert cli.main(argv) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line for line in lines if len(line) > 80] == []
    assert not any(one == two == "" for one, two in zip(lines, lines[1:], strict=False))


def test_a_flag_in_place_of_a_verb_names_the_nearest(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["--hepl"]) == 2
    assert "hint: did you mean '--help'" in capsys.readouterr().err
    assert cli.main(["xyz"]) == 2
    assert "hint: `ebbtide --help` describes each" in capsys.readouterr().err


def test_a_bug_is_not_dressed_up(verb: Callable) -> None:
    def broken(argv: Sequence[str]) -> int:
        raise RuntimeError("a bug")

    verb(broken)
    with pytest.raises(RuntimeError, match="a bug"):
        cli.main(["sft"])


def test_arguments_reach_the_verb_and_its_code_comes_back(verb: Callable) -> None:
    seen: list[Sequence[str]] = []

    def run(argv: Sequence[str]) -> int:
        seen.append(argv)
        return 3

    verb(run)
    assert cli.main(["sft", "file.yaml", "--flag"]) == 3
    assert seen == [["file.yaml", "--flag"]]


@pytest.mark.parametrize(
    "argv",
    [["--help"], ["sft", "--modle", "m"], ["compare", "sft", "--help"], *[[verb, "--help"] for verb in cli.VERBS]],
)
def test_a_light_start_imports_no_torch(argv: list[str]) -> None:
    program = (
        "import sys; from ebbtide.cli import main; main(sys.argv[1:]);"
        "heavy = {'torch', 'transformers', 'datasets', 'numpy', 'trl'} & set(sys.modules);"
        "print(heavy); sys.exit(len(heavy))"
    )
    result = subprocess.run(
        [sys.executable, "-c", program, *argv],
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": str(SOURCE)},
        check=False,
    )
    assert result.returncode == 0, result.stdout + result.stderr


def test_doctor_prints_versions(capsys: pytest.CaptureFixture[str]) -> None:
    import torch

    assert cli.main(["doctor", "--versions"]) == 0
    lines = dict(line.split(maxsplit=1) for line in capsys.readouterr().out.splitlines())
    assert lines["torch"].partition("+")[0] == torch.__version__.partition("+")[0]  # not every build has a name
    assert lines["python"].startswith(f"{sys.version_info.major}.{sys.version_info.minor}")
    assert {"ebbtide", "transformers", "trl", "device", "platform"} <= set(lines)


def test_a_torch_that_cannot_be_loaded_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """A missing library of CUDA is an OSError."""
    real = builtins.__import__

    def broken(name: str, *args: Any) -> Any:
        if name == "torch":
            raise OSError("libcudart.so.13: cannot open shared object file")
        return real(name, *args)

    monkeypatch.setattr(builtins, "__import__", broken)
    assert "torch cannot be imported: libcudart.so.13" in versions.lines()[-1]


@pytest.mark.parametrize("argument", ["--help", "--version", "doctor --help"])
def test_a_reader_that_has_seen_enough_is_no_error(argument: str) -> None:
    read, write = os.pipe()
    os.close(read)  # as `| head -1` does, but before the first line
    command = [sys.executable, "-m", "ebbtide", *argument.split()]
    with open(write, "wb") as gone:
        done = subprocess.run(command, stdout=gone, stderr=subprocess.PIPE, text=True, timeout=60, check=False)
    assert (done.returncode, done.stderr) == (0, "")
