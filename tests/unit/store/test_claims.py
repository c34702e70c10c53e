"""What dead objects held is released, and their death runs nothing in Python."""

from __future__ import annotations

import sys
from pathlib import Path
from types import FrameType
from typing import Any

import pytest

from ebbtide.store.buffers import CHUNK_BYTES, Buffer, BufferPool
from ebbtide.store.claims import Claims
from ebbtide.store.disk import DiskTier
from tests.helpers.slots import copy_out
from tests.unit.store.conftest import noise


class Holder:
    """An object that may be referenced weakly."""

    __hash__ = None  # type: ignore[assignment]


def test_what_an_object_held_is_released_once_it_is_dead() -> None:
    claims, released, first, other = Claims[str](), list[str](), Holder(), Holder()
    claims.add(first, "first")
    claims.add(other, "other")
    claims.release_dead(released.append)
    assert released == []
    del first
    claims.release_dead(released.append)
    claims.release_dead(released.append)
    assert released == ["first"]
    claims.clear()
    del other
    claims.release_dead(released.append)
    assert released == ["first"]


def test_an_interrupted_release_is_repeated() -> None:
    claims, released = Claims[str](), list[str]()

    def interrupted(held: str) -> None:
        raise KeyboardInterrupt

    claims.add(Holder(), "bytes")
    with pytest.raises(KeyboardInterrupt):
        claims.release_dead(interrupted)
    claims.release_dead(released.append)
    assert released == ["bytes"]


@pytest.mark.parametrize("kind", ["slot on disk", "memory of a read"])
def test_nothing_in_python_runs_when_a_saved_tensor_dies(disk: Path, kind: str) -> None:
    """An interrupt noticed there would be lost. See [Note: death and interrupts]."""
    tier, pool, ran = DiskTier(disk), BufferPool(), list[str]()
    held: list[Any] = [copy_out(tier, noise(1 << 20)) if kind == "slot on disk" else Buffer(5000, 64, pool).tensor()]
    if kind == "slot on disk":
        tier.wait_copied_out(held)

    def note(frame: FrameType, event: str, argument: Any) -> None:
        if event == "call":
            ran.append(frame.f_code.co_qualname)

    sys.setprofile(note)
    try:
        held.clear()
    finally:
        sys.setprofile(None)
    assert ran == []
    assert tier.used_bytes == 0
    Buffer(CHUNK_BYTES - 4096, 0, pool)
    assert pool.size_bytes <= CHUNK_BYTES
    tier.close()
