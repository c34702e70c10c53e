import json
import resource

import pytest

from ebbtide.base.errors import DataError
from ebbtide.base.runs import SETTLING
from ebbtide.report import load_run
from ebbtide.report.table import losses_by_step, measured
from ebbtide.track import summarise, write_summary
from ebbtide.track.steady import Steady
from tests.unit.track.events import begin, event, pass_end, phases, write_events

MIB = 1024**2
UNKNOWN = [
    "step_seconds_median",
    "tokens_per_second",
    "peak_device_bytes",
    "peak_host_bytes",
    "baseline_activation_bytes",
    "memory_saved_bytes",
    "memory_saved_percent",
    "stall_seconds",
    "copy_out_bytes_per_second",
    "copy_in_bytes_per_second",
    "plan",
    "outside",
    "model",
    "ebbtide",
]


def run(tmp_path, events, outside=None):
    write_events(tmp_path / "run.jsonl", events)
    if outside is not None:
        write_events(tmp_path / "outside.jsonl", outside)
    return summarise(tmp_path)


def memory(t, rss, device=None):
    return event(t, "memory", rss_bytes=rss, device_bytes=device)


def test_the_first_step_counts_for_no_time_or_rate(tmp_path):
    slow = [{**e, "seconds": 100.0} if e["event"] == "step" else e for e in phases(1, 1.0)]
    summary = run(tmp_path, [begin(), *slow, *phases(2, 10.0), *phases(3, 20.0, backward=4.0)])
    assert summary["steps"] == 3
    assert summary["step_seconds_median"] == (3.5 + 5.5) / 2
    assert summary["tokens_per_second"] == (70 / 3.5 + 70 / 5.5) / 2  # the median, as for the steps
    assert summary["loss"] == [3.0, 2.0, 1.0]


def rollouts(seconds, *, tokens=1000, generates=lambda step: step % 3 == 1):
    """Events of steps that take these seconds; one in three also generates, in which it takes longer."""
    made, t = [begin()], 1.0
    for step, duration in enumerate(seconds, start=1):
        if generates(step):
            made += [event(t, "phase", name="generation", edge=edge, step=step) for edge in ("begin", "end")]
        t += duration
        made.append(event(t, "step", step=step, loss=1.0, seconds=duration, tokens=tokens))
    return made


@pytest.mark.parametrize(
    ("seconds", "rate"),
    [
        ([10, 1, 1, 10, 1, 1, 6, 1, 1, 10, 1], 6000 / 20),  # steps 4 to 9
        ([10, 1, 1, 10, 1, 1], None),  # the first is warm-up: no whole rollout is there
        ([10, 1, 1], None),
    ],
)
def test_tokens_per_second_are_those_of_whole_rollouts_with_their_generation(tmp_path, seconds, rate):
    assert run(tmp_path, rollouts(seconds))["tokens_per_second"] == rate


def test_tokens_per_second_are_a_median_where_every_step_generates(tmp_path):
    assert run(tmp_path, rollouts([9, 4, 5, 10], generates=lambda step: True))["tokens_per_second"] == 200
    some = [{**e, "tokens": None} if e.get("step") == 5 and "tokens" in e else e for e in rollouts([2] * 11)]
    assert run(tmp_path, some)["tokens_per_second"] is None


def made_plan_after(steps, *, total):
    """Events of steps of 3.5 s each, the warm-up's slower; a plan is made before the first and after ``steps``."""
    events = [begin(), event(0.5, "plan", name="auto", text="heuristic"), pass_end(1.0, unique=1, kept=1)]
    for step in range(1, total + 1):
        start = 10.0 * step
        events += phases(step, start, backward=6.0 if step <= steps + SETTLING else 2.0)
        events.append(
            event(start + 1, "stall", where="backward", block=0, seconds=1.0 if step <= steps + SETTLING else 0.25)
        )
        if step == steps:
            events.append(event(start + 9, "plan", name="auto", text="measured"))
    return events


def test_steps_before_the_last_plan_warm_up_and_count_for_nothing(tmp_path):
    """The plan's first step, as slow as they are, is one of them."""
    summary = run(tmp_path, made_plan_after(3, total=7))
    assert (summary["warm_up_steps"], summary["timed_steps"]) == (4, 3)
    assert summary["step_seconds_median"] == 3.5
    assert summary["stall_seconds"] == 0.75
    assert summary["phases"]["backward"]["seconds_median"] == 2.0
    assert len(summary["loss"]) == 7


