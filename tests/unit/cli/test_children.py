"""A child ends with its parent, whenever the interrupt comes."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import psutil
import pytest

from ebbtide.base.errors import ConfigError, DataError, DiskError
from ebbtide.base.runs import read_events
from ebbtide.cli import children
from ebbtide.cli import run as run_module
from ebbtide.cli.children import Child
from ebbtide.cli.signals import Terminated, hold_interrupts, terminate_as_interrupt
from tests.helpers.locked import locked

WAITING = [sys.executable, "-c", "import signal; signal.pause()"]


@pytest.mark.parametrize(
    ("number", "error"),
    [
        (signal.SIGINT, KeyboardInterrupt),
        *((n, Terminated) for n in (signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)),
    ],
)
def test_an_interrupt_while_a_child_starts_ends_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int, error: type[BaseException]
) -> None:
    """Between the start of the child and its record, an interrupt would leave an orphan."""
    started: list[subprocess.Popen[bytes]] = []
    popen = subprocess.Popen

    def interrupted(*args: Any, **options: Any) -> subprocess.Popen[bytes]:
        started.append(popen(*args, **options))
        os.kill(os.getpid(), number)
        return started[-1]

    monkeypatch.setattr(children.subprocess, "Popen", interrupted)
    with terminate_as_interrupt(), pytest.raises(error):
        Child(WAITING, tmp_path / "run", environment=os.environ)
    assert len(started) == 1
    assert started[0].returncode not in (None, 0)  # 1: Python itself was interrupted while it started


def test_samples_of_a_long_run_become_rarer_and_leave_out_no_new_peak(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(children, "_PIECE_BYTES", 2000)
    sizes = [100 + number % 7 for number in range(4000)]
    sizes[1001] = 500  # later than the first samples that are left out
    child = Child(WAITING, tmp_path / "run", environment=os.environ)
    try:
        for size in sizes:
            child._write(size, None)
    finally:
        child.close()
    samples = read_events(tmp_path / "run" / "outside.jsonl")
    assert (tmp_path / "run" / "outside.jsonl").stat().st_size < 20_000 and len(samples) > 100
    assert [event["rss_bytes"] for event in samples[:30]] == sizes[:30]
    assert max(event["rss_bytes"] for event in samples) == 500 == child.most_bytes


@pytest.mark.parametrize("number", [signal.SIGUSR1, signal.SIGUSR2])
def test_a_schedulers_signal_ends_a_command_unless_its_handler_was_set(number: int) -> None:
    """Its default action would end the launcher and leave the ranks."""
    before = signal.getsignal(number)
    came: list[int] = []
    try:
        signal.signal(number, lambda number, _frame: came.append(number))
        with terminate_as_interrupt():
            os.kill(os.getpid(), number)
        assert came == [number]
        signal.signal(number, signal.SIG_DFL)
        with terminate_as_interrupt():
            assert signal.getsignal(number) is not signal.SIG_DFL
            with pytest.raises(Terminated):
                os.kill(os.getpid(), number)
        assert signal.getsignal(number) is signal.SIG_DFL
    finally:
        signal.signal(number, before)


def test_interrupts_wait_and_come_once() -> None:
    order: list[str] = []
    with pytest.raises(KeyboardInterrupt):
        with hold_interrupts():
            os.kill(os.getpid(), signal.SIGINT)
            os.kill(os.getpid(), signal.SIGINT)
            order.append("went on")
        order.append("never")
    assert order == ["went on"]
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_another_thread_than_the_main_one_changes_nothing() -> None:
    before, seen = signal.getsignal(signal.SIGINT), list[Any]()

    def work() -> None:
        with hold_interrupts():
            seen.append(signal.getsignal(signal.SIGINT))

    thread = threading.Thread(target=work)
    thread.start()
    thread.join(30)
    assert seen == [before]


def test_descendants_in_groups_of_their_own_end_with_the_child(tmp_path: Path) -> None:
    """Like the ranks of a launcher: no signal to the child's group reaches them."""
    script = (
        "import subprocess, sys, time; from pathlib import Path; "
        "rank = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)'], start_new_session=True); "
        "Path(sys.argv[1]).write_text(f'{rank.pid} '); time.sleep(600)"
    )
    told = tmp_path / "rank"
    with children.family([sys.executable, "-c", script, str(told)]) as child:
        until = time.monotonic() + 60
        while not told.exists() or not told.read_text().endswith(" "):
            assert child.poll() is None and time.monotonic() < until
            time.sleep(0.01)
        rank = psutil.Process(int(told.read_text()))
        assert rank.is_running()
    rank.wait(60)


