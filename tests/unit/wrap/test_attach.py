"""Hooks are handles: what they leave unchanged, when they run, and that nothing stays behind."""

from __future__ import annotations

import copy
import functools
import gc
import inspect
import io
import itertools
import logging
import pickle
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import MethodType
from typing import Any, cast

import pytest
import torch
from torch import Tensor, nn
from torch.autograd.graph import save_on_cpu, saved_tensors_hooks
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.utils.checkpoint import checkpoint

import ebbtide
from ebbtide.base.errors import ConflictError
from ebbtide.base.events import BUS
from ebbtide.engine import Block, Engine
from ebbtide.engine.run import BlockRun
from ebbtide.engine.timing import StepTimer
from ebbtide.wrap.attach import Attachment
from ebbtide.wrap.forward import StandIn, _warn_of_replicas
from ebbtide.wrap.scope import Scope
from tests.helpers.engines import assert_nothing_left, drain
from tests.helpers.interrupts import interrupted_at
from tests.helpers.models import Stack, Tiny, build
from tests.helpers.oracle import differences

MODES = pytest.mark.parametrize("policy", ["offload", "minimal", "auto"])


def enable(model: nn.Module, **options: Any) -> ebbtide.Handle:
    return ebbtide.enable_activation_offloading(model, **({"policy": "offload", "min_bytes": 0} | options))


def loss_of(tiny: Tiny) -> Tensor:
    torch.manual_seed(1)
    return tiny.loss()[0]


def grads(model: nn.Module) -> list[Tensor]:
    found = [p.grad.clone() for p in model.parameters() if p.grad is not None]
    model.zero_grad()
    return found


def same(one: list[Tensor], other: list[Tensor]) -> bool:
    return len(one) == len(other) > 0 and all(map(torch.equal, one, other))


@contextmanager
def counting_blocks() -> Iterator[list[str]]:
    """Names of the blocks whose hooks were entered; all have hooks, unlike in a measured step."""
    entered: list[str] = []
    begin = BlockRun.__init__

    def counted(run: BlockRun, engine: Engine, block: Block, *others: Any, **given: Any) -> None:
        entered.append(block.name)
        begin(run, engine, block, *others, **given)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(BlockRun, "__init__", counted)
        patch.setattr(StepTimer, "runs_plain", lambda self, name: False)
        yield entered


def leftovers(model: nn.Module) -> list[str]:
    """Name the leftovers of a handle on a model."""
    found = [n for n, m in model.named_modules() if any(isinstance(v, StandIn) for v in vars(m).values())]
    return found + [n for n, m in model.named_modules() if m._forward_hooks or m._forward_pre_hooks]


# What stays unchanged


def test_the_signature_of_forward_stays() -> None:
    class Kw(nn.Module):
        def forward(self, x: Tensor, *, mask: Tensor | None = None, scale: float = 1.0) -> Tensor:
            """Scale."""
            return x * scale

    class Model(Stack):
        def forward(self, x: Tensor, flag: bool = False) -> Tensor:
            return super().forward(x)

    model = Model(*(nn.Sequential(Kw(), nn.Linear(2, 2)) for _ in range(2)))
    before = [inspect.signature(m.forward) for m in model.modules() if type(m) is not nn.ModuleList]
    with enable(model):
        assert isinstance(model.forward, StandIn)
        assert [inspect.signature(m.forward) for m in model.modules() if type(m) is not nn.ModuleList] == before
        assert model.forward.__name__ == "forward"


def test_closing_restores_everything() -> None:
    tiny = build("block")
    state = {n: dict(vars(m)) for n, m in tiny.model.named_modules()}
    expected = tiny.step()
    with enable(tiny.model) as handle:
        assert leftovers(tiny.model) != []
        tiny.step()
    handle.close()
    assert {n: dict(vars(m)) for n, m in tiny.model.named_modules()} == state
    assert differences(tiny.step(), expected) == []


def test_a_forward_of_somebody_else_on_the_instance_is_restored() -> None:
    tiny = build("mlp")
    block = tiny.block_list()[0]
    theirs = block.forward = functools.partial(type(block).forward, block)
    with enable(tiny.model):
        tiny.step()
    assert vars(block)["forward"] is theirs


def test_a_forward_wrapped_after_enabling_stays_and_is_inert_after_closing() -> None:
    tiny = build("mlp")
    expected = tiny.step()
    handle = enable(tiny.model)
    block = tiny.block_list()[0]
    ours = block.forward
    theirs = block.forward = lambda *a, **k: ours(*a, **k)
    with counting_blocks() as entered:
        assert differences(tiny.step(), expected) == []
        assert len(entered) == 3
        handle.close()
        assert vars(block)["forward"] is theirs
        assert differences(tiny.step(), expected) == []
        assert len(entered) == 3


