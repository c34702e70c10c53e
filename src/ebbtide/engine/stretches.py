"""Divide the time of a pass among its blocks, for a measured step and for a span.

See [Note: a measured step] in ``ebbtide.engine.timing``.
"""

from __future__ import annotations

import weakref
from dataclasses import dataclass, field

import torch

from ebbtide.engine.passes import Pass, PlainRun, RunRecord
from ebbtide.engine.timed import TimedUnit
from ebbtide.store.meter import Edges, Meter, Timestamp


class Stretches(list[Edges]):
    """Pieces of time that belong together, and the most memory in them, where it is measured."""

    peak_bytes: int | None = None
    resident_bytes = 0

    def add_memory(self, peak_bytes: int | None, resident_bytes: int) -> None:
        """Note the memory in a piece."""
        self.resident_bytes = max(self.resident_bytes, resident_bytes)
        if peak_bytes is not None:
            self.peak_bytes = max(self.peak_bytes or 0, peak_bytes)

    def seconds(self, meter: Meter) -> float:
        """Return the time of all pieces; waits for the device."""
        return sum(meter.seconds(begin, end) for begin, end in self)


@dataclass(slots=True)
class BlockTimes:
    """A block of a pass that is timed."""

    name: str
    kind: str
    plain: bool
    checkpointed: bool
    forward: Stretches = field(default_factory=Stretches)
    after: Stretches = field(default_factory=Stretches)  # until the next forward begins, or a backward
    backward: Stretches = field(default_factory=Stretches)

    # Of a measured step
    checkpointable: bool = False
    input_bytes: int = 0
    pack_seconds: float = 0.0
    units: list[TimedUnit] = field(default_factory=list[TimedUnit])  # without their prices
    aside: Stretches = field(default_factory=Stretches)  # of its forward, what was spent on timing recomputes


class Stopwatch:
    """Divides the time of a pass among its blocks.

    Args:
        meter: Measures time and memory.
        pass_: The pass; its first block begins.
        device: The device of that block.
        memory: Whether memory is measured too.
    """

    def __init__(self, meter: Meter, pass_: Pass, device: torch.device | None, *, memory: bool) -> None:
        self._meter, self._memory, self.pass_ = meter, memory, weakref.ref(pass_)
        self.in_use_bytes = meter.in_use_bytes(device) if memory else None  # in use when it began
        self.began = meter.timestamp(device)
        self.blocks: list[BlockTimes] = []  # in the order in which their forwards began
        self.by_run: weakref.WeakKeyDictionary[RunRecord | PlainRun, BlockTimes] = weakref.WeakKeyDictionary()
        self.alone, self.backward_began = True, False  # no other pass ran in between; its backward came
        self.reached: Timestamp | None = None  # the gradient of the first block's input is there
        self.ended: Timestamp | None = None  # the end of its backward, if blocks that run backward later do not count
        self._open: tuple[Stretches, Timestamp, torch.device | None] | None = None

    def begin(self, run: RunRecord | PlainRun, device: torch.device | None) -> None:
        """Begin the forward of a block of the pass."""
        plain = isinstance(run, PlainRun)
        block = BlockTimes(run.block.name, run.block.kind, plain, not isinstance(run, PlainRun) and run.checkpointed)
        self.cut(block.forward, device, None if self.blocks else self.began)
        self.blocks.append(block)
        self.by_run[run] = block

    def cut(self, then: Stretches | None, device: torch.device | None, now: Timestamp | None = None) -> None:
        """End the stretch that is open, on its device, and begin one of ``then``, both now or at ``now``."""
        now = self._meter.timestamp(device) if now is None else now
        if self._open is not None:
            stretches, began, where = self._open
            stretches.append((began, now if where == device else self._meter.timestamp(where)))
        self._open = None if then is None else (then, now, device)

    def end(self, then: Stretches | None, device: torch.device | None) -> Timestamp:
        """End the backward, with that of the first block where autograd goes on beyond it; return when that was."""
        last = self._open is not None and self._open[0] is self.blocks[0].backward
        ended = self.reached if last and self.reached is not None else self._meter.timestamp(device)
        self.reached = None  # of a further backward it is unknown
        self.cut(then, device, ended)
        return ended

    def join(self) -> Stretches:
        """Add the time between two forwards to the earlier one; return what is between the last one and backward."""
        for block in self.blocks[:-1]:
            block.forward += block.after
        return self.blocks[-1].after
