"""Host memory first, and disk for bytes that do not fit.

[Note: spilling] When the host budget is reached, a storage is still copied to host memory first, into a reserved part
of the budget, the *stage*. From there a writer takes it to disk, which frees its stage for the next. Nobody waits for
that: staged bytes are passed on in every call of the tier, and only a full stage makes the host wait. Bytes that are
read while staged come from the stage; others are read from disk into host memory and copied in from there. If the disk
fails, staged bytes stay staged.

A storage larger than the stage goes through it in pieces, each a slot of its own, while the host waits for room. Its
bytes are copied in piece by piece, straight into their target, so that the device needs no memory besides. If a piece
finds no room, the earlier ones are freed, and the storage stays on the device.
"""

from __future__ import annotations

import logging
import threading
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

import torch

from ebbtide.base.errors import CapError, DiskError, DiskFullError, TargetError
from ebbtide.store.arena import PLACE_ALIGN_BYTES
from ebbtide.store.counters import Stalls, TierCounters
from ebbtide.store.device import StreamHandle
from ebbtide.store.disk import DiskTier
from ebbtide.store.faults import freed_error
from ebbtide.store.host import HostTier
from ebbtide.store.hostslot import HostSlot
from ebbtide.store.spillslot import SpillSlot, SplitSlot

_LOG = logging.getLogger("ebbtide.store")
_MOST_STAGE_BYTES = 512 << 20
_STAGE_DIVISOR = 8