def test_the_state_dict_stays() -> None:
    tiny = build("block")
    before = list(tiny.model.state_dict())
    with enable(tiny.model):
        assert list(tiny.model.state_dict()) == before
        assert [n for n, _ in tiny.model.named_modules()] == [n for n, _ in build("block").model.named_modules()]


def a_step(tiny: Tiny) -> None:
    tiny.step()


def by_hand(tiny: Tiny) -> None:
    """Call the blocks without the model's forward."""
    x = tiny.inputs["x"]
    for block in tiny.block_list():
        x = block(x)
    x.square().mean().backward()


def raising(tiny: Tiny) -> None:
    """Raise between the backwards of two blocks."""

    def fail(gradient: Tensor) -> None:
        raise RuntimeError("out of memory")

    first = tiny.block_list()[0]
    hook = first.register_forward_hook(lambda module, args, output: output.register_hook(fail) and None)
    with pytest.raises(RuntimeError, match="out of memory"):
        tiny.step()
    hook.remove()
    drain()


@pytest.mark.parametrize("last", [a_step, by_hand, raising])
@pytest.mark.parametrize("kept", [False, True])
@MODES
def test_a_closed_model_is_freed_without_the_collector(policy: str, kept: bool, last: Callable[[Tiny], None]) -> None:
    tiny = build("mlp")
    handle = enable(tiny.model, policy=policy)
    for _ in range(2):
        tiny.step()
    last(tiny)
    handle.close()
    gone = [weakref.ref(x) for x in (tiny.model, *tiny.model.parameters())]
    remaining = handle if kept else None
    gc.collect()
    gc.disable()
    try:
        del tiny, handle
        assert [x() for x in gone] == [None] * len(gone)
    finally:
        gc.enable()
    if remaining is not None:
        remaining.disable()
        assert not remaining.enabled and remaining.stats().packs and "% of" in remaining.explain()


def test_a_closed_sharded_model_is_freed(mesh: DeviceMesh) -> None:
    tiny = build("mlp")
    for module in (*tiny.block_list(), tiny.model):
        fully_shard(module, mesh=mesh)
    with enable(tiny.model) as handle:
        for _ in range(2):
            tiny.step()
    gone = [weakref.ref(x) for x in (*tiny.model.modules(), *tiny.model.parameters())]
    del tiny, module
    gc.collect()
    assert [x() for x in gone] == [None] * len(gone)
    assert handle.stats().packs > 0


def test_a_closed_handle_knows_the_pass_of_blocks_called_by_hand(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "ebbtide")
    tiny = build("mlp")
    with enable(tiny.model) as handle:
        by_hand(tiny)
    assert handle.stats().packs > 0
    assert "Memory saved: " in caplog.text


@pytest.mark.parametrize("inside", ["a block", "a block by hand", "the model"])
def test_a_pass_in_which_the_handle_is_closed_is_counted_once(inside: str) -> None:
    tiny, ended = build("mlp"), list[str]()
    run = by_hand if inside == "a block by hand" else a_step
    expected = tiny.step()
    last = tiny.block_list()[-1]
    place = last if inside == "the model" else list(last.children())[-1]  # its hooks run inside of the block's forward
    figures: list[ebbtide.Stats] = []

    def close(handles: list[ebbtide.Handle], *_: Any) -> None:
        for handle in handles:
            handle.close()

    stop = BUS.subscribe(lambda kind, fields: ended.append(kind) if kind == "pass_end" else None)
    try:
        for closes in (False, True):
            with enable(tiny.model) as handle:
                run(tiny)
                hook = place.register_forward_hook(functools.partial(close, [handle] * closes))
                run(tiny)
                hook.remove()
            figures.append(handle.stats())
    finally:
        stop()
    whole, closed = figures
    assert len(ended) == 4 and closed.packs == whole.packs > 0
    assert closed.unique_bytes == whole.unique_bytes == closed.offloaded_bytes + closed.kept_bytes
    assert leftovers(tiny.model) == [] and differences(tiny.step(), expected) == []


def test_an_interrupt_while_enabling_leaves_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    tiny = build("mlp")
    expected = tiny.step()
    begin, calls = StandIn.__init__, []

    def interrupted(stand_in: StandIn, *arguments: Any, **given: Any) -> None:
        calls.append(stand_in)
        if len(calls) == 3:
            raise KeyboardInterrupt
        begin(stand_in, *arguments, **given)

    with monkeypatch.context() as patch:
        patch.setattr(StandIn, "__init__", interrupted)
        with pytest.raises(KeyboardInterrupt):
            enable(tiny.model)
    assert leftovers(tiny.model) == [] and differences(tiny.step(), expected) == []
    with enable(tiny.model):
        assert differences(tiny.step(), expected) == []


