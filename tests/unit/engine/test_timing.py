"""A measured step: which stretch of time belongs to which block, on a clock that the test advances."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from ebbtide.base.actions import Action, Candidate, Site
from ebbtide.engine.passes import PlainRun
from ebbtide.engine.spans import Span, SpanTimer
from ebbtide.engine.timed import TimedStep
from ebbtide.engine.timing import BETWEEN_STEPS, OTHERS, StepTimer
from ebbtide.store.meter import HostMeter

CPU = torch.device("cpu")


class Clock:
    """A meter whose time and memory the test sets."""

    def __init__(self) -> None:
        self.now, self.peak = 0.0, 0
        self.ahead = False  # whether the device has reached every event by the time of a query

    def timestamp(self, device: torch.device | None) -> float:
        return self.now

    def seconds(self, begin: float, end: float) -> float:
        return end - begin

    def reached(self, timestamp: float) -> bool:
        return self.ahead

    def take_peak_bytes(self, device: torch.device | None = None) -> int:
        peak, self.peak = self.peak, 0
        return peak

    def in_use_bytes(self, device: torch.device | None = None) -> int:
        return 7

    def system_seconds(self) -> float:
        return self.now / 4  # the kernel has a quarter of all time


class Scene:
    """A timer on a clock, and passes whose blocks take preset times."""

    def __init__(self, *, more: bool = False, memory: bool = False, clock: Any = None) -> None:
        self.clock, self.found, self.waits = clock or Clock(), list[TimedStep](), dict[str, float]()
        self.timer = StepTimer(
            self.clock, lambda step: self.found.append(step) or more, waited=lambda: dict(self.waits), memory=memory
        )
        self.timer.want()

    def spend(self, seconds: float, peak: int = 0) -> None:
        self.clock.now += seconds
        self.clock.peak = max(self.clock.peak, peak)

    def forward(self, pass_: Any, *names: str, seconds: float = 1.0, between: float = 0.25, peak: int = 0) -> list[Any]:
        runs: list[Any] = []
        for name in names:
            run: Any = Run(pass_, name)
            self.timer.block_begins(run)
            self.spend(seconds, peak)
            self.timer.block_ends(run)
            self.spend(between)
            runs.append(run)
        return runs

    def backward(self, runs: list[Any], *, seconds: float = 2.0, peak: int = 0) -> None:
        for run in reversed(runs):
            self.timer.backward_begins(run)
            self.spend(seconds, peak)
        self.timer.backward_ends()


class Pass:
    """Stand-in for the engine's pass: weakly referenced."""

    latest = None


class Run:
    """Stand-in for a run of a block."""

    def __init__(self, pass_: Any, name: str) -> None:
        self.pass_, self.device = pass_, CPU
        self.checkpointed = False
        self.checkpointable, self.tally, self.pack_seconds = False, SimpleNamespace(checkpoint_bytes=0), 0.0
        self.block = SimpleNamespace(name=name, kind="Layer")


def unit(nbytes: int = 8, name: str = "a") -> Candidate:
    site = Site("Layer", name, "Node", 0)
    return Candidate(site=site, block_name="x", block=0, nbytes=nbytes, block_input=False, recompute_flops=1)


def storage() -> torch.UntypedStorage:
    return torch.UntypedStorage(8)


class HostClock(HostMeter):
    now, peak = 0.0, 0


@pytest.mark.parametrize(("clock", "seconds"), [(HostClock(), 0.5), (Clock(), 0.0)])
def test_time_in_the_pack_hook_counts_where_compute_waits_for_the_host(clock: Any, seconds: float) -> None:
    scene, one = Scene(clock=clock), Pass()
    run: Any = Run(one, "a")
    scene.timer.block_begins(run)
    run.pack_seconds = 0.5
    scene.timer.block_ends(run)
    scene.backward([run])
    scene.forward(Pass(), "a")
    assert [block.pack_seconds for block in scene.found[0].blocks] == [seconds]


