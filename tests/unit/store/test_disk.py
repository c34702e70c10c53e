"""The disk tier keeps the promises of [Note: a slot's life], whatever the disk, the caller or the system does."""

from __future__ import annotations

import ctypes
import errno
import gc
import logging
import os
import signal
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from pathlib import Path
from unittest import mock

import pytest
import torch

from ebbtide.base.errors import ConfigError, DiskError, DiskFullError
from ebbtide.store import diskwork
from ebbtide.store.disk import DiskTier
from ebbtide.store.protocol import Slot, copy_out_one
from tests.helpers.failing import failing
from tests.helpers.slots import copy_out, small_disk
from tests.unit.store.conftest import Gate, noise

MIB = 1 << 20


def take(slots: Sequence[Slot]) -> None:
    """Take the bytes of each."""
    for slot in slots:
        slot.take()


def owns_its_storage(tensor: torch.Tensor, nbytes: int) -> bool:
    return (
        tensor.dtype is torch.uint8
        and tensor.shape == (nbytes,)
        and tensor.storage_offset() == 0
        and tensor.untyped_storage().nbytes() == nbytes
    )


@pytest.mark.parametrize("nbytes", [1, 511, 512, 1023, 1024, 4095, 4096, 4097, MIB + 3, 20 * MIB])
@pytest.mark.parametrize("offset", [0, 1, 448, 4095])
def test_bytes_come_back(tier: DiskTier, nbytes: int, offset: int) -> None:
    source = noise(nbytes, offset)
    expected, slot = source.clone(), copy_out(tier, source)
    tier.wait_copied_out([slot])
    assert tier.are_copied_out([slot])
    source.zero_()
    first = slot.take()
    second = slot.take()
    assert torch.equal(first, expected) and torch.equal(second, expected)
    assert owns_its_storage(first, nbytes)
    assert first.data_ptr() != second.data_ptr()
    assert first.data_ptr() % 4096 == source.data_ptr() % 4096


def test_ever_new_sizes_leave_nothing_for_the_collector(tier: DiskTier) -> None:
    """Large trainers switch it off."""
    gc.collect()
    gc.disable()
    try:
        before = len(ctypes.Array.__subclasses__())
        for pages in range(300, 330):
            source = noise(4096 * pages)
            assert torch.equal(copy_out(tier, source).take(), source)
        assert len(ctypes.Array.__subclasses__()) < before + 10
    finally:
        gc.enable()


def test_takes_before_the_write_is_done_wait_for_it(tier: DiskTier, write_gate: Gate) -> None:
    expected = noise(MIB)
    slots = [copy_out(tier, expected.clone()) for _ in range(3)]
    tier.prefetch([slots[2]])
    write_gate.open()
    tier.stalls.reader = "who waited"
    assert torch.equal(slots[2].take(), expected)
    ((reader, stall),) = tier.stalls.read()
    assert reader == "who waited" and stall > 0 and tier.counters.stalls.total_seconds == stall


def test_source_is_held_until_written_and_then_dropped(tier: DiskTier, write_gate: Gate) -> None:
    source = noise(MIB)
    storage = weakref.ref(source.untyped_storage())
    slot = copy_out(tier, source)
    del source
    assert storage() is not None and not tier.are_copied_out([slot])
    write_gate.open()
    tier.wait_copied_out([slot])
    assert storage() is None


def test_cancel_stops_only_copies_that_have_not_begun(tier: DiskTier, write_gate: Gate) -> None:
    begun, waiting = copy_out(tier, noise(MIB)), copy_out(tier, noise(MIB))
    assert write_gate.came.wait(60)
    assert not begun.cancel()
    tier.prefetch([waiting])
    assert waiting.cancel()
    assert not waiting.cancel()
    with pytest.raises(DiskError, match="freed or cancelled"):
        waiting.take()
    write_gate.open()
    tier.wait_copied_out([begun])
    assert not begun.cancel()
    assert tier.used_bytes <= MIB
    assert tier.counters.out_bytes == MIB


def test_a_write_that_was_stopped_counts_what_was_written(tier: DiskTier, write_gate: Gate) -> None:
    slot = copy_out(tier, noise(64 * MIB))
    assert write_gate.came.wait(60)
    slot.free()
    assert tier.used_bytes == 0
    write_gate.open()
    copy_out_one(tier, noise(MIB))
    assert tier.counters.out_bytes == (8 + 1) * MIB, "a chunk, and the second source"