def test_replaced_blocks_are_named_and_freed(caplog: pytest.LogCaptureFixture) -> None:
    tiny = build("mlp")
    with enable(tiny.model, policy="minimal") as handle:
        for _ in range(2):
            tiny.step()
        before = tiny.block_list()[0]
        old, name = weakref.ref(before), next(n for n, m in tiny.model.named_modules() if m is before)
        tiny.model.set_submodule(name, copy.deepcopy(before))
        assert leftovers(tiny.model.get_submodule(name)) == []
        del before
        for _ in range(2):
            tiny.step()
        gc.collect()
        assert old() is None
        assert handle._attachment is not None and name not in handle._attachment.block_names
        assert caplog.text.count(f"replaced after offloading was enabled ({name})") == 1
    assert leftovers(tiny.model) == []


@pytest.mark.parametrize("policy", ["minimal", "offload"])
def test_blocks_that_are_out_of_the_model_for_some_steps_are_offloaded_again(
    policy: str, caplog: pytest.LogCaptureFixture
) -> None:
    """Some trainers drop layers, or train with the first ones only, by replacing the list that holds them."""
    tiny = build("mlp")
    blocks = tiny.block_list()
    name = next(n for n, m in tiny.model.named_modules() if m is blocks[0]).rpartition(".")[0]
    stack = cast("nn.ModuleList", tiny.model.get_submodule(name))
    with enable(tiny.model, policy=policy) as handle:
        for kept in (stack, nn.ModuleList(blocks[1:]), stack, nn.ModuleList(blocks[:1]), nn.ModuleList(blocks[::-1])):
            tiny.model.set_submodule(name, kept)
            handle.disable()
            expected = tiny.step()
            handle.enable()
            assert differences(tiny.step(), expected) == []
            assert len(handle.blocks) == len(kept) and handle.stats().memory_saved_bytes > 0
    assert "replaced" not in caplog.text and leftovers(tiny.model) == []


# Copies


def by_deepcopy(model: nn.Module) -> nn.Module:
    return copy.deepcopy(model)


def by_pickle(model: nn.Module) -> nn.Module:
    return pickle.loads(pickle.dumps(model))


def by_torch_save(model: nn.Module) -> nn.Module:
    buffer = io.BytesIO()
    torch.save(model, buffer)
    buffer.seek(0)
    return torch.load(buffer, weights_only=False)


@pytest.mark.parametrize("copied", [by_deepcopy, by_pickle, by_torch_save])
def test_a_copy_carries_no_offloading_and_its_own_weights(copied: Callable[[nn.Module], nn.Module]) -> None:
    tiny, other = build("block"), build("block", seed=5)
    with enable(tiny.model) as handle:
        expected = tiny.step()
        packs = handle.stats().packs
        twin = Tiny(name="twin", model=copied(tiny.model), inputs=tiny.inputs, blocks=tiny.blocks)
        assert differences(twin.step(), expected) == []
        assert handle.stats().packs == packs
        twin.model.load_state_dict(other.model.state_dict())
        assert differences(tiny.step(), expected) == []
        changed = Tiny(name="twin", model=twin.model, inputs=other.inputs, blocks=tiny.blocks)
        assert differences(changed.step(), other.step()) == []
        with enable(twin.model) as second:  # no other offloader is on the copy
            assert differences(changed.step(), other.step()) == []
            assert second.stats().offloaded_bytes > 0
    assert not any(isinstance(v, StandIn) for m in twin.model.modules() for v in vars(m).values())


def by_copy(module: nn.Module) -> nn.Module:
    return copy.copy(module)


def by_replica(module: nn.Module) -> nn.Module:
    return module._replicate_for_data_parallel()


def by_regions(module: nn.Module) -> nn.Module:
    """Like accelerate's ``compile_regions``."""
    twin = type(module).__new__(type(module))
    twin.__dict__.update(module.__dict__)
    for name, value in list(vars(twin).items()):
        if hasattr(value, "__func__") and getattr(value, "__self__", None) is module:
            vars(twin)[name] = MethodType(value.__func__, twin)
    return twin


@pytest.mark.parametrize("copied", [by_copy, by_replica, by_regions])
def test_a_shallow_copy_of_a_block_computes_with_what_it_is_given(copied: Callable[[nn.Module], nn.Module]) -> None:
    model = nn.Sequential(*(nn.Sequential(nn.Linear(4, 4), nn.Tanh()) for _ in range(2)))
    x = torch.randn(2, 4)
    with ebbtide.enable_activation_offloading(model, policy="offload", min_bytes=0, blocks=["0", "1"]):
        block = model[0]
        twin = copied(block)
        twin._modules = {"0": nn.Linear(4, 4), "1": nn.Tanh()}
        assert torch.equal(twin(x), twin._modules["1"](twin._modules["0"](x)))  # type: ignore[misc]
        assert not any(isinstance(value, StandIn) for value in vars(twin).values())
        assert copy.copy(twin)._modules == twin._modules
        assert isinstance(vars(block)["forward"], StandIn)
    assert not {"__getstate__", "_replicate_for_data_parallel", "forward"} & vars(block).keys()


