import errno
import itertools
import json
import mmap
import os
import re
import signal
import subprocess
import sys
import textwrap
import threading
import time
from pathlib import Path

import pytest
import torch

from ebbtide.base.errors import ConfigError, DataError, EbbtideError
from ebbtide.base.events import Bus
from ebbtide.base.runs import read_events
from ebbtide.track import MemoryReader, RunFile, Sampler, sampler, summarise, track_memory
from tests.helpers.failing import failing


def kinds(folder):
    return [e["event"] for e in read_events(folder / "run.jsonl") if e["event"] != "memory"]


def last(folder, kind):
    return [e for e in read_events(folder / "run.jsonl") if e["event"] == kind][-1]


def test_events_become_lines_and_a_summary(tmp_path):
    bus = Bus()
    with RunFile(tmp_path / "deep" / "run", bus=bus, model="tiny", mode="plain", config={"lr": 0.1}) as run:
        assert bus.active
        with run.phase("forward", step=1):
            pass
        run.step(1, seconds=2.0, loss=0.5, tokens=8)
    assert not bus.active
    folder = tmp_path / "deep" / "run"
    assert kinds(folder) == ["run_begin", "phase", "phase", "step", "run_end"]
    began = last(folder, "run_begin")
    assert (began["schema"], began["pid"], began["config"]) == (1, os.getpid(), {"lr": 0.1})
    assert began["torch"] is not None and began["device"] is not None
    summary = json.loads((folder / "summary.json").read_text())
    assert (summary["status"], summary["model"], summary["loss"]) == ("ok", "tiny", [0.5])
    assert summary["peak_host_bytes"] > 10 * 2**20


def test_memory_is_read_at_every_edge(tmp_path):
    with RunFile(tmp_path, bus=(bus := Bus()), sample_seconds=1000) as run:
        with run.phase("forward", step=1):
            bus.emit("pass_end", unique_bytes=1)
        bus.emit("block", index=0)
    order = [e["event"] for e in read_events(tmp_path / "run.jsonl")]
    at_edges = [b for a, b in zip(order, order[1:], strict=False) if a in ("phase", "pass_end")]
    assert at_edges == ["memory"] * 3
    assert order.count("memory") in (3, 4)


@pytest.mark.parametrize("disk_seconds", [0, 0.05])
def test_the_devices_peak_is_dated_between_two_edges(tmp_path, monkeypatch, disk_seconds):
    monkeypatch.setattr(MemoryReader, "take_device_peak_bytes", lambda self: 900)
    write = RunFile._write

    def slowly(self, kind, fields):
        write(self, kind, fields)
        time.sleep(disk_seconds if kind == "memory" else 0)

    monkeypatch.setattr(RunFile, "_write", slowly)
    with RunFile(tmp_path, bus=(bus := Bus()), sample_seconds=1000) as run:
        with run.phase("forward", step=1):
            pass
        with run.phase("backward", step=1):
            for index in (1, 0):
                bus.emit("block_backward", index=index)
    events = read_events(tmp_path / "run.jsonl")
    order = [e.get("edge") or "peak" for e in events if e["event"] == "phase" or e.get("device_bytes") == 900]
    assert order == ["peak", "begin", "peak", "end", "peak", "begin", *["peak"] * 2, "end"]
    first_block = next(e["t"] for e in events if e["event"] == "block_backward")
    assert [e["t"] < first_block for e in events if e.get("device_bytes") == 900] == [True] * 4 + [False]


@pytest.mark.parametrize(
    ("error", "status", "text"),
    [
        (KeyboardInterrupt(), "interrupted", None),
        (ValueError("odd"), "error", "ValueError: odd"),
        (SystemExit(3), "error", "SystemExit: 3"),
        (SystemExit(0), "ok", None),
    ],
    ids=lambda value: type(value).__name__,
)
def test_how_a_run_ended_is_written(tmp_path, error, status, text):
    bus = Bus()
    with pytest.raises(type(error)), RunFile(tmp_path, bus=bus):
        raise error
    ended = last(tmp_path, "run_end")
    assert (ended["status"], ended["error"]) == (status, text)
    assert summarise(tmp_path)["status"] == status
    assert not bus.active


