import importlib.util
import io
import itertools
import json
import os
import re
import signal
import subprocess
import sys
import textwrap
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

from ebbtide.base.errors import ConfigError, DataError, EbbtideError, TrainingError
from ebbtide.base.runs import read_events
from ebbtide.cli import compare as module
from ebbtide.cli import lockstep as lockstep_module
from ebbtide.cli.board import Board
from ebbtide.cli.compare import compare, run
from ebbtide.cli.progress import plain_console
from ebbtide.cli.report import _last_round
from ebbtide.cli.rounds import DEFAULT_MODES, MORE_FOR_MINIMAL, Rounds, announce, check_folder, run_rounds
from ebbtide.profiling.auto import MEASURED_STEPS
from ebbtide.profiling.minimal import ROUNDS
from ebbtide.report import comparison_text, load_run

FAKE = Path(__file__).with_name("fake_child.py")
CHILD = [sys.executable, str(FAKE)]
MIB = 1024**2


def console():
    screen = plain_console(io.StringIO())
    screen.width = 200
    return screen


def compare_children(arguments, *, out, modes=DEFAULT_MODES, rounds=1, command=CHILD, screen=None, **options):
    """Compare as ``compare`` does, with another program in place of the recipe."""
    screen = console() if screen is None else screen
    steps = dict(itertools.pairwise([*arguments, ""])).get("--max_steps")
    plan = Rounds(modes=modes, rounds=rounds, out=out, steps=None if steps is None else int(steps))
    announce(screen, plan)

    def start(mode, folder):
        return [*command, *arguments, *module._flags("sft", mode, arguments, folder)], dict(os.environ)

    return run_rounds(plan, start, {}, screen, **options)


@pytest.fixture(scope="module")
def done(tmp_path_factory):
    """One comparison of two rounds, looked at by several tests."""
    out, screen = tmp_path_factory.mktemp("compare") / "out", console()
    return compare_children(["--max_steps", "7"], rounds=2, out=out, screen=screen), screen.file.getvalue()


def test_each_mode_gets_its_flags_and_its_memory_is_seen_from_outside(done):
    result, _ = done
    assert result.exit_code == 0
    by_mode = {mode["mode"]: mode for mode in result.modes}
    assert list(by_mode) == ["plain", "checkpointing", "ebbtide"]
    for name, height in (("plain", 96), ("checkpointing", 16), ("ebbtide", 32)):
        outside = by_mode[name]["outside"]
        assert outside["activation_bytes"] == pytest.approx(height * MIB, abs=6 * MIB), name
        assert outside["peak_bytes"] >= outside["floor_bytes"] + outside["activation_bytes"] - 6 * MIB
        assert outside["samples"] >= 42
    assert by_mode["ebbtide"]["saved_percent"] == pytest.approx(100 * (1 - 32 / 96), abs=8)


def test_ratios_and_losses_are_against_plain(done):
    ratios = {mode["mode"]: mode["step_ratio"] for mode in done[0].modes}
    assert ratios["checkpointing"] == {"median": 2.0, "low": 2.0, "high": 2.0}
    assert ratios["ebbtide"]["median"] == pytest.approx(1.5)
    assert [mode["loss_equal"] for mode in done[0].modes] == [True, True, True]
    assert [mode["rounds"] for mode in done[0].modes] == [2, 2, 2]


def test_modes_step_all(done):
    assert done[0].environment["orders"] == ["plain checkpointing ebbtide", "checkpointing ebbtide plain"]
    starts = {
        mode: [read_events(done[0].out / f"round-{turn}" / mode / "run.jsonl")[0]["t"] for turn in (1, 2)]
        for mode in ("plain", "checkpointing", "ebbtide")
    }
    assert sorted(starts, key=lambda mode: starts[mode][0]) == ["plain", "checkpointing", "ebbtide"]
    assert sorted(starts, key=lambda mode: starts[mode][1]) == ["checkpointing", "ebbtide", "plain"]


