"""Changes in place are refused or allowed exactly as by plain autograd. Invariant 4."""

from __future__ import annotations

import functools
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import ebbtide
from ebbtide.base.actions import Action
from ebbtide.base.errors import ModifiedInPlaceError, RestoreError
from tests.helpers.engines import (
    POLICIES,
    REMAKE,
    TIERS,
    Leaves,
    compare,
    forward_pass,
    leaf,
    observe,
    open_engine,
)
from tests.helpers.torches import needs_slots
from tests.helpers.twice import Stack, difference, sgd, step_of, train


def _untracked(change: Callable[[], object]) -> None:
    with torch.no_grad():
        change()


def output_changed(v: Leaves) -> list[Tensor]:
    y = v["x"].exp()
    y.add_(1)
    return [y]


def input_changed(v: Leaves) -> list[Tensor]:
    y = v["x"] * 1
    z = y.sin()
    y.mul_(2)
    return [z]


def input_changed_under_a_view(v: Leaves) -> list[Tensor]:
    y = v["x"] * 1
    z = y * y
    y[:1].mul_(2)
    return [z]


def view_changed_by_its_base(v: Leaves) -> list[Tensor]:
    y = v["x"].cumsum(0)
    z = y[:1] * y[:1]
    y.mul_(2)
    return [z]


def untracked_change(v: Leaves) -> list[Tensor]:
    y = v["x"] * 1
    z = y.cos()
    _untracked(lambda: y.mul_(2))
    return [z]


def weight_changed(v: Leaves) -> list[Tensor]:
    z = F.linear(v["x"], v["w"])
    _untracked(lambda: v["w"].add_(1))
    return [z]


def view_of_a_weight_changed(v: Leaves) -> list[Tensor]:
    z = v["x"] @ v["w"].t()[:, :4]
    _untracked(lambda: v["w"].add_(1))
    return [z]


def detached_weight_changed(v: Leaves) -> list[Tensor]:
    z = v["x"] @ v["w"].detach()
    _untracked(lambda: v["w"].add_(1))
    return [z]


def small_changed(v: Leaves) -> list[Tensor]:
    s = v["s"] * 1
    z = v["x"] * s
    _untracked(lambda: s.add_(1))
    return [z]


def leaf_input_changed(v: Leaves) -> list[Tensor]:
    z = v["x"].sin()
    _untracked(lambda: v["x"].add_(1))
    return [z]


def saved_twice_around_a_change(v: Leaves) -> list[Tensor]:
    y = v["x"] * 1
    one = y.sin()
    y.mul_(2)
    return [one, y.cos()]


REFUSED = {
    f.__name__: f
    for f in (
        output_changed,
        input_changed,
        input_changed_under_a_view,
        view_changed_by_its_base,
        untracked_change,
        weight_changed,
        view_of_a_weight_changed,
        detached_weight_changed,
        small_changed,
        leaf_input_changed,
        saved_twice_around_a_change,
    )
}


def unsaved_input_changed(v: Leaves) -> list[Tensor]:
    y = v["x"] * 1
    z = y + 1
    y.mul_(2)
    return [z * z, y]


def input_of_an_output_saver_changed(v: Leaves) -> list[Tensor]:
    y = v["x"] * 1
    z = y.exp()  # saves its result
    y.mul_(2)
    return [z * z, y * y]


def leaf_input_of_an_output_saver_changed(v: Leaves) -> list[Tensor]:
    z = v["x"].tanh()
    _untracked(lambda: v["x"].add_(1))
    return [z * z]


def changed_before_it_is_saved(v: Leaves) -> list[Tensor]:
    y = v["x"] * 1
    y.mul_(2)
    y[:1].add_(1)
    return [y * y, y.sin()]


def changed_before_it_is_saved_and_viewed(v: Leaves) -> list[Tensor]:
    y = v["x"] * 1
    view = y[1:3]
    view.relu_()
    return [view * y[1:3], y.view(-1).sigmoid()]


def untracked_before_it_is_saved(v: Leaves) -> list[Tensor]:
    y = v["x"] * 1
    _untracked(lambda: y.clamp_(min=-0.5))
    return [F.silu(y.view(-1)) * y.view(-1), y.exp() * 2]


def unneeded_saver(v: Leaves) -> list[Tensor]:
    s = v["x"].detach().cumsum(0)
    z = v["x"] * 1
    unused = s * z  # saves s; dropped
    del unused
    s.mul_(2)
    return [z.sin()]


def activation_in_place(v: Leaves) -> list[Tensor]:
    y = F.linear(v["x"], v["w"])
    return [F.relu(y, inplace=True) * 2, F.silu(y * 3, inplace=True)]


def residual_in_place(v: Leaves) -> list[Tensor]:
    y = v["x"] * 1
    y += F.linear(F.layer_norm(v["x"], (8,)), v["w"])
    return [y.sin()]