def test_a_comparison_says_how_many_steps_warm_up(tmp_path):
    write_events(tmp_path / "run.jsonl", made_plan_after(3, total=6))
    assert summarise(tmp_path, warm_up=5)["timed_steps"] == 1
    # Not enough steps: one is left out, as for a run that has no plan.
    assert summarise(tmp_path, warm_up=6)["warm_up_steps"] == 1


def test_a_plan_recorded_after_the_last_step_has_no_warm_up(tmp_path):
    events = [begin(), *phases(1, 1.0), *phases(2, 10.0), event(20.0, "plan", name="auto", text="what it became")]
    assert run(tmp_path, events)["warm_up_steps"] == 1


def test_a_verdict_is_the_plans_last_text_and_no_plan_of_its_own(tmp_path):
    events = [begin(), *phases(1, 1.0), event(5.0, "plan", name="auto", text="not measured yet"), *phases(2, 10.0)]
    judged = event(15.0, "verdict", name="auto", text="measured", kept_because="gains_nothing", own_checkpoints=4)
    events += [judged, *phases(3, 20.0), *phases(4, 30.0)]
    summary = run(tmp_path, events)
    assert summary["plan"] == {
        "name": "auto", "text": "measured", "kept_because": "gains_nothing", "own_checkpoints": 4,
    }  # fmt: skip
    assert summary["warm_up_steps"] == 2


def test_no_step_is_searched_for_among_those_of_a_long_warm_up():
    """Otherwise the summary of a run that plans late would take hours."""
    compared = 0

    class Step(int):
        __hash__ = int.__hash__

        def __eq__(self, other):
            nonlocal compared
            compared += 1
            return int(self) == int(other)

    steady = Steady(warm_up=frozenset(map(Step, range(100))), trimmed=frozenset(), begins=0.0)
    assert [steady.counts(Step(step)) for step in range(200)] == [False] * 100 + [True] * 100
    assert compared <= 300


def test_activations_come_from_the_trimmed_step_and_times_from_the_others(tmp_path):
    """Before the trim the allocator keeps what was freed: the forward seems to add nothing."""
    steps = [*phases(1, 10.0), *phases(2, 20.0), event(29.0, "trim", step=3), *phases(3, 30.0, forward=1.5)]
    inside = [memory(t, 900) for t in (10.001, 11.001, 20.001, 21.001)] + [memory(30.001, 500), memory(31.501, 900)]
    outside = [memory(t, size) for t, size in ((9.9, 900), (20.9, 950), (29.9, 700), (31.5, 850))]
    summary = run(tmp_path, [begin(), *steps, *inside], outside)
    assert (summary["timed_steps"], summary["step_seconds_median"]) == (1, 3.5)
    assert summary["phases"]["forward"]["seconds_median"] == 1.0
    for view in ("inside", "outside"):
        assert (summary[view]["floor_bytes"], summary[view]["activation_bytes"]) == (500, 400)
    assert summary["outside"]["peak_bytes"] == 950


def test_what_is_not_known_is_null(tmp_path):
    summary = run(tmp_path, [begin(model=None)])
    for key in UNKNOWN:
        assert summary[key] is None, key
    assert set(summary["activation_bytes"].values()) == {None}
    assert (summary["steps"], summary["loss"]) == (0, [])


def test_tokens_missing_in_one_step_make_the_rate_unknown(tmp_path):
    steps = [event(t, "step", step=t, loss=1.0, seconds=1.0, tokens=None if t == 3 else 5) for t in (1, 2, 3)]
    assert run(tmp_path, [begin(), *steps])["tokens_per_second"] is None


def test_activations_come_from_the_largest_steady_pass_and_the_later_of_equals(tmp_path):
    events = [
        begin(),
        pass_end(1.5, unique=9000, kept=9000),
        *phases(1, 1.0),
        pass_end(11, unique=1000, kept=400, recomputed=600),
        *phases(2, 10.5),
        pass_end(21, unique=1000, kept=250, offloaded=500, recomputed=250),
        *phases(3, 20.5),
        pass_end(31, unique=10, kept=10),
    ]
    summary = run(tmp_path, events)
    assert summary["activation_bytes"] == {
        "saved": 2000,
        "unique": 1000,
        "kept": 250,
        "offloaded": 500,
        "recomputed": 250,
    }
    assert (summary["baseline_activation_bytes"], summary["memory_saved_bytes"]) == (1000, 750)
    assert summary["memory_saved_percent"] == 75.0