def test_a_second_interrupt_ends_a_child_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    deaf = "import signal; [signal.signal(n, signal.SIG_IGN) for n in (2, 15)]; print(1, flush=True); signal.pause()"
    monkeypatch.setattr(children, "_POLITE_SECONDS", 60.0)
    with subprocess.Popen([sys.executable, "-c", deaf], stdout=subprocess.PIPE, start_new_session=True) as child:
        assert child.stdout is not None and child.stdout.readline() == b"1\n"
        threading.Timer(0.3, os.kill, (os.getpid(), signal.SIGINT)).start()
        with pytest.raises(KeyboardInterrupt):
            children.end_family(child)
        assert child.returncode == -signal.SIGKILL


def test_a_child_runs_alone_where_the_folder_can_hold_no_pipe(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(path: Path) -> None:
        raise OSError(errno.EOPNOTSUPP, os.strerror(errno.EOPNOTSUPP), str(path))

    monkeypatch.setattr(children.os, "mkfifo", refused)
    child = Child([sys.executable, "-c", ""], tmp_path / "run", environment=os.environ)
    child.permit_step()
    ended = child.follow(lambda: False)
    assert ended is not None and ended.code == 0


@pytest.mark.filterwarnings("error::pytest.PytestUnhandledThreadExceptionWarning")
def test_memory_that_cannot_be_written_ends_the_comparison_and_the_child(tmp_path: Path) -> None:
    """Samples up to a full disk would be a peak that is too low."""
    (tmp_path / "run").mkdir()
    (tmp_path / "run/outside.jsonl").symlink_to("/dev/full")
    child = Child(WAITING, tmp_path / "run", environment=os.environ)
    with pytest.raises(OSError) as caught, contextlib.closing(child):
        child.follow(lambda: False)
    assert caught.value.errno == errno.ENOSPC and caught.value.filename == str(tmp_path / "run/outside.jsonl")
    assert child._process.returncode is not None


def test_a_program_without_a_first_line_is_an_error_with_a_hint(tmp_path: Path) -> None:
    script = tmp_path / "train.sh"
    script.write_text("echo training\n")
    script.chmod(0o755)
    with pytest.raises(ConfigError, match=r"train\.sh.* cannot be started.*\n?.*hint: .*try sh "):
        Child([str(script)], tmp_path / "run", environment=os.environ)
    with pytest.raises(ConfigError, match="cannot be started"):
        run_module._wait_for([str(script)], dict(os.environ))


def test_a_hangup_reaches_the_command() -> None:
    script = "import os, time\nfor _ in range(100): os.kill(os.getppid(), 1); time.sleep(0.05)"
    before = signal.signal(signal.SIGHUP, lambda *_: None)
    try:
        assert run_module._wait_for([sys.executable, "-c", script], dict(os.environ)) == 128 + signal.SIGHUP
    finally:
        signal.signal(signal.SIGHUP, before)


def test_a_second_process_that_trains_is_named() -> None:
    ran = [{"event": "model", "model": "Net", "checkpoints_itself": False}]
    lines = run_module._ending([*ran, *ran, {"event": "unrecorded", "reason": "out already holds a run"}], 0)
    assert lines == ["ebbtide: a process of the command trained and is not recorded: out already holds a run"]


def test_small_storages_are_why_nothing_was_offloaded() -> None:
    figures = {"main": True, "steps": 3, "unique_bytes": 0, "memory_saved_bytes": 0, "small_storages": 12}
    ran = [{"event": "model", "model": "Net", "checkpoints_itself": False}, {"event": "end", **figures}]
    (line,) = run_module._ending(ran, 0)
    assert "3 steps; nothing was offloaded: all 12 storages" in line and "below 64.0 KiB" in line
    assert run_module._ending([ran[0], {"event": "end", **figures, "small_storages": 0}], 0) == []


def test_a_hangup_that_was_ignored_stays_so() -> None:
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)  # as nohup does
    try:
        with terminate_as_interrupt():
            os.kill(os.getpid(), signal.SIGHUP)
    finally:
        signal.signal(signal.SIGHUP, before)


@pytest.mark.parametrize("flag", ["--disk_path", "--out"])
def test_an_empty_name_is_no_folder(flag: str) -> None:
    """As of a variable that is not set: the current folder would fill up with offloaded bytes."""
    with pytest.raises(ConfigError, match=f"{flag} is ' '; expected a folder\nhint: leave {flag} out"):
        run_module.run([flag, " ", "--", "true"])


