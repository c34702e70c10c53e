"""A disk that fails, fills, or stops short, and a cap that is reached, in the middle of training.

Whatever happens, a step either gives the gradients of ordinary training or raises an error that names the fault and its
place; and the next step is right.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import re
import resource
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from ebbtide.base.errors import DiskError, DiskFullError, EbbtideError
from ebbtide.store.host import HostTier
from tests.helpers.engines import drain, hooks_are_closed
from tests.helpers.failing import failing
from tests.helpers.fakedevice import FakeDevice
from tests.helpers.handles import Trainee, enable_over, training
from tests.helpers.models import build
from tests.helpers.oracle import differences, same_bits

POLICIES = ["offload", "minimal"]  # auto measures first, and keeps all of a model as small as these
WINDOW = 1  # every copy-out is waited for: none can fail unnoticed
ACTION = re.compile(r"\nwhile (copying out|prefetching|reading|restoring) Mlp/\S+ .*\((offload|recompute)\)")
BLOCK = re.compile(r"\n(while|at) .* of block 'layers\.\d'")


def says_where(error: BaseException | None) -> bool:
    """Return whether an error names the site, its action and the block."""
    return bool(ACTION.search(str(error)) and BLOCK.search(str(error)))


class Faulty:
    """Stand-in for a system call: the ``when``-th call does something else; 0 only counts."""

    def __init__(self, call: Callable[..., int], instead: Callable[..., int], when: int = 0) -> None:
        self.call, self.instead, self.when, self.calls = call, instead, when, 0

    def __call__(self, *args: Any) -> int:
        self.calls += 1
        return (self.instead if self.calls == self.when else self.call)(*args)


@contextlib.contextmanager
def instead_of(call: str, instead: Callable[..., int], when: int = 0) -> Iterator[Faulty]:
    with pytest.MonkeyPatch.context() as patch:
        faulty = Faulty(getattr(os, call), instead, when)
        patch.setattr(os, call, faulty)
        yield faulty


def outcome(trainee: Trainee) -> EbbtideError | None:
    """The error that a step raised, or None if its gradients are right."""
    try:
        grads = trainee.step()
    except EbbtideError as error:
        return error.with_traceback(None)
    assert all(map(same_bits, grads, trainee.expected))
    return None


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize(
    ("instead", "kind", "number", "text"),
    [
        pytest.param(failing(errno.EIO), DiskError, errno.EIO, os.strerror(errno.EIO), id="fails"),
        pytest.param(failing(errno.ENOSPC), DiskFullError, errno.ENOSPC, os.strerror(errno.ENOSPC), id="is full"),
        pytest.param(lambda *args: 0, DiskError, errno.EIO, "short", id="ends early"),
    ],
)
@pytest.mark.parametrize("call", ["pwritev", "preadv"])
def test_every_write_and_every_read_may_fail(
    call: str, instead: Callable[..., int], kind: type[DiskError], number: int, text: str, policy: str
) -> None:
    with training(policy, "disk", window=WINDOW) as trainee:
        with instead_of(call, instead) as counting:
            assert outcome(trainee) is None
        assert counting.calls >= 2  # the first input is not read back where its owner keeps it
        noticed = 0
        for when in range(1, counting.calls + 1):
            with instead_of(call, instead, when):
                error = outcome(trainee)
            trainee.assert_recovers()
            if error is None:
                continue  # those bytes were not needed: their source was still alive
            noticed += 1
            assert type(error) is kind and error.__context__ is None  # chained to its cause alone
            doing = "writing" if call == "pwritev" else "reading"
            assert re.match(rf"{doing} [\d.]+ (KiB|B) (to|from) .* failed: .*{text}", str(error))
            assert says_where(error), str(error)
            assert isinstance(error.__cause__, OSError) and error.__cause__.errno == number
        assert noticed >= counting.calls - 2


@pytest.mark.parametrize("policy", POLICIES)
def test_what_is_written_and_read_in_parts_comes_whole(policy: str, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = dict.fromkeys(("pwritev", "preadv"), 0)

    def in_parts(name: str) -> Callable[..., int]:
        whole = getattr(os, name)

        def part(fd: int, views: list[memoryview], offset: int) -> int:
            calls[name] += 1
            return whole(fd, [views[0][:512]], offset)

        return part

    with training(policy, "disk", window=WINDOW) as trainee:
        for name in calls:
            monkeypatch.setattr(os, name, in_parts(name))
        assert outcome(trainee) is None
        assert min(calls.values()) >= 16
        monkeypatch.undo()
        trainee.assert_recovers()


@pytest.mark.parametrize("policy", POLICIES)
def test_a_file_that_is_cut_off_under_us(policy: str) -> None:
    with training(policy, "disk", window=WINDOW) as trainee:
        work: Any = trainee.handle._engine.tier._work
        assert os.fstat(work._file.fd).st_size > 0
        preadv = os.preadv

        def cut_off(fd: int, views: list[memoryview], offset: int) -> int:
            os.ftruncate(fd, 0)
            return preadv(fd, views, offset)

        with instead_of("preadv", cut_off, 1):
            error = outcome(trainee)
        assert type(error) is DiskError and "short read: 0 of" in str(error) and says_where(error), str(error)
        trainee.assert_recovers()


@pytest.mark.parametrize("policy", POLICIES)
def test_a_disk_that_is_full_at_every_page(policy: str) -> None:
    """The system's own limit on the size of a file stands for the disk's."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    seen = {DiskFullError: 0, None: 0}
    for pages in (*range(12), *range(12, 200, 6)):
        with training(policy, "disk", window=WINDOW, room_bytes=1 << 30) as trainee:
            resource.setrlimit(resource.RLIMIT_FSIZE, (pages * 4096, hard))
            try:
                error = outcome(trainee)
            finally:
                resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
            seen[None if error is None else type(error)] += 1  # type: ignore[index]
            if error is None:
                break
            assert re.match(r"[\d.]+ \S+ needed, .* free in ", str(error)) or "the disk tier can hold" in str(error)
            del error
            drain()
            assert hooks_are_closed() and outcome(trainee) is None
    assert seen[DiskFullError] > 2 and seen[None] == 1


