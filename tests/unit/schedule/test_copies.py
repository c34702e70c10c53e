"""The schedule: windows, the start of backward, how far copy-in runs ahead, and the order it follows."""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from ebbtide.base.actions import Action
from ebbtide.base.errors import CapError
from ebbtide.engine.mover import SlotMover
from ebbtide.engine.passes import Pass, RunRecord
from ebbtide.engine.tickets import Residence
from ebbtide.schedule import CopyIn, CopyOut, LiveBytes, Window
from ebbtide.schedule.window import LEAST_WINDOW
from tests.helpers.engines import assert_nothing_left, block, leaf, open_engine


class Slot:
    """A slot that records its calls."""

    def __init__(self, *, copied_out: bool = False, begun: bool = True, room: bool = True) -> None:
        self.copied_out, self.begun, self.room = copied_out, begun, room
        self.asked: list[str] = []

    def wait_copied_out(self) -> None:
        self.asked.append("wait")
        self.copied_out = True

    def cancel(self) -> bool:
        self.asked.append("cancel")
        return not self.begun

    def prefetch(self) -> None:
        if not self.room:
            raise torch.OutOfMemoryError("planted")
        self.asked.append("prefetch")

    def discard(self) -> None:
        self.asked.append("put back")

    def free(self) -> None:
        self.asked.append("free")


class Entry:
    """The part of an entry that the schedule reads."""

    def __init__(self, slot: Slot | None = None, nbytes: int = 10, *, source: bool = True) -> None:
        self.slot, self.nbytes, self.last = slot, nbytes, 4
        self.source: Tensor | None = torch.zeros(1) if source else None
        self.restored: Tensor | None = None
        self.live_storage: torch.UntypedStorage | None = None
        self.tainted, self.version, self.probe = False, 0, torch.zeros(1)
        self.action, self.site = Action.OFFLOAD, "site"

    def change(self) -> None:
        self.probe.add_(1)

    @property
    def residence(self) -> Residence:
        if self.source is not None:
            return Residence.RESIDENT
        return Residence.STORED if self.restored is None and self.live_storage is None else Residence.ELSEWHERE


class Tier:
    """A store that returns slots, done or not, or refuses."""

    def __init__(self, *, can_cancel: bool = False, error: Exception | None = None) -> None:
        self.can_cancel, self.error = can_cancel, error
        self.slots: list[Slot] = []
        self.copied_out: list[bool] = []
        self.groups: list[int] = []
        self.brought: list[int] = []

    def expect(self, nbytes: int) -> None:
        pass

    def capturing(self) -> bool:
        return False

    def stream_of(self, device: torch.device) -> None:
        pass

    def follow(self, tensor: Tensor, stream: None) -> None:
        pass

    def copy_out(self, source: Tensor) -> Slot:
        if self.error is not None:
            raise self.error
        self.slots.append(
            Slot(copied_out=self.copied_out.pop(0) if self.copied_out else False, begun=not self.can_cancel)
        )
        return self.slots[-1]

    def copy_out_all(self, sources: list[Tensor], *, compute: object = None) -> list[Any]:
        self.groups.append(len(sources))
        found: list[Any] = []
        for source in sources:
            try:
                found.append(self.copy_out(source))
            except CapError as error:
                found.append(error)
        return found

    def are_copied_out(self, slots: list[Slot]) -> bool:
        return all(slot.copied_out for slot in slots)

    def wait_copied_out(self, slots: list[Slot]) -> None:
        for slot in slots:
            slot.wait_copied_out()

    def prefetch(self, slots: list[Slot]) -> int:
        self.brought.append(len(slots))
        for begun, slot in enumerate(slots):
            try:
                slot.prefetch()
            except torch.OutOfMemoryError:
                if not begun:
                    raise
                return len(slots) - begun
        return 0


def copy_out(window_bytes: int, tier: Tier | None = None) -> Any:
    return CopyOut(SlotMover(tier or Tier()), Window(window_bytes))  # type: ignore[arg-type]


def copy_in(run: Run, window: Window, tier: Tier) -> Any:
    return CopyIn(run.upcoming(), window, SlotMover(tier))  # type: ignore[arg-type]


def offer(out: Any, *entries: Any, pass_: Pass | None = None) -> Pass:
    """Offer entries like a block."""
    pass_ = pass_ or Pass()
    pass_.offers_last = True
    for entry in entries:
        out.add(entry, pass_)
    out.begin()
    out.retire()
    return pass_


