"""The mode ``checkpointing`` of a script: the parts of a model that it checkpoints, and how."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn

from ebbtide.script.checkpointing import checkpoint_model


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear, self.calls = nn.Linear(4, 4), 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        return x + self.linear(x).sin()


class Tower(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Block() for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


class Switched(Tower):
    """Has its own checkpointing, like models of diffusers."""

    on = False

    def enable_gradient_checkpointing(self) -> None:
        self.on = True


class Refusing(Tower):
    """Has the method and refuses, like some models of transformers."""

    def gradient_checkpointing_enable(self, **options: object) -> None:
        raise ValueError("this model does not support it")


class WithoutOptions(Tower):
    """Has the method of older transformers, which took no options."""

    def gradient_checkpointing_enable(self) -> None:
        raise AssertionError("called without options")


class Several(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.eyes, self.voice, self.own = Switched(), Switched(), Tower()


def calls(tower: nn.Module, x: torch.Tensor) -> list[int]:
    tower(x).sum().backward()
    return [part.calls for part in tower.modules() if isinstance(part, Block)]


def test_each_part_with_a_switch_is_switched_and_blocks_of_the_rest_are_checkpointed() -> None:
    model = Several()
    how = checkpoint_model(model)
    assert model.eyes.on and model.voice.on
    assert how == (
        "Switched.enable_gradient_checkpointing() and Switched.enable_gradient_checkpointing() and "
        "torch.utils.checkpoint around 3 blocks"
    )
    x = torch.ones(2, 4, requires_grad=True)
    assert calls(model.own, x) == [2, 2, 2]
    assert calls(model.eyes, x) == [1, 1, 1], "the model's own, not ours around it"


@pytest.mark.parametrize("kind", [Refusing, WithoutOptions])
def test_where_a_model_refuses_its_blocks_are_checkpointed(kind: type[Tower]) -> None:
    model = kind()
    assert checkpoint_model(model) == "torch.utils.checkpoint around 3 blocks"
    assert calls(model, torch.ones(2, 4, requires_grad=True)) == [2, 2, 2]


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore:The .grad attribute of a Tensor")  # of compiling
def test_compiled_blocks_are_checkpointed_and_compiled_no_more_often() -> None:
    """A block is compiled with its own ``forward``: the checkpoint is around the compiled call."""

    class Sine(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(4, 4)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x + self.linear(x).sin()

    made, ran = 0, 0

    def backend(graph: torch.fx.GraphModule, inputs: list[torch.Tensor]) -> Callable[..., object]:
        nonlocal made
        made += 1

        def run(*arguments: torch.Tensor) -> object:
            nonlocal ran
            ran += 1
            return graph.forward(*arguments)

        return run

    def counts(*, checkpointed: bool) -> tuple[int, int]:
        nonlocal made, ran
        torch._dynamo.reset()
        made, ran = 0, 0
        model = Tower()
        model.layers = nn.ModuleList(Sine() for _ in range(3))
        for layer in model.layers:
            layer.compile(backend=backend, fullgraph=True)
        for _ in range(2 * checkpointed):  # as by two models that share the blocks
            assert checkpoint_model(model) == "torch.utils.checkpoint around 3 blocks"
        model(torch.ones(2, 4, requires_grad=True)).sum().backward()
        return made, ran

    plain, twice = counts(checkpointed=False), counts(checkpointed=True)
    torch._dynamo.reset()
    assert plain[1] == 3 and twice == (plain[0], 6)


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore:The .grad attribute of a Tensor")  # of compiling
@pytest.mark.parametrize("how", ["in place", "a wrapper"])
def test_blocks_are_checkpointed_in_a_model_that_is_compiled_whole(how: str) -> None:
    """Checkpoints inside compiled code leave their blocks' inputs to save, and what backward computes from."""

    class Deep(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(4, 4)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x + torch.special.i0e(torch.special.i0e(self.linear(x).sin()))

    def trained(*, checkpointed: bool) -> tuple[list[torch.Tensor], int]:
        torch._dynamo.reset()
        torch.manual_seed(0)
        model, saved = Tower(), list[int]()
        model.layers = nn.ModuleList(Deep() for _ in range(3))
        called: nn.Module = model
        if how == "in place":
            model.compile(backend="aot_eager", fullgraph=True)
        else:
            called = torch.compile(model, backend="aot_eager", fullgraph=True)
        if checkpointed:
            assert checkpoint_model(called) == "torch.utils.checkpoint around 3 blocks"
        with torch.autograd.graph.saved_tensors_hooks(lambda t: (saved.append(t.nbytes), t)[1], lambda t: t):
            loss = called(torch.ones(2, 4, requires_grad=True)).sum()
        loss.backward()
        torch._dynamo.reset()
        return [p.grad for p in model.parameters() if p.grad is not None], sum(saved)

    (plain, bytes_without), (ours, bytes_with) = trained(checkpointed=False), trained(checkpointed=True)
    assert len(plain) == len(ours) == 6 and all(map(torch.equal, plain, ours))
    assert bytes_with < bytes_without