def test_summary_page_and_table_are_written(done):
    result, screen = done
    summary = json.loads((result.out / "summary.json").read_text())
    assert summary == {"schema": 1, "modes": result.modes, "environment": result.environment}
    page = (result.out / "report.html").read_text()
    assert "checkpointing" in page and "lowest and highest round" in page
    for words in ("round 1 of 2  plain", "round 2 of 2  ebbtide", "×2.00", "equal", "report.html"):
        assert words in screen, words


def test_what_the_first_round_decides_holds_for_all(tmp_path, monkeypatch):
    """Ordinary training begins it, whatever the order of --modes: another mode shows too little memory."""
    seen = []

    def fake(name, order, *args, alone, **options):
        seen.append((name, order, alone))
        return True

    monkeypatch.setattr("ebbtide.cli.rounds.run_round", fake)
    compare_children([], modes=["ebbtide", "plain"], rounds=3, out=tmp_path / "out")
    plain_first, other = ["plain", "ebbtide"], ["ebbtide", "plain"]
    assert seen == [("round 1", plain_first, None), ("round 2", other, True), ("round 3", plain_first, True)]


def test_a_narrow_terminal_gets_a_table_without_broken_numbers(done):
    narrow = console()
    narrow.width = 80
    Board(out=done[0].out, modes=("plain",), console=narrow, warm_up=3).print_table(done[0].modes)
    assert all(len(line) <= 80 for line in narrow.file.getvalue().splitlines())
    lines = narrow.file.getvalue().splitlines()
    assert next(line for line in lines if line.startswith("checkpointing")).split()[-2:] == ["×2.00", "equal"]
    assert "…" not in narrow.file.getvalue()


def test_a_terminal_that_is_too_narrow_for_the_table_breaks_lines_and_no_numbers(done):
    screens = [console(), console()]
    for screen, width in zip(screens, (20, 80), strict=True):
        screen.width = width
        Board(out=done[0].out, modes=("plain",), console=screen, warm_up=3).print_table(done[0].modes)
    narrow, usual = (screen.file.getvalue() for screen in screens)
    assert narrow == usual


def test_a_column_without_a_figure_is_left_out(done):
    wide = [console() for _ in range(2)]
    unknown = [{**mode, "tokens_per_second": None} for mode in done[0].modes]
    for modes, screen in zip((done[0].modes, unknown), wide, strict=True):
        Board(out=done[0].out, modes=("plain",), console=screen, warm_up=3).print_table(modes)
    assert ["tokens" in screen.file.getvalue() for screen in wide] == [True, False]


SHOW = "import os; print({n: v for n, v in sorted(os.environ.items()) if n.startswith(('MALLOC_', 'THP_'))})"


def test_every_mode_has_the_callers_environment_and_one_has_more(tmp_path, monkeypatch):
    for name in ("MALLOC_MMAP_THRESHOLD_", "MALLOC_TRIM_THRESHOLD_", "THP_MEM_ALLOC_ENABLE", "OMP_NUM_THREADS"):
        monkeypatch.delenv(name, raising=False)
    out, child, modes = tmp_path / "out", [sys.executable, "-c", SHOW], list(module.MODES)
    result = compare_children([], modes=modes, out=out, command=child)
    seen = {mode: (out / "round-1" / mode / "output.txt").read_text().strip() for mode in modes}
    own = {"MALLOC_MMAP_THRESHOLD_": "1048576", "MALLOC_TRIM_THRESHOLD_": "1048576"}
    assert seen == {mode: str(own if mode == "plain-malloc" else {}) for mode in modes}
    assert result.environment["variables"] == {"plain-malloc": own}


def test_what_the_caller_has_set_is_passed_on_and_recorded(tmp_path, monkeypatch):
    monkeypatch.setenv("THP_MEM_ALLOC_ENABLE", "0")
    child = [sys.executable, "-c", SHOW]
    result = compare_children([], modes=["plain"], out=tmp_path / "out", command=child)
    assert result.environment["variables"]["all"]["THP_MEM_ALLOC_ENABLE"] == "0"
    assert "THP_MEM_ALLOC_ENABLE" in (tmp_path / "out" / "round-1" / "plain" / "output.txt").read_text()
    assert result.exit_code == 1


