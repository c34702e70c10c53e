"""Changes that a checkpointed block makes outside of its modules, and functions that read saved tensors twice."""

from __future__ import annotations

import copy
import functools
import itertools
import random
import threading
import types
import weakref
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

import ebbtide
from ebbtide.base.errors import RestoreError
from ebbtide.wrap.called import Called
from ebbtide.wrap.outside import Outside
from tests.helpers.oracle import same_bits
from tests.helpers.twice import hard

WIDTH = 8
STATS: dict[str, Any] = {}
LOSSES: list[Tensor] = []
CACHE: dict[int, Tensor] = {}
ADD = LOSSES.append


class Block(nn.Module):
    """Two layers and operators without a rule, so that a second forward pays."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        self.note(x)
        return x + self.b(hard(self.a(x)))

    def note(self, x: Tensor) -> None:
        pass


class Owner:
    """Has a forward hook that counts."""

    def __init__(self) -> None:
        self.calls = 0

    def hook(self, *given: Any) -> None:
        self.calls += 1


def stack(kind: Callable[[], nn.Module], blocks: int = 3) -> nn.Sequential:
    return nn.Sequential(*(kind() for _ in range(blocks)))


def enable(model: nn.Module, **given: Any) -> ebbtide.Handle:
    return ebbtide.enable_activation_offloading(model, min_bytes=0, **(given or {"enable_ckpt": True}))


def train(kind: type[Block], steps: int, blocks: int, **given: Any) -> tuple[list[Tensor], int | None]:
    """Return the gradients of the last step, and how many blocks were checkpointed in it."""
    STATS.clear()
    CACHE.clear()
    torch.manual_seed(0)
    model, x = stack(kind, blocks), torch.randn(16, WIDTH)
    handle = enable(model, blocks=["*"], **given) if given else None
    for _ in range(steps):
        model.zero_grad()
        LOSSES.clear()
        loss = model(x).square().mean() + sum(LOSSES) / (1 + STATS.get("calls", 0))
        loss.backward()
    count = None if handle is None else handle.stats().checkpointed_blocks
    if handle is not None:
        handle.close()
    return [p.grad for p in model.parameters() if p.grad is not None], count


def check(kind: type[Block], checkpointed: int | None, steps: int = 6, blocks: int = 3, **given: Any) -> None:
    """Compare training with and without checkpoints, or another policy; None: any number of blocks is checkpointed."""
    plain, _ = train(kind, steps, blocks)
    ours, count = train(kind, steps, blocks, **(given or {"enable_ckpt": True}))
    assert len(ours) == len(plain) > 0 and all(map(same_bits, ours, plain))
    assert checkpointed is None or count == checkpointed


class Counts(Block):
    def note(self, x: Tensor) -> None:
        STATS["calls"] = STATS.get("calls", 0) + 1


class Inherits(Counts):
    """Has no code of its own."""


class Adds(Block):
    def note(self, x: Tensor) -> None:
        LOSSES.append(x.square().mean())


class Fills(Block):
    def note(self, x: Tensor) -> None:
        if x.shape[0] not in CACHE:
            CACHE[x.shape[0]] = torch.ones(WIDTH)


class Patched(Block):
    """Its forward is replaced on the instance."""

    def __init__(self) -> None:
        super().__init__()
        self.forward = types.MethodType(_adds_and_runs, self)


def _adds_and_runs(block: Any, x: Tensor) -> Tensor:
    LOSSES.append(x.square().mean())
    return Block.forward(block, x)


class Numbered(Block):
    """Is numbered by an iterator, which no forward reads."""

    count = itertools.count()

    def __init__(self) -> None:
        super().__init__()
        self.place = next(Numbered.count)


class Lazy(dict[str, Any]):
    """Imports its values when it is listed, like the registries of transformers."""

    def keys(self) -> Any:
        raise ImportError("a package")

    values = items = __iter__ = keys


REGISTRY = Lazy(act=hard)


class Registered(Block):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(REGISTRY["act"](x))


@pytest.mark.parametrize(
    ("kind", "blocks", "checkpointed"),
    [
        *((kind, 3, 3) for kind in (Block, Fills, Numbered, Registered)),
        *((kind, 3, 0) for kind in (Counts, Adds, Patched)),
        *((kind, blocks, 0) for kind, blocks in ((Counts, 1), (Inherits, 2), (Inherits, 1))),
    ],
)
def test_a_kind_that_changes_what_is_outside_is_not_checkpointed(
    kind: type[Block], blocks: int, checkpointed: int
) -> None:
    check(kind, checkpointed, blocks=blocks)


STACK: list[int] = []
SPOT = SimpleNamespace(flag=False)
ENDS = SimpleNamespace(of=SimpleNamespace(all=[SimpleNamespace(forwards=0)]))
"""Too far inside to be found."""


class Ends(Block):
    """Counts how often its end is reached."""

    def forward(self, x: Tensor) -> Tensor:
        self.begin()
        y = hard(x + hard(self.a(x)))
        self.end()
        ENDS.of.all[0].forwards += 1
        return y

    def begin(self) -> None:
        pass

    def end(self) -> None:
        pass


class Pushes(Ends):
    def begin(self) -> None:
        STACK.append(1)

    def end(self) -> None:
        STACK.pop()


class Raises(Ends):
    def begin(self) -> None:
        SPOT.flag = True

    def end(self) -> None:
        SPOT.flag = False


class CountsDepth(Ends):
    def begin(self) -> None:
        global DEPTH  # noqa: PLW0603
        DEPTH += 1

    def end(self) -> None:
        global DEPTH  # noqa: PLW0603
        DEPTH -= 1


class Hard(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return hard(x)


class Hooked(Ends):
    """Its last module has hooks, of which an exception skips the later one."""

    def __init__(self) -> None:
        super().__init__()
        self.last: nn.Module = Hard()
        self.last.register_forward_pre_hook(lambda *_: STACK.append(1))
        self.last.register_forward_hook(lambda *_: (STACK.pop(), None)[1])

    def forward(self, x: Tensor) -> Tensor:
        y = self.last(x + hard(self.a(x)))
        ENDS.of.all[0].forwards += 1
        return y


DEPTH = 0


@pytest.mark.parametrize(("kind", "ends"), [(Ends, 1), (Pushes, 2), (Raises, 2), (CountsDepth, 2), (Hooked, 2)])
def test_what_a_block_changes_back_at_its_end_is_changed_back_in_its_second_forward(
    kind: type[Block], ends: int
) -> None:
    """Other blocks are cut off after their last saved tensor."""
    check(kind, 3)
    model, x = stack(kind), torch.randn(4, WIDTH)
    with enable(model):
        for _ in range(6):
            ENDS.of.all[0].forwards = 0
            model(x).sum().backward()
            assert (STACK, SPOT.flag, DEPTH) == ([], False, 0)
        assert ENDS.of.all[0].forwards == 3 * ends


def test_the_ends_of_second_forwards_are_looked_at_until_nothing_is_left_changed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    looks: list[nn.Module] = []

    def look(module: nn.Module, arrays: Any) -> Outside:
        looks.append(module)
        return Outside(module, arrays)

    x = torch.randn(4, WIDTH)
    for kind, later in ((Ends, 0), (Pushes, 3)):
        model = stack(kind)
        with enable(model), monkeypatch.context() as patch:
            for _ in range(6):
                model(x).sum().backward()
            patch.setattr("ebbtide.wrap.checkpointable.Outside", look)
            looks.clear()
            model(x).sum().backward()
            assert len(looks) == later


class PushesInside(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        STACK.append(1)
        y = hard(x)
        STACK.pop()
        return y


def test_the_end_of_a_block_with_another_module_is_looked_at_again() -> None:
    class Last(Block):
        def __init__(self) -> None:
            super().__init__()
            self.last: nn.Module = Hard()

        def forward(self, x: Tensor) -> Tensor:
            return self.last(x + hard(self.a(x)))

    model, x = stack(Last), torch.randn(4, WIDTH)
    with enable(model) as handle:
        for step in range(8):
            if step == 4:
                for block in model:
                    block.last = PushesInside()
            model(x).sum().backward()
        assert not STACK and handle.stats().checkpointed_blocks == 3


class Unwinds(Pushes):
    def forward(self, x: Tensor) -> Tensor:
        self.begin()
        try:
            return hard(x + hard(self.a(x)))
        finally:
            self.end()


@pytest.mark.parametrize(("kind", "refused"), [(Unwinds, False), (Pushes, True)])
def test_a_block_that_communicates_is_cut_off_and_what_it_leaves_changed_is_an_error(
    kind: type[Block], refused: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, x = stack(kind), torch.randn(4, WIDTH)
    try:
        with enable(model) as handle:
            model(x).sum().backward()
            loss = model(x).sum()
            # As a block of tensor parallelism: the other ranks may not come to its end.
            monkeypatch.setattr("ebbtide.wrap.checkpointable.shared_groups", lambda: [None])
            monkeypatch.setattr(handle._attachment._checkpointable, "_alone", lambda *_: False)
            if refused:
                with pytest.raises(RestoreError, match="left an object outside of its modules changed") as raised:
                    loss.backward()
                assert "hint:" in str(raised.value) and len(STACK) == 2  # one alone may have filled a cache
            else:
                loss.backward()
                assert not STACK and handle.stats().checkpointed_blocks == 3
    finally:
        STACK.clear()


CALLS = 0
SPACE, LOCAL = SimpleNamespace(calls=0), threading.local()


class Total:
    calls = 0


class Counter:
    def __init__(self) -> None:
        self.count = itertools.count()


def _a_number_of_the_file(block: Any, x: Tensor) -> None:
    global CALLS  # noqa: PLW0603
    CALLS += 1


def _adds(function: Callable[..., None]) -> Callable[..., None]:
    losses = LOSSES

    @functools.wraps(function)
    def wrapper(*arguments: Any) -> None:
        losses.append(arguments[1].detach().sum())
        function(*arguments)

    return wrapper


@_adds
def _by_a_decorator(block: Any, x: Tensor) -> None:
    pass


DEEP: dict[str, Any] = {}
PYTHON = random.Random(1)


class Slotted:
    __slots__ = ("calls",)

    def __init__(self) -> None:
        self.calls = 0

    def count(self) -> None:
        self.calls += 1


SLOTTED = Slotted()
HELPERS = types.ModuleType("helpers")
vars(HELPERS).update(
    losses=[], generators={"of": SimpleNamespace(torch=torch.Generator(), numpy=np.random.default_rng())}
)


def _rolls() -> float:
    return PYTHON.random()


def _keeps(loss: Tensor) -> None:
    DEEP.setdefault("losses", {}).setdefault("of blocks", [0]).append(loss)


def _counts_in_a_method() -> None:
    SLOTTED.count()


NOTES: dict[str, Callable[..., Any]] = {
    "a helper's list": lambda block, x: _keeps(x.detach().sum()),
    "a list of another file": lambda block, x: HELPERS.losses.append(x.detach().sum()),
    "slots": lambda block, x: _counts_in_a_method(),
    "torch's generator": lambda block, x: torch.rand(1, generator=HELPERS.generators["of"].torch),
    "numpy's generator": lambda block, x: HELPERS.generators["of"].numpy.random(),
    "Python's generator": lambda block, x: _rolls(),
    "a list of a class": lambda block, x: type(block).held.append(1),
    "a number of a class": lambda block, x: setattr(type(block), "number", type(block).number + 1),
    "a number of the file": _a_number_of_the_file,
    "a list that is built": lambda block, x: [LOSSES.append(block.a.bias.detach().sum()) for _ in range(1)],
    "a held function": lambda block, x: block.held_function(),
    "a held builtin": lambda block, x: block.held_builtin(x.detach().sum()),
    "an iterator inside": lambda block, x: next(block.inside["counter"].count),
    "a decorator": _by_a_decorator,
    "a default": lambda block, x, seen=[0.0]: seen.append(seen.pop() + 1),
    "a default by name": lambda block, x, *, seen={}: seen.update(calls=seen.get("calls", 0) + 1),
    "a function's attribute": lambda block, x: vars(_by_a_decorator).update(
        calls=vars(_by_a_decorator).get("calls", 0) + 1
    ),
    "a class of the file": lambda block, x: setattr(Total, "calls", Total.calls + 1),
    "an object of the file": lambda block, x: setattr(SPACE, "calls", SPACE.calls + 1),
    "a thread": lambda block, x: setattr(LOCAL, "calls", getattr(LOCAL, "calls", 0) + 1),
}


@pytest.mark.parametrize("note", NOTES)
def test_whatever_a_block_can_count_on_it_is_not_checkpointed(note: str) -> None:
    owner = Owner()

    class Notes(Block):
        held: ClassVar[list[int]] = []
        number = 0

        def __init__(self) -> None:
            super().__init__()
            self.held_function, self.held_builtin = owner.hook, ADD
            self.inside = {"counter": Counter()} if note == "an iterator inside" else {}

    Notes.note = NOTES[note]  # pyright: ignore[reportAttributeAccessIssue]
    check(Notes, 0, steps=5)


class Unbound:
    """A proxy that is bound later, like those of web frameworks."""

    @property
    def __dict__(self) -> Any:
        raise RuntimeError("nothing is bound")

    @property
    def __class__(self) -> Any:
        raise RuntimeError("nothing is bound")


UNBOUND: Any = Unbound()
REQUESTS = SimpleNamespace(current={"proxy": UNBOUND})


@pytest.mark.parametrize(("policy", "checkpointed"), [("auto", None), ("minimal", 3)])
def test_an_attribute_may_be_a_function_of_no_module_or_a_proxy_of_nothing(
    policy: str, checkpointed: int | None
) -> None:
    names: dict[str, Any] = {}
    exec("def act(x): return x", names)
    assert names["act"].__module__ is None

    class Holds(Block):
        def __init__(self) -> None:
            super().__init__()
            owner = Owner()  # dies here
            self.act, self.trainer = names["act"], weakref.proxy(owner)

        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x) if UNBOUND is not None and REQUESTS is not None else x

    check(Holds, checkpointed, policy=policy)


class Late(Block):
    """The first blocks of the kind lack the peculiarity of the others."""

    made = itertools.count()

    def __init__(self) -> None:
        super().__init__()
        self.number = next(Late.made) % 8

    def note(self, x: Tensor) -> None:
        if self.number >= 5:
            LOSSES.append(x.square().mean())


def test_each_block_of_a_kind_is_looked_at() -> None:
    check(Late, 0, steps=3, blocks=8)


@pytest.mark.parametrize("bind", [lambda owner: owner.hook, lambda owner: functools.partial(Owner.hook, owner)])
def test_the_owner_of_a_hook_is_looked_at(bind: Callable[[Owner], Any]) -> None:
    block, owner = Block(), Owner()
    block.a.register_forward_hook(bind(owner))
    outside = Outside(block)
    assert not outside.changed
    block(torch.randn(2, WIDTH))
    assert owner.calls == 1 and outside.changed


class Twice(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, y: Tensor) -> Tensor:
        ctx.save_for_backward(x, y)
        return x * y

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor]:
        first = ctx.saved_tensors[1]
        return gradient * first, gradient * ctx.saved_tensors[0]


class Reads(Block):
    def forward(self, x: Tensor) -> Tensor:
        return Twice.apply(hard(self.a(x)), hard(self.b(x)))


@pytest.mark.parametrize("retain", [False, True])
def test_a_function_may_read_what_it_saved_twice(retain: bool) -> None:
    model = stack(Reads)
    twin, x = copy.deepcopy(model), torch.randn(16, WIDTH)
    with enable(model) as handle:
        for _ in range(4):
            for one in (model, twin):
                one.zero_grad()
                loss = one(x).square().mean()
                loss.backward(retain_graph=retain)
                if retain:
                    loss.backward()
            pairs = zip(model.parameters(), twin.parameters(), strict=True)
            assert all(same_bits(p.grad, q.grad) for p, q in pairs)
        assert handle.stats().checkpointed_blocks == 3


ATTENDED = SimpleNamespace(run=SimpleNamespace(of=[SimpleNamespace(orders=())]))
"""Too far inside to be found."""


class Attends(Block):
    def forward(self, x: Tensor) -> Tensor:
        ATTENDED.run.of[0].orders += (torch._C._get_sdp_priority_order(),)
        y = F.scaled_dot_product_attention(x, x, x)
        return hard(self.a(x + y))


def test_a_second_forward_tries_attentions_kernels_in_the_order_of_the_first() -> None:
    model, x = stack(Attends, 2), torch.randn(2, 2, 4, WIDTH, requires_grad=True)
    usual = torch._C._get_sdp_priority_order()
    with enable(model) as handle:
        for _ in range(4):
            ATTENDED.run.of[0].orders = ()
            with sdpa_kernel([SDPBackend.MATH, SDPBackend.FLASH_ATTENTION], set_priority=True):
                loss = model(x).sum()
            loss.backward()
        assert handle.stats().checkpointed_blocks == 2 and len(ATTENDED.run.of[0].orders) == 4
    assert len(set(map(tuple, ATTENDED.run.of[0].orders))) == 1 and ATTENDED.run.of[0].orders[0] != usual
    assert torch._C._get_sdp_priority_order() == usual


def test_a_kind_in_doubt_waits_and_one_that_changes_something_twice_is_refused(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with enable(stack(Block, 2)) as handle:
        checkpointable: Any = handle._attachment._checkpointable

        def look(changed: bool) -> bool:
            checkpointable._see_outside("Block", SimpleNamespace(changed=changed))
            called = Called(Block(), (), {})
            return checkpointable._repeatable("Block", called) and "Block" not in checkpointable._in_doubt

        assert [look(changed) for changed in (False, True, False)] == [True, False, True]
        assert not caplog.records
        assert [look(changed) for changed in (True, True, False, False)] == [False] * 4
    assert "change objects outside of their modules" in caplog.text


def test_a_counter_of_an_enclosing_function() -> None:
    calls = 0

    def count(*_: Any) -> None:
        nonlocal calls
        calls += 1

    model = stack(Block, 2)
    for block in model:
        next(block.children()).register_forward_hook(count)
    with enable(model) as handle:
        for _ in range(5):
            model(torch.randn(4, WIDTH)).sum().backward()
        assert handle.stats().checkpointed_blocks == 0
    assert calls == 10
