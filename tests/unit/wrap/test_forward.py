"""Replacements on modules: a ``forward`` that changes later, code that inspects modules and their hooks."""

from __future__ import annotations

import contextlib
import copy
import functools
import gc
import itertools
import pickle
import weakref
from collections.abc import Callable
from types import MethodType
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.fx._lazy_graph_module import _use_lazy_graph_module

import ebbtide
from ebbtide.wrap.forward import StandIn
from ebbtide.wrap.scope import Scope
from tests.helpers.interrupts import interrupted_at
from tests.helpers.oracle import same_bits
from tests.helpers.twice import Stack, check, sgd, step_of

square = step_of(lambda model: model(torch.randn(8, 16)).square().mean())


class Gelu(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(16, 16), nn.Linear(16, 16)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(F.gelu(self.up(x)))


class Silu(Gelu):
    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(F.silu(self.up(x)))


class Three(nn.Module):
    """A stack that TorchScript compiles."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.third = Gelu(), Gelu(), Gelu()

    def forward(self, x: Tensor) -> Tensor:
        return self.third(self.second(self.first(x)))


def graphs() -> nn.Module:
    blocks = [torch.fx.symbolic_trace(Gelu()) for _ in range(3)]
    for block in blocks:
        for node in block.graph.nodes:
            node.type = None  # the string annotation "Tensor" cannot be pickled
        block.recompile()
    return sgd(Stack(*blocks))


def lazy_graphs() -> nn.Module:
    with _use_lazy_graph_module(True):
        return graphs()


def fresh() -> nn.Module:
    kind = type("Fresh", (Gelu,), {})
    return sgd(Stack(kind(), kind(), kind()))


# A forward that changes


def patch_the_class(model: Any) -> None:
    type(model.blocks[0]).forward = Silu.forward


def patch_by_a_static_method(model: Any) -> None:
    type(model.blocks[0]).forward = staticmethod(F.silu)


def exchange_classes(model: Any) -> None:
    for block in model.blocks:
        block.__class__ = Silu


def exchange_the_class_of_the_model(model: Any) -> None:
    class Twice(Stack):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(super().forward(x))

    model.__class__ = Twice


def edit_graphs(model: Any) -> None:
    for block in model.blocks:
        for node in block.graph.nodes:
            if node.target is F.gelu:
                node.target = F.silu
        block.recompile()


CHANGES = {
    "the class is patched": (fresh, patch_the_class),
    "the class gets a static method": (fresh, patch_by_a_static_method),
    "blocks get another class": (fresh, exchange_classes),
    "the model gets another class": (fresh, exchange_the_class_of_the_model),
    "graphs are edited": (graphs, edit_graphs),
    "graphs are compiled lazily, and edited": (lazy_graphs, edit_graphs),
}


@pytest.mark.parametrize("name", CHANGES)
def test_a_forward_that_changes_after_enabling_is_followed(name: str) -> None:
    make, change = CHANGES[name]

    def step(model: nn.Module, number: int) -> Tensor:
        if number == 3:
            change(model)
        return square(model, number)

    check(make, step)


READ = ("__name__", "__func__")
"""Attributes of what they wrap that wrappers read: functools' and accelerate's."""


@pytest.mark.parametrize(
    ("first", "read"),
    [("wrapped", "nothing"), ("stepped", "nothing"), *((f, r) for f in ("wrapped", "patched") for r in READ)],
)
def test_a_forward_that_is_wrapped_is_the_one_of_its_time(first: str, read: str) -> None:
    """The class gets another one after the blocks are wrapped, or before, with a step in between or not."""

    def wrap(model: Any) -> None:
        for block in model.blocks:
            inner = block.forward
            getattr(inner, read, None)
            block.forward = lambda x, inner=inner: 2 * inner(x)

    def step(model: nn.Module, number: int) -> Tensor:
        if number == 2:
            (wrap if first == "wrapped" else patch_the_class)(model)
        if number == (3 if first == "stepped" else 2):
            (patch_the_class if first == "wrapped" else wrap)(model)
        return square(model, number)

    check(fresh, step)


@pytest.mark.parametrize("how", ["disable", "close"])
def test_a_forward_that_changes_after_the_end_is_followed(how: str) -> None:
    model: Any = fresh()
    x = torch.randn(8, 16)
    handle = ebbtide.enable_activation_offloading(model, policy="offload", target="disk", min_bytes=0)
    model(x).sum().backward()
    getattr(handle, how)()
    assert torch.equal(model(x), Stack.forward(model, x))
    patch_the_class(model)
    expected = x
    for block in model.blocks:
        expected = Silu.forward(block, expected)
    assert torch.equal(model(x), expected)
    handle.close()


@pytest.mark.filterwarnings("ignore:functools.partial will be a method descriptor")  # of Python 3.13, without us, too
def test_accelerate_hooks_a_graph_on_its_class() -> None:
    hooks = pytest.importorskip("accelerate.hooks")
    model: Any = graphs()
    x = torch.randn(8, 16)
    expected = model(x)
    with ebbtide.enable_activation_offloading(model, policy="offload", target="disk", min_bytes=0):
        hooks.add_hook_to_module(model.blocks[0], hooks.ModelHook())
        assert torch.equal(model(x), expected)
        hooks.remove_hook_from_module(model.blocks[0])
        assert torch.equal(model(x), expected)
    assert torch.equal(model(x), expected)


@pytest.mark.filterwarnings("ignore:functools.partial will be a method descriptor")  # of Python 3.13, without us, too
def test_a_hook_of_accelerate_on_a_graphs_class_runs() -> None:
    hooks = pytest.importorskip("accelerate.hooks")

    class Doubling(hooks.ModelHook):
        def post_forward(self, module: nn.Module, output: Any) -> Any:
            return 2 * output

    model: Any = graphs()
    x = torch.randn(8, 16)
    with ebbtide.enable_activation_offloading(model, policy="offload", target="disk", min_bytes=0):
        expected = 2 * model.blocks[0](x)
        hooks.add_hook_to_module(model.blocks[0], Doubling())
        assert torch.equal(model.blocks[0](x), expected)


class Countdown(nn.Module):
    """Calls itself."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(16, 16)

    def forward(self, x: Tensor, left: int = 2) -> Tensor:
        return self(self.layer(x), left - 1) if left else x


def double(forward: Callable[..., Tensor]) -> Callable[..., Tensor]:
    def doubled(_: nn.Module, *args: Any) -> Tensor:
        return 2 * forward(*args)

    return doubled


def call_forward(_: Callable[..., Tensor]) -> Callable[..., Tensor]:
    def forward(module: Any, x: Tensor, left: int = 2) -> Tensor:
        return module.forward(3 * module.layer(x), left - 1) if left else x

    return forward


@pytest.mark.parametrize(
    "wrap",
    [double, lambda old: double(functools.partial(double(old), None)), lambda old: lambda _, *a: old(*a), call_forward],
    ids=["wrapped", "wrapped twice", "a lambda", "calls itself"],
)
@pytest.mark.parametrize("called", ["a block", "its class", "another block"])
def test_a_later_forward_of_the_class_may_call_the_one_before(wrap: Callable[..., Any], called: str) -> None:
    """A wrapper that is written into the class, around the forward of one instance."""

    def outputs(offloaded: bool) -> list[Tensor]:
        class Block(Countdown):
            pass

        torch.manual_seed(0)
        model = nn.Sequential(Block(), Block())
        with contextlib.ExitStack() as stack:
            if offloaded:
                stack.enter_context(ebbtide.enable_activation_offloading(model, policy="offload", min_bytes=0))
            x = torch.randn(8, 16, requires_grad=True)
            Block.forward = wrap(model[0].forward)
            block = model[1 if called == "another block" else 0]
            y = Block.forward(block, x) if called == "its class" else block(x)
            y.sum().backward()
            return [y.detach(), *(p.grad for p in (x, *model.parameters()) if p.grad is not None)]

    plain, offloaded = outputs(False), outputs(True)
    assert len(plain) == len(offloaded)
    assert all(map(torch.equal, plain, offloaded))


# Code that inspects modules


class Encoded(nn.Module):
    """An encoder under a head."""

    def __init__(self, tracked: bool = True) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(16, 2, 32, batch_first=True, norm_first=True)
        self.encoder, self.tracked = nn.TransformerEncoder(layer, 3, enable_nested_tensor=False), tracked
        self.head = nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 16))

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        with contextlib.nullcontext() if self.tracked else torch.no_grad():
            x = self.encoder(x, src_key_padding_mask=mask)
        return self.head(x)


