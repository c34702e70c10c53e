"""The second forward of a checkpointed block: run once, up to its last saved tensor, in its own context.

The results must be those of ordinary training.
"""

from __future__ import annotations

import contextlib
import gc
import itertools
import random
import threading
import weakref
from collections import defaultdict, deque
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import torch.utils.checkpoint
from torch import Tensor, nn
from torch._subclasses import FakeTensorMode
from torch.overrides import TorchFunctionMode

import ebbtide
from ebbtide.base.errors import ModifiedInPlaceError, RestoreError
from ebbtide.engine.fingerprint import Compared
from ebbtide.engine.guard import FULL_BYTES
from ebbtide.engine.trust import Trust
from ebbtide.wrap.checkpointedcall import CheckpointedCall
from ebbtide.wrap.scope import Scope
from ebbtide.wrap.state import State
from tests.helpers.oracle import same_bits
from tests.helpers.twice import Stack, hard

Act = Callable[["Model"], Any]


class Block(nn.Module):
    """Saves tensors that no rule recomputes, so that ``minimal`` checkpoints it."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(16, 16)

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(hard(self.up(x)))

    def inner(self, x: Tensor) -> Tensor:
        return x


class Model(Stack):
    """Two blocks of a kind, and their inputs."""

    def __init__(self, kind: type[Block]) -> None:
        torch.manual_seed(0)
        super().__init__(kind(), kind())
        self.x = torch.randn(8, 16)

    @property
    def grads(self) -> list[Tensor]:
        """Gradients of all weights, as copies."""
        return [p.grad.clone() for p in self.parameters() if p.grad is not None]


@contextmanager
def checkpointed(kind: type[Block]) -> Iterator[Model]:
    """Return a model under ``minimal`` after both of its blocks were checkpointed."""
    model = Model(kind)
    with ebbtide.enable_activation_offloading(model, policy="minimal", target="disk", min_bytes=0) as handle:
        for _ in range(3):
            model(model.x).square().mean().backward()
        assert handle.stats().checkpointed_blocks == 2
        model.zero_grad()
        yield model


def alike(kind: type[Block], act: Act) -> tuple[Any, int]:
    """Act on a plain and on a checkpointed model, compare gradients; return the latter's result, and its runs."""
    plain = Model(kind)
    act(plain)
    with checkpointed(kind) as model, counting() as runs:
        result = act(model)
        assert len(plain.grads) == len(model.grads) > 0
        assert all(map(same_bits, plain.grads, model.grads))
        return result, len(runs)


@contextmanager
def counting() -> Iterator[list[None]]:
    """Count the second forwards."""
    runs: list[None] = []
    run_again = CheckpointedCall._run_second_forward

    def counted(self: CheckpointedCall, *args: Any) -> None:
        runs.append(None)
        run_again(self, *args)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(CheckpointedCall, "_run_second_forward", counted)
        yield runs


def loss(model: Model) -> Tensor:
    return model(model.x).square().mean()


def test_a_backward_runs_each_block_once_and_another_backward_once_more() -> None:
    def twice(model: Model) -> None:
        out = loss(model)
        out.backward(retain_graph=True)
        out.backward()

    assert alike(Block, lambda model: loss(model).backward())[1] == 2
    assert alike(Block, twice)[1] == 4


class Parts(Block):
    """Its two halves share no saved tensor."""

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([hard(self.up(part)) for part in x.chunk(2)])


@pytest.fixture
def halves(monkeypatch: pytest.MonkeyPatch) -> list[Tensor]:
    """The latest tensors that were concatenated."""
    found: list[Tensor] = []
    real = torch.cat

    def noting(parts: Any) -> Tensor:
        found[:] = parts
        return real(parts)

    monkeypatch.setattr(torch, "cat", noting)
    return found


def test_a_group_of_backwards_runs_a_block_once(halves: list[Tensor]) -> None:
    group = getattr(torch.utils.checkpoint, "GraphExecGroup", None)
    if group is None:
        pytest.skip("this torch has no groups of backwards")
    with checkpointed(Parts) as model, counting() as runs:
        model.blocks[0](model.x)
        one, other = halves
        with group():  # like a pipeline that splits its backward
            one.sum().backward()
            other.sum().backward()
        assert len(runs) == 1
        grads = model.grads
        model.zero_grad()
        model.blocks[0](model.x).sum().backward()
        assert all(torch.allclose(a, b) for a, b in zip(grads, model.grads, strict=True))


