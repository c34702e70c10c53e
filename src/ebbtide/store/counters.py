"""Counters of a tier: bytes moved, time spent copying, and stalls by reader."""

from __future__ import annotations

import time
from collections import deque
from dataclasses import dataclass, field
from typing import Any

_MOST_UNREAD = 4096


class Stalls:
    """Stalls: how long compute waited, and for which reader.

    A device reports the length of a wait once it is over, which may be much later than its request; so each wait
    carries its reader. Callers set ``reader`` before they call the tier.

    Attributes:
        reader: For whom the tier is called now; any value.
        timed: Whether a device times the copies and waits that are requested from now on. Each takes two events that
            keep time, in the middle of a stream; the host's own clock costs nothing and is always read.
        total_seconds: All that is known so far.
    """

    def __init__(self) -> None:
        self.reader: Any = None
        self.timed = True
        self.total_seconds = 0.0
        self._unread: deque[tuple[Any, float]] = deque(maxlen=_MOST_UNREAD)

    def add(self, seconds: float, reader: Any) -> None:
        """Count a wait, which was requested for this reader."""
        self.total_seconds += seconds
        self._unread.append((reader, seconds))

    def add_since(self, begun: float) -> None:
        """Count a wait of the host's that began at ``begun``, on the clock of ``time.perf_counter``, and is over."""
        self.add(time.perf_counter() - begun, self.reader)

    def read(self) -> list[tuple[Any, float]]:
        """Return the reader and the seconds of every wait that was not returned before."""
        return [self._unread.popleft() for _ in range(len(self._unread))]


@dataclass(slots=True, kw_only=True)
class TierCounters:
    """Running totals of one tier.

    Attributes:
        out_bytes: Bytes copied out.
        out_seconds: Time spent copying ``timed_out_bytes`` out.
        in_bytes: Bytes copied in.
        in_seconds: Time spent copying ``timed_in_bytes`` in.
        timed_out_bytes: Bytes whose copy-out was timed, and is over. See ``Stalls.timed``.
        timed_in_bytes: Bytes whose copy-in was timed, and is over.
        stalls: Time compute waited for either.
        probed_bytes: Of the bytes each way, those that were copied only to measure rates.
        probed_seconds: Of the time that compute waited, that for them.
    """

    out_bytes: int = 0
    out_seconds: float = 0.0
    in_bytes: int = 0
    in_seconds: float = 0.0
    timed_out_bytes: int = 0
    timed_in_bytes: int = 0
    stalls: Stalls = field(default_factory=Stalls)
    probed_bytes: int = 0
    probed_seconds: float = 0.0

    @property
    def out_bytes_per_second(self) -> float | None:
        """Rate of copy-outs; None before one was timed."""
        return self.timed_out_bytes / self.out_seconds if self.out_seconds else None

    @property
    def in_bytes_per_second(self) -> float | None:
        """Rate of copy-ins; None before one was timed."""
        return self.timed_in_bytes / self.in_seconds if self.in_seconds else None

    def probed(self, nbytes: int, seconds: float) -> None:
        """Count a copy-out and a copy-in that only measured rates, and the wait for them."""
        self.probed_bytes += nbytes
        self.probed_seconds += seconds

    def copied_out(self, nbytes: int, seconds: float) -> None:
        """Count a copy-out that was timed and is over."""
        self.timed_out_bytes += nbytes
        self.out_seconds += seconds

    def copied_in(self, nbytes: int, seconds: float) -> None:
        """Count a copy-in that was timed and is over."""
        self.timed_in_bytes += nbytes
        self.in_seconds += seconds