class Adapted(nn.Module):
    """A block: a frozen layer of an encoder and a trained adapter."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.TransformerEncoderLayer(16, 2, 32, batch_first=True, norm_first=True).requires_grad_(False)
        self.adapter = nn.Linear(16, 16)

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        return self.adapter(self.layer(x, src_key_padding_mask=mask))


class Stacked(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Adapted() for _ in range(3))

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x.detach(), mask)
        return x


def padded() -> tuple[Tensor, Tensor]:
    return torch.randn(4, 6, 16), torch.arange(6)[None] >= torch.tensor([5, 4, 3, 5])[:, None]


def masked(model: nn.Module) -> Tensor:
    x, mask = padded()
    return model(x, mask)[~mask].square().mean()


@pytest.fixture
def fused(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """Whether gradients were on, for each layer that ran on torch's fused path."""
    calls: list[bool] = []
    fused_path = torch._transformer_encoder_layer_fwd

    def counted(*arguments: Any) -> Tensor:
        calls.append(torch.is_grad_enabled())
        return fused_path(*arguments)

    monkeypatch.setattr(torch, "_transformer_encoder_layer_fwd", counted)
    return calls


def frozen() -> nn.Module:
    model = Encoded()
    model.encoder.requires_grad_(False).eval()
    return sgd(model)


