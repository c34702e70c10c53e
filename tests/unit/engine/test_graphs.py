"""Uses of a graph after its forward: kept, dropped, used in part, in any order, in any thread."""

from __future__ import annotations

import functools
import gc
import weakref
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.graph import GradientEdge

from ebbtide.base.actions import Site
from ebbtide.engine import Block, Engine, Expr, recipe
from ebbtide.engine.run import begin_block
from tests.helpers.engines import (
    POLICIES,
    REMAKE,
    TIERS,
    assert_nothing_left,
    block,
    check_everywhere,
    forward_pass,
    in_thread,
    leaf,
    open_engine,
)
from tests.helpers.fakedevice import FakeDevice
from tests.helpers.oracle import same_bits

POLICY = pytest.mark.parametrize("policy", POLICIES)


@contextmanager
def no_collector() -> Iterator[None]:
    """Switch the collector off: objects die by their reference count."""
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def chain(x: Tensor, w: Tensor) -> Tensor:
    """A gated layer: every kind of rule, an in-between cast, a residual."""
    h = F.layer_norm(x, x.shape[-1:])
    y = F.silu(h @ w) * (h @ w.t())
    return x + (y.to(torch.bfloat16).to(w.dtype) @ w).tanh()


def grads(y: Tensor, *leaves: Tensor, **given: object) -> list[Tensor]:
    return list(torch.autograd.grad(y.square().sum(), leaves, **given))  # type: ignore[arg-type]


def equal(one: list[Tensor], other: list[Tensor]) -> bool:
    return len(one) == len(other) and all(map(same_bits, one, other))


@POLICY
def test_a_retained_graph_gives_the_same_gradients_again(policy: str) -> None:
    x, w = leaf(6, 8), leaf(8, 8, parameter=True)
    expected = grads(chain(x, w), x, w)
    with open_engine(policy, verify=True) as engine:
        with forward_pass(engine, x, weights=[w]):
            y = chain(x, w)
        for _ in range(3):
            assert equal(expected, grads(y, x, w, retain_graph=True))
        assert equal(expected, in_thread(functools.partial(grads, y, x, w)))
        del y
        assert_nothing_left(engine)


def test_a_retained_graph_does_not_keep_on_the_device_what_blocks_behind_have_read() -> None:
    x, w = leaf(64, 64), leaf(64, 64, parameter=True)
    block_bytes = 4 * x.nbytes
    peaks: dict[bool, int] = {}
    for retain in (False, True):
        device = FakeDevice(1e9, 1e9)
        with open_engine("offload", device=device, window_bytes=block_bytes) as engine:
            y: Tensor = x
            engine.begin_pass()
            for index in range(8):
                with block(engine, y, weights=[w], index=index):
                    y = (y @ w).tanh().sin().sin().sin() * 2
            engine.end_pass()
            assert engine.stats().offloaded_bytes >= 7 * block_bytes
            first = grads(y, x, w, retain_graph=retain)
            peaks[retain] = device.peak_bytes
            assert not retain or equal(first, grads(y, x, w))
            del y
            assert_nothing_left(engine)
    assert peaks[True] - peaks[False] < 2 * block_bytes


def test_a_backward_for_each_weight_copies_what_it_reads() -> None:
    """A zero-bubble schedule takes the gradient of the input first, and then of one weight after another."""
    x, weights = leaf(64, 64), [leaf(64, 64, parameter=True) for _ in range(24)]
    device, nodes = FakeDevice(1e9, 1e9), list[Any]()
    with open_engine("offload", device=device, window_bytes=6 * x.nbytes) as engine:
        y: Tensor = x
        engine.begin_pass()
        for index in range(4):
            with block(engine, y, weights=weights, index=index):
                for w in weights[6 * index : 6 * index + 6]:
                    product = y @ w
                    nodes.append(product.grad_fn)
                    y = product.tanh()
        engine.end_pass()
        offloaded = engine.stats().offloaded_bytes
        torch.autograd.grad(y.sum(), x, retain_graph=True)
        assert 12 * x.nbytes < device.in_bytes <= offloaded
        for node, w in zip(nodes, weights, strict=True):
            torch.autograd.grad([GradientEdge(node, 0)], [w], torch.ones_like(w), retain_graph=True)
        assert device.in_bytes <= 2 * offloaded