def offer_apart(out: Any, *entries: Any) -> None:
    """Offer entries whose copies begin separately."""
    for entry in entries:
        offer(out, entry)


def begun(entries: list[Any]) -> list[bool]:
    return [entry.slot is not None for entry in entries]


def test_a_source_is_dropped_when_its_copy_is_done() -> None:
    tier = Tier()
    tier.copied_out = [True, False]
    done, flying = Entry(), Entry()
    out = copy_out(100, tier)
    offer_apart(out, done, flying)
    assert out.in_flight_bytes == 10
    assert done.source is None and flying.source is not None and tier.slots[1].asked == []


def test_what_was_copied_together_is_done_together() -> None:
    tier = Tier()
    tier.copied_out = [True, False]
    entries = [Entry() for _ in range(2)]
    out = copy_out(100, tier)
    offer(out, *entries)
    assert out.in_flight_bytes == 20 and all(entry.source is not None for entry in entries)
    tier.slots[1].copied_out = True
    out.retire()
    assert out.in_flight_bytes == 0 and all(entry.source is None for entry in entries)


def test_beyond_the_window_compute_waits_for_the_oldest_copy() -> None:
    entries = [Entry() for _ in range(3)]
    out = copy_out(15)
    offer_apart(out, *entries)
    assert out.in_flight_bytes == 10
    assert [e.slot.asked for e in entries] == [["wait"], ["wait"], []]


def test_a_dead_entry_is_in_flight_no_more() -> None:
    entry, other = Entry(), Entry()
    out = copy_out(100)
    offer_apart(out, entry, other)
    del entry
    out.retire()
    assert out.in_flight_bytes == 10


def test_a_source_that_was_changed_is_marked() -> None:
    entry = Entry()
    out = copy_out(100)
    offer(out, entry)
    entry.change()
    entry.slot.copied_out = True
    out.retire()
    assert entry.source is None and entry.tainted


def test_the_start_of_backward_cancels_copies_that_have_not_begun() -> None:
    waiting, flying = Entry(), Entry()
    out = copy_out(100, Tier(can_cancel=True))
    pass_ = offer(out, waiting, flying)
    flying.slot.begun = True
    out.cancel(pass_)
    assert waiting.slot is None and waiting.source is not None
    assert flying.slot is not None and out.in_flight_bytes == 10
    out.retire()
    assert flying.source is not None


def test_the_start_of_backward_of_one_pass_leaves_the_copies_of_another() -> None:
    first, second = Entry(), Entry()
    out = copy_out(100, Tier(can_cancel=True))
    one, _ = offer(out, first), offer(out, second)
    out.cancel(one)
    assert begun([first, second]) == [False, True] and second.slot.asked == []


def one_pass(out: Any, count: int) -> list[Any]:
    entries = [Entry() for _ in range(count)]
    pass_ = offer(out, *entries)
    out.end_forward(pass_)
    found = begun(entries)
    for entry in entries:
        if entry.slot is not None:
            entry.slot.copied_out = True
    out.cancel(pass_)
    assert out.held_bytes == 0
    out.retire()
    assert all(entry.source is not None for entry, copied in zip(entries, found, strict=True) if not copied)
    return found


def test_the_last_bytes_of_a_pass_are_held_back_once_its_length_is_known() -> None:
    out = copy_out(20)
    assert one_pass(out, 6) == [True] * 6, "nothing is known yet"
    assert one_pass(out, 6) == [True] * 4 + [False] * 2
    assert out.in_flight_bytes == 0


def test_what_is_held_back_is_counted_as_kept() -> None:
    out = copy_out(20)
    one_pass(out, 6)
    entries = [Entry() for _ in range(6)]
    pass_ = offer(out, *entries)
    pass_.tally.offloaded = 60
    out.end_forward(pass_)
    assert (pass_.tally.kept, pass_.tally.offloaded) == (20, 40)


def test_what_the_store_refuses_after_it_was_held_back_is_counted_as_kept() -> None:
    tier = Tier()
    out = copy_out(20, tier)
    one_pass(out, 6)
    pass_ = offer(out, *(entries := [Entry() for _ in range(6)]))
    pass_.tally.offloaded = 60
    tier.error = CapError("full", expected="room", hint="none")
    offer(out, last := Entry(), pass_=pass_)
    assert entries[4].action is Action.KEEP and last.action is Action.OFFLOAD
    assert (pass_.tally.kept, pass_.tally.offloaded) == (10, 50)