def by_clone(module: nn.Module) -> nn.Module:
    """Like ``clone_module`` of learn2learn: the copy computes with weights of its own."""
    twin = type(module).__new__(type(module))
    twin.__dict__ = dict(module.__dict__)
    twin._parameters = {name: p if p is None else p * 2 for name, p in module._parameters.items()}  # type: ignore
    twin._modules = {name: child if child is None else by_clone(child) for name, child in module._modules.items()}
    return twin


def by_functional(module: nn.Module) -> nn.Module:
    """Like ``higher``: a module of a subclass, to which all attributes but those of ``nn.Module`` are added."""
    kind = type(f"Functional{type(module).__name__}", (type(module),), {"__init__": nn.Module.__init__})
    twin = kind()
    for name, value in vars(module).items():
        if name not in vars(nn.Module()):
            object.__setattr__(twin, name, value)
    twin._parameters = {name: p if p is None else p * 2 for name, p in module._parameters.items()}  # type: ignore
    twin._modules = {name: child if child is None else by_functional(child) for name, child in module._modules.items()}
    return twin


@pytest.mark.parametrize("own", [False, True], ids=["of the class", "of the instance"])
@pytest.mark.parametrize("hooked", [False, True], ids=["", "with hooks"])
@pytest.mark.parametrize("copied", [by_clone, by_functional])
def test_a_copy_made_by_hand_computes_with_its_own_weights(
    copied: Callable[[nn.Module], nn.Module], hooked: bool, own: bool
) -> None:
    model = nn.Sequential(*(nn.Sequential(nn.Linear(4, 4), nn.Tanh()) for _ in range(3)))
    if own:
        model[1].forward = functools.partial(torch.mul, 3)
    x = torch.randn(2, 4)

    def trained(twin: nn.Module) -> list[Tensor]:
        if hooked:
            twin.get_submodule("0").register_forward_hook(lambda *_: None)
        loss = twin(x).square().sum()
        return [
            loss.detach(),
            *torch.autograd.grad(loss, [*model.parameters()], allow_unused=True, materialize_grads=True),
        ]

    expected = trained(copied(model))
    with ebbtide.enable_activation_offloading(model, policy="offload", min_bytes=0):
        assert all(map(torch.equal, trained(copied(model)), expected))
        model(x).sum().backward()
        assert all(map(torch.equal, trained(copied(model)), expected))


def test_a_module_that_was_given_the_forward_of_a_block_runs_it() -> None:
    model = nn.Sequential(*(nn.Sequential(nn.Linear(4, 4), nn.Tanh()) for _ in range(3)))
    other = nn.Sequential(nn.Linear(4, 4))
    x = torch.randn(2, 4)
    with ebbtide.enable_activation_offloading(model, policy="offload", min_bytes=0) as handle:
        other.forward = model.forward
        assert torch.equal(other(x), model(x)) and handle.stats().packs


def test_replicas_of_data_parallel_are_reported_once(caplog: pytest.LogCaptureFixture) -> None:
    tiny = build("block")
    _warn_of_replicas.cache_clear()
    by_replica(tiny.model)
    assert caplog.text == ""
    with enable(tiny.model):
        for module in (tiny.model, *tiny.block_list()):
            by_replica(module)
    assert caplog.text.count("nn.DataParallel") == 1 and "torchrun" in caplog.text


@pytest.mark.parametrize("first", ["enabled", "prepared"])
def test_accelerate_unwraps_the_forward_of_mixed_precision(first: str, monkeypatch: pytest.MonkeyPatch) -> None:
    accelerate = pytest.importorskip("accelerate")
    for state in ("AcceleratorState", "PartialState", "GradientState"):  # of the process
        monkeypatch.setattr(getattr(accelerate.state, state), "_shared_state", {})
    accelerator = accelerate.Accelerator(cpu=True, mixed_precision="bf16")
    tiny = build("block")
    expected = tiny.step()
    early = [enable(tiny.model)] if first == "enabled" else []
    model = accelerator.prepare(tiny.model)
    with early[0] if early else enable(model) as handle:
        assert differences(tiny.step(), expected) != []
        packs = handle.stats().packs
        accelerator.unwrap_model(model, keep_fp32_wrapper=False)
        assert differences(tiny.step(), expected) == differences(tiny.step(), expected) == []
        assert handle.stats().packs not in (0, packs)
    assert differences(tiny.step(), expected) == []
    assert leftovers(model) == [] and not {"__getstate__", "_replicate_for_data_parallel"} & vars(model).keys()


