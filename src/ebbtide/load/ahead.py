"""Brings a checkpoint into the page cache while the model is being sharded.

[Note: reading ahead]
Wrapping the model, making memory and computing buffers take as long as reading some hundred MiB, and the disk would
wait. Where all ranks are on one machine, together they need the whole checkpoint, so each rank may read a part of it
before it knows its slices: of every tensor the part that dim-0 sharding would give it. Bytes go into one small buffer
whose contents are not used; only the page cache matters. Nothing depends on it: it ends before the slices are read, and
an error is left to the reader, which meets it again and raises it with the name of the tensor.
"""

from __future__ import annotations

import contextlib
import itertools
import mmap
import os
import threading
from collections.abc import Collection, Iterator

from ebbtide.load.header import CheckpointEntry
from ebbtide.load.reader import CACHED_SHARE, CHUNK_BYTES, cached_share, fits_page_cache


class ReadAhead:
    """A thread that reads this rank's part of the files that the page cache lacks. See [Note: reading ahead].

    Args:
        entries: Where the tensors lie that are needed.
        part: Of this rank, from 0 on.
        parts: Ranks that share the work.
    """

    def __init__(self, entries: Collection[CheckpointEntry], part: int, parts: int) -> None:
        self._entries = sorted(entries, key=lambda entry: (entry.file, entry.offset_bytes))
        self._part, self._parts = part, parts
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="ebbtide-load-ahead", daemon=True)
        self.read_bytes = 0
        """Bytes read so far."""

    def __enter__(self) -> ReadAhead:
        """Begin, if the tensors fit into the page cache."""
        if fits_page_cache(self._entries):
            self._thread.start()
        return self

    def __exit__(self, *exception: object) -> None:
        """End after the read that is under way."""
        self._stop.set()
        if self._thread.ident is not None:
            self._thread.join()

    def _run(self) -> None:
        view = memoryview(mmap.mmap(-1, CHUNK_BYTES))
        for path, entries in itertools.groupby(self._entries, key=lambda entry: entry.file):
            with contextlib.suppress(OSError), open(path, "rb", buffering=0) as file:
                if cached_share(file.fileno()) >= CACHED_SHARE:
                    continue
                for at, nbytes in (read for entry in entries for read in self._reads(entry)):
                    if self._stop.is_set():
                        return
                    self.read_bytes += os.preadv(file.fileno(), [view[:nbytes]], at)

    def _reads(self, entry: CheckpointEntry) -> Iterator[tuple[int, int]]:
        begin, end = (entry.offset_bytes + entry.nbytes * i // self._parts for i in (self._part, self._part + 1))
        for at in range(begin, end, CHUNK_BYTES):
            yield at, min(CHUNK_BYTES, end - at)
