"""Host memory first, and disk for bytes that do not fit.

[Note: spilling] When the host budget is reached, a storage is still copied to host memory first, into a reserved part
of the budget, the *stage*. From there a writer takes it to disk, which frees its stage for the next. Nobody waits for
that: staged bytes are passed on in every call of the tier, and only a full stage makes the host wait. Bytes that are
read while staged come from the stage; others are read from disk into host memory and copied in from there. If the disk
fails, staged bytes stay staged.

A storage larger than the stage goes through it in several pieces, while the host waits for room. They are copied in
one by one, straight into their target, so that the device needs no memory besides. If a piece finds no room, the
earlier ones are freed, and the storage stays on the device.
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
from ebbtide.store.disk import DiskSlot, DiskTier
from ebbtide.store.faults import freed_error
from ebbtide.store.host import HostTier
from ebbtide.store.hostslot import HostSlot, QueuedSlot

_LOG = logging.getLogger("ebbtide.store")
_MOST_STAGE_BYTES = 512 << 20
_STAGE_DIVISOR = 8


def stage_of(budget_bytes: int) -> int:
    """Return the size of the stage in a host budget."""
    stage_bytes = min(budget_bytes // _STAGE_DIVISOR, _MOST_STAGE_BYTES)
    return stage_bytes // PLACE_ALIGN_BYTES * PLACE_ALIGN_BYTES  # so a piece as large finds room


class _Piece:
    """The bytes of a slot, or a part of them, in the stage or on disk; its owner is a ``SpillSlot``.

    Attributes:
        stage: Its place in host memory; None once it is on disk.
        on_disk: Its place on disk; None before the writer has it.
        wanted: A reader will take it from the stage.
        freed: Nobody needs it any more.
    """

    __slots__ = ("__weakref__", "freed", "nbytes", "on_disk", "stage", "wanted")

    def __init__(self, stage: HostSlot) -> None:
        self.nbytes = stage.nbytes
        self.stage: HostSlot | None = stage
        self.on_disk: DiskSlot | None = None
        self.wanted = self.freed = False

    def read(self) -> torch.Tensor:
        """Return the bytes from disk."""
        if self.on_disk is None:
            raise freed_error()
        return self.on_disk.take()

    def free(self) -> None:
        """Free its places; if it dies, they die with it."""
        self.freed = True
        for slot in (self.stage, self.on_disk):
            if slot is not None:
                slot.free()


class SpillSlot(QueuedSlot):
    """One storage that goes to disk through the stage, in one piece or several. See [Note: a slot's life]."""

    __slots__ = ("__weakref__", "nbytes", "origin", "pieces", "_tier")

    def __init__(self, tier: SpillTier, source: torch.Tensor, pieces: Sequence[_Piece]) -> None:
        self._tier, self.pieces = tier, pieces
        self.nbytes, self.origin = source.numel(), source.device

    def discard(self) -> None:
        """Discard an unused copy-in, and unused reads."""
        self._tier.discard(self)

    def take(self) -> torch.Tensor:
        """Return the bytes on the device they came from."""
        return self._tier.take(self)

    def free(self) -> None:
        """Free its places; at any time, in any thread, repeatedly."""
        for piece in self.pieces:
            piece.free()


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
        self._staged: deque[weakref.ref[_Piece]] = deque()
        self._written: deque[weakref.ref[_Piece]] = deque()

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
    ) -> list[HostSlot | SpillSlot | CapError]:
        """Begin to copy out several sources, see ``Tier.copy_out_all``: to host memory, and the rest to disk."""
        with self._lock:
            self._pass_on()
        staged = self.host.copy_out_all(sources, compute=compute, spare_bytes=self._stage_bytes)
        return [
            self._spill(source, slot, compute) if isinstance(slot, CapError) else slot
            for source, slot in zip(sources, staged, strict=True)
        ]

    def _spill(self, source: torch.Tensor, full: CapError, compute: StreamHandle | None) -> SpillSlot | CapError:
        pieces: list[_Piece] = []
        try:
            self._open(full)
            for part in source.split(self._stage_bytes or source.numel()):
                with self._lock:
                    piece = _Piece(self._stage(part, compute))
                    self._staged.append(weakref.ref(piece))
                pieces.append(piece)
        except CapError as error:
            return error.with_traceback(None)  # whose frames would keep the pieces alive
        return SpillSlot(self, source, pieces)

    def are_copied_out(self, slots: Sequence[Any]) -> bool:
        """Whether the bytes of several slots have arrived in host memory."""
        return self.host.are_copied_out(slots if self._disk is None else _stages(slots))

    def wait_copied_out(self, slots: Sequence[Any]) -> None:
        """Make compute wait for the copy-outs of several slots to host memory."""
        self.host.wait_copied_out(slots if self._disk is None else _stages(slots))

    def prefetch(self, slots: Sequence[Any]) -> int:
        """Begin the copy-ins of several slots; see ``Tier.prefetch``."""
        disk = self._disk
        if disk is None:
            return self.host.prefetch(slots)
        from_disk: list[DiskSlot] = []
        with self._lock:
            in_host = [(i, held) for i, slot in enumerate(slots) if (held := self._ready(slot)) is not None]
            try:
                left = self.host.prefetch([held for _, held in in_host])
            except torch.OutOfMemoryError:
                if in_host[0][0] == 0:
                    raise
                left = len(in_host)
            begun = in_host[-left][0] if left else len(slots)
            for piece in _pieces(slots[:begun]):
                piece.wanted = True
                if piece.stage is None and piece.on_disk is not None:
                    from_disk.append(piece.on_disk)
        if from_disk:
            disk.prefetch(from_disk)
        return len(slots) - begun

    def _ready(self, slot: HostSlot | SpillSlot) -> HostSlot | None:
        """Return where a slot's bytes are in host memory; several pieces would need device memory twice."""
        if isinstance(slot, HostSlot):
            return slot
        self._check(slot)
        return slot.pieces[0].stage if len(slot.pieces) == 1 else None

    def discard(self, slot: SpillSlot) -> None:
        """Discard an unused copy-in, and unused reads, of ``slot``."""
        self._check(slot)
        for piece in slot.pieces:
            piece.wanted = False
            with self._lock:
                if piece.stage is not None:
                    piece.stage.discard()
            if piece.on_disk is not None:
                piece.on_disk.discard()

    def take(self, slot: SpillSlot) -> torch.Tensor:
        """Return the bytes of ``slot``."""
        self._check(slot)
        if len(slot.pieces) > 1:
            return self._take_pieces(slot)
        (piece,) = slot.pieces
        with self._lock:
            self._pass_on()
            if piece.stage is not None:
                piece.wanted = False
                return piece.stage.take()
        content = piece.read()
        try:
            place = self.host.fill(content, slot.origin)
        except CapError:  # the stage is full: directly from pageable memory, in order with compute
            target = self.host.device.allocate(slot.nbytes, slot.origin)
            self._copy_in(target, content)
            return target
        target = place.take()
        place.free()
        return target

    def _take_pieces(self, slot: SpillSlot) -> torch.Tensor:
        target = self.host.device.allocate(slot.nbytes, slot.origin)
        parts = target.split([piece.nbytes for piece in slot.pieces])
        for piece, part in zip(slot.pieces, parts, strict=True):
            with self._lock:
                self._pass_on()
                piece.wanted, stage = False, piece.stage
                if stage is not None:
                    self.host.wait_copied(stage)
                    self._copy_in(part, stage.content())
            if stage is None:
                self._copy_in(part, piece.read())
        return target

    def _copy_in(self, target: torch.Tensor, content: torch.Tensor) -> None:
        self.host.device.copy_now(target, content)
        self.host.counters.in_bytes += target.numel()

    def trim(self) -> None:
        """Free memory that the last backwards did not need."""
        with self._lock:
            self._pass_on()
        if self._disk is not None:
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
        if any(piece.freed for piece in slot.pieces):
            raise freed_error()

    def _open(self, full: CapError) -> None:
        """Open the disk, once; raise ``full`` if there is none."""
        with self._lock:
            if self._disk is None and self._refused is None:
                try:
                    self._disk = self._open_disk()
                    self._disk.counters.stalls = self.stalls  # one account of stalls
                    _LOG.warning(
                        "the host budget is reached (%s): the rest goes to disk, which is slower than the link; "
                        "raise host_budget or offload less",
                        full.found,
                    )
                except DiskError as error:
                    self._refused = str(error)
                    _LOG.warning("the host budget is reached and no disk is available: %s", self._refused)
            if self._disk is None:
                raise full

    def _stage(self, source: torch.Tensor, compute: StreamHandle | None) -> HostSlot:
        """Copy ``source`` out to the stage, waiting for room there if need be."""
        while True:
            (slot,) = self.host.copy_out_all([source], compute=compute)
            if isinstance(slot, HostSlot):
                return slot
            if not self._pass_on(wait=True):
                if self._refused is not None:
                    raise CapError(slot.found, expected=slot.expected, hint=f"{slot.hint}; {self._refused}") from slot
                raise slot

    def _pass_on(self, *, wait: bool = False) -> bool:
        """Write arrived pieces to disk, and free the stage of those that are there; return whether it may have room."""
        freed, disk = False, self._disk
        if disk is None:
            return False
        # An entry is removed after its step, so an interrupted step is repeated. Slots may be freed in other threads
        # meanwhile; errors from their places are not the disk's fault.
        while self._staged:
            found = _staged(self._staged[0])
            if found is None:
                freed = True
            else:
                piece, stage = found
                if not self.host.are_copied_out([stage]):
                    if not wait or self._written or freed:
                        break
                    self.host.wait_copied(stage)
                try:
                    (piece.on_disk,) = disk.copy_out_all([stage.content()])
                    self._written.append(self._staged[0])
                except TargetError as error:
                    freed = self._fail(piece, error) or freed
            self._staged.popleft()
        for _ in range(len(self._written)):
            found = _staged(self._written[0])
            if found is None:
                freed = True
            elif (on_disk := found[0].on_disk) is not None:
                piece, stage = found
                try:
                    if not disk.are_copied_out([on_disk]):
                        if not wait or freed:
                            break
                        disk.wait_copied_out([on_disk])
                    if piece.wanted and not wait:  # looked at again when it is no longer
                        self._written.rotate(-1)
                        continue
                    piece.stage = None
                    stage.free()
                    freed = True
                except TargetError as error:
                    freed = self._fail(piece, error) or freed
            self._written.popleft()
        return freed

    def _fail(self, piece: _Piece, error: TargetError) -> bool:
        """Leave a piece's bytes in place; return whether it had only been freed meanwhile."""
        on_disk, piece.on_disk = piece.on_disk, None
        if on_disk is not None:
            on_disk.free()
        if piece.freed:
            piece.free()
        elif self._refused is None:
            self._refused = str(error)
            reason = "the disk is full" if isinstance(error, DiskFullError) else "the disk refuses"
            _LOG.warning("%s; further offloaded bytes stay in host memory: %s", reason, self._refused)
        return piece.freed


def _stages(slots: Sequence[HostSlot | SpillSlot]) -> list[HostSlot]:
    """Return the slots in host memory; one that was passed on to disk has none any more."""
    found = [slot for slot in slots if isinstance(slot, HostSlot)]
    return found + [stage for piece in _pieces(slots) if (stage := piece.stage) is not None]


def _pieces(slots: Sequence[HostSlot | SpillSlot]) -> list[_Piece]:
    return [piece for slot in slots if isinstance(slot, SpillSlot) for piece in slot.pieces]


def _staged(reference: weakref.ref[_Piece]) -> tuple[_Piece, HostSlot] | None:
    """Return a piece and its stage; ``None`` if it is dead or freed."""
    piece = reference()
    if piece is None or piece.stage is None:
        return None
    if piece.freed:
        piece.free()  # an interrupt may have prevented that
        return None
    return piece, piece.stage
