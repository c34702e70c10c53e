"""Several threads in one model under one handle, interleaved at fixed places."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import ebbtide
from tests.helpers.engines import POLICIES, assert_nothing_left, drain, hooks_are_closed
from tests.helpers.oracle import same_bits
from tests.helpers.parts import WIDTH, Model, Part, gated_model, linear

# ruff: noqa: B023 - functions defined in a loop are called in the same round

LIMIT = 30.0
"""Seconds until a thread that waits for another gives up."""

Meet = Callable[[], None]


def nowhere() -> None:
    """Meet no thread."""


class Threads:
    """Runs functions at the same time, one thread each, and collects their results or errors."""

    def __init__(self) -> None:
        self.names: dict[int, str] = {}

    @property
    def name(self) -> str:
        """Name of the calling thread."""
        return self.names.get(threading.get_ident(), "")

    def run(self, **work: Callable[[], Any]) -> dict[str, Any]:
        found: dict[str, Any] = {}

        def call(name: str) -> None:
            self.names[threading.get_ident()] = name
            try:
                found[name] = work[name]()
            except BaseException as error:
                found[name] = error
                drain()

        threads = [threading.Thread(target=call, args=(name,)) for name in work]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        for value in found.values():
            if isinstance(value, BaseException):
                raise value
        return found


def step(model: nn.Module, x: Tensor, *, autocast: bool = False) -> dict[str, Tensor]:
    """One forward and backward that leaves no trace in ``.grad``: other threads train the same weights.

    Autocast keeps its copies of leaves for all threads, and drops them when any thread leaves it: even without ebbtide
    bits would depend on timing.
    """
    given = x.detach().clone().requires_grad_()
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast, cache_enabled=False):
        loss = model(given).float().square().sum()
    wanted = {"input": given} | {n: p for n, p in model.named_parameters() if p.requires_grad}
    grads = torch.autograd.grad(loss, list(wanted.values()))
    return {"loss": loss.detach()} | dict(zip(wanted, grads, strict=True))


def differing(one: dict[str, Tensor], other: dict[str, Tensor]) -> list[str]:
    return [name for name in one if not same_bits(one[name], other[name])]


def attending(meet: Meet) -> Callable[..., Tensor]:
    def forward(s: Any, x: Tensor) -> Tensor:
        q, k = s.q(x), s.k(x)
        meet()
        h = (q @ k.T).softmax(-1) @ s.v(x)
        meet()
        return x + s.o(F.silu(h) * s.norm(h))

    return forward


def attending_model(meet: list[Meet], *, frozen: bool = False) -> Model:
    def make() -> Part:
        part = Part(
            attending(lambda: meet[0]()), q=linear(), k=linear(), v=linear(), o=linear(), norm=nn.LayerNorm(WIDTH)
        )
        if frozen:
            for layer in (part.q, part.k, part.v):
                layer.requires_grad_(False)
        return part

    return Model(make)


def meeting(barrier: threading.Barrier) -> Meet:
    """Return a function that synchronises two threads; a block that is recomputed in backward does not wait."""

    def meet() -> None:
        if torch._C._current_graph_task_id() == -1:
            barrier.wait()

    return meet


@pytest.fixture(autouse=True)
def no_leftovers() -> Iterator[None]:
    yield
    assert hooks_are_closed()


@pytest.mark.parametrize("frozen", [False, True], ids=["", "frozen-autocast"])
@pytest.mark.parametrize("rows", [(4, 4), (4, 7)], ids=str)
@pytest.mark.parametrize("policy", POLICIES)
def test_threads_in_step_keep_plain_trainings_bits(policy: str, rows: tuple[int, int], frozen: bool) -> None:
    meet: list[Meet] = [nowhere]
    model, threads = attending_model(meet, frozen=frozen), Threads()
    xs = [torch.randn(n, WIDTH) for n in rows]
    expected = [step(model, x, autocast=frozen) for x in xs]
    with ebbtide.enable_activation_offloading(model, policy=policy, min_bytes=0, blocks="layers.*") as handle:
        step(model, xs[0], autocast=frozen)
        for _ in range(3):
            barrier = threading.Barrier(2, timeout=LIMIT)
            meet[0] = meeting(barrier)
            found = threads.run(
                one=lambda: step(model, xs[0], autocast=frozen), other=lambda: step(model, xs[1], autocast=frozen)
            )
            assert differing(expected[0], found["one"]) == []
            assert differing(expected[1], found["other"]) == []
            meet[0] = nowhere
            assert_nothing_left(handle._engine)
        assert differing(expected[0], step(model, xs[0], autocast=frozen)) == []
        assert handle.stats().packs > 0  # a turn ends


@pytest.mark.parametrize("policy", POLICIES)
def test_modules_of_one_thread_are_not_taken_for_the_others(policy: str) -> None:
    """One thread is about to copy the frozen weight of ``q`` while the other has just begun ``k``."""
    model, threads = attending_model([nowhere], frozen=True), Threads()
    x = torch.randn(4, WIDTH)
    expected = step(model, x, autocast=True)
    with ebbtide.enable_activation_offloading(model, policy=policy, min_bytes=0, blocks="layers.*") as handle:
        step(model, x, autocast=True)  # recipes are trusted from here on
        began_q, began_k, saved = threading.Event(), threading.Event(), threading.Event()

        def before_q(*given: Any) -> None:
            if threads.name == "one" and not began_q.is_set():
                began_q.set()
                assert began_k.wait(LIMIT)

        def after_q(*given: Any) -> None:
            if threads.name == "one":
                saved.set()

        def before_k(*given: Any) -> None:
            if threads.name == "other" and not began_k.is_set():
                began_k.set()
                assert saved.wait(LIMIT)

        def other() -> dict[str, Tensor]:
            assert began_q.wait(LIMIT)
            return step(model, x, autocast=True)

        first = model.layers[0]
        first.q.register_forward_pre_hook(before_q)
        first.q.register_forward_hook(after_q)
        first.k.register_forward_pre_hook(before_k)
        found = threads.run(one=lambda: step(model, x, autocast=True), other=other)
        assert differing(expected, found["one"]) == []
        assert differing(expected, found["other"]) == []
        assert_nothing_left(handle._engine)


def test_the_second_thread_runs_without_hooks_and_one_warning_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    """The first thread's pass ends while the second is inside its first block."""
    meet: list[Meet] = [nowhere]
    model, threads = attending_model(meet), Threads()
    x = torch.randn(4, WIDTH)
    expected = step(model, x)
    with ebbtide.enable_activation_offloading(model, policy="offload", min_bytes=0, blocks="layers.*") as handle:
        for _ in range(2):
            inside, done = threading.Event(), threading.Event()
            open_, entered = threading.Event(), threading.Event()

            def wait() -> None:
                if threads.name == "one" and not open_.is_set():
                    open_.set()
                    assert inside.wait(LIMIT)
                if threads.name == "other" and not entered.is_set():
                    entered.set()
                    inside.set()
                    assert done.wait(LIMIT)

            def one() -> Any:
                try:
                    return step(model, x)
                finally:
                    done.set()

            def other() -> Any:
                assert open_.wait(LIMIT)
                found = step(model, x)
                assert handle._engine.last_pass.tally.packs == packs  # no block of it began a pass
                return found

            step(model, x)
            packs = handle.stats().packs
            meet[0] = wait
            found = threads.run(one=one, other=other)
            meet[0] = nowhere
            assert differing(expected, found["one"]) == []
            assert differing(expected, found["other"]) == []
            assert_nothing_left(handle._engine)
        assert caplog.text.count("nothing is offloaded in thread") == 1
        assert [r.levelno for r in caplog.records if "in thread" in r.message] == [logging.WARNING]