def test_a_pass_of_another_length_holds_no_more_than_the_window() -> None:
    out = copy_out(20)
    one_pass(out, 6)
    assert one_pass(out, 9) == [True] * 7 + [False] * 2, "longer: the oldest that are held begin"
    assert one_pass(out, 3) == [True] * 3, "shorter: its end comes before it is expected"
    assert one_pass(out, 3) == [True] + [False] * 2


def test_what_is_held_back_counts_as_in_the_window() -> None:
    out = copy_out(20)
    one_pass(out, 6)
    entries = [Entry() for _ in range(6)]
    offer(out, *entries)
    assert out.in_flight_bytes == 0 and out.held_bytes == 20
    assert all(entry.source is None for entry in entries[:4])


def test_what_is_held_back_by_a_pass_begins_in_the_next_one() -> None:
    """Two forwards before a backward together hold back no more than one window."""
    out = copy_out(20)
    one_pass(out, 4)
    first, second = [Entry() for _ in range(4)], [Entry() for _ in range(4)]
    out.end_forward(offer(out, *first))
    assert begun(first) == [True, True, False, False]
    pass_ = offer(out, *second)
    assert begun(first) == [True] * 4 and begun(second) == [True, True, False, False] and out.held_bytes == 20
    out.cancel(pass_)
    assert out.held_bytes == 0


def emptied(entry: Any) -> None:
    entry.source.untyped_storage().resize_(0)


@pytest.mark.parametrize("spoil", [Entry.change, emptied])
def test_what_changed_or_lost_its_memory_while_it_was_held_is_not_copied(spoil: Callable[[Any], None]) -> None:
    out = copy_out(10)
    one_pass(out, 1)
    spoilt, next_ = Entry(), Entry()
    offer(out, spoilt)
    spoil(spoilt)
    offer(out, next_)
    assert spoilt.slot is None and spoilt.source is not None and out.held_bytes == 10


@pytest.mark.parametrize("can_cancel", [False, True])
def test_a_store_that_cancels_holds_back_as_others_do(can_cancel: bool) -> None:
    """What backward reads first would be written for nothing, and read again before anything can hide that."""
    out = copy_out(20, Tier(can_cancel=can_cancel))
    one_pass(out, 4)
    entries = [Entry() for _ in range(4)]
    offer(out, *entries)
    assert begun(entries) == [True, True, False, False]


def test_entries_that_the_store_refuses_stay_and_one_warning_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    out = copy_out(20, Tier(error=CapError("no room", hint="make some")))
    entries = [Entry() for _ in range(3)]
    offer(out, *entries)
    assert all(e.source is not None and e.action is Action.KEEP for e in entries)
    assert out.refused_bytes == 30 and out.in_flight_bytes == 0
    assert [r.getMessage() for r in caplog.records] == [
        "what the store cannot take stays on the device: no room\nhint: make some"
    ]


def gather(out: Any, *entries: Any, stream: str | None = None) -> Pass:
    """Offer entries like a block in the middle of its forward."""
    pass_ = Pass()
    pass_.offers_last = True
    for entry in entries:
        out.add(entry, pass_, stream)
    return pass_


def test_copies_begin_together_when_a_quarter_of_the_window_is_gathered() -> None:
    tier = Tier()
    out, entries = copy_out(100, tier), [Entry() for _ in range(5)]
    gather(out, *entries)
    assert tier.groups == [3] and begun(entries) == [True] * 3 + [False] * 2 and out.in_flight_bytes == 50
    out.begin()
    assert tier.groups == [3, 2] and all(begun(entries)) and out.in_flight_bytes == 50


def test_what_is_gathered_begins_when_the_window_is_full() -> None:
    tier = Tier()
    out, entries = copy_out(40, tier), [Entry(nbytes=5) for _ in range(9)]
    gather(out, *entries)
    assert tier.groups == [2, 2, 2, 2, 1] and entries[0].slot.asked == ["wait"], "the last one did not fit"
    assert out.in_flight_bytes == 35, "compute waited for a group, which is done as a whole"


