"""The schedule: windows, turn-around, how far copy-in runs ahead, and the order it follows."""

from __future__ import annotations

import gc
import sys
import weakref
from typing import Any

import torch
from torch import Tensor

from ebbtide.engine.flow import LEAST_WINDOW, CopyIn, CopyOut, Window
from tests.helpers.engines import assert_nothing_left, block, leaf, open_engine


class Slot:
    """A slot that says what was asked of it."""

    def __init__(self, *, parked: bool = False, begun: bool = True) -> None:
        self.parked, self.begun = parked, begun
        self.asked: list[str] = []

    def wait_parked(self) -> float:
        self.asked.append("wait")
        self.parked = True
        return 0.5

    def cancel(self) -> bool:
        self.asked.append("cancel")
        return not self.begun

    def prefetch(self) -> None:
        self.asked.append("prefetch")

    def free(self) -> None:
        self.asked.append("free")


class Entry:
    """As much of an entry as the schedule looks at."""

    def __init__(self, slot: Slot | None, nbytes: int = 10, *, source: bool = True) -> None:
        self.slot, self.nbytes = slot, nbytes
        self.source: Tensor | None = torch.zeros(1) if source else None
        self.restored: Tensor | None = None
        self.changed = self.tainted = False


def copy_out(window_bytes: int, *entries: Any) -> CopyOut:
    out = CopyOut(Window(window_bytes))
    for entry in entries:
        out.add(entry)
    return out


def test_a_source_is_dropped_when_its_copy_is_done() -> None:
    done, flying = Entry(Slot(parked=True)), Entry(Slot())
    out = copy_out(100, done, flying)
    assert out.retire() == 0 and out.in_flight_bytes == 10
    assert done.source is None and flying.source is not None and flying.slot.asked == []


def test_beyond_the_window_compute_waits_for_the_oldest_copy() -> None:
    entries = [Entry(Slot()) for _ in range(3)]
    out = copy_out(15, *entries)
    assert out.retire() == 1.0 and out.stall_seconds == 1.0 and out.in_flight_bytes == 10
    assert [e.slot.asked for e in entries] == [["wait"], ["wait"], []]


def test_a_dead_entry_is_in_flight_no_more() -> None:
    entry, other = Entry(Slot()), Entry(Slot())
    out = copy_out(100, entry, other)
    del entry
    assert out.retire() == 0 and out.in_flight_bytes == 10


def test_a_source_that_was_changed_is_marked() -> None:
    entry = Entry(Slot(parked=True))
    entry.changed = True
    copy_out(1, entry).retire()
    assert entry.source is None and entry.tainted


def test_turn_around_withdraws_what_has_not_begun() -> None:
    waiting, begun = Entry(Slot(begun=False)), Entry(Slot())
    out = copy_out(100, waiting, begun)
    out.withdraw()
    assert waiting.slot is None and waiting.source is not None
    assert begun.slot is not None and out.in_flight_bytes == 10
    assert out.retire() == 0 and begun.source is not None


def test_the_window_follows_the_model_unless_it_is_given() -> None:
    window = Window(None)
    assert window.out_bytes == sys.maxsize and window.in_bytes == LEAST_WINDOW
    window.saw_block(10)
    assert window.out_bytes == window.in_bytes == LEAST_WINDOW
    window.saw_block(LEAST_WINDOW)
    window.saw_block(1)
    assert (window.out_bytes, window.in_bytes) == (2 * LEAST_WINDOW, LEAST_WINDOW)
    given = Window(5)
    given.saw_block(1000)
    assert given.out_bytes == given.in_bytes == 5


class Run:
    """A block's run of some entries."""

    def __init__(self, entries: list[Any], previous: Run | None = None) -> None:
        self.references, self.previous = [weakref.ref(e) for e in entries], previous

    def backward_order(self) -> Any:
        return reversed(self.references)


def away(nbytes: int = 10) -> Entry:
    return Entry(Slot(parked=True), nbytes, source=False)


def test_copy_in_runs_ahead_as_far_as_the_window_and_into_the_block_before() -> None:
    first, last = [away() for _ in range(2)], [away() for _ in range(2)]
    flow = CopyIn(Run(last, Run(first)), Window(30))  # type: ignore[arg-type]
    flow.advance()
    assert [bool(e.slot.asked) for e in (*last[::-1], *first[::-1])] == [True, True, True, False]
    assert flow.ahead_bytes == 30
    flow.has_read(last[1])
    assert first[0].slot.asked == ["prefetch"] and flow.ahead_bytes == 30


def test_what_is_larger_than_the_window_comes_alone() -> None:
    small, large = away(1), away(100)
    flow = CopyIn(Run([small, large]), Window(10))  # type: ignore[arg-type]
    flow.advance()
    assert large.slot.asked == ["prefetch"] and small.slot.asked == []
    flow.has_read(large)
    assert small.slot.asked == ["prefetch"]


def test_copy_in_leaves_out_what_is_there_or_gone() -> None:
    here, remade, gone, wanted = Entry(Slot()), away(), away(), away()
    remade.restored = torch.zeros(1)
    run = Run([wanted, gone, remade, here])
    del gone
    flow = CopyIn(run, Window(10))  # type: ignore[arg-type]
    flow.advance()
    assert here.slot.asked == remade.slot.asked == [] and wanted.slot.asked == ["prefetch"]


def test_an_entry_that_dies_unread_is_ahead_no_more() -> None:
    entry = away()
    flow = CopyIn(Run([entry]), Window(10))  # type: ignore[arg-type]
    flow.advance()
    assert flow.ahead_bytes == 10
    del entry
    gc.collect()
    assert flow.ahead_bytes == 0


def test_the_order_of_one_backward_serves_the_next() -> None:
    """The first backward shows in which order tensors are read; later ones are brought in so."""
    x = leaf(4, 4)
    with open_engine("offload", rate=1e12, window_bytes=1) as engine:
        expected: list[int] = []
        for step in range(3):
            engine.begin_pass()
            with block(engine, x) as run:
                y = (x.cumsum(0) * 2).sin() * x.cumsum(1).exp()
            engine.end_pass()
            coming = [run.entries.index(r) for r in run.backward_order()]
            if step == 0:
                assert coming == list(reversed(range(len(run.entries)))), "nothing is known yet"
            else:
                assert coming == expected
            read: list[int] = []
            take = type(engine)._content

            def content(self, entry, backward=None, block=None, run=run, read=read, take=take):
                read.append([r() for r in run.entries].index(entry))
                return take(self, entry, backward, block)

            engine._content = content.__get__(engine)  # type: ignore[method-assign]
            y.sum().backward()
            del engine._content
            # The order is kept when the next block's backward begins; here there is one block.
            run.record_order() if step == 0 else None
            expected = list(dict.fromkeys(read))
            expected += [i for i in reversed(range(len(run.entries))) if i not in expected]
            del y, content
            assert_nothing_left(engine)