@pytest.mark.parametrize("flag", ["--disk_path", "--out"])
def test_a_tilde_is_the_home_folder(flag: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A shell leaves it in --out=~/run: a folder with that name would be made."""
    (tmp_path / "home").mkdir()
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.chdir(tmp_path)
    assert run_module.run([f"{flag}=~/", "--", "true"]) == 0
    assert list(tmp_path.iterdir()) == [tmp_path / "home"]
    with pytest.raises(ConfigError, match=f"{flag} is '~nobody-here/x', and there is no such home folder; .*\nhint: "):
        run_module.run([flag, "~nobody-here/x", "--", "true"])


@pytest.mark.parametrize(("number", "shown"), [(signal.SIGKILL, "(the system sends"), (signal.SIGSEGV, "")])
def test_a_signal_that_the_command_did_not_survive_is_named(
    capfd: pytest.CaptureFixture[str], number: signal.Signals, shown: str
) -> None:
    """A shell would name it, if it had started the command itself."""
    script = f"import os; os.kill(os.getpid(), {int(number)})"
    assert run_module.run(["--", sys.executable, "-I", "-c", script]) == 128 + number
    (line,) = capfd.readouterr().err.splitlines()
    assert line.startswith(f"ebbtide: the command was ended by {number.name}") and shown in line
    assert run_module.run(["--", sys.executable, "-I", "-c", script.replace(f", {int(number)}", ", 15")]) == 143
    assert not capfd.readouterr().err


def test_damaged_notes_leave_the_commands_exit_code(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """As of a full disk, or of a process that was killed while it wrote and another that wrote later."""
    notes = [
        {"t": 0, "event": "model", "model": "Net", "checkpoints_itself": False},
        {"t": 1, "event": "own", "model": "Net"},
    ]
    text = json.dumps(notes[0]) + '\n{"t": 0.5, "ev' + json.dumps(notes[0]) + "\n" + json.dumps(notes[1]) + "\n"
    script = f"import sys; open({str(tmp_path / 'notes.jsonl')!r}, 'w').write({text!r}); sys.exit(9)"
    assert run_module.run(["--out", str(tmp_path), "--", sys.executable, "-I", "-c", script]) == 9
    assert "the script enables ebbtide on Net itself" in capsys.readouterr().err


def test_an_empty_record_leaves_the_commands_exit_code(tmp_path: Path) -> None:
    script = f"import sys; open({str(tmp_path / 'run.jsonl')!r}, 'w').close(); sys.exit(9)"
    assert run_module.run(["--out", str(tmp_path), "--", sys.executable, "-I", "-c", script]) == 9


def test_a_job_that_is_started_again_keeps_the_earlier_record(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("run.jsonl", "run-1.jsonl", "notes.jsonl", "outside.jsonl"):
        (tmp_path / name).write_text(f'{{"t": 0, "event": "{name}"}}\n')
    assert run_module.run(["--out", str(tmp_path), "--", "true"]) == 0
    assert f"the record of an earlier run in {tmp_path} is kept as run-2.jsonl" in capsys.readouterr().err
    assert {path.name for path in tmp_path.iterdir()} == {".lock", "run-1.jsonl", "run-2.jsonl"}


def test_notes_of_an_attempt_that_trained_nothing_explain_no_later_one(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "notes.jsonl").write_text('{"t": 0, "event": "torch"}\n')
    assert run_module.run(["--out", str(tmp_path), "--", "true"]) == 0
    assert "nothing was offloaded: no process of the command imported torch" in capsys.readouterr().err


@pytest.mark.parametrize("name", ["summary.json", "notes.jsonl"])
def test_what_is_of_no_run_is_kept(tmp_path: Path, name: str) -> None:
    (tmp_path / name).write_text('{"t": "of a comparison, or by hand"}\n[1]\n')
    with pytest.raises(DataError, match=f"(?s)already holds {name} of something other than a run; .*\nhint: "):
        run_module.run(["--out", str(tmp_path), "--", "touch", str(tmp_path / "started")])
    assert (tmp_path / name).exists() and not (tmp_path / "started").exists()


@pytest.mark.parametrize("recorded", [True, False])
def test_a_run_that_still_writes_keeps_its_record(tmp_path: Path, recorded: bool) -> None:
    """If a command starts on several nodes at once, the others have no record yet, and it continues."""
    with locked(tmp_path) as other:
        if recorded:
            (tmp_path / "run.jsonl").write_text("{}\n")
            with pytest.raises(DataError, match=f"another run .process {other} on .* writes into"):
                run_module.run(["--out", str(tmp_path), "--", "true"])
            assert (tmp_path / "run.jsonl").exists()
        else:
            assert run_module.run(["--out", str(tmp_path), "--", "true"]) == 0


def test_a_directory_on_another_machine_is_not_looked_for_here(tmp_path: Path) -> None:
    launcher = tmp_path / "srun"
    launcher.symlink_to("/bin/true")
    argv = ["--disk_path", str(tmp_path / "scratch"), "--"]
    assert run_module.run([*argv, str(launcher)]) == 0
    assert run_module._directory(Path("scratch"), "srun") == str(Path("scratch").absolute())
    with pytest.raises(DiskError, match="does not exist"):
        run_module.run([*argv, "true"])