def test_it_says_at_once_what_it_will_do(done):
    head = done[1].partition("round 1 of 2")[0]
    assert "3 modes, 2 rounds in turn: 6 runs of 7 steps, each in a fresh process" in head
    assert "checkpointing    the trainer's own activation checkpointing" in head
    assert "At least the first 4 steps of every run warm up" in head
    assert "\r" not in done[1] and "1 of 6  round 1, plain  starting" in head


def test_steps_before_the_plan_count_in_no_mode(done):
    """The first four steps of the fake are ten times as slow, and their forwards hold nothing."""
    for mode in done[0].modes:
        assert (mode["steps"], mode["warm_up_steps"], mode["timed_steps"]) == (7, 4, 3)
        assert mode["step_seconds_median"] < 0.1
    assert "The first 4 of 7 steps warm up and do not count." in done[1]


def test_too_few_steps_for_a_plan_are_reported(tmp_path):
    screen = console()
    compare_children(["--max_steps", "3"], modes=["plain"], out=tmp_path, screen=screen)
    assert "3 steps are too few to measure Auto's plan, which starts after 3\nhint: --max_steps 10" in (
        screen.file.getvalue()
    )


def test_a_plan_that_is_corrected_late_prolongs_the_warm_up_of_every_mode(tmp_path):
    screen = console()
    arguments = ["--max_steps", "7", "--plan_after", "4"]
    result = compare_children(arguments, modes=["plain", "ebbtide"], out=tmp_path, screen=screen)
    assert [mode["warm_up_steps"] for mode in result.modes] == [5, 5]
    assert "The first 5 of 7 steps warm up" in screen.file.getvalue()
    written = json.loads((tmp_path / "round-1" / "plain" / "summary.json").read_text())
    assert written["warm_up_steps"] == 5


@pytest.mark.parametrize(("after", "left"), [(4, False), (5, True)])
def test_a_plan_that_leaves_few_steps_to_time_is_named(tmp_path, after, left):
    screen = console()
    arguments = ["--max_steps", "8", "--plan_after", str(after)]
    compare_children(arguments, modes=["plain", "ebbtide"], out=tmp_path, screen=screen)
    words = "The last plan was made after step 5, which left 2 steps of each run to time; use a larger --max_steps."
    assert (words in screen.file.getvalue()) is left


def test_a_plan_that_is_corrected_too_late_is_named(tmp_path):
    screen = console()
    arguments = ["--max_steps", "9", "--plan_after", "8"]
    result = compare_children(arguments, modes=["plain", "ebbtide"], out=tmp_path, screen=screen)
    assert [mode["warm_up_steps"] for mode in result.modes] == [5, 5]
    assert "The last plan was made after step 8, so some of the counted steps" in screen.file.getvalue()


def test_the_contents_of_the_peak_come_from_the_runs_own_record(done):
    (line,) = [line for line in done[1].splitlines() if line.startswith("ebbtide: ")]
    assert "losses bitwise equal (against plain); what is left of the peak: " in line
    held = re.search(r"activations ([0-9.]+) MiB", line)
    assert "weights 8.0 MiB" in line and held is not None and 28 < float(held[1]) < 34, line  # 32 MiB, by its pages


def test_a_child_that_fails_is_shown_and_the_others_kept(tmp_path):
    screen, out = console(), tmp_path / "out"
    result = compare_children(["--fail", "checkpointing"], out=out, screen=screen)
    assert result.exit_code == 1
    assert [mode["status"] for mode in result.modes] == ["ok", "error", "ok"]
    assert result.modes[1]["failures"] == ["round 1: exit code 1"]
    assert result.modes[2]["step_ratio"]["median"] == pytest.approx(1.5)
    assert "the fake child was told to fail" in screen.file.getvalue()
    assert "checkpointing: round 1: exit code 1" in (out / "report.html").read_text()


