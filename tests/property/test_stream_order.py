"""Torch's checker finds nothing, for any graph, rates and interleaving, and finds each planted mistake."""

from __future__ import annotations

import gc
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from ebbtide.schedule import CopyOut
from ebbtide.store.arena import Arena
from ebbtide.store.extents import Extents
from ebbtide.store.guards import Guard
from ebbtide.store.host import HostTier
from ebbtide.store.hostcopies import HostCopies
from tests.helpers.checked import CheckedDevice, Computing, quiet_checker, without_waits
from tests.helpers.engines import assert_nothing_left, block, compare, leaf, observe, open_engine
from tests.helpers.graphs import Graph, Schedule, graphs, leaves, schedules
from tests.helpers.slots import copy_out

LEAVES = leaves()
RATES = st.sampled_from([1.0, 50.0, 1e3, 1e9])
WINDOWS = st.sampled_from([1, 200, 600, 1 << 20])
PAUSES = st.lists(st.sampled_from([0.0, 0.01, 1.0, 30.0]), min_size=1, max_size=8)


@pytest.fixture(autouse=True)
def quiet() -> Iterator[None]:
    with quiet_checker():
        yield


TWO_SAVERS = Graph(
    (*[("add", 0, 0, 0)] * 6, ("attention", 0, 0, 0), *[("add", 0, 0, 0)] * 2, ("|", 0, 0, 0), ("add", 0, 0, 0),
     ("exp", 4, 0, 0)),
    (0,),
)  # fmt: skip
"""Two blocks save one storage, and both fit into one group of copy-ins."""


@settings(max_examples=30)
@example(TWO_SAVERS, Schedule((("all", 0, 0, True),)), "offload", 1000.0, 1.0, 600, [0.0, 1.0], True)
@given(
    graphs(), schedules(), st.sampled_from(["offload", "minimal", "auto", "inputs"]), RATES, RATES, WINDOWS, PAUSES,
    st.booleans(),
)  # fmt: skip
def test_nothing_is_read_early_and_nothing_is_freed_early(
    graph: Graph, schedule: Schedule, policy: str, out: float, into: float, window_bytes: int, pauses: list[float],
    asynchronous: bool,
) -> None:  # fmt: skip
    device = CheckedDevice(out, into, asynchronous_copies=asynchronous)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        expected = observe(graph, LEAVES, blocks=True, backward=schedule)
        with open_engine(policy, window_bytes=window_bytes, device=device) as engine, Computing(device, pauses):
            for _ in range(3):  # the second time the end of a pass is held back, the third time orders are known
                got = observe(graph, LEAVES, engine, blocks=True, backward=schedule)
                if "needed to recompute another tensor" not in got.message:
                    assert compare(expected, got) == []
                assert device.found == [] and device.violations == []
                assert_nothing_left(engine)
        gc.collect()
        device.compute(1.0)
    assert device.found == [] and device.violations == [] and device.host_bytes == 0 and device.live_bytes == 0


def train(device: CheckedDevice) -> None:
    """Run passes of four blocks over a checked device; some are dropped, some of another length, some retained."""
    weights = [leaf(8, 8, parameter=True) for _ in range(4)]
    with open_engine("offload", window_bytes=300, device=device) as engine, Computing(device, [0.3, 2.0]):
        for rows in (6, 6, 3, 6):
            for backward in (True, False, True):
                x = leaf(rows, 8)
                engine.begin_pass()
                y: torch.Tensor = x
                for index, weight in enumerate(weights):
                    with block(engine, y, weights=[weight], name=f"b{index}", index=index):
                        y = torch.tanh(torch.matmul(y, weight)).exp().sin()
                engine.end_pass()
                if backward:
                    y.sum().backward(retain_graph=rows == 3)
                del x, y
    gc.collect()
    device.compute(1.0)


def move(device: CheckedDevice) -> None:
    """Make calls that a tier allows but an engine never makes: read at once, free places early, hold nothing."""
    tier = HostTier(device)

    def produce() -> torch.Tensor:
        source = torch.zeros(1000, dtype=torch.uint8)
        device.compute(0.1, writes=source)
        return source

    first, second, large = produce(), produce(), torch.zeros(4 << 20, dtype=torch.uint8)
    slot = copy_out(tier, first)
    tier.prefetch([slot])
    place, slot.place = slot.place, None
    assert place is not None
    tier._arena.give(place)
    again = copy_out(tier, second)
    assert again.place is not None and again.place.region.spans == place.region.spans
    for each in (slot, again):
        device.launch("compute", device.names_of(each.take()), (), "read")
    unread = copy_out(tier, produce())
    tier.prefetch([unread])
    unread.free()  # while its copy-in runs
    copy_out(tier, large).free()
    for _ in range(40):
        tier.trim()
    tier.close()


def trial(device: CheckedDevice) -> None:
    train(device)
    move(device)


def swap(owner: type, name: str, value: Any) -> Callable[[pytest.MonkeyPatch], None]:
    return lambda patch: patch.setattr(owner, name, value)


def forget_the_source(patch: pytest.MonkeyPatch) -> None:
    """A source is dropped as soon as its copy is requested."""
    add = CopyOut.add

    def careless(self: Any, entry: Any, pass_: Any) -> None:
        add(self, entry, pass_)
        if entry.slot is not None:
            entry.slot.source = entry.source = None

    patch.setattr(CopyOut, "add", careless)


