"""Leftovers of a run: after its first steps, a step leaves no objects that the previous one did not."""

from __future__ import annotations

import contextlib
import gc
import os
import stat
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import ebbtide
from benchmarks.nodevice import NoDevice
from ebbtide.base.errors import RestoreError
from ebbtide.engine import Block
from ebbtide.engine.idle import MOST_SETTINGS
from ebbtide.engine.passes import MOST_ORDERS, Pass, RunRecord
from ebbtide.store.disk import DiskTier
from ebbtide.store.host import HostTier
from ebbtide.store.meter import HostMeter
from tests.helpers.engines import REMAKE
from tests.helpers.fakedevice import FakeDevice
from tests.helpers.handles import enable_over
from tests.helpers.oracle import same_bits
from tests.unit.wrap.test_replay import WIDTH, batch, stack

WARM, MORE = 36, 24

Step = Callable[[nn.Module, int], None]
Unread = Callable[[Any], None]


def train(model: nn.Module, number: int) -> None:
    model(batch(5, number)).square().mean().backward()
    model.zero_grad()


def train_on_a_cast_up(model: nn.Module, number: int) -> None:
    """Saves what is stored in the type that it was cast up from."""
    wide = model(batch(5, number)).bfloat16().float()
    (wide * wide).mean().backward()
    model.zero_grad()


def train_on_lengths(model: nn.Module, number: int) -> None:
    model(batch(3 + number % 4, number)).square().mean().backward()
    model.zero_grad()


def evaluate(model: nn.Module, number: int) -> None:
    train(model, number)
    with torch.no_grad():
        model(batch(5, number))
    model(batch(5, number))  # a graph that is dropped


def read_twice(model: nn.Module, number: int) -> None:
    loss = model(batch(5, number)).square().mean()
    loss.backward(retain_graph=True)
    loss.backward()
    model.zero_grad()


def fail(model: nn.Module, number: int) -> None:
    def stop(gradient: Tensor) -> Tensor:
        raise RuntimeError("stopped")

    x = batch(5, number).requires_grad_()
    x.register_hook(stop)
    with pytest.raises(RuntimeError, match="stopped"):
        model(x).square().mean().backward()
    model.zero_grad()


@pytest.mark.parametrize("policy", ["keep", "offload", "inputs", "minimal", "auto"])
@pytest.mark.parametrize(
    ("target", "step"),
    [("disk", train), *(("host", step) for step in (train, train_on_lengths, evaluate, read_twice, fail))],
)
def test_nothing_is_left_by_a_step(tmp_path: Path, target: str, policy: str, step: Step) -> None:
    place = DiskTier(str(tmp_path)) if target == "disk" else HostTier(NoDevice())
    model = stack()
    with enable_over(place, model, policy=policy, min_bytes=0) as handle:
        counts = _counts(step, model, lambda: settle(handle, place))
    place.close()
    assert _growth(counts) < MORE / 4, counts


@pytest.mark.parametrize("policy", ["keep", "offload", "minimal", "auto"])
def test_nothing_is_left_by_a_step_inside_an_open_context(policy: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ebbtide.api, "open_tier", lambda *given, **options: HostTier(NoDevice()))
    monkeypatch.setattr("ebbtide.store.meter.DeviceMeter", lambda device: HostMeter())
    monkeypatch.setattr(ebbtide.api, "_idle_engines", {})
    with ebbtide.offload_saved_tensors(policy=policy, min_bytes=0) as context:
        counts = _counts(train_on_a_cast_up, stack())
        assert context.stats().store_bytes == 0
    assert _growth(counts) < MORE / 4, counts


