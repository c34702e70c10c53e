"""Differences that a first comparison misses: values equal during the first steps that differ later.

Without a guard each case is silently wrong. In the first step a factor is zero or one, like an initial value;
later it is not.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate

from ebbtide.engine.trust import Trust
from tests.helpers.engines import (
    POLICIES,
    REMAKE,
    TIERS,
    Backward,
    Leaves,
    all_at_once,
    assert_nothing_left,
    compare,
    leaf,
    observe,
    open_engine,
)
from tests.helpers.torches import READS_SLOTS

Opener = Callable[..., AbstractContextManager[Any]]
Case = Callable[[Leaves, Opener, int], list[Tensor]]
PLANS: dict[str, Any] = {**{name: name for name in POLICIES}, "recompute": REMAKE}
CASES: list[Any] = []


def case(make: Case) -> Case:
    CASES.append(pytest.param(make, id=make.__name__))
    return make


def wrong(reason: str) -> Callable[[Case], Case]:
    def add(make: Case) -> Case:
        CASES.append(pytest.param(make, id=make.__name__, marks=pytest.mark.xfail(strict=READS_SLOTS, reason=reason)))
        return make

    return add


def check(
    program: Case, backward: Backward = all_at_once, *, tiers: tuple[str, ...] = TIERS, leaves: Leaves | None = None
) -> None:
    """Compare three steps of a program bitwise under every policy over every tier."""
    leaves = leaves or {
        "x": leaf(6, 8),
        "w": leaf(6, 8, parameter=True),
        "m": leaf(8, 8, parameter=True),
        "half": leaf(8, 8, dtype=torch.bfloat16, parameter=True),
    }
    for tier in tiers:
        for name, plan in PLANS.items():
            with open_engine(plan, tier) as engine:
                for step in range(3):

                    def run(v: Leaves, block: Opener, step: int = step) -> list[Tensor]:
                        return program(v, block, step)

                    expected = observe(run, leaves, backward=backward, blocks=True)
                    assert expected.error is None, expected.message
                    got = observe(run, leaves, engine, backward=backward, blocks=True)
                    assert compare(expected, got) == [], (tier, name, step, got.message)
                    assert_nothing_left(engine)


# Results of in-place operators


@case
def a_sum_in_place_rounds(v: Leaves, block: Opener, step: int) -> list[Tensor]:
    with block(v["x"]):
        h = v["x"].bfloat16() @ v["half"]
        h.add_(v["w"] * float(step))
        return [h.float().sin()]


@case
def a_product_in_place_rounds(v: Leaves, block: Opener, step: int) -> list[Tensor]:
    with block(v["x"]):
        h = v["x"].bfloat16() @ v["half"]
        h.mul_(1 + v["w"] * float(step))
        return [h.float().sin()]


# Facts that a node lacks, or has and nothing reads


@wrong("autograd does not keep whether `torch.native_dropout`, called by hand, was told to train")
def a_dropout_that_stops_dropping(v: Leaves, block: Opener, step: int) -> list[Tensor]:
    with block(v["x"]):
        y, _ = torch.native_dropout(v["x"].sin(), 0.5, step == 0)
        return [(y + v["w"]).sin()]


@case
def a_batch_norm_with_a_bias_alone(v: Leaves, block: Opener, step: int) -> list[Tensor]:
    with block(v["x"]):
        return [F.batch_norm(v["x"] * v["w"], None, None, None, v["w"][0] * float(step), True).sin()]


# Tensors that change in place around a save


@case
def an_input_changed_inside_the_block(v: Leaves, block: Opener, step: int) -> list[Tensor]:
    t = v["x"] + 1.0
    with block(t):
        y = t + v["w"]
        t += v["m"][:6] * float(step)
        return [t.sin(), y.sin()]


@case
def a_change_between_a_dropped_save_and_an_operator(v: Leaves, block: Opener, step: int) -> list[Tensor]:
    with block(v["x"]):
        h = v["x"] + 1
        dropped = h.sin()
        for _ in range(3):
            (v["x"] * 3.0).sin()
        with torch.no_grad():
            h.mul_(1.0 + step)
        y = h + v["w"]
        del dropped
        return [y.sin()]


@case
def a_change_between_two_saves(v: Leaves, block: Opener, step: int) -> list[Tensor]:
    with block(v["x"]):
        h = v["x"] + 1
        dropped = h.sin()
        for _ in range(3):
            (v["x"] * 3.0).sin()
        with torch.no_grad():
            h.mul_(1.0 + step)
        again, y = h.cos(), h + v["w"]
        del dropped
        return [y.sin(), again]


@case
def a_source_of_a_cast_up_that_changed(v: Leaves, block: Opener, step: int) -> list[Tensor]:
    with block(v["x"]):
        h = v["x"].bfloat16() * 2
        y = h.float().sin()
        dropped = h.sin()
        h.mul_(2.0)
        del dropped
    return [y, _Holds.apply(y.detach().requires_grad_(), [h])]


class _Holds(torch.autograd.Function):
    """Keeps its input as long as its graph lives."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, held: list[Tensor]) -> Tensor:
        ctx.held = held
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        return grads[0], None


