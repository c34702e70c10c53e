"""One step of many ranks that share links, switches, host memory and each other's pace.

[Note: what ranks share]
Each rank follows the schedule of ``ebbtide.planner.simulate``, with its own times. The difference is that a copy's rate
is not its own: devices behind a switch divide its rate, and all of a node divide the rate of the host's memory, in
equal parts among those that copy at that moment; an unused part is not given to others. Rates change
whenever a copy begins or ends, so the step is a simulation of events.

Ranks of a sharded job wait for each other: the weights of a block are gathered one block ahead, so no rank begins a
block before all have begun the one before. Collectives themselves take no time here: they take it without offloading
too.
"""

from __future__ import annotations

import heapq
import sys
from collections import deque
from collections.abc import Callable, Generator, Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial

from ebbtide.base.actions import Action
from ebbtide.planner.profile import Profile
from ebbtide.planner.simulate import Assignment
from ebbtide.schedule import Window


@dataclass(frozen=True, kw_only=True)
class Nodes:
    """How devices are connected.

    Attributes:
        ranks: Devices of a node.
        host_bytes_per_second: Rate of each node's host memory.
        devices_a_switch: Devices that share a link to the host.
        switch_bytes_per_second: Rate of that link, in each direction; ``None``: there are no switches.
    """

    ranks: int
    host_bytes_per_second: tuple[float, ...]
    devices_a_switch: int = 1
    switch_bytes_per_second: float | None = None


@dataclass(eq=False, slots=True)
class _Copy:
    left: float
    rank: int
    out: bool
    rate: float = 0.0
    ends: float = 0.0
    done: bool = False
    wake: Callable[[], None] | None = None


@dataclass(slots=True)
class _Rank:
    """A rank's queues and waits."""

    queues: dict[bool, deque[_Copy]] = field(default_factory=lambda: {True: deque(), False: deque()})
    busy: dict[bool, bool] = field(default_factory=lambda: {True: False, False: False})
    ended: float = 0.0


_Wait = tuple[str, float | int | _Copy]


