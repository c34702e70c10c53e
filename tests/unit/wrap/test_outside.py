"""Changes that a checkpointed block makes outside of its modules, and functions that read saved tensors twice."""

from __future__ import annotations

import copy
import functools
import itertools
import threading
import types
import weakref
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, ClassVar

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
from tests.unit.wrap.test_second_forward import hard

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


class Counts(Block):
    def note(self, x: Tensor) -> None:
        STATS["calls"] = STATS.get("calls", 0) + 1


class Adds(Block):
    def note(self, x: Tensor) -> None:
        LOSSES.append(x.square().mean())


class Fills(Block):
    def note(self, x: Tensor) -> None:
        if x.shape[0] not in CACHE:
            CACHE[x.shape[0]] = torch.ones(WIDTH)


class Owner:
    """Has a forward hook that counts."""

    def __init__(self) -> None:
        self.calls = 0

    def hook(self, *given: Any) -> None:
        self.calls += 1


def run(kind: type[Block], steps: int = 6, blocks: int = 3, **given: Any) -> tuple[list[Tensor], str]:
    """Train; return the gradients of the last step, and the plan's actions on blocks."""
    STATS.clear()
    LOSSES.clear()
    CACHE.clear()
    torch.manual_seed(0)
    model = nn.Sequential(*(kind() for _ in range(blocks)))
    x = torch.randn(16, WIDTH)
    given |= {"blocks": ["*"]} if given else {}
    handle = ebbtide.enable_activation_offloading(model, min_bytes=0, **given) if given else None
    for _ in range(steps):
        model.zero_grad()
        LOSSES.clear()
        loss = model(x).square().mean() + sum(LOSSES) / (1 + STATS.get("calls", 0))
        loss.backward()
    said = "" if handle is None else f"checkpointed: {handle.stats().checkpointed_blocks}"
    if handle is not None:
        handle.close()
    return [p.grad for p in model.parameters() if p.grad is not None], said


@pytest.mark.parametrize(("kind", "checkpointed"), [(Block, 3), (Fills, 3), (Counts, 0), (Adds, 0)])
def test_a_kind_that_changes_what_is_outside_is_not_checkpointed(kind: type[Block], checkpointed: int) -> None:
    plain, _ = run(kind)
    ours, said = run(kind, enable_ckpt=True)
    assert all(map(same_bits, ours, plain)) and said == f"checkpointed: {checkpointed}"


class Inherits(Counts):
    """Has no code of its own."""


@pytest.mark.parametrize(("blocks", "kind"), [(1, Counts), (2, Inherits), (1, Inherits)])
def test_a_lone_block_or_an_inherited_forward_is_not_checkpointed_either(blocks: int, kind: type[Block]) -> None:
    given: dict[str, Any] = {"blocks": blocks, "steps": 6}
    plain, _ = run(kind, **given)
    ours, said = run(kind, enable_ckpt=True, **given)
    assert all(map(same_bits, ours, plain)) and said == "checkpointed: 0"


STACK: list[int] = []
SPOT = SimpleNamespace(flag=False)
ENDS = SimpleNamespace(of=SimpleNamespace(forwards=0))
"""Too far inside to be found."""


class Ends(Block):
    """Counts how often its end is reached."""

    def forward(self, x: Tensor) -> Tensor:
        self.begin()
        y = hard(x + hard(self.a(x)))
        self.end()
        ENDS.of.forwards += 1
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


class Hooked(Ends):
    """Its last module has hooks, of which an exception skips the later one."""

    def __init__(self) -> None:
        super().__init__()
        self.last = Hard()
        self.last.register_forward_pre_hook(lambda *_: STACK.append(1))
        self.last.register_forward_hook(_pop)

    def forward(self, x: Tensor) -> Tensor:
        y = self.last(x + hard(self.a(x)))
        ENDS.of.forwards += 1
        return y


