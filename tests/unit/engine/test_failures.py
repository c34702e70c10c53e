"""Exceptions anywhere, KeyboardInterrupt included: hooks closed, nothing left, the next step right. Invariant 7."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

import ebbtide
from ebbtide.base.actions import Action
from ebbtide.base.errors import DiskFullError, ModifiedInPlaceError, RestoreError
from ebbtide.engine import Engine
from ebbtide.engine.recompute import recompute
from tests.helpers.engines import (
    POLICIES,
    REMAKE,
    TIERS,
    ByTable,
    assert_nothing_left,
    block,
    drain,
    forward_pass,
    hooks_are_closed,
    in_thread,
    leaf,
    open_engine,
)
from tests.helpers.oracle import same_bits
from tests.helpers.slots import copy_out

ERRORS = [RuntimeError, KeyboardInterrupt, SystemExit, MemoryError]


class Bomb:
    """Raises once, at the ``when``-th call."""

    def __init__(self, error: type[BaseException], when: int = 0) -> None:
        self.error, self.when, self.calls = error, when, 0

    def __call__(self) -> None:
        self.calls += 1
        if self.calls == self.when + 1:
            raise self.error("planted")


def around(bomb: Callable[[], None], call: Callable[..., Any]) -> Callable[..., Any]:
    def first(*args: Any, **kwargs: Any) -> Any:
        bomb()
        return call(*args, **kwargs)

    return first


class Tick(torch.autograd.Function):
    """Calls a function in its forward or its backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, now: Callable[[], None] | None, later: Callable[[], None] | None) -> Tensor:
        ctx.later = later
        if now is not None:
            now()
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        if ctx.later is not None:
            ctx.later()
        return grad, None, None


def step(engine: Engine, x: Tensor, w: Tensor, *, now: Any = None, later: Any = None, thread: bool = False) -> Tensor:
    x.grad = None
    with forward_pass(engine, x, weights=[w]):
        y = F.silu(x @ w) * torch.sigmoid(x.cumsum(0))
        y = Tick.apply(y, now, later)
        y = y.exp() * F.layer_norm(y, (8,))
    loss = y.sum()
    del y
    in_thread(loss.backward) if thread else loss.backward()
    assert x.grad is not None
    return x.grad.clone()


def plain(x: Tensor, w: Tensor) -> Tensor:
    y = F.silu(x @ w) * torch.sigmoid(x.cumsum(0))
    y = Tick.apply(y, None, None)
    return torch.autograd.grad((y.exp() * F.layer_norm(y, (8,))).sum(), x)[0]


@pytest.fixture
def data() -> Iterator[tuple[Tensor, Tensor, Tensor]]:
    x, w = leaf(6, 8), leaf(8, 8, parameter=True)
    yield x, w, plain(x, w)


def assert_recovers(engine: Engine, data: tuple[Tensor, Tensor, Tensor]) -> None:
    x, w, expected = data
    assert hooks_are_closed()
    drain()
    assert_nothing_left(engine)
    for _ in range(2):
        assert same_bits(step(engine, x, w), expected)
        assert hooks_are_closed() and not engine.restorer.backwards
        assert_nothing_left(engine)


def attempt(error: type[BaseException], work: Callable[[], Any]) -> None:
    """Run code that must raise; leave nothing of the traceback behind."""
    try:
        work()
    except error as raised:
        assert "planted" in str(raised)
        return
    raise AssertionError(f"{error.__name__} was not raised")


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("error", ERRORS)
@pytest.mark.parametrize("where", ["forward", "backward", "thread"])
def test_an_exception_of_the_model(
    where: str, error: type[BaseException], policy: str, data: tuple[Tensor, Tensor, Tensor]
) -> None:
    x, w, expected = data
    with open_engine(policy, rate=100.0) as engine:
        assert same_bits(step(engine, x, w), expected)
        bomb = Bomb(error)
        given: dict[str, Any] = {"now": bomb} if where == "forward" else {"later": bomb, "thread": where == "thread"}
        attempt(error, lambda: step(engine, x, w, **given))
        assert_recovers(engine, data)


