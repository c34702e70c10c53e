"""Every rule: the value behind its node is dropped, made again, and equal in every bit."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ebbtide.base.actions import Action
from ebbtide.engine.build import Builder
from ebbtide.engine.rules import rule_table
from tests.helpers.engines import REMAKE, assert_nothing_left, compare, forward_pass, leaf, observe, open_engine

Make = Callable[[Tensor], Tensor]


def _norm(module: nn.Module) -> Make:
    return module


# Node name → a function of x [4, 6] whose result that node makes; what is saved of it stands behind the node.
CASES: dict[str, Make] = {
    "AddBackward0": lambda x: torch.add(x, x, alpha=2),
    "SubBackward0": lambda x: torch.sub(x, x.sin(), alpha=0.1),
    "MulBackward0": lambda x: x * 0.3,
    "DivBackward0": lambda x: x / 0.3,
    "NegBackward0": torch.neg,
    "AbsBackward0": torch.abs,
    "ExpBackward0": torch.exp,
    "LogBackward0": lambda x: torch.log(x.abs()),
    "SinBackward0": torch.sin,
    "CosBackward0": torch.cos,
    "SqrtBackward0": lambda x: torch.sqrt(x.abs()),
    "RsqrtBackward0": lambda x: torch.rsqrt(x.abs()),
    "TanhBackward0": torch.tanh,
    "SigmoidBackward0": torch.sigmoid,
    "SiluBackward0": F.silu,
    "ReluBackward0": F.relu,
    "MishBackward0": F.mish,
    "LogSigmoidBackward0": F.logsigmoid,
    "HardswishBackward0": F.hardswish,
    "GeluBackward0": lambda x: F.gelu(x, approximate="tanh"),
    "GluBackward0": lambda x: F.glu(x, 0),
    "SoftplusBackward0": lambda x: F.softplus(x, 2.0, 0.5),
    "LeakyReluBackward0": lambda x: F.leaky_relu(x, 0.2),
    "PowBackward0": lambda x: x.pow(3),
    "ToCopyBackward0": lambda x: x.to(torch.float64),
    "CloneBackward0": torch.clone,
    "MeanBackward1": lambda x: x.mean(-1, keepdim=True),
    "SumBackward1": lambda x: x.sum((0,), keepdim=False),
    "WhereBackward0": lambda x: torch.where(x > 0, x, x * 0.1),
    "CatBackward0": lambda x: torch.cat([x, x.sin()], -1),
    "StackBackward0": lambda x: torch.stack([x, x.sin()], 1),
    "NativeLayerNormBackward0": _norm(nn.LayerNorm(6, eps=1e-3)),
    "NativeGroupNormBackward0": _norm(nn.GroupNorm(3, 6)),
    "MmBackward0": lambda x: x @ x.t(),
    "BmmBackward0": lambda x: torch.bmm(x[None], x.t()[None]),
    "AddmmBackward0": _norm(nn.Linear(6, 5)),
    "BaddbmmBackward0": lambda x: torch.baddbmm(x[None, :, :4], x[None], x.t()[None], alpha=0.5, beta=2),
    "RepeatBackward0": lambda x: x.repeat(2, 1),
    "RollBackward0": lambda x: x.roll(2, 1),
}
# Views save nothing of their own: their rules are steps of a longer recipe, ended by a clone.
VIEWS: dict[str, Make] = {
    "ViewBackward0": lambda x: x.view(6, 4),
    "UnsafeViewBackward0": lambda x: torch.ops.aten._unsafe_view(x * 1, (6, 4)),
    "ReshapeAliasBackward0": lambda x: torch.ops.aten._reshape_alias(x, (6, 4), (4, 1)),
    "ExpandBackward0": lambda x: x[None].expand(3, 4, 6),
    "TBackward0": torch.t,
    "TransposeBackward0": lambda x: x.transpose(-1, 0),
    "PermuteBackward0": lambda x: x[None].permute(2, 0, 1),
    "UnsqueezeBackward0": lambda x: x.unsqueeze(-1),
    "SelectBackward0": lambda x: x.select(-1, -2),
    "AliasBackward0": lambda x: torch.ops.aten.alias(x),
    "SqueezeBackward0": lambda x: x[:1].squeeze(),
    "SqueezeBackward1": lambda x: x[:, :1].squeeze(-1),
    "SliceBackward0": lambda x: x[..., 1:-1:2],
    "SplitBackward0": lambda x: x.split(4, -1)[1],
    "SplitWithSizesBackward0": lambda x: x.split([1, 2, 3], -1)[1],
    "UnsafeSplitBackward0": lambda x: torch.unsafe_split(x, 4, -1)[1],
    "UnbindBackward0": lambda x: x.unbind(1)[3],
}


def run(make: Make, dtype: torch.dtype, *, view: bool, node: str) -> None:
    module = make if isinstance(make, nn.Module) else None
    weights = [] if module is None else list(module.to(dtype).parameters())

    def program(leaves: dict[str, Tensor]) -> list[Tensor]:
        base = leaves["x"].cos() * 1.5
        other = base.sigmoid() + base  # base is saved: what the recipe begins from
        y = make(base)
        reached = y.grad_fn
        if node.startswith("UnsafeSplit") or view or module is not None or reached.name() == node:
            assert node in _names(reached), _names(reached)
        if current[0] is not None and module is not None:
            current[0].note_module(module, y)
        z = y.clone() if view else y
        return [z * z, other]

    current: list[Builder | None] = [None]
    x = leaf(4, 6, dtype=dtype)
    expected = observe(program, {"x": x})
    with open_engine(REMAKE) as engine:
        for step in range(3):
            grabbed = x.detach().clone().requires_grad_()
            before = engine.stats().total_recomputes
            with forward_pass(engine, grabbed, weights=weights) as opened:
                current[0] = opened.builder
                torch.manual_seed(7)
                outputs = program({"x": grabbed})
            fed = [torch.randn(o.shape, generator=torch.Generator().manual_seed(7)).to(o.dtype) for o in outputs]
            kept = [o.detach().clone() for o in outputs]
            torch.autograd.backward(outputs, fed)
            del outputs
            got = type(expected)(outputs=kept, grads={"x": grabbed.grad})
            assert compare(expected, got) == []
            last = "CloneBackward0" if view else node
            remade = [s for s, (_, _, action) in engine.last_pass.sites.items() if action is Action.RECOMPUTE]
            assert last in {s.node for s in remade}, (step, engine.last_pass.sites, engine.trust.demoted)
            assert engine.stats().recomputed_bytes > 0 and engine.stats().total_recomputes > before
            assert engine.stats().demoted_sites == ()
            current[0] = None
            assert_nothing_left(engine)


def _names(node: torch.autograd.graph.Node) -> set[str]:
    found, stack = set(), [node]
    while stack:
        found.add((n := stack.pop()).name())
        stack.extend(f for f, _ in n.next_functions if f is not None)
    return found


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("node", CASES)
def test_a_value_is_made_again(node: str, dtype: torch.dtype) -> None:
    run(CASES[node], dtype, view=False, node=node)


@pytest.mark.parametrize("node", VIEWS)
def test_a_view_is_a_step_of_a_recipe(node: str) -> None:
    run(VIEWS[node], torch.float32, view=True, node=node)


def test_every_rule_has_a_case() -> None:
    assert set(CASES) | set(VIEWS) == set(rule_table())


def test_random_operators_have_no_rule() -> None:
    x = torch.ones(4, 4, requires_grad=True)
    made = [F.dropout(x), torch.bernoulli(x * 0.5), F.rrelu(x, training=True), F.alpha_dropout(x, training=True)]
    for value in made:
        reached = value.grad_fn
        assert reached is not None
        if reached.name() != "AddBackward0":  # alpha dropout ends in additions to what has no rule
            assert reached.name() not in rule_table() or reached.name() == "MulBackward0"
