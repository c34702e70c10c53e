"""The contents of the peak, the verdict, prediction and measurement, the curve of the losses."""

from __future__ import annotations

import dataclasses
import xml.etree.ElementTree as ET
from pathlib import Path
from typing import Any

import pytest

from ebbtide.report import Run, load_run, page, peak, verdicts
from ebbtide.report.losses import losses_svg
from ebbtide.report.peak import WORK, split
from ebbtide.report.story import peak_sentence
from ebbtide.report.table import ABSENT, loss_verdict, losses_table, saved_percent
from ebbtide.report.verdict import prediction, step_costs
from ebbtide.track import write_summary
from tests.unit.report.runs import MIB, write_run
from tests.unit.track.events import begin, event, write_events

SVG = "{http://www.w3.org/2000/svg}"
PARTS = {"weights": {"m": 100 * MIB}, "gradient_bytes": 100 * MIB, "optimizer_bytes": 200 * MIB}
FLOOR, KEPT, OUTSIDE, REST, RISE = 350 * MIB, 80 * MIB, 40 * MIB, 10 * MIB, 25 * MIB


def device_run(folder: Path, *, peak_at: str = "loss", engine: bool = True, steps: int = 3) -> Run:
    """Write a run on a device whose every byte is known; the second step has the peak."""
    events = [begin(device="cuda", mode="ebbtide")]
    inside = 120 * MIB
    for step in range(1, steps + 1):
        t = 10.0 * step

        def memory(after: float, size: int, t: float = t) -> dict[str, Any]:
            return event(t + after, "memory", rss_bytes=1, device_bytes=size)

        def edge(after: float, name: str, which: str, t: float = t, step: int = step) -> dict[str, Any]:
            return event(t + after, "phase", name=name, edge=which, step=step)

        top = FLOOR + KEPT + OUTSIDE + REST
        events += [edge(0.0, "forward", "begin"), memory(0.0001, FLOOR)]
        if engine:
            events.append(event(
                t + 1.0, "pass_end", saved_bytes=inside, unique_bytes=inside, kept_bytes=KEPT,
                offloaded_bytes=40 * MIB, recomputed_bytes=0, packs=3,
            ))  # fmt: skip
        events += [edge(1.0, "forward", "end"), memory(1.0001, top), edge(1.0, "backward", "begin")]
        events += [memory(1.5, top + (RISE if peak_at == "loss" and step == 2 else 0))]
        events += [event(t + 2.0, "block_backward", index=1, name="layers.1")] if engine else []
        events += [memory(2.5, top + (RISE if peak_at == "block" and step == 2 else 0) - 5 * MIB)]
        events += [edge(3.0, "backward", "end"), edge(3.0, "optimizer", "begin")]
        events += [memory(3.5, 700 * MIB if peak_at == "optimizer" and step == 2 else FLOOR)]
        events += [edge(4.0, "optimizer", "end"), event(t + 4.0, "step", step=step, loss=1.0, seconds=4.0, tokens=1)]
        if engine:
            share = 100 * inside / (inside + OUTSIDE)
            totals = {"total_stall_seconds": 0.5 * step, "total_recompute_seconds": 0.25 * step}
            copies = {"total_copy_out_bytes": 40 * MIB * step, "copy_out_bytes_per_second": 80.0 * MIB}
            counted = {"coverage_percent": share, "unique_bytes": inside, "small_bytes": 0}
            events.append(event(t + 4.1, "stats", step=step, **counted, **totals, **copies))
        if step == 1:
            events.append(event(t + 4.2, "parts", step=1, **PARTS))
            # A higher sample in the warm-up is not the peak of training.
            events.append(memory(3.8, 5000 * MIB))
            predicted = {"step_seconds": 3.5, "overhead_percent": 2.0, "kept_bytes": KEPT, "offloaded_bytes": 40 * MIB}
            events.append(
                event(t - 0.5, "plan", name="auto", text="...", predicted={**predicted, "recomputed_bytes": 0})
            )
    events.append(event(10.0 * steps + 5, "run_end", status="ok", error=None))
    write_events(folder / "run.jsonl", sorted(events, key=lambda e: e["t"]))
    write_summary(folder)
    return load_run(folder)