def test_a_slot_that_is_freed_before_its_awaited_read_begins_names_the_read(
    tier: DiskTier, read_gate: Gate, monkeypatch: pytest.MonkeyPatch
) -> None:
    slot, other = copy_out(tier, noise(MIB)), copy_out(tier, noise(MIB))
    tier.prefetch([other])
    assert read_gate.came.wait(60)
    wait = tier._work._wait_until

    def freed_first(happened: Callable[[], bool]) -> None:
        slot.free()
        read_gate.open()
        wait(happened)

    monkeypatch.setattr(tier._work, "_wait_until", freed_first)
    with pytest.raises(DiskError, match="a slot was freed or cancelled during a read; expected a live slot"):
        slot.take()


def test_free_never_waits_for_the_lock(tier: DiskTier) -> None:
    # For example if the garbage collector frees a ticket in a thread that is inside the tier.
    slot = copy_out(tier, noise(MIB))
    tier.wait_copied_out([slot])
    freeing = threading.Thread(target=slot.free)
    with tier._work._lock:
        freeing.start()
        freeing.join(60)
        assert not freeing.is_alive()
    assert tier.used_bytes == 0


def test_thousand_cycles_grow_neither_file_nor_memory(tier: DiskTier) -> None:
    source = noise(300_000)
    for _ in range(1000):
        slot = copy_out(tier, source)
        taken = slot.take()
        slot.free()
    assert torch.equal(taken, source)
    assert tier.used_bytes == 0
    assert tier._work._room.size_bytes <= 256 * MIB
    assert len(tier._work._room._extents._free) == 1  # one free place: all neighbours merged
    del taken
    assert tier._work.pool.size_bytes == 16 * MIB  # memory was used again
    tier.trim()
    assert tier._work.pool.size_bytes == 16 * MIB  # much was read, so a little is kept
    tier.trim()
    assert tier._work.pool.size_bytes == 0


def test_memory_of_reads_goes_at_once_where_freed_memory_is_returned(tier: DiskTier) -> None:
    for kept in (16 * MIB, 0):
        for _ in range(500):
            slot = copy_out(tier, noise(300_000))
            slot.take()
            slot.free()
        tier.trim()
        assert tier._work.pool.size_bytes == kept
        tier.return_freed_memory()