def test_a_child_that_was_killed_may_have_run_out_of_memory(tmp_path):
    screen, out = console(), tmp_path / "out"
    result = compare_children(["--killed", "ebbtide"], out=out, screen=screen)
    assert result.modes[2]["failures"] == ["round 1: SIGKILL (the system sends SIGKILL where memory is full), killed"]
    assert result.exit_code == 1 and result.modes[0]["status"] == "ok"
    assert "ebbtide: nothing was measured (against plain)." in screen.file.getvalue()


def test_a_child_that_fails_after_its_last_step_is_not_called_ok(tmp_path):
    result = compare_children(["--late", "checkpointing"], out=tmp_path / "out")
    assert result.modes[1]["failures"] == ["round 1: exit code 3, after its last step"]
    folder = tmp_path / "out" / "round-1" / "checkpointing"
    assert load_run(folder).error == "exit code 3" and load_run(folder).summary["status"] == "error"
    assert [run.name for run in _last_round(tmp_path / "out", DEFAULT_MODES, "text")[0]] == ["plain", "ebbtide"]


def test_warnings_are_shown_once_with_the_modes_that_logged_them(done, tmp_path):
    result, shown = done
    warning = "warning (checkpointing, ebbtide): the cache is on"
    assert shown.count(warning) == 1
    assert shown.count("the cache is on") == 1
    runs = [load_run(result.out / "round-1" / mode) for mode in DEFAULT_MODES]
    named = {mode["mode"]: mode for mode in result.modes}
    assert comparison_text(named, runs).count("the cache is on") == 1


def test_a_run_that_is_refused_after_another_was_accepted_is_one_that_failed(tmp_path):
    def refuse(ended):
        if ended.code:
            raise TrainingError("it trained nothing", expected="a command that trains", hint="none")

    result = compare_children(["--fail", "ebbtide"], out=tmp_path / "out", refuse=refuse)
    assert [mode["status"] for mode in result.modes] == ["ok", "ok", "error"]
    assert (tmp_path / "out" / "report.html").exists()
    with pytest.raises(TrainingError, match="it trained nothing"):
        compare_children(["--fail", "plain"], out=tmp_path / "first", refuse=refuse)


def test_parameters_are_called_equal_only_of_runs_that_were_compared(tmp_path):
    def said(**sums):
        board = Board(out=tmp_path, modes=("plain", "ebbtide", "other"), console=console(), warm_up=1)
        events = {mode: [{"event": "parameters", "checksum": one}] for mode, one in sums.items()}
        board._rounds = {
            1: {m: SimpleNamespace(all=lambda kind, m=m: events[m], summary={"loss": [1.0]}) for m in sums}
        }
        return board._compare_parameters([{"mode": mode} for mode in ("plain", "ebbtide", "other")])

    assert said(plain="a") == []
    (line,) = said(plain="a", ebbtide="a")
    assert line.endswith("bitwise equal in plain, ebbtide.")
    (line,) = said(plain="a", ebbtide="a", other="a")
    assert line.endswith("bitwise equal in all runs.")


@pytest.mark.parametrize(
    ("lockstep", "spread"), [(True, "quartiles of the steps"), (False, "lowest and highest round")]
)
def test_the_spread_is_that_of_what_is_compared(tmp_path, lockstep, spread):
    """A mode that is compared alone takes no steps in turn with another."""
    board = Board(out=tmp_path, modes=("plain",), console=console(), warm_up=1)
    summary = {"step_seconds": [1.0, 2.0], "lockstep": lockstep}
    board._rounds = {number: {"plain": SimpleNamespace(summary=summary)} for number in (1, 2, 3)}
    assert board._spread() == spread


