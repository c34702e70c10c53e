"""Bytes that cross the link and bytes that stay on the device, exactly, for random graphs. Invariants 2, 3, 6 and 8."""

from __future__ import annotations

import contextlib
import gc
import warnings
import weakref
import zlib
from collections import Counter
from typing import Any

import pytest
import torch
from hypothesis import example, given, reject, settings
from hypothesis import strategies as st
from torch.autograd.graph import saved_tensors_hooks

from ebbtide.base.actions import Action
from ebbtide.engine.run import BlockRun
from ebbtide.engine.tickets import Entry, LightTicket
from tests.helpers.engines import POLICIES, ByTable, assert_nothing_left, block, open_engine
from tests.helpers.graphs import Graph, graphs, leaves

ACTIONS = [Action.KEEP, Action.OFFLOAD, Action.RECOMPUTE]


def plan_of(seed: int) -> ByTable:
    """Any action for any site, the same in each step."""
    return ByTable(lambda c: ACTIONS[zlib.crc32(f"{seed} {c.site}".encode()) % 3])


class Around:
    """A block's hooks, and a record of every saved storage around them. It holds no tensor: autograd holds it."""

    def __init__(self, watched: Watched, opened: Any) -> None:
        self.engine, self.runs, self.opened = watched.engine, watched.runs, opened
        self.storages, self.light = watched.storages, watched.light

    def __enter__(self) -> None:
        self.run = self.opened.__enter__()
        self.runs.append(self.run)
        self.hooks = saved_tensors_hooks(self.pack, self.engine.unpack)
        self.hooks.__enter__()

    def __exit__(self, *exception: Any) -> Any:
        self.hooks.__exit__(*exception)
        return self.opened.__exit__(*exception)

    def pack(self, tensor: torch.Tensor) -> Any:
        ticket = self.run.pack(tensor)
        reference = weakref.ref(tensor.untyped_storage())
        (self.light if isinstance(ticket, LightTicket) else self.storages).append(reference)
        return ticket


def dying_slots(engine: Any) -> list[Any]:
    """Unreferenced slots with running copies."""
    return [*engine.tier._dead, *engine.tier._leaving]


class Watched:
    """A graph's forward under an engine, with every saved storage."""

    def __init__(self, engine: Any, graph: Graph) -> None:
        self.engine = engine
        self.storages: list[weakref.ref[torch.UntypedStorage]] = []
        self.light: list[weakref.ref[torch.UntypedStorage]] = []  # weights, and views without elements
        self.runs: list[BlockRun] = []
        self.leaves = {k: v.detach().clone().requires_grad_() for k, v in leaves().items()}
        self.leaves = {k: torch.nn.Parameter(v) if k in ("scale", "weight") else v for k, v in self.leaves.items()}
        engine.begin_pass()
        torch.manual_seed(7)
        try:
            self.outputs = [o for o in graph(self.leaves, self.block) if o.requires_grad]
        except RuntimeError:
            with pytest.raises(RuntimeError):  # an operator that refuses the graph's inputs, without hooks too
                graph(self.leaves, lambda *inputs: contextlib.nullcontext())
            reject()
        finally:
            engine.end_pass()

    def block(self, *inputs: torch.Tensor) -> Around:
        weights = [v for v in self.leaves.values() if isinstance(v, torch.nn.Parameter)]
        return Around(self, block(self.engine, *inputs, weights=weights, index=len(self.runs)))

    def device_bytes(self) -> int:
        """Bytes of saved storages alive on the device that nobody but the engine holds."""
        held = {t.untyped_storage()._cdata for t in (*self.leaves.values(), *self.outputs)}
        held |= {s._cdata for r in self.light if (s := r()) is not None}
        alive = {s._cdata: s.nbytes() for r in self.storages if (s := r()) is not None}
        entries = [e for run in self.runs for r in run.entries if (e := r()) is not None]
        # A tensor that was cast up has a narrower copy, which outlives its entry until its copy-out ends.
        sources = [e.source for e in entries] + [slot.source for slot in dying_slots(self.engine)]
        alive |= {s._cdata: s.nbytes() for t in sources if t is not None and (s := t.untyped_storage())}
        return sum(nbytes for key, nbytes in alive.items() if key not in held)

    def backward(self) -> None:
        if self.outputs:
            torch.autograd.backward(self.outputs, [torch.ones_like(o) for o in self.outputs])


GRADIENT_INSIDE = Graph((*[("add", 0, 0, 0)] * 3, ("inner_gradient", 0, 0, 0)), (0,))
"""A backward in the middle of a forward: what is gathered then is copied out all the same."""


PART = Graph((("add", 0, 0, 0), ("add", 0, 0, 0), ("unsafe_chunk", 0, 0, 0), ("mul", 0, 0, 0)), (0,))
"""A storage of which a part is saved stays, and counts as kept."""


