"""The copy rates of a tier.

[Note: incompressible bytes] The bytes are noise: a disk that skips zeros or compresses would appear faster. All pieces
are copied out before the first is copied in, so that none is read from a cache. The tier's counters measure the time,
as in training; each piece gives a rate, and the median counts. If the device's events have no time, the host's clock is
used, from before a copy is queued until the device is idle.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import torch

from ebbtide.base.errors import CapError, DiskFullError
from ebbtide.store.meter import keeps_time, synchronize
from ebbtide.store.protocol import Slot, Tier, copy_out_one

PIECES = 8
_SECONDS = 1.6
"""Approximate time of a measurement; at a rate below some MB/s it takes longer."""

_LEAST_PIECES = 3
_LEAST_BYTES, _MOST_BYTES = 1 << 20, 32 << 20
_TILE_BYTES = 4 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class Speed:
    """The copy rates of a tier.

    Attributes:
        out_bytes_per_second: Copy-outs, while nothing is copied in.
        in_bytes_per_second: Copy-ins, while nothing is copied out.
    """

    out_bytes_per_second: float
    in_bytes_per_second: float


def incompressible(nbytes: int, device: torch.device) -> torch.Tensor:
    """Return incompressible bytes, one-dimensional and equal in each call; torch's random state is unchanged."""
    generator = torch.Generator("cpu").manual_seed(0)
    size = min(nbytes, _TILE_BYTES)
    tile = torch.randint(0, 256, (size,), dtype=torch.uint8, device="cpu", generator=generator).to(device)
    return tile.repeat(-(-nbytes // size))[:nbytes]


def measure_speed(tier: Tier, device: torch.device, *, most_bytes: int) -> Speed:
    """Copy some pieces out and in. See [Note: incompressible bytes].

    Args:
        tier: The tier; left empty.
        device: The device whose memory the tier saves.
        most_bytes: Most memory to use on either side.

    Raises:
        DiskFullError: There is no room for one piece.
        CapError: Likewise, in host memory.
        DiskError: A copy failed.
    """
    return _Trial(tier, device, most_bytes).run()


class _Trial:
    """One measurement."""

    def __init__(self, tier: Tier, device: torch.device, most_bytes: int) -> None:
        self._tier, self._device, self._most_bytes = tier, device, most_bytes
        self._timed = keeps_time(tier)
        self._source = incompressible(_LEAST_BYTES, device)

    def run(self) -> Speed:
        self._out([])  # allocates memory, and the first part of the file
        first = self._out([])
        self._source = incompressible(self._piece_bytes(first), self._device)
        slots: list[Slot] = []
        try:
            out = _median(self._all_out(slots))
            return Speed(out_bytes_per_second=out, in_bytes_per_second=_median(map(self._in, slots)))
        finally:
            for slot in slots:
                slot.free()

    def _piece_bytes(self, rate: float) -> int:
        """Return the size of a piece, so that all pieces each way fit into time and memory."""
        wanted = min(rate * _SECONDS / (2 * PIECES), self._most_bytes / (2 * PIECES), _MOST_BYTES)
        return max(_LEAST_BYTES, 1 << int(wanted).bit_length() - 1) if wanted >= 1 else _LEAST_BYTES

    def _out(self, slots: list[Slot]) -> float:
        """Copy out one piece; the slot may be dropped."""
        before = self._read()
        slot = copy_out_one(self._tier, self._source)
        synchronize(self._device)
        slots.append(slot)
        return self._rate(before, self._read(), 0)

    def _all_out(self, slots: list[Slot]) -> Iterator[float]:
        try:
            for _ in range(PIECES):
                yield self._out(slots)
        except (DiskFullError, CapError):
            if not slots:
                raise

    def _in(self, slot: Slot) -> float:
        before = self._read()
        slot.take()
        synchronize(self._device)
        return self._rate(before, self._read(), 2)

    def _read(self) -> tuple[float, float, float, float]:
        counters = self._tier.counters
        if not self._timed:
            now = time.perf_counter()
            return counters.out_bytes, now, counters.in_bytes, now
        return counters.out_bytes, counters.out_seconds, counters.in_bytes, counters.in_seconds

    @staticmethod
    def _rate(before: tuple[float, ...], after: tuple[float, ...], which: int) -> float:
        """Return bytes per second between two readings: ``which`` is 0 out, 2 in."""
        return (after[which] - before[which]) / max(after[which + 1] - before[which + 1], 1e-9)


def _median(measured: Iterable[float]) -> float:
    """Return the median of rates that are measured one by one, while time is left."""
    rates: list[float] = []
    began = time.perf_counter()
    for rate in measured:
        rates.append(rate)
        if len(rates) >= _LEAST_PIECES and time.perf_counter() - began > _SECONDS / 2:
            break
    return statistics.median(rates)
