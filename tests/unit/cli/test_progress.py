"""Progress of a comparison, with a clock and run files made by hand."""

import io
import json
import os

import pytest
from rich.console import Console

from ebbtide.cli.progress import RunProgress, WorkProgress, duration, plain_console


class Clock:
    now = 0.0

    def __call__(self):
        return self.now


class Followed:
    """Progress over two runs of four steps, without a terminal."""

    def __init__(self, folder, *, steps=4, terminal=False):
        self.clock, self.folder, self.file = Clock(), folder, io.StringIO()
        plain = {"markup": False, "highlight": False, "soft_wrap": True}
        console = Console(file=self.file, width=200, force_terminal=terminal, **plain)
        self.progress = RunProgress(console, runs=2, steps=steps, clock=self.clock)

    def at(self, seconds, *events):
        self.clock.now = seconds
        with (self.folder / "run.jsonl").open("a") as file:
            for event, fields in events:
                file.write(json.dumps({"t": seconds, "event": event, **fields}) + "\n")
        self.progress.look()

    def lines(self):
        return self.file.getvalue().splitlines()


FORWARD = ("phase", {"name": "forward", "edge": "begin", "step": 1})


def step(seconds):
    return ("step", {"step": 1, "seconds": seconds})


def test_plain_lines_say_how_far_and_how_long(tmp_path):
    followed = Followed(tmp_path)
    followed.progress.begin("round 1, plain", tmp_path)
    (tmp_path / "output.txt").write_text("INFO making the model (once)\nhalf a bar \r 3 %")
    followed.at(5.0)
    followed.at(12.0, ("phase", {"name": "load", "edge": "begin", "step": 0}))
    followed.at(20.0, FORWARD)
    followed.at(31.0)
    followed.at(32.0, step(12.0))
    followed.at(38.0, step(6.0))
    followed.at(44.0, step(6.0))
    assert followed.lines() == [
        "1 of 2  round 1, plain  starting, 0 s",
        "1 of 2  round 1, plain  starting, 12 s: making the model (once)",
        "1 of 2  round 1, plain  0 of 4 steps done",
        "1 of 2  round 1, plain  0 of 4 steps done, the next for 11 s",
        # 3 steps of 12 s, and a run of 20 s and 4 steps.
        "1 of 2  round 1, plain  1 of 4 steps done, 12.0 s each; about 2 min left in all",
        # A step of 6 s, the median, and a run of 20 s and 4 steps.
        "1 of 2  round 1, plain  3 of 4 steps done, 6.0 s each; about 50 s left in all",
    ]
    assert "\r" not in followed.file.getvalue()


def test_the_next_run_is_expected_to_be_like_the_last(tmp_path):
    followed = Followed(tmp_path)
    followed.progress.begin("round 1, plain", tmp_path)
    followed.at(20.0, FORWARD)
    followed.at(60.0, *[step(10.0)] * 4)
    followed.progress.end()
    (tmp_path / "next").mkdir()
    followed.progress.begin("round 1, ebbtide", tmp_path / "next")
    assert followed.progress.seconds_left() == 60.0
    assert followed.lines()[-1] == "2 of 2  round 1, ebbtide  starting, 0 s; about 60 s left in all"


@pytest.mark.parametrize("steps", [4, None])
def test_nothing_is_promised_before_it_can_be_known(tmp_path, steps):
    followed = Followed(tmp_path, steps=steps)
    followed.progress.begin("round 1, plain", tmp_path)
    assert followed.progress.seconds_left() is None
    followed.at(20.0, FORWARD, step(6.0))
    assert (followed.progress.seconds_left() is None) == (steps is None)


def test_a_line_that_is_half_written_is_read_when_it_is_whole(tmp_path):
    followed = Followed(tmp_path)
    followed.progress.begin("round 1, plain", tmp_path)
    followed.at(1.0, FORWARD)
    with (tmp_path / "run.jsonl").open("a") as file:
        file.write('{"t": 2, "event": "step", "sec')
        file.flush()
        followed.progress.look()
        assert followed.progress.seconds_left() is None
        file.write('onds": 2.0}\n')
    followed.progress.look()
    assert followed.progress.seconds_left() == 3 * 2.0 + 1.0 + 4 * 2.0


def test_a_terminal_has_one_line_that_changes(tmp_path):
    followed = Followed(tmp_path, terminal=True)
    followed.progress.begin("round 1, plain", tmp_path)
    followed.at(20.0, FORWARD, step(6.0))
    followed.progress.end()
    assert "\n1 of 2" not in followed.file.getvalue()
    assert "\r" in followed.file.getvalue()


def test_brackets_in_a_runs_output_are_shown_as_they_are(tmp_path):
    followed = Followed(tmp_path, terminal=True)
    followed.progress.begin("round 1, plain", tmp_path)
    (tmp_path / "output.txt").write_text("INFO [/home/u/train.py:12] making the [bold]model\n")
    followed.at(1.0)
    followed.progress.end()
    followed.progress.begin("round 1, plain", tmp_path)  # a line with the output in it begins
    followed.progress.end()
    assert "[/home/u/train.py:12] making the [bold]model" in followed.file.getvalue()


@pytest.mark.parametrize(
    ("seconds", "words"), [(2, "about 5 s"), (88, "about 90 s"), (95, "about 2 min"), (470, "about 8 min")]
)
def test_durations_are_rounded(seconds, words):
    assert duration(seconds) == words


class Terminal(io.StringIO):
    def isatty(self):
        return True


def test_work_prints_a_line_for_each_phase():
    stream = io.StringIO()
    with WorkProgress(stream) as progress:
        progress.begin("making")
        progress.begin("simulating")
        progress.report("--lora_rank has no effect here")
    assert stream.getvalue().splitlines() == ["making", "simulating", "--lora_rank has no effect here"]


def test_work_on_a_terminal_has_one_line_that_changes():
    stream = Terminal()
    with WorkProgress(stream) as progress:
        progress.begin("making")
        progress.begin("simulating [bold]model")
        progress.report("a line [that] stays")
    shown = stream.getvalue()
    assert "simulating [bold]model" in shown and "a line [that] stays\n" in shown
    assert "\nsimulating" not in shown and "\r" in shown


def test_work_ends_where_nobody_reads_its_progress():
    class Closed(io.StringIO):
        def write(self, text):
            raise BrokenPipeError

    with pytest.raises(BrokenPipeError):
        WorkProgress(Closed()).begin("making")


@pytest.mark.parametrize("without", [False, True])
def test_no_color_alone_takes_the_colours_from_a_terminal(monkeypatch, without):
    for name in ("NO_COLOR", "FORCE_COLOR"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("TERM", "xterm-256color")
    if without:
        monkeypatch.setenv("NO_COLOR", "1")
    terminal, inside = os.openpty()
    with os.fdopen(terminal, "rb", buffering=0) as shown, os.fdopen(inside, "w") as stream:
        plain_console(stream).print("a mode failed", style="red")
        line = shown.read(4096)
    assert b"a mode failed" in line and (b"\x1b[31m" in line) is not without