class Autocast(Block):
    def inner(self, x: Tensor) -> Tensor:
        return torch.special.i0e((x @ self.up.weight).float())


def test_autocast_is_that_of_the_first_forward() -> None:
    def act(model: Model) -> None:
        with torch.autocast("cpu", torch.bfloat16):
            out = model(model.x)
        out.float().square().mean().backward()

    alike(Autocast, act)


def test_autocast_of_the_backward_is_not_that_of_the_second_forward() -> None:
    def act(model: Model) -> None:
        out = loss(model)
        with torch.autocast("cpu", torch.bfloat16):
            out.backward()

    alike(Autocast, act)


class NestsAutocast(Block):
    """Has nested regions of autocast, on and off, that share the cast of a weight."""

    def inner(self, x: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            with torch.autocast("cpu", torch.bfloat16):
                x = self.up(torch.tanh(x))
            with torch.autocast("cpu", enabled=False):
                x = self.up(torch.special.i0e(x.float()))
            return torch.special.i0e(self.up(x).float())


@pytest.mark.parametrize("outer", [True, False])
def test_regions_of_autocast_in_each_other(outer: bool) -> None:
    def act(model: Model) -> None:
        with torch.autocast("cpu", torch.bfloat16, enabled=outer):
            out = model(model.x)
        out.square().mean().backward()

    assert alike(NestsAutocast, act)[1] == 2


class OnDevice(Block):
    """Branches on the default device."""

    def inner(self, x: Tensor) -> Tensor:
        default = torch.empty(()).device.type
        return torch.special.i0e(x * (2.0 if default == "meta" else 3.0))


def test_the_default_device_is_that_of_the_first_forward() -> None:
    def act(model: Model) -> None:
        with torch.device("meta"):
            out = model(model.x)
        out.square().mean().backward()

    alike(OnDevice, act)


class ReplacesI0(TorchFunctionMode):
    """Replaces a function by another."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return torch.special.i1e(*args) if func is torch.special.i0e else func(*args, **(kwargs or {}))


@pytest.mark.parametrize("around_backward", [False, True])
def test_a_mode_that_replaces_functions_is_open_in_the_second_forward(around_backward: bool) -> None:
    def act(model: Model) -> None:
        mode = ReplacesI0()
        with mode:
            out = model(model.x)
        with mode if around_backward else contextlib.nullcontext():
            out.square().mean().backward()
        assert not torch._C._len_torch_function_stack()

    assert alike(Block, act)[1] == 2


class Drops(Block):
    def inner(self, x: Tensor) -> Tensor:
        return torch.special.i0e(nn.functional.dropout(x, 0.5))


def test_what_is_drawn_after_the_backward_is_what_plain_training_draws() -> None:
    drawn: list[Tensor] = []

    def act(model: Model) -> None:
        torch.manual_seed(3)
        out = loss(model)
        torch.rand(5)
        out.backward()
        drawn.append(torch.rand(5))

    alike(Drops, act)
    assert same_bits(*drawn)


class DrawsNormals(Block):
    """Each of these generators computes two normal numbers at a time, and returns the second without advancing."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x * random.gauss(1, 0.1) * float(np.random.normal(1, 0.1)))


def test_normal_numbers_that_python_and_numpy_held_back() -> None:
    after: list[tuple[float, ...]] = []

    def act(model: Model) -> None:
        random.seed(0)
        np.random.seed(0)
        for _ in range(2):
            loss(model).backward()
        after.append((random.gauss(0, 1), random.random(), np.random.normal(), np.random.random()))

    alike(DrawsNormals, act)
    assert after[0] == after[1]


class Wide(Block):
    """Its weight is too large to be compared directly."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(16, 2 * FULL_BYTES // 64)

    def inner(self, x: Tensor) -> Tensor:
        return x.unflatten(1, (16, -1)).mean(2)


@pytest.mark.parametrize(
    ("kind", "error", "match"),
    [
        (Block, ModifiedInPlaceError, "weight, buffer or attribute changed"),
        (Wide, RestoreError, r"(?s)second forward computed another .* written through \.data"),
    ],
)
def test_a_weight_that_is_written_through_data_since(kind: type[Block], error: type[Exception], match: str) -> None:
    with checkpointed(kind) as model:
        out = loss(model)
        for block in model.blocks:
            block.up.weight.data.mul_(1.1)
        with pytest.raises(error, match=match):
            out.backward()


class Catches(Block):
    """Catches every exception of its own code, and continues."""

    def inner(self, x: Tensor) -> Tensor:
        try:
            y = torch.special.i0e(x)
        except BaseException:
            y = x
        return y * 2


class RaisesAnother(Block):
    """Raises another exception in place of one of its own code."""

    def forward(self, x: Tensor) -> Tensor:
        try:
            return super().forward(x)
        except Exception as error:
            raise ValueError("a block failed") from error


class ReturnsNone(Block):
    """Returns nothing from a part in which an exception was raised, as decorators that log it do."""

    def inner(self, x: Tensor) -> Any:
        with contextlib.suppress(Exception):
            return torch.special.i0e(x)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * 2


@pytest.mark.parametrize("kind", [Catches, RaisesAnother, ReturnsNone])
def test_a_block_that_catches_every_exception(kind: type[Block]) -> None:
    alike(kind, lambda model: loss(model).backward())


def test_an_error_of_restoring_after_the_last_saved_tensor_is_raised(monkeypatch: pytest.MonkeyPatch) -> None:
    def restore(self: State, *args: Any, **kwargs: Any) -> None:
        raise MemoryError("what is current cannot be restored")

    with checkpointed(Block) as model:
        value = loss(model)
        for block in model.blocks:
            block.mark = object()  # so the second forward restores, and then the current state is restored
        calls, real = itertools.count(), State.restore
        monkeypatch.setattr(
            State, "restore", lambda self, *a, **k: (restore if next(calls) == 1 else real)(self, *a, **k)
        )
        with pytest.raises(MemoryError, match="what is current"):
            value.backward()


class Twice(torch.autograd.Function):
    """Reads its saved tensor twice, and returns it as a gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x * 1.5)
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        (one,), (other,) = ctx.saved_tensors, ctx.saved_tensors
        assert same_bits(one, other)
        return grad, one