ALLOWED = {
    f.__name__: f
    for f in (
        unsaved_input_changed,
        input_of_an_output_saver_changed,
        leaf_input_of_an_output_saver_changed,
        changed_before_it_is_saved,
        changed_before_it_is_saved_and_viewed,
        untracked_before_it_is_saved,
        unneeded_saver,
        activation_in_place,
        residual_in_place,
    )
}
PLANS = {**{k: k for k in POLICIES}, "recompute": REMAKE}


def the_leaves() -> dict[str, Tensor]:
    return {"x": leaf(6, 8), "w": leaf(8, 8, parameter=True), "s": leaf(1, parameter=True)}


@pytest.mark.parametrize("tier", TIERS)
@pytest.mark.parametrize("plan", PLANS)
@pytest.mark.parametrize("name", REFUSED)
def test_what_plain_training_refuses_is_refused(name: str, plan: str, tier: str) -> None:
    leaves = the_leaves()
    expected = observe(REFUSED[name], leaves)
    assert expected.error == (RuntimeError, "backward"), "the case itself"
    for min_bytes, rate in ((0, 1.0), (0, 1e12), (1 << 20, 1.0)):  # the copy has not begun, is done, there is none
        with open_engine(PLANS[plan], tier, min_bytes=min_bytes, rate=rate, window_bytes=1) as engine:
            for _ in range(2):
                got = observe(REFUSED[name], leaves, engine)
                assert got.error == (ModifiedInPlaceError, "backward")
                if got.message.startswith("one of"):
                    told = got.message.split("[")[0]
                    assert expected.message.startswith(told), "in plain autograd's words"


@pytest.mark.parametrize("tier", TIERS)
@pytest.mark.parametrize("plan", PLANS)
@pytest.mark.parametrize("name", ALLOWED)
def test_what_plain_training_allows_is_allowed(name: str, plan: str, tier: str) -> None:
    leaves = the_leaves()
    expected = observe(ALLOWED[name], leaves)
    assert expected.error is None, "the case itself"
    for min_bytes, rate in ((0, 1.0), (0, 1e12), (1 << 20, 1.0)):
        with open_engine(PLANS[plan], tier, min_bytes=min_bytes, rate=rate, window_bytes=1, verify=True) as engine:
            for thread in (False, True):
                assert compare(expected, observe(ALLOWED[name], leaves, engine, thread=thread)) == []


@pytest.mark.xfail(
    strict=True,
    raises=ModifiedInPlaceError,
    reason="a recipe may name a bias, or a tensor that only another branch saved; plain autograd lets those change "
    "before backward, and the recompute refuses (an error with a hint, never a wrong gradient)",
)
@pytest.mark.parametrize("case", ["bias", "branch"])
def test_an_operand_that_the_reader_itself_did_not_save_may_change(case: str) -> None:
    x, w, b = leaf(6, 8), leaf(8, 8, parameter=True), leaf(8, parameter=True)
    with open_engine(REMAKE, rate=1.0) as engine:
        with forward_pass(engine, x, weights=[w, b]):
            y = F.linear(x, w, b) if case == "bias" else x.cumsum(0)
            unneeded = y.sin()
            loss = y.exp().mul(2).sum()
        changed = b if case == "bias" else y
        _untracked(functools.partial(changed.mul_, 2))
        del y, changed
        torch.autograd.grad(loss, x)
        assert unneeded.requires_grad


def test_an_untracked_change_of_an_unsaved_tensor_that_begins_late_is_an_error() -> None:
    """It leaves no trace in the graph, and changed nothing when the recipe was compared: the fingerprint finds it."""

    def program(v: Leaves) -> list[Tensor]:
        y = v["x"].sin()
        _untracked(lambda: y.clamp_(max=0.5))
        return [y.view(-1).exp() * 2]

    small, large = {"x": leaf(6, 8).detach().mul(0.01).requires_grad_()}, {"x": leaf(6, 8)}
    with open_engine(REMAKE) as engine:
        assert compare(observe(program, small), observe(program, small, engine)) == []
        assert observe(program, large, engine).error == (RestoreError, "backward")
        assert compare(observe(program, large), observe(program, large, engine)) == [], "its site is offloaded"


