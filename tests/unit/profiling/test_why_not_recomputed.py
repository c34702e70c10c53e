"""What a plan says of tensors that it cannot recompute."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

import ebbtide
from ebbtide.base.actions import NoRecipe
from ebbtide.engine.build import NodeView
from ebbtide.engine.tickets import Expr


class _Tripled(torch.autograd.Function):
    """Saves its result, for which there is no rule."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        result = 3 * x
        ctx.save_for_backward(result)
        return result

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        return grad * 3 + 0 * ctx.saved_tensors[0]


class _Wrong(_Tripled):
    """Has a rule that recomputes other values."""


class _Lacking(_Tripled):
    """Has a rule, and its operand is not saved."""


def _wrong(node: NodeView) -> Expr | None:
    x = node.operand("", 0)
    return None if x is None else Expr(lambda v: v * 2, (x,), key=("wrong",))


def _may_leave(tensor: torch.Tensor) -> bool:
    return tensor.grad_fn is None or tensor.grad_fn.name() != "AddmmBackward0"


class _Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(64, 64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        noise = torch.rand_like(x)
        y = torch.sin(x) * noise
        y = _Tripled.apply(self.up(y).square())
        y = _Wrong.apply(torch.cos(y))
        return _Lacking.apply(y + x) + x


def test_explain_says_why_a_tensor_is_not_recomputed() -> None:
    """The reason is the operator's, so that a user knows whether a rule would help."""
    ebbtide.register_recompute("_WrongBackward", _wrong)
    ebbtide.register_recompute("_LackingBackward", lambda node: None)
    model = nn.Sequential(*(_Block() for _ in range(4)))
    x = torch.randn(64, 64, requires_grad=True)
    policy = ebbtide.Auto(max_slowdown=1)
    with ebbtide.enable_activation_offloading(model, policy=policy, min_bytes=0, keep_filter=_may_leave) as handle:
        for _ in range(4):
            model(x).sum().backward()
        lines = handle.plan.explain().splitlines()
    said = {
        node: [
            reason for reason in NoRecipe if any(f"/{node}#" in line and f"({reason.value};" in line for line in lines)
        ]
        for node in ("_TripledBackward", "_WrongBackward", "_LackingBackward", "AddmmBackward0", "leaf", "input")
    }
    assert said == {
        "_TripledBackward": [NoRecipe.NO_RULE],
        "_WrongBackward": [NoRecipe.DIFFERS],
        "_LackingBackward": [NoRecipe.NO_OPERAND],
        "AddmmBackward0": [NoRecipe.FILTERED],
        "leaf": [NoRecipe.NO_OPERATOR],
        "input": [NoRecipe.INPUT],
    }