def test_forwards_inside_a_backward_are_named(caplog: pytest.LogCaptureFixture) -> None:
    """Like GradCache and the Cached losses of sentence-transformers."""
    model, x = Stack(*(nn.Sequential(nn.Linear(4, 4), nn.GELU()) for _ in range(2))), torch.randn(2, 4)
    with caplog.at_level("INFO", "ebbtide"), enable(model) as handle:
        with torch.no_grad():
            embedding = model(x).requires_grad_()
        loss = embedding.square().mean()

        def second(gradient: Tensor) -> None:
            with torch.enable_grad():
                model(x).sum().backward()

        loss.register_hook(second)
        loss.backward()
        assert handle.stats().packs == 0 and grads(model)
    (warning,) = [record.message for record in caplog.records if record.levelname == "WARNING"]
    assert "only inside a backward" in warning and "hint: " in warning


# Switching


@MODES
def test_switched_off_and_on_at_every_step(policy: str) -> None:
    tiny = build("dropout")
    expected = tiny.step()
    with enable(tiny.model, policy=policy) as handle:
        for on in (True, False, False, True, False, True):
            (handle.enable if on else handle.disable)()
            assert handle.enabled is on
            with counting_blocks() as entered:
                assert differences(tiny.step(), expected) == []
            assert len(entered) == (3 if on else 0)


@MODES
@pytest.mark.parametrize("what", ["disable", "close", "enable"])
def test_switched_between_forward_and_backward(policy: str, what: str) -> None:
    tiny = build("block")
    loss_of(tiny).backward()
    expected = grads(tiny.model)
    handle = enable(tiny.model, policy=policy)
    if what == "enable":
        handle.disable()
    loss = loss_of(tiny)
    getattr(handle, what)()
    loss.backward()
    assert same(grads(tiny.model), expected)
    assert handle.stats().live_tickets == 0
    handle.close()
    assert leftovers(tiny.model) == []


# Conflicts


def test_two_handles_on_one_model_are_refused() -> None:
    tiny = build("mlp")
    with enable(tiny.model):
        with pytest.raises(ConflictError, match=r"(?s)'layers.0' is already offloaded.*error.handle.close\(\)"):
            enable(tiny.model)
        tiny.step()
    assert leftovers(tiny.model) == []
    with enable(tiny.model):
        tiny.step()


@pytest.mark.parametrize("hooks", [save_on_cpu, lambda: saved_tensors_hooks(lambda t: t, lambda t: t)])
def test_other_hooks_around_are_refused(hooks: Callable[[], Any]) -> None:
    tiny = build("mlp")
    expected = tiny.step()
    with enable(tiny.model):
        with hooks(), pytest.raises(ConflictError, match="'layers.0' runs under other saved-tensor hooks"):
            tiny.step()
        assert differences(tiny.step(), expected) == []


def test_a_block_that_checkpoints_itself_is_offloaded() -> None:
    class Self(nn.Module):
        def __init__(self, inner: nn.Module) -> None:
            super().__init__()
            self.inner = inner

        def forward(self, x: Tensor) -> Tensor:
            return checkpoint(self.inner, x, use_reentrant=False)

    model = Stack(*(Self(b) for b in build("mlp").block_list()))
    x = torch.randn(2, 4, 48, requires_grad=True)
    model(x).sum().backward()
    expected = grads(model)
    with enable(model, blocks=["layers.*"]) as handle:
        model(x).sum().backward()
        assert same(grads(model), expected)
        assert handle.stats().offloaded_bytes == 3 * 2 * 4 * 48 * 4  # the inputs, and nothing else


# Ways to call


@MODES
@pytest.mark.parametrize("how", ["forward", "blocks", "blocks without the model"])
def test_called_in_other_ways(how: str, policy: str) -> None:
    tiny = build("block")

    def run() -> list[Tensor]:
        x = tiny.inputs["x"]
        if how == "forward":  # as PEFT does
            x = tiny.model.forward(x)
        else:
            for layer in tiny.block_list():
                x = layer(x) if how == "blocks" else layer.forward(x)
        x.square().sum().backward()
        return grads(tiny.model)

    expected = run()
    with enable(tiny.model, policy=policy) as handle:
        with counting_blocks() as entered:
            for _ in range(3):
                assert same(run(), expected)
        assert len(entered) == 9
        assert_nothing_left(handle._engine)