@pytest.mark.parametrize("error", ERRORS)
@pytest.mark.parametrize("when", [0, 1, 3])
@pytest.mark.parametrize("hook", ["pack", "unpack", "__init__", "end_block", "restorer.begin_block", "restorer.read"])
def test_an_exception_in_a_hook(
    hook: str, when: int, error: type[BaseException], data: tuple[Tensor, Tensor, Tensor], monkeypatch: Any
) -> None:
    from ebbtide.engine.restore import Restorer
    from ebbtide.engine.run import BlockRun

    x, w, expected = data
    part, _, name = hook.rpartition(".")
    owner: Any = Restorer if part else BlockRun if hook in ("pack", "__init__") else Engine
    with open_engine(REMAKE, rate=100.0) as engine:
        assert same_bits(step(engine, x, w), expected)
        bomb = Bomb(error, when)
        with monkeypatch.context() as patch:
            patch.setattr(owner, name, around(bomb, getattr(owner, name)))
            try:
                step(engine, x, w)
            except error:
                pass
            else:
                assert bomb.calls <= when, "it was raised and swallowed"
        assert when or bomb.calls, "the hook is never called"
        assert_recovers(engine, data)


@pytest.mark.parametrize("error", [KeyboardInterrupt, RuntimeError])
@pytest.mark.parametrize("when", range(6))
@pytest.mark.parametrize("place", ["Ticket", "Entry", "Layout.of", "byte_view", "evaluate", "Expr"])
def test_an_exception_in_the_middle_of_a_hook(
    place: str, when: int, error: type[BaseException], data: tuple[Tensor, Tensor, Tensor], monkeypatch: Any
) -> None:
    """Half-made tickets and entries die silently."""
    from ebbtide.engine import admit as admit_module
    from ebbtide.engine import recompute as recompute_module
    from ebbtide.engine.layout import Layout
    from ebbtide.engine.tickets import Entry, Ticket

    x, w, expected = data
    bomb = Bomb(error, when)
    with open_engine(REMAKE, rate=100.0, verify=place == "byte_view") as engine:
        with monkeypatch.context() as patch:
            if place in ("Ticket", "Entry"):
                kind = {"Ticket": Ticket, "Entry": Entry}[place]
                patch.setattr(kind, "__init__", around(bomb, kind.__init__))
            elif place == "Layout.of":
                patch.setattr(Layout, "of", staticmethod(around(bomb, Layout.of)))
            elif place == "Expr":
                patch.setattr(ebbtide.engine.Expr, "__init__", around(bomb, ebbtide.engine.Expr.__init__))
            else:
                home = recompute_module if place == "evaluate" else admit_module
                patch.setattr(home, place, around(bomb, getattr(home, place)))
            try:
                got = step(engine, x, w)
            except error:
                pass
            else:  # never reached, or a rule that failed: that costs a recipe, not the step
                assert same_bits(got, expected)
        assert when or bomb.calls, "the place is never reached"
        assert_recovers(engine, data)


@pytest.mark.parametrize("tier", TIERS)
@pytest.mark.parametrize("when", [0, 1, 2])
@pytest.mark.parametrize("call", ["copy_out_all", "take", "prefetch", "wait_copied_out"])
@pytest.mark.parametrize("error", [KeyboardInterrupt, DiskFullError])
def test_an_exception_of_the_store(
    call: str, when: int, error: type[BaseException], tier: str, data: tuple[Tensor, Tensor, Tensor], monkeypatch: Any
) -> None:
    x, w, expected = data
    with open_engine("offload", tier, rate=100.0, window_bytes=200) as engine:
        slot = type(copy_out(engine.tier, torch.zeros(64, dtype=torch.uint8)))
        bomb = Bomb(error, when)
        with monkeypatch.context() as patch:
            owner: Any = slot if call == "take" else type(engine.tier)
            patch.setattr(owner, call, around(bomb, getattr(owner, call)))
            if call == "wait_copied_out":  # else only a slow disk is waited for
                patch.setattr(owner, "are_copied_out", lambda *_: False)
            try:
                got = step(engine, x, w)
            except error:
                pass
            else:
                assert same_bits(got, expected)
        assert bomb.calls > when, "the store is not called so often"
        assert_recovers(engine, data)