def test_a_wait_between_two_steps_is_no_part_of_the_epilogue() -> None:
    scene, one = Scene(), Pass()
    scene.waits[BETWEEN_STEPS] = 100.0  # waited before this step
    scene.backward(scene.forward(one, "a"))
    scene.spend(5.0)  # the optimizer, and then a wait of three seconds
    scene.waits[BETWEEN_STEPS] = 103.0
    scene.forward(Pass(), "a")
    assert scene.found[0].epilogue_seconds == 2.0


def test_every_second_of_a_step_belongs_to_one_stretch() -> None:
    scene, one = Scene(), Pass()
    runs = scene.forward(one, "a", "b")
    scene.spend(3.0)  # the head and the loss, after the quarter of a second that follows each block
    scene.backward(runs)
    scene.spend(5.0)  # the optimizer
    scene.forward(Pass(), "a", "b")
    (step,) = scene.found
    assert [block.name for block in step.blocks] == ["a", "b"]
    assert [block.forward_seconds for block in step.blocks] == [1.25, 1.0]
    assert [block.backward_seconds for block in step.blocks] == [2.0, 2.0]
    assert (step.head_seconds, step.epilogue_seconds) == (3.25, 5.0)
    assert step.head_peak_bytes is None


def test_waits_for_copies_are_taken_out() -> None:
    scene, one = Scene(), Pass()
    scene.waits["forward a"] = 100.0  # of earlier steps
    runs = scene.forward(one, "a", "b")
    scene.waits.update({"forward a": 100.5, "backward b": 0.75})
    scene.backward(runs)
    scene.forward(Pass(), "a")
    (step,) = scene.found
    assert [block.forward_seconds for block in step.blocks] == [0.75, 1.0]
    assert [block.backward_seconds for block in step.blocks] == [2.0, 1.25]


def test_waits_of_a_block_that_runs_twice_are_taken_out_once() -> None:
    scene, one = Scene(), Pass()
    runs = scene.forward(one, "a", "a", seconds=2.0)
    scene.waits["forward a"] = 1.0
    scene.backward(runs)
    scene.waits["backward a"] = 2.0
    scene.forward(Pass(), "a")
    (step,) = scene.found
    assert [block.forward_seconds for block in step.blocks] == [1.75, 1.5]
    assert [block.backward_seconds for block in step.blocks] == [1.0, 1.0]


def test_memory_of_others_counts_as_base() -> None:
    scene, one = Scene(memory=True), Pass()
    held = {name: storage() for name in ("a", "b", "kept")}

    def saw(run: Any, name: str, action: Action, *, given: bool = False) -> None:
        found = replace(unit(nbytes=10 if name == "a" else 100, name=name), block_input=given)
        scene.timer.saw(run, action, found, held[name], narrow_bytes=None, movable=True, prepare=None)

    first: Any = Run(one, "first")
    scene.timer.block_begins(first)
    saw(first, "a", Action.OFFLOAD, given=True)
    saw(first, "kept", Action.KEEP)
    scene.timer.block_ends(first)
    second: Any = Run(one, "second")
    scene.timer.block_begins(second)
    saw(second, "b", Action.RECOMPUTE)
    del held["a"]
    scene.timer.block_ends(second)
    scene.spend(1.0)
    scene.timer.backward_begins(second)
    del held["b"]
    scene.backward([first, second])
    scene.forward(Pass(), "first")
    (step,) = scene.found
    # The first's input lives through its forward and dies in the second's; the second's result dies last.
    assert [block.forward_resident_bytes for block in step.blocks] == [10, 0]
    assert step.head_resident_bytes == 100
    assert [block.backward_resident_bytes for block in step.blocks] == [0, 0]


