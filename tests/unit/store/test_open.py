"""Opening a tier by target; the C allocator; the error on a machine without an accelerator."""

from __future__ import annotations

import ctypes
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from ebbtide.base.errors import ConfigError, TargetError
from ebbtide.store import DiskTier, open_tier
from ebbtide.store.allocator import trim_heap

no_accelerator = pytest.mark.skipif(torch.accelerator.is_available(), reason="this machine has an accelerator")


@no_accelerator
@pytest.mark.parametrize("target", ["auto", "disk"])
def test_disk_without_accelerator(disk: Path, target: str) -> None:
    tier = open_tier(target, disk_path=disk)
    assert isinstance(tier, DiskTier) and tier.free_bytes > 0
    tier.close()


@no_accelerator
def test_host_without_accelerator_is_an_error_with_a_hint() -> None:
    with pytest.raises(
        TargetError, match=r"(?s)target='host' needs an accelerator, and none was found; expected .*'disk'\nhint: "
    ):
        open_tier("host")


def test_unknown_target_names_the_nearest() -> None:
    with pytest.raises(ConfigError, match="did you mean 'disk'"):
        open_tier("disc")


@pytest.mark.skipif(not hasattr(ctypes.CDLL(None), "gnu_get_libc_version"), reason="not glibc")
def test_freed_blocks_leave_the_process_at_each_trim() -> None:
    # 64 blocks of 4 MiB; the last is kept, so that the top of the heap cannot shrink past it.
    script = """
import os, torch
from ebbtide.store import DiskTier
def resident(): return int(open("/proc/self/statm").read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
torch.ones(16 << 20, dtype=torch.uint8)  # its free raises glibc's threshold: what is smaller is of the heap
before = resident()
tier = DiskTier()
for asked in (False, True):
    if asked:
        tier.return_freed_memory()
    blocks = [torch.ones(4 << 20, dtype=torch.uint8) for _ in range(64)]
    grown = resident() - before
    del blocks[:-1]
    tier.trim()
    print(grown, resident() - before)
"""
    environment = {k: v for k, v in os.environ.items() if not k.startswith("MALLOC_")}
    found = subprocess.run([sys.executable, "-c", script], env=environment, capture_output=True, text=True, check=True)
    grown, stays, grown_again, left = map(int, found.stdout.split())
    assert grown > 200 << 20 and stays > 200 << 20
    assert grown_again > 200 << 20 and left < 16 << 20


def test_other_systems_are_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "platform", "darwin")
    assert trim_heap() is False