def settle(handle: ebbtide.Handle, place: DiskTier | HostTier) -> None:
    """Wait until the disk's threads rest, and forget finished copies as the next step would."""
    rests = isinstance(place, HostTier)  # it has no threads
    while not rests:
        work = place._work
        handle._engine._copy_out.retire()
        work.measure()
        with work._lock:
            idle = not (work._writes or work._reads or work.claims._dead)
            rests = idle and bool(work._to_write._waiters and work._to_read._waiters)
            for chunk in work.pool._chunks if rests else ():
                chunk.places.release_dead(chunk._release)
        if not rests:
            time.sleep(0.001)


def _counts(step: Step, model: nn.Module, settled: Callable[[], object] = lambda: None) -> list[int]:
    """Return how many objects there are after each step of a run that is warm."""
    counts: list[int] = []
    for number in range(WARM + 5 * MORE):
        step(model, number)
        if number >= WARM:
            settled()
            gc.collect()
            counts.append(len(gc.get_objects()))
        if number >= WARM + MORE and _growth(counts) < MORE / 4:
            break
    return counts


def _growth(counts: list[int]) -> int:
    return min(counts[-6:]) - min(counts[:6])


@pytest.fixture
def no_collector() -> Iterator[None]:
    """Released objects must die at once: large trainers switch the collector off."""
    gc.collect()
    gc.disable()
    yield
    gc.enable()


@pytest.mark.parametrize("policy", ["offload", "inputs", "minimal", "keep", "auto"])
def test_a_dropped_engine_frees_its_disk(no_collector: None, policy: str) -> None:
    threads = set(threading.enumerate())
    x = torch.randn(64, 64, requires_grad=True)
    for _ in range(3):
        with ebbtide.offload_saved_tensors(policy=policy, min_bytes=0, target="disk") as context:
            y = x.exp().sin().sum()
        y.backward()
        engine = weakref.ref(context._latest)
        del context, y
        assert engine() is None
    for thread in set(threading.enumerate()) - threads:
        thread.join(timeout=10.0)
        assert not thread.is_alive()


def unnamed_files() -> dict[int, int]:
    """Return the bytes on disk of each open file without a name, by descriptor."""
    found: dict[int, int] = {}
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):  # the descriptor of the listing itself
            status = os.fstat(int(name))
            if stat.S_ISREG(status.st_mode) and not status.st_nlink:
                found[int(name)] = 512 * status.st_blocks
    return found


def test_contexts_share_a_disk_while_their_graphs_live(no_collector: None, tmp_path: Path) -> None:
    """As in a loop over time steps with one backward at its end."""
    x = y = torch.randn(256, 256, requires_grad=True)
    for _ in range(30):
        y = y.sin()
    (expected,) = torch.autograd.grad(y.sum(), x)
    y, files, threads = x, unnamed_files(), set(threading.enumerate())
    for _ in range(30):
        with ebbtide.offload_saved_tensors(target="disk", min_bytes=0, disk_path=tmp_path) as context:
            y = y.sin()
        assert context.stats().offloaded_bytes == x.nbytes
    del context
    more = [nbytes for file, nbytes in unnamed_files().items() if file not in files]
    started = set(threading.enumerate()) - threads
    assert len(more) == 1 and len(started) == 2
    assert sum(more) < 2 * (256 << 20), "more than one step of growth is reserved"
    assert same_bits(expected, *torch.autograd.grad(y.sum(), x))
    del y
    for thread in started:
        thread.join(10.0)
        assert not thread.is_alive()
    assert not unnamed_files().keys() - files.keys()


def test_engines_of_a_plan_are_kept_no_longer_than_the_context(
    no_collector: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ebbtide.api, "open_tier", lambda *given, **options: HostTier(NoDevice()))
    known, x = len(ebbtide.api._idle_engines), torch.randn(64, 64, requires_grad=True)

    def step(context: ebbtide.offload_saved_tensors) -> weakref.ref[object]:
        with context:
            y = x.exp().sum()
        y.backward()
        return weakref.ref(context._latest)

    context = ebbtide.offload_saved_tensors(policy=REMAKE, min_bytes=0)
    first, second = step(context)(), step(context)()
    assert first is second is not None
    engine = weakref.ref(first)
    del first, second, context
    assert engine() is None and len(ebbtide.api._idle_engines) == known


