"""Existing checkpointing of any kind stays, and the tensors that it keeps are offloaded."""

from __future__ import annotations

import functools
import warnings
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.autograd.graph import save_on_cpu
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import (
    CheckpointImpl,
    checkpoint_wrapper,
    offload_wrapper,
)
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    checkpoint_sequential,
    create_selective_checkpoint_contexts,
)

import ebbtide
from ebbtide.base.errors import ConflictError, ModifiedInPlaceError
from ebbtide.wrap.foreign_checkpoints import checkpoint_before
from tests.helpers.engines import assert_nothing_left, hooks_are_closed
from tests.helpers.models import Attention, Mlp, Tiny, build, switch_on_checkpoints
from tests.helpers.oracle import Outcome, differences, step
from tests.helpers.torches import HOOKS_SELECTED

POLICY = pytest.mark.parametrize("policy", ["inputs", "offload", "minimal", "auto"])
LAYERS, BATCH, SEQUENCE, WIDTH = 4, 2, 12, 48
HIDDEN_BYTES = BATCH * SEQUENCE * WIDTH * 4


class Layer(nn.Module):
    """A block with dropout that counts its runs and takes a second tensor shared by all blocks."""

    def __init__(self) -> None:
        super().__init__()
        self.attention, self.mlp = Attention(dropout=0.2), Mlp()
        self.runs = 0
        self.on_run: Callable[[Tensor], None] = lambda x: None

    def forward(self, x: Tensor, scale: Tensor | None = None) -> Tensor:
        self.runs += 1
        self.on_run(x)
        y = self.mlp(self.attention(x))
        return y if scale is None else y * scale


class SelfMade(nn.Module):
    """A block that checkpoints itself, like transformers' layers."""

    def __init__(self, inner: nn.Module, **options: Any) -> None:
        super().__init__()
        self.inner, self.options = inner, options

    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        return checkpoint(self.inner, *args, **kwargs, **self.options)


