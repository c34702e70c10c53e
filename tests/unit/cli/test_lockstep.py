"""The runs of a round go in lockstep, and the obstacles to it."""

import io
import os
import sys
import threading
from pathlib import Path

import psutil
import pytest
from rich.console import Console

from ebbtide.base.runs import LOCKSTEP_FILE, LOCKSTEP_VARIABLE, read_events
from ebbtide.cli.lockstep import is_first_slow, run_round, why_alone
from ebbtide.cli.merge import merge
from ebbtide.cli.progress import RunProgress
from ebbtide.store import share as share_module
from ebbtide.track import write_summary
from ebbtide.track.lockstep import Lockstep

CHILD = Path(__file__).with_name("stepping_child.py")
FACTORS = {"plain": 1.0, "checkpointing": 1.5, "ebbtide": 1.25}
GIB = 1 << 30


class Round:
    """A round of children; ``said`` is the printed text, ``log`` the children's output."""

    def __init__(self, folder, *, steps=4, failing="", ended=None, alone=None, small_bytes=0, free_bytes=1 << 50):
        self.folder, self.file, self.outcomes = folder, io.StringIO(), {}
        console = Console(file=self.file, width=300, markup=False, highlight=False, soft_wrap=True)

        def start(mode, run_folder):
            command = [sys.executable, str(CHILD), str(run_folder), str(folder / "log"), str(FACTORS[mode]), str(steps)]
            return command + ["3"] * (mode == failing), dict(os.environ)

        progress = RunProgress(console, runs=len(FACTORS), steps=steps)
        self.reasons = []
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("ebbtide.store.pages.small_free_bytes", lambda: small_bytes)
            patch.setattr(share_module, "free_memory_bytes", lambda: free_bytes)
            self.alone = run_round(
                "round 1",
                list(FACTORS),
                folder,
                start,
                progress,
                ended=ended or self.outcomes.__setitem__,
                alone=alone,
                report=self.reasons.append,
            )

    @property
    def steps(self):
        lines = [line.split() for line in (self.folder / "log").read_text().splitlines()]
        return [(mode, edge, int(number)) for mode, edge, number in lines if edge in ("begin", "end")]

    def summaries(self):
        return {mode: write_summary(self.folder / mode, warm_up=1) for mode in FACTORS}


@pytest.fixture(scope="module")
def stepped(tmp_path_factory):
    return Round(tmp_path_factory.mktemp("round"))


def test_each_step_is_taken_by_all_before_the_next_and_alone(stepped):
    steps = stepped.steps
    for step in range(1, 5):
        ours = steps[(step - 1) * 6 : step * 6]
        assert {(mode, number) for mode, _, number in ours} == {(mode, step) for mode in FACTORS}
        assert [edge for _, edge, _ in ours] == ["begin", "end"] * 3
        assert all(begun[0] == ended[0] for begun, ended in zip(ours[::2], ours[1::2], strict=True))
    assert len({steps[place][0] for place in (6, 12, 18)}) == 3, "each mode comes first once"
    assert stepped.reasons == [] and stepped.alone is False
    assert {mode: ended.code for mode, ended in stepped.outcomes.items()} == dict.fromkeys(FACTORS, 0)


def test_a_drifting_machine_is_not_counted_as_a_modes_cost(stepped):
    """Each step is up to half a step slower than the previous one; the ratios are exact nevertheless."""
    merged = {mode["mode"]: mode for mode in merge({1: stepped.summaries()}, list(FACTORS), {})}
    for mode, factor in FACTORS.items():
        assert merged[mode]["step_ratio"] == {"median": factor, "low": factor, "high": factor}


def test_memory_is_sampled_only_while_a_run_takes_its_step(stepped):
    """A sampler takes time, which would be charged to the running process."""
    records = {mode: read_events(stepped.folder / mode / "run.jsonl") for mode in FACTORS}
    ends = {mode: [e["t"] for e in records[mode] if e["event"] == "wait"] for mode in FACTORS}
    sampled = [e["t"] for e in read_events(stepped.folder / "plain" / "outside.jsonl")]
    assert len(sampled) > 4
    others = [(records["checkpointing"][0]["t"], ends["ebbtide"][0])]  # the second run is started after the first step
    assert all(end > begin for begin, end in others)
    assert not [t for t in sampled for begin, end in others if begin < t < end]


def test_a_plan_can_tell_the_wait_from_the_step(stepped):
    """Each run waits for two others, of 30 ms a step at least; the last wait is for its end."""
    lines = [line.split() for line in (stepped.folder / "log").read_text().splitlines()]
    for mode in FACTORS:
        waits = [int(line[2]) for line in lines if line[:2] == [mode, "paused"]]
        assert len(waits) == 4 and waits == sorted(waits)
        assert all(later - earlier >= 60 for earlier, later in zip(waits[:2], waits[1:3], strict=True))