def sites_of(handle: ebbtide.Handle) -> list[str]:
    return [line for line in handle.explain().splitlines() if not line.startswith(("store: ", "stall: "))]


def test_a_model_that_fails_in_a_submodule_forgets_where_it_was() -> None:
    class Inner(nn.Module):
        bomb: Any = None

        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(8, 8)

        def forward(self, x: Tensor) -> Tensor:
            y = self.linear(x)
            if self.bomb is not None:
                self.bomb()
            return F.silu(y) * y

    model = nn.Sequential(*(nn.Sequential(Inner(), nn.LayerNorm(8)) for _ in range(3)))
    x = torch.randn(4, 8)

    def grads() -> list[Tensor]:
        return list(torch.autograd.grad(model(x).square().sum(), list(model.parameters())))

    expected = grads()
    for error in (KeyboardInterrupt, ValueError):
        with ebbtide.enable_activation_offloading(model, policy="minimal", min_bytes=0, window=1) as handle:
            assert all(map(same_bits, expected, grads()))
            sites = sites_of(handle)
            model[1][0].bomb = Bomb(error)
            attempt(error, grads)
            model[1][0].bomb = None
            assert hooks_are_closed()
            assert all(map(same_bits, expected, grads()))
            assert sites_of(handle) == sites and handle.stats().live_tickets == 0


@pytest.mark.parametrize("policy", ["offload", "minimal", "auto"])
@pytest.mark.parametrize("tier", TIERS)
def test_verify_sees_one_wrong_byte(policy: str, tier: str, monkeypatch: Any) -> None:
    x, w = leaf(6, 8), leaf(8, 8, parameter=True)
    with open_engine(policy, tier, rate=1e12, window_bytes=1, verify=True) as engine:
        slot = type(copy_out(engine.tier, torch.zeros(64, dtype=torch.uint8)))
        step(engine, x, w)
        intact = slot.take

        def corrupt(self: Any) -> Tensor:
            content = intact(self)
            content[17] ^= 1
            return content

        monkeypatch.setattr(slot, "take", corrupt)
        with pytest.raises(RestoreError, match=r"came back different[\s\S]*hint:"):
            step(engine, x, w)
        monkeypatch.undo()
        drain()


def test_a_note_tells_where_a_tensor_was_saved(data: tuple[Tensor, Tensor, Tensor], monkeypatch: Any) -> None:
    x, w, _ = data
    with open_engine("offload", window_bytes=1) as engine:  # each copy begins at once
        monkeypatch.setattr(
            type(engine.tier), "copy_out_all", around(Bomb(RuntimeError), type(engine.tier).copy_out_all)
        )
        with pytest.raises(RuntimeError, match="planted") as raised:
            step(engine, x, w)
        assert "while saving a [6, 8] tensor in (block) of block 'b'" in "".join(raised.value.__notes__)


