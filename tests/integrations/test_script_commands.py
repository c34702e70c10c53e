"""`ebbtide run` and `ebbtide compare` with commands as users type them: real processes from the start."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

import ebbtide.cli
from ebbtide.report import load_run
from ebbtide.script.request import SITE, read_notes
from tests.helpers.interrupts import signalled_before_waiting

LOOP = Path(__file__).with_name("scripts") / "loop.py"
SOURCE = str(Path(ebbtide.cli.__file__).parents[2])
ENVIRONMENT = {**os.environ, "PYTHONPATH": SOURCE, "OMP_NUM_THREADS": "1"}


def ebbtide_command(*argv: object) -> list[str]:
    return [sys.executable, "-m", "ebbtide", *map(str, argv)]


def ran(*argv: object, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        ebbtide_command(*argv), env={**ENVIRONMENT, **environment}, capture_output=True, text=True, check=False
    )


def test_run_offloads_a_script_and_leaves_a_report(tmp_path: Path) -> None:
    """An existing sitecustomize of the environment still runs."""
    (tmp_path / "sitecustomize.py").write_text("import os; os.environ['THEIRS'] = 'ran'; import torch\n")
    script = tmp_path / "script.py"
    script.write_text(
        f"import os, runpy, sys\nprint('theirs:', os.environ['THEIRS'], [p for p in sys.path if p == {str(SITE)!r}])\n"
        f"sys.argv = ['loop.py', 'plain']\nrunpy.run_path({str(LOOP)!r}, run_name='__main__')\nsys.exit(7)\n"
    )
    argv = ["run", "--policy", "minimal", "--out", tmp_path / "out", "--", sys.executable, script]
    result = ran(*argv, PYTHONPATH=os.pathsep.join([str(tmp_path), SOURCE]))
    assert result.returncode == 7, result.stderr
    assert result.stdout.splitlines() == ["theirs: ran []", "the script's last line"]
    said = result.stderr.splitlines()
    assert said[0] == "ebbtide: Layers is offloaded: 3 blocks, policy minimal"
    assert said[1].startswith("ebbtide: 6 steps; ")
    summary = json.loads((tmp_path / "out" / "summary.json").read_text())
    assert (summary["steps"], summary["status"], summary["model"]) == (6, "error", "Layers")
    assert summary["peak_host_bytes"] and load_run(tmp_path / "out").error == "exit code 7"
    requeued = ran("run", "--out", tmp_path / "out", "--", "true").stderr
    assert f"the record of an earlier run in {tmp_path / 'out'} is kept as run-1.jsonl" in requeued
    assert (tmp_path / "out" / "run-1.jsonl").exists() and "6 steps" not in requeued


@pytest.mark.parametrize(
    ("command", "code", "found"),
    [
        (["true"], 0, "nothing was offloaded: no process of the command imported torch"),
        (["sh", "-c", "exit 5"], 5, ""),
        (["sh", "-c", "kill -TERM $$"], 143, ""),
        ([sys.executable, "-I", "-c", "pass"], 0, "`python -I`, `-E` and `-S` keep ebbtide out"),
        ([sys.executable, "-c", "import importlib.util as u; print(u.find_spec('torch').origin)"], 0, "no process"),
    ],
)
def test_commands_that_train_nothing_keep_their_exit_code(command: list[str], code: int, found: str) -> None:
    result = ran("run", "--", *command)
    assert result.returncode == code, result.stderr
    assert found in result.stderr and bool(result.stderr) is bool(found)


def test_an_interpreter_without_ebbtide_is_named(tmp_path: Path) -> None:
    (tmp_path / "torch.py").write_text("")
    environment = {**ENVIRONMENT, "PYTHONPATH": os.pathsep.join([str(SITE), str(tmp_path)]), "EBBTIDE_SCRIPT": "{}"}
    argv = [sys.executable, "-S", "-c", "import sys; sys.path[:0] = sys.argv[1:]; import sitecustomize; import torch"]
    result = subprocess.run(
        [*argv, str(SITE), str(tmp_path)], env=environment, capture_output=True, text=True, check=False
    )
    assert result.returncode == 1
    assert "cannot import ebbtide" in result.stderr and "hint: " in result.stderr


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (["run"], "there is no command; expected a command after --\nhint: such as `ebbtide run -- python train.py`"),
        (["run", "python", "a.py", "--lr", "1"], "no -- before 'python'; .*\nhint: ebbtide run -- python a.py --lr 1"),
        (
            ["run", "--out", "python", "python", "a.py"],
            "before 'python'; .*\nhint: ebbtide run --out python -- python a.py",
        ),
        (["run", "--out=python", "python", "a.py"], "\nhint: ebbtide run --out=python -- python a.py"),
        (["compare", "--out", "python", "python", "a.py"], "\nhint: ebbtide compare --out python -- python a.py"),
        (["run", "--steps", "3", "a.py"], "no -- before 'a.py'; .*\nhint: ebbtide run --steps 3 -- python a.py"),
        (["run", "--", "pyhton", "x.py"], "'pyhton' is no program; .*\nhint: did you mean 'python'"),
        (["run", "--", "accelerate", "launch"], "'accelerate' is no program; .*\nhint: accelerate is not on PATH: "),
        (["run", "--", str(LOOP)], "it is a Python file; .*\nhint: ebbtide run -- python .*loop.py"),
        (["run", "--policy", "minimum", "--", "true"], "policy is 'minimum'; .*\nhint: did you mean 'minimal'"),
        (["run", "--policy", "no.json", "--", "true"], "'no.json' cannot be read .*; expected a plan file\nhint: "),
        (["run", "--policy", "../bad.json", "--", "true"], "'../bad.json' is no plan file of this release .*\nhint: "),
        (["run", "--out", "", "--", "true"], "--out is ''; expected a folder\nhint: "),
        (
            ["run", "--disk_path", "~/no", "--", "true"],
            "disk path '/.*/no' does not exist; .*\nhint: name a .* as disk_path",
        ),
        (["run", "--steps", "0", "--", "true"], "--steps is '0'; expected an integer, 1 or more"),
        (["run", "--steps", "1", "--steps=2", "--", "true"], "--steps is set twice: 1, 2; .*\nhint: leave one out"),
        (["run", "--setps", "1", "--", "true"], "unknown argument '--setps'; .*\nhint: did you mean '--steps'"),
        (["compare", "--"], "there is no command; .*\nhint: such as `ebbtide compare -- python train.py`"),
        (["compare", "python", "train.py"], "'python' is no recipe; .*\nhint: ebbtide compare -- python train.py"),
        (["compare", "train.py"], "'train.py' is no recipe; .*\nhint: ebbtide compare -- python train.py"),
        (
            ["compare", "--steps", "3", "a.py"],
            "'a.py' is no recipe; .*\nhint: ebbtide compare --steps 3 -- python a.py",
        ),
        (["compare", "--modes", "plian", "--", "true"], "unknown mode 'plian'; .*\nhint: did you mean 'plain'"),
        (["compare", "--steps", "3"], "--steps is set, and there is no script; .*\nhint: --max_steps 3"),
        (["compare", "--max_steps", "3", "--", "true"], "unknown argument '--max_steps'; .*\nhint: "),
    ],
)
def test_bad_input_is_refused_before_anything_runs(
    argv: list[str], words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    import re

    (tmp_path / "bin").mkdir()
    for name in ("python", "true"):
        (tmp_path / "bin" / name).symlink_to(sys.executable)
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    (tmp_path / "here").mkdir()
    (tmp_path / "bad.json").write_text("{")
    monkeypatch.chdir(tmp_path / "here")
    assert ebbtide.cli.main(argv) == 2
    assert re.search(f"(?s)error: .*{words}", capsys.readouterr().err)
    assert list((tmp_path / "here").iterdir()) == []


def test_compare_stops_at_a_command_that_trains_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert ebbtide.cli.main(["compare", "--out", str(tmp_path / "a"), "--", "true"]) == 1
    assert "no process of the command imported torch; expected a command that trains" in capsys.readouterr().err
    failing = ["sh", "-c", "echo no such data set; exit 3"]
    assert ebbtide.cli.main(["compare", "--out", str(tmp_path / "b"), "--", *failing]) == 1
    error = capsys.readouterr().err
    assert "ended with exit code 3 before it trained a model; expected a command that trains a model\n" in error
    assert "model\nno such data set\nhint: " in error  # its last lines, between the expectation and the hint
    assert not list(tmp_path.glob("*/round-1/checkpointing"))


def test_ctrl_c_ends_the_script_and_closes_its_record(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(
        f"import runpy\nloop = runpy.run_path({str(LOOP)!r})\nloop['plain'].__globals__['batches'] = lambda: "
        "__import__('itertools').cycle([__import__('torch').arange(64).reshape(1, 64) % 50])\nloop['plain']()\n"
    )
    argv = ebbtide_command("run", "--out", tmp_path / "out", "--", sys.executable, script)
    with subprocess.Popen(argv, env=ENVIRONMENT, stderr=subprocess.PIPE, stdin=subprocess.DEVNULL, text=True) as run:
        assert run.stderr is not None
        assert "is offloaded" in run.stderr.readline()
        run.send_signal(signal.SIGINT)
        said = run.stderr.read()
        assert run.wait(60) == 130
    assert "KeyboardInterrupt" in said  # the script's own traceback
    assert json.loads((tmp_path / "out" / "summary.json").read_text())["status"] == "interrupted"


@pytest.mark.parametrize("name", ["SIGUSR1", "SIGUSR2", "SIGQUIT", "SIGTERM"])
def test_signals_reach_the_command_and_its_code_comes_back(name: str) -> None:
    script = f'trap "exit 4" {name[3:]}; echo ready; for i in $(seq 600); do sleep 0.05; done'
    argv, number = ebbtide_command("run", "--", "sh", "-c", script), getattr(signal, name)
    before = signal.signal(number, signal.SIG_DFL)  # if the shell that started the tests ignores it, so does the child
    try:
        with subprocess.Popen(argv, env=ENVIRONMENT, stdout=subprocess.PIPE, stdin=subprocess.DEVNULL) as run:
            assert run.stdout is not None and run.stdout.readline() == b"ready\n"
            run.send_signal(number)
            assert run.wait(60) == 4
    finally:
        signal.signal(number, before)


def test_a_signal_that_is_ignored_stays_ignored(monkeypatch: pytest.MonkeyPatch) -> None:
    """As in `command &` of a shell without job control."""
    from ebbtide.cli import run, starting

    def checked(command: list[str], **options: object) -> subprocess.Popen[bytes]:
        assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN
        return starting.started(command, **options)

    monkeypatch.setattr(run, "started", checked)
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        assert run.run(["--", "true"]) == 0
    finally:
        signal.signal(signal.SIGINT, before)


def test_a_signal_before_the_command_has_started_reaches_it(monkeypatch: pytest.MonkeyPatch) -> None:
    from ebbtide.cli import run, starting

    def interrupted(command: list[str], **options: object) -> subprocess.Popen[bytes]:
        signal.raise_signal(signal.SIGTERM)
        return starting.started(command, **options)

    monkeypatch.setattr(run, "started", interrupted)
    assert run.run(["--", "sleep", "100"]) == 143


def test_a_signal_just_before_the_system_call_that_waits_reaches_the_command(monkeypatch: pytest.MonkeyPatch) -> None:
    from ebbtide.cli import run

    came = signalled_before_waiting(signal.SIGTERM, monkeypatch)
    assert run.run(["--", "sleep", "10"]) == 143
    assert len(came) == 1


def test_codes_come_back_where_the_parent_ignores_the_ends_of_children() -> None:
    """As a service does whose children need not be awaited; programs that it starts inherit that."""
    before = signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    try:
        run = subprocess.Popen(ebbtide_command("run", "--", "sh", "-c", "exit 5"), env=ENVIRONMENT)
    finally:
        signal.signal(signal.SIGCHLD, before)
    assert run.wait() == 5


def test_a_process_that_outlives_the_command_trains_on(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(
        "import os, runpy, shutil, sys\nfrom ebbtide.script.request import Request\n"
        "shutil.rmtree(Request.received().folder)\nimport torch\n"
        f"sys.argv = ['loop.py', 'plain']\nrunpy.run_path({str(LOOP)!r}, run_name='__main__')\n"
    )
    result = ran("run", "--", sys.executable, script)
    assert (result.returncode, result.stdout) == (0, "the script's last line\n"), result.stderr
    assert "Layers is offloaded" in result.stderr


@pytest.mark.slow
@pytest.mark.timeout(1800)  # up to six starts of Python and torch in sequence
@pytest.mark.parametrize("launcher", ["torchrun", "accelerate"])
def test_ranks_of_a_launcher_are_switched_and_one_records(launcher: str, tmp_path: Path) -> None:
    start = {
        "torchrun": ["torch.distributed.run", "--standalone", "--nproc_per_node", "2"],
        "accelerate": ["accelerate.commands.launch", "--cpu", "--num_processes", "1", "--num_machines", "1"],
    }[launcher]
    shape = "distributed" if launcher == "torchrun" else "accelerated"
    argv = ["--rounds", "1", "--steps", "4", "--modes", "plain,ebbtide-minimal", "--out", tmp_path / "out", "--"]
    result = ran("compare", *argv, sys.executable, "-m", *start, LOOP, shape)
    assert result.returncode == 0, result.stdout + result.stderr
    assert "Trained parameters after the last step: bitwise equal in all runs." in result.stdout
    merged = json.loads((tmp_path / "out" / "summary.json").read_text())
    assert [mode["parameters_equal"] for mode in merged["modes"]] == [True, True]
    assert [mode["steps"] for mode in merged["modes"]] == [4, 4]
    ranks = [note["main"] for note in read_notes(tmp_path / "out/round-1/plain") if note["event"] == "end"]
    assert sorted(ranks) == ([False, True] if launcher == "torchrun" else [True])


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_a_script_without_seeds_is_not_called_different(tmp_path: Path) -> None:
    argv = ["--rounds", "2", "--steps", "3", "--modes", "plain,ebbtide", "--out", tmp_path / "out", "--"]
    result = ran("compare", *argv, sys.executable, LOOP, "unseeded")
    assert result.returncode == 0, result.stdout + result.stderr
    assert "runs of plain differ from one another" in result.stdout
    merged = json.loads((tmp_path / "out" / "summary.json").read_text())
    assert [mode["loss_equal"] for mode in merged["modes"]] == [None, None]