def test_idle_engines_of_earlier_rules_are_dropped(no_collector: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ebbtide.api, "open_tier", lambda *given, **options: HostTier(NoDevice()))
    monkeypatch.setattr(ebbtide.api, "_custom_rules", {})
    with ebbtide.offload_saved_tensors(min_bytes=0) as context:
        pass
    engine = weakref.ref(context._latest)
    del context
    assert engine() is not None
    ebbtide.register_recompute("CubedBackward", lambda node: None)
    assert engine() is None


def test_idle_engines_of_settings_that_never_repeat_are_dropped(
    no_collector: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each has host memory, of which a process has one budget."""
    monkeypatch.setattr(ebbtide.api, "open_tier", lambda *given, **options: HostTier(NoDevice()))
    monkeypatch.setattr(ebbtide.api, "_idle_engines", {})
    engines: list[Callable[[], Any]] = []
    for number in range(3 * MOST_SETTINGS):
        for window in (1 << 20, (2 << 20) + number):
            with ebbtide.offload_saved_tensors(min_bytes=0, window=window) as context:
                y = torch.randn(64, requires_grad=True).exp().sum()
            y.backward()
            engines.append(weakref.ref(context._latest))
    del context
    first, *others = {id(engine()): engine() for engine in engines if engine() is not None}.values()
    assert first is engines[0]() and len(others) == MOST_SETTINGS - 1


def test_a_closed_handle_closes_its_store_after_the_last_backward() -> None:
    model, place = stack(), HostTier(NoDevice())
    handle = enable_over(place, model, policy="offload", min_bytes=0)
    for _ in range(2):
        model(batch(5, 0)).sum().backward()
    late = model(batch(5, 0)).sum()
    handle.close()
    assert not place._closed
    late.backward()
    assert place._closed


def test_a_closed_handle_closes_its_store_once_no_graph_is_left() -> None:
    model, place = stack(), HostTier(NoDevice())
    handle = enable_over(place, model, policy="offload", min_bytes=0)
    dropped = model(batch(5, 0))
    handle.close()
    handle.close()
    assert not place._closed
    del dropped
    handle.close()
    assert place._closed


@pytest.fixture
def unread(monkeypatch: pytest.MonkeyPatch) -> Unread:
    """A function that gives an engine a failed comparison; as if on a device, its result arrives when it is awaited."""
    monkeypatch.setattr("ebbtide.engine.trust._Letter.arrived", property(lambda self: False))

    def give(engine: Any) -> None:
        engine.trust.require(torch.tensor(False), lambda: RestoreError("a device found a difference"))

    return give


def test_comparisons_that_no_optimizer_awaited_are_read_when_the_handle_is_closed(unread: Unread) -> None:
    model, place = stack(), HostTier(NoDevice())
    handle = enable_over(place, model, policy="offload", min_bytes=0)
    unread(handle._engine)
    train(model, 0)  # whose backward waits for nothing
    with pytest.raises(RestoreError, match="a device found a difference"):
        handle.close()
    assert place._closed and not handle.enabled and "forward" not in vars(model)
    handle.close()


@pytest.mark.parametrize("inside", ["with", "except", "finally"])
def test_a_handle_that_an_exception_closes_awaits_nothing(unread: Unread, inside: str) -> None:
    place = HostTier(NoDevice())
    handle = enable_over(place, stack(), policy="offload", min_bytes=0)
    unread(handle._engine)
    with pytest.raises(ZeroDivisionError) as caught:
        if inside == "with":
            with handle:
                raise ZeroDivisionError
        try:
            raise ZeroDivisionError
        except ZeroDivisionError:
            if inside == "except":
                handle.close()
            raise
        finally:
            handle.close()
    assert place._closed and caught.value.__context__ is None


@pytest.mark.parametrize("which", ["a closed handle", "a context"])
def test_a_backward_whose_engine_may_end_with_it_awaits_its_comparisons(
    unread: Unread, which: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, place = stack(), HostTier(NoDevice())
    if which == "a context":
        monkeypatch.setattr("ebbtide.api.open_tier", lambda *given, **options: place)
        monkeypatch.setattr("ebbtide.api._idle_engines", {})
        with ebbtide.offload_saved_tensors(min_bytes=0) as context:
            loss = model(batch(5, 0)).sum()
        engine = context._latest
    else:
        handle = enable_over(place, model, policy="offload", min_bytes=0)
        loss = model(batch(5, 0)).sum()
        handle.close()
        engine = handle._engine
    unread(engine)
    with pytest.raises(RestoreError, match="a device found a difference"):
        loss.backward()
    assert place._closed is (which == "a closed handle") and not place.used_bytes


def leave_by_an_exception(tier: DiskTier | HostTier) -> ebbtide.Handle:
    """Return a handle whose ``with`` an exception left while a graph was alive; that graph is dropped now."""
    model = stack()
    with contextlib.suppress(ZeroDivisionError), enable_over(tier, model, policy="offload", min_bytes=0) as handle:
        loss = model(batch(5, 0)).sum()
        assert handle.stats().store_bytes > 0 and loss.requires_grad
        raise ZeroDivisionError
    return handle


def test_host_memory_of_a_handle_that_an_exception_closed_is_freed_with_its_last_graph() -> None:
    device = FakeDevice(1e9, 1e9)
    handle = leave_by_an_exception(HostTier(device))
    assert device.host_bytes == 0 and not handle.enabled


def test_the_disk_of_a_handle_that_an_exception_closed_is_freed_after_its_last_graph(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ebbtide.store.diskwork._WAKE_SECONDS", 0.1)
    tier = DiskTier(tmp_path)
    threads = tier._work._threads
    handle = leave_by_an_exception(tier)
    for thread in threads:
        thread.join(60)
        assert not thread.is_alive()
    assert tier._work._file.fd == -1 and handle.stats().store_bytes == 0
    handle.close()


def test_a_handle_closed_inside_a_block_closes_its_store_after_that_blocks_forward(tmp_path: Path) -> None:
    class Closes(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            if handles:
                handles.pop().close()
            return x.tanh().exp()

    model, handles = nn.Sequential(Closes(), nn.Linear(WIDTH, WIDTH)), list[ebbtide.Handle]()
    x = torch.randn(8, WIDTH, requires_grad=True)
    expected = torch.autograd.grad(model(x).sum(), x)
    tier = DiskTier(tmp_path)
    handles.append(enable_over(tier, model, policy="offload", min_bytes=0, blocks=["0"]))
    loss = model(x).sum()
    assert tier._work.usable
    assert torch.equal(*expected, *torch.autograd.grad(loss, x))
    assert not tier._work.usable


def test_the_block_that_a_backward_reads_last_has_its_order_learned() -> None:
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH))
    with enable_over(HostTier(NoDevice()), model, policy="offload", min_bytes=0) as handle:
        train(model, 0)
        assert len(handle._engine.orders) == 1


def test_orders_are_remembered_for_so_many_numbers_of_tensors_only() -> None:
    orders: dict[tuple[str, int], tuple[int, ...]] = {}
    for number in range(MOST_ORDERS + 10):
        block = Block(name="b", kind=f"kind {number}", index=0, count=1, weights=tuple)
        run = RunRecord(block, Pass(), orders, set(), checkpointed=False)
        things = [nn.Identity() for _ in range(number % 7 + 1)]
        run.entries = [weakref.ref(thing) for thing in things]
        run.reads = [run.entries[0]]
        run.record_order()
        assert orders[run.order_key][0] == 0 and sorted(orders[run.order_key]) == list(range(len(things)))
    assert len(orders) == MOST_ORDERS