def test_threads_one_after_another_are_all_offloaded(caplog: pytest.LogCaptureFixture) -> None:
    model, threads = gated_model(), Threads()
    x = torch.randn(4, WIDTH)
    expected = step(model, x)
    with ebbtide.enable_activation_offloading(model, policy="offload", min_bytes=0, blocks="layers.*") as handle:
        step(model, x)
        packs = handle.stats().packs
        for _ in range(3):
            assert differing(expected, threads.run(one=lambda: step(model, x))["one"]) == []
            assert handle.stats().packs == packs
    assert "in thread" not in caplog.text


@pytest.mark.parametrize("error", [ValueError("no"), KeyboardInterrupt()], ids=["error", "interrupt"])
def test_a_thread_that_fails_gives_its_turn_back(error: BaseException, caplog: pytest.LogCaptureFixture) -> None:
    meet: list[Meet] = [nowhere]
    model, threads = attending_model(meet), Threads()
    x = torch.randn(4, WIDTH)
    expected = step(model, x)
    with ebbtide.enable_activation_offloading(model, policy="offload", min_bytes=0, blocks="layers.*") as handle:
        step(model, x)
        packs = handle.stats().packs

        def fail() -> None:
            raise error

        meet[0] = fail
        with pytest.raises(type(error)):
            threads.run(one=lambda: step(model, x))
        meet[0] = nowhere
        assert differing(expected, step(model, x)) == []
        assert handle.stats().packs == packs
    assert "in thread" not in caplog.text


def test_an_evaluation_during_training_changes_nothing(caplog: pytest.LogCaptureFixture) -> None:
    meet: list[Meet] = [nowhere]
    model, threads = attending_model(meet), Threads()
    x, y = torch.randn(4, WIDTH), torch.randn(7, WIDTH)
    expected = step(model, x)
    evaluated = model(y).detach()
    with ebbtide.enable_activation_offloading(model, policy="offload", min_bytes=0, blocks="layers.*") as handle:
        step(model, x)
        packs = handle.stats().packs
        barrier = threading.Barrier(2, timeout=LIMIT)
        meet[0] = meeting(barrier)

        def evaluate() -> Tensor:
            with torch.no_grad():
                return model(y)

        found = threads.run(train=lambda: step(model, x), evaluate=evaluate)
        meet[0] = nowhere
        assert differing(expected, found["train"]) == []
        assert same_bits(evaluated, found["evaluate"])
        assert handle.stats().packs == packs
    assert "in thread" not in caplog.text