class Streams(Tier):
    """A store that records the streams of its groups."""

    def __init__(self) -> None:
        super().__init__()
        self.asked: list[tuple[int, object]] = []

    def copy_out_all(self, sources: list[Tensor], *, compute: object = None) -> list[Any]:
        self.asked.append((len(sources), compute))
        return super().copy_out_all(sources)


def test_copies_of_several_streams_begin_apart_each_after_its_own() -> None:
    tier = Streams()
    out, entries = copy_out(1000, tier), [Entry() for _ in range(3)]
    gather(out, *entries[:2], stream="a")
    gather(out, entries[2], stream="b")
    out.begin()
    assert tier.asked == [(2, "a"), (1, "b")]


def test_what_was_held_back_is_copied_after_the_stream_that_made_it() -> None:
    tier = Streams()
    out = copy_out(20, tier)
    one_pass(out, 4)
    tier.asked.clear()
    first, second = [Entry() for _ in range(4)], [Entry() for _ in range(4)]
    out.end_forward(gather(out, *first, stream="a"))
    assert begun(first) == [True, True, False, False]
    gather(out, *second, stream="b")
    assert [compute for _, compute in tier.asked] == ["a", "a", "b", "b", "a", "a"]


def test_the_start_of_backward_drops_gathered_copies() -> None:
    tier = Tier()
    out, entry, other = copy_out(1000, tier), Entry(), Entry()
    pass_ = gather(out, entry)
    gather(out, other)
    out.cancel(pass_)
    assert out.in_flight_bytes == 10
    out.begin()
    assert begun([entry, other]) == [False, True] and entry.source is not None


def test_what_died_or_changed_while_it_was_gathered_is_not_copied() -> None:
    tier = Tier()
    out, dead, changed, gone, sound = copy_out(1000, tier), Entry(), Entry(), Entry(), Entry()
    gather(out, dead, changed, gone, sound)
    del dead
    changed.change()
    emptied(gone)
    out.begin()
    assert tier.groups == [1] and begun([changed, gone, sound]) == [False, False, True]
    assert out.in_flight_bytes == 10


def test_what_is_refused_of_a_group_is_counted_as_kept_but_not_what_nobody_has_counted_yet() -> None:
    tier = Tier(error=CapError("full", expected="room", hint="none"))
    out, entries = copy_out(100, tier), [Entry() for _ in range(3)]
    pass_ = Pass()
    pass_.tally.offloaded = 20  # the first two; the third is counted when it has an action
    for entry in entries:
        out.add(entry, pass_)
    assert tier.groups == [3] and all(entry.action is Action.KEEP for entry in entries)
    assert (pass_.tally.kept, pass_.tally.offloaded) == (20, 0)
    assert out.in_flight_bytes == 0 and out.refused_bytes == 30


def test_an_error_of_the_store_leaves_all_of_a_group_where_it_is() -> None:
    out, entries = copy_out(1000, Tier(error=OSError("planted"))), [Entry() for _ in range(2)]
    gather(out, *entries)
    with pytest.raises(OSError, match="planted"):
        out.begin()
    assert not any(begun(entries)) and all(e.source is not None for e in entries) and out.in_flight_bytes == 0


@pytest.mark.parametrize("can_cancel", [False, True])
def test_copy_in_waits_until_a_quarter_of_the_window_is_free(can_cancel: bool) -> None:
    entries = [away(10) for _ in range(12)]
    flow = copy_in(Run(entries), Window(100), Tier(can_cancel=can_cancel))
    flow.advance()
    assert flow.ahead_bytes == 100
    for read, brought in ((entries[-1], False), (entries[-2], False), (entries[-3], True)):
        flow.has_read(read)
        assert bool(entries[1].slot.asked) is brought


def test_a_window_is_filled_by_a_quarter_at_a_time() -> None:
    tier, entries = Tier(), [away(10) for _ in range(12)]
    flow = copy_in(Run(entries), Window(100), tier)
    flow.advance()
    assert tier.brought == [3, 3, 3, 1] and flow.ahead_bytes == 100


def test_a_tensor_that_two_blocks_saved_is_copied_in_once() -> None:
    tier, both, first = Tier(), away(10), away(10)
    flow = copy_in(Run([both], Run([first, both])), Window(100), tier)
    flow.advance()
    assert tier.brought == [2] and flow.ahead_bytes == 20
    assert both.slot.asked == first.slot.asked == ["prefetch"]