def test_a_second_run_in_the_same_folder_is_refused_by_default(tmp_path):
    with RunFile(tmp_path, bus=Bus(), mode="first"):
        pass
    with (
        pytest.raises(DataError, match="(?s)already holds a run.*hint: "),
        RunFile(tmp_path, bus=Bus()),
    ):
        pass
    assert last(tmp_path, "run_begin")["mode"] == "first"
    with RunFile(tmp_path, bus=Bus(), mode="second", overwrite=True):
        pass
    assert kinds(tmp_path) == ["run_begin", "run_end"]
    assert last(tmp_path, "run_begin")["mode"] == "second"


@pytest.mark.parametrize("recorded", [True, False])
def test_samples_from_outside_of_a_replaced_run_are_removed(tmp_path, recorded):
    """Without a record, another process has just begun to sample this run."""
    (tmp_path / "outside.jsonl").touch()
    if recorded:
        (tmp_path / "run.jsonl").touch()
    with RunFile(tmp_path, bus=Bus(), overwrite=True):
        pass
    assert (tmp_path / "outside.jsonl").exists() is not recorded


@pytest.mark.parametrize("overwrite", [False, True])
@pytest.mark.parametrize("name", ["summary.json", "report.html"])
def test_a_summary_or_a_report_of_something_else_is_kept(tmp_path, name, overwrite):
    (tmp_path / name).write_text("of a comparison")
    refused = pytest.raises(DataError, match=f"(?s)already holds {name} of something other than a run; .*\nhint: ")
    with refused, RunFile(tmp_path, bus=Bus(), overwrite=overwrite):
        pass
    assert [path.name for path in tmp_path.iterdir()] == [name]
    (tmp_path / "run-1.jsonl").touch()  # it is of that run
    with RunFile(tmp_path, bus=Bus(), overwrite=overwrite):
        assert not (tmp_path / name).exists()


@pytest.mark.parametrize(("ranks", "count"), [("", 1), ("4", 4), ("many", 1)])
def test_a_world_size_that_is_no_number_ends_no_training(tmp_path, monkeypatch, ranks, count):
    monkeypatch.setenv("WORLD_SIZE", ranks)
    with RunFile(tmp_path, bus=Bus()):
        pass
    assert last(tmp_path, "run_begin")["world_size"] == count


def test_the_world_size_is_that_of_the_process_group(tmp_path, monkeypatch):
    """Processes of ``torch.multiprocessing.spawn`` have no variable; a shell may have one of another job."""
    monkeypatch.setenv("WORLD_SIZE", "8")
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    try:
        with RunFile(tmp_path, bus=Bus()):
            pass
    finally:
        torch.distributed.destroy_process_group()
    assert last(tmp_path, "run_begin")["world_size"] == 1


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_a_forked_child_writes_nothing_into_its_parents_run(tmp_path):
    with RunFile(tmp_path, bus=(bus := Bus())) as run:
        child = os.fork()
        if child == 0:
            bus.emit("step", step=1)
            run.__exit__(None, None, None)
            os._exit(0)
        assert os.waitpid(child, 0)[1] == 0
        assert not (tmp_path / "summary.json").exists()
        bus.emit("step", step=2)
    assert kinds(tmp_path) == ["run_begin", "step", "run_end"]
    assert last(tmp_path, "step")["step"] == 2


