import dataclasses
import json
import math
import re
import sys
import xml.etree.ElementTree as ET
from html.parser import HTMLParser

import pytest

from ebbtide.base.errors import DataError, EbbtideError
from ebbtide.report import as_values, chrome_trace, load_run, page, text, timeline_svg
from ebbtide.report.blocks import block_bytes, blocks_svg
from ebbtide.report.copies import copies, overlap
from ebbtide.report.run import common_step
from ebbtide.report.story import happened, peak_sentence, plans
from ebbtide.report.style import ticks
from ebbtide.report.table import bytes_table, headline, losses_table, measured
from ebbtide.report.verdict import step_costs
from tests.unit.report.runs import BLOCKS, MIB, PLAN, block_event, write_run
from tests.unit.track.events import event


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    root = tmp_path_factory.mktemp("runs")
    write_run(root / "plain", "plain")
    write_run(root / "checkpointing", "checkpointing", height=100 * MIB, slow=1.4, start=900.0)
    write_run(root / "ebbtide", "ebbtide", height=150 * MIB, slow=1.1, start=50.0, engine=True)
    return [load_run(root / name) for name in ("plain", "checkpointing", "ebbtide")]


def with_events(run, *events):
    return dataclasses.replace(run, events=sorted([*run.events, *events], key=lambda e: e["t"]))


def titles(picture):
    return [element.text for element in ET.fromstring(picture).iter("{http://www.w3.org/2000/svg}title")]


def words(picture):
    return [element.text for element in ET.fromstring(picture).iter("{http://www.w3.org/2000/svg}text")]


def test_a_run_is_read_with_its_name_and_samples(runs, tmp_path):
    assert [run.name for run in runs] == ["plain", "checkpointing", "ebbtide"]
    assert runs[0].memory_kind == "resident memory, sampled from outside"
    nameless = load_run(write_run(tmp_path / "here", None))
    assert nameless.name == "here"


@pytest.mark.parametrize("folder", [".", "..", "../../here", "../link"])
def test_a_run_without_a_mode_has_the_name_of_its_folder(tmp_path, monkeypatch, folder):
    place = write_run(tmp_path / "here", None) / ("inner" if folder.startswith("..") else "")
    place.mkdir(exist_ok=True)
    monkeypatch.chdir(place)
    (tmp_path / "here" / "link").symlink_to("../here")
    assert load_run(folder).name == ("link" if "link" in folder else "here")


@pytest.mark.parametrize("content", ["", "{", "[]", "{}"])
def test_a_damaged_summary_is_an_error_with_a_way_out(tmp_path, content):
    write_run(tmp_path)
    (tmp_path / "summary.json").write_text(content)
    with pytest.raises(DataError, match="(?s)is not a summary.*hint: remove it"):
        load_run(tmp_path)


def test_missing_files_are_errors(tmp_path):
    with pytest.raises(DataError, match="run.jsonl cannot be read"):
        load_run(tmp_path)
    write_run(tmp_path)
    (tmp_path / "summary.json").unlink()
    with pytest.raises(DataError, match="(?s)summary.json cannot be read.*hint: `ebbtide report"):
        load_run(tmp_path)


def test_the_peak_is_placed_in_its_phase_and_block(runs):
    peak = runs[2].peak()
    assert (peak.phase, peak.step, peak.block) == ("backward", 1, "layers.7")
    assert peak.bytes_ == max(sample["rss_bytes"] for sample in runs[2].outside)


@pytest.mark.parametrize(
    ("t", "phase", "block", "words"),
    [
        (50.95, "forward", "layers.3", "in forward of step 1, at block layers.3"),
        (51.55, "forward", None, "in forward of step 1, after the last block"),
        (53.85, "optimizer", None, "in optimizer of step 1."),
        (51.605, "backward", None, "in backward of step 1, before the first block (head and loss)"),
        (50.2, None, None, "outside of any phase"),
    ],
)
def test_a_peak_is_placed_where_it_was(runs, t, phase, block, words):
    run = dataclasses.replace(runs[2], outside=[event(t, "memory", rss_bytes=10**12)])
    assert (run.peak().phase, run.peak().block) == (phase, block)
    assert words in peak_sentence(run)


