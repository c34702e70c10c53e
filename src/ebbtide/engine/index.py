"""Map storages to entries.

[Note: identity]
One entry per storage and version. A storage is known by its ``UntypedStorage`` object, through a weak reference whose
callback removes the key: it lives as long as the storage does, wherever the storage is held. Addresses are reused
within one forward; keyed by address, gradients are silently wrong.
"""

from __future__ import annotations

import weakref
from collections import deque

import torch

from ebbtide.engine.tickets import Entry, Version

_Known = tuple[weakref.ref[torch.UntypedStorage], list[weakref.ref[Entry]]]


MOST_PARTS = 32
"""Parts of a storage with entries of their own; the next view that is saved moves the storage."""


class StorageIndex:
    """Finds the entry of a storage while both are alive; keeps neither alive. See [Note: identity]."""

    def __init__(self) -> None:
        self.known: dict[int, _Known] = {}
        self._keys: dict[weakref.ref[torch.UntypedStorage], int] = {}
        self._dead: deque[weakref.ref[torch.UntypedStorage]] = deque()
        self._note_dead = self._dead.append  # one object for all references

    def find(self, storage: torch.UntypedStorage, version: Version, first: int, last: int) -> Entry | None:
        """Return the entry of bytes ``first`` to ``last`` of a storage at this version."""
        known = self.known.get(id(storage))
        if known is None or known[0]() is not storage:
            return None
        for reference in known[1]:
            entry = reference()
            if entry is None or entry.at != version or entry.first > first or last > entry.last:
                continue
            if not entry.changed:
                return entry
        return None

    def bytes_apart(self, storage: torch.UntypedStorage, version: Version) -> int:
        """Return how many bytes of a storage at this version are in entries that stand for a part of it."""
        known = self.known.get(id(storage))
        if known is None or known[0]() is not storage:
            return 0
        if len(known[1]) >= MOST_PARTS:
            return storage.nbytes()
        entries, size = [entry for reference in known[1] if (entry := reference()) is not None], storage.nbytes()
        return sum(e.nbytes for e in entries if e.at == version and e.nbytes < size)

    def remember(self, storage: torch.UntypedStorage, entry: Entry) -> None:
        """Let ``find`` find an entry, which stands for a storage, while that storage lives."""
        known = self.known.get(id(storage))
        if known is None or known[0]() is not storage:
            while self._dead:  # forget storages that died
                dead = self._dead[0]
                key = self._keys.get(dead)
                if key is not None and (former := self.known.get(key)) is not None and former[0] is dead:
                    for held in former[1]:
                        if (known_entry := held()) is not None and known_entry.storage_ref is dead:
                            known_entry.storage_ref = None
                    del self.known[key]
                self._keys.pop(dead, None)
                self._dead.popleft()  # last: an interrupted step is repeated
            # Nothing interrupts a deque's ``append``. Hashed at once, because a dead reference can no longer be.
            self._keys[reference := weakref.ref(storage, self._note_dead)] = id(storage)
            known = self.known[id(storage)] = reference, [weakref.ref(entry)]
        else:
            alive = [r for r in known[1] if r() is not None]
            known[1][:] = [weakref.ref(entry), *alive]  # the latest first: the one of the whole storage comes last
        if entry.storage_ref is None:
            entry.storage_ref = known[0]