def test_a_folder_that_cannot_be_made_is_an_error(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(DataError, match="cannot be written"), RunFile(tmp_path / "file" / "run", bus=Bus()):
        pass


def test_any_value_becomes_strict_json(tmp_path):
    with RunFile(tmp_path, bus=(bus := Bus())):
        bus.emit("step", step=1, loss=float("nan"), seconds=1.0, where=tmp_path, grid=(1, [float("-inf")], {2: None}))
    step = last(tmp_path, "step")
    assert (step["loss"], step["where"], step["grid"]) == ("nan", str(tmp_path), [1, ["-inf"], {"2": None}])
    json.loads((tmp_path / "summary.json").read_text(), parse_constant=pytest.fail)


def test_threads_do_not_mix_their_lines(tmp_path):
    with RunFile(tmp_path, bus=(bus := Bus()), sample_seconds=0.001):
        gate = threading.Barrier(4)

        def emit(who):
            gate.wait()
            for i in range(200):
                bus.emit("message", level="info", code=f"{who}-{i}", text="x" * 500)

        threads = [threading.Thread(target=emit, args=(who,)) for who in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    codes = {e["code"] for e in read_events(tmp_path / "run.jsonl") if e["event"] == "message"}
    assert codes == {f"{who}-{i}" for who in range(4) for i in range(200)}


def test_a_full_disk_ends_the_record_and_not_the_run(tmp_path, monkeypatch, caplog):
    with RunFile(tmp_path, bus=(bus := Bus()), sample_seconds=1000) as run:
        run._sampler.stop()

        def full(*_):
            raise OSError(28, "No space left on device")

        with monkeypatch.context() as patch:
            patch.setattr("ebbtide.track.runfile.os.write", full)
            bus.emit("step", step=1, seconds=1.0)
        bus.emit("step", step=2, seconds=1.0)
    assert [r.getMessage() for r in caplog.records].count(
        f"The run file in {tmp_path} is no longer written: No space left on device"
    ) == 1
    assert summarise(tmp_path)["status"] == "killed"
    assert "step" not in kinds(tmp_path)


def test_a_run_whose_record_has_ended_waits_for_no_other(tmp_path, monkeypatch):
    """Nobody sees its steps any more, so nobody permits the next one."""

    class Others:
        open = True

        def wait(self):
            pytest.fail("it waits")

        def close(self):
            self.open = False

    with RunFile(tmp_path, bus=(bus := Bus()), sample_seconds=1000) as run:
        run._sampler.stop()
        run._lockstep = others = Others()
        with monkeypatch.context() as patch:
            patch.setattr("ebbtide.track.runfile.os.write", failing(errno.ENOSPC))
            bus.emit("step", step=1, seconds=1.0)
        bus.emit("step", step=2, seconds=1.0)
    assert not others.open


def test_a_short_write_goes_on_with_the_rest_of_its_line(tmp_path, monkeypatch, caplog):
    write = os.write
    with RunFile(tmp_path, bus=(bus := Bus()), sample_seconds=1000) as run:
        run._sampler.stop()
        with monkeypatch.context() as patch:
            patch.setattr("ebbtide.track.runfile.os.write", lambda file, data: write(file, data[:9]))
            bus.emit("step", step=1, seconds=1.0)
        bus.emit("step", step=2, seconds=1.0)
    assert "is no longer written" not in caplog.text
    assert [event["step"] for event in read_events(tmp_path / "run.jsonl") if event["event"] == "step"] == [1, 2]


@pytest.mark.parametrize("then", [failing(errno.EDQUOT), lambda *_: 0])
def test_the_reason_of_a_short_write_is_that_of_the_next(tmp_path, monkeypatch, caplog, then):
    """No line may follow a partial one."""
    write = os.write
    with RunFile(tmp_path, bus=(bus := Bus()), sample_seconds=1000) as run:
        run._sampler.stop()

        def short(file, data):
            monkeypatch.setattr("ebbtide.track.runfile.os.write", then)
            return write(file, data[:9])

        monkeypatch.setattr("ebbtide.track.runfile.os.write", short)
        bus.emit("step", step=1, seconds=1.0)
        monkeypatch.setattr("ebbtide.track.runfile.os.write", write)
        bus.emit("step", step=2, seconds=1.0)
    assert re.search(f"is no longer written: ({os.strerror(errno.EDQUOT)}|short write)", caplog.text)
    assert summarise(tmp_path)["status"] == "killed"


def test_a_long_record_leaves_out_details_and_no_step(tmp_path, monkeypatch, caplog):
    monkeypatch.setattr("ebbtide.track.runfile._DETAIL_BYTES", 20_000)
    with RunFile(tmp_path, bus=(bus := Bus()), sample_seconds=1000) as run:
        for step in range(1, 101):
            with run.phase("forward", step=step):
                for index in range(20):
                    bus.emit("block", index=index)
            bus.emit("pass_end", unique_bytes=8, kept_bytes=8)
            for model in range(2):
                bus.emit("stats", step=step, total_stall_seconds=step + model, copy_out_bytes_per_second=step)
            run.step(step, seconds=1.0, loss=1.0)
        for factor in (2, 2.001, 1.5, 3):  # samples after the details have ended
            run._memory(int(factor * 2**40), None)
    summary = json.loads((tmp_path / "summary.json").read_text())
    assert (summary["steps"], summary["status"], summary["stall_seconds"]) == (100, "ok", None)
    assert summary["copy_out_bytes_per_second"] == 100
    events = [json.loads(line) for line in (tmp_path / "run.jsonl").read_text().splitlines()]
    assert [e["rss_bytes"] for e in events if e.get("rss_bytes", 0) > 2**40] == [2 * 2**40, 3 * 2**40]
    written = kinds(tmp_path)
    at = written.index("message")
    assert set(written[at:-4]) == {"message", "step"} and written[-4:] == ["stats", "stats", "step", "run_end"]
    totals = [(event["step"], event["total_stall_seconds"]) for event in events if event["event"] == "stats"]
    assert totals[:3] == [(1, 1), (1, 2), (2, 2)] and totals[-2:] == [(100, 100), (100, 101)]
    assert (tmp_path / "run.jsonl").stat().st_size < 60_000
    assert last(tmp_path, "message")["text"] in caplog.text and caplog.text.count("but no other samples") == 1


def test_a_long_record_has_totals_now_and_then_because_a_killed_run_has_no_end(tmp_path, monkeypatch):
    monkeypatch.setattr("ebbtide.track.runfile._DETAIL_BYTES", 100)
    clock = itertools.count(time.monotonic(), 100.0)
    with RunFile(tmp_path, bus=(bus := Bus()), sample_seconds=1000):
        monkeypatch.setattr("ebbtide.track.runfile.time.monotonic", lambda: next(clock))
        for step in range(1, 31):
            for model in range(2):
                bus.emit("stats", step=step, total_copy_out_bytes=10 * step + model)
        events = [json.loads(line) for line in (tmp_path / "run.jsonl").read_text().splitlines()]
        monkeypatch.undo()
    totals = [event for event in events if event["event"] == "stats"]
    both = [(event["step"], event["total_copy_out_bytes"] % 10) for event in totals]
    assert both == [(step, model) for step in sorted({step for step, _ in both}) for model in range(2)]
    times = [event["t"] for event in totals[1::2]]
    assert all(600 <= later - before < 900 for before, later in itertools.pairwise(times)) and len(times) > 5
    assert both[-1][0] > 25


def test_of_two_runs_that_overwrite_at_once_none_raises(tmp_path, monkeypatch):
    unlink = Path.unlink

    def other_is_faster(path, **options):
        unlink(path, **options)
        if path.name == "run.jsonl":
            path.write_text("")

    monkeypatch.setattr(Path, "unlink", other_is_faster)
    with RunFile(tmp_path, bus=Bus(), overwrite=True):
        pass
    assert kinds(tmp_path)[0] == "run_begin"


def test_a_run_that_cannot_begin_leaves_no_record(tmp_path, monkeypatch):
    def broken(**options):
        raise KeyboardInterrupt

    monkeypatch.setattr("ebbtide.track.runfile.MemoryReader", broken)
    with pytest.raises(KeyboardInterrupt), RunFile(tmp_path, bus=Bus()):
        pass
    assert not list(tmp_path.iterdir())


def test_of_two_runs_that_begin_at_once_the_later_changes_nothing(tmp_path, monkeypatch):
    mkdir = Path.mkdir

    def other_is_first(folder, **options):
        mkdir(folder, **options)
        for name in ("run.jsonl", "summary.json"):
            (folder / name).write_text("of the other")

    monkeypatch.setattr(Path, "mkdir", other_is_first)
    with pytest.raises(DataError, match="already holds a run"), RunFile(tmp_path, bus=Bus()):
        pass
    assert {path.read_text() for path in tmp_path.iterdir()} == {"of the other"}


def test_a_killed_process_leaves_a_readable_file(tmp_path):
    script = textwrap.dedent("""
        import os, signal, sys
        from ebbtide.base.events import BUS
        from ebbtide.track import RunFile
        with RunFile(sys.argv[1], mode="plain"):
            BUS.emit("step", step=1, loss=1.0, seconds=1.0, tokens=1)
            os.kill(os.getpid(), signal.SIGKILL)
    """)
    done = subprocess.run([sys.executable, "-c", script, str(tmp_path)], env={**os.environ}, timeout=120)
    assert done.returncode == -signal.SIGKILL
    summary = summarise(tmp_path)
    assert (summary["status"], summary["loss"]) == ("killed", [1.0])


def test_track_memory_passes_its_fields_on(tmp_path):
    with track_memory(tmp_path, sample_seconds=1000, model="m") as run:
        run.step(1, seconds=1.0)
    assert (last(tmp_path, "run_begin")["model"], last(tmp_path, "step")["step"]) == ("m", 1)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"folder": ""}, "folder is ''; expected a path"),
        ({"folder": None}, "folder is None; expected a path"),
        ({"model": [torch.nn.Linear(1, 1)]}, "model is .*; expected Module or text"),
        ({"sample_seconds": 0}, "sample_seconds is 0; expected a time above zero"),
        ({"sample_seconds": float("inf")}, "sample_seconds is inf; expected a time above zero"),
        ({"sample_seconds": "0.1"}, "sample_seconds is '0.1'; expected a number"),
        ({"overwrite": "no"}, "overwrite is 'no'; expected true or false"),
    ],
)
def test_what_track_memory_cannot_use_is_refused_before_anything_is_written(tmp_path, monkeypatch, arguments, words):
    monkeypatch.chdir(tmp_path)
    with (
        pytest.raises(ConfigError, match=f"{words}.*\nhint: "),
        track_memory(**{"folder": "run", **arguments}),
    ):
        pass
    assert not list(tmp_path.iterdir())