def test_a_retained_graph_is_prefetched_again_from_its_second_block_on() -> None:
    x, w = leaf(64, 64), leaf(64, 64, parameter=True)
    runs, prefetched = list[Any](), list[Any]()
    with open_engine("offload", rate=1e9, window_bytes=3 * x.nbytes) as engine:
        y: Tensor = x
        engine.begin_pass()
        for index in range(4):
            with block(engine, y, weights=[w], index=index) as run:
                y = (y @ w).tanh().sin().sin()
            runs.append(run)
        engine.end_pass()
        first = grads(y, x, w, retain_graph=True)
        prefetch = engine.tier.prefetch
        engine.tier.prefetch = lambda slots: (prefetched.extend(slots), prefetch(slots))[1]  # type: ignore[method-assign]
        assert equal(first, grads(y, x, w, retain_graph=True))
        stored = [e.slot for reference in runs[0].entries if (e := reference()) is not None and e.slot is not None]
        assert set(map(id, stored)) & set(map(id, prefetched))


@POLICY
def test_the_gradient_of_a_gradient(policy: str) -> None:
    x, w = leaf(6, 8, dtype=torch.float64), leaf(8, 8, dtype=torch.float64, parameter=True)

    def twice(y: Tensor) -> list[Tensor]:
        first = grads(y, x, w, create_graph=True)
        return [g.detach() for g in first] + grads(first[0] + first[1].sum(), x, w)

    expected = twice(chain(x, w))
    with open_engine(policy) as engine, no_collector():
        with forward_pass(engine, x, weights=[w]):
            y = chain(x, w)
        assert equal(expected, twice(y))
        del y
        assert_nothing_left(engine)


@POLICY
def test_partial_gradients_in_any_order(policy: str) -> None:
    x, w, v = leaf(6, 8), leaf(8, 8, parameter=True), leaf(8, 8, parameter=True)
    plain = chain(chain(x, w), v)
    expected = {id(t): grads(plain, t, retain_graph=True) for t in (x, w, v)}
    for order in ((x, w, v), (v, x, w), (w, v, x)):
        with open_engine(policy) as engine, no_collector():
            with forward_pass(engine, x, weights=[w, v]):
                y = chain(chain(x, w), v)
            for wanted in order:
                assert equal(expected[id(wanted)], grads(y, wanted, retain_graph=True))
            del y
            assert_nothing_left(engine)


@POLICY
@pytest.mark.parametrize("first", [0, 1])
def test_two_heads_one_after_the_other(policy: str, first: int) -> None:
    # The first backward frees the nodes of the trunk that only it reaches; a recipe that held a node would raise here.
    x, w = leaf(6, 8), leaf(8, 8, parameter=True)

    def heads() -> list[Tensor]:
        trunk = (x @ w).tanh()
        side = trunk.detach().requires_grad_()
        return [F.silu(trunk * 2).sum(), (side * torch.sigmoid(side)).sum()]

    def both(made: list[Tensor]) -> list[Tensor]:
        x.grad = w.grad = None
        made[first].backward()
        made[1 - first].backward()
        return [x.grad, w.grad]  # type: ignore[list-item]

    expected = [g.clone() for g in both(heads())]
    with open_engine(policy) as engine, no_collector():
        with forward_pass(engine, x, weights=[w]):
            made = heads()
        assert equal(expected, both(made))
        del made
        assert_nothing_left(engine)


@POLICY
def test_a_head_that_shares_the_trunk_survives_the_others_backward(policy: str) -> None:
    x, w = leaf(6, 8), leaf(8, 8, parameter=True)

    def heads() -> tuple[Tensor, Tensor]:
        a = torch.sigmoid(x * 3)
        return (a * a).sum(), ((a.detach() * w[:6]).exp() * a.detach().cos()).sum()

    one, other = heads()
    expected = [*torch.autograd.grad(one, x), *torch.autograd.grad(other, w)]
    with open_engine(policy) as engine, no_collector():
        with forward_pass(engine, x, weights=[w]):
            one, other = heads()
        got = list(torch.autograd.grad(one, x))  # frees the nodes from which the other head's recipes were built
        got += torch.autograd.grad(other, w)
        assert equal(expected, got)
        del one, other
        assert_nothing_left(engine)


@pytest.mark.parametrize("tier", TIERS)
@POLICY
def test_a_dropped_graph_leaves_nothing(policy: str, tier: str) -> None:
    x, w = leaf(6, 8), leaf(8, 8, parameter=True)
    with open_engine(policy, tier) as engine, no_collector():
        for _ in range(3):
            with forward_pass(engine, x, weights=[w]):
                y = chain(x, w)
            assert engine.live_tickets or engine.kept.total
            del y
            assert_nothing_left(engine)


@POLICY
def test_an_operator_that_saves_its_own_output_does_not_keep_itself_alive(policy: str) -> None:
    x = leaf(6, 8)
    for min_bytes in (0, 1 << 20):  # tickets, light tickets
        with open_engine(policy, min_bytes=min_bytes) as engine, no_collector():
            with forward_pass(engine, x):
                y = torch.softmax(x.exp(), -1).tanh().sigmoid()
            storage = weakref.ref(y.untyped_storage())
            del y
            engine.tier.device.compute(1.0)  # type: ignore[attr-defined]  # a copy that runs holds its source
            assert engine.tier.used_bytes == 0 and storage() is None
            assert_nothing_left(engine)


