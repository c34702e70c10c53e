"""Threads: concurrent models, concurrent forwards and backwards, and references to dying objects."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import ebbtide
from tests.helpers.engines import (
    POLICIES,
    assert_nothing_left,
    forward_pass,
    hooks_are_closed,
    in_thread,
    leaf,
    open_engine,
)
from tests.helpers.oracle import same_bits
from tests.helpers.parts import WIDTH, Model, differing, gated_model, training_step

POLICY = pytest.mark.parametrize("policy", POLICIES)
STEPS = 12


def at_once(*works: Callable[[], Any]) -> None:
    """Run functions in threads of their own that begin together; raise the first error."""
    together, errors = threading.Barrier(len(works)), []

    def run(work: Callable[[], Any]) -> None:
        try:
            together.wait(30)
            work()
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=run, args=(work,), daemon=True) for work in works]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert not any(thread.is_alive() for thread in threads), "a thread hangs"
    if errors:
        raise errors[0]


def weight_grads(model: Model, x: Tensor) -> list[Tensor]:
    return list(torch.autograd.grad(model(x).square().sum(), list(model.parameters())))


@POLICY
def test_two_models_train_in_two_threads(policy: str) -> None:
    models, batches = [gated_model(), gated_model()], [torch.randn(32, WIDTH) for _ in range(2)]
    expected = [training_step(m, x) for m, x in zip(models, batches, strict=True)]
    handles = [ebbtide.enable_activation_offloading(m, policy=policy, min_bytes=0, window=1) for m in models]

    def train(number: int) -> None:
        for _ in range(STEPS):
            assert differing(expected[number], training_step(models[number], batches[number])) == []

    at_once(lambda: train(0), lambda: train(1))
    for handle in handles:
        assert_nothing_left(handle._engine)
        handle.close()


@POLICY
def test_one_model_serves_two_threads(policy: str) -> None:
    model, batches = gated_model(), [torch.randn(32, WIDTH) for _ in range(2)]
    expected = [weight_grads(model, x) for x in batches]
    with ebbtide.enable_activation_offloading(model, policy=policy, min_bytes=0, window=1) as handle:

        def train(number: int) -> None:
            for _ in range(STEPS):
                assert all(map(same_bits, expected[number], weight_grads(model, batches[number])))

        at_once(lambda: train(0), lambda: train(1))
        assert_nothing_left(handle._engine)


@POLICY
def test_contexts_of_two_threads_take_engines_over(policy: str) -> None:
    """Two graphs of each thread live at a time, and share their engines on disk with those of the other."""
    models, batches = [gated_model(), gated_model()], [torch.randn(32, WIDTH) for _ in range(2)]
    expected = [weight_grads(m, x) for m, x in zip(models, batches, strict=True)]

    def train(number: int) -> None:
        weights, losses = list(models[number].parameters()), list[Tensor]()
        for step in range(STEPS):
            with ebbtide.offload_saved_tensors(policy=policy, target="disk", min_bytes=0, window=1):
                losses.append(models[number](batches[number]).square().sum())
            if len(losses) > 2:
                got = torch.autograd.grad(losses.pop(step % 2), weights)
                assert all(map(same_bits, expected[number], got))

    at_once(lambda: train(0), lambda: train(1))


def test_one_decorated_function_in_two_threads_closes_the_hooks_of_each() -> None:
    inside, left = threading.Barrier(2), threading.Event()

    @ebbtide.offload_saved_tensors(target="disk", min_bytes=0)
    def forward(x: Tensor, first: bool) -> Tensor:
        y = x.exp().sin()
        inside.wait(30)
        assert first or left.wait(30)
        return y.sum()

    def train(first: bool) -> None:
        x = leaf(8, 8)
        loss = forward(x, first)
        assert hooks_are_closed()
        if first:
            left.set()
        loss.backward()
        assert x.grad is not None and same_bits(x.grad, (x.exp().cos() * x.exp()).detach())

    at_once(lambda: train(True), lambda: train(False))


@POLICY
def test_forward_in_one_thread_and_backward_in_another(policy: str) -> None:
    model, x = gated_model(), torch.randn(32, WIDTH)
    expected = weight_grads(model, x)
    with ebbtide.enable_activation_offloading(model, policy=policy, min_bytes=0, window=1, verify=True) as handle:
        for _ in range(3):
            loss = in_thread(lambda: model(x).square().sum())
            got = in_thread(lambda loss=loss: list(torch.autograd.grad(loss, list(model.parameters()))))
            del loss
            assert all(map(same_bits, expected, got))
            assert_nothing_left(handle._engine)


@POLICY
def test_forwards_run_while_backwards_run(policy: str) -> None:
    """A pipeline: one thread makes graphs, another runs their backwards, two graphs are queued."""
    model, batches = gated_model(), [torch.randn(32, WIDTH) for _ in range(2)]
    expected = [weight_grads(model, x) for x in batches]
    between: queue.Queue[tuple[int, Tensor]] = queue.Queue(2)
    with ebbtide.enable_activation_offloading(model, policy=policy, min_bytes=0, window=1) as handle:

        def forwards() -> None:
            for step in range(2 * STEPS):
                between.put((step % 2, model(batches[step % 2]).square().sum()), timeout=30)

        def backwards() -> None:
            for _ in range(2 * STEPS):
                number, loss = between.get(timeout=30)
                got = torch.autograd.grad(loss, list(model.parameters()))
                del loss
                assert all(map(same_bits, expected[number], got))

        at_once(forwards, backwards)
        assert_nothing_left(handle._engine)


class _Watched:
    """A slot that checks, when it is freed, whether its entry can still be reached."""

    def __init__(self, slot: Any, look: Callable[[Any], None]) -> None:
        self._slot, self._look = slot, look

    def free(self) -> None:
        self._look(self)
        self._slot.free()

    def __del__(self) -> None:
        self._look(self)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._slot, name)


def test_an_entry_that_is_dying_is_found_by_nobody() -> None:
    """Another thread that found it would read a free slot, or resurrect the entry."""
    x = leaf(6, 8)
    with open_engine("offload", rate=1e12, window_bytes=1) as engine:
        copy_out_all, reachable, runs = engine.tier.copy_out_all, [], []

        def look(slot: Any) -> None:
            reachable.extend(e.site for run in runs for r in run.entries if (e := r()) is not None and e.slot is slot)

        def watched(sources: Any, **given: Any) -> Any:
            return [_Watched(slot, look) for slot in copy_out_all(sources, **given)]

        engine.tier.copy_out_all = watched  # type: ignore[method-assign]
        with forward_pass(engine, x) as run:
            y = x.cumsum(0).sin()
        runs.append(run)
        del y, run
        assert not reachable


@POLICY
def test_a_graph_that_dies_in_another_thread(policy: str) -> None:
    x, w = leaf(16, WIDTH), leaf(WIDTH, WIDTH, parameter=True)
    with open_engine(policy, "disk") as engine:
        graphs: queue.Queue[Tensor | None] = queue.Queue(3)

        def drops() -> None:
            while (y := graphs.get(timeout=30)) is not None:
                del y

        def makes() -> None:
            for _ in range(3 * STEPS):
                with forward_pass(engine, x, weights=[w]):
                    graphs.put((x.cumsum(0).exp() @ w).sigmoid(), timeout=30)
            graphs.put(None, timeout=30)

        at_once(makes, drops)
        assert_nothing_left(engine)


@POLICY
def test_two_threads_go_backward_over_one_graph(policy: str) -> None:
    model, x = gated_model(), torch.randn(32, WIDTH)
    weights = list(model.parameters())
    with ebbtide.enable_activation_offloading(model, policy=policy, min_bytes=0, window=1) as handle:
        loss = model(x).square().sum()
        expected = torch.autograd.grad(loss, weights, retain_graph=True)

        graph = [loss]
        del loss

        def backwards() -> None:
            for _ in range(STEPS):
                assert all(map(same_bits, expected, torch.autograd.grad(graph[0], weights, retain_graph=True)))

        at_once(backwards, backwards)
        graph.clear()
        assert_nothing_left(handle._engine)


class Scaled(torch.nn.Module):
    """Reads an attribute; in two threads its forwards overlap if they can."""

    scale = 1.0

    def __init__(self) -> None:
        super().__init__()
        self.linear = torch.nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        if (events := OVERLAP.get(threading.current_thread().name)) is not None:
            events[0].set()
            events[1].wait(0.2)
        for _ in range(4):
            x = torch.special.i0e(x)
        return self.linear(x) * self.scale


OVERLAP: dict[str, tuple[threading.Event, threading.Event]] = {}
"""By thread: an event to set, and one to wait for, unless that takes too long."""


def test_second_forwards_in_two_threads_restore_one_after_the_other() -> None:
    """The one that began last would end last, and permanently restore the other's temporary setting."""
    block = Scaled()
    model = torch.nn.Sequential(torch.nn.Linear(WIDTH, WIDTH), block)
    first_in, second_in, first_done = threading.Event(), threading.Event(), threading.Event()
    with ebbtide.enable_activation_offloading(model, blocks="1", policy="minimal", min_bytes=0) as handle:
        losses: list[Tensor] = []
        for scale in (1.0, 2.0, 3.0, 4.0):
            block.scale = scale
            losses.append(model(torch.ones(8, WIDTH)).square().sum())
        assert handle.stats().checkpointed_blocks == 1
        block.scale = 5.0
        OVERLAP.update(first=(first_in, second_in), second=(second_in, first_done))
        first = threading.Thread(target=losses[2].backward, name="first")
        second = threading.Thread(target=losses[3].backward, name="second")
        first.start()
        assert first_in.wait(30)
        second.start()
        first.join(30)
        first_done.set()
        second.join(30)
        OVERLAP.clear()
        assert not first.is_alive() and not second.is_alive() and block.scale == 5.0
