"""Memory while weights are loaded: found in the run file, drawn, and described."""

import dataclasses
import xml.etree.ElementTree as ET

import pytest

from ebbtide.report import load_run, loading_svg, page, text
from ebbtide.report.story import loads, peak_sentence
from ebbtide.track import write_summary
from tests.unit.report.runs import MIB, write_run
from tests.unit.track.events import begin, event, write_events


def write_load(folder, mode, *, height, seconds=2.0, device=None, ends=True):
    """Write a run that loads for ``seconds`` and rises by ``height`` bytes from 512 MiB, sampled every 10 ms."""
    events = [begin(10.0, mode=mode, device="cuda" if device else "cpu", unix_time=1.0)]
    events.append(event(10.5, "memory", rss_bytes=512 * MIB, device_bytes=0 if device else None))
    for edge, t, nbytes in (("begin", 11.0, None), ("progress", 12.0, 30 * MIB), ("end", 11.0 + seconds, 60 * MIB)):
        if edge != "end" or ends:
            events.append(event(t, "load", edge=edge, source="slices", rank=0, bytes=nbytes, seconds=None))
    for tick in range(int(seconds * 100)):
        part = tick / (seconds * 100 - 1)
        rss, card = int(512 * MIB + part * height), int(part * device) if device else None
        events.append(event(11.0 + tick / 100, "memory", rss_bytes=rss, device_bytes=card))
    events.append(event(14.0, "run_end", status="ok", error=None))
    write_events(folder / "run.jsonl", sorted(events, key=lambda e: e["t"]))
    write_summary(folder)
    return load_run(folder)


def words(picture):
    return [element.text for element in ET.fromstring(picture).iter("{http://www.w3.org/2000/svg}text")]


def curves(picture):
    lines = ET.fromstring(picture).iter("{http://www.w3.org/2000/svg}polyline")
    return [[tuple(map(float, xy.split(","))) for xy in line.get("points").split()] for line in lines]


def test_loads_are_drawn_over_each_other_from_where_they_begin(tmp_path):
    small = write_load(tmp_path / "a", "ours", height=100 * MIB)
    large = write_load(tmp_path / "b", "plain", height=400 * MIB, seconds=1.0)
    picture = loading_svg([small, large])
    assert any("ours: 2.0 s, +100.0 MiB" in w for w in words(picture))
    assert any("plain: 1.0 s, +400.0 MiB" in w for w in words(picture))
    one, two = curves(picture)
    assert one[0] == two[0]
    assert (one[-1][0] - one[0][0]) == pytest.approx(2 * (two[-1][0] - two[0][0]), abs=2)
    assert (two[0][1] - two[-1][1]) == pytest.approx(4 * (one[0][1] - one[-1][1]), abs=2)


def test_a_device_has_a_field_of_its_own(tmp_path):
    run = write_load(tmp_path, "ours", height=100 * MIB, device=300 * MIB)
    picture = loading_svg([run])
    assert len(curves(picture)) == 2
    assert {"host memory, resident", "device memory, allocated"} <= set(words(picture))
    assert "host memory rose by 100.0 MiB; device memory rose by 300.0 MiB" in loads(run)[0]


def test_words_tell_how_much_was_read_and_that_the_peak_was_there(tmp_path):
    run = write_load(tmp_path, "ours", height=100 * MIB)
    assert loads(run) == ["ours: by slices in 2.0 s, 60.0 MiB read; host memory rose by 100.0 MiB."]
    assert peak_sentence(run) == "ours: 612.0 MiB while weights were loaded."
    assert "loading   by slices in 2.0 s" in text(run)


@pytest.mark.parametrize(
    ("name", "step", "words"),
    [
        ("load", 0, "612.0 MiB while weights were loaded."),
        ("text_encoder", None, "612.0 MiB in text_encoder."),
        ("forward", 3, "612.0 MiB in forward of step 3."),
    ],
)
def test_a_peak_outside_of_steps_is_placed_in_none(tmp_path, name, step, words):
    run = write_load(tmp_path, "ours", height=100 * MIB)
    edges = [event(t, "phase", name=name, edge=edge, step=step) for edge, t in (("begin", 10.9), ("end", 13.5))]
    run = dataclasses.replace(run, events=sorted([*run.events, *edges], key=lambda e: e["t"]))
    assert peak_sentence(run) == f"ours: {words}"


def test_a_load_that_did_not_end_says_so(tmp_path):
    assert "not finished" in loads(write_load(tmp_path, "ours", height=MIB, ends=False))[0]


def test_runs_without_a_load_are_left_out(tmp_path):
    run = load_run(write_run(tmp_path / "run"))
    assert loads(run) == []
    assert "No load with memory samples in these runs." in words(loading_svg([run]))
    shown = page([run])
    assert "Memory while weights are loaded" not in shown
    shown = page([run, write_load(tmp_path / "a", "ours", height=MIB)])
    assert shown.count("<h2>Memory while weights are loaded</h2>") == 1
    assert "by slices in 2.0 s" in shown


def test_loads_with_a_training_between_them_are_described_one_by_one(tmp_path):
    run = write_load(tmp_path, "ours", height=100 * MIB)
    again = [{**e, "t": e["t"] + 100} for e in run.all("load")]
    between = event(60.0, "memory", rss_bytes=4096 * MIB, device_bytes=None)
    after = [event(t, "memory", rss_bytes=size * MIB, device_bytes=None) for t, size in ((110.9, 700), (112.5, 730))]
    run = dataclasses.replace(run, events=[*run.events, between, *after, *again])
    run = dataclasses.replace(run, events=sorted(run.events, key=lambda e: e["t"]))
    first, second = loads(run)
    assert first == "ours: by slices in 2.0 s, 60.0 MiB read; host memory rose by 100.0 MiB."
    assert second == "ours: by slices in 2.0 s, 60.0 MiB read; host memory rose by 30.0 MiB."
    assert peak_sentence(run) == "ours: 4.00 GiB outside of any phase (warm-up or between steps)."
    assert any("ours: 2.0 s, +100.0 MiB" in w for w in words(loading_svg([run])))
    assert text(run).count("\nloading   by slices") == 2