@pytest.mark.parametrize("tier", TIERS)
def test_reused_addresses_are_not_one_storage(tier: str) -> None:
    x = leaf(64, 64)

    def program(leaves: dict[str, Tensor]) -> list[Tensor]:
        total = leaves["x"]
        for i in range(12):  # each temporary dies and gives its address to the next
            total = total + (leaves["x"].detach() * i).cumsum(0) * leaves["x"]
        return [total]

    check_everywhere(program, {"x": x}, tiers=[tier])


def test_a_diamond_is_recomputed_in_a_line(monkeypatch: pytest.MonkeyPatch) -> None:
    """Depth 12: each value uses the previous one twice. Without a cache that is 2^12 evaluations."""
    x = leaf(4, 4)

    def diamond(v: Tensor) -> Tensor:
        v = v.cos()
        for _ in range(12):
            v = v.sigmoid() * v.tanh()
        return v

    expected, calls = grads(diamond(x), x), _count_calls(monkeypatch)
    with open_engine(REMAKE) as engine:
        for step in range(2):
            with forward_pass(engine, x):
                y = diamond(x)
            calls.clear()
            before = engine.stats().total_recomputes
            assert equal(expected, grads(y, x))
            assert engine.stats().recomputed_bytes > 0
            assert engine.stats().total_recomputes - before <= 3 * 12 + 2
            assert sum(calls.values()) <= 3 * 12 + 3, (step, sum(calls.values()))
            del y
            assert_nothing_left(engine)


def _count_calls(monkeypatch: pytest.MonkeyPatch) -> Counter[int]:
    """Count the calls of each function of recipes from here on."""
    calls, inner = Counter[int](), recipe._compute

    def counted(expr: Expr, values: Iterable[Tensor]) -> Tensor:
        calls[id(expr)] += 1
        return inner(expr, values)

    monkeypatch.setattr(recipe, "_compute", counted)
    return calls


@POLICY
@pytest.mark.parametrize("depth", [1, 2, 3])
def test_one_forward_one_backward_with_several_in_flight(policy: str, depth: int) -> None:
    """1F1B: ``depth`` forwards are ahead of their backwards, over four microbatches."""
    x, w = leaf(6, 8), leaf(8, 8, parameter=True)
    batches = [x.detach() * (i + 1) for i in range(4)]

    def run(engine: Engine | None) -> list[Tensor]:
        w.grad, ready = None, []
        for batch in batches:
            fed = batch.clone().requires_grad_()
            if engine is None:
                ready.append(chain(fed, w))
            else:
                engine.begin_pass()
                with block(engine, fed, weights=[w]):
                    middle = chain(fed, w)
                with block(engine, middle, weights=[w], name="c", index=1):
                    ready.append(chain(middle, w))
                engine.end_pass()
                del middle
                if engine is not None and len(ready) == depth:
                    ready.pop(0).square().sum().backward()
                continue
            ready[-1] = chain(ready[-1], w)
            if len(ready) == depth:
                ready.pop(0).square().sum().backward()
        while ready:
            ready.pop(0).square().sum().backward()
        assert w.grad is not None
        return [w.grad.clone()]

    expected = run(None)
    with open_engine(policy) as engine, no_collector():
        for _ in range(2):
            assert equal(expected, run(engine))
            assert_nothing_left(engine)


@POLICY
def test_two_forwards_and_one_backward_over_both(policy: str) -> None:
    x, w = leaf(6, 8), leaf(8, 8, parameter=True)
    expected = grads(chain(x, w) * chain(x * 2, w), x, w)
    with open_engine(policy) as engine:
        with forward_pass(engine, x, weights=[w]):
            one = chain(x, w)
        with forward_pass(engine, x, weights=[w]):
            two = chain(x * 2, w)
        assert equal(expected, grads(one * two, x, w))
        del one, two
        assert_nothing_left(engine)


@pytest.mark.parametrize("tier", TIERS)
def test_a_gradient_inside_a_forward_cancels_no_copy(tier: str) -> None:
    """The forward continues, and its copy-outs are not cancelled."""
    x = leaf(64, 64)
    (expected,) = torch.autograd.grad(x.sin().cos().exp().sum(), x)
    with open_engine("offload", tier) as engine:
        with forward_pass(engine, x) as run:
            y = x.sin().cos()
            torch.autograd.grad(y.sum(), x, retain_graph=True)
            z = y.exp()
        with engine.lock:
            engine._copy_out.window.out_bytes = 0
            engine._copy_out.retire()
        entries = [entry for reference in run.entries if (entry := reference()) is not None]
        assert len(entries) == 3 and all(e.source is None and e.slot is not None for e in entries)
        assert same_bits(torch.autograd.grad(z.sum(), x)[0], expected)