def test_pictures_show_the_most_typical_step_that_all_finished(runs, tmp_path):
    assert common_step(runs) == 3, "of equals the last"
    longer = load_run(write_run(tmp_path, "plain", steps=4))
    slow = [e for e in longer.events if e["event"] == "phase" and e.get("step") == 4 and e["name"] == "optimizer"]
    late = [{**e, "t": e["t"] + 5} if e["edge"] == "end" else e for e in slow]
    others = [e for e in longer.events if e not in slow]
    assert common_step([longer]) == 4
    assert common_step([dataclasses.replace(longer, events=others + late)]) == 3
    cut = [e for e in runs[0].events if not (e["event"] == "phase" and e.get("step") == 3 and e["edge"] == "end")]
    assert common_step([dataclasses.replace(runs[0], events=cut), *runs[1:]]) == 2
    assert common_step([dataclasses.replace(runs[0], events=[]), *runs[1:]]) is None
    assert common_step([]) is None


def test_the_timeline_is_one_svg_that_stands_alone(runs):
    picture = timeline_svg(runs)
    root = ET.fromstring(picture)
    assert "http" not in picture.replace("http://www.w3.org/2000/svg", "")
    assert "prefers-color-scheme: dark" in picture
    lines = list(root.iter("{http://www.w3.org/2000/svg}polyline"))
    assert len(lines) == 3
    assert "ebbtide: backward, 2.200 s" in titles(picture)
    (stall,) = [r for r in root.iter("{http://www.w3.org/2000/svg}rect") if "stall)" in r.get("style") and len(r)]
    assert stall[0].text == "stall in backward, block layers.4: 0.2500 s"
    wide = max(float(r.get("width")) for r in root.iter("{http://www.w3.org/2000/svg}rect") if len(r))
    assert float(stall.get("width")) / wide == pytest.approx(0.25 / 2.8, abs=1e-3), "to the scale of backward"
    assert "stalls, to scale: ebbtide 0.250 s (7.14 %)" in words(picture)
    assert any(word.startswith("plain: 3.30 s, peak 1.8") for word in words(picture))


def test_a_legend_of_many_phases_is_inside_the_picture(runs):
    names = [f"a phase of many words, number {number}" for number in range(6)]
    span = runs[2].step_span(3)
    edges = [("begin", span.begin + 0.1), ("end", span.end - 0.1)]
    marks = [event(t, "phase", name=name, edge=edge, step=3) for name in names for edge, t in edges]
    root = ET.fromstring(timeline_svg([with_events(runs[2], *marks)]))
    found = [text for text in root.iter("{http://www.w3.org/2000/svg}text") if text.text in names]
    assert len(found) == len(names) and all(float(text.get("y")) < float(root.get("height")) for text in found)
    assert all(float(text.get("x")) + 6.4 * len(text.text) < float(root.get("width")) for text in found)


def test_a_legend_of_many_runs_is_inside_the_picture(runs):
    many = [dataclasses.replace(runs[0], name=f"run number {number}") for number in range(5)]
    root = ET.fromstring(timeline_svg(many))
    found = [text for text in root.iter("{http://www.w3.org/2000/svg}text") if (text.text or "").startswith("run numb")]
    names = [text for text in found if ":" in text.text]
    assert len(names) == 5 and all(float(text.get("x")) + 6.6 * len(text.text) < 960 for text in names)
    rows = sorted({float(text.get("y")) for text in names})
    assert len(rows) == 2 and rows[1] - rows[0] >= 14 and rows[0] > 22 + 12 and rows[1] < 62