@pytest.mark.parametrize(
    ("before", "baseline"), [({}, 5000), ({"checkpointed": 3}, None)], ids=["measured before", "never seen"]
)
def test_the_baseline_of_checkpointed_blocks_needs_a_pass_without_them(tmp_path, before, baseline):
    events = [begin(), {**pass_end(1.5, unique=5000, kept=5000), **before}, *phases(1, 1.0)]
    events.append({**pass_end(11, unique=100, kept=50), "checkpointed": 3})
    summary = run(tmp_path, events)
    assert (summary["activation_bytes"]["unique"], summary["activation_bytes"]["kept"]) == (100, 50)
    assert summary["baseline_activation_bytes"] == baseline
    assert summary["memory_saved_percent"] == (None if baseline is None else 99.0)


def test_stalls_are_added_up_and_none_is_zero_once_the_engine_ran(tmp_path):
    stalls = [event(t, "stall", where="backward", block=t, seconds=0.25, bytes=8) for t in (2, 3)]
    assert run(tmp_path, [begin(), pass_end(1, unique=1, kept=1), *stalls])["stall_seconds"] == 0.5
    assert run(tmp_path, [begin(), pass_end(1, unique=1, kept=1)])["stall_seconds"] == 0


def test_a_model_that_copies_nothing_hides_no_rates(tmp_path):
    rates = {"copy_out_bytes_per_second": 5.0, "copy_in_bytes_per_second": 7.0}
    events = [event(t, "stats", step=1, **given) for t, given in ((2, rates), (3, dict.fromkeys(rates)))]
    summary = run(tmp_path, [begin(), *events])
    assert {name: summary[name] for name in rates} == rates
    assert run(tmp_path, [begin(), events[1]])["copy_in_bytes_per_second"] is None


def test_on_a_cpu_the_device_peak_is_the_resident_peak(tmp_path):
    assert run(tmp_path, [begin(), memory(1, 5), memory(2, 9)])["peak_device_bytes"] == 9
    summary = run(tmp_path, [begin(device="cuda"), memory(1, 50, 7), memory(2, 90, 3)])
    assert (summary["peak_device_bytes"], summary["peak_host_bytes"]) == (7, 90)


@pytest.mark.parametrize(
    ("before", "after", "peak"), [(100, 120, 120), (500, 500, 9)], ids=["rose in the run", "was reached before it"]
)
def test_the_systems_own_peak_counts_only_if_it_rose_in_the_run(tmp_path, before, after, peak):
    end = event(3, "run_end", status="ok", error=None, peak_rss_bytes=after)
    assert run(tmp_path, [begin(peak_rss_bytes=before), memory(2, 9), end])["peak_host_bytes"] == peak


def test_outside_takes_floor_before_and_activations_at_the_forwards_end(tmp_path):
    events = [begin(), *phases(1, 10.0), *phases(2, 20.0), *phases(3, 30.0)]
    samples = [
        memory(9.9, 5000 * MIB),
        memory(19.0, 90 * MIB),
        memory(19.9, 100 * MIB),
        memory(20.001, 110 * MIB),
        memory(20.6, 300 * MIB),
        memory(20.99, 400 * MIB),
        memory(21.5, 700 * MIB),
        memory(29.9, 104 * MIB),
        memory(30.8, 1 * MIB),
        memory(31.01, 604 * MIB),
        memory(40.0, 9000 * MIB),
    ]
    assert run(tmp_path, events, samples)["outside"] == {
        "peak_bytes": 700 * MIB,
        "floor_bytes": 102 * MIB,
        "activation_bytes": 400 * MIB,
        "samples": 11,
    }


def test_forwards_with_samples_at_their_edges_go_before_others(tmp_path):
    """Samples from outside become rarer the longer a run is."""
    events = [begin(), *(edge for step in range(1, 6) for edge in phases(step, 10.0 * step))]
    near = [memory(19.99, 100 * MIB), memory(21.01, 400 * MIB)]
    far = [memory(at + t, 1000 * MIB) for at in (30.0, 40.0, 50.0) for t in (-1.0, 0.5, 3.0)]
    outside = run(tmp_path, events, [*near, *far])["outside"]
    assert (outside["floor_bytes"], outside["activation_bytes"]) == (100 * MIB, 300 * MIB)


def test_inside_takes_the_samples_just_after_the_edges_of_the_device_if_there_is_one(tmp_path):
    steps = [*phases(1, 10.0), *phases(2, 20.0)]
    samples = [memory(19.99, 1, 1), memory(20.001, 70, 7), memory(20.999, 2, 2), memory(21.001, 100, 10)]
    samples.append(memory(22.0, 300, 30))
    measured = {"peak_bytes": 300, "floor_bytes": 70, "activation_bytes": 30, "samples": 5}
    assert run(tmp_path / "cpu", [begin(), *steps, *samples])["inside"] == measured
    on_device = {"peak_bytes": 30, "floor_bytes": 7, "activation_bytes": 3, "samples": 5}
    assert run(tmp_path / "gpu", [begin(device="cuda"), *steps, *samples])["inside"] == on_device


