"""Time whole passes and their blocks while a plan is executed.

[Note: a span]
A span is the time from the first block of a pass to the end of that block's backward (``ebbtide.engine.timing``,
[Note: a measured step]). Each block has two parts in it: its forward, up to the next block, and its backward, from the
arrival of its output's gradient. Timestamps are read when the next pass begins, if the device has reached them, else
one pass later, so nothing waits for a device. A pass is skipped if it had no backward, or several (a span shows the
first, and none of a zero-bubble schedule's weight gradients), if its backward raised, if another pass or its backward
ran in between, or if it saved other amounts than the measured one. A plan that changes when a span is handed over may
change in the middle of a pass: what began before ``want`` is no span.
"""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

import torch

from ebbtide.engine.passes import Pass, PlainRun, RunRecord
from ebbtide.engine.stretches import Stopwatch
from ebbtide.store.meter import Meter


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockSpan:
    """One block of a pass that carried out a plan.

    Attributes:
        name: Path of the block.
        plain: It ran without hooks.
        checkpointed: Its forward ran a second time in backward.
        forward_seconds: Of its forward.
        backward_seconds: Of its backward, recomputes and waits for copies included.
    """

    name: str
    plain: bool
    checkpointed: bool = False
    forward_seconds: float
    backward_seconds: float

    @property
    def seconds(self) -> float:
        """Time of its forward and backward together."""
        return self.forward_seconds + self.backward_seconds


@dataclass(frozen=True, slots=True, kw_only=True)
class Span:
    """One pass that carried out a plan.

    Attributes:
        seconds: From its first block's forward to the end of that block's backward.
        peak_bytes: Most memory until the end of the whole backward; None if not requested, or not known.
        saved_bytes: What its blocks saved.
        blocks: In the order in which their forwards began.
        system_seconds: The kernel's part of the time, in seconds of one core; None as for the memory.
        verifies: Recipes were verified before their first use in it, which takes time that later passes do not.
        in_use_bytes: Memory in use when it began; None as for the peak.
    """

    seconds: float
    peak_bytes: int | None
    saved_bytes: int
    blocks: tuple[BlockSpan, ...] = ()
    system_seconds: float | None = None
    verifies: bool = False
    in_use_bytes: int | None = None


class _Open(Stopwatch):
    """A pass that is timed as a whole."""

    unsure = 0  # how often a recipe had had no verdict when it began
    system_seconds: float | None = None  # when it began; then its own
    peak_bytes: int | None = None
    saved_bytes: int | None = None  # also None: not to be timed
    counted = False  # whether its bytes were
    verifies = False