def test_a_hundred_steps_do_not_grow() -> None:
    x, w = leaf(6, 8), leaf(8, 8, parameter=True)
    with open_engine(REMAKE) as engine, no_collector():
        sizes = []
        for step in range(100):
            with forward_pass(engine, x, weights=[w]):
                y = chain(x, w) * (1 + step / 7)  # a new number each step
                y = F.silu(y) * y
            if step % 3:
                grads(y, x, w)
            del y
            assert_nothing_left(engine)
            known = (
                engine.index.known,
                engine.restorer.backwards,
                engine.orders,
                engine.trust._verdicts,
                engine._empties,
            )
            out = engine._copy_out
            sizes.append([len(k) for k in known] + [len(out._queue), out.held_bytes, out.in_flight_bytes])
        assert sizes[5] == sizes[-1], (sizes[5], sizes[-1])
        device = engine.tier.device  # type: ignore[attr-defined]
        assert device.live_bytes == 0


def test_a_backward_that_raised_is_forgotten_by_the_next_pass() -> None:
    x = leaf(6, 8)

    class Fails(torch.autograd.Function):
        @staticmethod
        def forward(ctx, v):
            return v.clone()

        @staticmethod
        def backward(ctx, g):
            raise KeyboardInterrupt

    expected = grads(torch.sigmoid(x * 2) * x, x)
    with open_engine("offload") as engine:
        with forward_pass(engine, x):
            y = (Fails.apply(x.cumsum(0)) * x.cumsum(1)).exp()
        with pytest.raises(KeyboardInterrupt):
            y.sum().backward()
        del y
        with forward_pass(engine, x):
            y = torch.sigmoid(x * 2) * x
        assert not engine.restorer.backwards
        assert equal(expected, grads(y, x))
        del y
        assert_nothing_left(engine)


def test_what_another_recompute_needs_is_counted_as_recomputed() -> None:
    x = leaf(6, 8)
    with open_engine(REMAKE) as engine:
        with forward_pass(engine, x):
            y = x.sin() + x.exp().exp()
        y.sum().backward()
        assert engine.stats().recomputed_bytes == 2 * x.nbytes
        assert engine.stats().total_recomputes == 2


def test_an_order_that_was_learned_is_used() -> None:
    x = leaf(6, 8)
    with open_engine("offload") as engine:
        for _ in range(2):
            with forward_pass(engine, x) as run:
                y = x.exp() * x.cos()
            order = run.backward_order()
            y.sum().backward()
        assert order != run.entries[::-1]


def test_the_end_of_a_forward_waits_for_a_backward_in_another_thread() -> None:
    """Both change what is held back."""
    x, owned = leaf(6, 8), list[bool]()
    with open_engine("offload") as engine:
        end = engine._copy_out.end_forward
        engine._copy_out.end_forward = lambda done: (owned.append(engine.lock._is_owned()), end(done))[1]  # type: ignore
        with forward_pass(engine, x):
            x.sin()
    assert owned == [True]


def test_a_site_may_be_demoted_while_statistics_are_made() -> None:
    with open_engine("offload") as engine:
        demoted = engine.trust.demoted

        class Named(str):
            def __str__(self) -> str:
                demoted[Site("block", "", "another", len(demoted))] = "meanwhile"
                return "site"

        demoted[Named()] = "before"  # type: ignore[index]
        assert engine.stats().demoted_sites == ("site",)


def test_a_close_that_was_interrupted_is_repeated_by_the_end_of_the_pass() -> None:
    x = leaf(6, 8)
    with open_engine(REMAKE) as engine:
        engine.begin_pass()
        run = begin_block(engine, Block(name="b", kind="Block", index=0, count=1, weights=tuple), [x])
        forget = run._inputs.forget
        run._inputs.forget = _interrupted  # type: ignore[method-assign]
        with pytest.raises(KeyboardInterrupt):
            run.close()
        run._inputs.forget = forget  # type: ignore[method-assign]
        assert run.is_open
        engine.end_pass()
        assert not run.is_open and not run._inputs.values


def _interrupted() -> None:
    raise KeyboardInterrupt


def test_small_storages_count_as_saved_by_the_bytes_of_their_views() -> None:
    x, number = leaf(8, 64), leaf(1)
    with open_engine("offload", min_bytes=1 << 20) as engine:
        with forward_pass(engine, x, number):
            first, second = (x * 1).split(4)
            y = first.sin() + second.cos()
            z = number.expand(8, 64).sin()
        (y.sum() + z.sum()).backward()
        stats = engine.stats()
    assert stats.saved_bytes == 2 * x.nbytes and stats.packs == 3
    assert (stats.small_storages, stats.small_bytes) == (2, x.nbytes + number.nbytes)