def test_curves_are_aligned_at_the_forwards_begin_and_high_as_measured(runs):
    lines = ET.fromstring(timeline_svg(runs)).iter("{http://www.w3.org/2000/svg}polyline")
    curves = [[tuple(map(float, p.split(","))) for p in line.get("points").split()] for line in lines]
    assert {curve[0][0] for curve in curves} == {116.0}
    tops = [62 + 280 - min(y for _, y in curve) for curve in curves]
    peaks = [max(s["rss_bytes"] for s in run.outside) for run in runs]
    for top, peak in zip(tops, peaks, strict=True):
        assert top == pytest.approx(280 * peak / (2 * 1024**3), abs=1.0)
    ends = [curve[-1][0] - 116 for curve in curves]
    assert ends[0] / ends[1] == pytest.approx(3.3 / 4.1, abs=0.005)


def test_without_a_finished_step_the_timeline_says_so(runs):
    empty = dataclasses.replace(runs[0], events=[])
    for shown in ([empty], []):
        assert words(timeline_svg(shown)) == ["No finished step with memory samples in these runs."]


def test_blocks_are_stacked_by_action(runs):
    picture = blocks_svg(runs[2], 3)
    assert f"layers.{BLOCKS - 1}: offloaded 7.0 MiB" in titles(picture)
    assert len(titles(picture)) == 3 * BLOCKS - 1
    assert blocks_svg(runs[0], 3) is None and blocks_svg(runs[2], 99) is None
    checkpointed = {"action": "checkpoint", "kept_bytes": 3, "offloaded_bytes": 4, "recomputed_bytes": 0}
    assert block_bytes(checkpointed) == {"kept": 0, "offloaded": 0, "recomputed": 0, "checkpointed": 7}


def test_the_page_is_one_offline_file_without_scripts(runs):
    shown = page(runs)
    assert not re.search(r"<script|<link|<img|@import|url\(|src=|href=", shown)

    class Strict(HTMLParser):
        open_tags = []

        def handle_starttag(self, tag, attrs):
            if tag not in ("meta", "br", "line", "rect", "circle", "polyline", "polygon"):
                self.open_tags.append(tag)

        def handle_endtag(self, tag):
            if tag not in ("line", "rect", "circle", "polyline", "polygon"):
                assert self.open_tags.pop() == tag

    parser = Strict()
    parser.feed(shown)
    assert parser.open_tags == []
    assert shown.count("<svg") == 4  # timeline, peak, blocks, losses
    verdict = shown.index('class="verdict"')
    assert shown.index("<h1>") < verdict < shown.index('class="head"') and shown.count('class="verdict"') == 1
    assert 'data-head="saved">81.2 %' in shown  # at the width of a phone a cell has no head but its own
    for part in (PLAN, "Compute", "layers.4", "equal", "81.2 %", "×1.24", "What holds the peak"):
        assert (part in shown) is (part != "Compute"), part


def test_what_others_wrote_is_escaped(runs):
    evil = "<script>alert(1)</script>"
    run = with_events(
        dataclasses.replace(runs[2], name=evil),
        event(60.0, "message", level="warning", code="x", text=evil),
        event(60.0, "plan", name=evil, text=evil),
    )
    shown = page([run])
    assert "<script" not in shown and "&lt;script&gt;" in shown
    ET.fromstring(timeline_svg([run]))


def test_a_run_that_ended_badly_says_so_on_top(tmp_path):
    folder = write_run(tmp_path / "bad", "plain", steps=1)
    summary = json.loads((folder / "summary.json").read_text())
    (folder / "summary.json").write_text(json.dumps({**summary, "status": "killed"}))
    shown = page([load_run(folder)])
    words = "plain has no recorded end: it was killed, became another program"  # which posix.execve does not announce
    assert words in shown
    assert words in text(load_run(folder))


