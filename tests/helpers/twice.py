"""Train the same code with and without a handle, and report where the first bit differs."""

from __future__ import annotations

import gc
import random
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

import ebbtide
from ebbtide.base.errors import EbbtideError
from tests.helpers.oracle import same_bits

Make = Callable[[], nn.Module]
Step = Callable[[nn.Module, int], Tensor]
Outcome = list[dict[str, Tensor] | BaseException]

POLICIES = ("auto", "minimal", "offload", "inputs", "keep")


class Stack(nn.Module):
    """Blocks, one after the other."""

    def __init__(self, *blocks: nn.Module) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(blocks)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x


def hard(x: Tensor) -> Tensor:
    """Save several tensors that no rule covers: Minimal checkpoints the block."""
    for _ in range(4):
        x = torch.special.i0e(x)
    return x


class Block(nn.Module):
    """A block that is worth a checkpoint."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(16, 16), nn.Linear(16, 16)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(hard(self.up(x)))


def sgd(model: nn.Module, lr: float = 0.1) -> nn.Module:
    """Give a model an optimizer of its trained parameters, as ``model.optimizer``."""
    model.optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=lr)  # type: ignore[assignment]
    return model


def step_of(loss_of: Callable[[Any], Tensor]) -> Step:
    """Return a step: zero gradients, loss, backward, optimizer step."""

    def step(model: Any, number: int) -> Tensor:
        model.optimizer.zero_grad()
        loss = loss_of(model)
        loss.backward()
        model.optimizer.step()
        return loss

    return step


def two_losses(model: Any, number: int) -> Tensor:
    """Step the optimizer between the backwards of two losses: legal if no updated weight was saved."""
    x = torch.randn(8, 16, requires_grad=True)
    first, second = model(x).square().mean(), model(x).abs().mean()
    for loss in (first, second):
        model.optimizer.zero_grad()
        loss.backward()
        model.optimizer.step()
    return first + second


def only_biases(model: Any, optimizer: Callable[..., torch.optim.Optimizer]) -> nn.Module:
    """Let only the biases of a model train, which no operator saves."""
    for name, p in model.named_parameters():
        p.requires_grad_(name.endswith("bias"))
    model.optimizer = optimizer([p for p in model.parameters() if p.requires_grad])
    return model


def train(make: Make, step: Step, steps: int, **given: Any) -> tuple[Outcome, Any]:
    """Train; return the results of each step, up to the first error, and the handle's stats.

    Args:
        make: Make the model; its ``D`` is offloaded if it has one, else all of it.
        step: Train one step, return the loss.
        steps: Number of steps.
        given: Arguments of ``enable_activation_offloading``; none: train without it.
    """
    torch.manual_seed(0)
    random.seed(0)
    np.random.seed(0)
    model = make()
    target: Any = getattr(model, "D", model)
    handle = ebbtide.enable_activation_offloading(target, target="disk", min_bytes=0, **given) if given else None
    outcome: Outcome = []
    for number in range(steps):
        torch.manual_seed(number + 1)
        try:
            loss = step(model, number).detach().clone()
        except (RuntimeError, EbbtideError) as error:
            outcome.append(error.with_traceback(None))
            break
        grads = {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}
        outcome.append(
            {"loss": loss, **grads, **{f"value of {n}": p.detach().clone() for n, p in model.named_parameters()}}
        )
    stats = handle.stats() if handle is not None else None
    if handle is not None:
        handle.close()
        gc.collect()
    return outcome, stats


def difference(plain: Outcome, got: Outcome) -> str:
    """Return where two trainings first differ; an empty text if they do not."""
    for number, (one, other) in enumerate(zip(plain, got, strict=False)):
        if isinstance(one, BaseException) or isinstance(other, BaseException):
            if isinstance(one, BaseException) and isinstance(other, BaseException):
                return ""
            return f"step {number}: {_told(one)} against {_told(other)}"
        wrong = [name for name in one if not same_bits(one[name], other[name])]
        if wrong or one.keys() != other.keys():
            return f"step {number}: {', '.join(wrong[:3]) or 'other gradients'} differ"
    return "" if len(plain) == len(got) else f"{len(plain)} against {len(got)} steps"


def check(make: Make, step: Step, *, steps: int = 6, policies: Sequence[str] = POLICIES, **more: Any) -> None:
    """Assert that training is bitwise the same under every policy."""
    plain, _ = train(make, step, steps)
    for policy in policies:
        got, _ = train(make, step, steps, policy=policy, **more)
        assert difference(plain, got) == "", policy


def check_refused(
    make: Make, step: Step, error: type[EbbtideError], *, policies: Sequence[str], steps: int = 6
) -> None:
    """Assert that training under each policy is bitwise the same up to a clear error, which must be raised."""
    plain, _ = train(make, step, steps)
    assert not isinstance(plain[-1], BaseException), "ordinary training allows it"
    for policy in policies:
        got, _ = train(make, step, steps, policy=policy)
        assert isinstance(got[-1], error), (policy, _told(got[-1]))
        assert "hint:" in str(got[-1])
        assert difference(plain[: len(got) - 1], got[:-1]) == "", policy


def _told(outcome: dict[str, Tensor] | BaseException) -> str:
    return repr(outcome)[:300] if isinstance(outcome, BaseException) else "trains"