def test_peaks_are_those_of_their_stretch() -> None:
    scene, one = Scene(memory=True), Pass()
    runs = scene.forward(one, "a", "b", peak=10)
    scene.spend(1.0, peak=30)
    scene.backward(runs, peak=20)
    scene.forward(Pass(), "a")
    (step,) = scene.found
    assert [block.forward_peak_bytes for block in step.blocks] == [10, 10]
    assert [block.backward_peak_bytes for block in step.blocks] == [20, 20]
    assert step.head_peak_bytes == 30


def test_passes_are_not_timed_while_a_step_is_measured() -> None:
    """Both would take the device's peak, and the second would find none."""
    scene, one = Scene(memory=True), Pass()
    for paused in (0, 1):
        scene.timer.spans.want(wanted=not paused)
        scene.timer.spans.paused = paused
        scene.timer.want()
        assert not scene.timer.spans.wanted and not scene.timer.spans.paused
    runs = scene.forward(one, "a")
    scene.timer.pass_ends(8)
    scene.backward(runs, peak=20)
    scene.forward(Pass(), "a")
    assert scene.found[0].blocks[0].backward_peak_bytes == 20


def test_blocks_of_other_graphs_count_for_nobody() -> None:
    scene, one, other = Scene(), Pass(), Pass()
    runs = scene.forward(one, "a", "b")
    others = scene.forward(other, "a", "b", seconds=50.0)
    scene.backward(others, seconds=70.0)
    scene.backward(runs)
    scene.forward(Pass(), "a")
    (step,) = scene.found
    assert [block.forward_seconds for block in step.blocks] == [1.25, 1.0]
    assert [block.backward_seconds for block in step.blocks] == [2.0, 2.0]
    assert step.head_seconds == 0.25


def test_a_graph_that_was_dropped_is_forgotten() -> None:
    scene = Scene()
    scene.forward(Pass(), "a", "b", "c", seconds=9.0)  # no one holds this pass: its graph is gone
    one = Pass()
    scene.backward(scene.forward(one, "a"))
    scene.forward(Pass(), "a")
    (step,) = scene.found
    assert [block.forward_seconds for block in step.blocks] == [1.0]


def test_a_graph_that_was_dropped_is_forgotten_though_its_pass_is_held() -> None:
    scene = Scene()
    one, two = Pass(), Pass()
    scene.forward(one, "a", "b", seconds=9.0)  # nobody holds its blocks
    scene.backward(scene.forward(two, "a"))
    scene.forward(Pass(), "a")
    (step,) = scene.found
    assert [block.forward_seconds for block in step.blocks] == [1.0]


def test_a_graph_that_is_held_and_never_run_backward_is_forgotten() -> None:
    scene, held = Scene(), Pass()
    first = scene.forward(held, "a", seconds=9.0)  # like in a notebook: ``out0 = model(x)``
    for _ in range(OTHERS + 2):
        one = Pass()
        scene.backward(scene.forward(one, "a"))
    assert first and [block.forward_seconds for step in scene.found for block in step.blocks] == [1.0]


@pytest.mark.parametrize("again", [False, True])
def test_a_step_whose_backward_raised_is_not_measured(again: bool) -> None:
    scene, one, two = Scene(), Pass(), Pass()
    runs = scene.forward(one, "a", "b")
    scene.timer.backward_begins(runs[1])
    if again:  # the same graph, before the engine notices
        scene.backward(runs)
    scene.timer.backward_ends(raised=True)
    scene.backward(scene.forward(two, "a", "b"))
    scene.forward(Pass(), "a")
    (step,) = scene.found
    assert [block.backward_seconds for block in step.blocks] == [2.0, 2.0]


def test_it_measures_as_long_as_more_is_wanted() -> None:
    scene = Scene(more=True)
    passes = [Pass() for _ in range(4)]
    for pass_ in passes:
        scene.backward(scene.forward(pass_, "a"))
    assert len(scene.found) == 3  # the last one's epilogue is not over


