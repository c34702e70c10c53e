"""Every rule: the value behind its node is dropped, recomputed, and bitwise equal."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import ebbtide
from ebbtide.base.actions import Action
from ebbtide.engine.build import Builder, NodeView
from ebbtide.engine.modules import Running
from ebbtide.engine.rules import layers, rule_table
from ebbtide.engine.rules.elements import _make_dropout
from tests.helpers.engines import (
    REMAKE,
    ByTable,
    assert_nothing_left,
    compare,
    forward_pass,
    leaf,
    observe,
    open_engine,
)
from tests.helpers.oracle import same_bits
from tests.helpers.torches import MULTIPLIES_GROUPS, READS_SLOTS, SAVES_EPS, needs_slots

Make = Callable[[Tensor], Tensor]


class ConvOfRows(nn.Conv2d):
    """Takes [4, 6] as an image."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.view(1, 1, 4, 6))


def _norm(module: nn.Module) -> Make:
    return module


# Node name → a function of x [4, 6] whose result that node makes; the saved tensor is behind the node.
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
    "LeakyReluBackward1": lambda x: F.leaky_relu(x * 1, 0.2, inplace=True),
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
    "AddcmulBackward0": lambda x: torch.addcmul(x, x, x.sin(), value=0.3),
    "AmaxBackward0": lambda x: x.amax(-1, keepdim=True),
    "AvgPool2DBackward0": lambda x: F.avg_pool2d(x.view(1, 1, 4, 6), (2, 3), padding=1, count_include_pad=False),
    "AvgPool3DBackward0": lambda x: F.avg_pool3d(x.view(1, 1, 2, 2, 6), 2),
    "CeluBackward0": lambda x: F.celu(x, 0.7),
    "CeluBackward1": lambda x: F.celu(x * 1, 0.7, inplace=True),
    "ClampBackward0": lambda x: torch.clamp(x, x.sin() - 1, x.exp()),
    "ClampBackward1": lambda x: x.clamp(max=0.4),
    "ClampMaxBackward0": lambda x: x.clamp_max(0.4),
    "ClampMinBackward0": lambda x: x.clamp_min(0.4),
    "ConvolutionBackward0": lambda x: F.conv2d(x.view(1, 1, 4, 6), x[:2, :2].reshape(1, 1, 2, 2), stride=(1, 2)),
    "CumsumBackward0": lambda x: x.cumsum(-1),
    "DivBackward1": lambda x: torch.ops.aten.div.Scalar(x, 0.3),
    "EluBackward0": F.selu,
    "EluBackward1": lambda x: F.selu(x * 1, inplace=True),
    "EmbeddingBackward0": lambda x: F.embedding(torch.tensor([[0, 3], [3, 1]]), x),
    "ErfBackward0": torch.erf,
    "Expm1Backward0": torch.expm1,
    "FlipBackward0": lambda x: x.flip(0, -1),
    "GatherBackward0": lambda x: x.gather(-1, torch.tensor([[0, 5], [2, 2], [1, 0], [4, 3]])),
    "GroupedMmBackward0": lambda x: torch._grouped_mm(
        x.bfloat16().repeat(4, 8)[:, :16] * 1,
        x.bfloat16().repeat(8, 8)[:, :32].reshape(2, 16, 32) * 1,
        offs=torch.tensor([5, 16], dtype=torch.int32),
    ),
    "HardsigmoidBackward0": F.hardsigmoid,
    "HardtanhBackward0": F.relu6,
    "IndexBackward0": lambda x: x[:, torch.tensor([5, 0, 0])],
    "IndexSelectBackward0": lambda x: x.index_select(-1, torch.tensor([5, 0, 0])),
    "LerpBackward0": lambda x: torch.lerp(x, x.sin(), 0.3),
    "LinalgVectorNormBackward0": lambda x: torch.linalg.vector_norm(x, dim=-1, keepdim=True),
    "Log1PBackward0": lambda x: torch.log1p(x.abs()),
    "LogSoftmaxBackward0": lambda x: x.log_softmax(0),
    "LogsumexpBackward0": lambda x: x.logsumexp(-1, keepdim=True),
    "MaskedFillBackward1": lambda x: x.masked_fill(x > 0, x[0, 0]),
    "MaximumBackward0": lambda x: torch.maximum(x, x.sin()),
    "MinimumBackward0": lambda x: torch.minimum(x, x.sin()),
    "MulBackward1": lambda x: torch.ops.aten.mul.Scalar(x, 0.3),
    "NativeBatchNormBackward0": _norm(nn.BatchNorm1d(6)),
    "NativeDropoutBackward0": lambda x: torch.native_dropout(x, 0.3, True)[0],
    "PixelShuffleBackward0": lambda x: F.pixel_shuffle(x.view(1, 4, 2, 3), 2),
    "PixelUnshuffleBackward0": lambda x: F.pixel_unshuffle(x.view(1, 1, 4, 6), 2),
    "PowBackward1": lambda x: torch.pow(x.abs(), x),
    "PowBackward2": lambda x: 1.3**x,
    "ReciprocalBackward0": torch.reciprocal,
    "RsubBackward0": lambda x: torch.rsub(x, x.sin(), alpha=0.3),
    "SafeSoftmaxBackward0": lambda x: torch.ops.aten._safe_softmax(x, -1),
    "SoftmaxBackward0": lambda x: x.softmax(-1),
    "TrilBackward0": lambda x: x.tril(1),
    "TriuBackward0": lambda x: x.triu(-1),
    "UpsampleBilinear2DBackward0": lambda x: F.interpolate(x.view(1, 1, 4, 6), size=(7, 9), mode="bilinear"),
    "UpsampleNearest1DBackward0": lambda x: F.interpolate(x.view(1, 4, 6), scale_factor=1.7),
    "UpsampleNearest2DBackward0": lambda x: F.interpolate(x.view(1, 1, 4, 6), scale_factor=2),
    "UpsampleNearest3DBackward0": lambda x: F.interpolate(x.view(1, 1, 2, 2, 6), size=(3, 5, 7)),
    "UpsampleNearestExact2DBackward0": lambda x: F.interpolate(
        x.view(1, 1, 4, 6), scale_factor=1.5, mode="nearest-exact"
    ),
}
ON_DEVICES_ONLY = {"CudnnBatchNormBackward0", "FusedRmsNormBackward0", "MiopenBatchNormBackward0"}
"""Nodes that a CPU does not make: their cases are in ``tests/gpu``."""
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
    "DiagonalBackward0": lambda x: x.diagonal(1, -1, 0),
    "SqueezeBackward2": lambda x: x[:1, :1].squeeze((0, -1)),
    "UnfoldBackward0": lambda x: x.unfold(-1, 3, 2),
    "ViewAsComplexBackward0": lambda x: torch.view_as_real(torch.view_as_complex(x.view(4, 3, 2)).t()),
    "ViewAsRealBackward0": lambda x: torch.view_as_real(torch.view_as_complex(x.view(4, 3, 2))),
}