class _ChangesSaved(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x.sum()

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        (x,) = ctx.saved_tensors
        return x.mul_(2) * grads[0]


class _Reads(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x.sum()

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        (x,) = ctx.saved_tensors
        return x * grads[0]


@case
def an_operand_that_a_backward_changed(v: Leaves, block: Opener, step: int) -> list[Tensor]:
    with block(v["x"]):
        h = v["x"].cumsum(0) @ v["m"]
        dropped = h.sin()
        read = _Reads.apply(h + v["w"])
        for _ in range(3):
            v["x"].cumsum(0) * v["w"]
        del dropped
        return [read, _ChangesSaved.apply(h)]  # made last, goes backward first


# Switches


@contextmanager
def _precision(name: str) -> Iterator[None]:
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision(name)
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)


def a_matrix_precision_of_the_forward(v: Leaves, block: Opener, step: int) -> list[Tensor]:
    with _precision("medium"), block(v["x"]):
        return [((v["x"].repeat(6, 8) * 2.0) @ v["m"].repeat(8, 6)).sin()]


# Cases that held


@case
def a_gradient_inside_a_block(v: Leaves, block: Opener, step: int) -> list[Tensor]:
    x = v["x"] * 1.0
    with block(x):
        energy = (torch.tanh(x @ v["m"]) * x.sin()).square().sum()
        (force,) = torch.autograd.grad(energy, x, create_graph=True)
        return [x + force.sin() * F.silu(x @ v["m"])]


@case
def a_layout_behind_a_zero(v: Leaves, block: Opener, step: int) -> list[Tensor]:
    with block(v["x"]):
        image = (v["x"] + v["w"]).view(1, 3, 4, 4).contiguous(memory_format=torch.channels_last)
        return [(v["w"].view(1, 3, 4, 4) + image.softmax(1).cumsum(1) * float(step)).sin()]


class Reduced(torch.autograd.Function):
    """Changes its input without a new version, like a reduction among ranks, and returns it."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, factor: float = 2.0) -> Tensor:
        ctx.factor = factor
        x.data.mul_(factor)
        return x

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        return gradients[0] * ctx.factor, None


@case
def a_function_that_returns_its_input(v: Leaves, block: Opener, step: int) -> list[Tensor]:
    with block(v["x"]):
        return [F.silu(Reduced.apply(v["x"] @ (v["m"] * float(step)))).sin()]


@case
def a_function_that_returns_a_view_of_its_input(v: Leaves, block: Opener, step: int) -> list[Tensor]:
    with block(v["x"]):
        return [F.silu(Reduced.apply((v["x"] @ (v["m"] * float(step))).view(8, 6)).view(6, 8)).sin()]


@case
def a_clone_of_a_transposed_tensor_behind_a_zero(v: Leaves, block: Opener, step: int) -> list[Tensor]:
    with block(v["x"]):
        total = (v["x"] * v["w"][0]).t().clone().sum(0)
        return [(v["w"][:, 0] + total * float(step)).sin()]


@case
def numbers_that_are_none_in_half_precision(v: Leaves, block: Opener, step: int) -> list[Tensor]:
    with block(v["x"]):
        half = (v["x"].bfloat16() @ v["half"]).masked_fill(torch.arange(8) % 3 == 0, float("nan") if step else 1.0)
        wide = half.float()
        return [(wide * wide).nansum(), F.silu(torch.cat([half, v["half"]])).nansum(), wide.nan_to_num()]


@case
def numbers_that_are_none_in_another_order(v: Leaves, block: Opener, step: int) -> list[Tensor]:
    with block(v["x"]):
        half = (v["x"].bfloat16() @ v["half"]).masked_fill(torch.arange(8) % 3 == 0, float("nan") if step else 1.0)
        turned, wide = half.t().clone().t().float(), half.double()
        return [(turned * turned).nansum(), turned.nan_to_num(), (wide * wide).nansum(), wide.nan_to_num()]


@case
def what_was_cast_up_and_reduced_by_a_function(v: Leaves, block: Opener, step: int) -> list[Tensor]:
    with block(v["x"]):
        wide = Reduced.apply((v["x"].bfloat16() @ v["half"]).float(), 1.1)
        return [wide * wide]


@case
def what_was_cast_up_and_changed_through_data(v: Leaves, block: Opener, step: int) -> list[Tensor]:
    with block(v["x"]):
        wide = (v["x"].bfloat16() @ v["half"]).float()
        wide.data.mul_(1.1)
        return [wide * wide]


@case
def a_source_of_a_cast_up_that_was_changed_through_data(v: Leaves, block: Opener, step: int) -> list[Tensor]:
    with block(v["x"]):
        half = v["x"].bfloat16() @ v["half"]
        wide = half.float()
        wide.data[:3] = 0.0  # which both types hold
        return [wide * wide, half.sin()]


@case
def a_cast_of_a_weight_that_a_function_changed(v: Leaves, block: Opener, step: int) -> list[Tensor]:
    with torch.no_grad():
        v["m"].mul_(float(step))  # nothing in the first step
    with block(v["x"]):
        return [v["x"].bfloat16() @ Reduced.apply(v["m"].to(torch.bfloat16))]


@pytest.mark.parametrize("program", CASES)
def test_a_value_that_differs_between_steps_keeps_plain_trainings_bits(program: Case) -> None:
    check(program)


@pytest.mark.parametrize("to", ["clone", "contiguous"])
def test_a_clone_of_a_contiguous_image_in_another_order(to: str) -> None:
    """The sums of channels run in another order; in the first step all numbers are one half."""
    leaves = {"x": leaf(2, 8, 33, 35)}

    def program(v: Leaves, block: Opener, step: int) -> list[Tensor]:
        with block(v["x"]):
            image = getattr(torch.sigmoid(v["x"] * float(step)), to)(memory_format=torch.channels_last)
            return [image.mean((2, 3)).sin()]

    check(program, leaves=leaves)


def test_a_recompute_runs_under_the_numerics_of_its_forward() -> None:
    one, other = torch.randn(36, 64), torch.randn(64, 48)
    with _precision("medium"):
        rounded = one @ other
    if torch.equal(rounded, one @ other):
        pytest.skip("matrix products here are the same in every precision")
    check(a_matrix_precision_of_the_forward)


@pytest.mark.filterwarnings("ignore:TF32 acceleration")
def test_what_is_recomputed_on_the_way_was_computed_under_other_numerics() -> None:
    leaves = {"x": leaf(2, 8, 16, 16), "w": leaf(8, 8, 3, 3, parameter=True)}

    def program(v: Leaves, block: Opener, step: int) -> list[Tensor]:
        with block(v["x"]):
            with torch.backends.mkldnn.flags(enabled=step == 0):
                image = F.conv2d(v["x"], v["w"], padding=1)
                square = image * image
            gate = F.silu(image + v["x"])
            return [square, gate, gate * gate]

    check(program, leaves=leaves)


class _Doubles(torch.autograd.Function):
    """Its backward changes its saved tensor, which it takes for a copy."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(weight)
        return x * 2 + weight.sum()

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        (weight,) = ctx.saved_tensors
        weight.mul_(2)
        return gradients[0] * 2, weight * 1


def test_a_copy_of_a_weight_in_its_own_type_is_not_the_weight() -> None:
    def program(v: Leaves, block: Opener, step: int) -> list[Tensor]:
        with block(v["x"]):
            return [_Doubles.apply(v["x"], v["w"].to(torch.float32, copy=True)), v["w"].sum()]

    def backward(wanted: Any, fed: Any, leaves: Leaves) -> dict[str, Tensor | None]:
        return {**all_at_once(wanted, fed, leaves), "value of w": leaves["w"].detach().clone()}

    check(program, backward)


def test_two_wrappers_over_one_storage_that_changed_between_them() -> None:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        mesh = init_device_mesh("cpu", (1,))

        def program(v: Leaves, block: Opener, step: int) -> list[Tensor]:
            with block(v["x"]):
                h = v["x"] * 2.0
                first = DTensor.from_local(h, mesh, [Replicate()], run_check=False).sin().to_local()
                h = h.mul_(1.0 + v["w"])
                second = DTensor.from_local(h, mesh, [Replicate()], run_check=False).cos().to_local()
                for i in range(6):
                    (v["x"] * i).sin()
                return [first, second]

        def last_alone(wanted: Any, fed: Any, leaves: Leaves) -> dict[str, Tensor | None]:
            torch.autograd.backward(wanted[1], fed[1])
            return {k: t.grad for k, t in leaves.items()}

        check(program, last_alone)
    finally:
        dist.destroy_process_group()


# Rules that need no trust

ROWS = torch.tensor([[0, 2, 1, 3, 5, 4, 1, 0]] * 6)
MASK = torch.arange(48).view(6, 8) % 3 == 0
VARIANTS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "division rounded down": lambda x, w: torch.div(x * 3, w, rounding_mode="floor") + x,
    "subtraction scaled": lambda x, w: torch.sub(x, w, alpha=2.5),
    "clamp by tensors": lambda x, w: torch.clamp(x, w - 1, w + 0.1),
    "clamp by one tensor": lambda x, w: torch.clamp(x, min=w),
    "clamp by whole numbers": lambda x, w: (x * 5).clamp(-1, 2),
    "gelu of tanh": lambda x, w: F.gelu(x, approximate="tanh"),
    "elu": lambda x, w: F.elu(x, 0.3),
    "glu of rows": lambda x, w: F.glu(x, 0),
    "power of minus one": lambda x, w: x**-1,
    "power of zero": lambda x, w: x**0 + w,
    "number to a power": lambda x, w: 2**x,
    "where of a number": lambda x, w: torch.where(MASK, 0.1, w) * x,
    "where of a scalar tensor": lambda x, w: torch.where(MASK, x, w.sum()),
    "masked fill of a tensor": lambda x, w: x.masked_fill(MASK, w.sum()),
    "cumsum in another type": lambda x, w: x.cumsum(0, dtype=torch.float64),
    "softmax in another type": lambda x, w: x.bfloat16().softmax(0, dtype=torch.float32),
    "sum over no dimension": lambda x, w: x.sum(dim=[]) * w,
    "mean in another type": lambda x, w: x.mean(-1, dtype=torch.float64),
    "norm of infinity": lambda x, w: torch.linalg.vector_norm(x, float("inf"), dim=1),
    "norm in another type": lambda x, w: torch.linalg.vector_norm(x, 2, dim=0, dtype=torch.float64),
    "magnitude": lambda x, w: torch.complex(x, w).abs(),
    "index by a mask": lambda x, w: x[MASK],
    "index by two, apart": lambda x, w: x.view(3, 2, 8)[ROWS[0, :2], :, ROWS[1, :2]],
    "index with a new dimension": lambda x, w: x[None, 1:, [0, 2]],
    "gather from behind": lambda x, w: x.gather(-1, ROWS),
    "chunk": lambda x, w: (x + w).chunk(3, -1)[2] * 1.0,
    "roll of several": lambda x, w: x.roll((1, -2), (0, -1)),
    "cat of types": lambda x, w: torch.cat([x.bfloat16(), w]),
    "addmm scaled": lambda x, w: torch.addmm(w[0, :6], x, w.t(), alpha=0.5, beta=2.0),
    "convolution padded to the same": lambda x, w: F.conv1d(x.view(2, 3, 8), w[:, :3].view(2, 3, 3), padding="same"),
    "batch norm in evaluation": lambda x, w: F.batch_norm(x, torch.ones(8), torch.ones(8) * 2, w[0], w[1], False),
    "instance norm": lambda x, w: F.instance_norm(x.view(2, 3, 8), weight=w[0, :3], bias=w[1, :3]),
    "upsampling by a scale": lambda x, w: F.interpolate(x.view(2, 3, 8), scale_factor=1.7),
    "pooling by a divisor": lambda x, w: F.avg_pool2d(x.view(1, 3, 4, 4), 2, divisor_override=3),
    "clone in another layout": lambda x, w: x.view(1, 3, 4, 4).clone(memory_format=torch.channels_last),
    "a number of another type": lambda x, w: x.bfloat16() * 1.2345,
    "a scalar of another type": lambda x, w: x / torch.tensor(3.3, dtype=torch.float64),
    "dropout of nothing": lambda x, w: torch.native_dropout(x, 0.0, True)[0] + w,
}


@pytest.mark.parametrize("variant", VARIANTS)
def test_a_rule_that_nobody_checks_is_right(variant: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A zero may hide a wrong rule, so a rule must be right by itself: no recompute is compared here."""
    monkeypatch.setattr(Trust, "_compare", lambda *given: True)
    make = VARIANTS[variant]

    def program(v: Leaves, block: Opener, step: int) -> list[Tensor]:
        with block(v["x"]):
            y, behind = make(v["x"], v["w"]), make(v["x"] * v["w"][0], v["w"])
            return [y.sin(), (behind + behind).cos()]

    check(program, tiers=("host",))