def test_when_enough_was_measured_only_a_larger_pass_is() -> None:
    scene = Scene()
    for saved_bytes in (100, 100, 109, 111, 100):
        pass_ = Pass()
        runs = scene.forward(pass_, "a")
        scene.timer.pass_ends(saved_bytes)
        scene.backward(runs)
    # The first was measured; 109 is within a tenth; 111 is not, so the next one is measured, which ends with the scene.
    assert len(scene.found) == 1
    scene.forward(Pass(), "a")
    assert len(scene.found) == 2


def test_what_a_block_saved_is_timed_once_for_each_kind() -> None:
    scene, one = Scene(), Pass()
    calls: list[str] = []

    def prepared(seconds: float) -> Callable[[], Callable[[], object]]:
        def recompute() -> None:
            calls.append("recompute")
            scene.spend(seconds)

        return lambda: recompute

    runs: list[Any] = []
    for name in ("a", "b"):
        run: Any = Run(one, name)
        scene.timer.block_begins(run)
        scene.timer.saw(
            run, Action.OFFLOAD, unit(name="x"), storage(), narrow_bytes=4, movable=True, prepare=prepared(0.5)
        )
        scene.timer.saw(run, Action.KEEP, unit(name="y"), storage(), narrow_bytes=None, movable=False, prepare=None)
        scene.timer.saw(
            run, Action.OFFLOAD, unit(name="z"), storage(), narrow_bytes=None, movable=True, prepare=lambda: None
        )
        scene.timer.block_ends(run)
        runs.append(run)
    scene.backward(runs)
    scene.forward(Pass(), "a")
    (step,) = scene.found
    assert calls == ["recompute"] * 2  # once to warm up, once timed
    assert [block.forward_seconds for block in step.blocks] == [0.0, 0.0]  # the recomputes were not the block's own
    for block in step.blocks:
        assert [u.recompute_seconds for u in block.units] == [0.5, None, None]
        assert [u.movable for u in block.units] == [True, False, True]
        assert [u.narrow_bytes for u in block.units] == [4, None, None]
        assert [u.action for u in block.units] == [Action.OFFLOAD, Action.KEEP, Action.OFFLOAD]


def test_a_block_without_hooks_is_timed() -> None:
    scene, one = Scene(), Pass()
    first = scene.forward(one, "a")
    scene.timer.plain = frozenset({"b"})
    assert scene.timer.runs_plain("b") and not scene.timer.runs_plain("a")
    plain: Any = PlainRun(SimpleNamespace(name="b", kind="Layer"), one, CPU)  # type: ignore[arg-type]
    scene.timer.block_begins(plain)
    scene.spend(1.5)
    scene.timer.block_ends(plain)
    scene.backward([*first, plain])
    assert scene.timer.runs_plain("b") and not scene.found
    scene.timer.hand_over()  # which ends the step: no more is wanted
    assert not scene.timer.runs_plain("b")
    (step,) = scene.found
    assert [(block.plain, block.forward_seconds) for block in step.blocks] == [(False, 1.25), (True, 1.5)]


class Spans(Scene):
    """Whole passes on a clock; nothing else is measured."""

    def __init__(self, wanted: int = 100, *, memory: bool = False, clock: Any = None) -> None:
        super().__init__(memory=memory, clock=clock)
        self.told: list[Span] = []
        self.skipped = 0

        def done(span: Span | None) -> bool:
            self.skipped += span is None
            self.told += [] if span is None else [span]
            return len(self.told) < wanted

        self.timer.spans = SpanTimer(self.clock, done, memory=memory)
        one = Pass()
        self.backward(self.full(one, 8.0))
        self.full(Pass(), 1.0)  # ends the measured step
        self.timer.spans.want()

    def full(self, pass_: Any, seconds: float, saved_bytes: int = 100, peak: int = 0) -> list[Any]:
        runs = self.forward(pass_, "a", seconds=seconds, between=0.0, peak=peak)
        self.timer.pass_ends(saved_bytes)
        return runs

    def step(self, seconds: float, **given: Any) -> None:
        self.backward(self.full(Pass(), seconds, **given))
        self.spend(50.0)  # the optimizer, the data