@pytest.mark.parametrize("policy", POLICIES)
def test_blocks_that_threads_call_themselves(policy: str) -> None:
    meet: list[Meet] = [nowhere]
    model, threads = attending_model(meet), Threads()
    x = torch.randn(4, WIDTH)

    class OneBlock(nn.Module):
        def __init__(self, index: int) -> None:
            super().__init__()
            self.block = model.layers[index]

        def forward(self, x: Tensor) -> Tensor:
            return self.block(self.block(x))

    stages = [OneBlock(0), OneBlock(1)]
    expected = [step(stage, x) for stage in stages]
    with ebbtide.enable_activation_offloading(model, policy=policy, min_bytes=0, blocks="layers.*") as handle:
        for _ in range(3):
            barrier = threading.Barrier(2, timeout=LIMIT)
            meet[0] = meeting(barrier)
            found = threads.run(one=lambda: step(stages[0], x), other=lambda: step(stages[1], x))
            meet[0] = nowhere
            assert differing(expected[0], found["one"]) == []
            assert differing(expected[1], found["other"]) == []
            assert_nothing_left(handle._engine)


@pytest.mark.parametrize("policy", POLICIES)
def test_a_backward_in_one_thread_while_another_begins_a_pass(policy: str) -> None:
    meet: list[Meet] = [nowhere]
    model, threads = attending_model(meet), Threads()
    x = torch.randn(4, WIDTH)
    expected = step(model, x)
    with ebbtide.enable_activation_offloading(model, policy=policy, min_bytes=0, blocks="layers.*") as handle:
        for _ in range(3):
            in_backward, passed = threading.Event(), threading.Event()

            def wait(gradient: Tensor) -> None:
                if threads.name == "one":
                    in_backward.set()
                    assert passed.wait(LIMIT)

            def one() -> dict[str, Tensor]:
                hook = model.layers[1].o.weight.register_hook(wait)
                try:
                    return step(model, x)
                finally:
                    hook.remove()

            def other() -> dict[str, Tensor]:
                assert in_backward.wait(LIMIT)
                loss = model(x)
                passed.set()
                del loss
                return step(model, x)

            found = threads.run(one=one, other=other)
            assert differing(expected, found["one"]) == []
            assert differing(expected, found["other"]) == []
            assert_nothing_left(handle._engine)


@pytest.mark.parametrize("policy", ["offload", "minimal", "auto"])
def test_one_graph_of_forwards_in_two_threads(policy: str) -> None:
    """Like ``nn.parallel.parallel_apply``: a forward in each thread, one backward over all."""
    meet: list[Meet] = [nowhere]
    model, threads = attending_model(meet), Threads()
    xs = [torch.randn(4, WIDTH), torch.randn(6, WIDTH)]

    def parallel() -> list[Tensor]:
        barrier = threading.Barrier(2, timeout=LIMIT)
        meet[0] = meeting(barrier)
        outputs = threads.run(one=lambda: model(xs[0]), other=lambda: model(xs[1]))
        loss = outputs["one"].square().sum() + outputs["other"].square().sum()
        return list(torch.autograd.grad(loss, list(model.parameters())))

    expected = parallel()
    with ebbtide.enable_activation_offloading(model, policy=policy, min_bytes=0, blocks="layers.*") as handle:
        for _ in range(4):
            assert all(same_bits(a, b) for a, b in zip(expected, parallel(), strict=True))
            assert_nothing_left(handle._engine)


def test_an_error_is_not_lost_while_the_block_of_another_thread_ends() -> None:
    """Torch is between two hooks of a module that failed when the other thread takes its hooks away."""
    meet: list[Meet] = [nowhere]
    model, threads = attending_model(meet), Threads()
    barrier, ended = threading.Barrier(2, timeout=LIMIT), threading.Event()

    def fail(*_: Any) -> None:
        if threads.name == "fails":
            barrier.wait()  # the hooks of the other thread are there
            raise ValueError("of the forward")

    def stay(*_: Any) -> None:
        if threads.name == "fails":
            barrier.wait()
            assert ended.wait(LIMIT)

    def meeting_twice() -> None:
        if threads.name == "trains" and not ended.is_set() and torch._C._current_graph_task_id() == -1:
            meet[0] = nowhere
            barrier.wait()
            barrier.wait()

    def trains() -> None:
        model(x).sum()
        ended.set()

    def fails() -> None:
        with torch.no_grad(), pytest.raises(ValueError, match="of the forward"):
            model(x)

    x = torch.randn(4, WIDTH, requires_grad=True)
    q = next(part for name, part in model.named_modules() if name.endswith("layers.0.q"))
    q.register_forward_pre_hook(fail)
    q.register_forward_hook(stay, always_call=True)
    with ebbtide.enable_activation_offloading(model, policy="offload", min_bytes=0, blocks="layers.*"):
        meet[0] = meeting_twice
        threads.run(trains=trains, fails=fails)
