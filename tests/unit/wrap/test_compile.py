"""Compiled blocks: the hooks stand around the compiled call, whenever the block was compiled."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn

import ebbtide
from ebbtide.base.errors import ConflictError
from ebbtide.wrap.forward import StandIn
from tests.helpers.engines import assert_nothing_left
from tests.helpers.models import Tiny, build
from tests.helpers.oracle import differences, step
from tests.helpers.parts import WIDTH, Model, Part, check_model, differing, gated_model, linear, training_step

pytestmark = [  # torch's own, while compiling
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor:UserWarning"),
]


@pytest.fixture(autouse=True)
def no_leftovers() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def compile_in_place(tiny: Tiny) -> None:
    for layer in tiny.block_list():
        layer.compile(backend="aot_eager", fullgraph=True)


def compile_as_wrapper(tiny: Tiny) -> None:
    layers: nn.ModuleList = tiny.model.get_submodule(tiny.blocks)
    for i, layer in enumerate(layers):
        layers[i] = torch.compile(layer, backend="aot_eager", fullgraph=True)


@pytest.mark.parametrize("policy", ["offload", "minimal", "auto"])
@pytest.mark.parametrize("when", ["before", "after"])
def test_a_block_compiled_before_or_after_is_offloaded(when: str, policy: str) -> None:
    plain = build("block")
    compile_in_place(plain)
    expected = plain.step()
    tiny = build("block")
    if when == "before":
        compile_in_place(tiny)
    with ebbtide.enable_activation_offloading(tiny.model, policy=policy, min_bytes=0) as handle:
        if when == "after":
            compile_in_place(tiny)
        for _ in range(2):
            assert differences(tiny.step(), expected) == []
        stats = handle.stats()
        assert stats.memory_saved_bytes > 0
        assert stats.offloaded_bytes > 0
        assert_nothing_left(handle._engine)
    assert differences(tiny.step(), expected) == []
    assert not any(isinstance(v, StandIn) for m in tiny.model.modules() for v in vars(m).values())


@pytest.mark.parametrize("when", ["before", "after"])
def test_a_compiled_wrapper_in_the_stack_is_a_block(when: str) -> None:
    plain = build("block")
    compile_as_wrapper(plain)
    expected = plain.step()
    tiny = build("block")
    compile_as_wrapper(tiny)
    with ebbtide.enable_activation_offloading(tiny.model, policy="offload", min_bytes=0) as handle:
        assert differences(tiny.step(), expected) == []
        assert handle.stats().memory_saved_bytes > 0
        assert {site.block_kind for site, _ in handle._engine.last_pass.sites} == {"Block"}


def test_enabling_does_not_compile_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    compiled: list[int] = []

    def backend(graph: torch.fx.GraphModule, inputs: list[torch.Tensor]) -> Callable[..., object]:
        compiled.append(1)
        return graph.forward

    tiny = build("block")
    for layer in tiny.block_list():
        layer.compile(backend=backend, fullgraph=True)
    tiny.step()
    before = len(compiled)
    with ebbtide.enable_activation_offloading(tiny.model, policy="offload", min_bytes=0) as handle:
        tiny.step()
        handle.disable()
        tiny.step()
        handle.enable()
        tiny.step()
    tiny.step()
    assert len(compiled) == before


def test_a_module_hook_inside_would_have_every_block_compiled() -> None:
    tiny = build("block")
    with ebbtide.enable_activation_offloading(tiny.model, policy="offload", min_bytes=0):
        compile_in_place(tiny)
        tiny.step()
        for layer in tiny.block_list():
            assert "forward" not in vars(layer)
            assert not any(m._forward_hooks or m._forward_pre_hooks for m in layer.modules())


@pytest.mark.parametrize("whole", ["compile()", "torch.compile"])
def test_blocks_inside_a_compiled_model_are_refused(whole: str) -> None:
    tiny = build("block")
    model = tiny.model
    if whole == "compile()":
        model.compile(backend="aot_eager")
    else:
        model = torch.compile(model, backend="aot_eager")
    with pytest.raises(ConflictError, match=r"(?s)part of compiled code.*hint: compile the blocks"):
        ebbtide.enable_activation_offloading(model)


@pytest.mark.parametrize("how", ["in place", "as a wrapper"])
def test_a_model_that_is_compiled_whole_under_a_handle_says_so_at_once(
    how: str, caplog: pytest.LogCaptureFixture
) -> None:
    plain, tiny = build("mlp"), build("mlp")
    plain.model.compile(backend="aot_eager", fullgraph=True)
    expected = plain.step()
    model = tiny.model
    with ebbtide.enable_activation_offloading(model, policy="offload", min_bytes=0) as handle:
        if how == "in place":
            model.compile(backend="aot_eager", fullgraph=True)
            called = model
        else:
            called = torch.compile(model, backend="aot_eager", fullgraph=True)
        for _ in range(2):
            assert differences(step(model, lambda: tiny.loss(called), tiny.inputs), expected) == []
        assert caplog.text.count("nothing is offloaded in the code that is being compiled now") == 1
        assert handle.stats().packs == 0


def test_blocks_that_are_compiled_under_a_handle_say_nothing(caplog: pytest.LogCaptureFixture) -> None:
    tiny = build("mlp")
    with ebbtide.enable_activation_offloading(tiny.model, policy="offload", min_bytes=0) as handle:
        compile_in_place(tiny)
        tiny.step()
        assert handle.stats().packs > 0
    assert "compiled" not in caplog.text


def test_shapes_that_change_compile_no_more_than_in_plain_training() -> None:
    compiled: list[int] = []

    def backend(graph: torch.fx.GraphModule, inputs: list[torch.Tensor]) -> Callable[..., object]:
        compiled.append(1)
        return graph.forward

    def steps(model: Model) -> list[dict[str, torch.Tensor | None]]:
        compiled.clear()
        torch._dynamo.reset()
        for layer in model.layers:
            layer.compile(backend=backend, fullgraph=True, dynamic=True)
        return [training_step(model, torch.ones(rows, WIDTH)) for rows in (4, 7, 5, 4, 33)]

    model = gated_model()
    expected = steps(model)
    count = len(compiled)
    with ebbtide.enable_activation_offloading(model, policy="offload", min_bytes=0, blocks="layers.*") as handle:
        assert [differing(a, b) for a, b in zip(expected, steps(model), strict=True)] == [[]] * 5
        assert len(compiled) == count
        assert handle.stats().offloaded_bytes > 0
        assert_nothing_left(handle._engine)


@pytest.mark.parametrize("policy", ["offload", "minimal", "auto"])
@pytest.mark.parametrize("dynamic", [False, True])
def test_a_compiled_function_inside_a_block(policy: str, dynamic: bool) -> None:
    @torch.compile(backend="aot_eager", fullgraph=True, dynamic=dynamic)
    def activation(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return nn.functional.silu(x) * y.sigmoid().cumsum(-1)

    def forward(s: Any, x: torch.Tensor) -> torch.Tensor:
        return x + s.b(activation(s.a(x), x))

    model = Model(lambda: Part(forward, a=linear(), b=linear()))
    handle = check_model(model, torch.randn(4, WIDTH), policy)
    assert handle.stats().packs > 0


@pytest.mark.slow
@pytest.mark.parametrize("given", [{}, {"mode": "reduce-overhead"}, {"dynamic": True}], ids=str)
def test_blocks_compiled_by_inductor(given: dict[str, Any]) -> None:
    def compiled() -> Model:
        torch.manual_seed(1)
        model = gated_model()
        for layer in model.layers:
            layer.compile(fullgraph=True, **given)
        return model

    x = torch.randn(4, WIDTH)
    expected = training_step(compiled(), x)
    for policy in ("offload", "minimal", "auto"):
        model = compiled()
        with ebbtide.enable_activation_offloading(model, policy=policy, min_bytes=0, blocks="layers.*") as handle:
            for _ in range(2):
                assert differing(expected, training_step(model, x)) == []
            assert handle.stats().offloaded_bytes > 0
            assert_nothing_left(handle._engine)