@pytest.mark.parametrize("saver", [lambda y: F.relu_(y) * 2, lambda y: y * y], ids=["in place", "later"])
def test_a_tensor_that_was_also_written_without_a_trace_is_not_recomputed(saver: Callable[[Tensor], Tensor]) -> None:
    """One version is the operator's in place that saves its own result; no sample need find one element of many."""

    def program(v: Leaves) -> list[Tensor]:
        y = v["x"].sin()
        if v["x"][0, 0] > 100:
            _untracked(lambda: y[-1, -1:].fill_(3))
        return [saver(y)]

    as_made = {"x": leaf(64, 256)}
    written = {"x": torch.cat([torch.full((1, 256), 200.0), torch.randn(63, 256)]).requires_grad_()}
    with open_engine(REMAKE) as engine:
        for leaves in (as_made, as_made, written):
            before = engine.stats().total_recomputes
            assert compare(observe(program, leaves), observe(program, leaves, engine)) == []
            assert (engine.stats().total_recomputes > before) is (leaves is as_made)


class Layers(nn.Module):
    """A block of a norm, an activation in place and a product, each of which saves its input."""

    def __init__(self, norm: nn.Module, activation: nn.Module, *, part: bool = False) -> None:
        super().__init__()
        self.first, self.norm, self.activation, self.part = nn.Conv2d(4, 4, 1), norm, activation, part
        self.last = nn.Conv2d(4, 4, 1)

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(self.first(x))
        self.activation(y[:, :2] if self.part else y)
        return x + self.last(y)


NORMS: dict[str, Callable[[], nn.Module]] = {
    "batch": lambda: nn.BatchNorm2d(4),
    "instance": lambda: nn.InstanceNorm2d(4),
    "affine instance": lambda: nn.InstanceNorm2d(4, affine=True, track_running_stats=True),
}
IN_PLACE: dict[str, Callable[[], nn.Module]] = {
    "saves its result": lambda: nn.LeakyReLU(0.2, inplace=True),
    "saves its input": lambda: nn.SiLU(inplace=True),
    "draws": lambda: nn.RReLU(inplace=True),
}


def _images(model: nn.Module) -> Tensor:
    return model(torch.randn(2, 4, 8, 8, requires_grad=True)).square().mean()


@needs_slots
@pytest.mark.parametrize("part", [False, True], ids=["all", "part"])
@pytest.mark.parametrize("activation", IN_PLACE)
@pytest.mark.parametrize("norm", NORMS)
def test_what_a_layer_computed_in_place_is_recomputed(norm: str, activation: str, part: bool) -> None:
    """Of an instance norm it writes into a view, and autograd's node does not tell what it computes."""

    def make() -> nn.Module:
        return sgd(Stack(*[Layers(NORMS[norm](), IN_PLACE[activation](), part=part) for _ in range(2)]))

    plain, _ = train(make, step_of(_images), 3)
    got, stats = train(make, step_of(_images), 3, policy=REMAKE, verify=True)
    assert difference(plain, got) == ""
    assert stats.demoted_sites == ()
    with ebbtide.enable_activation_offloading(model := make(), policy=REMAKE, min_bytes=0, target="disk") as handle:
        _images(model).backward()
        nodes = {site.node for site, action in handle._engine.last_pass.sites if action is Action.OFFLOAD}
    assert part or activation == "draws" or nodes <= {"input", "leaf"}, nodes


@needs_slots
def test_a_layer_in_place_that_does_nothing_does_not_hide_what_was_written_without_a_trace() -> None:
    class Written(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Dropout(0.0, inplace=True)

        def forward(self, x: Tensor) -> Tensor:
            y = x.sin()
            if x[0, 0] > 100:
                _untracked(lambda: y[-1, -1:].fill_(3))
            y = self.layer(y)
            return y * y

    block = nn.ModuleList([Written(), nn.Linear(2, 2)])
    as_made = torch.randn(64, 256)
    written = torch.cat([torch.full((1, 256), 200.0), torch.randn(63, 256)])
    with ebbtide.enable_activation_offloading(block, policy=REMAKE, blocks=["0"], min_bytes=0, target="disk") as handle:
        for values in (as_made, as_made, written):
            x, other = values.clone().requires_grad_(), values.clone().requires_grad_()
            before = handle.stats().total_recomputes
            block[0](x).sum().backward()
            assert (handle.stats().total_recomputes > before) is (values is as_made)
            Written.forward(block[0], other).sum().backward()
            assert torch.equal(x.grad, other.grad)


def test_an_input_that_may_not_be_used_any_more_is_only_an_error_when_it_is_used() -> None:
    def program() -> tuple[Tensor, Tensor, Tensor]:
        whole = x * 1
        part, other = whole.split(3)
        whole.mul_(2)  # from here on torch refuses to say how the parts were made
        return whole, part, other

    x = leaf(6, 8)
    whole, part, other = program()
    with pytest.raises(RuntimeError, match="modified inplace"):
        part.sin()
    expected = torch.autograd.grad(whole.sin().sum(), x)[0]
    with open_engine("offload") as engine:
        whole, part, other = program()
        with forward_pass(engine, whole, part, other):
            y = whole.sin()
        assert torch.equal(expected, torch.autograd.grad(y.sum(), x)[0])