def test_passes_are_timed_and_reported_two_later() -> None:
    scene = Spans(memory=True)
    for seconds in (1.0, 2.0, 3.0):
        scene.step(seconds, peak=int(seconds))
    assert [span.seconds for span in scene.told] == [3.0]
    scene.step(4.0)
    assert [(span.seconds, span.peak_bytes, span.saved_bytes) for span in scene.told] == [(3.0, 1, 100), (4.0, 2, 100)]
    assert [span.system_seconds for span in scene.told] == [0.75, 1.0]


def test_a_pass_that_is_not_to_be_timed_stays_so_when_a_later_one_ends_without_blocks() -> None:
    clock, found = Clock(), list[Any]()
    clock.ahead = True
    timer = StepTimer(clock, lambda step: False, waited=dict[str, float], memory=False)
    timer.spans = spans = SpanTimer(clock, lambda span: found.append(span) or True, memory=False)
    spans.want()
    run: Any = Run(Pass(), "a")
    timer.block_begins(run)
    spans.pass_ends(None)
    timer.backward_begins(run)
    timer.backward_leaves(run)
    timer.backward_ends()
    spans.pass_ends(0)  # a forward that calls no block
    spans.finish()
    assert found == [None]


def test_a_pass_in_which_a_recipe_had_no_verdict_says_so() -> None:
    scene, unsure = Spans(), [0]
    scene.timer.spans._unsure = lambda: unsure[0]
    for new in (3, 0, 1, 0, 0):
        pass_ = Pass()
        runs = scene.forward(pass_, "a", seconds=1.0, between=0.0)
        unsure[0] += new
        scene.timer.pass_ends(100)
        scene.backward(runs)
    assert [span.verifies for span in scene.told] == [True, False, True]


def test_the_peak_between_two_spans_is_that_of_the_optimizer() -> None:
    scene = Spans(memory=True)
    for peak in (70, 9, 30, 20):
        scene.spend(1.0, peak)  # the optimizer of the step before
        scene.step(1.0, peak=80)
        assert scene.timer.spans.between_peak_bytes == {70: None, 9: 9, 30: 30, 20: 30}[peak]
    assert {span.peak_bytes for span in scene.told} == {80}


def test_the_peak_of_a_forward_whose_graph_was_dropped_is_not_that_of_the_optimizer() -> None:
    scene = Spans(memory=True)
    for _ in range(2):
        scene.spend(1.0, peak=5)
        scene.step(1.0, peak=80)
    scene.full(Pass(), 1.0, peak=77)  # dropped
    scene.step(1.0, peak=80)
    assert scene.timer.spans.between_peak_bytes == 5


def test_a_pause_ends_when_the_next_pass_begins() -> None:
    """At the end of a forward memory still holds what the pass keeps, and there seems to be no room for yardsticks."""
    scene, asked = Spans(memory=True), list[float]()
    spans = scene.timer.spans
    for _ in range(3):
        scene.step(1.0, peak=80)
    assert scene.told and spans.between_peak_bytes == 0
    spans._resumes = lambda timer: bool(asked.append(scene.clock.now)) or len(asked) > 1
    for later in (2, 1):
        spans.want(wanted=False)
        spans.paused = later
        for _ in range(later):
            runs = scene.full(Pass(), 1.0, peak=80)
            assert not spans.wanted and len(asked) == 2 - later
            scene.backward(runs, peak=80)
        began = scene.clock.now
        scene.backward(scene.full(Pass(), 1.0))
        assert asked[2 - later :] == [began] and spans.wanted is (later == 1) and not spans.paused
    scene.step(1.0)
    assert spans.between_peak_bytes == 0, "the peak since the last span is not that of an optimizer's step"


