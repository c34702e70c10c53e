"""Random autograd graphs of real operators, drawn by hypothesis.

A graph is a list of instructions over a growing pool of tensors: it depends on nothing but the instructions,
so a failing one can be pasted into a test. Values stay small and finite; shapes are matched by broadcasting; some
results are never used, some are detached, some are changed in place, legally or not.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from hypothesis import strategies as st
from torch import Tensor

from tests.helpers.engines import Leaves, leaf

ROWS, WIDTH, MOST_ROWS = 4, 6, 32
Operator = Callable[[Tensor, Tensor, int], "Tensor | Sequence[Tensor] | None"]
Step = tuple[str, int, int, int]


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
    """``y``, or the part of it that fits ``x`` in an element-wise operator."""
    try:
        torch.broadcast_shapes(x.shape, y.shape)
    except RuntimeError:
        return y.mean()
    return y if y.numel() * max(x.numel(), 1) < 4096 else y.mean()


def real(x: Tensor) -> Tensor:
    """``x`` in a dtype that every operator takes."""
    return x.float() if x.dtype is torch.bfloat16 else x


def rows(x: Tensor) -> Tensor:
    """``x`` as a matrix of ``WIDTH`` columns, by views where possible."""
    if x.dim() and x.shape[-1] == WIDTH and x.numel():
        return x.reshape(-1, WIDTH)[:MOST_ROWS]
    flat = x.reshape(-1)[: 2 * WIDTH]
    return F.pad(flat, (0, 2 * WIDTH - flat.numel())).view(2, WIDTH)


def _first(x: Tensor) -> Tensor:
    return x if x.dim() else x.view(1)


def _no_grad(x: Tensor, y: Tensor, k: int) -> None:
    with torch.no_grad():
        x.mul_(1.5)


def _detached(x: Tensor) -> None:
    x.detach().mul_(1.5)


def _attention(x: Tensor, y: Tensor, k: int) -> Tensor:
    q, keys = rows(x)[None, None], rows(y)[None, None].to(x.dtype)
    mask = (None, torch.ones(q.shape[2], keys.shape[2]).tril().bool(), torch.zeros(q.shape[2], keys.shape[2]))[k % 3]
    mask = mask if mask is None or mask.dtype is torch.bool else mask.to(x.dtype)
    return F.scaled_dot_product_attention(q, keys, keys.sin(), mask, is_causal=mask is None and bool(k % 2))


def _inner_gradient(x: Tensor) -> Tensor:
    if not x.requires_grad:
        return x.sin()
    return torch.autograd.grad((x.sin() * x).sum(), x, create_graph=True)[0]


def _copied(x: Tensor) -> Tensor:
    with torch.autograd.graph.saved_tensors_hooks(lambda t: t.clone(), lambda t: t):
        return x.sin() * x


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
    "cut": lambda x, y, k: x.detach().requires_grad_(),
}
OPERATORS |= {
    "plus": lambda x, y, k: x + (k + 0.25),
    "minus": lambda x, y, k: (k + 0.25) - x,
    "over": lambda x, y, k: (k + 1) / (x.abs() + 1.5),
    "root": lambda x, y, k: (x.abs() + 0.5).pow((0.5, -1.5, 1.5)[k % 3]),
    "power": lambda x, y, k: (k % 3 + 1) ** x.clamp(-2, 2),
    "powers": lambda x, y, k: (x.abs() + 0.5).pow(like(x, y).clamp(-2, 2)),
    "clamp": lambda x, y, k: x.clamp(-0.5, 0.5) if k % 2 else x.clamp(min=like(x, y).detach().mean()),
    "fill": lambda x, y, k: x.masked_fill(x > 0.3, (0.0, -1.0, float("-inf"))[k % 3]),
    "largest": lambda x, y, k: torch.maximum(x, like(x, y)),
    "log_softmax": lambda x, y, k: F.log_softmax(_first(x), -1, dtype=(None, torch.float32)[k % 2]),
    "group_norm": lambda x, y, k: F.group_norm(real(rows(x)), 3, eps=1e-3 * (k + 1)),
    "batch_norm": lambda x, y, k: F.batch_norm(torch.cat([rows(x), rows(x) * 2]), None, None, training=True),
    "rms_norm": lambda x, y, k: F.rms_norm(_first(x), _first(x).shape[-1:]),
    "embedding": lambda x, y, k: F.embedding(torch.tensor([0, k, 1, 0]) % len(rows(x)), rows(x)),
    "gather": lambda x, y, k: rows(x).gather(1, rows(y).detach().float().argsort(1)[: len(rows(x))]),
    "index_select": lambda x, y, k: rows(x).index_select(1, torch.tensor([k, 0, 3])),
    "index_put": lambda x, y, k: rows(x).index_put((torch.tensor([0, 0]),), rows(y).to(x.dtype)[:1], accumulate=True),
    "scatter": lambda x, y, k: rows(x).scatter(1, torch.tensor([[k, 3]]), rows(y).to(x.dtype)[:1, :2]),
    "topk": lambda x, y, k: rows(x).topk(k % 3 + 1, -1).values,
    "sort": lambda x, y, k: rows(x).sort(dim=k % 2, stable=True).values,
    "median": lambda x, y, k: rows(x).median(-1).values,
    "einsum": lambda x, y, k: torch.einsum("ij,kj->jik", rows(x)[:4], rows(y)[:4].to(x.dtype)),
    "broadcast": lambda x, y, k: rows(x)[None].expand(2, -1, -1) @ rows(y).to(x.dtype).t(),
    "addmm": lambda x, y, k: torch.addmm(rows(y).to(x.dtype)[:1], rows(x), rows(x)[:1].t() @ rows(x)[:1], alpha=0.5),
    "addcmul": lambda x, y, k: torch.addcmul(x, x, like(x, y).to(x.dtype), value=0.5),
    "lerp": lambda x, y, k: torch.lerp(x, x.tanh(), 0.3),
    "conv1d": lambda x, y, k: F.conv1d(rows(x)[:, None], rows(y).reshape(-1)[:6].view(2, 1, 3).to(x.dtype)),
    "conv2d": lambda x, y, k: F.conv2d(rows(x)[None, None], rows(y)[:1].view(1, 1, 2, 3).to(x.dtype), padding=1),
    "max_pool": lambda x, y, k: F.max_pool1d(rows(x)[None], 2, 1 + k % 2),
    "avg_pool": lambda x, y, k: F.avg_pool2d(rows(x)[None], 2, 1),
    "cross_entropy": lambda x, y, k: F.cross_entropy(rows(x), torch.arange(len(rows(x))) % WIDTH, label_smoothing=0.1),
    "attention": lambda x, y, k: _attention(x, y, k),
    "turn": lambda x, y, k: torch.view_as_real(
        torch.view_as_complex(real(rows(x)).reshape(-1, 3, 2).contiguous())
        * torch.polar(torch.ones(3), torch.arange(3.0))
    ).flatten(-2),
    "spectrum": lambda x, y, k: torch.fft.irfft(torch.fft.rfft(real(rows(x))) * 0.5, n=WIDTH),
    "repeat": lambda x, y, k: rows(x)[:4].repeat(1 + k % 2, 2),
    "repeat_interleave": lambda x, y, k: rows(x)[:4].repeat_interleave(2, k % 2),
    "flip": lambda x, y, k: _first(x).flip(-1),
    "roll": lambda x, y, k: _first(x).roll(k, -1),
    "as_strided": lambda x, y, k: rows(x).contiguous().as_strided((2, 3), (1 + k % 3, 1)),
    "unfold": lambda x, y, k: rows(x).unfold(1, 3, 1 + k % 2),
    "diagonal": lambda x, y, k: rows(x).diagonal(k % 3),
    "tril": lambda x, y, k: rows(x).tril(k - 1),
    "movedim": lambda x, y, k: _first(x)[None].movedim(0, -1),
    "views_joined": lambda x, y, k: torch.cat([_first(x)[..., :1], _first(x)[..., 1:].tanh()], -1),
    "unsafe_chunk": lambda x, y, k: rows(x * 1).unsafe_chunk(2, -1),
    "min": lambda x, y, k: rows(x).min(-1).values,
    "norm": lambda x, y, k: real(rows(x)).norm(2, -1, keepdim=True) + 1,
    "std": lambda x, y, k: real(rows(x)).std(-1, keepdim=True),
    "logsumexp": lambda x, y, k: rows(x).logsumexp(-1),
    "elu": lambda x, y, k: (F.elu, F.hardswish, F.softplus, F.mish, F.leaky_relu, F.hardtanh)[k](x),
    "glu": lambda x, y, k: F.glu(rows(x), -1),
    "inner_gradient": lambda x, y, k: _inner_gradient(x),
    "without_hooks": lambda x, y, k: _copied(x),
}
CHANGES: dict[str, Operator] = {
    "mul_": lambda x, y, k: x.mul_(0.5),
    "add_": lambda x, y, k: x.add_(like(x, y).detach().mean().to(x.dtype)),
    "add_tracked_": lambda x, y, k: x.add_(like(x, y).mean().to(x.dtype)),
    "relu_": lambda x, y, k: F.relu_(x),
    "silu_": lambda x, y, k: F.silu(x, inplace=True),
    "part_": lambda x, y, k: _first(x)[:1].mul_(3),
    "column_": lambda x, y, k: _first(x)[..., k % 2 :: 2].add_(1),
    "turned_": lambda x, y, k: _first(x).transpose(0, -1)[:1].exp_(),
    "copy_": lambda x, y, k: x.copy_(like(x, y).detach().mean()),
    "item_": lambda x, y, k: _first(x).__setitem__(slice(0, 1), like(x, y).mean().to(x.dtype)),
    "fill_": lambda x, y, k: x.masked_fill_(x > 0.3, 0.1),
    "clamp_": lambda x, y, k: x.clamp_(-0.5, 0.5),
    "zero_": lambda x, y, k: _first(x)[-1:].zero_(),
    "index_": lambda x, y, k: _first(x).index_add_(
        0, torch.arange(min(1, len(_first(x)))), _first(x).detach()[:1].clone()
    ),
    "no_grad_": _no_grad,
    "detached_": lambda x, y, k: _detached(x),
}


def _can_be_used(x: Tensor) -> bool:
    """Whether autograd still knows how ``x`` was made: not a part of a split whose base was changed since."""
    try:
        _ = x.grad_fn
    except RuntimeError:
        return False
    return True


UNTRACKED = ("no_grad_", "detached_")


@dataclass(frozen=True)
class Graph:
    """Instructions; ``(name, x, y, k)`` takes ``x`` and ``y`` from the pool, counted from its end.

    Attributes:
        steps: The instructions; ``"|"`` ends a block and begins the next, ``"~"`` stays outside until the next ``"|"``.
        heads: Which of the last tensors are returned; the others' branches are dead.
    """

    steps: tuple[Step, ...]
    heads: tuple[int, ...]

    def __call__(self, leaves: Leaves, block: Callable[..., Any]) -> list[Tensor]:
        pool = list(leaves.values())
        segments: list[tuple[bool, list[Step]]] = [(True, [])]
        for step in self.steps:
            if step[0] in ("|", "~"):
                segments.append((step[0] == "|", []))
            else:
                segments[-1][1].append(step)
        for inside, segment in segments:
            inputs = [t for t in pool if not isinstance(t, torch.nn.Parameter) and _can_be_used(t)]
            with block(*inputs) if inside else contextlib.nullcontext():
                for step in segment:
                    self._take(step, pool)
        return [pool[-1 - i % len(pool)] for i in self.heads]

    @staticmethod
    def _take(step: Step, pool: list[Tensor]) -> None:
        name, i, j, k = step
        x, y = pool[-1 - i % len(pool)], pool[-1 - j % len(pool)]
        root = x if x._base is None else x._base
        if name in CHANGES and name not in UNTRACKED and root.is_leaf and root.requires_grad:
            x = x * 1  # a leaf itself may not be changed in place
            pool.append(x)
        made = (OPERATORS.get(name) or CHANGES[name])(x, y, k)
        if name in CHANGES:
            _ = x.grad_fn  # reading this reveals a change that views do not allow: here, in every run
        if isinstance(made, Tensor):
            pool.append(made)
        elif made is not None:
            pool.extend(made)


@dataclass(frozen=True)
class Schedule:
    """Successive uses of the heads of a graph.

    Attributes:
        turns: ``(what, head, leaf, retain)``; ``what`` is ``"all"`` (a backward over all heads), ``"one"``, ``"some"``
            (the gradient of one leaf alone), ``"twice"`` (the gradient of a gradient), ``"touch"`` (a leaf is changed
            in place) or ``"drop"`` (a head is dropped).
    """

    turns: tuple[tuple[str, int, int, bool], ...]

    @property
    def makes_graphs(self) -> bool:
        """Whether a backward makes a graph that another backward uses."""
        return any(what == "twice" for what, *_ in self.turns)

    def __call__(self, heads: Sequence[Tensor], fed: Sequence[Tensor], leaves: Leaves) -> dict[str, Tensor | None]:
        alive = list(zip(heads, fed, strict=True))
        wanted = {k: v for k, v in leaves.items() if v.requires_grad}
        found: dict[str, Tensor | None] = {}
        for number, turn in enumerate(self.turns):
            if not alive:
                break
            try:
                for name, grad in self._take(turn, alive, wanted).items():
                    found[f"{number} {turn[0]} {name}"] = None if grad is None else grad.detach().clone()
            except RuntimeError as error:
                error.add_note(f"backward {number}")
                raise
        return found

    @staticmethod
    def _take(
        turn: tuple[str, int, int, bool], alive: list[tuple[Tensor, Tensor]], leaves: Leaves
    ) -> Mapping[str, Tensor | None]:
        what, i, j, retain = turn
        head, fed = alive[i % len(alive)]
        name, chosen = list(leaves.items())[j % len(leaves)]
        if what == "touch":
            with torch.no_grad():
                chosen.mul_(1.25)
        elif what == "drop":
            alive.pop(i % len(alive))
        elif what == "some":
            return {name: torch.autograd.grad(head, chosen, fed, retain_graph=retain, allow_unused=True)[0]}
        elif what == "twice":
            given = tuple(leaves.values())
            once = torch.autograd.grad(head, given, fed, create_graph=True, allow_unused=True)
            total = sum((g.square().sum() for g in once if g is not None and g.requires_grad), torch.zeros(()))
            again = torch.autograd.grad(total, given, allow_unused=True) if total.requires_grad else ()
            return {f"{k} {n}": g for n, grads in enumerate((once, again)) for k, g in zip(leaves, grads, strict=False)}
        else:
            outputs = [head] if what == "one" else [h for h, _ in alive]
            given_fed = [fed] if what == "one" else [f for _, f in alive]
            torch.autograd.backward(outputs, given_fed, retain_graph=retain)
            return {k: v.grad for k, v in leaves.items()}
        return {}


def leaves() -> dict[str, Tensor]:
    """The leaves of every graph: activations of two types, weights, a scalar."""
    torch.manual_seed(3)
    return {
        "scale": leaf(parameter=True),
        "weight": leaf(WIDTH, WIDTH, parameter=True),
        "half": leaf(ROWS, WIDTH, dtype=torch.bfloat16),
        "x": leaf(ROWS, WIDTH),
    }


def graphs(*, changes: bool = False, most: int = 14, outside: bool = True) -> st.SearchStrategy[Graph]:
    """Graphs of up to ``most`` instructions.

    Args:
        changes: Some of them change a tensor in place.
        most: Largest number of instructions.
        outside: Some are outside of blocks, or make leaves: autograd itself holds their memory.
    """
    inside = [name for name in OPERATORS if outside or name != "cut"]
    names = [*inside, *("|||~" if outside else "|||"), *(CHANGES if changes else ())]
    near = st.integers(0, 5)
    step = st.tuples(st.sampled_from(names), near, near, near)
    return st.builds(
        Graph, st.lists(step, min_size=4, max_size=most).map(tuple), st.lists(near, min_size=1, max_size=3).map(tuple)
    )


def schedules(*, touch: bool = False, most: int = 4) -> st.SearchStrategy[Schedule]:
    """Schedules of up to ``most`` turns; most retain the graph, with ``touch`` a leaf may be changed between them."""
    what = st.sampled_from(["all", "one", "one", "some", "twice", "drop", *(["touch"] if touch else [])])
    near = st.integers(0, 5)
    retain = st.sampled_from([True, True, True, False])
    return st.builds(Schedule, st.lists(st.tuples(what, near, near, retain), min_size=1, max_size=most).map(tuple))