def run(make: Make, dtype: torch.dtype, *, view: bool, node: str) -> None:
    module = make if isinstance(make, nn.Module) else None
    weights = [] if module is None else list(module.to(dtype).parameters())

    def program(leaves: dict[str, Tensor]) -> list[Tensor]:
        base = (leaves["x"].cos() + leaves["x"]).tanh()
        other = base.sigmoid() + base  # base is saved: the recipe begins from it
        running = None if module is None else Running.here("", module, "cpu")
        y = make(base)
        reached = y.grad_fn
        if node.startswith("UnsafeSplit") or view or module is not None or reached.name() == node:
            assert node in _names(reached), _names(reached)
        if current[0] is not None and running is not None:
            current[0].note_module(running, y)
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
            recomputed = [s for s, action in engine.last_pass.sites if action is Action.RECOMPUTE]
            if READS_SLOTS:  # else many rules build no recipe, and their tensors are offloaded
                assert last in {s.node for s in recomputed}, (step, engine.last_pass.sites, engine.trust.demoted)
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
def test_a_value_is_recomputed(node: str, dtype: torch.dtype) -> None:
    if node == "AvgPool3DBackward0" and dtype is torch.bfloat16:
        pytest.skip("torch pools bfloat16 volumes on devices only")
    if node == "GroupedMmBackward0" and not MULTIPLIES_GROUPS:
        pytest.skip("this torch multiplies groups on devices only")
    run(CASES[node], dtype, view=False, node=node)


@pytest.mark.parametrize("node", VIEWS)
def test_a_view_is_a_step_of_a_recipe(node: str) -> None:
    run(VIEWS[node], torch.float32, view=True, node=node)


def test_every_rule_has_a_case() -> None:
    in_layers = {"torch::autograd::CopySlices"}  # see test_in_place.py
    assert set(CASES) | set(VIEWS) | ON_DEVICES_ONLY | in_layers == set(rule_table())


