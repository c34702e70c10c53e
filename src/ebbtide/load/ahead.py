"""Brings a checkpoint into the page cache while the model is being sharded.

[Note: reading ahead]
Wrapping the model, making memory and computing buffers take as long as reading some hundred MiB, and the disk would
wait. Where all ranks are on one machine, together they need the whole checkpoint, so each rank may fetch a part of it
before it knows its slices: blocks in the order of the files, dealt out to the ranks in turn. The slices are read in
that order, too, and the first of them find their bytes in the page cache. Fetching ends before they are read: the
reader's threads keep the disk busy, and would share the processors with it. Blocks are fetched without a copy, and in
calls that are long enough for the disk to stay busy while other threads hold the interpreter. Nothing depends on it:
an error is left to the reader, which meets it again and raises it with the name of the tensor.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import threading
from collections.abc import Collection, Iterable, Iterator

from ebbtide.load.header import CheckpointEntry
from ebbtide.load.reader import CACHED_SHARE, cached_share, fits_page_cache
from ebbtide.store.pages import fetch_pages

BLOCK_BYTES = 16 << 20


class ReadAhead:
    """A thread that fetches this rank's part of the files that the page cache lacks. See [Note: reading ahead].

    Args:
        entries: The needed tensors, with their places in files.
        part: The number of this rank's part, from 0.
        parts: Ranks that share the work.
    """

    def __init__(self, entries: Collection[CheckpointEntry], part: int, parts: int) -> None:
        self._entries = sorted(entries, key=lambda entry: (entry.file, entry.offset_bytes))
        self._part, self._parts = part, parts
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="ebbtide-load-ahead", daemon=True)

    def __enter__(self) -> ReadAhead:
        """Begin, if the tensors fit into the page cache."""
        if fits_page_cache(self._entries):
            self._thread.start()
        return self

    def __exit__(self, *exception: object) -> None:
        """End after the block that is under way."""
        self._stop.set()
        if self._thread.ident is not None:
            self._thread.join()

    def _run(self) -> None:
        for path, entries in itertools.groupby(self._entries, key=lambda entry: entry.file):
            blocks = itertools.islice(_blocks(entries), self._part, None, self._parts)
            with contextlib.suppress(OSError), open(path, "rb", buffering=0) as file:
                if cached_share(file.fileno()) >= CACHED_SHARE:
                    continue
                for at, nbytes in blocks:
                    if self._stop.is_set():
                        return
                    if problem := fetch_pages(file.fileno(), at, nbytes):
                        raise OSError(problem, os.strerror(problem))


def _blocks(entries: Iterable[CheckpointEntry]) -> Iterator[tuple[int, int]]:
    """Yield where blocks begin and their bytes; tensors that follow each other in the file share blocks."""
    begin = end = 0
    for entry in itertools.chain(entries, [None]):
        if entry is not None and entry.offset_bytes == end:
            end += entry.nbytes
            continue
        for at in range(begin, end, BLOCK_BYTES):
            yield at, min(BLOCK_BYTES, end - at)
        if entry is not None:
            begin, end = entry.offset_bytes, entry.offset_bytes + entry.nbytes
