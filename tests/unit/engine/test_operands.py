"""A recipe must read the values that the forward read: weights that change, guesses, late starts."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import prune

import ebbtide
from ebbtide.base.actions import Action
from ebbtide.base.errors import ModifiedInPlaceError
from ebbtide.engine.build import Builder
from ebbtide.engine.run import BlockRun
from tests.helpers.engines import ByTable, in_thread
from tests.helpers.twice import Stack, check, check_refused, only_biases, sgd, step_of, train, two_losses


def rows(width: int = 16) -> Tensor:
    return torch.randn(8, width)


class Mlp(nn.Module):
    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(width), nn.Linear(width, width), nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(F.silu(self.up(self.norm(x))))


def mlps() -> nn.Module:
    return sgd(Stack(Mlp(), Mlp(), Mlp()))


squares = step_of(lambda model: model(rows()).square().mean())

# Weights that an optimizer changes before the backward


class Gan(nn.Module):
    """A discriminator that is stepped before the generator's backward."""

    def __init__(self, optimizer: Callable[..., torch.optim.Optimizer]) -> None:
        super().__init__()
        self.G, self.D = nn.Linear(16, 16), Stack(Mlp(), Mlp(), Mlp())
        self.of_g, self.of_d = optimizer(self.G.parameters()), optimizer(self.D.parameters())

    @staticmethod
    def step(model: Any, number: int) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            fake = model.G(rows())
            loss = -model.D(fake).float().mean()
            of_d = model.D(fake.detach()).float().mean() - model.D(rows()).float().mean()
        model.of_d.zero_grad()
        of_d.backward()
        model.of_d.step()
        model.of_g.zero_grad()
        loss.backward()
        model.of_g.step()
        return loss


OPTIMIZERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "for loop": lambda p: torch.optim.AdamW(p, lr=0.01, foreach=False),
    "foreach": lambda p: torch.optim.AdamW(p, lr=0.01, foreach=True),
    "fused": lambda p: torch.optim.AdamW(p, lr=0.01, fused=True),
    "fused sgd": lambda p: torch.optim.SGD(p, lr=0.01, fused=True),
    "fused adagrad": lambda p: torch.optim.Adagrad(p, lr=0.01, fused=True),
}


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_a_discriminator_stepped_before_the_generators_backward(optimizer: str) -> None:
    check(lambda: Gan(OPTIMIZERS[optimizer]), Gan.step, steps=5)


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_two_losses_with_a_step_between_their_backwards(optimizer: str) -> None:
    check(lambda: only_biases(Stack(Mlp(), Mlp(), Mlp()), OPTIMIZERS[optimizer]), two_losses, steps=5)


def two_losses_of_a_closure(model: Any, number: int) -> Tensor:
    """Compute both losses in the closure of a step; the backward of one comes after it."""
    x, losses = torch.randn(8, 16, requires_grad=True), list[Tensor]()

    def closure() -> Tensor:
        model.optimizer.zero_grad()
        losses[:] = model(x).square().mean(), model(x).abs().mean()
        losses[0].backward()
        return losses[0]

    model.optimizer.step(closure)
    model.optimizer.zero_grad()
    losses[1].backward()
    model.optimizer.step()
    return losses[0] + losses[1]


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_a_loss_of_a_closure_whose_backward_comes_after_the_step(optimizer: str) -> None:
    def make() -> nn.Module:
        return only_biases(Stack(Mlp(), Mlp(), Mlp()), OPTIMIZERS[optimizer])

    check(make, two_losses_of_a_closure, steps=5)


