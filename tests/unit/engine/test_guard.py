"""The guards of a recipe's operands, each by itself."""

from __future__ import annotations

import functools
import gc
import threading
import weakref
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import parametrize, prune
from torch.optim.optimizer import _global_optimizer_pre_hooks, register_optimizer_step_pre_hook

import ebbtide
from ebbtide.base.errors import RestoreError
from ebbtide.engine.fingerprint import Compared
from ebbtide.engine.guard import FULL_BYTES, Watched, WeightGuard, _guards
from ebbtide.engine.model import ModelWeights
from ebbtide.engine.modules import Record, Running, record_of
from ebbtide.engine.trust import Trust
from ebbtide.engine.weights import Weights
from tests.helpers.engines import REMAKE, forward_pass, leaf, open_engine
from tests.helpers.torches import needs_slots


def guard(await_comparisons: Any = lambda: None) -> WeightGuard:
    return WeightGuard(threading.RLock(), await_comparisons)


def parameter(*shape: int) -> nn.Parameter:
    return nn.Parameter(torch.randn(shape))


@pytest.mark.parametrize("compared", list(Compared))
def test_a_weight_at_another_version_is_not_the_same(compared: Compared) -> None:
    weight = parameter(8, 8)
    watched = guard().watch(weight, weight._version, compared=compared)
    assert watched.same is True
    with torch.no_grad():
        weight.mul_(1)  # the same bytes
    assert watched.same is False


@pytest.mark.parametrize("whole", [False, True])
@pytest.mark.parametrize("view", ["itself", "transposed", "a part"])
def test_other_bytes_under_the_same_version_are_not_the_same(view: str, whole: bool) -> None:
    weight = parameter(96, 512)
    seen = {"itself": weight, "transposed": weight.t(), "a part": weight[5:80, 3:500]}[view]
    watched = guard().watch(seen, seen._version, compared=Compared.FULL if whole else Compared.SAMPLE)
    version = weight._version
    assert watched.same is True
    weight.data.mul_(1.001)
    assert weight._version == version and watched.same is False