def test_a_pause_that_is_over_ends_no_measurement() -> None:
    scene = Spans()
    spans = scene.timer.spans
    spans.want(wanted=False)
    spans.paused = 1
    scene.step(1.0)
    scene.timer.want()
    scene.timer.hand_over()  # the next block begins
    scene.step(1.0)
    assert not spans.wanted and spans.open is None


def test_without_memory_the_kernels_time_is_not_asked_for() -> None:
    scene = Spans()
    for seconds in (1.0, 2.0, 3.0):
        scene.step(seconds)
    assert [span.system_seconds for span in scene.told] == [None]


def test_a_pass_is_reported_when_the_next_begins_if_the_device_has_finished_it() -> None:
    scene = Spans()
    scene.clock.ahead = True
    scene.step(1.0)
    scene.step(2.0)
    assert [span.seconds for span in scene.told] == [3.0]
    scene.timer.hand_over()  # its result is in force for the entire next pass
    assert [span.seconds for span in scene.told] == [3.0, 4.0]


@pytest.mark.parametrize("place", [0, 1], ids=["at its first block", "in its middle"])
def test_a_pass_that_began_before_passes_were_wanted_anew_is_no_span(place: int) -> None:
    """What took the span before it changed the plan: such a pass followed two plans, or the former one."""
    scene = Spans()
    taken = scene.timer.spans._done

    def done(span: Span | None) -> bool:
        if span is not None and span.seconds == 3.0:
            scene.timer.spans.want()
        return taken(span)

    scene.timer.spans._done = done
    scene.step(1.0)
    one: Any = Pass()
    runs = scene.forward(one, *"ab"[:place], seconds=1.0, between=0.0)
    scene.clock.ahead = True  # now the device has reached the end of the pass before
    runs += scene.forward(one, *"ab"[place:], seconds=1.0, between=0.0)
    scene.timer.pass_ends(100)
    scene.backward(runs)
    scene.step(5.0)
    scene.timer.hand_over()
    assert [span.seconds for span in scene.told] == [3.0, 7.0]


def test_every_second_of_a_span_belongs_to_a_block_or_to_the_head() -> None:
    scene = Spans()
    scene.clock.ahead = True
    one: Any = Pass()
    runs = scene.forward(one, "a", "b", seconds=1.0, between=0.25)
    plain: Any = PlainRun(SimpleNamespace(name="c", kind="Layer"), one, CPU)  # type: ignore[arg-type]
    scene.timer.block_begins(plain)
    scene.spend(1.5)
    scene.timer.block_ends(plain)
    scene.spend(0.5)  # the head
    scene.timer.pass_ends(100)
    scene.backward([*runs, plain], seconds=2.0)
    scene.timer.hand_over()
    (span,) = scene.told
    assert [(b.name, b.plain, b.forward_seconds, b.backward_seconds) for b in span.blocks] == [
        ("a", False, 1.25, 2.0), ("b", False, 1.25, 2.0), ("c", True, 1.5, 2.0)
    ]  # fmt: skip
    assert span.seconds == sum(block.seconds for block in span.blocks) + 0.5


def test_a_checkpointed_block_is_noted_in_a_step_and_in_a_span() -> None:
    for scene in (Scene(), Spans()):
        scene.clock.ahead = True
        one: Any = Pass()
        runs: list[Any] = [Run(one, "a"), Run(one, "b")]
        runs[1].checkpointed = True
        for run in runs:
            scene.timer.block_begins(run)
            scene.timer.block_ends(run)
        scene.timer.pass_ends(100)
        scene.backward(runs)
        scene.timer.hand_over()
        (found,) = scene.told if isinstance(scene, Spans) else scene.found
        assert [block.checkpointed for block in found.blocks] == [False, True]


def test_the_rest_of_a_pass_whose_backward_came_in_between_is_no_span() -> None:
    scene = Spans()
    scene.clock.ahead = True
    one: Any = Pass()
    scene.backward(scene.full(one, 1.0))
    scene.backward(scene.full(one, 0.5))
    scene.full(Pass(), 1.0)
    assert [span.seconds for span in scene.told] == [3.0]


