"""How long whole passes take while a plan is carried out.

[Note: a span]
A span is the time from the first block of a pass to the end of its backward. It is cut by two moments and read when the
next pass but one begins: by then the device has long reached both, so nobody waits for it. A pass is left out whose
backward did not come, between whose moments another pass ran, or that saved other amounts than the measured one.
"""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from ebbtide.store.meter import Meter, Moment

if TYPE_CHECKING:
    from ebbtide.engine.passes import Pass


@dataclass(frozen=True, slots=True, kw_only=True)
class Span:
    """One pass that carried out a plan.

    Attributes:
        seconds: From its first block to the end of its backward.
        peak_bytes: Most memory in that time; None if not asked for, or not known.
        saved_bytes: What its blocks saved.
    """

    seconds: float
    peak_bytes: int | None
    saved_bytes: int


@dataclass(slots=True)
class _Open:
    pass_: weakref.ref[Pass]
    began: Moment
    ended: Moment | None = None
    peak_bytes: int | None = None
    saved_bytes: int | None = None
    alone: bool = True  # no other pass ran in between


class SpanTimer:
    """Times passes while they are wanted. See [Note: a span].

    Args:
        meter: Tells moments and memory.
        done: Takes a span; returns whether another is wanted.
        memory: Whether memory is measured too.
    """

    def __init__(self, meter: Meter, done: Callable[[Span], bool], *, memory: bool) -> None:
        self._meter, self._done, self._memory = meter, done, memory
        self._wanted = False
        self._open: _Open | None = None
        self._closed: deque[_Open] = deque()
        self._where: torch.device | None = None

    def want(self, *, wanted: bool = True) -> None:
        """Time passes from the next one on, or no longer."""
        self._wanted, self._open = wanted, None
        self._closed.clear()

    def block_begins(self, pass_: Pass, where: torch.device | None) -> None:
        """A block's forward begins.

        Args:
            pass_: Its pass.
            where: Its device.
        """
        if not self._wanted:
            return
        if self._open is not None and self._open.ended is None:
            before = self._open.pass_()
            if before is pass_:
                return
            if before is not None:
                self._open.alone = False  # two graphs are alive: neither is timed
                return
        if self._open is not None and self._open.ended is not None and self._open.pass_() is not pass_:
            self._closed.append(self._open)
        while len(self._closed) > 1 and self._wanted:
            self._tell(self._closed.popleft())
        self._open, self._where = None, where
        if self._wanted:
            if self._memory:
                self._meter.take_peak_bytes(where)
            self._open = _Open(weakref.ref(pass_), self._meter.moment(where))

    def pass_ends(self, saved_bytes: int | None) -> None:
        """A forward is over.

        Args:
            saved_bytes: What its blocks saved; None: it is not to be timed.
        """
        if self._open is not None and self._open.ended is None:
            self._open.saved_bytes = saved_bytes

    def backward_ends(self) -> None:
        """A backward is over."""
        if self._open is not None and self._open.ended is None:
            self._open.ended = self._meter.moment(self._where)
            self._open.peak_bytes = self._meter.take_peak_bytes(self._where) if self._memory else None

    def _tell(self, found: _Open) -> None:
        if found.saved_bytes is None or not found.alone:
            return
        seconds = self._meter.seconds(found.began, found.ended)
        span = Span(seconds=seconds, peak_bytes=found.peak_bytes, saved_bytes=found.saved_bytes)
        if not self._done(span):
            self.want(wanted=False)