def test_what_never_left_the_device_takes_its_part_of_the_window() -> None:
    """Else a device would hold two windows where backward begins: what was held back, and what was prefetched."""
    here, first, second = [Entry(Slot()) for _ in range(2)], away(10), away(10)
    flow = copy_in(Run([second, first, *here]), Window(20), Tier())
    flow.advance()
    assert flow.ahead_bytes == 0 and not first.slot.asked
    flow.has_read(here[1])
    assert flow.ahead_bytes == 10 and first.slot.asked == ["prefetch"] and not second.slot.asked
    flow.reach(-2)  # a block before was begun: what was never read takes nothing any more
    assert first.slot.asked == ["prefetch", "put back"] and here[0].slot.asked == []
    flow.advance()
    assert second.slot.asked == ["prefetch"]


@pytest.mark.parametrize("error", [OSError("planted"), KeyboardInterrupt()])
def test_copies_in_that_fail_to_begin_take_nothing_of_the_window(error: BaseException) -> None:
    entries = [away(10) for _ in range(3)]
    flow, begin = copy_in(Run(entries), Window(30), Tier()), entries[1].slot.prefetch

    def fail() -> None:
        raise error

    entries[1].slot.prefetch = fail
    with pytest.raises(type(error)):
        flow.advance()
    entries[1].slot.prefetch = begin
    assert flow.ahead_bytes == 10 and flow._taken_bytes == 10


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
        self.number = 0 if previous is None else previous.number + 1

    def backward_order(self) -> Any:
        return reversed(self.references)

    upcoming = RunRecord.upcoming


def away(nbytes: int = 10) -> Entry:
    return Entry(Slot(copied_out=True), nbytes, source=False)


def test_copy_in_runs_ahead_as_far_as_the_window_and_into_the_block_before() -> None:
    first, last = [away() for _ in range(2)], [away() for _ in range(2)]
    flow = copy_in(Run(last, Run(first)), Window(30), Tier())
    flow.advance()
    assert [bool(e.slot.asked) for e in (*last[::-1], *first[::-1])] == [True, True, True, False]
    assert flow.ahead_bytes == 30
    flow.has_read(last[1])
    assert first[0].slot.asked == ["prefetch"] and flow.ahead_bytes == 30


def test_what_is_larger_than_the_window_comes_alone() -> None:
    small, large = away(1), away(100)
    flow = copy_in(Run([small, large]), Window(10), Tier())
    flow.advance()
    assert large.slot.asked == ["prefetch"] and small.slot.asked == []
    flow.has_read(large)
    assert small.slot.asked == ["prefetch"]


def test_copy_in_skips_resident_and_dead_entries() -> None:
    here, recomputed, gone, wanted, lives = Entry(Slot()), away(), away(), away(), away()
    recomputed.restored = torch.zeros(1)
    lives.live_storage = torch.zeros(1).untyped_storage()  # another owner keeps it: it is read from there
    run = Run([wanted, gone, recomputed, here, lives])
    del gone
    flow = copy_in(run, Window(20), Tier())
    flow.advance()
    assert here.slot.asked == recomputed.slot.asked == lives.slot.asked == [] and wanted.slot.asked == ["prefetch"]


def test_an_entry_that_dies_unread_is_ahead_no_more() -> None:
    """And nothing in Python runs as it dies: an interrupt noticed there would be lost."""
    entries, ran = [away(), away()], list[str]()
    flow = copy_in(Run(entries[::-1]), Window(10), Tier())
    flow.advance()
    assert flow.ahead_bytes == 10 and not entries[1].slot.asked
    sys.setprofile(lambda frame, event, argument: ran.append(event))
    try:
        del entries[0]
    finally:
        sys.setprofile(None)
    assert "call" not in ran
    flow.advance()
    assert flow.ahead_bytes == 10 and entries[0].slot.asked == ["prefetch"]


def test_an_entry_that_dies_in_another_thread_while_all_are_discarded_is_left_out() -> None:
    entries = [away() for _ in range(3)]

    class Number(int):
        def __ge__(self, other: int) -> bool:
            entries.clear()
            return True

    run: Any = Run(list(entries))
    run.number = Number()
    flow = copy_in(run, Window(30), Tier())
    del run
    flow.advance()
    assert flow.ahead_bytes == 30
    flow.discard()
    assert flow.ahead_bytes == 0