class Gives(Block):
    def __init__(self) -> None:
        super().__init__()
        self.given = nn.Parameter(torch.zeros(8, 16))

    def inner(self, x: Tensor) -> Tensor:
        y = Twice.apply(x, self.given)
        return torch.special.i0e(Twice.apply(y, self.given))


def test_a_saved_tensor_that_is_read_twice_and_becomes_a_gradient() -> None:
    alike(Gives, lambda model: loss(model).backward())


def test_a_saved_tensor_that_is_read_outside_of_a_backward() -> None:
    def act(model: Model) -> Tensor:
        y = model.blocks[0](model.x)
        read = y.grad_fn._saved_self
        assert same_bits(read, y.grad_fn._saved_self)
        y.square().mean().backward()
        return read

    alike(Block, act)


class Differentiates(Block):
    """Takes a gradient inside its forward."""

    def inner(self, x: Tensor) -> Tensor:
        y = torch.special.i0e(x)
        (slope,) = torch.autograd.grad(y.sum(), x, create_graph=True)
        return torch.special.i1e(y) + slope.detach()


def test_a_block_that_takes_a_gradient_inside_its_forward() -> None:
    alike(Differentiates, lambda model: loss(model).backward())


class Ruins(torch.autograd.Function):
    """Its backward writes into its saved tensor."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        (saved,) = ctx.saved_tensors
        saved.mul_(2)
        return grad


class Shares(Block):
    """Two functions save a tensor, and the later one's backward writes into it."""

    def inner(self, x: Tensor) -> Tensor:
        y = torch.special.i0e(x)
        return Ruins.apply(y) + torch.special.i0e(y)


def test_a_backward_that_writes_into_a_saved_tensor_is_the_error_of_plain_training() -> None:
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss(Model(Shares)).backward()
    with pytest.raises(ModifiedInPlaceError, match="modified by an inplace operation"), unruined() as model:
        loss(model).backward()


@contextmanager
def unruined() -> Iterator[Model]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Ruins, "backward", staticmethod(lambda ctx, grad: (ctx.saved_tensors, grad)[1]))
        opened = checkpointed(Shares)
        model = opened.__enter__()
    try:
        yield model
    finally:
        opened.__exit__(None, None, None)