def test_passes_of_several_models_before_one_backward_are_added_up(tmp_path):
    one, other = {"unique": 30, "kept": 10, "offloaded": 20}, {"unique": 50, "kept": 5, "offloaded": 45}
    events = [begin(), *phases(1, 10.0), *phases(2, 20.0)]
    passes = [(20.1, 1, one), (20.2, 2, other), (20.3, 2, other), (22.9, 1, {"unique": 60, "kept": 60})]
    events += [{**pass_end(t, **sizes), "engine": engine} for t, engine, sizes in passes]
    events.append(event(22.5, "block_backward", index=0, name="layers.0"))
    summary = run(tmp_path, sorted(events, key=lambda e: e["t"]))
    assert summary["activation_bytes"] == {"saved": 160, "unique": 80, "kept": 15, "offloaded": 65, "recomputed": 0}
    assert (summary["baseline_activation_bytes"], summary["memory_saved_bytes"]) == (80, 65)


@pytest.mark.parametrize(("grown", "kept", "known"), [(0, 0, False), (-5, 0, False), (20, 30, False), (30, 30, True)])
def test_a_heap_that_grew_by_less_than_it_holds_tells_no_activations(tmp_path, grown, kept, known):
    steps = [*phases(1, 10.0), *phases(2, 20.0), pass_end(20.5, unique=50, kept=kept)]
    samples = [memory(20.001, 70, 70), memory(21.001, 70 + grown, 70 + grown)]
    outside = [memory(19.9, 70), memory(21.0, 70 + grown)]
    summary = run(tmp_path / "cpu", [begin(), *steps, *samples], outside)
    assert [summary[view]["activation_bytes"] for view in ("inside", "outside")] == [grown if known else None] * 2
    on_device = run(tmp_path / "gpu", [begin(device="cuda"), *steps, *samples], outside)
    assert [on_device[view]["activation_bytes"] for view in ("inside", "outside")] == [grown] * 2


def test_a_longer_batch_among_others_leaves_activations_known(tmp_path):
    events, outside = [begin(), *phases(1, 10.0)], []
    for step, kept in ((2, 30), (3, 90), (4, 40)):
        t = 10.0 * step
        events += [memory(t, 70), pass_end(t + 0.5, unique=kept, kept=kept), *phases(step, t)[:2]]
        events += [memory(t + 1.001, 75 + kept), *phases(step, t)[2:]]
        outside += [memory(t - 0.1, 70), memory(t + 1.0, 75 + kept)]
    summary = run(tmp_path, sorted(events, key=lambda e: e["t"]), outside)
    assert summary["activation_bytes"]["kept"] == 90
    assert [summary[view]["activation_bytes"] for view in ("inside", "outside")] == [45, 45]


def test_outside_of_a_single_step_is_unknown(tmp_path):
    outside = run(tmp_path, [begin(), *phases(1, 10.0)], [memory(9, 1), memory(11, 2)])["outside"]
    assert outside == {"peak_bytes": None, "floor_bytes": None, "activation_bytes": None, "samples": 2}


def test_outside_samples_of_an_earlier_run_do_not_count(tmp_path):
    events = [begin(15.0), *phases(2, 20.0), *phases(3, 30.0)]
    own = [memory(t, 10**6) for t in (20, 30)]
    summary = run(tmp_path, [*events, *own], [memory(t, 10**9) for t in (1, 2, 14.9)])
    assert summary["outside"] is None and measured(summary)["samples"] == 2
    assert load_run(tmp_path, summary=summary).curve() == [(20, 10**6), (30, 10**6)]


def test_a_killed_run_is_read_up_to_its_last_whole_line(tmp_path):
    write_events(tmp_path / "run.jsonl", [begin(), *phases(1, 1.0)])
    with (tmp_path / "run.jsonl").open("a") as file:
        file.write('{"t": 9.0, "event": "st')
    summary = summarise(tmp_path)
    assert (summary["status"], summary["steps"]) == ("killed", 1)


@pytest.mark.parametrize("line", ["not json", "[]", '{"event": "x"}', '{"t": 1}'])
def test_a_broken_line_in_the_middle_is_an_error(tmp_path, line):
    (tmp_path / "run.jsonl").write_text(f'{json.dumps(begin())}\n{line}\n{{"t": 2, "event": "step"}}\n')
    with pytest.raises(DataError, match="line 2 of .*; expected one JSON object per line"):
        summarise(tmp_path)