def test_rounds_of_plain_that_differ_accuse_no_mode(tmp_path):
    """A recipe records no checksums of its parameters."""
    board = Board(out=tmp_path, modes=("plain", "ebbtide"), console=console(), warm_up=1)
    runs = [SimpleNamespace(all=lambda kind: [], summary={"loss": [loss]}) for loss in (1.0, 2.0)]
    board._rounds = {number: {"plain": run, "ebbtide": runs[0]} for number, run in enumerate(runs, start=1)}
    modes = [{"mode": mode, "loss_equal": False} for mode in ("plain", "ebbtide")]
    (line,) = board._compare_parameters(modes)
    assert "runs of plain differ from one another" in line and "\nhint: " in line
    assert [mode["loss_equal"] for mode in modes] == [None, None]


@pytest.mark.parametrize("again", [1.0, 2.0])
def test_a_second_run_of_plain_shows_whether_training_is_deterministic(tmp_path, again):
    """With one round, too, in which other modes may differ for the same reason."""
    names, checksums = ("plain", "ebbtide", "plain-again"), {1.0: "a", 2.0: "b"}
    board = Board(out=tmp_path, modes=names, console=console(), warm_up=1)
    board._rounds = {
        1: {
            mode: SimpleNamespace(all=lambda kind, loss=loss: [{"checksum": checksums[loss]}], summary={"loss": [loss]})
            for mode, loss in zip(names, (1.0, 2.0, again), strict=True)
        }
    }
    modes = [{"mode": mode, "loss_equal": mode == "plain"} for mode in names]
    (line,) = board._compare_parameters(modes)
    if again == 2.0:
        assert "runs of plain and plain-again differ from one another" in line and "\nhint: " in line
        assert [(mode["loss_equal"], mode["parameters_equal"]) for mode in modes] == [(None, None)] * 3
    else:
        assert line.endswith("differ from plain's: ebbtide."), "no doubt is left"


def test_notes_of_an_attempt_that_trained_nothing_explain_no_later_one(tmp_path):
    folder = tmp_path / "out" / "round-1" / "plain"
    folder.mkdir(parents=True)
    (folder / "notes.jsonl").write_text('{"t": 0, "event": "torch"}\n')
    with pytest.raises(TrainingError, match="no process of the command imported torch"):
        run(["--out", str(tmp_path / "out"), "--rounds", "1", "--", "true"])