def test_a_peak_that_the_allocator_reported_names_no_block_and_is_no_floor(tmp_path: Path) -> None:
    """It is dated half-way between two edges: before a forward it includes the gradients that are freed next."""
    run = device_run(tmp_path, peak_at="block")
    first = run.peak(counted=True)
    assert first is not None and not first.dated and first.block == "layers.1"
    more = 6 * 1024 * MIB
    dated = [
        event(19.99999, "memory", rss_bytes=None, device_bytes=FLOOR + 100 * MIB),
        event(22.5, "memory", rss_bytes=None, device_bytes=first.bytes_ + more),
    ]
    run = dataclasses.replace(run, events=sorted([*run.events, *dated], key=lambda e: e["t"]))
    found, before = split(run), split(device_run(tmp_path / "before", peak_at="block"))
    assert found is not None and before is not None and found.peak.dated and found.peak.bytes_ == first.bytes_ + more
    assert found.parts == {**before.parts, WORK: before.parts[WORK] + more}
    assert peak_sentence(run).endswith("in backward of step 2.")


def test_a_peak_in_the_loss_is_divided_into_what_was_recorded(tmp_path: Path) -> None:
    found = split(device_run(tmp_path))
    assert found is not None and found.peak.bytes_ == FLOOR + KEPT + OUTSIDE + REST + RISE
    assert found.parts == {
        "weights": 100 * MIB, "optimizer state": 200 * MIB, "kept activations": KEPT,
        "logits and loss": OUTSIDE + RISE, "other": FLOOR - 300 * MIB + REST,
    }  # fmt: skip
    assert sum(found.parts.values()) == found.peak.bytes_
    assert found.advice is not None and found.advice.startswith("optimizer state: adapters (LoRA)")


@pytest.mark.parametrize(
    ("peak_at", "part", "size"),
    [("block", peak.WORK, RISE - 5 * MIB), ("optimizer", peak.GRADIENTS, 100 * MIB)],
)
def test_a_later_peak_has_other_parts(tmp_path: Path, peak_at: str, part: str, size: int) -> None:
    found = split(device_run(tmp_path, peak_at=peak_at))
    assert found is not None and found.peak.step == 2
    assert found.parts[part] == size
    assert (peak.KEPT in found.parts) is (peak_at == "block")
    assert sum(found.parts.values()) == found.peak.bytes_


def test_without_the_engine_what_forward_adds_is_activations(tmp_path: Path) -> None:
    found = split(device_run(tmp_path, engine=False))
    assert found is not None
    assert found.parts[peak.PLAIN] == KEPT + OUTSIDE + REST and found.parts[peak.WORK] == RISE
    assert split(dataclasses.replace(load_run(tmp_path), events=[])) is None


def test_without_a_record_of_parts_nothing_is_invented(tmp_path: Path) -> None:
    run = device_run(tmp_path, engine=False)
    bare = dataclasses.replace(run, events=[e for e in run.events if e["event"] in ("run_begin", "memory", "step")])
    found = split(bare)
    assert found is not None and found.parts == {"other": found.peak.bytes_} and found.advice is None


def test_models_with_a_forward_each_before_one_backward_are_added_up(tmp_path: Path) -> None:
    run = device_run(tmp_path)
    for event_ in run.events:
        if event_["event"] == "pass_end":
            event_["engine"] = 2
    first = [
        event(18.0, "phase", name="forward", edge="begin", step=2),
        event(18.1, "memory", rss_bytes=1, device_bytes=FLOOR - 30 * MIB),
        event(19.0, "pass_end", engine=1, unique_bytes=30 * MIB, kept_bytes=30 * MIB),
        event(19.0, "phase", name="forward", edge="end", step=2),
    ]
    stats = [event(24.2, "stats", step=2, coverage_percent=100.0, unique_bytes=30 * MIB, small_bytes=0)]
    found = split(dataclasses.replace(run, events=sorted([*run.events, *first, *stats], key=lambda e: e["t"])))
    assert found is not None and found.parts["kept activations"] == KEPT + 30 * MIB
    assert found.parts["logits and loss"] == OUTSIDE + RISE
    assert sum(found.parts.values()) == found.peak.bytes_


