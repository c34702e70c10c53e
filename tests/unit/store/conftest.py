"""Shared by the tests of the store: a tier on a real disk, and a gate before the system's writes and reads."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from ebbtide.store.disk import DiskTier
from ebbtide.store.location import filesystem_of


@pytest.fixture
def disk(tmp_path: Path) -> Path:
    """An empty directory on a disk."""
    if filesystem_of(tmp_path) == "tmpfs":
        pytest.skip("the temporary directory lies in RAM")
    return tmp_path


@pytest.fixture
def tier(disk: Path) -> Iterator[DiskTier]:
    tier = DiskTier(disk)
    yield tier
    tier.close()


class Gate:
    """Guards a system call: lets calls through one by one, or all, and signals their arrival."""

    def __init__(self, call: Callable[..., int]) -> None:
        self._call = call
        self._passes = threading.Semaphore(0)
        self.came = threading.Event()
        self._open = False

    def __call__(self, *args: Any) -> int:
        self.came.set()
        if not self._open:
            assert self._passes.acquire(timeout=60)
        return self._call(*args)

    def open(self) -> None:
        self._open = True
        self._passes.release()


@pytest.fixture
def write_gate(tier: DiskTier, monkeypatch: pytest.MonkeyPatch) -> Iterator[Gate]:
    """Writes of ``tier`` wait until the gate is opened."""
    gate = Gate(os.pwritev)
    monkeypatch.setattr(os, "pwritev", gate)
    yield gate
    gate.open()


@pytest.fixture
def read_gate(tier: DiskTier, monkeypatch: pytest.MonkeyPatch) -> Iterator[Gate]:
    """Reads of ``tier`` wait until the gate is opened."""
    gate = Gate(os.preadv)
    monkeypatch.setattr(os, "preadv", gate)
    yield gate
    gate.open()


def noise(nbytes: int, offset: int = 0) -> torch.Tensor:
    """Random bytes, ``offset`` bytes into their storage."""
    return torch.randint(0, 256, (nbytes + offset,), dtype=torch.uint8)[offset:]