def test_threads_at_rest_serve_several_slots_at_once(disk: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """More bytes than the window: the caller waits for the writer, which has to be woken before."""
    monkeypatch.setattr(diskwork, "_WINDOW_BYTES", 2 * MIB)
    monkeypatch.setattr(diskwork, "_WAKE_SECONDS", 600.0)  # nobody looks by himself whether there is work
    tier = DiskTier(disk)
    while not (tier._work._to_write._waiters and tier._work._to_read._waiters):
        time.sleep(0.001)
    sources, found = [noise(MIB + 4096 * i) for i in range(6)], list[torch.Tensor]()

    def move() -> None:
        slots = tier.copy_out_all([source.clone() for source in sources])
        tier.wait_copied_out(slots)
        assert tier.are_copied_out(slots)
        assert tier.prefetch(slots) == 0
        while not (slots[0]._parcel.read and slots[0]._parcel.read.done):
            time.sleep(0.001)
        found.extend(slot.take() for slot in slots)

    thread = threading.Thread(target=move, daemon=True)
    thread.start()
    thread.join(60)
    assert [torch.equal(*pair) for pair in zip(sources, found, strict=True)] == [True] * 6
    tier.close()


def test_of_several_of_which_one_does_not_fit_none_keeps_a_place(disk: Path) -> None:
    tier = small_disk(disk, 4 * MIB)
    with pytest.raises(DiskFullError, match=r"8\.0 MiB needed, 2\.0 MiB free"):
        tier.copy_out_all([noise(MIB), noise(MIB), noise(8 * MIB + 4096), noise(MIB)])
    assert tier.used_bytes == 0
    assert tier._work._out_bytes == 0
    tier.wait_copied_out(tier.copy_out_all([noise(2 * MIB), noise(2 * MIB)]))
    tier.close()


def test_a_failed_write_of_one_is_an_error_for_all(tier: DiskTier, monkeypatch: pytest.MonkeyPatch) -> None:
    slots = tier.copy_out_all([noise(MIB), noise(MIB)])
    tier.wait_copied_out(slots)
    monkeypatch.setattr(os, "pwritev", failing(errno.EIO))
    slots += tier.copy_out_all([noise(MIB)])
    for question in (tier.are_copied_out, tier.wait_copied_out, tier.prefetch):
        with pytest.raises(DiskError, match="writing 1.0 MiB"):
            while question(slots) is False:
                time.sleep(0.001)


def test_window_bounds_what_is_queued_and_what_is_read_ahead(disk: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(diskwork, "_WINDOW_BYTES", 2 * MIB)
    tier = DiskTier(disk)
    slots = [copy_out(tier, noise(MIB)) for _ in range(6)]
    assert tier._work._out_bytes <= 2 * MIB
    tier.wait_copied_out([slots[-1]])
    for slot in slots:
        tier.prefetch([slot])
    assert torch.equal(slots[5].take(), slots[5].take())  # one that waits for room is served when it is taken
    assert tier._work._ahead_bytes <= 2 * MIB
    for slot in slots:
        slot.take()
    assert tier._work._ahead_bytes == 0
    tier.close()


def test_a_full_disk_says_what_is_needed_and_free(disk: Path) -> None:
    tier = small_disk(disk, 4 * MIB)
    slots = [copy_out(tier, noise(MIB)) for _ in range(3)]
    with pytest.raises(DiskFullError, match=r"2\.0 MiB needed, 1\.0 MiB free in ") as caught:
        copy_out(tier, noise(2 * MIB + 4096))
    assert "hint: " in str(caught.value)
    assert tier.free_bytes == 4 * MIB - tier.used_bytes
    slots[0].free()
    slots[1].free()
    copy_out_one(tier, noise(2 * MIB))
    tier.close()


def test_a_full_disk_is_raised_from_the_copy_out(tier: DiskTier, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(os, "posix_fallocate", failing(errno.ENOSPC))
        with pytest.raises(DiskFullError, match="needed") as caught:
            copy_out(tier, noise(MIB))
        assert isinstance(caught.value.__cause__, OSError)
    assert tier.used_bytes == 0
    copy_out_one(tier, noise(MIB))


@pytest.mark.parametrize(("number", "advice"), [(errno.EFBIG, "ulimit -f"), (errno.EDQUOT, "quota")])
def test_a_limit_of_the_user_is_not_called_a_full_disk(
    tier: DiskTier, monkeypatch: pytest.MonkeyPatch, number: int, advice: str
) -> None:
    for refusing in ("posix_fallocate", "pwritev"):
        with monkeypatch.context() as patch:
            patch.setattr(os, refusing, failing(number))
            with pytest.raises(DiskFullError, match=os.strerror(number)) as caught:
                copy_out_one(tier, noise(MIB))
        hint = str(caught.value).partition("hint: ")[2]
        assert advice in hint and "free some space" not in hint


@pytest.mark.parametrize(("number", "kind"), [(errno.ENOSPC, DiskFullError), (errno.EIO, DiskError)])
def test_a_failed_write_is_raised_at_every_use(
    tier: DiskTier, monkeypatch: pytest.MonkeyPatch, number: int, kind: type[DiskError]
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(os, "pwritev", failing(number))
        slot = copy_out(tier, noise(MIB))
        tier.prefetch([slot])
        for ask in (tier.wait_copied_out, take, take, tier.prefetch, tier.are_copied_out):
            with pytest.raises(kind, match="writing 1.0 MiB") as caught:
                ask([slot])
            assert isinstance(caught.value.__cause__, OSError) and caught.value.__cause__.errno == number
    slot.free()
    assert tier.used_bytes == 0
    good = copy_out(tier, noise(MIB))
    good.take()


def test_short_writes_and_reads_are_continued(tier: DiskTier, monkeypatch: pytest.MonkeyPatch) -> None:
    pwritev, preadv = os.pwritev, os.preadv
    sizes = iter([512, 4096 + 100, 8192] * 10_000)  # 100 odd bytes: what follows must begin aligned again

    def short_write(fd: int, views: list[memoryview], offset: int) -> int:
        count = next(sizes)
        return min(pwritev(fd, [views[0][: (count + 511) // 512 * 512]], offset), count)

    def short_read(fd: int, views: list[memoryview], offset: int) -> int:
        count = next(sizes)
        return min(preadv(fd, [views[0][: (count + 511) // 512 * 512]], offset), count)

    monkeypatch.setattr(os, "pwritev", short_write)
    monkeypatch.setattr(os, "preadv", short_read)
    source = noise(300_001)
    assert torch.equal(copy_out(tier, source).take(), source)


@pytest.mark.parametrize("call", ["pwritev", "preadv"])
def test_an_end_of_bytes_is_an_error(tier: DiskTier, monkeypatch: pytest.MonkeyPatch, call: str) -> None:
    monkeypatch.setattr(os, call, lambda *args: 0)
    slot = copy_out(tier, noise(MIB))
    with pytest.raises(DiskError, match="short"):
        slot.take()


def test_failed_read_is_raised_and_a_later_take_tries_again(tier: DiskTier, monkeypatch: pytest.MonkeyPatch) -> None:
    source = noise(MIB)
    slot = copy_out(tier, source)
    with monkeypatch.context() as patch:
        patch.setattr(os, "preadv", failing(errno.EIO))
        tier.prefetch([slot])
        with pytest.raises(DiskError, match="reading 1.0 MiB"):
            slot.take()
    assert torch.equal(slot.take(), source)


@pytest.mark.parametrize(
    ("place", "thread"), [("_next_read", "reader"), ("_fetch", "reader"), ("_write", "writer"), ("_written", "writer")]
)
@pytest.mark.parametrize("error", [MemoryError, SystemExit, RuntimeError])
def test_a_thread_that_dies_hangs_nobody(
    disk: Path, monkeypatch: pytest.MonkeyPatch, place: str, thread: str, error: type[BaseException]
) -> None:
    monkeypatch.setattr(diskwork, "_WINDOW_BYTES", MIB)
    tier = DiskTier(disk)

    def die(*args: object) -> None:
        raise error("no more")

    monkeypatch.setattr(tier._work, place, die)
    slot = copy_out(tier, noise(MIB))
    text = rf"^the {thread} thread of the disk tier failed: {error.__name__}\('no more'\); expected a disk tier "
    text += "without errors\nhint: close this handle"
    for ask in (take, take, tier.wait_copied_out, tier.are_copied_out, lambda _: copy_out(tier, noise(MIB))):
        with pytest.raises(DiskError, match=text) as caught:
            ask([slot])
        assert isinstance(caught.value.__cause__, error)
    slot.free()
    monkeypatch.undo()
    tier.close()
    assert not any(x.is_alive() for x in tier._work._threads)


@pytest.mark.parametrize("thread", [0, 1])
def test_a_thread_that_vanished_hangs_nobody(
    tier: DiskTier, write_gate: Gate, monkeypatch: pytest.MonkeyPatch, thread: int
) -> None:
    monkeypatch.setattr(diskwork, "_WAKE_SECONDS", 0.01)
    slot = copy_out(tier, noise(MIB))
    monkeypatch.setattr(tier._work._threads[thread], "is_alive", lambda: False)
    with pytest.raises(DiskError, match=r"a thread of the disk tier has died; expected .*\nhint: close this handle"):
        slot.take()


def test_interrupt_while_waiting_leaves_everything_consistent(tier: DiskTier, write_gate: Gate) -> None:
    source = noise(MIB)
    slot = copy_out(tier, source)

    def interrupt() -> None:
        while slot._parcel.read is not None or not tier._work._reads:  # until take() has begun to wait
            os.sched_yield()
        signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)

    thread = threading.Thread(target=interrupt)
    thread.start()
    with pytest.raises(KeyboardInterrupt):
        slot.take()
    thread.join()
    write_gate.open()
    assert torch.equal(slot.take(), source)
    slot.free()
    assert tier.used_bytes == 0
    assert tier.counters.in_bytes == MIB  # the interrupted read was continued, not done twice


@pytest.mark.parametrize("cause", [OSError(errno.ENOMEM, "Cannot allocate memory"), MemoryError()])
def test_a_read_without_memory_does_not_blame_the_disk(cause: Exception, tier: DiskTier) -> None:
    slot = copy_out(tier, noise(MIB))
    tier.wait_copied_out([slot])
    with mock.patch.object(tier._work.pool, "chunk_for", side_effect=cause), pytest.raises(DiskError) as caught:
        slot.take()
    assert "expected memory for these bytes" in str(caught.value) and "smaller window" in str(caught.value)
    assert "disk_path" not in str(caught.value)


@pytest.mark.parametrize("missing", ["ebbtide-disk-writer", "ebbtide-disk-reader"])
def test_a_thread_that_cannot_start_leaves_nothing(missing: str, disk: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    start, known = threading.Thread.start, threading.enumerate()

    def refuse(thread: threading.Thread) -> None:
        if thread.name == missing:
            raise RuntimeError("can't start new thread")
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", refuse)
    with pytest.raises(DiskError, match=r"(?s)can't start new thread.*hint: raise the limit"):
        DiskTier(disk)
    assert not {*threading.enumerate()} - {*known}
    assert not [fd for fd in os.listdir("/proc/self/fd") if str(disk) in os.path.realpath(f"/proc/self/fd/{fd}")]


def test_after_close(disk: Path) -> None:
    tier = DiskTier(disk)
    slot = copy_out(tier, noise(MIB))
    tier.wait_copied_out([slot])
    tier.close()
    tier.close()
    slot.free()
    tier.trim()
    assert tier.used_bytes == 0
    for ask in (take, tier.wait_copied_out, tier.prefetch, lambda _: copy_out(tier, noise(9)), lambda _: slot.cancel()):
        with pytest.raises(DiskError, match="closed"):
            ask([slot])
    assert not [x for x in threading.enumerate() if x in tier._work._threads]


def test_close_drops_what_waits(tier: DiskTier, write_gate: Gate) -> None:
    slots = [copy_out(tier, noise(MIB)) for _ in range(3)]
    storages = [weakref.ref(s._parcel.source.untyped_storage()) for s in slots if s._parcel.source is not None]
    closing = threading.Thread(target=tier.close)
    closing.start()
    write_gate.open()
    closing.join(60)
    assert not closing.is_alive()
    assert [s() for s in storages] == [None] * len(storages)


def test_a_tier_that_is_dropped_lets_its_threads_go(disk: Path) -> None:
    tier = DiskTier(disk)
    copy_out_one(tier, noise(MIB))
    threads, fd = tier._work._threads, tier._work._file.fd
    del tier
    gc.collect()
    for thread in threads:
        thread.join(60)
        assert not thread.is_alive()
    with pytest.raises(OSError):
        os.fstat(fd)


def test_memory_outlives_the_tier(disk: Path) -> None:
    tier, source = DiskTier(disk), noise(MIB)
    taken = copy_out(tier, source).take()
    tier.close()
    del tier
    gc.collect()
    assert torch.equal(taken, source)


@pytest.mark.filterwarnings("ignore:.*use of fork:DeprecationWarning")
def test_a_forked_child_is_refused(tier: DiskTier) -> None:
    slot = copy_out(tier, noise(MIB))
    tier.wait_copied_out([slot])
    child = os.fork()
    if child == 0:
        code = 1
        try:
            slot.free()
            tier.trim()
            copy_out(tier, noise(10))
        except DiskError as error:
            code = 0 if "forked child" in str(error) else 2
        finally:
            os._exit(code)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    slot.take()


@pytest.mark.filterwarnings("ignore:.*use of fork:DeprecationWarning")
def test_closing_frees_the_disk_though_a_forked_child_lives(tier: DiskTier) -> None:
    copy_out_one(tier, noise(MIB))
    file = tier._work._file.fd
    release, held = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(held)
        os.read(release, 1)
        os._exit(0)
    try:
        inherited = f"/proc/{child}/fd/{file}"
        assert os.stat(inherited).st_blocks > 0
        tier.close()
        assert os.stat(inherited).st_blocks == 0
    finally:
        os.close(held)
        os.waitpid(child, 0)
        os.close(release)


def test_blocks_of_a_growth_that_failed_are_returned(tier: DiskTier, monkeypatch: pytest.MonkeyPatch) -> None:
    copy_out_one(tier, noise(MIB))
    file, allocate = tier._work._file, os.posix_fallocate
    before = os.fstat(file.fd)

    def partly(fd: int, offset: int, nbytes: int) -> None:
        allocate(fd, offset, nbytes // 2)
        raise OSError(errno.EDQUOT, "the quota is used up")

    monkeypatch.setattr(os, "posix_fallocate", partly)
    with pytest.raises(OSError, match="quota"):
        file.grow(before.st_size, 8 * MIB)
    after = os.fstat(file.fd)
    assert after.st_size == before.st_size
    assert after.st_blocks <= before.st_blocks + 64, "the file system's own records may have grown"


@pytest.mark.parametrize("tmpfile", [True, False])
def test_no_name_is_left_on_disk(disk: Path, monkeypatch: pytest.MonkeyPatch, tmpfile: bool) -> None:
    if not tmpfile:
        monkeypatch.setattr(os, "O_TMPFILE", 0)
    tier = DiskTier(disk)
    source = noise(MIB)
    slot = copy_out(tier, source)
    tier.wait_copied_out([slot])
    assert list(disk.iterdir()) == []
    assert torch.equal(slot.take(), source)
    tier.close()
    assert list(disk.iterdir()) == []


def test_kill_leaves_nothing(disk: Path) -> None:
    script = (
        "import sys, torch; from ebbtide.store.disk import DiskTier; t = DiskTier(sys.argv[1]); "
        "t.wait_copied_out(t.copy_out_all([torch.ones(1 << 24, dtype=torch.uint8)])); print('offloaded', flush=True); "
        "sys.stdin.read()"
    )
    with subprocess.Popen(
        [sys.executable, "-c", script, str(disk)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None and process.stdout.readline() == "offloaded\n"
        process.kill()
        process.wait(60)
    assert list(disk.iterdir()) == []


def test_refused_direct_io_is_logged_once_and_replaced_by_buffered_io(
    disk: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    pwritev, refusals = os.pwritev, []

    def refuse(fd: int, views: list[memoryview], offset: int) -> int:
        if len(refusals) < 2:
            refusals.append(offset)
            raise OSError(errno.EINVAL, "no direct I/O")
        return pwritev(fd, views, offset)

    monkeypatch.setattr(os, "pwritev", refuse)
    with caplog.at_level(logging.WARNING, "ebbtide.store"):
        tier = DiskTier(disk)
        source = noise(MIB + 3)
        assert torch.equal(copy_out(tier, source).take(), source)
        assert not tier._work._file.direct
        monkeypatch.setattr(os, "fdatasync", failing(errno.EIO))  # the disk's, hidden by the page cache until then
        slot = copy_out(tier, source)
        with pytest.raises(DiskError, match="Input/output error"):
            tier.wait_copied_out([slot])
        tier.close()
    assert [r.message.split(":")[0] for r in caplog.records] == [f"direct I/O is refused in {disk}"]


def test_a_file_system_without_preallocation_serves(tier: DiskTier, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "posix_fallocate", failing(errno.EOPNOTSUPP))
    source = noise(MIB)
    assert torch.equal(copy_out(tier, source).take(), source)


@pytest.mark.parametrize(
    "source",
    [
        torch.zeros(4),
        torch.zeros(0, dtype=torch.uint8),
        torch.zeros(2, 2, dtype=torch.uint8),
        torch.zeros(8, dtype=torch.uint8)[::2],
    ],
)
def test_only_plain_bytes_are_copied_out(tier: DiskTier, source: torch.Tensor) -> None:
    with pytest.raises(ConfigError, match="expected a contiguous"):
        copy_out(tier, source)


def test_counters_count(tier: DiskTier) -> None:
    slot = copy_out(tier, noise(MIB))
    slot.take()
    slot.take()
    assert tier.counters.out_bytes == MIB and tier.counters.in_bytes == 2 * MIB
    assert tier.counters.out_seconds > 0 and tier.counters.in_seconds > 0
    assert tier.name == "disk" and tier.owns(torch.ones(1)) and tier.free_bytes > 0


def test_many_threads_take_and_free(tier: DiskTier) -> None:
    sources = [noise(200_000 + i) for i in range(8)]
    faults: list[BaseException] = []

    def work(seed: int) -> None:
        try:
            for i in range(30):
                source = sources[(seed + i) % len(sources)]
                slot = copy_out(tier, source)
                if i % 3:
                    tier.prefetch([slot])
                if i % 5 == 4:
                    slot.free()
                    continue
                if not torch.equal(slot.take(), source):
                    raise ValueError("other bytes came back")
                slot.free()
        except BaseException as error:
            faults.append(error)

    threads = [threading.Thread(target=work, args=(i,)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not faults and tier.used_bytes == 0
