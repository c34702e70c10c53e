"""Random autograd graphs of real operators, drawn by hypothesis.

A graph is a list of instructions over a growing pool of tensors: what it does depends on nothing but the instructions,
so a failing one can be pasted back. Values stay small and finite; shapes are brought together by broadcasting; some
results are never used, some are detached, some are changed in place, legally or not.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from hypothesis import strategies as st
from torch import Tensor

from tests.helpers.engines import Leaves, leaf

ROWS, WIDTH = 4, 6
Operator = Callable[[Tensor, Tensor, int], "Tensor | Sequence[Tensor] | None"]


class Swish(torch.autograd.Function):
    """Saves its input and its own output."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        y = x * torch.sigmoid(x)
        ctx.save_for_backward(x, y)
        return y

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        x, y = ctx.saved_tensors
        s = torch.sigmoid(x)
        return grad * (y + s * (1 - y))


def like(x: Tensor, y: Tensor) -> Tensor:
    """``y``, or what of it can stand beside ``x`` in an element-wise operator."""
    try:
        torch.broadcast_shapes(x.shape, y.shape)
    except RuntimeError:
        return y.mean()
    return y if y.numel() * max(x.numel(), 1) < 4096 else y.mean()


def rows(x: Tensor) -> Tensor:
    """``x`` as a matrix of ``WIDTH`` columns, by views where it can be."""
    if x.dim() and x.shape[-1] == WIDTH and x.numel():
        return x.reshape(-1, WIDTH)
    flat = x.reshape(-1)[: 2 * WIDTH]
    return F.pad(flat, (0, 2 * WIDTH - flat.numel())).view(2, WIDTH)


def _first(x: Tensor) -> Tensor:
    return x if x.dim() else x.view(1)


def _no_grad(x: Tensor, y: Tensor, k: int) -> None:
    with torch.no_grad():
        x.mul_(1.5)


OPERATORS: dict[str, Operator] = {
    "add": lambda x, y, k: torch.add(x, like(x, y), alpha=k % 3 + 1),
    "sub": lambda x, y, k: x - like(x, y),
    "mul": lambda x, y, k: x * like(x, y),
    "square": lambda x, y, k: x * x,
    "div": lambda x, y, k: x / (like(x, y).abs() + 1.5),
    "number": lambda x, y, k: x * (k + 0.5),
    "pow": lambda x, y, k: x.pow(k % 3 + 1),
    "where": lambda x, y, k: torch.where(x > 0, x, like(x, y)),
    "exp": lambda x, y, k: torch.exp(-x.abs()),
    "tanh": lambda x, y, k: x.tanh(),
    "sigmoid": lambda x, y, k: x.sigmoid(),
    "silu": lambda x, y, k: F.silu(x),
    "gelu": lambda x, y, k: F.gelu(x, approximate=("none", "tanh")[k % 2]),
    "relu": lambda x, y, k: F.relu(x),
    "softmax": lambda x, y, k: F.softmax(_first(x), -1),
    "layer_norm": lambda x, y, k: F.layer_norm(_first(x), _first(x).shape[-1:]),
    "rms": lambda x, y, k: x * torch.rsqrt(_first(x).pow(2).mean(-1, keepdim=True) + 1e-5),
    "dropout": lambda x, y, k: F.dropout(x, 0.4),
    "custom": lambda x, y, k: Swish.apply(x),
    "sum": lambda x, y, k: _first(x).sum(k % max(x.dim(), 1), keepdim=bool(k % 2)),
    "matmul": lambda x, y, k: rows(x) @ rows(y).t().to(x.dtype),
    "linear": lambda x, y, k: F.linear(rows(x), rows(y).to(x.dtype)),
    "bmm": lambda x, y, k: torch.bmm(rows(x)[None], rows(y)[None].transpose(1, 2).to(x.dtype)),
    "to_bf16": lambda x, y, k: x.to(torch.bfloat16),
    "to_fp32": lambda x, y, k: x.to(torch.float32),
    "to_fp64": lambda x, y, k: x.to(torch.float64),
    "transpose": lambda x, y, k: _first(x).transpose(0, -1),
    "view": lambda x, y, k: x.reshape(-1),
    "expand": lambda x, y, k: x[None].expand(2, *x.shape),
    "unsqueeze": lambda x, y, k: x.unsqueeze(k % (x.dim() + 1)),
    "squeeze": lambda x, y, k: x.squeeze(),
    "slice": lambda x, y, k: _first(x)[k % 3 :],
    "little": lambda x, y, k: _first(x)[: 1 + k % 2],
    "steps": lambda x, y, k: _first(x)[..., :: k % 2 + 1],
    "select": lambda x, y, k: _first(x)[-1] if x.numel() else x,
    "clone": lambda x, y, k: x.clone(),
    "contiguous": lambda x, y, k: _first(x).transpose(0, -1).contiguous(),
    "split": lambda x, y, k: _first(x).split(k % 3 + 1, -1)[:2],
    "chunk": lambda x, y, k: _first(x).chunk(2, 0),
    "unbind": lambda x, y, k: _first(x).unbind(0)[:2],
    "cat": lambda x, y, k: torch.cat([rows(x), rows(y).to(x.dtype)], k % 2 if rows(x).shape == rows(y).shape else 0),
    "stack": lambda x, y, k: torch.stack([x, x.tanh()], k % 2 if x.dim() else 0),
    "residual": lambda x, y, k: x + F.silu(x) * x,
    "cumsum": lambda x, y, k: _first(x).cumsum(-1),
    "detach": lambda x, y, k: x.detach(),
    "index": lambda x, y, k: _first(x)[torch.arange(min(2, _first(x).shape[0]))],
}
CHANGES: dict[str, Operator] = {
    "mul_": lambda x, y, k: x.mul_(0.5),
    "add_": lambda x, y, k: x.add_(like(x, y).detach().mean().to(x.dtype)),
    "relu_": lambda x, y, k: F.relu_(x),
    "part_": lambda x, y, k: _first(x)[:1].mul_(3),
    "copy_": lambda x, y, k: x.copy_(like(x, y).detach().mean()),
    "no_grad_": _no_grad,
}