def test_the_reader_sees_this_process_grow():
    reader = MemoryReader(device=True)
    before = reader.rss_bytes()
    with mmap.mmap(-1, 64 * 2**20) as block:  # fresh pages: the heap may have that much left from earlier tests
        block.write(b"\1" * len(block))
        assert reader.rss_bytes() - before > 0.9 * len(block)
    assert reader.peaks()["peak_rss_bytes"] >= before


def test_the_reader_adds_descendants_and_ends_with_its_process():
    command = [
        sys.executable,
        "-c",
        "import sys; b = bytearray(b'1' * (1 << 26)); print(1, flush=True); sys.stdin.read()",
    ]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as child:
        child.stdout.readline()
        alone, family = MemoryReader(), MemoryReader(children=True)
        assert family.rss_bytes() - alone.rss_bytes() > 0.9 * (1 << 26)
        of_child = MemoryReader(child.pid, children=True)
        assert of_child.rss_bytes() > 1 << 26
        child.communicate(b"")
    assert of_child.rss_bytes() is None


def test_the_sampler_ends_with_its_process():
    seen = threading.Event()

    class Gone(MemoryReader):
        def rss_bytes(self):
            seen.set()
            return None

    thread = Sampler(Gone(), pytest.fail, seconds=1000)
    thread.start()
    assert seen.wait(60)
    thread.stop()


