"""Host memory, pinned once and used again."""

from __future__ import annotations

import logging
import weakref
from collections import defaultdict, deque
from dataclasses import dataclass

import torch

from ebbtide.base.errors import CapError
from ebbtide.base.units import format_size
from ebbtide.store.device import Device, EventHandle

_LOG = logging.getLogger("ebbtide.store")


@dataclass(slots=True, eq=False, weakref_slot=True)
class HostBuffer:
    """Host memory and the last event of a copy that uses it; ``None``: no copy does."""

    memory: torch.Tensor
    last: EventHandle | None = None

    @property
    def nbytes(self) -> int:
        """Its size."""
        return self.memory.numel()


class HostBuffers:
    """Buffers by exact size, at most ``budget_bytes`` in all. Not thread-safe: whoever shares it holds a lock.

    A training step asks for the same sizes as the step before, so exact sizes waste nothing and, from the second step
    on, nothing is pinned anew (pinning costs milliseconds). A spare buffer may still be read by a copy: its next user
    waits for ``last`` on its own stream.
    """

    def __init__(self, device: Device, budget_bytes: int | None) -> None:
        self._device, self._budget_bytes = device, budget_bytes
        self._spare: defaultdict[int, deque[HostBuffer]] = defaultdict(deque)
        self._all: list[weakref.ref[HostBuffer]] = []

    @property
    def total_bytes(self) -> int:
        """Bytes of the buffers that there are; counted anew each time, so that no interrupt can make it wrong."""
        self._all = [reference for reference in self._all if reference() is not None]
        return sum(buffer.nbytes for reference in self._all if (buffer := reference()) is not None)

    @property
    def used_bytes(self) -> int:
        """Bytes of the buffers that somebody has."""
        return self.total_bytes - sum(nbytes * len(spare) for nbytes, spare in self._spare.items())

    @property
    def free_bytes(self) -> int | None:
        """Bytes that the budget still allows; ``None`` without a budget."""
        return None if self._budget_bytes is None else self._budget_bytes - self.used_bytes

    def take(self, nbytes: int) -> HostBuffer:
        """Return a buffer of exactly ``nbytes``.

        Raises:
            CapError: The budget, or the machine, does not give it.
        """
        spare = self._spare.get(nbytes)
        return spare.popleft() if spare else self._allocate(nbytes)

    def give(self, buffer: HostBuffer) -> None:
        """Take a buffer back; a copy may still use it."""
        self._spare[buffer.nbytes].append(buffer)

    def trim(self, *, wait: bool = False, enough_bytes: int | None = None) -> None:
        """Give spare buffers back to the system.

        Args:
            wait: Also those that a copy still uses, after it.
            enough_bytes: Stop when so many bytes were given back; ``None``: all of them.
        """
        given = 0
        for spare in self._spare.values():
            for _ in range(len(spare)):
                if enough_bytes is not None and given >= enough_bytes:
                    return
                buffer = spare.popleft()
                if buffer.last is not None and not self._device.query(buffer.last):
                    if not wait:
                        spare.append(buffer)
                        continue
                    self._device.synchronize(buffer.last)
                self._device.free_host(buffer.memory)
                given += buffer.nbytes

    def _allocate(self, nbytes: int) -> HostBuffer:
        if self._budget_bytes is not None:
            for wait in (False, True):  # waiting for a copy is better than failing
                excess = self.total_bytes + nbytes - self._budget_bytes
                if excess > 0:
                    self.trim(wait=wait, enough_bytes=excess)
            if self.total_bytes + nbytes > self._budget_bytes:
                raise CapError(
                    f"{format_size(nbytes)} of host memory needed, {format_size(self.total_bytes)} in use",
                    expected=f"no more than the host budget of {format_size(self._budget_bytes)}",
                    hint="raise host_budget, offload less, or use target='disk'",
                )
        try:
            memory = self._device.allocate_host(nbytes)
        except RuntimeError as error:
            raise CapError(
                f"the machine gives no further {format_size(nbytes)} of host memory "
                f"({format_size(self.total_bytes)} in use): {error}",
                hint="set host_budget below the memory that is there, offload less, or use target='disk'",
            ) from error
        buffer = HostBuffer(memory)
        self._all.append(weakref.ref(buffer))
        _LOG.debug("host memory: %s more", format_size(nbytes))
        return buffer