def test_copies_made_before_a_step_are_logged_once_and_released(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level("INFO", "ebbtide.engine"):
        train(lambda: Gan(OPTIMIZERS["fused"]), Gan.step, 3, policy="minimal")
    assert caplog.text.count("were copied before an optimizer step") == 1


def test_ordinary_training_copies_and_watches_nothing(caplog: pytest.LogCaptureFixture) -> None:
    model: Any = mlps()
    with (
        caplog.at_level("INFO", "ebbtide.engine"),
        ebbtide.enable_activation_offloading(model, policy="minimal", target="disk", min_bytes=0) as handle,
    ):
        for number in range(3):
            squares(model, number)
            guard = handle._engine.guard
            assert not guard._watched
    assert "were copied" not in caplog.text


@pytest.mark.parametrize("fused", [False, True])
def test_an_optimizer_in_the_backward(fused: bool) -> None:
    def make() -> nn.Module:
        model = Stack(Mlp(), Mlp(), Mlp())
        for p in model.parameters():
            optimizer = torch.optim.AdamW([p], lr=0.01, fused=fused)

            def hook(p: Tensor, optimizer: torch.optim.Optimizer = optimizer) -> None:
                optimizer.step()
                optimizer.zero_grad()

            p.register_post_accumulate_grad_hook(hook)
        return model

    def step(model: Any, number: int) -> Tensor:
        loss = model(rows()).square().mean()
        loss.backward()
        return loss

    check(make, step)


# Weights that something else changes: equal, or an error


@pytest.mark.parametrize("size", ["whole", "one row", "one number"])
def test_a_weight_that_is_changed_through_data_is_an_error(size: str) -> None:
    """Only its bytes show the change. Ordinary autograd would read the changed weight."""

    class Scaled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.up, self.down = nn.Linear(16, 16, bias=False), nn.Linear(16, 16)
            self.bias = nn.Parameter(torch.zeros(16))

        def forward(self, x: Tensor) -> Tensor:
            return x + self.down(F.gelu(self.up(x) + self.bias))

    def step(model: Any, number: int) -> Tensor:
        model.optimizer.zero_grad()
        loss = model(rows()).square().mean()
        part = slice(None) if size == "whole" else slice(3, 4 if size == "one number" else 8)
        for block in model.blocks:
            block.bias.data[part] += 0.5
        loss.backward()
        for block in model.blocks:
            block.bias.data[part] -= 0.5
        model.optimizer.step()
        return loss

    def make() -> nn.Module:
        return sgd(Stack(Scaled(), Scaled(), Scaled()))

    check_refused(make, step, ModifiedInPlaceError, policies=("minimal",))
    check(make, step, policies=("offload", "inputs", "keep"))


def test_data_of_a_leaf_that_is_assigned_is_what_ordinary_autograd_reads() -> None:
    class Scaled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm, self.scale, self.linear = nn.LayerNorm(16), nn.Parameter(torch.ones(16)), nn.Linear(16, 16)

        def forward(self, x: Tensor) -> Tensor:
            return x + self.linear(self.norm(x) * self.scale)

    def step(model: Any, number: int) -> Tensor:
        model.optimizer.zero_grad()
        loss = model(rows()).square().mean()
        for p in model.parameters():
            p.data = p.data * 1.01
        loss.backward()
        model.optimizer.step()
        return loss

    check(lambda: sgd(Stack(Scaled(), Scaled(), Scaled()), 0.01), step)


@pytest.mark.parametrize("trained", [True, False])
def test_data_of_an_input_that_is_assigned_is_what_ordinary_autograd_reads(trained: bool) -> None:
    class Squared(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(16, 16)

        def forward(self, x: Tensor) -> Tensor:
            return (self.linear(x) * x).tanh()

    def step(model: Any, number: int) -> Tensor:
        model.optimizer.zero_grad()
        x = rows().requires_grad_(trained)
        loss = model(x).square().mean()
        x.data = x.data * 1.5
        loss.backward()
        model.optimizer.step()
        return loss if x.grad is None else torch.cat([loss.detach()[None], x.grad.flatten()])

    check(lambda: sgd(Stack(Squared(), Squared())), step, policies=("offload", "inputs", "keep"))


class Injected(torch.autograd.Function):
    """Returns its saved tensor as the gradient of a parameter."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, gradient: Tensor) -> Tensor:
        ctx.save_for_backward(gradient)
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        return grads[0], ctx.saved_tensors[0], None


class Injects(nn.Module):
    """A block that saves the gradient of its weight, with or without another reference to it."""

    def __init__(self, *, held: bool) -> None:
        super().__init__()
        self.linear, self.weight = nn.Linear(16, 16), nn.Parameter(torch.randn(8, 16))
        self.held, self.gradient = held, torch.randn(8, 16) * 0.01

    def forward(self, x: Tensor) -> Tensor:
        gradient = self.gradient if self.held else self.weight.detach().square()
        return Injected.apply(torch.tanh(self.linear(x) * self.weight.detach()), self.weight, gradient)


@pytest.mark.parametrize("backwards", [1, 3])
@pytest.mark.parametrize("held", [True, False])
def test_a_saved_tensor_that_becomes_a_gradient_keeps_its_bytes(held: bool, backwards: int) -> None:
    def step(model: Any, number: int) -> Tensor:
        model.optimizer.zero_grad()
        loss = model(rows()).square().mean()
        for left in reversed(range(backwards)):
            loss.backward(retain_graph=left > 0)
        nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        model.optimizer.step()
        return loss

    check(lambda: sgd(Stack(Injects(held=held), Injects(held=held))), step, steps=4)


def test_a_parameter_that_forward_changes_after_its_use_from_the_third_step_on() -> None:
    class Decaying(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.up, self.down, self.bias = (
                nn.Linear(16, 16, bias=False),
                nn.Linear(16, 16),
                nn.Parameter(torch.zeros(16)),
            )
            self.decay = 1.0

        def forward(self, x: Tensor) -> Tensor:
            h = self.up(x) + self.bias
            with torch.no_grad():
                self.bias.mul_(self.decay)
            return x + self.down(F.gelu(h))

    def step(model: Any, number: int) -> Tensor:
        for block in model.blocks:
            block.decay = 1.0 if number < 2 else 0.7
        return squares(model, number)

    check(lambda: sgd(Stack(Decaying(), Decaying(), Decaying()), 0.5), step)


@pytest.mark.parametrize("threads", [False, True])
def test_a_merged_weight_that_outlives_an_optimizer_step(threads: bool) -> None:
    """Each thread numbers its nodes from 0: a new thread must not mistake those of an earlier pass for its own."""

    class Merged(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.base, self.delta = nn.Parameter(torch.randn(16, 16) * 0.1), nn.Parameter(torch.zeros(16, 16))
            self.down, self.merged = nn.Linear(16, 16), None

        def forward(self, x: Tensor) -> Tensor:
            if self.merged is None:
                self.merged = self.base + self.delta
            return x + self.down(F.gelu(x @ self.merged))

    def step(model: Any, number: int) -> Tensor:
        model.optimizer.zero_grad()

        def forward() -> Tensor:
            torch.manual_seed(number)
            return model(torch.randn(8, 16)).square().mean()

        loss = in_thread(forward) if threads else forward()
        loss.backward()
        model.optimizer.step()
        if number % 2:
            for block in model.blocks:
                block.merged = None
        return loss

    check(lambda: sgd(Stack(Merged(), Merged(), Merged()), 0.5), step)


def test_two_steps_inside_one_autocast_context() -> None:
    """Autocast's copies of weights are stale in the second."""

    def step(model: Any, number: int) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            squares(model, number)
            return squares(model, number)

    check(mlps, step)


@pytest.mark.parametrize("policy", ["offload", "auto"])
def test_autocasts_copy_of_a_weight_that_changed_is_offloaded_like_any_tensor(policy: str) -> None:
    """A copy from an earlier pass does not equal a new cast of the weight."""
    model: Any = mlps()
    with (
        torch.autocast("cpu", torch.bfloat16),
        ebbtide.enable_activation_offloading(model, policy=policy, target="disk", min_bytes=0) as handle,
    ):
        moved = []
        for number in range(2):
            squares(model, number)
            moved.append(handle.stats().offloaded_bytes)
    assert moved[1] > moved[0]


# Guesses


class BatchNormAct(nn.BatchNorm2d):
    """A norm by function, then a leaf that passes its input on."""

    def __init__(self, channels: int) -> None:
        super().__init__(channels)
        self.drop, self.act = nn.Identity(), nn.ReLU()

    def forward(self, x: Tensor) -> Tensor:
        y = F.batch_norm(x, self.running_mean, self.running_var, self.weight, self.bias, self.training, 0.1, self.eps)
        return self.act(self.drop(y))


class GroupNormDrop(nn.Module):
    def __init__(self, channels: int, bias: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(channels))
        self.bias = nn.Parameter(torch.full((channels,), bias), requires_grad=False)
        self.drop = nn.Dropout(0.5).eval()

    def forward(self, x: Tensor) -> Tensor:
        return self.drop(F.group_norm(x, 2, self.weight, self.bias))


class Conv(nn.Module):
    def __init__(self, norm: nn.Module) -> None:
        super().__init__()
        self.first, self.norm, self.last = nn.Conv2d(8, 8, 3, padding=1), norm, nn.Conv2d(8, 8, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.last(F.silu(self.norm(self.first(x))))


images = step_of(lambda model: model(torch.randn(4, 8, 8, 8)).square().mean())


def test_a_frozen_bias_of_a_norm_by_function_is_not_absent() -> None:
    def step(model: Any, number: int) -> Tensor:
        for module in model.modules():
            if isinstance(module, BatchNormAct):
                module.requires_grad_(number % 2 == 1)
        return images(model, number)

    check(lambda: sgd(Stack(*(Conv(BatchNormAct(8)) for _ in range(3)))), step)


def test_a_frozen_bias_that_is_zero_in_the_first_block_only() -> None:
    check(lambda: sgd(Stack(*(Conv(GroupNormDrop(8, bias)) for bias in (0.0, 0.5, 1.0)))), images)


class Wrapped(nn.Module):
    """Layers whose weight a hook computes from a parameter of the same shape."""

    def __init__(self, wrap: Callable[[nn.Module], object]) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(16, 32), nn.Linear(32, 16)
        wrap(self.up)
        wrap(self.down)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(F.leaky_relu(self.up(x), 0.2))


@pytest.mark.filterwarnings("ignore:.*weight_norm. is deprecated:FutureWarning")
def test_a_frozen_weight_that_a_hook_computes() -> None:
    def make() -> nn.Module:
        model = Gan(OPTIMIZERS["fused"])
        model.D = Stack(*(Wrapped(torch.nn.utils.weight_norm) for _ in range(3)))
        model.of_d = OPTIMIZERS["fused"](model.D.parameters())
        return model

    def step(model: Any, number: int) -> Tensor:
        model.D.requires_grad_(False)
        with torch.autocast("cpu", torch.bfloat16):
            loss = -model.D(model.G(rows())).float().mean()
        model.of_g.zero_grad()
        loss.backward()
        model.of_g.step()
        model.D.requires_grad_(True)
        with torch.autocast("cpu", torch.bfloat16):
            of_d = model.D(model.G(rows()).detach()).float().mean() - model.D(rows()).float().mean()
        model.of_d.zero_grad()
        of_d.backward()
        model.of_d.step()
        return loss

    check(make, step)


def test_a_frozen_weight_that_a_schedule_prunes() -> None:
    def make() -> nn.Module:
        model = Stack(*(Wrapped(lambda layer: prune.identity(layer, "weight")) for _ in range(3)))
        for name, p in model.named_parameters():
            p.requires_grad_(name.endswith("bias"))
        return sgd(model)

    def step(model: Any, number: int) -> Tensor:
        for module in model.modules():
            if isinstance(module, nn.Linear) and number >= 2:
                module.weight_mask.copy_(module.weight_orig.abs() > 0.03 * number)
        model.optimizer.zero_grad()
        with torch.autocast("cpu", torch.bfloat16):
            loss = model(rows()).float().square().mean()
        loss.backward()
        model.optimizer.step()
        return loss

    check(make, step)


class Scheduled(nn.Conv1d):
    """A convolution that passes on another bias than its own."""

    gain = 1.0

    def _conv_forward(self, input: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        return super()._conv_forward(input, weight, None if bias is None else bias * self.gain)


class Convolves(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = Scheduled(4, 4, 3, padding=1), nn.Conv1d(4, 4, 1)
        self.up.get_parameter("bias").requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(F.silu(self.up(x)))


def test_a_convolution_that_is_called_with_another_bias() -> None:
    def step(model: Any, number: int) -> Tensor:
        for block in model.blocks:
            block.up.gain = max(1.0, number - 1.0)
        return convolved(model, number)

    convolved = step_of(lambda model: model(torch.randn(2, 4, 16)).square().mean())
    check(lambda: sgd(Stack(Convolves(), Convolves(), Convolves())), step)


# Blocks in which a plan recomputes nothing


class InOneBlock(ByTable):
    """Recomputes what it can; says that it does so in one block, so in the others no operands are noted."""

    def __init__(self) -> None:
        super().__init__(lambda c: Action.OFFLOAD if c.recompute_flops is None else Action.RECOMPUTE)

    def recomputes_in(self, block_name: str) -> bool:
        return block_name == "1"


@pytest.mark.parametrize("steps", [1, 4])
def test_operands_are_noted_where_the_plan_recomputes_something(steps: int, monkeypatch: pytest.MonkeyPatch) -> None:
    model, x, plan = nn.Sequential(Mlp(), Mlp(), Mlp()), rows(), InOneBlock()
    weights, noted, blocks = list(model.parameters()), set[int](), set[str]()
    note, close = Builder.note_ticket, BlockRun.close

    def notes(builder: Builder, *given: Any) -> None:
        noted.add(id(builder))
        note(builder, *given)

    def closes(run: BlockRun) -> None:
        blocks.update({run.block.name} if id(run.builder) in noted else ())
        noted.clear()
        close(run)

    monkeypatch.setattr(Builder, "note_ticket", notes)
    monkeypatch.setattr(BlockRun, "close", closes)
    expected = torch.autograd.grad(model(x).square().mean(), weights)
    with ebbtide.enable_activation_offloading(model, policy=plan, min_bytes=0, blocks=["0", "1", "2"]):
        for _ in range(steps):
            found = torch.autograd.grad(model(x).square().mean(), weights)
            assert all(map(torch.equal, found, expected))
    assert blocks == {"1"}
