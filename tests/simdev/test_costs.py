"""The costs of a step besides its copies, counted: pinned memory, streams, events, waits of the host."""

from __future__ import annotations

import gc
from typing import Any

import pytest
import torch

import ebbtide
from ebbtide.base.events import BUS
from ebbtide.engine.recompute import recompute
from ebbtide.profiling.step_profile import measured_rates
from ebbtide.schedule.window import BACKWARDS_WITH_ROOM, Window
from tests.gpu.test_first_light import _batch, _model, _same, _step
from tests.simdev.device import configured, counters


def count(name: str) -> int:
    return counters().get(name, 0)


def test_contexts_with_the_same_settings_share_pinned_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ebbtide.api._idle_engines", {})
    model, x = _model(width=64, depth=3), _batch(width=64, tokens=256)
    plain = _step(model, x)
    model.zero_grad()
    registered, streams = [], []
    for _ in range(4):
        with ebbtide.offload_saved_tensors(min_bytes=0, window="1B"):
            loss = model(x).square().mean()
        loss.backward()
        assert _same(plain[1:], [p.grad for p in model.parameters() if p.grad is not None])
        model.zero_grad()
        registered.append(count("registrations"))
        streams.append(torch.Stream(device=x.device).stream_id)
        gc.collect()
    assert registered[0] == registered[-1], registered  # nothing is pinned after the first context
    assert (streams[-1] - streams[0]) % 32 == 3, streams  # the test's own, of 32


@pytest.mark.parametrize("policy", ["minimal", "auto"])
def test_a_device_too_full_to_compare_recipes_offloads_instead(policy: str) -> None:
    """The first step of a training that barely fits: there is memory for the step, not for a comparison."""
    model, x = _model(width=256, depth=4), _batch(width=256, tokens=2048)
    plain = _step(model, x)
    for offloaded in (True, False):
        model.zero_grad()
        gc.collect()
        torch.accelerator.synchronize()
        with ebbtide.enable_activation_offloading(model, policy=policy, min_bytes=0, window="1MiB") as handle:
            if offloaded:
                handle._engine.trust._compare = _no_room  # pyright: ignore
            for _ in range(2):  # in the first, answers may come too late
                assert _same(plain, _step(model, x))
            stats = handle.stats()
        assert stats.demoted_sites == ()
        assert (stats.recomputed_bytes == 0) is (offloaded and not stats.checkpointed_blocks)


def _no_room(*_: object) -> bool:
    raise torch.OutOfMemoryError("no room")


def test_the_window_grows_again_when_there_is_room() -> None:
    window = Window(1 << 20)
    window.shrink(1 << 20)
    for _ in range(BACKWARDS_WITH_ROOM):
        window.recover()
        assert window.in_bytes == 1 << 19
    window.recover()
    assert window.in_bytes == 1 << 20
    window.shrink(0)  # nothing was prefetched, and yet there was too little room
    assert window.in_bytes == 1 << 19


def test_prefetches_leave_the_allocator_its_cache() -> None:
    """On a nearly full card the allocator releases its cache in no step after the first two."""
    model, x = _model(width=128, depth=6), _batch(width=128, tokens=4096)
    plain = _step(model, x)

    def steps(count: int, capacity: int = 0) -> list[int]:
        """Return how often each step released the cache."""
        model.zero_grad(set_to_none=True)
        gc.collect()
        torch.accelerator.synchronize()
        torch.accelerator.empty_cache()
        torch.accelerator.reset_peak_memory_stats()
        found = list[int]()
        with (
            configured(capacity=capacity),
            ebbtide.enable_activation_offloading(model, policy="offload", min_bytes=0, window="64MiB"),
        ):
            for step in range(count):
                before = torch.accelerator.memory_stats()["num_alloc_retries"]
                try:
                    assert _same(plain, _step(model, x))
                except torch.OutOfMemoryError:  # the window left compute too little memory
                    assert step == 0
                torch.accelerator.synchronize()
                found.append(torch.accelerator.memory_stats()["num_alloc_retries"] - before)
        return found

    assert not any(steps(2))
    flushes = steps(4, torch.accelerator.max_memory_reserved() - 24 * (1 << 20))
    assert any(flushes) and not any(flushes[2:]), flushes