def test_passes_of_one_model_before_one_backward_are_added_up(tmp_path: Path) -> None:
    """The last one runs no block: a head that reads what an earlier forward computed."""
    run = device_run(tmp_path)
    (second,) = (e for e in run.events if e["event"] == "pass_end" and 20 < e["t"] < 30)
    first = {**second, "t": 20.5, "unique_bytes": second["unique_bytes"] // 2, "kept_bytes": 6 * MIB}
    idle = {**second, "t": 20.999, "unique_bytes": 0, "kept_bytes": 0}
    second["t"], second["kept_bytes"] = 20.7, KEPT - 6 * MIB
    (stats,) = (e for e in run.events if e["event"] == "stats" and e["step"] == 2)
    for share in (stats["coverage_percent"], 90.0):
        stats["coverage_percent"] = share
        found = split(dataclasses.replace(run, events=sorted([*run.events, first, idle], key=lambda e: e["t"])))
        assert found is not None and found.parts["kept activations"] == KEPT
        outside = min(1.5 * second["unique_bytes"] * (100 - share) / share, OUTSIDE + REST)
        assert found.parts["logits and loss"] == round(outside) + RISE


@pytest.mark.parametrize(("recorded", "logits"), [(True, OUTSIDE), (False, 0)])
def test_the_logits_are_those_of_the_peaks_step_if_it_has_a_record(tmp_path: Path, recorded: bool, logits: int) -> None:
    run = device_run(tmp_path)
    events = [e for e in run.events if e["event"] != "stats" or e["step"] != 2 or recorded]
    for last in (e for e in events if e["event"] == "stats" and e["step"] == 3):
        last["coverage_percent"] = 100.0
    found = split(dataclasses.replace(run, events=events))
    assert found is not None and found.parts["logits and loss"] == logits + RISE


def test_a_small_part_of_the_peak_is_no_advice(tmp_path: Path) -> None:
    found = split(device_run(tmp_path, engine=False))
    assert found is not None and found.advice is not None
    assert dataclasses.replace(found, parts={"weights": 1 * MIB, "other": 99 * MIB}).advice is None


def test_the_bars_are_to_one_scale_and_the_table_adds_up(tmp_path: Path) -> None:
    found = [(n, split(device_run(tmp_path / n, peak_at=n))) for n in ("loss", "optimizer")]
    picture = ET.fromstring(peak.splits_svg({name: one for name, one in found if one is not None}) or "")
    widths: dict[str, float] = {"loss": 0.0, "optimizer": 0.0}
    for rect in picture.iter(f"{SVG}rect"):
        if len(rect):
            widths[str(rect[0].text).partition(":")[0]] += float(rect.get("width") or 0)
    assert widths["loss"] / widths["optimizer"] == pytest.approx(505 / 700, rel=1e-3)
    table = peak.splits_table({name: one for name, one in found if one is not None})
    assert table.rows[-1] == ("peak", "505.0 MiB", "700.0 MiB")
    assert peak.splits_svg({}) is None and peak.splits_table({}).rows == ()


def test_the_peak_is_compared_with_the_mean_of_equal_runs() -> None:
    found = {"plain": 1000 * MIB, "plain-again": 900 * MIB, "ebbtide": 930 * MIB}
    plain, again, ours = ({"mode": mode, "device": "cuda", "inside": {"peak_bytes": n}} for mode, n in found.items())
    (line,) = verdicts(dict(zip(found, (plain, again, ours), strict=True)), {})
    assert line.startswith("ebbtide: peak −20.0 MiB (2 %), no more than equal runs differ by (100.0 MiB)")
    (line,) = verdicts({"plain": plain, "ebbtide": ours}, {})
    assert line.startswith("ebbtide: peak −70.0 MiB (7 %) (against")


def test_the_verdict_says_what_was_saved_at_what_price_and_what_is_left(tmp_path: Path) -> None:
    plain = load_run(write_run(tmp_path / "plain", "plain"))
    ours = load_run(write_run(tmp_path / "ebbtide", "ebbtide", height=150 * MIB, slow=1.1, engine=True))
    three = {**ours.summary, "timed_steps": 3}
    (line,) = verdicts({"plain": plain.summary, "ebbtide": three}, {"ebbtide": split(ours)})
    assert line.startswith("ebbtide: peak −646.7 MiB (34 %), step +6 %, losses bitwise equal (against plain); ")
    assert "what is left of the peak: work of backward" in line and " → " in line
    alone = verdicts({"ebbtide": ours.summary}, {})
    assert alone[0].startswith("ebbtide: 100.0 MiB of the 132.0 MiB of activations ")
    assert alone[0].endswith(", step 3.500 s, peak 1.21 GiB.") and "kept everything" not in alone[0]
    nothing = {**ours.summary, "plan": {"name": "auto", "text": "any words", "kept_because": "gains_nothing"}}
    (line,) = verdicts({"ebbtide": nothing}, {"ebbtide": split(ours)})
    assert (
        "kept everything" in line
        and line.count(" → ") == 1
        and "policy 'minimal', or a larger limit: ebbtide.Auto(" in line
    )
    for lone in (
        ours,
        dataclasses.replace(ours, summary={**nothing, "plan": {"name": "auto", "kept_because": "lone"}}),
    ):
        found = split(lone)
        assert found is not None
        kept = dataclasses.replace(found, parts={"kept activations": found.peak.bytes_})
        smaller = lone is not ours
        assert kept.advice is not None and ("smaller blocks" in kept.advice) is smaller
        assert ("minimal" in kept.advice) is (lone.summary["plan"]["name"] != "minimal" and not smaller)
        (line,) = verdicts({"ebbtide": lone.summary}, {"ebbtide": split(lone)})
        assert ("only one block ran; " in line and line.endswith("at once.")) is smaller and "larger limit" not in line
    one = {**ours.summary, "timed_steps": 1}
    assert "step time not judged (1 step timed), " in verdicts({"plain": plain.summary, "ebbtide": one}, {})[0]
    assert ", step +" in verdicts({"plain": plain.summary, "ebbtide": {**one, "rounds": 3}}, {})[0]
    small = {**ours.summary, "plan": {"name": "auto", "text": "any words", "kept_because": "small"}}
    assert "below min_bytes" in verdicts({"ebbtide": small}, {})[0]
    for unmarked in ({}, {"kept_because": None}, {"kept_because": "fits"}):  # of an earlier release, too
        plan = {"name": "auto", "text": "everything stays: nothing is gained", **unmarked}
        assert "kept everything" not in verdicts({"ebbtide": {**ours.summary, "plan": plan}}, {})[0]
    uneven = {**ours.summary, "loss": [9.0, 1.5, 1.0]}
    assert "LOSSES DIFFER" in verdicts({"plain": plain.summary, "ebbtide": uneven}, {})[0]


def test_where_a_model_checkpoints_its_blocks_the_advice_is_to_switch_that_off(tmp_path: Path) -> None:
    run = device_run(tmp_path)
    plan = {"name": "auto", "text": "", "own_checkpoints": 8}
    own = dataclasses.replace(run, summary={**run.summary, "plan": plan})
    for found, checkpoints in ((split(run), False), (split(own), True)):
        assert found is not None
        most = dataclasses.replace(found, parts={"kept activations": found.peak.bytes_})
        assert most.advice is not None and ("policy 'minimal'" in most.advice) is not checkpoints
        assert ("gradient_checkpointing_disable()" in most.advice) is checkpoints
    kept = {**own.summary, "plan": {**plan, "kept_because": "gains_nothing"}}
    (line,) = verdicts({"ebbtide": kept}, {"ebbtide": split(own)})
    assert "gradient_checkpointing_disable()" in line and "ebbtide.Auto(" in line and "minimal" not in line


def test_savings_within_the_noise_are_not_shown_as_numbers(tmp_path: Path) -> None:
    plain = load_run(write_run(tmp_path / "plain", "plain", height=100 * MIB)).summary
    ours = load_run(write_run(tmp_path / "ebbtide", "ebbtide", height=103 * MIB)).summary
    assert "peak unchanged" in verdicts({"plain": plain, "ebbtide": ours}, {})[0]
    assert saved_percent(ours, plain) is None
    small = {"device": "cpu", "inside": {"activation_bytes": 3 * MIB}}
    assert saved_percent({"device": "cpu", "inside": {"activation_bytes": 6 * MIB}}, small) is None
    assert saved_percent({"device": "cpu", "inside": {"activation_bytes": 50 * MIB}}, plain) == pytest.approx(50.0)


def test_prediction_and_measurement_are_shown_with_the_parts_of_a_step(tmp_path: Path) -> None:
    run = device_run(tmp_path)
    assert step_costs(run) == {
        "stalls": 0.5, "recomputing (host time)": 0.25, "copying out, during compute": 0.5,
    }  # fmt: skip
    table = prediction(run)
    assert table.columns[1] == "predicted (+2.0 % of the step that keeps everything)"
    assert ("step", "3.500 s", "4.000 s") in table.rows
    assert ("of it, stalls", "–", "0.500 s") in table.rows
    assert ("kept", "80.0 MiB", "80.0 MiB") in table.rows
    assert prediction(device_run(tmp_path / "plain", engine=False)).rows != ()
    bare = dataclasses.replace(run, events=[e for e in run.events if e["event"] != "plan"])
    assert prediction(bare).rows == ()
    shown = page([run])
    assert "predicted (+2.0 %" in shown and "What holds the peak" in shown


def accumulating_run(folder: Path, micro_batches: int) -> Run:
    """Write a run in which a step has several forwards and backwards; the peak is in the last backward."""
    events = [begin(device="cuda", mode="ebbtide")]
    predicted = {"step_seconds": 1.9, "overhead_percent": 2.0, "kept_bytes": 0}
    events.append(event(1.0, "plan", name="auto", text="", predicted=predicted))
    for step in (1, 2, 3):
        t = 100.0 * step
        for number in range(micro_batches):
            floor = 350 * MIB + (100 * MIB if number else 0)
            for name, at, size in (("forward", t, floor), ("backward", t + 1, floor + 50 * MIB)):
                events.append(event(at, "phase", name=name, edge="begin", step=step))
                events.append(event(at + 0.0001, "memory", rss_bytes=1, device_bytes=size))
                events.append(event(at + 1, "phase", name=name, edge="end", step=step))
            t += 2
        events.append(event(t, "phase", name="optimizer", edge="begin", step=step))
        events.append(event(t + 0.5, "phase", name="optimizer", edge="end", step=step))
        seconds = t + 0.5 - 100.0 * step
        events.append(event(t + 0.5, "step", step=step, loss=1.0, seconds=seconds, tokens=1))
        totals = {"total_stall_seconds": 0.2 * micro_batches * step, "total_recompute_seconds": 0.0}
        events.append(event(t + 0.6, "stats", step=step, **totals))
        if step == 1:
            events.append(event(t + 0.7, "parts", **PARTS))
    events.append(event(400.0, "run_end", status="ok", error=None))
    write_events(folder / "run.jsonl", sorted(events, key=lambda e: e["t"]))
    write_summary(folder)
    return load_run(folder)


def test_the_costs_of_a_step_leave_out_differences_over_several(tmp_path: Path) -> None:
    """A long record has totals now and then; steps that a loop does not number have no distance."""
    run = device_run(tmp_path, steps=5)
    assert step_costs(run)["stalls"] == 0.5
    events = [e for e in run.events if e["event"] != "stats" or e["step"] not in (3, 4)]
    assert "stalls" not in step_costs(dataclasses.replace(run, events=[e for e in events if e.get("step") != 2]))
    for event_ in events:
        if event_["event"] == "stats":
            event_["step"] = None
    assert step_costs(dataclasses.replace(run, events=events))["stalls"] > 0.5


def test_the_prediction_of_a_micro_batch_is_compared_with_one(tmp_path: Path) -> None:
    table = prediction(accumulating_run(tmp_path / "four", 4))
    assert table.columns[2] == "measured, of one of 4 micro-batches"
    assert table.rows[0] == ("step", "1.900 s", "2.125 s")  # 8.5 s in four micro-batches
    assert table.rows[1] == ("of it, stalls", "–", "0.200 s")
    alone = prediction(accumulating_run(tmp_path / "one", 1))
    assert alone.columns[2] == "measured" and alone.rows[0] == ("step", "1.900 s", "2.500 s")


def test_gradients_of_earlier_micro_batches_are_gradients(tmp_path: Path) -> None:
    for micro_batches, gradients in ((1, None), (2, 100 * MIB)):
        found = split(accumulating_run(tmp_path / str(micro_batches), micro_batches))
        assert found is not None and found.parts.get("gradients") == gradients
        assert found.parts["other"] == 50 * MIB and sum(found.parts.values()) == found.peak.bytes_


def test_losses_are_a_curve(tmp_path: Path) -> None:
    picture = losses_svg({"plain": {"loss": [3.0, 2.0, 1.0]}, "ebbtide": {"loss": [3.0, "nan", 2.0]}})
    lines = [
        [tuple(map(float, p.split(","))) for p in str(line.get("points")).split()]
        for line in ET.fromstring(picture or "").iter(f"{SVG}polyline")
    ]
    assert [len(line) for line in lines] == [3, 2]
    (left, high), (middle, _), (right, low) = lines[0]
    assert left < middle < right and high < low and middle == pytest.approx((left + right) / 2, abs=0.1)
    assert lines[1][0] == (left, high)
    many = losses_svg({"plain": {"loss": [1 / n for n in range(1, 5000)]}}) or ""
    assert many.count(",") < 2000 and "4999" in many
    assert losses_svg({"a": {"loss": [None, None]}, "b": {}}) is None


def test_losses_of_a_resumed_run_stand_at_their_steps() -> None:
    whole = {"loss": [5.0, 4.0, 3.0, 2.0], "first_step": 1}
    rest, wrong = {"loss": [3.0, 2.0], "first_step": 3}, {"loss": [3.0, 1.0], "first_step": 3}
    table = losses_table({"whole": whole, "rest": rest})
    assert [row[0] for row in table.rows] == ["1", "2", "3", "4"]
    assert [row[3] for row in table.rows] == [ABSENT, ABSENT, "equal", "equal"]
    assert loss_verdict(rest, whole) == "equal in 2 steps" and loss_verdict(wrong, whole) == "differ"
    for status in ("ok", "interrupted", "killed"):  # a shorter run, whatever ended it
        assert loss_verdict({"loss": [5.0, 4.0], "status": status}, whole) == "equal in 2 steps"
        assert loss_verdict(whole, {"loss": [5.0], "status": status}) == "equal in 1 step"
    assert loss_verdict({"loss": [5.0, 1.0], "status": "killed"}, whole) == "differ"
    assert loss_verdict({"loss": [5.0, 4.0], "model": "another"}, whole) == ABSENT
    assert loss_verdict({"loss": [3.0], "first_step": 9}, whole) == ABSENT, "no step in common"
    sparse = {"loss": [4.0, 2.0], "first_step": 2, "step_numbers": [2, 4]}
    assert [row[3] for row in losses_table({"whole": whole, "sparse": sparse}).rows] == [ABSENT, "equal"] * 2
    assert loss_verdict(sparse, whole) == "equal in 2 steps"
    alone = losses_svg({"rest": rest}) or ""
    assert ">3<" in alone and ">4<" in alone and ">1<" not in alone


def test_losses_that_were_not_compared_are_called_neither_equal_nor_different() -> None:
    silent, told = {"loss": [None, None]}, {"loss": [2.0, 1.0]}
    assert loss_verdict(silent, silent) == loss_verdict(silent, told) == loss_verdict(told, silent) == ABSENT
    assert loss_verdict({**told, "loss_equal": None}, told) == ABSENT, "the script was found to be not deterministic"
    assert loss_verdict({"loss": [None, 1.0]}, {"loss": [None, 1.0]}) == "equal"