def without_gradients() -> nn.Module:
    model = Encoded(tracked=False)
    model.encoder.eval()
    return sgd(model)


def adapted() -> nn.Module:
    return sgd(Stacked().eval())


@pytest.mark.parametrize("make", [frozen, without_gradients, adapted])
@pytest.mark.parametrize("blocks", [None, ["*"]])
def test_layers_in_evaluation_take_the_fused_path(
    make: Callable[[], nn.Module], blocks: list[str] | None, fused: list[bool]
) -> None:
    check(make, step_of(masked), steps=4, **({"blocks": blocks} if blocks else {}))
    assert len(fused) == 6 * 4 * 3  # trainings, steps, layers


def test_layers_outside_the_blocks_take_the_fused_path(fused: list[bool]) -> None:
    check(frozen, step_of(masked), steps=3, blocks=["head.*"])
    assert len(fused) == 6 * 3 * 3


def test_targets_that_the_model_computes_take_the_fused_path(fused: list[bool]) -> None:
    @step_of
    def step(model: Any) -> Tensor:
        x, mask = padded()
        with torch.no_grad():
            target = model.eval()(x, mask)
        return (model.train()(x, mask) - target)[~mask].square().mean()

    check(lambda: sgd(Encoded()), step, steps=4)
    assert fused == [False] * (6 * 4 * 3)


@pytest.mark.parametrize("policy", ["minimal", "offload", "keep"])
def test_modules_have_no_hooks_between_forwards(policy: str) -> None:
    model: Any = sgd(Three())
    with ebbtide.enable_activation_offloading(model, policy=policy, target="disk", min_bytes=0) as handle:
        for number in range(3):
            square(model, number)
            assert not any(part._forward_hooks or part._forward_pre_hooks for part in model.modules())
        paths = {site.module for site, _ in handle._engine.last_pass.sites}
    assert policy != "offload" or {"up", "down"} <= paths


def test_hooks_of_a_block_that_is_closed_inside_its_forward_end_with_it() -> None:
    model: Any = sgd(Three())
    handle = ebbtide.enable_activation_offloading(model, policy="offload", target="disk", min_bytes=0)
    closing = model.second.up.register_forward_hook(lambda *_: handle.close())
    square(model, 0)
    closing.remove()
    assert not any(part._forward_hooks or part._forward_pre_hooks for part in model.modules())
    assert not any(part._forward_hooks_always_called for part in model.modules())


@pytest.mark.parametrize("policy", ["offload", "keep"])
def test_replaced_parts_are_freed_at_once_and_followed(policy: str) -> None:
    model: Any = sgd(Three())
    with ebbtide.enable_activation_offloading(model, policy=policy, target="disk", min_bytes=0) as handle:
        for number in range(3):
            square(model, number)
        old = [weakref.ref(block.up) for block in model.children()]
        for block in model.children():
            block.up = nn.Sequential(nn.Linear(16, 16), nn.Tanh())
        sgd(model)
        gc.collect()
        assert [module() for module in old] == [None] * 3
        square(model, 3)
        paths = {site.module for site, _ in handle._engine.last_pass.sites}
    assert policy != "offload" or "up.1" in paths


@pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated")
def test_a_model_is_scripted_as_it_is_alone() -> None:
    model, x = Three(), torch.randn(8, 16)
    model.third = torch.jit.script(Gelu())  # type: ignore[assignment]
    children = dict(model.named_children())
    alone = str(torch.jit.script(model).inlined_graph)
    with ebbtide.enable_activation_offloading(
        model, policy="offload", target="disk", min_bytes=0, blocks=["first", "second", "third"]
    ) as handle:
        scripted: Any = torch.jit.script(model)
        assert str(scripted.inlined_graph) == alone
        assert scripted.first.up.weight is model.first.up.weight
        assert dict(model.named_children()) == children
        (output := scripted(x)).sum().backward()
        torch.jit.script(model.first)(x).sum().backward()
        assert handle.stats().packs == 0
        assert torch.equal(model(x), output)
        assert handle.stats().packs > 0
    assert "__prepare_scriptable__" not in vars(model)


@pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated")
@pytest.mark.parametrize("own", [False, True])
def test_copies_of_a_module_with_two_replacements_have_neither(*, own: bool) -> None:
    model, x, calls = Gelu(), torch.randn(8, 16), []
    if own:
        model.forward = MethodType(Gelu.forward, model)  # type: ignore[method-assign]

    def call(forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        calls.append(forward)
        return forward(*args, **kwargs)

    expected = model(x)
    around = [StandIn(model, call), StandIn(model, call)]
    replica: Any = model._replicate_for_data_parallel()
    for copied in (torch.jit.script(model), replica, copy.copy(model), copy.deepcopy(model)):
        assert torch.equal(copied.forward(x), expected)
    assert not calls
    model(x)
    assert len(calls) == len(around)


@pytest.mark.parametrize("copied", [copy.deepcopy, copy.copy, lambda model: pickle.loads(pickle.dumps(model))])
@pytest.mark.parametrize("make", [graphs, lazy_graphs])
def test_a_copy_of_a_graph_carries_no_offloading(make: Callable[[], nn.Module], copied: Callable[..., Any]) -> None:
    model: Any = make()
    x = torch.randn(8, 16)
    with ebbtide.enable_activation_offloading(model, policy="offload", target="disk", min_bytes=0) as handle:
        twin = copied(model)
        for block in (copied(model.blocks[0]), *twin.blocks) if copied is not copy.copy else (copied(model.blocks[0]),):
            assert not any(isinstance(value, StandIn) for value in vars(block).values())
            packs = handle.stats().packs
            block(x).sum().backward()
            assert handle.stats().packs == packs
        assert same_bits(twin(x), model(x))


class Copied(Gelu):
    """Hands one of its parts to a function while it runs."""

    inside: Callable[[nn.Module], None] | None = None

    def forward(self, x: Tensor) -> Tensor:
        if self.inside is not None:
            self.inside(self.up)
        return super().forward(x)


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda part: pickle.loads(pickle.dumps(part))], ids=["copy", "file"])
def test_a_module_that_is_copied_while_its_block_runs_can_be_saved(copied: Callable[[nn.Module], nn.Module]) -> None:
    """For example by a thread that saves a checkpoint, or averages weights, at the same time."""
    model, copies = Stack(Copied(), Copied()), list[nn.Module]()
    with ebbtide.enable_activation_offloading(model, policy="offload", target="disk", min_bytes=0):
        model.blocks[0].inside = lambda part: copies.append(copied(part))  # type: ignore[assignment]
        model(torch.randn(2, 16)).sum().backward()
    x = torch.randn(2, 16)
    for one in (copies[0], pickle.loads(pickle.dumps(copies[0]))):
        assert torch.equal(one(x), F.linear(x, one.weight, one.bias))


def test_an_interrupt_at_any_line_that_adds_or_removes_hooks_leaves_none_after_close() -> None:
    for place in itertools.count(1):
        model = Stack(Gelu(), Gelu())
        handle = ebbtide.enable_activation_offloading(model, policy="offload", target="disk", min_bytes=0)
        reached = interrupted_at(place, (Scope.begin, Scope.end), lambda model=model: model(torch.randn(2, 16)))
        handle.close()
        assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules()), place
        if not reached:
            break
    assert place > 20