def test_one_different_bit_makes_losses_differ(tmp_path):
    arguments = ["--uneven", "ebbtide"]
    result = compare_children(arguments, modes=["plain", "ebbtide"], out=tmp_path)
    assert result.modes[1]["loss_equal"] is False
    assert "differ" in (tmp_path / "report.html").read_text()


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143), (signal.SIGHUP, 143)])
def test_an_interrupt_ends_the_child_and_leaves_readable_files(tmp_path, number, code):
    script = textwrap.dedent("""
        import os, signal, sys
        from pathlib import Path
        from ebbtide.cli.progress import plain_console
        from ebbtide.cli.rounds import Rounds, run_rounds
        signal.signal(signal.SIGHUP, signal.SIG_DFL)  # under nohup it would be ignored, and stay so
        plan = Rounds(modes=["plain"], rounds=2, out=Path(sys.argv[2]), steps=None)
        child = [sys.executable, sys.argv[1], "--wait", "1"]
        child += ["--activation_cpu_offload", "false", "--gradient_checkpointing", "false", "--output_dir"]
        start = lambda mode, folder: ([*child, str(folder)], dict(os.environ))
        sys.exit(run_rounds(plan, start, {}, plain_console()).exit_code)
    """)
    out = tmp_path / "out"
    record = out / "round-1" / "plain" / "run.jsonl"
    command = [sys.executable, "-c", script, str(FAKE), str(out)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as parent:
        wait_until(lambda: record.exists() and '"waiting"' in record.read_text(), parent)
        parent.send_signal(number)
        screen, _ = parent.communicate(timeout=60)
    assert parent.returncode == code
    assert "the processes were ended; none had finished: there is no report" in screen
    child = read_events(record)[0]["pid"]
    assert str(out) not in command_line_of(child)  # its number may belong to another process
    assert read_events(record)[-1]["status"] == "interrupted"
    assert json.loads((out / "summary.json").read_text())["modes"][0]["rounds"] == 0
    assert not (out / "round-2").exists()
    assert f"hint: to compare again, name another folder with --out, or remove {out}" in screen
    with pytest.raises(DataError, match="a comparison without report.html; .*\nhint: .*--out, or remove it"):
        compare([], out=out)


def command_line_of(pid):
    try:
        return Path(f"/proc/{pid}/cmdline").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return ""


def wait_until(condition, process):
    """Wait for another process to reach a state, for a limited time, or until it ends."""
    wake, until = threading.Event(), time.monotonic() + 60
    while not condition():
        assert process.poll() is None, "the process ended early"
        assert time.monotonic() < until
        wake.wait(0.01)


@pytest.mark.parametrize(
    ("changes", "error", "words"),
    [
        ({"modes": ["plian"]}, ConfigError, "(?s)unknown mode 'plian'.*did you mean 'plain'"),
        ({"modes": ["plain", "plain"]}, ConfigError, "each mode once"),
        ({"modes": []}, ConfigError, "modes are none"),
        ({"rounds": 0}, ConfigError, "rounds is 0; expected 1 or more"),
        ({"arguments": ["--gradient-checkpointing=true"]}, ConfigError, "(?s)--gradient_checkpointing .*hint"),
        ({"arguments": ["--output_dir", "x"]}, ConfigError, "(?s)--output_dir .*--out"),
    ],
)
def test_what_cannot_be_compared_is_refused_before_anything_runs(tmp_path, changes, error, words):
    values = {"arguments": [], "out": tmp_path / "out", **changes}
    with pytest.raises(error, match=words):
        compare(values.pop("arguments"), **values)
    assert not (tmp_path / "out").exists()


def test_a_folder_that_holds_a_comparison_is_refused(done):
    with pytest.raises(DataError, match="already holds a comparison"):
        compare([], out=done[0].out)


def test_the_verb_keeps_its_own_flags_and_passes_the_rest_on(monkeypatch, tmp_path):
    seen = {}

    def fake(arguments, **options):
        seen.update(options, arguments=arguments)
        return module.CompareResult(out=options["out"], modes=[{"status": "ok"}], environment={})

    monkeypatch.setattr(module, "compare", fake)
    words = ["sft", "file.yaml", "--rounds", "2", "--model", "m", "--modes", "plain,ebbtide", "--out", str(tmp_path)]
    assert run([*words, "--max_steps=3"]) == 0
    assert seen == {
        "arguments": ["file.yaml", "--model", "m", "--max_steps=3"],
        "recipe": "sft",
        "modes": ["plain", "ebbtide"],
        "rounds": 2,
        "out": tmp_path,
    }


@pytest.mark.parametrize(
    ("argv", "recipe", "bounded"),
    [
        (["sft", "--model", "m"], "sft", False),
        (["--rounds", "1", "grpo", "--max_steps", "6"], "grpo", True),
        (["video", "--max_train_steps", "6"], "video", True),
        (["sft", "--max-steps=6"], "sft", True),
        (["sft", "trainer.total_epochs=2"], "sft", True),
        (["grpo", "trainer.total_training_steps=2"], "grpo", True),
        (["--rounds", "1", "file.yaml"], "sft", True),
        (["sft", "--dataset", "data.yaml"], "sft", False),
        (["sft", "runs/lr=1e-4/config.yaml"], "sft", True),
        (["sft", "data.max_length=9"], "sft", False),
        (["sft", "--run_name", "max_steps=9"], "sft", False),
        (["sft", "--run_name", "trainer.total_epochs=2"], "sft", False),
        (["sft", "--bf16", "--run_name", "a", "trainer.total_epochs=2"], "sft", True),
    ],
)
def test_the_default_length_is_for_runs_without_one(monkeypatch, argv, recipe, bounded):
    seen = []

    def fake(arguments, *, recipe, **_options):
        seen.append((recipe, arguments[-2:] != ["--max_steps", "10"]))
        return SimpleNamespace(exit_code=0)

    monkeypatch.setattr(module, "compare", fake)
    run(argv)
    assert seen == [(recipe, bounded)]


@pytest.mark.parametrize(
    ("argv", "length"),
    [(["sft"], ["--max_steps", "14"]), (["sft", "--max_steps", "6"], ["--max_steps", "6"]), (["--", "python"], 16)],
)
def test_where_minimal_is_compared_runs_are_longer_by_default(monkeypatch, argv, length):
    seen = []

    def fake(arguments, *, steps=None, **_options):
        seen.append(steps or arguments[-2:])
        return SimpleNamespace(exit_code=0)

    monkeypatch.setattr(module, "compare", fake)
    monkeypatch.setattr(module, "compare_script", fake)
    assert 1 + 2 * ROUNDS - (1 + MEASURED_STEPS) == MORE_FOR_MINIMAL  # until Minimal and Auto have chosen
    run(["--modes", "plain,ebbtide-minimal", *argv])
    assert seen == [length]


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (["--rounds", "many"], "--rounds is 'many'; expected an integer, 1 or more\nhint: such as --rounds 3"),
        (["--rounds", "-1"], "--rounds is '-1'; expected an integer"),
        (
            ["--rounds"],
            "expected one argument; expected arguments of `ebbtide compare`\nhint: `ebbtide compare --help`",
        ),
        (["--out", ""], "--out is ''; expected a folder"),
        (["--out", "~nobody-here/x", "--", "true"], "--out is '~nobody-here/x', and there is no such home folder"),
        (["sft", "--modes", "plain,foo"], "unknown mode 'foo'; expected some of .*\nhint: such as --modes plain,"),
        (["stf"], "no recipe 'stf'; expected one of sft, grpo, video, or a YAML file\nhint: did you mean 'sft'"),
        (["nonsense"], "there is no recipe 'nonsense'; .*\nhint: such as `ebbtide compare sft --max_steps 10`"),
        (["sft", "nonsense"], "there is no file 'nonsense'; .*\nhint: name a YAML file, or pass only flags"),
        (["no.yaml"], "there is no file 'no.yaml'"),
        (
            ["sft", "--modle", "x"],
            "unknown flag 'modle'; expected a flag of `ebbtide sft`\nhint: did you mean .*'model'",
        ),
        (["--mode", "plain"], "unknown flag 'mode'; .*\nhint: did you mean .*'modes'"),
        (["--max_steps", "4", "--round", "2"], "unknown flag 'round'; .*\nhint: did you mean 'rounds'"),
        (["sft", "--max_steps", "0"], "max_steps is 0; expected 1 or more, or -1"),
        (["sft", "--model", "./nothing"], "there is no model folder './nothing'"),
        (["sft", "--dataset", "nothing.jsonl"], "data set file 'nothing.jsonl' does not exist"),
        (["sft", "--disk_path", "nothing"], "disk path 'nothing' does not exist"),
        (["sft", "--modes", "plain", "--policy", "nonsense"], "policy is 'nonsense'; expected one of .*auto"),
        (["--modes", "plain,ebbtide-minimal", "--policy", "offload"], "policy is 'offload' .*gradient_check"),
        ([], "nothing to compare; .*\nhint: `ebbtide compare sft --max_steps 10`, or `ebbtide compare -- python"),
        (["--modes", "plain"], "nothing to compare; expected one of sft, grpo, video, or a command after --"),
        (["sft", "--modes", "plian"], "unknown mode 'plian'.*\nhint: did you mean 'plain'"),
        (["sft", "--modes", ","], "modes are none; expected each mode once\nhint: such as --modes plain"),
    ],
)
def test_bad_arguments_start_no_child_and_leave_no_folder(tmp_path, monkeypatch, argv, words):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(lockstep_module, "Child", lambda *args, **options: pytest.fail("a child was started"))
    with pytest.raises(EbbtideError, match=f"(?s){words}"):
        run(argv)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(("argv", "extra"), [(["sft"], "recipes"), (["--", "true"], "cli,track")])
