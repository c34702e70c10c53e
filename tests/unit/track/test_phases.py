"""Phases keep their names: the time and memory of each are reported, whatever its name."""

import pytest

from ebbtide.report import load_run
from ebbtide.report.story import rewards
from ebbtide.report.table import phases_table
from ebbtide.report.text import text
from ebbtide.report.timeline import timeline_svg
from ebbtide.track import summarise, write_summary
from tests.unit.track.events import begin, event, phases, write_events


def phase(name, step, start, end):
    return [event(t, "phase", name=name, edge=edge, step=step) for t, edge in ((start, "begin"), (end, "end"))]


def memory(t, rss):
    return event(t, "memory", rss_bytes=rss, device_bytes=None)


def rollout_steps():
    """Two steps that generate twice before they learn; generation holds 700 over a base of 100."""
    made = [begin()]
    for step, start in ((1, 10.0), (2, 20.0)):
        made += [*phase("generation", step, start, start + 1), *phase("generation", step, start + 2, start + 4)]
        made += [memory(start + t, 100 + held * step) for t, held in ((0.1, 0), (0.5, 300), (1.0, 0), (2.1, 0))]
        made += [memory(start + 3.0, 100 + 350 * step), memory(start + 4.0, 100)]
        learned = phases(step, start + 5)
        learned[-1]["reward"] = 0.25 * step
        made += learned
    return sorted(made, key=lambda e: e["t"])


def test_a_phase_is_the_sum_of_its_spans_over_a_steady_step(tmp_path):
    write_events(tmp_path / "run.jsonl", rollout_steps())
    summary = summarise(tmp_path)
    assert list(summary["phases"]) == ["generation", "forward", "backward", "optimizer"]
    assert summary["phases"]["generation"] == {"seconds_median": 3.0, "peak_bytes": 800, "rise_bytes": 700}
    assert summary["phases"]["backward"] == {"seconds_median": 2.0, "peak_bytes": None, "rise_bytes": None}
    assert summary["reward"] == [0.25, 0.5]


def test_a_step_that_did_not_end_has_no_phases_that_count(tmp_path):
    failed = phase("forward", 3, 40.0, 40.1)
    write_events(tmp_path / "run.jsonl", [*rollout_steps(), *failed])
    assert summarise(tmp_path)["phases"]["forward"]["seconds_median"] == 1.0
    write_events(tmp_path / "run.jsonl", [begin(), *phases(1, 1.0), *failed])
    assert summarise(tmp_path)["phases"]["forward"]["seconds_median"] == 1.0
    write_events(tmp_path / "run.jsonl", [begin(), *failed])
    assert summarise(tmp_path)["phases"]["forward"]["seconds_median"] == pytest.approx(0.1)


def test_the_outside_view_is_taken_where_there_is_one(tmp_path):
    write_events(tmp_path / "run.jsonl", rollout_steps())
    write_events(tmp_path / "outside.jsonl", [memory(t, size) for t, size in ((9, 5), (20.2, 10), (20.8, 90))])
    assert summarise(tmp_path)["phases"]["generation"] == {"seconds_median": 3.0, "peak_bytes": 90, "rise_bytes": 80}


def test_a_run_without_rewards_has_none(tmp_path):
    write_events(tmp_path / "run.jsonl", [begin(), *phases(1, 1.0)])
    assert summarise(tmp_path)["reward"] is None


def test_reports_show_every_phase_by_its_name(tmp_path):
    write_events(tmp_path / "run.jsonl", rollout_steps())
    write_summary(tmp_path)
    run = load_run(tmp_path)
    assert phases_table({run.name: run.summary}).rows[0] == ("plain", "generation", "3.000 s", "800 B", "700 B")
    span = run.step_span(2)
    assert (span.begin, span.end) == (20.0, 28.5)
    picture = timeline_svg([run])
    assert "generation, 2.000 s" in picture and "--phase-a" in picture and "forward, 1.000 s" in picture
    assert rewards(run) == "plain: mean reward 0.375 over the first 2 steps, 0.375 over the last 2."
    told = text(run)
    assert "generation" in told and "mean reward 0.375" in told


@pytest.mark.parametrize(("device", "head"), [("cpu", "time per step"), ("cuda", "host time per step")])
def test_times_of_phases_on_a_device_are_named_as_those_of_the_host(tmp_path, device, head):
    write_events(tmp_path / "run.jsonl", [begin(device=device), *phases(1, 1.0)])
    write_summary(tmp_path)
    run = load_run(tmp_path)
    assert phases_table({run.name: run.summary}).columns[2] == f"{head} that has it"
    assert f" {head} that has it" in text(run)