def products_are_kept() -> Any:
    def policy(context: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        keep = op in (torch.ops.aten.addmm.default, torch.ops.aten.mm.default)
        return CheckpointPolicy.MUST_SAVE if keep else CheckpointPolicy.PREFER_RECOMPUTE

    return create_selective_checkpoint_contexts(policy)


NON_REENTRANT: dict[str, Any] = {"use_reentrant": False}
REENTRANT: dict[str, Any] = {"use_reentrant": True}
SELECTIVE: dict[str, Any] = {"use_reentrant": False, "context_fn": products_are_kept}
HOOKED: dict[str, Any] = {**SELECTIVE, "respect_saved_tensors_hooks": True}

Loop = Callable[[list[nn.Module], Tensor, Tensor], Tensor]


def calls(layers: list[nn.Module], x: Tensor, scale: Tensor) -> Tensor:
    for layer in layers:
        x = layer(x, scale)
    return x


def around(layers: list[nn.Module], x: Tensor, scale: Tensor, **options: Any) -> Tensor:
    """Checkpoint the call of the layer, like hand-written loops and older transformers."""
    for layer in layers:
        x = checkpoint(layer.__call__, x, scale, **options)
    return x


def around_with_a_sum(layers: list[nn.Module], x: Tensor, scale: Tensor, **options: Any) -> Tensor:
    for layer in layers:
        x = 0.5 * (x + checkpoint(layer, x, scale, **options))
    return x


def in_pairs(layers: list[nn.Module], x: Tensor, scale: Tensor, **options: Any) -> Tensor:
    for one, two in zip(layers[::2], layers[1::2], strict=True):
        x = checkpoint(lambda x, s, one=one, two=two: two(one(x, s), s), x, scale, **options)
    return x


def every_other(layers: list[nn.Module], x: Tensor, scale: Tensor, **options: Any) -> Tensor:
    for i, layer in enumerate(layers):
        x = layer(x, scale) if i % 2 else checkpoint(layer, x, scale, **options)
    return x


def in_segments(layers: list[nn.Module], x: Tensor, scale: Tensor) -> Tensor:
    return checkpoint_sequential(nn.Sequential(*layers), 2, x, use_reentrant=False)


LOOPS: dict[str, tuple[Loop, Callable[[nn.Module], nn.Module] | None]] = {
    "around": (functools.partial(around, **NON_REENTRANT), None),
    "around, reentrant": (functools.partial(around, **REENTRANT), None),
    "around, selective": (functools.partial(around, **SELECTIVE), None),
    "around, and a sum": (functools.partial(around_with_a_sum, **NON_REENTRANT), None),
    "around, reentrant, and a sum": (functools.partial(around_with_a_sum, **REENTRANT), None),
    "around pairs": (functools.partial(in_pairs, **NON_REENTRANT), None),
    "around every other": (functools.partial(every_other, **NON_REENTRANT), None),
    "around every other, reentrant": (functools.partial(every_other, **REENTRANT), None),
    "sequential": (in_segments, None),
    "inside": (calls, functools.partial(SelfMade, **NON_REENTRANT)),
    "inside, reentrant": (calls, functools.partial(SelfMade, **REENTRANT)),
    "inside, selective": (calls, functools.partial(SelfMade, **SELECTIVE)),
    **({"inside, selective, hooked": (calls, functools.partial(SelfMade, **HOOKED))} if HOOKS_SELECTED else {}),
    "wrapper": (calls, checkpoint_wrapper),
    "wrapper, reentrant": (calls, functools.partial(checkpoint_wrapper, checkpoint_impl=CheckpointImpl.REENTRANT)),
}


class Model(nn.Module):
    """Blocks, called as ``loop`` says."""

    def __init__(self, loop: Loop, wrapper: Callable[[nn.Module], nn.Module] | None = None) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        made = [Layer() for _ in range(LAYERS)]
        self.layers = nn.ModuleList(wrapper(layer) if wrapper is not None else layer for layer in made)
        self.loop = loop

    def forward(self, x: Tensor, scale: Tensor) -> Tensor:
        return self.loop(list(self.layers), self.first(x), scale)

    def own_layers(self) -> list[Layer]:
        """The layers themselves, without their checkpoint wrappers."""
        return [m for m in self.modules() if isinstance(m, Layer)]


def enable(model: nn.Module, policy: str = "inputs", **options: Any) -> ebbtide.Handle:
    return ebbtide.enable_activation_offloading(model, policy=policy, min_bytes=0, **options)


def make(name: str) -> Model:
    torch.manual_seed(0)
    return Model(*LOOPS[name])


def train(model: nn.Module) -> Outcome:
    torch.manual_seed(1)
    inputs = {"x": torch.randn(BATCH, SEQUENCE, WIDTH, requires_grad=True), "scale": torch.rand(WIDTH) + 0.5}

    def loss() -> tuple[Tensor, dict[str, Tensor]]:
        out = model(**inputs)
        return out.square().mean(), {"out": out}

    return step(model, loss, inputs)


@POLICY
@pytest.mark.parametrize("name", LOOPS)
def test_a_checkpoint_stays_and_its_gradients_too(name: str, policy: str) -> None:
    expected, model = train(make(name)), make(name)
    with enable(model, policy, window=1, verify=True) as handle:
        for _ in range(2):
            assert differences(expected, train(model)) == []
            assert hooks_are_closed()
            assert handle.stats().offloaded_bytes > 0
            assert_nothing_left(handle._engine)
        if name == "inside, selective, hooked" and policy == "offload":
            assert handle.stats().offloaded_bytes > LAYERS * 2 * HIDDEN_BYTES  # also what the checkpoint selects
    plain = make(name)
    train(plain), train(plain)
    runs = [layer.runs for layer in model.own_layers()]
    assert max(runs) == 4  # no checkpoint was doubled, and none cancelled; minimal has some of its own
    assert runs == [layer.runs for layer in plain.own_layers()] or (policy == "minimal" and min(runs) > 2)


SCALE_BYTES = WIDTH * 4
EXACT = {
    "around": LAYERS * HIDDEN_BYTES + SCALE_BYTES,  # all blocks share the scale
    "around, reentrant": (LAYERS - 1) * HIDDEN_BYTES + SCALE_BYTES,  # nothing comes after the last block
    "around, reentrant, and a sum": (LAYERS - 1) * HIDDEN_BYTES + SCALE_BYTES,
    "around pairs": LAYERS // 2 * HIDDEN_BYTES + SCALE_BYTES,
    "inside": LAYERS * HIDDEN_BYTES + SCALE_BYTES,
    "inside, reentrant": LAYERS * HIDDEN_BYTES + SCALE_BYTES,
    "wrapper": LAYERS * HIDDEN_BYTES + SCALE_BYTES,
}


@pytest.mark.parametrize("name", EXACT)
def test_what_is_offloaded_is_what_the_checkpoints_keep(name: str) -> None:
    model = make(name)
    with enable(model) as handle:
        train(model)
        stats = handle.stats()
    assert (stats.offloaded_bytes, stats.recomputed_bytes) == (EXACT[name], 0)


@pytest.mark.parametrize("name", ["around", "around, reentrant", "inside", "wrapper"])
def test_the_inputs_leave_the_device(name: str) -> None:
    model, seen = make(name), []

    def note(x: Tensor) -> None:
        if torch._C._current_graph_task_id() == -1:
            seen.append(weakref.ref(x.untyped_storage()))

    for layer in model.own_layers():
        layer.on_run = note
    with enable(model, window=1):
        out = model(torch.randn(BATCH, SEQUENCE, WIDTH, requires_grad=True), torch.ones(WIDTH))
        alive = [storage() is not None for storage in seen]
        assert alive == [False] * (LAYERS - 2) + alive[-2:]
        out.sum().backward()


@pytest.mark.parametrize("name", ["around", "around, reentrant"])
def test_a_kept_input_that_is_changed_in_place_raises(name: str) -> None:
    model, seen = make(name), []
    model.own_layers()[1].on_run = seen.append
    x, scale = torch.randn(BATCH, SEQUENCE, WIDTH, requires_grad=True), torch.ones(WIDTH)
    with enable(model):
        out = model(x, scale)
        with torch.no_grad():
            seen[0].add_(1)
        with pytest.raises(ModifiedInPlaceError, match="modified by an inplace operation"):
            out.sum().backward()
        seen.clear()
        del out
        model(x, scale).sum().backward()


@pytest.mark.parametrize("name", ["around", "around, reentrant"])
def test_a_dropped_graph_and_two_graphs_at_once(name: str) -> None:
    model, plain = make(name), make(name)
    x, scale = torch.randn(BATCH, SEQUENCE, WIDTH, requires_grad=True), torch.ones(WIDTH)

    def run(model: nn.Module) -> list[Tensor]:
        torch.manual_seed(5)
        model(x, scale)
        with torch.inference_mode(), warnings.catch_warnings(action="ignore"):
            model(x, scale)
        one, two = model(x, scale), model(2 * x, scale)
        one.sum().backward()
        two.sum().backward()
        found = [p.grad.clone() for p in model.parameters()]
        model.zero_grad()
        return found

    expected = run(plain)
    with enable(model) as handle:
        assert all(map(torch.equal, expected, run(model)))
        assert_nothing_left(handle._engine)


def test_a_retained_graph_is_read_again() -> None:
    model = make("around")
    x = torch.randn(BATCH, SEQUENCE, WIDTH, requires_grad=True)
    with enable(model) as handle:
        out = model(x, torch.ones(WIDTH))
        first = torch.autograd.grad(out.sum(), x, retain_graph=True)
        assert torch.equal(first[0], torch.autograd.grad(out.sum(), x)[0])
        del out
        assert_nothing_left(handle._engine)


def test_a_handle_switched_off_leaves_checkpoints_alone() -> None:
    model = make("around")
    expected = train(make("around"))
    with enable(model) as handle:
        handle.disable()
        assert differences(expected, train(model)) == []
        assert handle.stats().packs == 0
        handle.enable()
        assert differences(expected, train(model)) == []
        assert handle.stats().packs > 0


@pytest.mark.parametrize("name", ["around", "around, reentrant"])
def test_another_offloader_around_a_checkpoint_is_refused(name: str) -> None:
    model = make(name)
    with enable(model):
        with save_on_cpu(), pytest.raises(ConflictError, match=r"(?s)other saved-tensor hooks.*one offloader"):
            train(model)
        train(model)


@pytest.mark.parametrize("wrapper", [offload_wrapper, lambda layer: offload_wrapper(checkpoint_wrapper(layer))])
def test_blocks_in_an_offload_wrapper_are_refused(wrapper: Callable[[nn.Module], nn.Module]) -> None:
    """Like accelerate for ``activation_checkpointing_offload``: its hooks are inside ours and see everything."""
    with pytest.raises(ConflictError) as raised:
        enable(Model(calls, wrapper))
    assert str(raised.value) == (
        "block 'layers.0' is wrapped by torch's offload_wrapper; expected one offloader on a model\n"
        "hint: leave that wrapper out (accelerate: activation_checkpointing_offload=False); "
        "a checkpoint_wrapper may stay; the tensors it keeps are offloaded"
    )


def test_a_model_checkpointed_as_a_whole_is_offloaded_by_its_input() -> None:
    model = make("inside")
    x = torch.randn(BATCH, SEQUENCE, WIDTH, requires_grad=True)
    with enable(model) as handle:
        checkpoint(model, x, torch.ones(WIDTH), use_reentrant=False).sum().backward()
        assert handle.stats().offloaded_bytes == HIDDEN_BYTES + SCALE_BYTES
        assert_nothing_left(handle._engine)


# transformers


def older_layout(tiny: Tiny, **options: Any) -> None:
    """Checkpoint like transformers 4: around the call of each layer, module hooks inside."""
    layers = tiny.block_list()

    class Older(type(layers[0])):
        def __call__(self, *args: Any, **kwargs: Any) -> Any:
            return checkpoint(functools.partial(super().__call__, **kwargs), *args, **options)

    for layer in layers:
        layer.__class__ = Older
    tiny.model.enable_input_require_grads()


def of_this_version(tiny: Tiny, **options: Any) -> None:
    switch_on_checkpoints(tiny.model, options)


@POLICY
@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("layout", [older_layout, of_this_version])
def test_transformers_checkpoints_stay(layout: Callable[..., None], reentrant: bool, policy: str) -> None:
    plain, tiny = build("llama", attention_dropout=0.1), build("llama", attention_dropout=0.1)
    for one in (plain, tiny):
        layout(one, use_reentrant=reentrant)
    expected = plain.step()
    with enable(tiny.model, policy, verify=True) as handle:
        for _ in range(2):
            assert differences(expected, tiny.step()) == []
        stats = handle.stats()
        assert stats.offloaded_bytes > 0
        assert_nothing_left(handle._engine)
    with enable(build("llama").model, "keep") as handle:
        handle._attachment._model(**tiny.inputs)
        everything = handle.stats().unique_bytes
    assert stats.unique_bytes < everything / 4  # the checkpoint drops what it should


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")
@pytest.mark.parametrize("layout", [older_layout, of_this_version])
def test_frozen_transformers_with_reentrant_checkpoints_and_adapters(layout: Callable[..., None]) -> None:
    from peft import LoraConfig, get_peft_model

    def made() -> tuple[Tiny, nn.Module]:
        torch.manual_seed(0)
        tiny = build("llama")
        model = get_peft_model(tiny.model, LoraConfig(r=2, target_modules=["q_proj", "down_proj"]))
        layout(tiny, use_reentrant=True)
        for name, p in model.named_parameters():
            if "lora_B" in name:
                nn.init.normal_(p)
        return tiny, model

    def train(tiny: Tiny, model: nn.Module) -> Outcome:
        return step(model, lambda: tiny.loss(model), {})

    expected = train(*made())
    tiny, model = made()
    assert any(g is not None for g in expected.param_grads.values())
    with enable(model, "offload") as handle:
        for _ in range(2):
            assert differences(expected, train(tiny, model)) == []
        assert handle.stats().offloaded_bytes > 0
        assert_nothing_left(handle._engine)


def test_enable_ckpt_keeps_what_checkpointing_keeps() -> None:
    """The bytes that stay or move are those of block inputs, whether or not the model checkpoints itself."""
    kept: list[int] = []
    for checkpointed in (False, True):
        tiny = build("llama")
        if checkpointed:
            of_this_version(tiny, use_reentrant=False)
        with ebbtide.enable_activation_offloading(tiny.model, enable_ckpt=True, min_bytes=0) as handle:
            tiny.step()
            tiny.step()
            stats = handle.stats()
            kept.append(stats.offloaded_bytes + stats.kept_bytes)
    assert kept[0] < 4 * kept[1]


class Gated(nn.Module):
    """A block whose first module computes without gradients."""

    def __init__(self) -> None:
        super().__init__()
        self.frozen, self.mlp = nn.Linear(16, 16), nn.Sequential(nn.Linear(16, 64), nn.GELU(), nn.Linear(64, 16))

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            gate = self.frozen(x)
        return x + self.mlp(x * gate)


class InReentrant(Gated):
    """A block that runs all of itself in a reentrant checkpoint."""

    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(super().forward, x, use_reentrant=True)


class Checkpointer(torch.autograd.Function):
    """A reentrant checkpoint like those of other libraries."""

    @staticmethod
    def forward(ctx: Any, layer: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
        ctx.layer = layer
        ctx.save_for_backward(x)
        with torch.no_grad():
            return layer(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[None, Tensor | None]:
        x = ctx.saved_tensors[0].detach().requires_grad_()
        with torch.enable_grad():
            output = ctx.layer(x)
        torch.autograd.backward(output, grad)
        return None, x.grad


class InAnother(Gated):
    """A block that runs all of itself in a checkpoint of another library."""

    def forward(self, x: Tensor) -> Tensor:
        return Checkpointer.apply(super().forward, x)


class Implicit(Gated):
    """A block whose first part is an autograd function that runs a module, as equilibrium layers are."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(Checkpointer.apply(self.frozen, x))


class OneModule(Gated):
    """A block that runs no other module than the one without gradients."""

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            gate = self.frozen(x)
        return nn.functional.linear(x * gate, self.frozen.weight)


@pytest.mark.parametrize("block", [Gated, OneModule, InReentrant, InAnother, Implicit])
def test_what_runs_without_gradients_is_no_checkpoint(block: type[nn.Module], caplog: pytest.LogCaptureFixture) -> None:
    model = nn.Sequential(*[block() for _ in range(3)])
    with ebbtide.enable_activation_offloading(model, min_bytes=0):
        model(torch.randn(8, 16, requires_grad=True)).sum().backward()
    assert ("itself checkpoints blocks" in caplog.text) is (block in (InReentrant, InAnother))


def test_an_input_that_may_not_be_used_any_more_has_no_checkpoint_before_it() -> None:
    y = torch.ones(4, 4, requires_grad=True) * 1
    part, _ = y.split(2)
    y.mul_(2)  # from here on torch refuses to say how the part was made
    assert checkpoint_before([part]) is None