class Hard(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return hard(x)


def _pop(*_: Any) -> None:
    STACK.pop()


DEPTH = 0


@pytest.mark.parametrize(("kind", "ends"), [(Ends, 1), (Pushes, 2), (Raises, 2), (CountsDepth, 2), (Hooked, 2)])
def test_what_a_block_changes_back_at_its_end_is_changed_back_in_its_second_forward(
    kind: type[Block], ends: int
) -> None:
    """Other blocks are cut off after their last saved tensor."""
    plain, _ = run(kind)
    ours, said = run(kind, enable_ckpt=True)
    assert all(map(same_bits, ours, plain)) and said == "checkpointed: 3"
    assert (STACK, SPOT.flag, DEPTH) == ([], False, 0)
    model, x = nn.Sequential(*(kind() for _ in range(3))), torch.randn(4, WIDTH)
    with ebbtide.enable_activation_offloading(model, min_bytes=0, enable_ckpt=True):
        for _ in range(6):
            ENDS.of.forwards = 0
            model(x).sum().backward()
            assert (STACK, SPOT.flag, DEPTH) == ([], False, 0)
        assert ENDS.of.forwards == 3 * ends


def test_the_ends_of_second_forwards_are_looked_at_until_nothing_is_left_changed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    looks: list[nn.Module] = []

    def look(module: nn.Module, arrays: Any) -> Outside:
        looks.append(module)
        return Outside(module, arrays)

    x = torch.randn(4, WIDTH)
    for kind, later in ((Ends, 0), (Pushes, 3)):
        model = nn.Sequential(*(kind() for _ in range(3)))
        with ebbtide.enable_activation_offloading(model, min_bytes=0, enable_ckpt=True), monkeypatch.context() as patch:
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

    model, x = nn.Sequential(*(Last() for _ in range(3))), torch.randn(4, WIDTH)
    with ebbtide.enable_activation_offloading(model, min_bytes=0, enable_ckpt=True) as handle:
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
    model = nn.Sequential(*(kind() for _ in range(3)))
    x = torch.randn(4, WIDTH)
    try:
        with ebbtide.enable_activation_offloading(model, min_bytes=0, enable_ckpt=True) as handle:
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


def _in_a_class(block: Any, x: Tensor) -> None:
    type(block).held.append(1)


def _a_number_of_a_class(block: Any, x: Tensor) -> None:
    type(block).number += 1


def _a_number_of_the_file(block: Any, x: Tensor) -> None:
    global CALLS  # noqa: PLW0603
    CALLS += 1


def _in_a_list_that_is_built(block: Any, x: Tensor) -> None:
    [LOSSES.append(block.a.bias.detach().sum()) for _ in range(1)]


def _by_a_held_function(block: Any, x: Tensor) -> None:
    block.held_function()


def _by_an_iterator_inside(block: Any, x: Tensor) -> None:
    block.inside["counter"].send()


class _Counter:
    def __init__(self) -> None:
        self.count = itertools.count()

    def send(self) -> None:
        next(self.count)


def _by_a_held_builtin(block: Any, x: Tensor) -> None:
    block.held_builtin(x.detach().sum())


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


def _in_a_default(block: Any, x: Tensor, seen: list[float] = [0.0]) -> None:  # noqa: B006
    seen[0] += 1


def _in_a_default_by_name(block: Any, x: Tensor, *, seen: dict[str, int] = {}) -> None:  # noqa: B006
    seen["calls"] = seen.get("calls", 0) + 1


def _on_a_function(block: Any, x: Tensor) -> None:
    vars(_by_a_decorator)["calls"] = vars(_by_a_decorator).get("calls", 0) + 1


def _in_a_class_of_the_file(block: Any, x: Tensor) -> None:
    Total.calls += 1


def _in_an_object_of_the_file(block: Any, x: Tensor) -> None:
    SPACE.calls += 1


def _in_a_thread(block: Any, x: Tensor) -> None:
    LOCAL.calls = getattr(LOCAL, "calls", 0) + 1


class Total:
    calls = 0


SPACE, LOCAL = SimpleNamespace(calls=0), threading.local()

NOTES = (_in_a_class, _a_number_of_a_class, _a_number_of_the_file, _in_a_list_that_is_built, _by_a_held_function)
NOTES += (_by_a_held_builtin, _by_a_decorator, _in_a_default, _in_a_default_by_name, _on_a_function)
NOTES += (_in_a_class_of_the_file, _in_an_object_of_the_file, _in_a_thread)


@pytest.mark.parametrize("note", [*NOTES, _by_an_iterator_inside])
def test_whatever_a_block_can_count_on_it_is_not_checkpointed(note: Callable[[Any, Tensor], None]) -> None:
    owner = Owner()

    class Notes(Block):
        held: ClassVar[list[int]] = []
        number = 0

        def __init__(self) -> None:
            super().__init__()
            self.held_function, self.held_builtin = owner.hook, ADD
            self.inside = {"counter": _Counter()} if note is _by_an_iterator_inside else {}

    Notes.note = note  # pyright: ignore[reportAttributeAccessIssue]
    plain, _ = run(Notes, steps=5)
    ours, said = run(Notes, steps=5, enable_ckpt=True)
    assert all(map(same_bits, ours, plain)) and said == "checkpointed: 0"


class Lazy(dict[str, Any]):
    """Imports its values when it is listed, like the registries of transformers."""

    def keys(self) -> Any:
        raise ImportError("a package")

    values = items = __iter__ = keys


REGISTRY = Lazy(act=hard)


class Registered(Block):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(REGISTRY["act"](x))


def test_a_dictionary_of_a_class_that_lists_itself_otherwise() -> None:
    plain, _ = run(Registered)
    ours, said = run(Registered, enable_ckpt=True)
    assert all(map(same_bits, ours, plain)) and said == "checkpointed: 3"


def test_a_forward_that_was_replaced_on_a_block_is_looked_at() -> None:
    def forward(block: Any, x: Tensor) -> Tensor:
        LOSSES.append(x.square().mean())
        return Block.forward(block, x)

    class Patched(Block):
        def __init__(self) -> None:
            super().__init__()
            self.forward = types.MethodType(forward, self)

    plain, _ = run(Patched)
    ours, said = run(Patched, enable_ckpt=True)
    assert all(map(same_bits, ours, plain)) and said == "checkpointed: 0"


class Unbound:
    """A proxy that is bound later, like those of web frameworks."""

    @property
    def __dict__(self) -> Any:
        raise RuntimeError("nothing is bound")


UNBOUND: Any = Unbound()


@pytest.mark.parametrize("policy", ["auto", "minimal"])
def test_an_attribute_may_be_a_function_of_no_module_or_a_proxy_of_nothing(policy: str) -> None:
    names: dict[str, Any] = {}
    exec("def act(x): return x", names)
    assert names["act"].__module__ is None

    class Holds(Block):
        def __init__(self) -> None:
            super().__init__()
            owner = Owner()  # dies here
            self.act, self.trainer = names["act"], weakref.proxy(owner)

        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x) if UNBOUND is not None else x

    ours, said = run(Holds, policy=policy)
    assert all(map(same_bits, ours, run(Holds)[0])) and (policy == "auto" or said == "checkpointed: 3")