@dataclass(frozen=True)
class Graph:
    """Instructions; ``(name, x, y, k)`` takes ``x`` and ``y`` from the pool, counted from its end.

    Attributes:
        steps: The instructions; ``"|"`` ends a block.
        heads: Which of the last tensors are returned; the others' branches are dead.
    """

    steps: tuple[tuple[str, int, int, int], ...]
    heads: tuple[int, ...]

    def __call__(self, leaves: Leaves, block: Callable[..., Any]) -> list[Tensor]:
        pool = list(leaves.values())
        segments: list[list[tuple[str, int, int, int]]] = [[]]
        for step in self.steps:
            segments.append([]) if step[0] == "|" else segments[-1].append(step)
        for segment in segments:
            with block(*[t for t in pool if not isinstance(t, torch.nn.Parameter)]):
                for step in segment:
                    self._take(step, pool)
        return [pool[-1 - i % len(pool)] for i in self.heads]

    @staticmethod
    def _take(step: tuple[str, int, int, int], pool: list[Tensor]) -> None:
        name, i, j, k = step
        x, y = pool[-1 - i % len(pool)], pool[-1 - j % len(pool)]
        made = (OPERATORS.get(name) or CHANGES[name])(x, y, k)
        if isinstance(made, Tensor):
            pool.append(made)
        elif made is not None:
            pool.extend(made)


def leaves() -> dict[str, Tensor]:
    """The leaves of every graph: activations of two types, weights, a scalar."""
    torch.manual_seed(3)
    return {
        "scale": leaf(parameter=True),
        "weight": leaf(WIDTH, WIDTH, parameter=True),
        "half": leaf(ROWS, WIDTH, dtype=torch.bfloat16),
        "x": leaf(ROWS, WIDTH),
    }


def graphs(*, changes: bool = False, most: int = 14) -> st.SearchStrategy[Graph]:
    """Graphs of up to ``most`` instructions; with ``changes`` some of them change a tensor in place."""
    names = [*OPERATORS, "|", "|", *(CHANGES if changes else ())]
    near = st.integers(0, 5)
    step = st.tuples(st.sampled_from(names), near, near, near)
    return st.builds(
        Graph, st.lists(step, min_size=1, max_size=most).map(tuple), st.lists(near, min_size=1, max_size=3).map(tuple)
    )