def test_a_page_of_a_run_with_nothing_in_it_can_be_made(runs):
    bare = dataclasses.replace(runs[0], events=[], outside=[], summary={"schema": 1})
    shown = page([bare])
    assert "no memory samples" in shown and "No finished step" in shown


def test_a_comparison_that_was_stopped_counts_the_rounds_that_it_has(runs):
    modes = [{**run.summary, "rounds": rounds} for run, rounds in zip(runs, (1, 1, 0), strict=True)]
    shown = page(runs, comparison={"modes": modes, "environment": {"rounds": 3}})
    assert "Medians over 1 round of fresh processes" in shown and "the last complete round" in shown


def test_jinja2_missing_names_the_extra(runs, monkeypatch):
    monkeypatch.setitem(sys.modules, "jinja2", None)
    with pytest.raises(EbbtideError, match=r"(?s)jinja2 is not installed.*pip install 'ebbtide\[track\]'"):
        page(runs)


def test_the_head_table_holds_modes_against_plain(runs):
    rows = {row[0]: row[1:] for row in headline({run.name: run.summary for run in runs}).rows}
    assert rows["plain"][:2] == ("1.84 GiB", "800.0 MiB")
    assert rows["ebbtide"][1:5] == ("150.0 MiB", "81.2 %", "3.500 s", "×1.06")
    assert [row[-1] for row in rows.values()] == ["equal"] * 3
    uneven = {**runs[2].summary, "loss": [3.0, 1.5, 1.0000000000000002]}
    assert headline({"plain": runs[0].summary, "ebbtide": uneven}).rows[1][-1] == "differ"


def test_on_a_device_memory_is_the_devices_own():
    views = {"inside": {"peak_bytes": 5}, "outside": {"peak_bytes": 7}}
    assert measured({"device": "cuda", **views}) == {"peak_bytes": 5}
    assert measured({"device": "cpu", **views}) == {"peak_bytes": 7}
    assert measured({"device": "cpu", "inside": {"peak_bytes": 5}, "outside": None}) == {"peak_bytes": 5}


def test_losses_are_held_against_each_other_digit_by_digit():
    named = {"a": {"loss": [0.1, 0.3, "nan"]}, "b": {"loss": [0.1, 0.30000000000000004, "nan", 2.0]}}
    rows = losses_table(named).rows
    assert [row[-1] for row in rows] == ["equal", "differ", "equal", "–"]
    assert rows[1][1:3] == ("0.3", "0.30000000000000004")


def test_the_table_of_losses_of_a_long_training_is_short():
    losses = [1.0 / step for step in range(1, 100_001)]
    other = [*losses[:76_543], 0.5, *losses[76_544:]]
    table = losses_table({"a": {"loss": losses}, "b": {"loss": other}})
    assert 2000 <= len(table.rows) <= 2010 and table.columns[0] == "step (1 of 50 shown)"
    assert [row[0] for row in table.rows][:3] == ["1", "51", "101"] and table.rows[-1][0] == "100000"
    assert [row[0] for row in table.rows if row[-1] == "differ"] == ["76544"]
    short = losses_table({"a": {"loss": losses[:2000]}})
    assert len(short.rows) == 2000 and short.columns[0] == "step"


def test_the_text_tells_plan_and_what_happened(runs):
    said = text(runs[2])
    for part in (
        f"plan      minimal: {PLAN}",
        "32.0 MiB kept, 28.0 MiB offloaded, 72.0 MiB recomputed",
        "7.14 %",
        "memory saved",
    ):
        assert part in said
    assert "\noutcome   " in said
    assert re.search(r"layers\.4 +backward +3 +0\.7500 s +0\.2500 s", said)
    assert "plan" not in text(runs[0])