def test_an_output_that_is_changed_in_place_afterwards_is_the_error_of_plain_training() -> None:
    def change(model: Model) -> None:
        out = model.blocks[0](model.x).sigmoid_()
        out.sum().backward()

    class Saves(Block):
        def inner(self, x: Tensor) -> Tensor:
            return x.exp()  # saves what it returns

    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        change(Model(Saves))
    with checkpointed(Saves) as model, pytest.raises(ModifiedInPlaceError, match="modified by an inplace operation"):
        change(model)


class Ends(nn.Module):
    """Saves the last tensor of the block."""

    def forward(self, x: Tensor) -> Tensor:
        return torch.special.i0e(x)


class Deep(Block):
    def __init__(self) -> None:
        super().__init__()
        self.tail = Ends()

    def inner(self, x: Tensor) -> Tensor:
        return self.tail(x)


def test_hooks_that_are_always_called_run_where_a_second_forward_ends_early() -> None:
    depth = [0]

    def enter(module: nn.Module, args: Any) -> None:
        depth[0] += 1

    def leave(module: nn.Module, args: Any, output: Any) -> None:
        depth[0] -= 1

    with checkpointed(Deep) as model:
        model.blocks[0].tail.register_forward_pre_hook(enter)
        model.blocks[0].tail.register_forward_hook(leave, always_call=True)
        for _ in range(3):
            loss(model).backward()
        assert depth == [0]


class Reads(Block):
    """Branches on the type of its argument."""

    def inner(self, x: Tensor) -> Tensor:
        return torch.special.i0e(x)

    def forward(self, x: Tensor) -> Tensor:
        y = super().forward(x)
        made = x.grad_fn is not None and not x.is_leaf
        factor = x.scale if hasattr(x, "scale") else 2.0
        return torch.special.i0e((y * 3 if made else y) * factor)


def test_inputs_are_what_they_were() -> None:
    def act(model: Model) -> None:
        x = model.x.clone()
        x.scale = 5.0  # type: ignore[attr-defined]
        model(x).square().mean().backward()

    alike(Reads, act)


class Ignores(Block):
    """Takes a second argument, which it does not use."""

    def forward(self, x: Tensor, unused: Tensor | None = None) -> Tensor:
        return super().forward(x)


def test_an_argument_that_may_not_be_used_any_more_is_only_an_error_when_it_is_used() -> None:
    def act(model: Model) -> None:
        y = torch.ones(4, 4, requires_grad=True) * 1
        part, _ = y.split(2)
        y.mul_(2)  # from here on torch refuses every use of the part
        x = model.x
        for block in model.blocks:
            x = block(x, part)
        x.square().mean().backward()

    assert alike(Ignores, act)[1] == 2


def test_a_second_forward_may_have_to_run_to_its_end() -> None:
    ends: list[None] = []

    class Tail(Block):
        def inner(self, x: Tensor) -> Tensor:
            y = torch.special.i0e(x)
            note()
            return y * 2

    def note() -> None:
        ends.append(None)

    with checkpointed(Block) as model, pytest.MonkeyPatch.context() as patch:
        patch.setattr(Block, "inner", Tail.inner)
        for early, expected in ((True, 2), (False, 4)):
            ends.clear()
            with torch.utils.checkpoint.set_checkpoint_early_stop(early):
                out = loss(model)
            out.backward()
            assert len(ends) == expected


class Fewer(Block):
    """Saves less the second time."""

    first = True

    def inner(self, x: Tensor) -> Tensor:
        return torch.special.i0e(x) if Fewer.first else x.detach()


def test_a_second_forward_that_saves_less_is_an_error() -> None:
    with checkpointed(Fewer) as model:
        out = loss(model)
        try:
            Fewer.first = False
            with pytest.raises(RestoreError, match="its second forward saved") as raised:
                out.backward()
        finally:
            Fewer.first = True
    assert "hint:" in str(raised.value)