def forget_a_dead_slots_source(patch: pytest.MonkeyPatch) -> None:
    """The source of a running copy is dropped with the slot."""
    release = HostTier.release

    def careless(self: Any, slot: Any) -> None:
        slot.source = None
        release(self, slot)

    patch.setattr(HostTier, "release", careless)


def wait_before_the_copy_is_asked_for(patch: pytest.MonkeyPatch) -> None:
    """The event of a copy is recorded when it is claimed."""
    claim = Guard.claim
    patch.setattr(Guard, "claim", lambda self, stream: (claim(self, stream), self.done(DEVICE[-1])))
    patch.setattr(Guard, "finish", lambda self, event: None)


def ask_for_the_current_stream_in_a_side_streams_context(patch: pytest.MonkeyPatch) -> None:
    """There the current stream is the side stream: a wait meant for compute waits for itself."""
    copy_in = HostCopies.into

    def careless(self: Any, slots: Any) -> Any:
        _, into = self._side_streams(slots[0].origin)
        with pytest.MonkeyPatch.context() as inner:
            inner.setattr(self.device, "compute_stream", lambda where: into)
            begun = copy_in(self, slots)
        for ahead in begun:
            ahead.compute = self.device.compute_stream(slots[0].origin)
        return begun

    patch.setattr(HostCopies, "into", careless)


def copy_on_the_wrong_stream(patch: pytest.MonkeyPatch) -> None:
    """Copy-outs run on the copy-in stream, which does not wait for their sources."""
    copy = CheckedDevice.copy

    def careless(self: Any, target: torch.Tensor, source: torch.Tensor, stream: Any) -> None:
        streams = [s for name, s in self._streams.items() if name.startswith("in")]
        copy(self, target, source, streams[0] if stream.name.startswith("out") and streams else stream)

    patch.setattr(CheckedDevice, "copy", careless)


def give_a_chunk_back_twice(patch: pytest.MonkeyPatch) -> None:
    free = CheckedDevice.free_host
    patch.setattr(CheckedDevice, "free_host", lambda self, buffer: (free(self, buffer), free(self, buffer)))


DEVICE: list[CheckedDevice] = []
MISTAKES: dict[str, Callable[[pytest.MonkeyPatch], None]] = {
    "a source that is dropped at once": forget_the_source,
    "a source that dies with its slot": forget_a_dead_slots_source,
    "a copy-in's target that is dropped while it runs": swap(
        HostCopies, "drop", lambda self, slot: setattr(slot, "ahead", None)
    ),
    "a copy-in's target that nobody waits for": swap(HostCopies, "drop", without_waits(HostCopies.drop)),
    "a place that is used again while a copy runs in it": swap(Guard, "events", lambda self, device: []),
    "a chunk that is given back while a copy runs in it": swap(Guard, "quiet", lambda self, device: True),
    "an event recorded before its copy": wait_before_the_copy_is_asked_for,
    "the current stream, asked in a side stream's context": ask_for_the_current_stream_in_a_side_streams_context,
    "a copy on the wrong stream": copy_on_the_wrong_stream,
    "a chunk given back twice": give_a_chunk_back_twice,
}


SPEEDS = pytest.mark.parametrize("rate", [20.0, 1e9], ids=["slow", "fast"])


@SPEEDS
def test_the_trial_itself_is_clean(rate: float) -> None:
    device = CheckedDevice(rate, rate)
    trial(device)
    assert device.found == [] and device.violations == []
    assert device.out_bytes > 0 and device.in_bytes > 0


@pytest.mark.slow
@SPEEDS
@pytest.mark.parametrize(
    "waits",
    [("out", "compute"), ("in", "out"), ("in", "compute"), ("compute", "in"), ("compute", "out"), ("out", "in")],
)
def test_a_missing_wait_is_found(waits: tuple[str, str], rate: float) -> None:
    device = CheckedDevice(rate, rate, forgets=waits)
    trial(device)
    # A host that has seen an event needs no wait for it: a fast copy hides the mistake.
    assert device.found or (rate == 1e9 and waits[1] != "compute")


@pytest.mark.slow
@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_planted_mistake_is_found(mistake: str, monkeypatch: pytest.MonkeyPatch) -> None:
    device = CheckedDevice(20.0, 20.0)
    DEVICE[:] = [device]
    MISTAKES[mistake](monkeypatch)
    trial(device)
    assert device.found, mistake


def test_a_place_freed_twice_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    device = CheckedDevice(1e9, 1e9)
    tier = HostTier(device)
    slot = copy_out(tier, torch.zeros(1000, dtype=torch.uint8))
    place = slot.place
    assert place is not None
    record = tier._arena._records[place.region.spans[0][0]]
    tier._arena.give(place)
    tier._arena.give(place)  # harmless: the arena knows
    tier._arena._records[place.region.spans[0][0]], place.region.live[0] = record, place.nbytes
    with pytest.raises(ValueError, match="overlaps one that is free"):
        tier._arena.give(place)
    assert isinstance(tier._arena, Arena) and isinstance(tier._arena._extents, Extents)