def stage_of(budget_bytes: int) -> int:
    """Return the size of the stage in a host budget."""
    stage_bytes = min(budget_bytes // _STAGE_DIVISOR, _MOST_STAGE_BYTES)
    return stage_bytes // PLACE_ALIGN_BYTES * PLACE_ALIGN_BYTES  # so a piece as large finds room


class SpillTier:
    """A host tier that continues on disk when its budget is reached. See [Note: spilling].

    Args:
        host: Host memory with a budget.
        open_disk: Opens the disk tier; called at its first use.
        budget_bytes: The budget of ``host``.
    """

    name = "host"

    def __init__(self, host: HostTier, open_disk: Callable[[], DiskTier], *, budget_bytes: int) -> None:
        self.host = host
        self.owns, self.capturing, self.stream_of = host.owns, host.capturing, host.stream_of
        self.follow, self.expect = host.follow, host.expect
        self._open_disk = open_disk
        self._stage_bytes = stage_of(budget_bytes)
        self._disk: DiskTier | None = None
        self._refused: str | None = None
        # Removing a stage requires the lock; slots die without it.
        self._lock = threading.Lock()
        self._staged: deque[weakref.ref[SpillSlot]] = deque()
        self._written: deque[weakref.ref[SpillSlot]] = deque()

    @property
    def unspilled_bytes(self) -> int:
        """Bytes that it holds before anything goes to disk."""
        return (self.host.budget_bytes or 0) - self._stage_bytes

    @property
    def stalls(self) -> Stalls:
        """Stalls of compute, by reader."""
        return self.host.stalls

    @property
    def counters(self) -> TierCounters:
        """Bytes copied over the device's link; ``gauges`` has those to and from disk."""
        return self.host.counters

    def gauges(self) -> dict[str, int]:
        """Return the bytes in host memory and on disk, by name."""
        return self.host.gauges() | ({} if self._disk is None else self._disk.gauges())

    @property
    def used_bytes(self) -> int:
        """Bytes of places in use now, in host memory and on disk."""
        return self.host.used_bytes + (0 if self._disk is None else self._disk.used_bytes)

    @property
    def free_bytes(self) -> int | None:
        """Bytes that could still be offloaded; ``None``, unknown, before anything was spilled."""
        host = self.host.free_bytes
        return None if self._disk is None or host is None else host + self._disk.free_bytes

    def copy_out_all(
        self, sources: Sequence[torch.Tensor], *, compute: StreamHandle | None = None
    ) -> list[HostSlot | SpillSlot | SplitSlot | CapError]:
        """Begin to copy out several sources, see ``Tier.copy_out_all``: to host memory, and the rest to disk."""
        if self._disk is not None:
            with self._lock:
                self._pass_on(self._disk)
        staged = self.host.copy_out_all(sources, compute=compute, spare_bytes=self._stage_bytes)
        return [
            self._spill(source, slot, compute) if isinstance(slot, CapError) else slot
            for source, slot in zip(sources, staged, strict=True)
        ]

    def _spill(
        self, source: torch.Tensor, full: CapError, compute: StreamHandle | None
    ) -> SpillSlot | SplitSlot | CapError:
        pieces: list[SpillSlot] = []
        try:
            disk = self._usable_disk(full)
            for piece in source.split(self._stage_bytes or source.numel()):
                with self._lock:
                    slot = SpillSlot(self, self._stage(piece, disk, compute))
                    self._staged.append(weakref.ref(slot))
                pieces.append(slot)
        except CapError as error:
            return error.with_traceback(None)  # whose frames would keep the pieces alive
        return pieces[0] if len(pieces) == 1 else SplitSlot(self, pieces)

    def are_copied_out(self, slots: Sequence[Any]) -> bool:
        """Whether the bytes of several slots have arrived in host memory."""
        return self.host.are_copied_out(slots if self._disk is None else _stages(slots))

    def wait_copied_out(self, slots: Sequence[Any]) -> None:
        """Make compute wait for the copy-outs of several slots to host memory."""
        self.host.wait_copied_out(slots if self._disk is None else _stages(slots))

    def prefetch(self, slots: Sequence[Any]) -> int:
        """Begin the copy-ins of several slots; see ``Tier.prefetch``."""
        if self._disk is None:
            return self.host.prefetch(slots)
        for begun, slot in enumerate(slots):
            try:
                if isinstance(slot, SpillSlot):
                    self._prefetch(slot)
                elif isinstance(slot, SplitSlot):
                    self._prefetch_pieces(slot)
                else:
                    self.host.prefetch([slot])
            except torch.OutOfMemoryError:
                if not begun:
                    raise
                return len(slots) - begun
        return 0

    def _prefetch(self, slot: SpillSlot) -> None:
        """Begin the copy-in of ``slot``, or the read from disk."""
        self._check(slot)
        slot.wanted = True
        with self._lock:
            stage = slot.stage
            if stage is not None:
                self.host.prefetch([stage])
        if stage is None and slot.on_disk is not None:
            slot.on_disk.prefetch()

    def _prefetch_pieces(self, slot: SplitSlot) -> None:
        """Begin the reads from disk; staged pieces stay there: on the device they would need memory twice."""
        for piece in slot.pieces:
            self._check(piece)
            piece.wanted = True
            if piece.stage is None and piece.on_disk is not None:
                piece.on_disk.prefetch()

    def discard(self, slot: SpillSlot) -> None:
        """Discard an unused copy-in or read of ``slot``."""
        self._check(slot)
        slot.wanted = False
        with self._lock:
            if slot.stage is not None:
                slot.stage.discard()
        if slot.on_disk is not None:
            slot.on_disk.discard()

    def take(self, slot: SpillSlot) -> torch.Tensor:
        """Return the bytes of ``slot``."""
        self._check(slot)
        with self._lock:
            if self._disk is not None:
                self._pass_on(self._disk)
            if slot.stage is not None:
                slot.wanted = False
                return slot.stage.take()
        if slot.on_disk is None:
            raise freed_error()
        content = slot.on_disk.take()
        try:
            place = self.host.fill(content, slot.where)
        except CapError:  # the stage is full: directly from pageable memory, in order with compute
            target = self.host.device.allocate(slot.nbytes, slot.where)
            self._copy_in(target, content)
            return target
        target = place.take()
        place.free()
        return target

    def take_pieces(self, slot: SplitSlot) -> torch.Tensor:
        """Return the bytes of ``slot``."""
        for piece in slot.pieces:
            self._check(piece)
        target = self.host.device.allocate(slot.nbytes, slot.where)
        parts = target.split([piece.nbytes for piece in slot.pieces])
        for piece, part in zip(slot.pieces, parts, strict=True):
            if not self._take_staged(piece, part):
                if piece.on_disk is None:
                    raise freed_error()
                self._copy_in(part, piece.on_disk.take())
        return target

    def _take_staged(self, piece: SpillSlot, target: torch.Tensor) -> bool:
        """Copy a piece in from the stage, if it is there."""
        with self._lock:
            if self._disk is not None:
                self._pass_on(self._disk)
            piece.wanted, stage = False, piece.stage
            if stage is not None:
                self.host.wait_copied(stage)
                self._copy_in(target, stage.content())
        return stage is not None

    def _copy_in(self, target: torch.Tensor, content: torch.Tensor) -> None:
        self.host.device.copy_now(target, content)
        self.host.counters.in_bytes += target.numel()

    def trim(self) -> None:
        """Free memory that the last backwards did not need."""
        if self._disk is not None:
            with self._lock:
                self._pass_on(self._disk)
            self._disk.trim()
        self.host.trim()

    def close_unused(self, in_use: Callable[[], object]) -> None:
        """Close once ``in_use()`` is false; see ``Tier.close_unused``."""
        if self._disk is not None:
            self._disk.close_unused(in_use)
        self.host.close_unused(in_use)

    def close(self) -> None:
        """Stop threads and free everything. May be called repeatedly."""
        if self._disk is not None:
            self._disk.close()
        self.host.close()

    def _check(self, slot: SpillSlot) -> None:
        if slot.freed:
            raise freed_error()

    def _usable_disk(self, full: CapError) -> DiskTier:
        with self._lock:
            if self._disk is None and self._refused is None:
                try:
                    self._disk = self._open_disk()
                except DiskError as error:
                    self._refused = str(error)
                    _LOG.warning("the host budget is reached and no disk is available: %s", self._refused)
                else:
                    self._disk.counters.stalls = self.stalls  # one account of stalls
                    _LOG.warning(
                        "the host budget is reached (%s): the rest goes to disk, which is slower than the link; "
                        "raise host_budget or offload less",
                        full.found,
                    )
            if self._disk is None:
                raise full
            return self._disk

    def _stage(self, source: torch.Tensor, disk: DiskTier, compute: StreamHandle | None) -> HostSlot:
        """Copy ``source`` out to the stage, waiting for room there if need be."""
        while True:
            (slot,) = self.host.copy_out_all([source], compute=compute)
            if isinstance(slot, HostSlot):
                return slot
            if not self._pass_on(disk, wait=True):
                if self._refused is not None:
                    raise CapError(slot.found, expected=slot.expected, hint=f"{slot.hint}; {self._refused}") from slot
                raise slot

    def _pass_on(self, disk: DiskTier, *, wait: bool = False) -> bool:
        """Write arrived stages to disk, and free those whose bytes are there; return whether there may be more room."""
        freed = False
        # An entry is removed after its step, so an interrupted step is repeated. Slots may be freed in other threads
        # meanwhile; errors from their places are not the disk's fault.
        while self._staged:
            found = _staged(self._staged[0])
            if found is None:
                freed = True
            else:
                slot, stage = found
                if not self.host.are_copied_out([stage]):
                    if not wait or self._written or freed:
                        break
                    self.host.wait_copied(stage)
                try:
                    slot.on_disk = disk.copy_out(stage.content())
                    self._written.append(self._staged[0])
                except TargetError as error:
                    freed = self._fail(slot, error) or freed
            self._staged.popleft()
        for _ in range(len(self._written)):
            found = _staged(self._written[0])
            if found is None:
                freed = True
            elif (slot := found[0]).on_disk is not None:
                stage = found[1]
                try:
                    if not slot.on_disk.copied_out:
                        if not wait or freed:
                            break
                        slot.on_disk.wait_copied_out()
                    if slot.wanted and not wait:  # looked at again when it is no longer
                        self._written.rotate(-1)
                        continue
                    slot.stage = None
                    stage.free()
                    freed = True
                except TargetError as error:
                    freed = self._fail(slot, error) or freed
            self._written.popleft()
        return freed

    def _fail(self, slot: SpillSlot, error: TargetError) -> bool:
        """Leave a slot's bytes in place; return whether it had only been freed meanwhile."""
        on_disk, slot.on_disk = slot.on_disk, None
        if on_disk is not None:
            on_disk.free()
        if slot.freed:
            slot.free()
        elif self._refused is None:
            self._refused = str(error)
            reason = "the disk is full" if isinstance(error, DiskFullError) else "the disk refuses"
            _LOG.warning("%s; further offloaded bytes stay in host memory: %s", reason, self._refused)
        return slot.freed


def _stages(slots: Sequence[HostSlot | SpillSlot | SplitSlot]) -> list[HostSlot]:
    """Return the slots in host memory; one that was passed on to disk has none any more."""
    found: list[HostSlot] = []
    for slot in slots:
        if isinstance(slot, HostSlot):
            found.append(slot)
        else:
            found += [stage for piece in slot.pieces if (stage := piece.stage) is not None]
    return found


def _staged(reference: weakref.ref[SpillSlot]) -> tuple[SpillSlot, HostSlot] | None:
    """Return a slot and its stage; ``None`` if it is dead or freed."""
    slot = reference()
    if slot is None or slot.stage is None:
        return None
    if slot.freed:
        slot.free()  # an interrupt may have prevented that
        return None
    return slot, slot.stage