def test_what_a_backward_leaves_unread_goes_when_it_ends(monkeypatch: pytest.MonkeyPatch, halves: list[Tensor]) -> None:
    saved: list[weakref.ref[Tensor]] = []
    save = CheckpointedCall._save_second

    def watched(self: CheckpointedCall, tensor: Tensor) -> Tensor:
        value = tensor.untyped_storage()
        saved.append(weakref.ref(value))  # pyright: ignore[reportArgumentType]
        return save(self, tensor)

    with checkpointed(Parts) as model:
        monkeypatch.setattr(CheckpointedCall, "_save_second", watched)
        out = model.blocks[0](model.x)
        (grad,) = torch.autograd.grad(halves[0].sum(), model.blocks[0].up.bias, retain_graph=True)
        gc.collect()
        weights = {id(p.untyped_storage()) for p in model.parameters()} | {id(model.x.untyped_storage())}
        left = [s for r in saved if (s := r()) is not None and id(s) not in weights]
        assert len(saved) > 8 and not left
        (again,) = torch.autograd.grad(halves[0].sum(), model.blocks[0].up.bias)
        assert same_bits(grad, again)
        del out


class ForksTorch(Block):
    def forward(self, x: Tensor) -> Tensor:
        with torch.random.fork_rng():
            noise = torch.rand_like(x)
        return super().forward(x + noise)


class RestoresByHand(Block):
    """Draws from seeds of its own; a second forward ends before its last lines."""

    def forward(self, x: Tensor) -> Tensor:
        states = torch.get_rng_state(), random.getstate(), np.random.get_state()
        torch.manual_seed(5), random.seed(5), np.random.seed(5)
        x = super().forward(x * random.random() * float(np.random.random()) + torch.rand_like(x))
        torch.set_rng_state(states[0]), random.setstate(states[1]), np.random.set_state(states[2])
        return x


@pytest.mark.parametrize("kind", [ForksTorch, RestoresByHand])
def test_a_block_that_restores_the_generators_itself(kind: type[Block]) -> None:
    after: list[tuple[float, ...]] = []

    def act(model: Model) -> None:
        torch.manual_seed(1)
        random.seed(1)
        np.random.seed(1)
        for _ in range(2):
            (loss(model) * torch.rand(())).backward()
        after.append((random.random(), float(np.random.random()), float(torch.rand(()))))

    alike(kind, act)
    assert after[0] == after[1]


class Attends(Block):
    """Takes another path if it attends to itself."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(16, 2, dropout=0.0)

    def forward(self, q: Tensor, k: Tensor | None = None, v: Tensor | None = None) -> Tensor:
        k, v = q if k is None else k, q if v is None else v
        return super().forward(self.attention(q, k, v)[0] if q is k is v else q - k)


def test_a_tensor_that_is_given_twice_is_one_object() -> None:
    def act(model: Model) -> None:
        x = model.x
        for block in model.blocks:
            x = block(x, x, x)
        x.square().mean().backward()

    assert alike(Attends, act)[1] == 2


class Aligns(Block):
    """Saves a table whose rows are only partly written."""

    def inner(self, x: Tensor) -> Tensor:
        scores = x.reshape(4, 2, 16).log_softmax(-1)
        found = nn.functional.ctc_loss(scores, torch.tensor([[1], [2]]), torch.tensor([4, 2]), torch.tensor([1, 1]))
        return x * found


def test_a_table_that_is_written_in_part() -> None:
    torch.use_deterministic_algorithms(True, warn_only=True)  # fills uninitialised memory
    try:
        alike(Aligns, lambda model: loss(model).backward())
    finally:
        torch.use_deterministic_algorithms(False)
    alike(Aligns, lambda model: loss(model).backward())


def test_weights_that_are_updated_in_the_autocast_region_of_a_backward() -> None:
    """Casts of a second forward would be read by the next forward of the region."""

    def act(model: Model) -> list[Tensor]:
        with torch.autocast("cpu", torch.bfloat16):
            out = loss(model)
        with torch.autocast("cpu", torch.bfloat16):
            out.backward()
            with torch.no_grad():
                for weight in model.parameters():
                    weight.sub_(weight.grad)
            out = loss(model)
        out.backward()
        return model.grads

    assert alike(Block, act)[1] == 4
    assert torch.is_autocast_cache_enabled()


def test_two_steps_in_one_autocast_region() -> None:
    """Ordinary training reads the casts of the first step's weights in the second one, too."""

    def act(model: Model) -> None:
        with torch.autocast("cpu", torch.bfloat16):
            for _ in range(2):
                loss(model).backward()
                with torch.no_grad():
                    for weight in model.parameters():
                        weight.sub_(weight.grad)

    assert alike(Block, act)[1] == 4