def test_one_number_of_a_small_weight_is_missed_by_nobody() -> None:
    weight = parameter(FULL_BYTES // 4)
    watched = guard().watch(weight, None, compared=Compared.SAMPLE)
    for place in range(0, weight.numel(), 997):
        old = weight.data[place].item()
        weight.data[place] = old + 1
        assert watched.same is False
        weight.data[place] = old
        assert watched.same is True


def test_memory_that_is_taken_away_is_not_the_same() -> None:
    weight = parameter(8, 8)
    watched = guard().watch(weight, None, compared=Compared.SAMPLE)
    weight.untyped_storage().resize_(0)
    assert watched.same is False


@pytest.mark.parametrize("fused", [False, True])
def test_what_an_optimizer_changes_is_copied_once_for_all_that_watch_it(fused: bool) -> None:
    own, weight, other = guard(), parameter(8, 6), parameter(3)
    before = weight.detach().clone()
    views = [weight, weight.t(), weight[1:3]]
    watched = [own.watch(v, v._version, compared=Compared.SAMPLE) for v in views]
    beside = own.watch(other, other._version, compared=Compared.SAMPLE)
    weight.grad = torch.ones_like(weight)
    torch.optim.SGD([weight], lr=1.0, fused=fused).step()
    assert all(w.copied and w.same is True for w in watched) and not beside.copied
    for seen, expected in zip(watched, (before, before.t(), before[1:3]), strict=True):
        assert torch.equal(seen.tensor, expected) and seen.tensor.stride() == expected.stride()
    assert len({w.tensor.untyped_storage().data_ptr() for w in watched}) == 1
    assert own.steps == 1


def test_an_update_within_a_backward_copies_only_weights_that_have_their_gradients() -> None:
    """Gradient release: one optimizer steps for each weight, while the blocks before it are still to be read."""
    own, early, late = guard(), parameter(8, 8), parameter(8, 8)
    optimizer = torch.optim.SGD([early, late], lr=1.0)
    watched = [own.watch(weight, weight._version, compared=Compared.SAMPLE) for weight in (early, late)]
    before, copied = late.detach().clone(), list[tuple[bool, ...]]()

    def release(weight: Tensor) -> None:
        optimizer.step()
        optimizer.zero_grad()
        copied.append(tuple(each.copied for each in watched))

    for weight in (early, late):
        weight.register_post_accumulate_grad_hook(release)
    late.mul(early.sin()).sum().backward()
    assert copied == [(False, True), (True, True)] and torch.equal(watched[1].tensor, before)


def test_an_update_within_a_backward_without_any_gradient_copies_all() -> None:
    own, weight, other = guard(), parameter(4), parameter(4)
    optimizer = torch.optim.SGD([weight], lr=1.0)
    watched = own.watch(weight, weight._version, compared=Compared.SAMPLE)
    other.register_hook(lambda gradient: optimizer.step())
    other.sum().backward()
    assert watched.copied


def test_what_nobody_watches_any_more_is_not_copied() -> None:
    own, weight = guard(), parameter(8, 6)
    watched: Watched | None = own.watch(weight, weight._version, compared=Compared.SAMPLE)
    assert watched is not None
    assert own._by_storage() == {weight.untyped_storage()._cdata: [watched]}
    del watched
    assert not own._by_storage() and not own._watched


def test_weights_that_die_in_another_thread_while_they_are_copied_are_left_out() -> None:
    own, weight = guard(), parameter(8, 6)
    watched = [own.watch(weight, weight._version, compared=Compared.SAMPLE) for _ in range(4)]
    for _ in range(2):
        own._watched.add(lambda: watched.clear())  # type: ignore[arg-type]  # whichever is read first: the others die
    own.before_step([weight])
    assert not watched


def test_a_sparse_parameter_next_to_a_watched_one_is_left_to_the_optimizer() -> None:
    weight, sparse = parameter(4, 4), nn.Parameter(torch.eye(4).to_sparse())
    optimizer = torch.optim.SGD([weight, sparse], lr=1.0)
    weight.grad, sparse.grad = torch.ones(4, 4), torch.eye(4).to_sparse()
    watcher = guard()
    watched = watcher.watch(weight, weight._version, compared=Compared.SAMPLE)
    before = weight.detach().clone()
    optimizer.step()
    assert watched.copied and torch.equal(watched.tensor, before)
    assert torch.equal(sparse.detach().to_dense(), torch.zeros(4, 4))


def test_a_parameter_that_has_no_shape_yet_is_left_to_the_optimizer() -> None:
    watching, weight = guard(), parameter(4)
    watched = watching.watch(weight, weight._version, compared=Compared.FULL)
    watching.before_step([nn.LazyLinear(3).weight, weight])
    with torch.no_grad():
        weight.add_(1)
    assert watched.same is True


def test_a_guard_may_die_while_an_optimizer_steps_and_leaves_nothing() -> None:
    """Torch iterates over its hooks then: none may be removed."""
    own, alive = [guard()], guard()
    weight = parameter(3)
    weight.grad = torch.ones_like(weight)
    optimizer = torch.optim.SGD([weight], lr=1.0)
    optimizer.register_step_pre_hook(lambda *given: own.clear())
    reference = weakref.ref(own[0])
    for _ in range(2):
        optimizer.step()
    assert reference() is None and alive.steps == 2
    assert not any(known() is None for known in _guards)


def test_comparisons_are_awaited_before_an_optimizer_steps() -> None:
    def await_comparisons() -> None:
        raise RestoreError("a device found a difference")

    own, weight = guard(await_comparisons), parameter(3)
    watched = own.watch(weight, weight._version, compared=Compared.NOT)
    weight.grad = torch.ones_like(weight)
    value = weight.detach().clone()
    with pytest.raises(RestoreError, match="a device found a difference"):
        torch.optim.SGD([weight], lr=1.0).step()
    assert torch.equal(weight, value) and watched.same is True


class Computes:
    """A closure that is an object."""

    def __init__(self, weight: nn.Parameter, order: list[str]) -> None:
        self.weight, self.order = weight, order

    def __call__(self) -> Tensor:
        self.order.append("closure")
        self.weight.grad = torch.ones_like(self.weight)
        return torch.ones(())


@pytest.mark.parametrize("by_name", [False, True])
@pytest.mark.parametrize("kind", ["function", "object", "partial"])
def test_what_a_closure_computed_is_awaited_before_the_update(kind: str, by_name: bool) -> None:
    weight, order = parameter(4), list[str]()
    own, computes = guard(lambda: order.append("await")), Computes(weight, order)
    closure: Any = {"function": lambda: computes(), "object": computes, "partial": functools.partial(computes)}[kind]
    optimizer = torch.optim.SGD([weight], lr=1.0)
    found: Any = optimizer.step(closure=closure) if by_name else optimizer.step(closure)
    assert order == ["await", "closure", "await"] and found == 1 and own.optimizers == 1


def test_a_comparison_that_failed_in_a_closure_leaves_the_weights_as_they_are() -> None:
    results = [False, True]

    def await_comparisons() -> None:
        if results and results.pop(0):
            raise RestoreError("a device found a difference")

    own, weight = guard(await_comparisons), parameter(4)
    before = weight.detach().clone()
    with pytest.raises(RestoreError, match="a device found a difference"):
        torch.optim.SGD([weight], lr=1.0).step(Computes(weight, []))
    assert torch.equal(weight, before) and not results and not own._watched


@pytest.mark.parametrize("fused", [False, True])
def test_what_is_watched_in_a_closure_is_copied_before_the_update(fused: bool) -> None:
    own, weight, watched = guard(), parameter(8, 8), list[Watched]()
    before = weight.detach().clone()

    def closure() -> float:
        watched.append(own.watch(weight, weight._version, compared=Compared.NOT))
        weight.grad = torch.ones_like(weight)
        return 0.0

    torch.optim.SGD([weight], lr=1.0, fused=fused).step(closure)
    assert watched[0].copied and watched[0].same is True and torch.equal(watched[0].tensor, before)
    assert not torch.equal(weight, before)


def test_each_run_of_a_closure_is_awaited_and_an_update_after_it_counts() -> None:
    order, weight = list[str](), parameter(4)
    own = guard(lambda: order.append("await"))
    model = ModelWeights(lambda: [weight], move=False, steps=lambda: own.steps)
    versions = list[int | None]()

    def closure() -> Tensor:
        if not versions:
            model.begin_pass(tuple)
        versions.append(model.version(weight))
        order.append("closure")
        weight.grad = 2 * weight.detach()
        return weight.detach().square().sum()

    class Writes(torch.optim.LBFGS):
        """Moves no version, as a fused optimizer."""

        def _add_grad(self, step_size: Any, direction: Any) -> None:
            weight.data.add_(direction, alpha=float(step_size))

    Writes([weight], max_iter=4, lr=0.1).step(closure)
    assert order == ["await", *["closure", "await"] * 4]
    assert versions == [weight._version, None, None, None], "an update came between"


def test_a_closure_that_raises_is_not_awaited_and_the_next_step_is() -> None:
    order, weight = list[str](), parameter(4)
    own, computes = guard(lambda: order.append("await")), Computes(weight, order)
    optimizer = torch.optim.SGD([weight], lr=1.0)

    def closure() -> None:
        order.append("raised")
        raise KeyError("batch")

    with pytest.raises(KeyError, match="batch"):
        optimizer.step(closure)  # type: ignore[arg-type]
    optimizer.step(computes)  # type: ignore[arg-type]
    assert order == ["await", "raised", "await", "closure", "await"] and own.optimizers == 1


class Outer(torch.optim.Optimizer):
    """Lets another optimizer step, as ZeroRedundancyOptimizer does."""

    def __init__(self, inner: torch.optim.Optimizer) -> None:
        super().__init__(inner.param_groups, {})
        self.inner = inner

    def step(self, closure: Any = None) -> Any:
        return self.inner.step(closure=closure)


class Again(torch.optim.SGD):
    def step(self, closure: Any = None) -> Any:
        return super().step(closure)


@pytest.mark.parametrize("kind", ["outer", "super"])
def test_optimizers_that_let_others_step_are_awaited_after_the_closure(kind: str) -> None:
    order, weight = list[str](), parameter(4)
    own = guard(lambda: order.append("await"))
    plain = torch.optim.SGD([weight], lr=1.0)  # torch hooks a class when it is used
    optimizer = Outer(plain) if kind == "outer" else Again([weight], lr=1.0)
    assert optimizer.step(Computes(weight, order)) == 1
    assert order == ["await", "await", "closure", "await", "await"] and own.steps > 0


@pytest.mark.parametrize("late", [False, True])
def test_a_hook_of_the_users_that_replaces_the_closure_keeps_its_effect(late: bool) -> None:
    order, weight = list[str](), parameter(4)
    computes, optimizer = Computes(weight, order), torch.optim.SGD([weight], lr=1.0)

    def replaced(optimizer: Any, args: Any, kwargs: Any) -> Any:
        def around() -> Any:
            order.append("around")
            return args[1]()

        return (args[0], around), kwargs

    handle = (optimizer.register_step_pre_hook if late else register_optimizer_step_pre_hook)(replaced)
    if not late:
        _global_optimizer_pre_hooks.move_to_end(handle.id, last=False)
    own = guard(lambda: order.append("await"))
    try:
        optimizer.step(computes)  # type: ignore[arg-type]
    finally:
        handle.remove()
    assert order == ["await", "around", "closure", "await"] and own.steps == 2


def test_a_closure_leaves_nothing_behind_even_if_the_optimizer_keeps_it() -> None:
    class Keeps(torch.optim.SGD):
        def step(self, closure: Any = None) -> Any:
            self.kept = closure
            return super().step(closure)

    own, weight = guard(), parameter(4)
    computes, optimizer = Computes(weight, []), Keeps([weight], lr=1.0)
    computes.note = "its own"  # type: ignore[attr-defined]
    optimizer.step(computes)
    assert optimizer.kept.note == "its own" and optimizer.kept.__wrapped__ is computes
    gone = [weakref.ref(computes), weakref.ref(optimizer)]
    gc.disable()
    try:
        del computes, optimizer
        assert [reference() for reference in gone] == [None, None]
    finally:
        gc.enable()
    assert own.steps > 0


def test_a_model_or_a_class_that_an_optimizer_takes_is_no_closure() -> None:
    class Takes(torch.optim.SGD):
        def step(self, *given: Any, **named: Any) -> Any:
            return given, named

    own, model = guard(), nn.Linear(2, 2)
    given, named = Takes(model.parameters(), lr=1.0).step(None, model, kind=nn.Linear, number=3)
    assert given[0] is None and given[1] is model and named == {"kind": nn.Linear, "number": 3} and own.steps == 1


def test_a_guard_that_dies_in_a_closure_is_not_asked() -> None:
    order, weight = list[str](), parameter(4)
    own, alive = [guard(lambda: order.append("dead"))], guard(lambda: order.append("alive"))

    def closure() -> Any:
        own.clear()
        return Computes(weight, order)()

    torch.optim.SGD([weight], lr=1.0).step(closure)
    assert sorted(order[:2]) == ["alive", "dead"] and order[2:] == ["closure", "alive"] and alive.steps == 2


def test_a_weight_has_a_version_only_while_nothing_changed_it_in_this_pass() -> None:
    weight, other, steps = parameter(3), parameter(3), [0]
    model = ModelWeights(lambda: [weight], move=False, steps=lambda: steps[0])
    model.begin_pass(tuple)
    assert model.version(weight) == weight._version and model.version(other) is None
    steps[0] += 1
    assert model.version(weight) is None, "a fused optimizer moves no version"
    model.begin_pass(tuple)
    with torch.no_grad():
        weight.mul_(2)
    assert model.version(weight) is None
    model.begin_pass(tuple)
    assert model.version(weight) == weight._version


# Facts known from layers


def running(module: nn.Module) -> Running:
    return Running("", module, torch.bfloat16, torch.autograd._get_sequence_nr(), module._parameters.get("bias"))


@pytest.mark.filterwarnings("ignore:.*weight_norm. is deprecated:FutureWarning")
@pytest.mark.parametrize("how", ["itself", "weight_norm", "prune", "another tensor", "trained"])
def test_only_the_parameter_that_a_layer_computes_with_is_its_frozen_weight(how: str) -> None:
    layer = nn.Linear(16, 16).requires_grad_(how == "trained")
    if how == "weight_norm":
        torch.nn.utils.weight_norm(layer)
    if how == "prune":
        prune.identity(layer, "weight")
    layer.requires_grad_(how == "trained")
    seen = layer.weight.detach().bfloat16()
    if how == "another tensor":
        seen = seen + 1
    found = Weights._frozen(layer, seen)
    assert (found is layer.weight) if how == "itself" else found is None


def test_a_layer_is_credited_only_with_what_came_into_being_while_it_ran() -> None:
    x, norm = leaf(4, 8), nn.LayerNorm(8)
    with open_engine(REMAKE) as engine, forward_pass(engine, x, weights=list(norm.parameters())) as run:
        began = running(norm)
        y = norm(x * 2)
        run.builder.note_module(running(nn.Identity()), y)
        assert not run.builder.records
        run.builder.note_module(began, y)
        assert [record.kind for record in run.builder.records.values()] == [nn.LayerNorm]


@needs_slots
@pytest.mark.parametrize("name", ["batch norm", "group norm", "linear", "convolution"])
def test_a_frozen_bias_is_known_from_a_layer_of_its_kind_only(name: str) -> None:
    """The record of another layer says nothing about it, even if that layer has no bias."""
    bias, weight = torch.zeros(8), parameter(8)
    make, kind = {
        "batch norm": (lambda x: F.batch_norm(x, None, None, weight, bias, True), nn.BatchNorm1d),
        "group norm": (lambda x: F.group_norm(x, 2, weight, bias), nn.GroupNorm),
        "linear": (lambda x: F.linear(x, parameter(8, 8), bias), nn.Linear),
        "convolution": (lambda x: F.conv1d(x[None], parameter(8, 4, 1), bias), nn.Conv1d),
    }[name]
    x = leaf(4, 8)
    for recorded, its_bias, known in ((nn.Identity, bias, False), (nn.Identity, None, False), (kind, bias, True)):
        with open_engine(REMAKE) as engine, forward_pass(engine, x, weights=[weight, bias]) as run:
            y = make(x.sin() * x)
            run.builder.records[id(y.grad_fn), 0] = Record(recorded, 1e-5, its_bias)
            assert (run.builder.recipe(y.grad_fn, 0) is not None) is known


class Doubles(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return 2 * x


def test_a_bias_that_is_computed_or_exchanged_is_in_no_record() -> None:
    layer = nn.Linear(8, 8)
    assert record_of(running(layer)) == Record(nn.Linear, None, layer.bias)
    began = running(layer)
    layer.bias = parameter(8)
    assert record_of(began) is None
    parametrize.register_parametrization(layer, "bias", Doubles())
    assert record_of(running(layer)) is None


@pytest.mark.parametrize("scalar", ["a number", "float32", "trained", "changed"])
def test_a_scalar_that_no_hook_saw_is_a_number_only_if_it_looks_like_one(scalar: str) -> None:
    value = torch.tensor(2.0, dtype=torch.float32 if scalar == "float32" else torch.float64)
    value.requires_grad_(scalar == "trained")
    if scalar == "changed":
        value.mul_(2)
    x = leaf(3)
    with open_engine(REMAKE) as engine, forward_pass(engine, x) as run:
        assert (run.builder.packed_operand(value) is not None) is (scalar == "a number")


class Named(nn.Parameter):
    """A parameter with its own class, as libraries make them to attach attributes."""


@pytest.mark.parametrize("policy", ["auto", "minimal"])
@pytest.mark.parametrize("accelerator", [False, True])
def test_parameters_of_a_subclass_are_copied_before_an_optimizer_steps(
    policy: str, accelerator: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A critic that learns before the generator's backward; on an accelerator few recomputes are compared."""
    begin = Trust.begin_block
    monkeypatch.setattr(
        Trust, "begin_block", lambda self, name, kind, **given: begin(self, name, kind, accelerator=accelerator)
    )

    class Critic(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm, self.up, self.down = nn.LayerNorm(16), nn.Linear(16, 16), nn.Linear(16, 16)

        def forward(self, x: Tensor) -> Tensor:
            return x + self.down(F.silu(self.up(self.norm(x))))

    def trained(**given: Any) -> list[Tensor]:
        torch.manual_seed(0)
        maker, critic = nn.Linear(16, 16), nn.Sequential(*(Critic() for _ in range(3)))
        for block in critic:
            norm: Any = block.norm
            norm.weight, norm.bias = Named(norm.weight.data), Named(norm.bias.data)
        steps = [torch.optim.AdamW(one.parameters(), lr=0.01, fused=True) for one in (maker, critic)]
        handle = ebbtide.enable_activation_offloading(critic, target="disk", min_bytes=0, **given) if given else None
        found: list[Tensor] = []
        for number in range(4):
            torch.manual_seed(number)
            loss = -critic(maker(torch.randn(8, 16))).mean()
            if number:
                steps[1].zero_grad()
                critic(torch.randn(8, 16)).square().mean().backward()
                steps[1].step()
            steps[0].zero_grad()
            loss.backward()
            steps[0].step()
            found += [p.grad.clone() for p in maker.parameters() if p.grad is not None]
        if handle is not None:
            handle.close()
        return found

    assert all(map(torch.equal, trained(), trained(policy=policy)))