def test_checkpointed_blocks_are_those_of_the_engines_of_the_last_step(runs):
    times = [step["t"] for step in runs[2].all("step")]
    ran = [(times[0] - 1, 1), (times[1] - 1, 2), (times[2] - 2, 2), (times[2] - 1, 3)]
    passes = [event(t, "pass_end", engine=engine, checkpointed=4) for t, engine in ran]
    assert "8 blocks checkpointed." in happened(with_events(runs[2], *passes))


def test_a_plan_that_is_recorded_twice_is_shown_once(runs):
    longer = with_events(runs[2], event(60.0, "plan", name="minimal", text=PLAN + " And more."))
    assert plans(longer) == [("minimal", PLAN + " And more.")]
    other = with_events(runs[2], event(60.0, "plan", name="minimal", text="Another."))
    assert plans(other) == [("minimal", PLAN), ("minimal", "Another.")]
    assert plans(runs[0]) == []


def test_a_plan_that_was_judged_is_shown_with_its_verdict(runs):
    made = [
        event(60.0 + t, "plan", name="auto", text=f"head {t}\nnot measured yet (0 of at most 5 steps)") for t in (1, 2)
    ]
    judged = event(65.0, "verdict", name="auto", text="head 2\nmeasured 1.4 s")
    found = [words for _, words in plans(with_events(runs[2], *made, judged))]
    assert found == [PLAN, made[0]["text"], judged["text"]]
    other = event(66.0, "verdict", name="auto", text="head 1\nmeasured 1.3 s")
    assert [words for _, words in plans(with_events(runs[2], *made, judged, other))] == [
        PLAN, judged["text"], other["text"],
    ]  # fmt: skip


def test_the_trace_is_what_chrome_reads(runs):
    trace = json.loads(json.dumps(chrome_trace(runs[2]), allow_nan=False))
    events = trace["traceEvents"]
    slices = [e for e in events if e["ph"] == "X"]
    assert {e["name"] for e in slices} == {
        "forward",
        "backward",
        "optimizer",
        "stall in backward",
        "step 1",
        "step 2",
        "step 3",
    }
    first = next(e for e in slices if e["name"] == "backward")
    assert (first["ts"], first["dur"]) == (pytest.approx(1.6e6), pytest.approx(2.2e6))
    stall = next(e for e in slices if e["name"].startswith("stall"))
    assert (stall["ts"], stall["dur"]) == (pytest.approx(2.35e6), pytest.approx(0.25e6))
    assert all(e["ts"] > -0.06e6 for e in events if "ts" in e)
    assert sum(e["name"] == "layers.3" for e in events) == 6
    assert {e["pid"] for e in events} == {4321}


def stats_event(t, step, out, back, stall, *, rate=100.0):
    return event(
        t, "stats", step=step, total_copy_out_bytes=out, total_copy_in_bytes=back, total_stall_seconds=stall,
        copy_out_bytes_per_second=rate, copy_in_bytes_per_second=rate,
    )  # fmt: skip


def test_copies_are_those_of_each_step_and_overlap_is_what_compute_did_not_wait_for(runs):
    run = with_events(runs[2], stats_event(103.0, 1, 400, 300, 0.5), stats_event(106.0, 2, 800, 700, 2.0))
    first, second = copies(run)
    assert (first.out_bytes, first.in_bytes, first.seconds, first.stall_seconds) == (400, 300, 7.0, 0.5)
    assert (second.out_bytes, second.in_bytes, second.seconds, second.stall_seconds) == (400, 400, 8.0, 1.5)
    assert overlap(run) == pytest.approx(1 - 2.0 / 15.0)
    assert "Copies: 800 B out and 700 B in; 87 % overlapped compute." in text(run)
    counters = [e for e in chrome_trace(run)["traceEvents"] if e["name"] == "copied in the step"]
    assert [e["args"] for e in counters] == [{"out_bytes": 400, "in_bytes": 300}, {"out_bytes": 400, "in_bytes": 400}]
    values = as_values(run)
    assert (len(values["copies"]), values["overlap"]) == (2, overlap(run))


