"""A memo describes one kind of tensor: one that differs in any respect is analysed again."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from ebbtide.base.actions import Action, Candidate
from ebbtide.engine import Engine
from ebbtide.engine.memo import memo_of
from ebbtide.planner import plan_for
from tests.helpers.engines import (
    POLICIES,
    ByTable,
    Leaves,
    assert_nothing_left,
    block,
    compare,
    leaf,
    observe,
    open_engine,
)
from tests.helpers.torches import needs_slots

EMPTY = torch.empty(0)


def made(rows: int = 4, columns: int = 6) -> Tensor:
    return leaf_of(rows, columns).requires_grad_().sin()


def leaf_of(rows: int = 4, columns: int = 6) -> Tensor:
    return torch.linspace(0.1, 1.0, rows * columns).view(rows, columns).clone()


def within(first: int, rows: int) -> Tensor:
    """A tensor in the memory of 48 numbers, and not a view."""
    tensor = leaf_of()
    tensor.data = torch.zeros(48)[first : first + 6 * rows].view(rows, 6)
    return tensor


def changed() -> Tensor:
    tensor = made()
    tensor.detach().mul_(2)
    return tensor


def elsewhere() -> Tensor:
    view = made().view(-1)
    view.data = torch.zeros(24)
    return view


def negated() -> Tensor:
    """A tensor with the negative bit, which negates its numbers when they are read."""
    numbers = torch.zeros(24, dtype=torch.complex64).conj().imag
    assert numbers.is_neg()
    return numbers.detach()


def told_apart() -> Tensor:
    """A tensor with an attribute, which a custom function may read in its backward."""
    tensor = leaf_of()
    tensor.scale = 2.0  # type: ignore[attr-defined]
    return tensor


def not_negated() -> Tensor:
    return torch.zeros(24, dtype=torch.complex64).imag.detach()


PAIRS: dict[str, tuple[Callable[[], Tensor], Callable[[], Tensor]]] = {
    "class": (leaf_of, lambda: torch.nn.Parameter(leaf_of())),
    "element type": (leaf_of, lambda: torch.zeros(4, 6, dtype=torch.int32)),
    "strides": (leaf_of, lambda: torch.empty_strided((4, 6), (1, 4))),
    "offset": (lambda: within(0, 4), lambda: within(24, 4)),
    "device": (leaf_of, lambda: torch.empty(4, 6, device="meta")),
    "sparse": (leaf_of, lambda: torch.eye(4, 6).to_sparse()),
    "memory": (leaf_of, lambda: within(0, 4)),
    "version": (made, changed),
    "node": (made, lambda: leaf_of().requires_grad_().cos()),
    "no node": (made, leaf_of),
    "a node": (leaf_of, made),
    "a view": (lambda: made().view(-1), lambda: torch.linspace(0.1, 1.0, 24).requires_grad_().sin()),
    "no view": (lambda: torch.linspace(0.1, 1.0, 24).requires_grad_().sin(), lambda: made().view(-1)),
    "layout of the base": (lambda: made().view(-1), lambda: made(2, 12).view(-1)),
    "node of the base": (lambda: made().view(-1), lambda: leaf_of().requires_grad_().cos().view(-1)),
    "memory of the base": (lambda: made().view(-1), elsewhere),
    "class of the base": (
        lambda: leaf_of().view(-1),
        lambda: torch.nn.Parameter(leaf_of(), requires_grad=False).view(-1),
    ),
    "negated": (not_negated, negated),
    "attributes": (leaf_of, told_apart),
}


@pytest.mark.parametrize("name", PAIRS)
def test_a_memo_describes_what_is_made_alike_and_nothing_that_differs_in_one_respect(name: str) -> None:
    first, other = PAIRS[name]
    memo, again, differs = memo_of(first(), EMPTY), first(), other()
    assert memo is not None and memo.matching(again) is again.untyped_storage()
    assert memo.matching(differs) is None


OF_NO_KIND: dict[str, Callable[[], Tensor]] = {
    "changed": changed,
    "a parameter": lambda: torch.nn.Parameter(leaf_of()),
    "negated": negated,
    "complex": lambda: leaf_of().to(torch.complex64),
    "a view of other memory": elsewhere,
}


@pytest.mark.parametrize("name", OF_NO_KIND)
def test_of_some_kinds_nothing_is_remembered(name: str) -> None:
    assert memo_of(OF_NO_KIND[name](), EMPTY) is None


class _Alternates:
    """A plan that keeps everything in one step and offloads everything in the next."""

    name, recomputes = "alternates", False

    def __init__(self) -> None:
        self.action, self.asked = Action.KEEP, list[Candidate]()

    def choose(self, candidate: Candidate) -> Action:
        self.asked.append(candidate)
        return self.action

    def block_action(self, kind: str, index: int, *, input_bytes: int, must_keep_bytes: int) -> Action:
        return Action.KEEP

    def explain(self) -> str:
        return "keep, then offload"


def test_a_plan_that_may_change_is_queried_each_time() -> None:
    def program(leaves: Leaves) -> list[Tensor]:
        return [leaves["x"].sin().exp().tanh()]

    plan = _Alternates()
    with open_engine(plan, window_bytes=1) as engine:
        for plan.action in (Action.KEEP, Action.OFFLOAD, Action.KEEP, Action.OFFLOAD, Action.OFFLOAD):
            plan.asked.clear()
            observe(program, {"x": leaf(4, 6)}, engine)
            stats = engine.stats()
            assert (stats.kept_bytes, stats.offloaded_bytes) == ((288, 0) if plan.action is Action.KEEP else (0, 288))
            assert len(plan.asked) == 3 == len({candidate.site for candidate in plan.asked})
            assert_nothing_left(engine)
        assert stats.replayed == 3


class _KeepsSome(_Alternates):
    """A plan that does not change: it keeps up to a number of bytes and offloads the rest."""

    def __init__(self, most_bytes: int) -> None:
        super().__init__()
        self.most_bytes = most_bytes

    def choose(self, candidate: Candidate) -> Action:
        self.asked.append(candidate)
        return Action.KEEP if candidate.kept_bytes + candidate.nbytes <= self.most_bytes else Action.OFFLOAD

    def stands_until(self, candidate: Candidate) -> int | None:
        most = self.most_bytes - candidate.nbytes
        return most if candidate.kept_bytes <= most else None


def passes(engine: Engine, count: int) -> tuple[int, int]:
    """Return the bytes that the latest of several live passes kept and offloaded."""
    outputs: list[Tensor] = []
    for _ in range(count):
        engine.begin_pass()
        with block(engine, x := leaf(4, 6)):
            outputs.append(x.sin().exp().tanh())
        engine.end_pass()
    stats = engine.stats()
    torch.autograd.backward([output.sum() for output in outputs])
    return stats.kept_bytes, stats.offloaded_bytes


def test_a_standing_plan_is_queried_once_until_its_limit_is_reached() -> None:
    plan = _KeepsSome(288)
    with open_engine(plan, window_bytes=1) as engine:
        assert [passes(engine, 1) for _ in range(4)] == [(288, 0)] * 4
        plan.asked.clear()
        assert passes(engine, 1) == (288, 0) and not plan.asked
        assert passes(engine, 2) == (0, 288), "the first pass holds all that may be kept"
        assert passes(engine, 1) == (288, 0)
        assert_nothing_left(engine)


def test_what_one_plan_decided_does_not_stand_for_another() -> None:
    with open_engine("keep", window_bytes=1) as engine:
        for policy, expected in (("keep", (288, 0)), ("offload", (0, 288))) * 3:
            engine.plan = plan_for(POLICIES[policy])
            assert [passes(engine, 1) for _ in range(3)] == [expected] * 3


def test_a_decision_stands_only_for_a_recipe_of_the_same_work() -> None:
    """A product of the same size, which sums over another length: cheap enough to recompute, or not."""

    def program(leaves: Leaves) -> list[Tensor]:
        return [(leaves["a"] @ leaves["b"]).sin()]

    with open_engine("auto", window_bytes=1) as engine:
        for length in (2, 2, 2, 64, 64, 2, 64):
            leaves = {"a": leaf(4, length), "b": leaf(length, 6)}
            observe(program, leaves, engine)
            recomputed = {str(site) for site, action in engine.last_pass.sites if action is Action.RECOMPUTE}
            assert any("Mm" in site for site in recomputed) is (length == 2), length


@pytest.mark.parametrize("policy", ["keep", "offload", "minimal"])
def test_a_tensor_may_be_at_another_site_than_its_like(policy: str) -> None:
    """The second result of ``exp`` in one step is the first in another, and the second saved tensor in both."""
    with open_engine(policy, window_bytes=1) as engine, open_engine(policy, window_bytes=1) as anew:
        anew.replays = False
        for twice in (True, True, False, True, False):

            def program(leaves: Leaves, twice: bool = twice) -> list[Tensor]:
                x = leaves["x"]
                return [(x.exp() if twice else x.tanh()) + x.exp()]

            for each in (engine, anew):
                observe(program, {"x": leaf(4, 6)}, each)
            assert engine.last_pass.sites == anew.last_pass.sites


def two_blocks(engine: Engine, x: Tensor, *, shared: bool, outside: bool) -> Tensor:
    """The second block saves its own tensor, or, if ``shared``, a similar one that was made before.

    Args:
        outside: It was made outside of blocks; else in the first.
    """
    engine.begin_pass()
    with contextlib.nullcontext() if outside else block(engine, x, index=0):
        y = x.exp()
    with block(engine, y if outside else x, index=1):
        z = y.sin() if shared else x.exp()
    engine.end_pass()
    return z


@pytest.mark.parametrize("outside", [False, True])
@pytest.mark.parametrize("policy", ["keep", "inputs", "offload"])
def test_what_a_block_saves_may_be_of_an_earlier_one(policy: str, outside: bool) -> None:
    """Kept without an entry by the first, saved by the second in place of its own: counted once, at its site."""
    with open_engine(policy, window_bytes=1) as engine, open_engine(policy, window_bytes=1) as anew:
        anew.replays = False
        for shared in (False, False, True, True, False, True):
            x = leaf(4, 6)
            grad, expected = (
                torch.autograd.grad(two_blocks(e, x, shared=shared, outside=outside).sum(), x)[0]
                for e in (engine, anew)
            )
            plain = x.detach().requires_grad_()
            w = plain.exp().sin() if shared else plain.exp()
            assert torch.equal(grad, expected) and torch.equal(grad, torch.autograd.grad(w.sum(), plain)[0])
            assert engine.last_pass.sites == anew.last_pass.sites
            assert engine.stats().kept_bytes == anew.stats().kept_bytes
            assert engine.stats().unique_bytes == anew.stats().unique_bytes and engine.kept.total == 0


@needs_slots
def test_a_recipe_reads_what_an_earlier_block_keeps_and_its_own_block_does_not_save() -> None:
    """The second block's tensor is recomputed in every step, from a kept storage with and without an entry."""

    def program(leaves: Leaves, around: Callable[..., Any]) -> list[Tensor]:
        with around(leaves["x"]):
            kept = leaves["x"].tanh()
        with around(kept):
            return [(kept * 2).exp().sin()]

    def choose(candidate: Candidate) -> Action:
        return Action.KEEP if candidate.recompute_flops is None else Action.RECOMPUTE

    leaves = {"x": leaf(4, 6)}
    expected = observe(program, leaves, blocks=True)
    with open_engine(ByTable(choose)) as engine:
        for step in range(3):
            found = observe(program, leaves, engine, blocks=True)
            assert compare(expected, found) == [] and engine.stats().replayed == (3 if step else 0)
            assert (engine.stats().kept_bytes, engine.stats().recomputed_bytes) == (96, 96)
            assert_nothing_left(engine)


@needs_slots
def test_an_operand_that_changed_is_named_alike_with_and_without_an_entry() -> None:
    def program(leaves: Leaves) -> list[Tensor]:
        kept = leaves["x"].relu()
        made = (kept * 2).exp()
        kept.clamp_(max=0.5)
        return [made.sin()]

    def choose(candidate: Candidate) -> Action:
        return Action.KEEP if candidate.recompute_flops is None else Action.RECOMPUTE

    with open_engine(ByTable(choose)) as engine:
        messages = [observe(program, {"x": leaf(4, 6)}, engine).message for _ in range(3)]
        assert engine.stats().replayed == 4
    assert len(set(messages)) == 1 and "ReluBackward0#0 is needed to recompute another tensor" in messages[0], messages