class DropsNegatives(Block):
    """Its last operator writes its saved tensor after saving it."""

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.rrelu(hard(self.up(x)), training=True)


def test_noise_that_is_written_after_it_was_saved() -> None:
    def act(model: Model) -> None:
        for step in range(4):
            torch.manual_seed(step)
            loss(model).backward()

    assert alike(DropsNegatives, act)[1] == 8


def test_batched_gradients_over_dropout() -> None:
    def act(model: Model) -> Tensor:
        torch.manual_seed(0)
        out = model(model.x)
        several = torch.eye(out.numel()).reshape(-1, *out.shape)[:3]
        (found,) = torch.autograd.grad(
            out, model.blocks[0].up.weight, several, is_grads_batched=True, retain_graph=True
        )
        out.sum().backward()
        return found

    plain = act(Model(Drops))
    assert same_bits(alike(Drops, act)[0], plain)


def test_the_default_device_of_before_comes_back() -> None:
    from torch.utils import _device

    before = _device.CURRENT_DEVICE
    with checkpointed(Block) as model, torch.device("cpu"):
        loss(model).backward()
    assert _device.CURRENT_DEVICE is before


class Logs(Block):
    """Holds a result, with its graph, until the next forward: a metric that is not in the loss."""

    metric: Any = None
    form: Callable[[Tensor], Any] = staticmethod(lambda x: x.mean())

    def inner(self, x: Tensor) -> Tensor:
        self.metric = self.form(x)
        return x


def metric_in(form: Callable[[Tensor], Any]) -> type[Block]:
    return type("Logs", (Logs,), {"form": staticmethod(form)})


@pytest.mark.parametrize(
    "form",
    [lambda x: x.mean(), lambda x: (1, [x.mean()]), lambda x: {"mean": [{"x": (x.mean(),)}]}],
    ids=["tensor", "list in a tuple", "lists and dictionaries"],
)
def test_a_metric_with_its_graph_holds_no_block_of_earlier_steps(form: Callable[[Tensor], Any]) -> None:
    runs: list[weakref.ref[CheckpointedCall]] = []
    init = CheckpointedCall.__init__

    def noted(self: CheckpointedCall, *args: Any) -> None:
        init(self, *args)
        runs.append(weakref.ref(self))

    with checkpointed(metric_in(form)) as model, pytest.MonkeyPatch.context() as patch:
        patch.setattr(CheckpointedCall, "__init__", noted)
        for _ in range(6):
            loss(model).backward()
        gc.collect()
        assert [run() is None for run in runs[:8]] == [True] * 8
        assert all(block.metric is not None for block in model.blocks) and len(runs) == 12


class Pair(tuple[Any, ...]):
    def __new__(cls, one: Any, other: Any) -> Pair:
        return super().__new__(cls, (one, other))


@pytest.mark.parametrize(
    "form",
    [
        lambda x: deque([x.mean(), x.sum()], maxlen=2),
        lambda x: Pair(x.mean(), np.array(1.0)),
        lambda x: [np.zeros(()), defaultdict(list, x=[x.mean()])],
    ],
    ids=["deque", "tuple of its own", "array and defaultdict"],
)
def test_a_metric_in_other_containers_is_what_it_was(form: Callable[[Tensor], Any]) -> None:
    assert alike(metric_in(form), lambda model: loss(model).backward())[1] == 2


class LogsBelow(Block):
    """A module inside the block keeps a result in an attribute."""

    def inner(self, x: Tensor) -> Tensor:
        before = getattr(self.up, "metric", None)
        self.up.metric = x.mean()
        self.up.metric.scale = 2.0
        return x if before is None else x * before.scale


def test_a_module_of_the_block_may_keep_a_metric() -> None:
    assert alike(LogsBelow, lambda model: [loss(model), loss(model).backward()])[1] == 2


def test_a_metric_in_an_object_is_not_checkpointed(caplog: pytest.LogCaptureFixture) -> None:
    kind = metric_in(lambda x: SimpleNamespace(value=x.mean()))
    model = Model(kind)
    with ebbtide.enable_activation_offloading(model, policy="minimal", target="disk", min_bytes=0) as handle:
        for _ in range(4):
            loss(model).backward()
        assert handle.stats().checkpointed_blocks == 0
    assert "hold a tensor with its graph in an object" in caplog.text