@MODES
def test_a_block_called_twice(policy: str) -> None:
    class Twice(Stack):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(super().forward(x))

    model = Twice(*build("block").block_list())
    tiny = Tiny(name="twice", model=model, inputs=build("block").inputs, blocks="layers")
    expected = tiny.step()
    with enable(model, policy=policy) as handle:
        for _ in range(2):
            assert differences(tiny.step(), expected) == []
        assert_nothing_left(handle._engine)


class Fails(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.error: BaseException | None = None

    def forward(self, x: Tensor) -> Tensor:
        if self.error is not None:
            raise self.error
        return x


@MODES
@pytest.mark.parametrize("error", [ValueError("no"), KeyboardInterrupt()], ids=["error", "interrupt"])
def test_an_exception_in_a_block_leaves_the_next_step_right(error: BaseException, policy: str) -> None:
    tiny = build("block")
    fails = Fails()
    tiny.block_list()[1].append(fails)
    expected = tiny.step()
    with enable(tiny.model, policy=policy) as handle:
        for _ in range(2):
            fails.error = error
            with pytest.raises(type(error)):
                tiny.step()
            error.__traceback__ = None
            assert torch._C._autograd._top_saved_tensors_default_hooks(True) is None
            fails.error = None
            assert differences(tiny.step(), expected) == []
        assert_nothing_left(handle._engine)


@MODES
def test_an_exception_inside_a_checkpoint_of_a_block_leaves_no_hooks_open(policy: str) -> None:
    """Some versions of torch leave a checkpoint's hooks open while the traceback lives, and ours below them."""
    tiny = build("block")
    fails = Fails()

    class Checkpoints(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return checkpoint(lambda y: checkpoint(fails, y, use_reentrant=False), x, use_reentrant=False)

    tiny.block_list()[1].append(Checkpoints())
    expected = tiny.step()
    with enable(tiny.model, policy=policy) as handle:
        for _ in range(2):
            fails.error = ValueError("no")
            with pytest.raises(ValueError, match="no"):
                tiny.step()
            assert torch._C._autograd._top_saved_tensors_default_hooks(True) is None
            fails.error = None
            assert differences(tiny.step(), expected) == []
        assert_nothing_left(handle._engine)


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_without_gradients_no_hooks_are_entered(mode: Callable[[], Any], monkeypatch: pytest.MonkeyPatch) -> None:
    tiny = build("block")
    with enable(tiny.model) as handle:
        monkeypatch.setattr(BlockRun, "__init__", lambda *_, **__: pytest.fail("hooks were entered"))
        monkeypatch.setattr(handle._engine, "begin_pass", lambda *_: pytest.fail("a pass began"))
        with mode():
            tiny.model(**tiny.inputs)
            tiny.model.eval()(**tiny.inputs)


def test_eval_with_gradients_is_offloaded() -> None:
    tiny = build("dropout")
    tiny.model.eval()
    expected = tiny.step()
    with enable(tiny.model) as handle:
        assert differences(tiny.step(), expected) == []
        assert handle.stats().offloaded_bytes > 0


def test_two_handles_leave_nothing_in_whatever_order_they_are_closed() -> None:
    class Both(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = (nn.ModuleList(nn.Linear(4, 4) for _ in range(2)) for _ in range(2))

        def forward(self, x: Tensor) -> Tensor:
            for layer in (*self.first, *self.second):
                x = layer(x)
            return x

    for order in (1, -1):
        model = Both()
        held = dict(model.__dict__)
        handles = [enable(model, blocks=[f"{part}.*"]) for part in ("first", "second")]
        model(torch.randn(2, 4)).sum().backward()
        engines = [weakref.ref(handle._engine) for handle in handles]
        for handle in handles[::order]:
            handle.close()
        del handle, handles
        gc.collect()
        assert model.__dict__ == held
        assert [engine() for engine in engines] == [None, None]


def test_the_middle_of_three_handles_is_closed_and_the_others_work_on() -> None:
    model = nn.Sequential(*(nn.Sequential(nn.Linear(4, 4), nn.Tanh()) for _ in range(3)))
    handles = [enable(model, blocks=[str(n)]) for n in range(3)]
    top = model.forward
    handles[1].close()
    assert model.forward is top and top._call.__self__ is handles[2]._attachment  # pyright: ignore
    model(torch.randn(2, 4)).sum().backward()
    assert [handle.stats().packs > 0 for handle in handles] == [True, False, True]
    for handle in handles:
        handle.close()
    assert leftovers(model) == []


def test_a_close_that_was_interrupted_at_any_line_is_finished_by_another() -> None:
    parts = (ebbtide.Handle.close, Attachment.remove, Attachment._install, Scope.leave, StandIn.remove)
    for place in itertools.count(1):
        model = nn.Sequential(*(nn.Sequential(nn.Linear(4, 4), nn.Tanh()) for _ in range(2)))
        handle = enable(model, target="disk")
        reached = interrupted_at(place, parts, handle.close)
        handle.close()
        assert leftovers(model) == [], place
        enable(model, target="disk").close()
        if not reached:
            break
    assert place > 30


def test_a_handle_closed_inside_its_first_forward_leaves_nothing() -> None:
    class Closes(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers, self.last = nn.ModuleList(nn.Linear(4, 4) for _ in range(3)), nn.Linear(4, 4)

        def forward(self, x: Tensor) -> Tensor:
            for layer in self.layers:
                x = layer(x)
            handles[-1].close()
            return self.last(x)

    model, handles = Closes(), list[ebbtide.Handle]()
    handles.append(enable(model))
    model(torch.randn(2, 4)).sum().backward()
    assert leftovers(model) == []
    enable(model).close()


def test_a_module_in_two_places_is_one_block() -> None:
    class Shares(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            made = [nn.Sequential(nn.Linear(4, 4), nn.GELU()) for _ in range(3)]
            self.encoder, self.decoder = nn.ModuleList(made), nn.ModuleList(made[::-1])

        def forward(self, x: Tensor) -> Tensor:
            for layer in (*self.encoder, *self.decoder):
                x = layer(x)
            return x

    model, x = Shares(), torch.randn(8, 4, requires_grad=True)
    model(x).sum().backward()
    expected = grads(model)
    for policy in ("offload", "minimal"):
        with enable(model, policy=policy) as handle:
            assert handle._attachment.block_names == ["encoder.0", "encoder.1", "encoder.2"]
            for _ in range(4):
                model(x).sum().backward()
                assert same(grads(model), expected)


def test_arguments_may_have_any_name() -> None:
    class Named(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(4, 4)

        def forward(self, x: Tensor, scope: str = "", forward: int = 1, self_: int = 0) -> Tensor:
            return self.layer(x) * forward

    model = Named()
    with enable(model):
        model(torch.randn(2, 4), scope="a", forward=2).sum().backward()


def test_a_pickle_made_under_a_handle_needs_no_ebbtide() -> None:
    tiny = build("block")
    with enable(tiny.model):
        tiny.step()
        written = pickle.dumps(tiny.model)
    assert b"ebbtide." not in written.replace(b"ebbtide.tests", b"")
    twin = Tiny(name="twin", model=pickle.loads(written), inputs=tiny.inputs, blocks=tiny.blocks)
    assert differences(twin.step(), tiny.step()) == []


@pytest.mark.parametrize("copied", [by_deepcopy, by_pickle, by_torch_save])
def test_a_copy_of_a_model_that_holds_its_handle_has_none(copied: Callable[[nn.Module], Any]) -> None:
    tiny = build("block")
    model: Any = tiny.model
    with enable(model) as handle:
        model.handle, expected = handle, tiny.step()
        twin = copied(model)
        assert twin.handle is None and model.handle is handle and handle.enabled
        assert copied({"handle": handle}) == {"handle": None}  # type: ignore[arg-type]
        assert b"ebbtide." not in pickle.dumps(handle)
        assert differences(Tiny(name="twin", model=twin, inputs=tiny.inputs, blocks=tiny.blocks).step(), expected) == []
        assert differences(tiny.step(), expected) == []


class Around(nn.Module):
    """Holds its context, which is entered in each forward."""

    def __init__(self) -> None:
        super().__init__()
        self.fc, self.context = nn.Linear(8, 8), ebbtide.offload_saved_tensors(min_bytes=0)

    def forward(self, x: Tensor) -> Tensor:
        with self.context:
            return self.fc(x.sin()).exp()


@pytest.mark.parametrize("copied", [by_deepcopy, by_pickle, by_torch_save])
def test_a_copy_of_a_model_that_holds_its_context_has_one_of_its_own(copied: Callable[[nn.Module], Any]) -> None:
    model, x = Around(), torch.randn(4, 8, requires_grad=True)
    expected = torch.autograd.grad(model(x).sum(), x)
    assert model.context.stats().offloaded_bytes > 0
    with model.context:
        twin = copied(model)
    assert twin.context.stats().packs == 0
    assert torch.equal(torch.autograd.grad(twin(x).sum(), x)[0], expected[0])
    assert twin.context.stats().offloaded_bytes > 0
    assert torch.equal(torch.autograd.grad(model(x).sum(), x)[0], expected[0])


@pytest.mark.parametrize(
    "copied", [copy.deepcopy, by_copy, by_replica, lambda model: pickle.loads(pickle.dumps(model))]
)
def test_a_copy_has_no_hooks_of_ours_and_all_others(copied: Callable[[nn.Module], nn.Module]) -> None:
    model = nn.Sequential(*(nn.Sequential(nn.Linear(4, 4), nn.Tanh()) for _ in range(2)))
    others = [part.register_forward_hook(print, always_call=True) for part in model.modules()]
    held = [dict(vars(part)) for part in model.modules()]
    with enable(model, blocks=["*"]):
        parts = [copied(part) for part in model.modules()]
    for part in (*parts, *(copied(model) if copied is copy.deepcopy else model).modules()):
        assert len(part._forward_hooks) == len(part._forward_hooks_always_called) == 1
        assert not part._forward_pre_hooks and "__getstate__" not in vars(part)
    assert held == [vars(part) for part in model.modules()] and len(others) == 7


class Padded(nn.Module):
    """Pads a strided nested tensor, which autograd saves, before its blocks."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.layers = nn.Linear(4, 4), nn.Sequential(*(nn.Linear(4, 4) for _ in range(3)))

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(torch.nested.to_padded_tensor(self.embed(x), 0.0))


class Pads(nn.Module):
    """A block that takes a strided nested tensor, or what it returns."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc(torch.nested.to_padded_tensor(x, 0.0) if x.is_nested else x).tanh()


@MODES
@pytest.mark.parametrize("inside", [False, True])
@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_strided_nested_tensors_are_left_alone(policy: str, inside: bool) -> None:
    model = Stack(Pads(), Pads(), Pads()) if inside else Padded()
    x = torch.nested.nested_tensor([torch.randn(3, 4), torch.randn(2, 4)])
    model(x).sum().backward()
    expected = grads(model)
    with enable(model, policy=policy):
        for _ in range(6):
            model(x).sum().backward()
            assert same(grads(model), expected)


class Logs(torch.autograd.Function):
    """Hides its node's own ``name``, as loggers of gradients do."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, name: str) -> Tensor:
        ctx.name = name
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        assert ctx.name == "fc"
        return grad, None


class Residual(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return (x + self.fc(x)).tanh()


@MODES
def test_a_function_in_a_forward_hook_may_set_any_attribute_of_its_node(policy: str) -> None:
    model, x = Stack(Residual(), Residual(), Residual()), torch.randn(8, 4)
    for layer in model.layers:
        layer.fc.register_forward_hook(lambda module, args, y: Logs.apply(y, "fc"))
    model(x).sum().backward()
    expected = grads(model)
    with enable(model, policy=policy) as handle:
        for _ in range(4):
            model(x).sum().backward()
            assert same(grads(model), expected)
        assert "AddBackward0" in handle._engine.rules, "no rule failed"


class Splits(nn.Module):
    """Its second result is a view that torch refuses every use of, and its second argument may be one."""

    def __init__(self) -> None:
        super().__init__()
        self.fc, self.same = nn.Linear(4, 4), nn.Identity()

    def forward(self, x: Tensor, unused: Tensor | None) -> tuple[Tensor, Tensor]:
        y = self.fc(x) * 1
        part, _ = y.split(2, -1)
        y.mul_(2)
        for _ in range(4):  # what no rule recomputes is checkpointed
            y = torch.special.i0e(y)
        return y, self.same(part)


class Chain(Stack):
    def forward(self, x: Tensor, part: Tensor | None = None) -> tuple[Tensor, Tensor | None]:  # type: ignore[override]
        for layer in self.layers:
            x, part = layer(x, part)
        return x, part


@MODES
def test_a_view_that_may_not_be_used_any_more_is_only_an_error_when_it_is_used(policy: str) -> None:
    model, x = Chain(Splits(), Splits(), Splits()), torch.randn(8, 4)
    model(x)[0].sum().backward()
    expected = grads(model)
    with enable(model, policy=policy):
        for _ in range(6):
            y, part = model(x)
            with pytest.raises(RuntimeError, match="modified inplace"):
                part.sin()
            y.sum().backward()
            assert same(grads(model), expected)


def test_a_disk_that_would_not_hold_blocks_like_the_first_is_warned_of(caplog: pytest.LogCaptureFixture) -> None:
    class Pyramid(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.stages = nn.ModuleList(nn.Linear(2 ** (10 - n), 2 ** (9 - n)) for n in range(6))

        def forward(self, x: Tensor) -> Tensor:
            for stage in self.stages:
                x = torch.special.i0e(stage(x))
            return x

    model, free = Pyramid(), 20 * 1024
    handle = enable(model, target="disk", blocks="stages.*")
    type_ = type(handle._engine.tier)
    with handle, pytest.MonkeyPatch.context() as patch:
        patch.setattr(type_, "free_bytes", property(lambda tier: free))
        model(torch.randn(4, 1024)).sum().backward()
    said = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    assert len(said) == 1 and "5 more blocks like the first would offload" in said[0]