class Numbered(Block):
    count = itertools.count()

    def __init__(self) -> None:
        super().__init__()
        self.place = next(Numbered.count)


def test_an_iterator_that_only_numbers_blocks_does_not_forbid_a_second_forward() -> None:
    assert run(Numbered, enable_ckpt=True)[1] == "checkpointed: 3"


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
    plain, _ = run(Late, steps=3, blocks=8)
    ours, said = run(Late, steps=3, blocks=8, enable_ckpt=True)
    assert all(map(same_bits, ours, plain)) and said == "checkpointed: 0"


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


class Reads(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return Twice.apply(hard(self.a(x)), hard(self.b(x)))


@pytest.mark.parametrize("retain", [False, True])
def test_a_function_may_read_what_it_saved_twice(retain: bool) -> None:
    model = nn.Sequential(*(Reads() for _ in range(3)))
    twin, x = copy.deepcopy(model), torch.randn(16, WIDTH)
    with ebbtide.enable_activation_offloading(model, min_bytes=0, enable_ckpt=True) as handle:
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


ATTENDED = SimpleNamespace(run=SimpleNamespace(orders=()))
"""Too far inside to be found."""


class Attends(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        ATTENDED.run.orders += (torch._C._get_sdp_priority_order(),)
        y = F.scaled_dot_product_attention(x, x, x)
        return hard(self.layer(x + y))


def test_a_second_forward_tries_attentions_kernels_in_the_order_of_the_first() -> None:
    model, x = nn.Sequential(*(Attends() for _ in range(2))), torch.randn(2, 2, 4, WIDTH, requires_grad=True)
    usual = torch._C._get_sdp_priority_order()
    with ebbtide.enable_activation_offloading(model, min_bytes=0, enable_ckpt=True) as handle:
        for _ in range(4):
            ATTENDED.run.orders = ()
            with sdpa_kernel([SDPBackend.MATH, SDPBackend.FLASH_ATTENTION], set_priority=True):
                loss = model(x).sum()
            loss.backward()
        assert handle.stats().checkpointed_blocks == 2 and len(ATTENDED.run.orders) == 4
    assert len(set(map(tuple, ATTENDED.run.orders))) == 1 and ATTENDED.run.orders[0] != usual
    assert torch._C._get_sdp_priority_order() == usual


def test_a_kind_in_doubt_waits_and_one_that_changes_something_twice_is_refused(
    caplog: pytest.LogCaptureFixture,
) -> None:
    model = nn.Sequential(Block(), Block())
    with ebbtide.enable_activation_offloading(model, min_bytes=0, enable_ckpt=True) as handle:
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

    model = nn.Sequential(Block(), Block())
    for block in model:
        next(block.children()).register_forward_hook(count)
    with ebbtide.enable_activation_offloading(model, min_bytes=0, enable_ckpt=True) as handle:
        for _ in range(5):
            model(torch.randn(4, WIDTH)).sum().backward()
        assert handle.stats().checkpointed_blocks == 0
    assert calls == 10