class SpanTimer:
    """Times passes while they are wanted. See [Note: a span].

    Args:
        meter: Measures time and memory.
        done: Takes a span, or None for a pass that ended and is skipped; returns whether another is wanted.
        memory: Whether memory is measured too.
        resumes: Called with this timer when a pause is over and the next pass begins; returns whether it is timed.
        unsure: Returns how often a recipe had no verdict so far.

    Attributes:
        open: The pass that is timed now, if there is one.
        between_peak_bytes: Most memory between two spans, as in the optimizer's step; None if not measured.
        paused: Passes until they may be timed again; 0: the next one may be, they are timed now, or never again.
    """

    def __init__(
        self,
        meter: Meter,
        done: Callable[[Span | None], bool],
        *,
        memory: bool,
        resumes: Callable[[SpanTimer], bool] = lambda timer: True,
        unsure: Callable[[], int] = lambda: 0,
    ) -> None:
        self._meter, self._done, self._memory, self._resumes, self._unsure = meter, done, memory, resumes, unsure
        self.wanted, self.paused = False, 0  # ``wanted``: passes are timed now
        self.open: _Open | None = None
        self._closed: deque[_Open] = deque()
        self._latest: weakref.ref[Pass] | None = None  # whose span was closed
        self._dropped: weakref.ref[Pass] | None = None  # it began before passes were wanted anew
        self._wants, self._pause_over = 0, False
        self._devices: set[torch.device | None] = set()  # whose memory is measured
        self.between_peak_bytes: int | None = None

    def want(self, *, wanted: bool = True) -> None:
        """Time passes from the next one on, or no longer; those that have begun do not count."""
        if self.open is not None:
            self._dropped = self.open.pass_
        self.wanted, self.open, self._pause_over = wanted, None, False
        self._wants += 1
        self._closed.clear()

    def finish(self) -> None:
        """Close the span whose backward is over, hand over the spans whose timestamps are reached, and end a pause."""
        if self._pause_over:  # the next pass begins: memory no longer holds what the one before kept
            self._pause_over, self.wanted, self._latest = False, self._resumes(self), None
        if self.open is not None and self.open.ended is not None:
            self._closed.append(self.open)
            self._latest, self.open = self.open.pass_, None
        while self.wanted and self._closed and (len(self._closed) > 1 or self._meter.reached(self._closed[0].ended)):
            self._hand_over(self._closed.popleft())

    def block_begins(self, run: RunRecord | PlainRun, device: torch.device | None) -> None:
        """Begin a block's forward on a device."""
        wants = self._wants
        self.finish()
        if not self.wanted:
            return
        if self._wants != wants:
            self._dropped = weakref.ref(run.pass_)  # this block follows the plan before
        if self._memory and device not in self._devices:
            self._devices.add(device)
            self._meter.take_peak_bytes(device)  # what was before does not count
        if self.open is not None and not self.open.by_run and self.open.pass_() is not run.pass_:
            self.open = self._latest = None  # its graph was dropped: no backward came, and no optimizer's step
        if self.open is None:
            if any(known is not None and known() is run.pass_ for known in (self._latest, self._dropped)):
                return  # the rest of a pass whose backward came in between, or that is dropped
            peak_bytes = self._take_peak_bytes()
            if self._latest is not None and peak_bytes is not None:
                self.between_peak_bytes = max(self.between_peak_bytes or 0, peak_bytes)
            self.open = _Open(self._meter, run.pass_, device, memory=self._memory)
            self.open.unsure = self._unsure()
            self.open.system_seconds = self._meter.system_seconds() if self._memory else None
        if self.open.pass_() is run.pass_:
            self.open.begin(run, device)
        else:
            self.open.alone = False  # two graphs are alive: neither is timed

    def pass_ends(self, saved_bytes: int | None) -> None:
        """A forward is over.

        Args:
            saved_bytes: What its blocks saved; None: it is not to be timed.
        """
        now = self.open  # blocks called without the model's forward: the next pass ends it, after its backward
        if now is not None and (now.ended is None or not now.counted):
            now.saved_bytes, now.counted, now.verifies = saved_bytes, True, self._unsure() > now.unsure
        if self.paused and not self.wanted:
            self.paused -= 1
            self._pause_over = not self.paused

    def backward_ends(self, device: torch.device | None, *, raised: bool = False) -> None:
        """A backward is over, whose last block is on ``device``; the span of one that ``raised`` is not handed over."""
        now = self.open
        if now is not None and (raised or not now.backward_began):  # not its own: graphs overlap
            now.alone = False
        if self._memory and self.wanted and (now is None or now.ended is not None):
            peak = self._take_peak_bytes()  # of a second backward: no optimizer's step
            if now is not None:
                now.peak_bytes = max(now.peak_bytes or 0, peak or 0)
        if now is not None and now.ended is None:
            now.ended = now.end(None, device)
            now.peak_bytes = self._take_peak_bytes()
            if now.system_seconds is not None:
                now.system_seconds = (self._meter.system_seconds() or 0.0) - now.system_seconds

    def _take_peak_bytes(self) -> int | None:
        """Return the most memory since the last call, of the fullest device; None if it is not measured."""
        peaks = [self._meter.take_peak_bytes(device) for device in self._devices]
        return max((peak for peak in peaks if peak is not None), default=None)

    def _hand_over(self, found: _Open) -> None:
        span = None if found.saved_bytes is None or not found.alone else self._span(found, found.saved_bytes)
        if not self._done(span):
            self.want(wanted=False)

    def _span(self, found: _Open, saved_bytes: int) -> Span:
        found.join()
        blocks = tuple(
            BlockSpan(
                name=block.name,
                plain=block.plain,
                checkpointed=block.checkpointed,
                forward_seconds=block.forward.seconds(self._meter),
                backward_seconds=block.backward.seconds(self._meter),
            )
            for block in found.blocks
        )
        return Span(
            seconds=self._meter.seconds(found.began, found.ended),
            peak_bytes=found.peak_bytes,
            saved_bytes=saved_bytes,
            blocks=blocks,
            system_seconds=found.system_seconds,
            verifies=found.verifies,
            in_use_bytes=found.in_use_bytes,
        )