def test_a_missing_package_is_named_with_its_extra(monkeypatch):
    monkeypatch.setitem(sys.modules, "psutil", None)
    with pytest.raises(EbbtideError, match=r"(?s)psutil is not installed.*hint: pip install 'ebbtide\[track\]'"):
        MemoryReader(children=True)
    assert sampler.MemoryReader().rss_bytes() > 0


def test_a_record_that_cannot_be_summarised_ends_no_run(tmp_path, monkeypatch, caplog):
    def full(*_, **__):
        raise OSError(28, "No space left on device")

    with RunFile(tmp_path, bus=Bus(), sample_seconds=1000):
        monkeypatch.setattr("ebbtide.track.summary.Path.write_text", full)
    assert "no summary of the run was written: [Errno 28] No space left on device" in caplog.text


def test_a_record_of_odd_figures_ends_no_run(tmp_path, caplog):
    with RunFile(tmp_path, bus=Bus(), sample_seconds=1000) as run:
        run.step(1, seconds="soon", tokens=1)
    assert "no summary of the run was written" in caplog.text


def test_a_program_may_change_its_directory_and_log_figures_as_tensors(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "elsewhere").mkdir()
    with RunFile("run", bus=Bus(), sample_seconds=1000) as run:
        monkeypatch.chdir(tmp_path / "elsewhere")
        loss = torch.tensor(1 / 3, dtype=torch.float64, requires_grad=True)
        run.step(1, seconds=torch.tensor(0.5), loss=loss, tokens=torch.ones(4, dtype=torch.bool).sum())
    summary = summarise(tmp_path / "run")
    assert summary["loss"] == [1 / 3] and summary["tokens_per_second"] == 8