@pytest.mark.parametrize("error", [MemoryError, torch.OutOfMemoryError])
@pytest.mark.parametrize("where", ["rule", "first recompute"])
def test_no_memory_says_nothing_about_a_rule(where: str, error: type[BaseException]) -> None:
    x, w = leaf(6, 8), leaf(8, 8, parameter=True)
    bomb = Bomb(error)
    with open_engine(REMAKE) as engine:
        if where == "rule":
            rule: Any = engine.rules["SigmoidBackward0"]
            rule.expression = around(bomb, rule.expression)
        else:
            engine.trusts = around(bomb, engine.trusts)  # type: ignore[method-assign]
        with pytest.raises(error, match="planted"), forward_pass(engine, x, weights=[w]):
            torch.sigmoid(x @ w).exp()
        with forward_pass(engine, x, weights=[w]):
            y = torch.sigmoid(x @ w).exp().sin()
        y.sum().backward()
        assert engine.stats().demoted_sites == () and "SigmoidBackward0" in engine.rules
        assert any(s.node == "SigmoidBackward0" for s, _ in engine.last_pass.sites)


def test_a_recompute_without_room_holds_nothing_when_it_is_tried_again(monkeypatch: Any) -> None:
    """Else it would need twice the room: of a long recipe the first attempt may have made all values but the last."""
    x, w = leaf(6, 8), leaf(8, 8, parameter=True)
    made, alive = list[weakref.ref[Tensor]](), list[bool]()
    plan = ByTable(lambda c: Action.RECOMPUTE if c.recompute_flops == 0 else Action.OFFLOAD)
    with open_engine(plan, window_bytes=1) as engine:

        def full(*given: Any) -> Tensor:
            backwards = engine.restorer.backwards.values()
            if made and not alive:
                alive.append(made[0]() is not None)
            elif not made and any(flow.ahead_bytes for b in backwards for flow in b.flows.values()):
                value = torch.zeros(1)
                made.append(weakref.ref(value))
                raise torch.OutOfMemoryError("planted")
            return recompute(*given)

        monkeypatch.setattr("ebbtide.engine.restore.recompute", full)
        for _ in range(2):
            y: Tensor = x
            engine.begin_pass()
            for index in range(4):
                with block(engine, y, weights=[w], index=index):
                    h = y @ w
                    y = F.silu(h) * h.sigmoid()
            engine.end_pass()
            del h
            y.sum().backward()
    assert alive == [False]


@pytest.mark.parametrize("kept", ["a small tensor", "a weight"])
def test_a_change_in_place_of_what_stays_names_the_block(kept: str) -> None:
    x, w = leaf(6, 8), leaf(8, 8, parameter=True)
    with open_engine("offload", min_bytes=1 << 20) as engine:
        with forward_pass(engine, x, weights=[w], name="layers.3"):
            y = x * 1
            z = (y @ w).sum() if kept == "a weight" else y.sin().sum()
        with torch.no_grad():
            (w if kept == "a weight" else y).add_(1)
        with pytest.raises(
            ModifiedInPlaceError, match=r"saved at \(block\) of block 'layers.3' \(keep\) is at version"
        ):
            z.backward()
        drain()


@pytest.mark.parametrize("block", [0, 1])
def test_a_block_that_an_interrupt_kept_from_its_hooks_holds_nothing(block: int, monkeypatch: Any) -> None:
    """Between a block's beginning and its hooks only the pass knows the run, and the run holds itself."""
    from ebbtide.engine.run import begin_block
    from ebbtide.wrap import attach
    from tests.helpers.handles import training

    begun: list[object] = []

    def struck(self: Any) -> Any:
        run = begin_block(self._engine, self._block, self._inputs)
        if len(begun) == block:
            raise KeyboardInterrupt
        begun.append(run.block.name)
        self._run = run
        saved_tensors_hooks(run.pack, self._engine.unpack).__enter__()
        return run

    with training("offload", "disk") as trainee:
        gc.collect()
        gc.disable()
        try:
            with monkeypatch.context() as patch:
                patch.setattr(attach.offloading, "__enter__", lambda self: struck(self))
                with pytest.raises(KeyboardInterrupt) as caught:
                    trainee.step()
            del caught
            assert not trainee.handle._engine.live_tickets and not trainee.handle._engine.live_entries
        finally:
            gc.enable()
        trainee.assert_recovers()