def test_the_first_step_pins_the_memory_of_all_blocks_at_once() -> None:
    depth = 12
    model, x = _model(width=256, depth=depth), _batch(width=256, tokens=1024)
    before = count("registrations")
    with ebbtide.enable_activation_offloading(model, policy="offload", min_bytes=0, window="1B") as handle:
        _step(model, x)
        stats = handle.stats()
        _step(model, x)
    block_bytes = stats.offloaded_bytes // depth
    assert block_bytes > 4 << 20
    assert count("registrations") - before <= 2 + block_bytes // (2 << 20) + 3  # a trial, the first block, the others
    assert stats.store["host_pinned_bytes"] <= 1.03 * stats.store["host_most_used_bytes"]


def test_a_recompute_without_room_discards_prefetched_entries(monkeypatch: pytest.MonkeyPatch) -> None:
    model, x = _model(width=64, depth=4), _batch(width=64, tokens=256)
    plain, refused = _step(model, x), list[int]()
    with ebbtide.enable_activation_offloading(model, policy="auto", min_bytes=0, window="1MiB") as handle:

        def full(*given: Any) -> torch.Tensor:
            ahead = sum(
                flow.ahead_bytes for b in handle._engine.restorer.backwards.values() for flow in b.flows.values()
            )
            if ahead:
                refused.append(ahead)
                raise torch.OutOfMemoryError("no room")
            return recompute(*given)

        monkeypatch.setattr("ebbtide.engine.restore.recompute", full)
        for _ in range(2):
            assert _same(plain, _step(model, x))
    assert refused


def test_events_keep_time_only_where_somebody_reads_it() -> None:
    model, x = _model(width=64, depth=3), _batch(width=64, tokens=256)
    with ebbtide.enable_activation_offloading(model, policy="offload", min_bytes=0, window="1B") as handle:

        def events() -> list[int]:
            """Count what a step makes: timing events, other events, copies."""
            before, _ = counters(), _step(model, x)
            return [counters().get(n, 0) - before.get(n, 0) for n in ("events_timed", "events_untimed", "copies_async")]

        begun, *_, (timed, untimed, copies) = [events() for _ in range(4)]
        assert begun[0] > 0 and timed == 0
        assert 0 < copies <= untimed <= 2 * copies + 3  # compute's and the copy's own, and one per stream in backward
        torch.accelerator.synchronize()  # the host runs ahead, and only finished copies have a rate
        rate = handle.stats().copy_in_bytes_per_second
        assert rate is not None and rate > 0
        unsubscribe = BUS.subscribe(lambda kind, fields: None)
        assert events()[0] > 0
        unsubscribe()
        assert events()[0] == 0


def test_copies_that_are_requested_together_share_their_events() -> None:
    """With a window of one byte each copy is requested alone; with the usual one in groups."""
    model, x = _model(width=64, depth=6), _batch(width=64, tokens=256)
    plain = _step(model, x)
    events: dict[str, float] = {}
    for window in ("1B", "64MiB"):
        with ebbtide.enable_activation_offloading(model, policy="offload", min_bytes=0, window=window) as handle:
            for _ in range(2):
                assert _same(plain, _step(model, x))
            handle._engine._copy_out._expected_bytes = 1 << 60  # nothing is held back
            handle._engine._stalls.begin_pass(measured=False)
            before = count("events_timed") + count("events_untimed")
            assert _same(plain, _step(model, x))
            events[window] = (count("events_timed") + count("events_untimed") - before) / handle.stats().packs
    print(events)
    assert events["64MiB"] < events["1B"] / 3, events


def test_a_link_that_no_step_has_used_is_measured_before_a_plan_needs_its_rate() -> None:
    tries: list[tuple[float, float]] = []
    for _ in range(5):  # a loaded machine may be late
        with (
            configured(copy_bytes_per_s=10**9, copy_delay_us=0),
            ebbtide.enable_activation_offloading(_model(width=64, depth=3), policy="auto", min_bytes=0) as handle,
        ):
            rates = measured_rates(handle._engine.tier)
        tries.append((rates.out_bytes_per_second, rates.in_bytes_per_second))
    for found in zip(*tries, strict=True):
        assert all(rate != pytest.approx(1e9, rel=1e-6) for rate in found), "no time, and no bytes"
        assert 2.5e8 < max(found) < 2e9