def test_passes_are_timed_as_long_as_more_are_wanted() -> None:
    scene = Spans(wanted=2)
    for _ in range(9):
        scene.step(1.0)
    assert len(scene.told) == 2


def test_passes_that_overlap_or_were_dropped_are_not_timed() -> None:
    scene = Spans()
    one, two = Pass(), Pass()
    first, second = scene.full(one, 1.0), scene.full(two, 1.0)
    scene.backward(first)
    scene.backward(second)
    scene.full(Pass(), 1.0)  # dropped
    for _ in range(3):
        scene.step(1.0)
    assert [span.seconds for span in scene.told] == [3.0] and scene.skipped == 1


def test_passes_with_several_backwards_are_not_timed() -> None:
    """As the weights' gradients of a zero-bubble schedule: a span would end before them."""
    scene = Spans()
    scene.clock.ahead = True
    for several in (True, False):
        runs = scene.full(Pass(), 1.0)
        scene.backward(runs)
        if several:
            scene.backward(runs)
    scene.full(Pass(), 1.0)
    assert len(scene.told) == scene.skipped == 1


def test_passes_whose_backwards_come_one_pass_late_are_not_timed() -> None:
    """As in a pipeline: what ends after their forwards is the backward of the pass before."""
    scene = Spans()
    scene.clock.ahead = True
    before = scene.full(Pass(), 1.0)
    for _ in range(6):
        runs = scene.full(Pass(), 1.0)
        scene.backward(before)
        before = runs
    assert scene.told == [] and scene.skipped > 1


def test_a_pass_whose_backward_raised_is_not_timed() -> None:
    scene, one = Spans(), Pass()
    runs = scene.full(one, 1.0)
    scene.timer.backward_begins(runs[-1])
    scene.timer.backward_ends(raised=True)
    for _ in range(3):
        scene.step(1.0)
    assert [span.seconds for span in scene.told] == [3.0]


def test_backward_beyond_the_first_block_is_the_epilogue() -> None:
    scene, one = Scene(), Pass()
    runs = scene.forward(one, "a", "b")
    assert scene.timer.is_first(runs[0]) and not scene.timer.is_first(runs[1])
    scene.timer.backward_begins(runs[1])
    scene.spend(2.0)
    scene.timer.backward_begins(runs[0])
    scene.spend(3.0)
    scene.timer.backward_leaves(runs[0])
    scene.spend(10.0)  # an embedding
    scene.timer.backward_ends()
    scene.spend(5.0)  # the optimizer
    scene.forward(Pass(), "a", "b")
    (step,) = scene.found
    assert [block.backward_seconds for block in step.blocks] == [3.0, 2.0]
    assert step.epilogue_seconds == 15.0


def test_a_further_backward_is_time_of_its_blocks_and_the_optimizer_is_not() -> None:
    scene, one = Scene(), Pass()
    runs = scene.forward(one, "a", "b")
    scene.timer.backward_begins(runs[1])
    scene.spend(2.0)
    scene.timer.backward_begins(runs[0])
    scene.spend(2.0)
    scene.timer.backward_leaves(runs[0])
    scene.spend(1.0)  # an embedding
    scene.timer.backward_ends()
    scene.backward(runs[:1], seconds=3.0)  # the gradient of a weight, and none of the input
    scene.spend(5.0)  # the optimizer
    scene.forward(Pass(), "a", "b")
    (step,) = scene.found
    assert [block.backward_seconds for block in step.blocks] == [5.0, 2.0]
    assert step.epilogue_seconds == 6.0