class Carries(Block):
    """Reads its result of the previous forward, through its graph."""

    carries = False
    memory: Any = None

    def forward(self, x: Tensor) -> Tensor:
        if self.memory is not None:
            x = x + self.memory[0]
        x = super().forward(x)
        self.memory = (x * 2,) if self.carries else None
        return x


def test_a_gradient_flows_through_what_the_forward_before_left() -> None:
    def act(model: Model) -> None:
        for block in model.blocks:
            block.carries = True
        (loss(model) + loss(model)).backward()

    assert alike(Carries, act)[1] == 4


class Sums(Block):
    def inner(self, x: Tensor) -> Tensor:
        return torch.special.i0e(x)


class SumsAndTraces(Sums):
    """Saves fake tensors too, which a third forward must not count."""

    def forward(self, x: Tensor) -> Tensor:
        with FakeTensorMode():
            fake = torch.ones(16, requires_grad=True)
            torch.autograd.grad(fake.sin().sum(), fake)
        return super().forward(x)


@contextmanager
def varying(size: float, *, also: float = 0.0) -> Iterator[None]:
    """Let a kernel compute different bits each time, like kernels that sum in the order of their threads."""
    calls, real = itertools.count(), torch.special.i0e
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.special, "i0e", lambda x: real(x + also + size * (next(calls) % 3)))
        yield


@pytest.mark.parametrize("kind", [Sums, SumsAndTraces])
@pytest.mark.parametrize("compared", [Compared.SAMPLE, Compared.FULL])
def test_kernels_that_round_otherwise_each_time(
    compared: Compared, kind: type[Block], caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As in ordinary training, no value is the right one. From then on the kind is not checkpointed."""
    monkeypatch.setattr(Trust, "begin_block", lambda *_, **__: compared)
    plain = Model(kind)
    loss(plain).backward()
    begin, followed = Scope.begin, []
    with checkpointed(kind) as model, varying(1e-6), counting() as runs:
        monkeypatch.setattr(Scope, "begin", lambda scope, run: (followed.append(run), begin(scope, run)))
        loss(model).backward()
        for found, expected in zip(model.grads, plain.grads, strict=True):
            torch.testing.assert_close(found, expected, rtol=1e-3, atol=1e-5)
        assert len(runs) == 2
        assert not followed, "the hooks of modules would have nothing to report in a checkpointed block"
        loss(model).backward()
        assert len(runs) == 2 and len(followed) == 2
    assert caplog.text.count("compute sums in another order each time") == 1


@pytest.mark.parametrize("compared", [Compared.SAMPLE, Compared.FULL])
def test_values_that_differ_by_more_than_rounding_are_an_error(
    compared: Compared, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Trust, "begin_block", lambda *_, **__: compared)
    with checkpointed(Sums) as model, varying(0.1):
        out = loss(model)
        with pytest.raises(RestoreError, match="second forward computed another"):
            out.backward()


@pytest.mark.parametrize(("difference", "varies"), [(1e-6, 0.0), (0.1, 1e-6)])
def test_values_that_differ_once_are_an_error(difference: float, varies: float) -> None:
    """A third forward equals the second up to rounding: the kernel is not the cause."""
    with checkpointed(Sums) as model:
        out = loss(model)
        with varying(varies, also=difference), pytest.raises(RestoreError, match="second forward computed another"):
            out.backward()


GO, WENT = threading.Event(), threading.Event()


class Waits(Block):
    """Its forward during a backward stops half-way until another thread has run a forward."""

    def inner(self, x: Tensor) -> Tensor:
        result = torch.special.i0e(x)
        if torch._C._current_graph_task_id() != -1:
            GO.set()
            assert WENT.wait(60)
        torch.special.i0e(x)  # the second forward continues; backward reads the first one's tensors
        return result


def test_a_forward_while_another_thread_runs_backward() -> None:
    plain = Model(Waits)
    WENT.set()
    loss(plain).backward()
    with checkpointed(Waits) as model:
        WENT.clear(), GO.clear()
        out = loss(model)
        with ThreadPoolExecutor(1) as pool:
            backward = pool.submit(out.backward)
            assert GO.wait(60)
            loss(model)
            WENT.set()
            backward.result()
        assert all(map(same_bits, plain.grads, model.grads))
