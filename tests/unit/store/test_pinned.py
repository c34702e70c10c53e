"""Pinning mapped memory: released once, when the last tensor dies, at exit, and never in a forked child."""

from __future__ import annotations

import ctypes
import errno
import gc
import mmap
import os
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
import torch

from ebbtide.store.pages import near_processors
from ebbtide.store.pinned import RuntimeRegistrar, pinned_memory


class Book:
    """Records pinned memory, and refuses on request."""

    def __init__(self, code: int = 0) -> None:
        self.code, self.pinned, self.calls = code, dict[int, int](), 0

    def register(self, address: int, nbytes: int) -> int:
        self.calls += 1
        assert address % mmap.PAGESIZE == 0 and nbytes % mmap.PAGESIZE == 0
        if not self.code:
            self.pinned[address] = nbytes
        return self.code

    def unregister(self, address: int) -> int:
        del self.pinned[address]
        return 0


def test_pinned_as_long_as_a_tensor_lives() -> None:
    book = Book()
    memory = pinned_memory(10_001, book)
    assert memory.numel() == 10_001 and book.pinned == {memory.data_ptr(): 12_288}
    memory.fill_(7)
    part = memory[100:200].view(50, 2)
    del memory
    gc.collect()
    assert len(book.pinned) == 1 and bool((part == 7).all())
    del part
    gc.collect()
    assert book.pinned == {}


def test_memory_that_is_refused_goes_and_is_not_let_go_of() -> None:
    book = Book(code=2)
    with pytest.raises(RuntimeError, match="error 2 of the runtime"):
        pinned_memory(4096, book)
    gc.collect()
    assert book.calls == 1 and book.pinned == {}


def test_memory_that_cannot_be_mapped_is_refused() -> None:
    with pytest.raises(RuntimeError, match="cannot map memory"):
        pinned_memory(1 << 62, Book())


class Resident(Book):
    """Records the resident pages of memory when it is pinned."""

    def register(self, address: int, nbytes: int) -> int:
        found = (ctypes.c_ubyte * (nbytes // mmap.PAGESIZE))()
        mincore = ctypes.CDLL(None).mincore
        assert mincore(ctypes.c_void_p(address), ctypes.c_size_t(nbytes), found) == 0
        self.resident, self.pages = sum(page & 1 for page in found), len(found)
        return super().register(address, nbytes)


@pytest.mark.skipif(sys.platform != "linux", reason="pages are populated on Linux")
@pytest.mark.parametrize("advice", [23, 9999])  # one that the kernel may know, and one that it does not
def test_memory_has_its_pages_before_it_is_pinned(advice: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ebbtide.store.pages._POPULATE_WRITE", advice)
    monkeypatch.setattr("ebbtide.store.pages._PIECE_BYTES", 1 << 20)
    book = Resident()
    memory = pinned_memory((5 << 20) + 10, book)
    assert book.pages == 5 * 256 + 1 == book.resident
    assert memory.data_ptr() % (2 << 20) == 0 and not memory.any()


@pytest.mark.skipif(sys.platform != "linux", reason="pages are populated on Linux")
def test_pieces_are_shared_by_threads_on_the_callers_node(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ebbtide.store.pages._PIECE_BYTES", 1 << 20)
    monkeypatch.setattr("ebbtide.store.pages.near_processors", lambda: processors)
    monkeypatch.delenv("LOCAL_WORLD_SIZE", raising=False)
    processors, found = os.sched_getaffinity(0), list[tuple[int, int]]()
    met = threading.Barrier(2, timeout=60)

    def back(address: int, nbytes: int, memory: object) -> int:
        if len(processors) > 1 and not found:
            met.wait()  # a single thread would wait here for ever
        found.append((address, nbytes))
        assert os.sched_getaffinity(0) == processors
        return 0

    monkeypatch.setattr("ebbtide.store.pages._back", back)
    memory = pinned_memory(4 << 20, Book())
    first = memory.data_ptr()
    assert sorted(found) == [(first + place, 1 << 20) for place in range(0, 4 << 20, 1 << 20)]


def test_pages_that_the_system_does_not_give_are_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ebbtide.store.pages._PIECE_BYTES", 1 << 20)
    monkeypatch.setattr("ebbtide.store.pages._back", lambda *_: errno.ENOMEM)
    monkeypatch.setattr(sys, "platform", "linux")
    book = Book()
    with pytest.raises(RuntimeError, match="cannot back memory with pages: Cannot allocate memory"):
        pinned_memory(4 << 20, book)
    gc.collect()
    assert book.calls == 0 and book.pinned == {}


def test_near_processors_are_those_of_one_memory_node(tmp_path: Path) -> None:
    allowed = os.sched_getaffinity(0)
    assert near_processors(tmp_path) == allowed  # the system reports nothing
    one = min(allowed)
    for cpu in allowed:
        (tmp_path / f"cpu{cpu}" / "node0" / f"cpu{one}").mkdir(parents=True)
        (tmp_path / f"cpu{cpu}" / "node0" / "cpumap").mkdir()
    assert near_processors(tmp_path) == {one}


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
@pytest.mark.filterwarnings("ignore:.*fork.*:RuntimeWarning")
def test_a_forked_child_lets_go_of_nothing() -> None:
    book = Book()
    memory = pinned_memory(4096, book)
    memory.fill_(5)
    child = os.fork()
    if child == 0:
        code = 99
        try:
            del memory
            gc.collect()
            code = 0 if len(book.pinned) == 1 else 1
        finally:
            os._exit(code)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert bool((memory == 5).all())


def test_let_go_of_at_exit() -> None:
    script = """
from ebbtide.store.pinned import pinned_memory
class Book:
    def register(self, address, nbytes): return 0
    def unregister(self, address): print("let go of", flush=True); return 0
kept = pinned_memory(4096, Book())
"""
    found = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert found.stdout == "let go of\n" and found.stderr == ""


class Runtime:
    def __init__(self, code: int) -> None:
        self.code, self.asked = code, list[tuple[Any, ...]]()

    def cudaHostRegister(self, address: int, nbytes: int, flags: int) -> int:
        self.asked.append(("register", address, nbytes, flags))
        return self.code

    def cudaHostUnregister(self, address: int) -> int:
        self.asked.append(("unregister", address))
        return self.code


@pytest.mark.parametrize("code", [0, 712])
def test_the_runtime_is_asked_and_forgets_its_errors(code: int) -> None:
    runtime = Runtime(code)
    registrar = RuntimeRegistrar(
        runtime, lambda: runtime.asked.append(("synchronize",)), lambda: runtime.asked.append(("forget",))
    )
    assert registrar.register(4096, 8192) == registrar.unregister(4096) == code
    forget = [("forget",)] if code else []
    assert runtime.asked == [
        ("register", 4096, 8192, 1), *forget, ("synchronize",), ("unregister", 4096), *forget
    ]  # fmt: skip


def test_a_tensor_on_it_is_plain_host_memory() -> None:
    memory = pinned_memory(4096, Book())
    assert memory.device == torch.device("cpu") and memory.is_contiguous() and memory.dtype == torch.uint8