def test_a_folder_without_a_run_is_an_error(tmp_path):
    with pytest.raises(DataError, match="cannot be read"):
        summarise(tmp_path)


def test_events_of_several_threads_are_put_in_order(tmp_path):
    events = [begin(), *phases(1, 10.0), *phases(2, 20.0)]
    assert run(tmp_path / "a", events) == run(tmp_path / "b", [events[0], *reversed(events[1:])])


def test_write_summary_writes_what_it_returns_and_leaves_no_draft(tmp_path):
    write_events(tmp_path / "run.jsonl", [begin(), *phases(1, 1.0)])
    summary = write_summary(tmp_path)
    assert json.loads((tmp_path / "summary.json").read_text()) == summary
    assert sorted(p.name for p in tmp_path.iterdir()) == ["run.jsonl", "summary.json"]


def test_a_log_belongs_to_the_step_before_it_whatever_its_number(tmp_path):
    """A resumed trainer continues its step numbers; one that trains twice starts from 1 twice."""
    steps = [
        {**e, "loss": None, "tokens": None} for n in (1, 2, 3) for e in phases(n, 10.0 * n) if e["event"] == "step"
    ]
    logs = [(step["t"] + 1, number, 10.0 * number) for step, number in zip(steps, (4, 5, 1), strict=True)]
    events = [begin(), *steps, *(event(t, "log", step=n, logs={"loss": loss}) for t, n, loss in logs)]
    assert run(tmp_path, events)["loss"] == [40.0, 50.0, 10.0]


def test_a_summary_that_does_not_fit_on_the_disk_leaves_nothing(tmp_path):
    write_events(tmp_path / "run.jsonl", [begin()])
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (8, before[1]))
    try:
        with pytest.raises(OSError, match="File too large"):
            write_summary(tmp_path)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert [path.name for path in tmp_path.iterdir()] == ["run.jsonl"]


def epochs(*numbers, after=()):
    """Events of steps of 3.5 s that a loop numbers so, one each 4 s; with ``stats``, some with an evaluation."""
    made = [begin()]
    for place, number in enumerate(numbers):
        start = 4.0 * (place + 1)
        made += phases(number, start)
        made.append(event(start + 3.5, "stats", step=number, place=place))
        for edge, t in (("begin", 3.6), ("end", 3.9)) if place in after else ():
            made.append(event(start + t, "phase", name="evaluation", edge=edge, step=number))
    return made


@pytest.mark.parametrize(
    ("numbers", "continued"),
    [
        ([0, 1, 2, 3] * 3, range(12)),
        ([2, 3, 0, 1, 2, 3], range(2, 8)),
        ([0] * 4, range(4)),
        ([5, 6, 9, 20], [5, 6, 9, 20]),
    ],
    ids=["epochs", "from a checkpoint within an epoch", "epochs of one step", "rising"],
)
def test_numbers_that_begin_again_in_each_epoch_are_continued(tmp_path, numbers, continued):
    summary = run(tmp_path, epochs(*numbers))
    times = {name: figures["seconds_median"] for name, figures in summary["phases"].items()}
    assert times == {"forward": 1.0, "backward": 2.0, "optimizer": 0.5}
    assert (summary["steps"], summary["warm_up_steps"], summary["step_seconds_median"]) == (len(numbers), 1, 3.5)
    loaded = load_run(tmp_path, summary=summary)
    assert [span.step for span in loaded.finished_steps()] == [*continued]
    assert all(span.end - span.begin == 3.5 for span in loaded.finished_steps())
    assert [*losses_by_step(summary)] == [*continued]


def test_what_follows_the_last_step_of_an_epoch_belongs_to_it(tmp_path):
    write_events(tmp_path / "run.jsonl", epochs(*[0, 1, 2] * 2, after=(2, 5)))
    loaded = load_run(tmp_path, summary=summarise(tmp_path))
    assert [(event["place"], event["step"]) for event in loaded.all("stats")] == [(n, n) for n in range(6)]
    assert [span.step for span in loaded.phases if span.name == "evaluation"] == [2, 5]


def test_stalls_and_plans_of_several_epochs_are_counted_once(tmp_path):
    stalls = [event(4.0 * place + 1, "stall", where="backward", block=0, seconds=0.5) for place in range(1, 13)]
    events = [*epochs(*[0, 1, 2, 3] * 3), *stalls, pass_end(1.0, unique=1, kept=1)]
    events.append(event(23.8, "plan", name="auto", text="after five steps"))
    summary = run(tmp_path, events)
    assert (summary["warm_up_steps"], summary["timed_steps"], summary["stall_seconds"]) == (6, 6, 3.0)