def test_copies_of_several_models_are_added_up(runs):
    events = [
        stats_event(103.0, 1, 400, 300, 0.5), stats_event(103.0, 1, 40, 30, 0.25),
        stats_event(106.0, 2, 800, 700, 2.0), stats_event(106.0, 2, 60, 50, 0.5),
    ]  # fmt: skip
    run = with_events(runs[2], *events)
    first, second = copies(run)
    assert (first.out_bytes, first.in_bytes, first.seconds, first.stall_seconds) == (440, 330, 7.7, 0.75)
    assert (second.out_bytes, second.in_bytes, second.stall_seconds) == (420, 420, 1.75)
    assert step_costs(run)["stalls"] == pytest.approx(1.75)
    run = dataclasses.replace(run, summary={**run.summary, "copy_out_bytes_per_second": 100.0})
    assert step_costs(run)["copying out, during compute"] == pytest.approx(4.2)


def test_an_overlap_that_is_not_known_is_not_made_up(runs):
    assert (copies(runs[2]), overlap(runs[2])) == ([], None)
    assert "Copies" not in text(runs[2])
    unknown = with_events(runs[2], stats_event(103.0, 1, 400, 0, 0.5, rate=None))
    assert overlap(unknown) is None
    assert "how much of it overlapped compute is not known" in text(unknown)
    waiting = with_events(runs[2], stats_event(103.0, 1, 400, 0, 99.0))
    assert overlap(waiting) == 0.0


def test_blocks_of_two_models_are_shown_and_of_each_the_latest(runs):
    step = runs[2].step_span(2)
    second = [{**block_event(step.begin + 0.01 * (n + 1), n % BLOCKS), "engine": 2} for n in range(2 * BLOCKS)]
    assert len(with_events(runs[2], *second).blocks(2)) == 2 * BLOCKS


def test_rewards_that_are_no_finite_numbers_are_left_out(runs):
    rewards = [1.0, "nan", None, "-inf", 3.0]
    run = dataclasses.replace(runs[0], summary={**runs[0].summary, "reward": rewards})
    assert "mean reward 2.000 over the first 2 steps" in text(run)


def test_the_values_for_programs(runs):
    values = json.loads(json.dumps(as_values(runs[2]), allow_nan=False))
    assert values["summary"] == runs[2].summary
    assert (values["step"], values["peak"]["block"], len(values["blocks"])) == (3, "layers.7", BLOCKS)
    assert values["blocks"][2]["offloaded"] == 2 * MIB
    assert [stall["seconds"] for stall in values["stalls"]] == [0.25] * 3


@pytest.mark.parametrize("base", [2, 10])
@pytest.mark.parametrize("highest", [0.003, 0.9, 1, 7, 39.9, 1000, 1.84 * 1024**3, 70 * 1024**3])
def test_ticks_cover_what_must_fit_in_few_even_steps(highest, base):
    found = ticks(highest, base=base)
    assert found[0] == 0 and found[-1] >= highest > found[-2]
    assert 3 <= len(found) <= 7
    step = found[1]
    assert step == 2.0 ** round(math.log2(step)) if base == 2 else f"{step:.0e}"[0] in "125"


def test_a_cpu_has_one_peak() -> None:
    """Its memory is the host's: two columns of one figure would look like two memories."""
    cpu = {"device": "cpu", "peak_device_bytes": 5 * MIB, "peak_host_bytes": 5 * MIB}
    device = {**cpu, "device": "cuda"}
    alone, both = bytes_table({"plain": cpu}), bytes_table({"plain": cpu, "ebbtide": device})
    assert alone.columns[-2:] == ("copy-in", "host peak") and alone.rows[0][-1] == "5.0 MiB"
    assert both.columns[-2:] == ("device peak", "host peak")
    assert [row[-2:] for row in both.rows] == [("–", "5.0 MiB"), ("5.0 MiB", "5.0 MiB")]
