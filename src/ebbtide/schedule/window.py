"""The bytes allowed in flight between a device and its store. See [Note: window] in ``ebbtide.schedule``."""

from __future__ import annotations

import logging
import sys

from ebbtide.base.units import format_size

logger = logging.getLogger("ebbtide.schedule")

MOST_GATHERED_BYTES = 64 * 1024**2
"""Bytes gathered before their copies begin: a link moves them in about a millisecond."""

LEAST_WINDOW = 16 * 1024**2
"""Smallest window that follows the model: below this, copies are too short to hide anything."""

PARTS = 16
"""Parts of a forward that is one block, as in ``offload_saved_tensors``; one of them is the window."""

BACKWARDS_WITH_ROOM = 50
"""Backwards after which a window that a full device has made smaller grows again."""

_LEAST_ROOM = 1024**2
"""The least size that it grows to: after no room at all, doubling would need a thousand backwards."""


class Window:
    """Bytes allowed in flight each way. See [Note: window].

    Args:
        fixed_bytes: The user's window; None: follow the model.

    Attributes:
        out_bytes: Window of the copy-out; without a limit until the first block was seen whole.
        in_bytes: Window of the copy-in.
        held_bytes: Most bytes held back at the end of a pass: what backward reads while the first prefetches run.
        gathered_bytes: Bytes whose copies begin together. See [Note: groups of copies].
    """

    def __init__(self, fixed_bytes: int | None) -> None:
        self._fixed_bytes = fixed_bytes
        self._block_bytes = 0
        self._room_bytes = sys.maxsize
        self._backwards = 0  # since the room was found too small, or was made larger
        self._follow()

    def _follow(self) -> None:
        """Work out the window from what is known: it is read at every saved tensor and changes seldom."""
        fixed = self._fixed_bytes
        self.in_bytes = min(fixed or max(self._block_bytes, LEAST_WINDOW), self._room_bytes)
        unseen = fixed is None and not self._block_bytes
        self.out_bytes = sys.maxsize if unseen else fixed or max(2 * self._block_bytes, LEAST_WINDOW)
        least_bytes = min(self.in_bytes, self.out_bytes)
        self.held_bytes = min(fixed or self._block_bytes, least_bytes)
        self.gathered_bytes = min(least_bytes // 4, MOST_GATHERED_BYTES)

    def saw_block(self, offloaded_bytes: int, *, alone: bool = False) -> None:
        """A block offloaded this much; of one that is the whole forward a part stands for its layers."""
        if alone:
            offloaded_bytes //= PARTS
        if offloaded_bytes > self._block_bytes:
            self._block_bytes = offloaded_bytes
            self._follow()

    def forget_blocks(self) -> None:
        """Another plan is in force: its blocks offload other amounts."""
        self._block_bytes = 0
        self._follow()

    def shrink(self, ahead_bytes: int) -> None:
        """Prefetch half as much from now on: beyond ``ahead_bytes`` of prefetched bytes the device has no room."""
        smaller = (ahead_bytes or self.in_bytes) // 2
        first, self._room_bytes = self._room_bytes == sys.maxsize, min(self._room_bytes, smaller)
        self._backwards = 0
        self._follow()
        if first:
            logger.warning(
                "the device has no room for a window of %s on top of what backward needs: copy-ins run less far "
                "ahead, and compute may wait for them; a smaller window, or offloading less, makes room",
                format_size(self._fixed_bytes or max(self._block_bytes, LEAST_WINDOW)),
            )

    def recover(self) -> None:
        """A backward begins: after many that had room, prefetch twice as much."""
        self._backwards += 1
        if self._backwards > BACKWARDS_WITH_ROOM and self._room_bytes != sys.maxsize:
            self._room_bytes, self._backwards = min(max(2 * self._room_bytes, _LEAST_ROOM), sys.maxsize - 1), 0
            self._follow()