def test_prefetched_entries_that_earlier_blocks_never_read_are_discarded() -> None:
    entries = [away() for _ in range(4)]
    runs: list[Any] = []
    for entry in entries:
        runs.append(Run([entry], runs[-1] if runs else None))
    flow = copy_in(runs[3], Window(20), Tier())
    flow.reach(runs[3].number)
    flow.advance()
    flow.reach(runs[2].number)
    flow.advance()
    assert [e.slot.asked for e in entries] == [[], [], ["prefetch"], ["prefetch"]], "nobody reads; it may come yet"
    flow.reach(runs[1].number)
    flow.advance()
    assert [e.slot.asked for e in entries] == [[], ["prefetch"], ["prefetch"], ["prefetch", "put back"]]
    flow.discard()
    assert flow.ahead_bytes == 0 and entries[1].slot.asked[-1] == entries[2].slot.asked[-1] == "put back"


def test_a_device_without_room_brings_in_less_and_says_so_once(caplog: pytest.LogCaptureFixture) -> None:
    entries = [away() for _ in range(4)]
    entries[1].slot.room = False
    window = Window(100)
    flow = copy_in(Run(entries), window, Tier())
    for _ in range(2):
        flow.advance()
    assert [e.slot.asked for e in entries] == [[], [], ["prefetch"], ["prefetch"]] and flow.ahead_bytes == 20
    assert window.in_bytes == 10 and window.out_bytes == 100
    entries[1].slot.room = True
    for entry in reversed(entries):
        flow.has_read(entry)
        assert flow.ahead_bytes <= 10
    assert entries[0].slot.asked == ["prefetch"]
    assert len(caplog.records) == 1 and "no room for a window of 100 B" in caplog.records[0].getMessage()


def test_the_order_of_one_backward_serves_the_next() -> None:
    """The first backward shows the order in which tensors are read; later copy-ins follow it."""
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
            take = type(engine.restorer).content

            def content(self, entry, backward=None, block=None, *, target=None, run=run, read=read, take=take):
                read.append([r() for r in run.entries].index(entry))
                return take(self, entry, backward, block, target=target)

            engine.restorer.content = content.__get__(engine.restorer)  # type: ignore[method-assign]
            y.sum().backward()
            del engine.restorer.content
            expected = list(dict.fromkeys(read))
            expected += [i for i in reversed(range(len(run.entries))) if i not in expected]
            del y, content
            assert_nothing_left(engine)


def calls(work: Callable[[], object]) -> int:
    """Count the calls of Python and C functions in ``work``."""
    found = 0

    def note(frame: object, event: str, argument: object) -> None:
        nonlocal found
        found += event in ("call", "c_call")

    sys.setprofile(note)
    try:
        work()
    finally:
        sys.setprofile(None)
    return found


def test_a_tensor_costs_as_much_whether_few_are_held_back_or_many() -> None:
    entries = [Entry() for _ in range(200)]
    out = copy_out(10**6)
    out.end_forward(offer(out, Entry()))  # from here on a pass is expected to offer little: all of it is held back
    pass_ = Pass()
    costs = [calls(lambda entry=entry: out.add(entry, pass_)) for entry in entries]
    assert out.held_bytes == 2000 and not any(begun(entries))
    assert costs[-1] == costs[1], (costs[1], costs[-1])


def test_bytes_held_back_are_counted_as_entries_die_begin_and_are_cancelled() -> None:
    entries = [Entry() for _ in range(4)]
    out = copy_out(40)
    out.end_forward(offer(out, Entry()))
    pass_ = offer(out, *entries)
    assert out.held_bytes == 40
    del entries[0]
    assert out.held_bytes == 30
    more = [Entry(nbytes=20)]
    offer(out, *more, pass_=pass_)
    assert out.held_bytes == 40 and begun(entries) == [True, False, False]
    other = offer(out, Entry())  # dies at once
    out.cancel(pass_)
    assert out.held_bytes == 0
    out.end_forward(other)
    assert not out._held


def test_bytes_of_entries_that_are_alive_are_counted_as_they_die() -> None:
    live, entries = LiveBytes(), [Entry() for _ in range(5)]
    sizes = [entry.nbytes for entry in entries]
    for entry in entries:
        live.add(entry)  # type: ignore[arg-type]
    assert live.total == sum(sizes)
    del entry, entries[1:3]
    assert live.total == sum(sizes) - sum(sizes[1:3])
    entries.clear()
    assert live.total == 0