# Further shapes of rules that have several.
OTHERS: dict[str, tuple[str, Make]] = {
    "a batch norm without weights": ("NativeBatchNormBackward0", _norm(nn.BatchNorm1d(6, affine=False, eps=1e-3))),
    "a batch norm in eval mode": ("NativeBatchNormBackward0", _norm(nn.BatchNorm1d(6).eval())),
    "a batch norm that tracks nothing": (
        "NativeBatchNormBackward0",
        _norm(nn.BatchNorm1d(6, track_running_stats=False)),
    ),
    "a functional batch norm": (
        "NativeBatchNormBackward0",
        lambda x: F.batch_norm(x, None, None, x[0], x[1], True, 0.1, 1e-3),
    ),
    "a functional group norm": ("NativeGroupNormBackward0", lambda x: F.group_norm(x, 2, x[0], x[1], eps=1e-3)),
    "a group norm without weights": ("NativeGroupNormBackward0", _norm(nn.GroupNorm(3, 6, affine=False))),
    "a layer norm without bias": ("NativeLayerNormBackward0", _norm(nn.LayerNorm(6, bias=False))),
    "a layer norm without weights": ("NativeLayerNormBackward0", _norm(nn.LayerNorm(6, elementwise_affine=False))),
    "a convolution with a bias": (
        "ConvolutionBackward0",
        _norm(nn.Sequential(nn.Unflatten(1, (2, 3)), nn.Conv1d(2, 4, 2, dilation=2))),
    ),
    "a depthwise convolution": (
        "ConvolutionBackward0",
        _norm(nn.Sequential(nn.Unflatten(1, (2, 3)), nn.Conv1d(2, 2, 2, groups=2, bias=False))),
    ),
    "a transposed convolution": (
        "ConvolutionBackward0",
        _norm(nn.Sequential(nn.Unflatten(1, (2, 3)), nn.ConvTranspose1d(2, 3, 2, stride=2, output_padding=1))),
    ),
    "a convolution of frozen weights": (
        "ConvolutionBackward0",
        _norm(ConvOfRows(1, 3, 2).requires_grad_(False)),
    ),
    "a linear layer with a frozen bias": ("AddmmBackward0", _norm(nn.Linear(6, 5).requires_grad_(False))),
    "a rectifier in place": ("ReluBackward0", lambda x: F.relu(x * 1, inplace=True)),
    "a batch norm and a rectifier in place": (
        "ReluBackward0",
        lambda x: F.relu(F.batch_norm(x, None, None, x[0], x[1], True), inplace=True),
    ),
    "two indices": ("IndexBackward0", lambda x: x[torch.tensor([0, 3]), torch.tensor([5, 1])]),
    "a mask as an index": ("IndexBackward0", lambda x: x[torch.arange(24).view(4, 6) % 5 == 0]),
    "a mask and an index": (
        "IndexBackward0",
        lambda x: x.view(4, 3, 2)[torch.tensor([True, False, True, True]), :, torch.tensor([0, 1, 1])],
    ),
    "a softmax into float32": ("SoftmaxBackward0", lambda x: F.softmax(x, -1, dtype=torch.float32)),
    "a sum into float64": ("SumBackward1", lambda x: x.sum(-1, dtype=torch.float64)),
    "a norm of complex numbers": (
        "LinalgVectorNormBackward0",
        lambda x: torch.linalg.vector_norm(torch.view_as_complex(x.float().view(4, 3, 2)), dim=-1, keepdim=True),
    ),
    "dropout of everything": ("NativeDropoutBackward0", lambda x: torch.native_dropout(x, 1.0, True)[0]),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("name", OTHERS)
def test_another_shape_of_a_rule(name: str, dtype: torch.dtype) -> None:
    node, make = OTHERS[name]
    if name == "a functional group norm" and not SAVES_EPS:
        pytest.skip("this torch does not save its eps")
    run(make, dtype, view=False, node=node)


def test_a_group_norm_that_does_not_save_its_eps_has_that_of_its_layer(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As since torch 2.14."""
    constant = NodeView.constant

    def without_eps(node: NodeView, name: str) -> Any:
        if name == "eps":
            raise AttributeError(name)
        return constant(node, name)

    monkeypatch.setattr(NodeView, "constant", without_eps)
    monkeypatch.setattr(layers, "hasattr", lambda node, name: False, raising=False)
    run(_norm(nn.GroupNorm(3, 6, eps=1e-3)), torch.float32, view=False, node="NativeGroupNormBackward0")


@needs_slots
def test_a_recomputed_batch_norm_counts_no_batch_twice() -> None:
    norm = nn.BatchNorm1d(6)
    x = leaf(4, 6)
    with open_engine(REMAKE) as engine:
        with forward_pass(engine, x, weights=[*norm.parameters(), *norm.buffers()]) as opened:
            running = Running.here("", norm, "cpu")
            y = norm(x * 2)
            opened.builder.note_module(running, y)
            z = y * y
        del y
        z.sum().backward()
        assert engine.stats().total_recomputes > 0
    assert norm.num_batches_tracked == 1
    expected = nn.BatchNorm1d(6)
    expected(x * 2)
    assert torch.equal(norm.running_mean, expected.running_mean)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=["fp32", "bf16", "fp64"])
def test_a_device_scales_what_dropout_keeps_as_its_kernel_did(
    dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It divides by the probability in the type in which it multiplies; autograd, for backward, in float64."""
    scales: list[float] = []
    monkeypatch.setattr(torch.ops.aten, "native_dropout_backward", lambda x, mask, scale: scales.append(scale))
    x, wide = torch.empty(2, dtype=dtype, device="meta"), dtype if dtype is torch.float64 else torch.float32
    unlike_autograd = 0
    for p in (n / 1000 for n in range(1, 1000)):
        _make_dropout(p, 0)(x, x.bool())
        expected, found = 1 / torch.tensor(1 - p, dtype=wide), torch.tensor(scales.pop(), dtype=wide)
        assert found == expected, p
        unlike_autograd += bool(torch.tensor(1 / (1 - p), dtype=wide) != expected)
    assert bool(unlike_autograd) is (dtype is not torch.float64)
    _make_dropout(1.0, 0)(x, x.bool())
    assert scales == [0.0]


def test_random_operators_have_no_rule() -> None:
    x = torch.ones(4, 4, requires_grad=True)
    made = [F.dropout(x), torch.bernoulli(x * 0.5), F.rrelu(x, training=True), F.alpha_dropout(x, training=True)]
    for value in made:
        reached = value.grad_fn
        assert reached is not None
        if reached.name() != "AddBackward0":  # alpha dropout ends in additions to tensors without a rule
            assert reached.name() not in rule_table() or reached.name() == "MulBackward0"


@needs_slots
@pytest.mark.parametrize("frozen", [nn.Linear, ConvOfRows], ids=["linear", "convolution"])
def test_a_frozen_bias_is_taken_as_autocast_cast_it(frozen: type[nn.Module]) -> None:
    layer = (frozen(6, 5) if frozen is nn.Linear else frozen(1, 3, 2)).requires_grad_(False)
    model, x = nn.Sequential(nn.Sequential(nn.Tanh(), layer, nn.Sigmoid(), nn.SiLU())), leaf(4, 6)

    def grads() -> list[Tensor]:
        with torch.autocast("cpu", torch.bfloat16):
            y = model(x)
        return list(torch.autograd.grad(y.float().square().sum(), x))

    expected = grads()
    with ebbtide.enable_activation_offloading(model, policy="minimal", blocks=["0"], min_bytes=0) as handle:
        for _ in range(2):
            assert all(map(same_bits, expected, grads()))
        sites = handle._engine.last_pass.sites
        assert handle.stats().demoted_sites == ()
        assert any(s.node == "SigmoidBackward0" and a is Action.RECOMPUTE for s, a in sites), sites


@needs_slots
@pytest.mark.parametrize("kind", [nn.Conv2d, nn.ConvTranspose2d])
def test_the_work_of_a_convolution_does_not_depend_on_what_is_frozen(kind: type[nn.Module]) -> None:
    found = []
    for frozen in (False, True):
        layer = kind(4, 6, 3, bias=False).requires_grad_(not frozen)
        plan = ByTable(Action.KEEP)
        with open_engine(plan) as engine:
            x = leaf(2, 4, 8, 8)
            with forward_pass(engine, x, weights=list(layer.parameters())):
                y = layer(x.sigmoid()).sin()
            y.sum().backward()
        found += [c.recompute_flops for c in plan.asked if c.site.node == "ConvolutionBackward0"]
    elements = 2 * 6 * 6 * 6 if kind is nn.Conv2d else 2 * 4 * 8 * 8
    assert found == [2 * elements * (4 if kind is nn.Conv2d else 6) * 9] * 2