def test_a_step_that_all_have_taken_is_a_line(stepped):
    lines = stepped.file.getvalue().splitlines()
    assert [line for line in lines if line.startswith("step 2 of 4  ")][0].startswith(
        "step 2 of 4  plain 2.00 s  checkpointing 3.00 s (×1.50)  ebbtide 2.50 s (×1.25); about"
    )


@pytest.mark.slow
def test_without_memory_for_all_they_follow_one_another(tmp_path):
    alone = Round(tmp_path, free_bytes=0)
    assert alone.steps == [(mode, edge, step) for mode in FACTORS for step in range(1, 5) for edge in ("begin", "end")]
    assert alone.alone
    assert len(alone.reasons) == 1 and "3 at once need" in alone.reasons[0] and "0 B are free" in alone.reasons[0]
    assert [summary["lockstep"] for summary in alone.summaries().values()] == [False] * 3
    # Medians of steps 2 to 4 of each run.
    merged = {mode["mode"]: mode for mode in merge({1: alone.summaries()}, list(FACTORS), {})}
    assert merged["checkpointing"]["step_ratio"]["median"] == 1.5


@pytest.mark.parametrize(("reclaims", "small", "slow"), [(True, 6, True), (True, 5, False), (False, 60, False)])
def test_the_first_run_is_slow_where_it_gets_what_the_host_backs_by_small_pages(monkeypatch, reclaims, small, slow):
    monkeypatch.setattr("ebbtide.store.pages.host_reclaims_pages", lambda: reclaims)
    assert is_first_slow(small * GIB, 10 * GIB) is slow


def test_a_first_run_that_gets_slow_memory_is_named(tmp_path, monkeypatch):
    monkeypatch.setattr("ebbtide.store.pages.host_reclaims_pages", lambda: True)
    (reason,) = Round(tmp_path, small_bytes=9 * GIB).reasons
    assert "first run" in reason and "9.0 GiB" in reason and "hint: as root" in reason


def test_runs_that_may_write_the_same_files_follow_one_another(tmp_path):
    alone = Round(tmp_path, alone=True)
    assert alone.steps == [(mode, edge, step) for mode in FACTORS for step in range(1, 5) for edge in ("begin", "end")]
    assert alone.reasons == []


def test_a_run_that_fails_leaves_its_turns_to_the_others(tmp_path):
    failed = Round(tmp_path, failing="checkpointing")
    assert {mode: ended.code for mode, ended in failed.outcomes.items()} == {
        "plain": 0,
        "checkpointing": 3,
        "ebbtide": 0,
    }
    assert [step for mode, edge, step in failed.steps if (mode, edge) == ("ebbtide", "end")] == [1, 2, 3, 4]
    assert not any((tmp_path / mode / LOCKSTEP_FILE).exists() for mode in FACTORS)


def test_all_are_ended_if_the_comparison_is(tmp_path):
    def interrupt(mode, ended):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        Round(tmp_path, failing="plain", ended=interrupt)
    pids = [int(line.split()[2]) for line in (tmp_path / "log").read_text().splitlines() if " pid " in line]
    assert len(pids) == 3
    assert not any(psutil.pid_exists(pid) for pid in pids)


@pytest.mark.parametrize(
    ("device", "free", "processes", "words"),
    [
        ("cpu", 6 * GIB, 1, None),
        ("cpu", 6 * GIB, 2, "each has 2 processes"),
        ("cpu", 5 * GIB, 1, "3 at once need 5.5 GiB more memory, and 5.0 GiB are free"),
        ("cuda", 99 * GIB, 1, "they train on one cuda"),
    ],
)
def test_turns_need_memory_for_all_and_no_accelerator(monkeypatch, device, free, processes, words):
    monkeypatch.setattr(share_module, "free_memory_bytes", lambda: free)
    assert why_alone(2 * GIB, runs=3, device=device, processes=processes) == words


def test_a_run_goes_on_alone_when_nobody_gives_turns_any_more(tmp_path):
    pipe = tmp_path / LOCKSTEP_FILE
    os.mkfifo(pipe)
    giver = os.open(pipe, os.O_RDWR)
    lockstep = Lockstep(pipe)
    waiter = threading.Thread(target=lockstep.wait)
    waiter.start()
    waiter.join(0.2)
    assert waiter.is_alive()
    os.close(giver)  # as if its process had been killed
    waiter.join(30)
    assert not waiter.is_alive()
    assert not lockstep.wait()
    assert not Lockstep(pipe).wait()  # opened after it


def test_turns_are_of_one_folder(tmp_path, monkeypatch):
    os.mkfifo(tmp_path / LOCKSTEP_FILE)
    monkeypatch.setenv(LOCKSTEP_VARIABLE, str(tmp_path / LOCKSTEP_FILE))
    assert Lockstep.requested(tmp_path / "another") is None
    own = Lockstep.requested(tmp_path)
    assert own is not None
    own.close()
    monkeypatch.delenv(LOCKSTEP_VARIABLE)
    assert Lockstep.requested(tmp_path) is None