def test_a_block_that_shows_after_the_first_ends_what_was_beyond_it() -> None:
    scene, one = Scene(), Pass()
    runs = scene.forward(one, "a", "b")
    scene.timer.backward_begins(runs[0])
    scene.timer.backward_leaves(runs[0])
    scene.spend(3.0)
    scene.timer.backward_begins(runs[1])
    scene.spend(2.0)
    scene.timer.backward_ends()
    scene.forward(Pass(), "a", "b")
    (step,) = scene.found
    assert [block.backward_seconds for block in step.blocks] == [3.0, 2.0]
    assert step.epilogue_seconds == 0.0


def test_a_span_ends_with_the_first_blocks_backward() -> None:
    scene = Spans()
    scene.clock.ahead = True
    runs = scene.full(Pass(), 1.0)
    assert scene.timer.is_first(runs[0])
    scene.timer.backward_begins(runs[0])
    scene.spend(2.0)
    scene.timer.backward_leaves(runs[0])
    scene.spend(10.0)  # an embedding
    scene.timer.backward_ends()
    scene.timer.hand_over()
    (span,) = scene.told
    assert (span.seconds, span.blocks[0].backward_seconds) == (3.0, 2.0)


ZERO, ONE = (torch.device("cuda", index) for index in range(2))


class TwoDevices(Clock):
    """Each device has its own time and its own peak."""

    def __init__(self) -> None:
        super().__init__()
        self.times, self.peaks = Counter[Any](), Counter[Any]()

    def timestamp(self, device: torch.device | None) -> Any:
        return device, self.times[device]

    def seconds(self, begin: Any, end: Any) -> float:
        assert begin[0] == end[0]
        return end[1] - begin[1]

    def take_peak_bytes(self, device: torch.device | None = None) -> int:
        return self.peaks.pop(device, 0)

    def work(self, device: Any, seconds: float, peak: int) -> None:
        self.times[device] += seconds
        self.peaks[device] = max(self.peaks[device], peak)


def step_on_two_devices(scene: Scene, clock: TwoDevices, pass_: Any) -> None:
    """Run two blocks, one on each device; a block takes the most memory in its backward, the first block more."""
    runs: list[Any] = [Run(pass_, "a"), Run(pass_, "b")]
    for run, run.device in zip(runs, (ZERO, ONE), strict=True):
        scene.timer.block_begins(run)
        clock.work(run.device, 1, 10)
        scene.timer.block_ends(run)
    scene.timer.pass_ends(100)
    for run, peak in ((runs[1], 20), (runs[0], 30)):
        scene.timer.backward_begins(run)
        clock.work(run.device, 2, peak)
    scene.timer.backward_leaves(runs[0])
    scene.timer.backward_ends()
    clock.work(ZERO, 4, 5)  # the optimizer
    clock.work(ONE, 4, 6)


def test_a_block_is_timed_and_measured_on_its_own_device() -> None:
    clock = TwoDevices()
    scene, one = Scene(memory=True, clock=clock), Pass()
    clock.work(ONE, 0, 70)  # before it began
    step_on_two_devices(scene, clock, one)
    scene.timer.hand_over()
    (step,) = scene.found
    assert [(block.forward_seconds, block.backward_seconds) for block in step.blocks] == [(1, 2), (1, 2)]
    assert [(block.forward_peak_bytes, block.backward_peak_bytes) for block in step.blocks] == [(10, 30), (10, 20)]


def test_the_peak_of_a_span_is_that_of_the_fullest_of_its_devices() -> None:
    clock = TwoDevices()
    scene = Spans(memory=True, clock=clock)
    clock.ahead = True
    for device in (ZERO, ONE):
        clock.work(device, 0, 70)  # before the first
    passes = [Pass() for _ in range(3)]
    for pass_ in passes:
        step_on_two_devices(scene, clock, pass_)
    assert [(span.seconds, span.peak_bytes) for span in scene.told] == [(3, 30), (3, 30)]
    assert [(block.forward_seconds, block.backward_seconds) for block in scene.told[0].blocks] == [(1, 2), (1, 2)]
    assert scene.timer.spans.between_peak_bytes == 6