def test_a_missing_package_is_named_with_its_extra(tmp_path, monkeypatch, argv, extra):
    monkeypatch.chdir(tmp_path)
    found = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *rest: None if name == "rich" else found(name, *rest))
    with pytest.raises(EbbtideError, match=f"rich is not installed; .*\nhint: pip install 'ebbtide.{extra}.'"):
        run(argv)
    assert list(tmp_path.iterdir()) == []


def test_settings_of_the_modes_in_a_file_are_reported_as_without_effect(tmp_path, monkeypatch):
    file = tmp_path / "run.yaml"
    file.write_text("activation_cpu_offload: true\noutput_dir: elsewhere\nmax_steps: 2\n")
    screen = console()
    monkeypatch.setattr("ebbtide.cli.rounds.plain_console", lambda: screen)
    monkeypatch.setattr(module, "run_rounds", lambda *_: None)
    monkeypatch.setattr(module, "check", lambda *_: None)
    compare([str(file)], modes=["plain"], out=tmp_path / "out")
    assert "activation_cpu_offload, output_dir: compare sets these; their values" in screen.file.getvalue()


def test_a_comparison_in_which_nothing_began_does_not_block_the_next(tmp_path):
    out = tmp_path / "out"
    broken = [sys.executable, "-c", "raise SystemExit(1)"]
    assert compare_children([], modes=["plain"], rounds=2, out=out, command=broken).exit_code == 1
    assert (out / "summary.json").exists()
    check_folder(out)
    result = compare_children(["--max_steps", "3"], modes=["plain"], out=out)
    assert result.exit_code == 0
    with pytest.raises(DataError, match="already holds a comparison; .*\nhint: name another with --out"):
        compare([], modes=["plain"], rounds=1, out=out)