@pytest.mark.parametrize("policy", POLICIES)
def test_a_disk_budget_that_is_reached(policy: str) -> None:
    unit, seen = 1 << 10, 0
    for units in range(4, 400, 6):
        with training(policy, "disk", window=WINDOW, room_bytes=units * unit) as trainee:
            error = outcome(trainee)
            if error is None:
                break
            seen += 1
            assert type(error) is DiskFullError and "hint: " in str(error)
            assert trainee.handle.stats().store_bytes <= units * unit
    assert error is None and seen >= 2
    # The number of pages of a storage depends on its address: it varies by at most one.
    room_bytes = units * unit + trainee.handle.stats().packs * 4096
    with training(policy, "disk", window=WINDOW, room_bytes=room_bytes) as roomy:
        for _ in range(4):
            assert outcome(roomy) is None


def warnings_of(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [r.getMessage() for r in caplog.records if r.levelno >= logging.WARNING]


@pytest.mark.parametrize("policy", POLICIES)
def test_what_a_host_cap_does_not_hold_stays_on_the_device(policy: str, caplog: pytest.LogCaptureFixture) -> None:
    refused = []
    for units in range(4, 400, 6):
        with training(policy, "host", window=WINDOW, room_bytes=units << 10) as trainee:
            caplog.clear()
            for _ in range(3):
                assert outcome(trainee) is None
                stats = trainee.handle.stats()
                assert stats.live_tickets == stats.store_bytes == 0
                assert stats.store["host_held_bytes"] <= units << 10
            refused.append(stats.total_refused_bytes)
            assert len(warnings_of(caplog)) == (stats.total_refused_bytes > 0), "logged once"
            if not refused[-1]:
                break
            assert "no more than the host budget of" in warnings_of(caplog)[0]
    assert len(refused) > 2 and refused == sorted(refused, reverse=True) and refused[-1] == 0


@pytest.mark.parametrize("policy", POLICIES)
def test_a_step_that_is_too_large_for_the_cap_and_a_smaller_one(policy: str) -> None:
    tiny = build("mlp")
    x, weights = tiny.inputs["x"].detach(), list(tiny.model.parameters())

    def grads(batch: torch.Tensor) -> list[torch.Tensor]:
        return list(torch.autograd.grad(tiny.model(batch).square().sum(), weights))

    large, small = x.repeat(32, 1, 1), x[:1]
    expected = grads(large), grads(small)
    tier = HostTier(FakeDevice(1e6, 1e6), budget_bytes=200_000)
    with enable_over(tier, tiny.model, policy=policy, min_bytes=0, window="10KiB") as handle:
        for _ in range(2):
            before = handle.stats()
            assert all(map(same_bits, grads(large), expected[0]))
            after = handle.stats()
            assert after.total_refused_bytes > before.total_refused_bytes
            assert after.kept_bytes > 0 and after.total_copy_out_bytes > before.total_copy_out_bytes
            assert all(map(same_bits, grads(small), expected[1]))
            assert handle.stats().live_tickets == handle.stats().store_bytes == 0
            assert handle.stats().total_refused_bytes == after.total_refused_bytes
    tier.close()


def test_a_machine_that_gives_no_more_host_memory(caplog: pytest.LogCaptureFixture) -> None:
    tiny = build("mlp")
    plain = tiny.step()
    tier = HostTier(FakeDevice(1e6, 1e6, host_limit_bytes=30_000))
    with enable_over(tier, tiny.model, policy="offload", min_bytes=0) as handle:
        for _ in range(2):
            assert differences(plain, tiny.step()) == []
        assert handle.stats().total_refused_bytes > 0 and hooks_are_closed()
    (said,) = warnings_of(caplog)
    assert "stays on the device: cannot allocate another" in said and "\nhint: set host_budget below" in said
    tier.close()