class _Cluster:
    """The clock, the running copies, and which ranks wait for which. See [Note: what ranks share]."""

    def __init__(self, profiles: Sequence[Profile], nodes: Nodes) -> None:
        self.profiles, self.nodes = profiles, nodes
        self.now = 0.0
        self.ranks = [_Rank() for _ in profiles]
        self.active: list[list[_Copy]] = [[] for _ in nodes.host_bytes_per_second]
        self._since = [0.0] * len(self.active)
        self._turn = [0] * len(self.active)  # number of a node's latest event
        self._changed: set[int] = set()
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._count = 0
        self._begun: dict[int, int] = {}
        self._waiting: dict[int, list[Callable[[], None]]] = {}

    def at(self, time: float, call: Callable[[], None]) -> None:
        """Schedule a call."""
        self._count += 1
        heapq.heappush(self._events, (time, self._count, call))

    def run(self, programs: Sequence[Generator[_Wait, None, None]]) -> None:
        """Run the ranks to their ends."""
        for rank, program in enumerate(programs):
            self._step(rank, program)
        self._share()
        while self._events:
            self.now = self._events[0][0]
            while self._events and self._events[0][0] == self.now:
                heapq.heappop(self._events)[2]()
            self._share()

    def _step(self, rank: int, program: Generator[_Wait, None, None]) -> None:
        """Run a rank until it waits."""
        wake = partial(self._step, rank, program)
        for what, value in program:
            if isinstance(value, _Copy):
                if value.done:
                    continue
                value.wake = wake
            elif what == "block":
                if self._may_begin(int(value)):
                    continue
                self._waiting.setdefault(int(value), []).append(wake)
            else:
                self.at(self.now + value, wake)
            return
        self.ranks[rank].ended = self.now

    def _may_begin(self, number: int) -> bool:
        """Count a rank that begins a block, if all have begun the one before; release those that wait for it."""
        if number and self._begun.get(number - 1, 0) < len(self.ranks):
            return False
        self._begun[number] = self._begun.get(number, 0) + 1
        if self._begun[number] == len(self.ranks):
            waiting = self._waiting.pop(number + 1, [])
            self._begun[number + 1] = len(waiting)
            for wake in waiting:
                self.at(self.now, wake)
        return True

    # Copies

    def copy(self, rank: int, nbytes: float, *, out: bool) -> _Copy:
        """Queue a copy of a rank after its others of the same direction."""
        made = _Copy(nbytes, rank, out)
        self.ranks[rank].queues[out].append(made)
        self._next(rank, out)
        return made

    def cancel(self, rank: int) -> None:
        """Cancel the copy-outs of a rank that have not begun."""
        self.ranks[rank].queues[True].clear()

    def _next(self, rank: int, out: bool) -> None:
        mine = self.ranks[rank]
        if mine.busy[out] or not mine.queues[out]:
            return
        begins, node = mine.queues[out].popleft(), rank // self.nodes.ranks
        mine.busy[out] = True
        self._advance(node)
        self.active[node].append(begins)
        self._changed.add(node)

    def _advance(self, node: int) -> None:
        """Count what a node has copied until now."""
        seconds, self._since[node] = self.now - self._since[node], self.now
        for each in self.active[node]:
            each.left -= each.rate * seconds

    def _share(self) -> None:
        """Recompute the rate of every copy on the nodes where a copy began or ended, and find the next end."""
        for node in self._changed:
            self._advance(node)
            copies, nodes = self.active[node], self.nodes
            behind: dict[tuple[int, bool], int] = {}
            for each in copies:
                key = (each.rank // nodes.devices_a_switch, each.out)
                behind[key] = behind.get(key, 0) + 1
            for each in copies:
                rates = self.profiles[each.rank].rates
                link = rates.out_bytes_per_second if each.out else rates.in_bytes_per_second
                if nodes.switch_bytes_per_second is not None:
                    sharing = behind[each.rank // nodes.devices_a_switch, each.out]
                    link = min(link, nodes.switch_bytes_per_second / sharing)
                each.rate = min(link, nodes.host_bytes_per_second[node] / len(copies))
                each.ends = self.now + max(each.left, 0.0) / each.rate
            self._turn[node] += 1
            if copies:
                turn = self._turn[node]
                self.at(min(each.ends for each in copies), lambda node=node, turn=turn: self._ended(node, turn))
        self._changed.clear()

    def _ended(self, node: int, turn: int) -> None:
        if turn != self._turn[node]:
            return
        self._advance(node)
        ended = [each for each in self.active[node] if each.ends <= self.now]
        self.active[node] = [each for each in self.active[node] if each.ends > self.now]
        self._changed.add(node)
        for each in ended:
            each.done = True
            self.ranks[each.rank].busy[each.out] = False
            self._next(each.rank, each.out)
            if each.wake is not None:
                each.wake()


@dataclass(eq=False, slots=True)
class _Offloaded:
    """An offloaded unit: its copies, once they are queued."""

    nbytes: int
    out: _Copy | None = None
    back: _Copy | None = None
    resident: bool = True


class _Leaving:
    """The copy-outs of a rank: see ``ebbtide.schedule.CopyOut``, which waits where this yields.

    Args:
        copy: Queues a copy of so many bytes.
        window: Its sizes.
        expected_bytes: That the forward offers.
    """

    def __init__(self, copy: Callable[[float], _Copy], window: Window, expected_bytes: int) -> None:
        self._copy, self._window, self._late_bytes = copy, window, expected_bytes - window.held_bytes
        self._offered_bytes = 0
        self._flying: deque[list[_Offloaded]] = deque()
        self._gathered: list[_Offloaded] = []
        self._held: deque[_Offloaded] = deque()

    def add(self, offloaded: _Offloaded) -> Generator[_Wait, None, None]:
        """Begin a copy, or hold it back."""
        late, begun = self._offered_bytes >= self._late_bytes, True
        self._offered_bytes += offloaded.nbytes
        if late:
            self._held.append(offloaded)
            while _bytes_of(self._held) > self._window.held_bytes:
                self._gather(self._held.popleft())
        else:
            begun = self._gather(offloaded)
        if begun or self._held or self._excess:
            yield from self.retire()

    @property
    def _excess(self) -> bool:
        flying = sum(map(_bytes_of, self._flying))
        return flying + _bytes_of(self._gathered) + _bytes_of(self._held) > self._window.out_bytes

    def _gather(self, offloaded: _Offloaded) -> bool:
        self._gathered.append(offloaded)
        full = _bytes_of(self._gathered) >= self._window.gathered_bytes
        if full:
            self.begin()
        return full

    def begin(self) -> None:
        """Begin the copies of what is gathered."""
        if self._gathered:
            for each in self._gathered:
                each.out = self._copy(each.nbytes)
            self._flying.append(self._gathered)
            self._gathered = []

    def retire(self) -> Generator[_Wait, None, None]:
        """Drop the sources of copies that are done; beyond the window, wait for the oldest."""
        while True:
            while self._flying and (last := self._flying[0][-1].out) is not None and last.done:
                for each in self._flying.popleft():
                    each.resident = False
            if not self._excess:
                return
            self.begin()
            if not self._flying or (last := self._flying[0][-1].out) is None:
                return
            if not last.done:
                yield "copy", last


class _Coming:
    """The copy-ins of a rank: see ``ebbtide.schedule.CopyIn``.

    Args:
        copy: Queues a copy of so many bytes.
        window: Its sizes.
        upcoming: What backward reads, in order.
    """

    def __init__(self, copy: Callable[[float], _Copy], window: Window, upcoming: Iterable[_Offloaded]) -> None:
        self._copy, self._window, self._upcoming = copy, window, deque(upcoming)
        self._taken_bytes = 0

    def advance(self) -> None:
        """Begin as many groups of copies as the window allows."""
        group_bytes = self._window.gathered_bytes
        if self._taken_bytes and self._taken_bytes > self._window.in_bytes - group_bytes:
            return
        while group := self._next_group(group_bytes):
            self.begin(group)

    def begin(self, group: Sequence[_Offloaded]) -> None:
        """Begin the copies of a group, whose readers wait for all of it."""
        copies = [self._copy(each.nbytes) for each in group]
        for each in group:
            each.back = copies[-1]

    def _next_group(self, group_bytes: int) -> list[_Offloaded]:
        group: list[_Offloaded] = []
        while self._upcoming and (not group or _bytes_of(group) < group_bytes):
            each = self._upcoming[0]
            if self._taken_bytes and self._taken_bytes + each.nbytes > self._window.in_bytes:
                break
            self._taken_bytes += each.nbytes
            self._upcoming.popleft()
            if not each.resident:
                group.append(each)
        return group

    def has_read(self, offloaded: _Offloaded) -> None:
        """A unit was read: its bytes are no longer ahead."""
        if self._upcoming and self._upcoming[0] is offloaded:
            self._upcoming.popleft()  # it was read before it fitted into the window
        else:
            self._taken_bytes -= offloaded.nbytes
        if self._window.in_bytes - self._taken_bytes >= self._window.gathered_bytes or not self._taken_bytes:
            self.advance()


def _bytes_of(offloaded: Iterable[_Offloaded]) -> int:
    return sum(each.nbytes for each in offloaded)


def _program(cluster: _Cluster, rank: int, assignment: Assignment) -> Generator[_Wait, None, None]:
    """Yield the waits of a rank, in the order of the simulated schedule."""
    profile = cluster.profiles[rank]
    blocks = list(zip(profile.blocks, assignment, strict=True))
    moved = [
        sum(u.moved_bytes for u, a in zip(b.units, acts, strict=True) if a is Action.OFFLOAD) for b, acts in blocks
    ]
    window = Window(profile.window_bytes)
    window.saw_block(max(moved), alone=len(moved) == 1)
    offloaded: dict[tuple[int, int], _Offloaded] = {}
    leaving = _Leaving(partial(cluster.copy, rank, out=True), window, sum(moved) if moved[-1] else sys.maxsize)
    yield "compute", profile.prologue_seconds
    for place, (block, actions) in enumerate(blocks):
        yield "block", place
        for number, (unit, action) in enumerate(zip(block.units, actions, strict=True)):
            yield "compute", block.forward_seconds / len(block.units)
            if action is Action.OFFLOAD:
                made = offloaded[place, number] = _Offloaded(unit.moved_bytes)
                yield from leaving.add(made)
        leaving.begin()
        yield from leaving.retire()
    yield "compute", profile.head_seconds
    cluster.cancel(rank)
    coming = _Coming(partial(cluster.copy, rank, out=False), window, reversed(offloaded.values()))
    for place in reversed(range(len(blocks))):
        block, actions = blocks[place]
        yield "block", 2 * len(blocks) - 1 - place
        coming.advance()
        for number in reversed(range(len(block.units))):
            if actions[number] is Action.RECOMPUTE:
                yield "compute", block.units[number].recompute_seconds or 0.0
            if (each := offloaded.get((place, number))) is not None:
                if not each.resident:
                    if each.back is None:
                        coming.begin([each])
                    if each.back is not None:
                        yield "copy", each.back
                coming.has_read(each)
            yield "compute", block.backward_seconds / len(block.units)
    yield "compute", profile.epilogue_seconds


def simulate_ranks(profiles: Sequence[Profile], assignment: Assignment, nodes: Nodes) -> list[float]:
    """Simulate one step of a sharded job. See [Note: what ranks share].

    Args:
        profiles: One for each rank, with equally many blocks. Every block saves something, and moving costs no compute.
        assignment: For each block, the action of each of its units: keep, offload or recompute.
        nodes: What ranks share; rank 9 is on the second node of eight.

    Returns:
        The seconds of each rank's step.
    """
    cluster = _Cluster(profiles, nodes)
    cluster.run([_program(cluster, rank, assignment) for rank in range(len(profiles))])
    return [rank.ended for rank in cluster.ranks]