def test_a_folder_that_cannot_be_made_or_holds_a_run_is_refused(tmp_path):
    (tmp_path / "file").touch()
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "summary.json").write_text("{}")
    for name in ("report.html", "run.jsonl"):
        (tmp_path / name).mkdir()
        (tmp_path / name / name).touch()
    for out, words in (
        (tmp_path / "file", "cannot be made: .*file is a file"),
        (tmp_path / "file" / "below", "cannot be made: .*file is a file"),
        (tmp_path / "run", r"already holds a run \(summary.json\)"),
        (tmp_path / "report.html", r"already holds a run \(report.html\)"),
        (tmp_path / "run.jsonl", r"already holds a run \(run.jsonl\)"),
    ):
        with pytest.raises(DataError, match=f"{words}.*\nhint: name another with --out"):
            compare([], modes=["plain"], rounds=1, out=out)


def test_a_folder_that_only_the_system_refuses_is_an_error_before_a_child_starts(tmp_path):
    """Root may write to /proc, and can make nothing there; a loop of links ends nowhere."""
    (tmp_path / "loop").symlink_to(tmp_path / "loop")
    for out in (Path("/proc/result"), tmp_path / "loop", tmp_path / "loop/below"):
        with pytest.raises(DataError, match=f"{out} cannot be made .*\nhint: name another with --out"):
            compare_children([], out=out)


def test_children_of_a_recipe_do_not_save_models_unless_asked(tmp_path):
    assert module._flags("sft", "ebbtide", [], tmp_path) == [
        "--activation_cpu_offload", "true", "--gradient_checkpointing", "false", "--output_dir", str(tmp_path),
        "--save", "false",
    ]  # fmt: skip
    assert "false" not in module._flags("sft", "ebbtide-minimal", ["--save=true"], tmp_path)


def test_it_says_what_it_will_do_before_the_recipe_is_imported(tmp_path, monkeypatch):
    screen = console()

    def refuse(*_arguments):
        assert "1 mode, 3 rounds in turn: 3 runs of 5 steps" in screen.file.getvalue()
        raise ConfigError("found", expected="expected", hint="hint")

    monkeypatch.setattr("ebbtide.cli.rounds.plain_console", lambda: screen)
    monkeypatch.setattr(module, "check", refuse)
    with pytest.raises(ConfigError, match="found"):
        compare(["--max_steps", "5"], modes=["plain"], out=tmp_path / "out")
