"""Mapped memory that is pinned afterwards, without rounding its size up.

It begins at a huge page and is backed with pages before it is registered (``ebbtide.store.pages``), on the caller's
memory node. A forked child does not inherit it: a fork would copy every pinned page at once.
"""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import os
import weakref
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import torch

from ebbtide.store.extents import round_up
from ebbtide.store.pages import map_memory, populate

_PORTABLE = 1
"""Pinned for all devices of the process, not only the current one."""


class RuntimeRegistrar:
    """Pins through a runtime's calls that torch exposes (CUDA and ROCm).

    Args:
        runtime: A module with ``cudaHostRegister`` and ``cudaHostUnregister``.
        synchronize: Waits for all copies of the process.
        forget_error: Clears the runtime's last error, which the next kernel launch would raise otherwise.
        on_device: Makes the device current that the calls go to: a runtime begins the one that is.
    """

    def __init__(
        self,
        runtime: Any,
        synchronize: Callable[[], None],
        forget_error: Callable[[], None],
        on_device: Callable[[], AbstractContextManager[object]] = contextlib.nullcontext,
    ) -> None:
        self._runtime, self._synchronize, self._forget_error = runtime, synchronize, forget_error
        self._on_device = on_device

    def register(self, address: int, nbytes: int) -> int:
        """Pin memory; returns 0, or the runtime's error number."""
        with self._on_device():
            code = int(self._runtime.cudaHostRegister(address, nbytes, _PORTABLE))
        if code:
            self._forget_error()
        return code

    def unregister(self, address: int) -> int:
        """Wait for the copies that may use it and unpin it; returns 0, or the runtime's error number."""
        self._synchronize()
        with self._on_device():
            code = int(self._runtime.cudaHostUnregister(address))
        if code:
            self._forget_error()
        return code


class _Mapping:
    """A mapped piece of memory and the state of its registration."""

    def __init__(self, nbytes: int) -> None:
        self.nbytes = round_up(nbytes, mmap.PAGESIZE)
        self.memory, self.offset = map_memory(self.nbytes)
        for advice in ("MADV_DONTFORK", "MADV_HUGEPAGE"):  # pinning costs time per page
            if hasattr(mmap, advice):
                with contextlib.suppress(OSError):
                    self.memory.madvise(getattr(mmap, advice))
        self.requested = False
        self.owner = os.getpid()


def pinned_memory(nbytes: int, registrar: RuntimeRegistrar) -> torch.Tensor:
    """Return pinned memory; it is unpinned when the last tensor on its storage dies, at the latest at exit.

    Raises:
        RuntimeError: It cannot be mapped, backed with pages, or pinned.
    """
    try:
        mapping = _Mapping(nbytes)
    except (OSError, ValueError, OverflowError) as error:
        raise RuntimeError(f"cannot map memory: {error}") from error
    loan = (ctypes.c_ubyte * mapping.nbytes).from_buffer(mapping.memory, mapping.offset)
    address = ctypes.addressof(loan)
    # Before registering: an interrupt must not cause memory to be unmapped while it is pinned.
    weakref.finalize(loan, _let_go, mapping, address, registrar)
    populate(address, mapping.nbytes, loan)
    mapping.requested = True
    code = registrar.register(address, mapping.nbytes)
    if code:
        mapping.requested = False
        raise RuntimeError(f"error {code} of the runtime")
    return torch.frombuffer(loan, dtype=torch.uint8, count=nbytes)


def _let_go(mapping: _Mapping, address: int, registrar: RuntimeRegistrar) -> None:
    if os.getpid() == mapping.owner:
        if mapping.requested:
            mapping.requested = False
            registrar.unregister(address)
    else:
        # In this process the address is unmapped or used for something else: never unmap it.
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(mapping.memory))
