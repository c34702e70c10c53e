"""Carries out the schedule of ``ebbtide.schedule`` with the slots of a store."""

from __future__ import annotations

import functools
import logging
from collections.abc import Sequence

import torch

from ebbtide.base.actions import Action
from ebbtide.base.errors import CapError, note_place
from ebbtide.engine.marks import marked
from ebbtide.engine.tickets import Entry, Residence
from ebbtide.schedule import Outcome
from ebbtide.store.device import StreamHandle
from ebbtide.store.protocol import Slot, Tier

logger = logging.getLogger("ebbtide.engine")


class SlotMover:
    """Moves entries between the device and a tier.

    Args:
        tier: The store.
    """

    def __init__(self, tier: Tier) -> None:
        self._tier, self._warned = tier, False

    def copy_out(self, group: Sequence[Entry], stream: StreamHandle | None) -> list[Outcome]:
        """Ask the store for a slot for each entry whose source can still be read."""
        sources = {
            i: entry.source
            for i, entry in enumerate(group)
            # Changed, or its memory taken away, meanwhile: plain autograd could not read it either.
            if entry.source is not None
            and (entry.probe is None or entry.probe._version == entry.version)
            and entry.source.untyped_storage().nbytes() >= entry.last
        }
        outcomes = [Outcome.NOT_NEEDED] * len(group)
        if not sources:
            return outcomes
        try:
            work = functools.partial(self._tier.copy_out_all, [*sources.values()], compute=stream)
            slots = marked("copy_out", work)
        except BaseException as error:
            note_place(error, f"while copying out {_named(group[next(iter(sources))])}")
            raise
        for i, slot in zip(sources, slots, strict=True):
            if isinstance(slot, CapError):
                self._keep(group[i], slot)
                outcomes[i] = Outcome.REFUSED
            else:
                group[i].slot, outcomes[i] = slot, Outcome.BEGUN
        return outcomes

    def _keep(self, entry: Entry, error: CapError) -> None:
        entry.action = Action.KEEP
        if not self._warned:
            self._warned = True
            # As text: a log record may be kept, and an error holds the frames it came through.
            logger.warning("what the store cannot take stays on the device: %s", str(error))

    def release_sources(self, group: Sequence[Entry], *, wait: bool) -> bool:
        """Release the sources of entries whose copy-outs began together and are done."""
        copied: list[Entry] = []
        slots: list[Slot] = []
        for entry in group:
            if entry.source is not None and entry.slot is not None:
                copied.append(entry)
                slots.append(entry.slot)
        try:
            if wait:
                self._tier.wait_copied_out(slots)
            elif not self._tier.are_copied_out(slots):
                return False
        except BaseException as error:
            note_place(error, f"while copying out {_named(copied[0])}")
            raise
        for entry in copied:
            probe = entry.probe
            entry.tainted = probe is not None and probe._version != entry.version
            entry.source = None
        return True

    def cancel_copy_out(self, saved: Entry) -> bool:
        """Cancel the copy-out of an entry, which is then served from its source."""
        if saved.source is None or saved.slot is None:
            return True
        slot, saved.slot = saved.slot, None  # first: interrupted here, the bytes are served from the source
        if slot.cancel():
            return True
        saved.slot = slot
        return False

    def to_copy(self, saved: Entry) -> int | None:
        """Return the bytes to copy in for the reader of an entry; see ``schedule.mover.Mover``."""
        if saved.source is not None:
            return 0
        return saved.nbytes if saved.slot is not None and saved.residence is Residence.STORED else None

    def copy_in(self, group: Sequence[Entry]) -> int:
        """Prefetch the slots of entries; return for how many, at the end, there was no room."""
        slots: list[Slot] = [entry.slot for entry in group if entry.slot is not None]
        try:
            return marked("copy_in", functools.partial(self._tier.prefetch, slots))
        except torch.OutOfMemoryError:
            return len(group)
        except BaseException as error:
            note_place(error, f"while prefetching {_named(group[0])} ahead of its reader")
            raise

    def discard(self, saved: Entry) -> None:
        """Discard the prefetch of an entry."""
        if saved.slot is not None:
            saved.slot.discard()


def _named(entry: Entry) -> str:
    return f"{entry.site} ({entry.action.value})"