@settings(max_examples=60)
@example(GRADIENT_INSIDE, 0, 400, 1.0)
@example(PART, 0, 1, 1.0)
@given(graphs(outside=False), st.integers(0, 99), st.sampled_from([1, 100, 400, 1 << 20]), st.sampled_from([1.0, 1e12]))
def test_what_stays_is_what_is_kept_and_the_window(graph: Graph, seed: int, window_bytes: int, rate: float) -> None:
    """After the forward the device holds the kept storages and those being copied out: at most the window."""
    with warnings.catch_warnings(), open_engine(plan_of(seed), rate=rate, window_bytes=window_bytes) as engine:
        warnings.simplefilter("ignore")
        watched = Watched(engine, graph)
        kept, flying = _sources(watched)
        assert watched.device_bytes() == kept + flying
        assert engine._copy_out.in_flight_bytes <= window_bytes
        device = engine.tier.device
        device.compute(1e9)  # every copy is done
        engine._copy_out.retire()
        assert engine.tier.used_bytes >= 0  # any call drops the sources of slots that died before their copies
        assert watched.device_bytes() == kept == _sources(watched)[0]
        watched.backward()


def _sources(watched: Watched) -> tuple[int, int]:
    """Bytes of the storages that entries hold: kept, and being copied out."""
    held = {t.untyped_storage()._cdata for t in (*watched.leaves.values(), *watched.outputs)}
    held |= {s._cdata for r in watched.light if (s := r()) is not None}
    kept_entries = [e for r in tuple(watched.engine.kept._bytes) if isinstance(e := r(), Entry)]
    storages = [e.kept for e in kept_entries if e.kept is not None and e.kept._cdata not in held]
    by_action: dict[bool, dict[int, int]] = {True: {s._cdata: s.nbytes() for s in storages}, False: {}}
    for entry in [e for run in watched.runs for r in run.entries if (e := r()) is not None]:
        if entry.source is not None and (storage := entry.source.untyped_storage())._cdata not in held:
            by_action[entry.action is Action.KEEP][storage._cdata] = storage.nbytes()
    for slot in dying_slots(watched.engine):
        if slot.source is not None and (storage := slot.source.untyped_storage())._cdata not in held:
            by_action[False][storage._cdata] = storage.nbytes()
    kept = by_action[True]
    return sum(kept.values()), sum(n for key, n in by_action[False].items() if key not in kept)


@settings(max_examples=60)
@given(graphs(), st.integers(0, 99), st.sampled_from([1, 400, 1 << 20]))
def test_a_storage_crosses_the_link_at_most_once_each_way(graph: Graph, seed: int, window_bytes: int) -> None:
    offloaded: Counter[int] = Counter()
    alive: list[torch.UntypedStorage] = []
    with warnings.catch_warnings(), open_engine(plan_of(seed), rate=1e12, window_bytes=window_bytes) as engine:
        warnings.simplefilter("ignore")
        tier, copy_out_all, take = engine.tier, engine.tier.copy_out_all, engine.tier.take
        taken: weakref.WeakKeyDictionary[Any, int] = weakref.WeakKeyDictionary()
        counts = list[int]()
        weights: set[int] = set()

        def watched_copy_out(sources: list[torch.Tensor], **given: Any) -> Any:
            for source in sources:
                storage = source.untyped_storage()
                alive.append(storage)  # so that no address stands for two
                offloaded[storage._cdata] += source.numel()
                assert storage._cdata not in weights
            return copy_out_all(sources, **given)

        def counted_take(slot: Any) -> Any:
            taken[slot] = taken.get(slot, 0) + 1
            counts.append(taken[slot])
            return take(slot)

        tier.copy_out_all, tier.take = watched_copy_out, counted_take  # type: ignore[method-assign]
        watched = Watched(engine, graph)
        weights |= {v.untyped_storage()._cdata for v in watched.leaves.values() if isinstance(v, torch.nn.Parameter)}
        for storage in alive:
            assert offloaded[storage._cdata] <= 1.5 * storage.nbytes(), "parts and then the whole"
            assert storage._cdata not in weights
        watched.backward()
        assert all(count == 1 for count in counts)


@settings(max_examples=30)
@given(graphs(), st.integers(0, 99), st.booleans())
def test_nothing_outlives_its_graph(graph: Graph, seed: int, backward: bool) -> None:
    gc.collect()
    gc.disable()
    try:
        with warnings.catch_warnings(), open_engine(plan_of(seed), rate=100.0) as engine:
            warnings.simplefilter("ignore")
            for _ in range(3):
                watched = Watched(engine, graph)
                if backward:
                    watched.backward()
                runs = watched.runs
                del watched
                runs.clear()
                assert_nothing_left(engine)
            assert engine.tier.device.live_bytes == 0
    finally:
        gc.enable()


@pytest.mark.parametrize("policy", POLICIES)
def test_eval_and_no_grad_touch_nothing(policy: str, monkeypatch: pytest.MonkeyPatch) -> None:
    import ebbtide
    from ebbtide.engine import Engine

    model = torch.nn.Sequential(*(torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.SiLU()) for _ in range(2)))
    with ebbtide.enable_activation_offloading(model, policy=policy, min_bytes=0) as handle:
        monkeypatch.setattr(Engine, "begin_pass", lambda *a, **k: pytest.fail("a pass was begun"))
        monkeypatch.setattr(BlockRun, "__init__", lambda *a, **k: pytest.fail("hooks were opened"))
        with torch.no_grad():
            model(torch.randn(2, 4))
        with torch.inference_mode():
            model.eval()(torch.randn(2, 4))
        assert handle.stats().packs == 0
