"""Which blocks are checkpointed: what a refusal or a changed plan releases, and what ends checkpoints."""

from __future__ import annotations

import functools
import gc
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses import FakeTensorMode

import ebbtide
from ebbtide.base.actions import Action, Candidate
from ebbtide.base.errors import ModifiedInPlaceError
from ebbtide.wrap import checkpointable
from ebbtide.wrap.agreement import has_collectives
from tests.helpers.engines import REMAKE
from tests.helpers.twice import Block, Stack, check, difference, hard, sgd, step_of, train

squares = step_of(lambda model: model(torch.randn(8, 16)).square().mean())


class Changes:
    """A plan that checkpoints every block, until it is changed."""

    name, recomputes, checkpoints, stored = "changes", False, True, Action.OFFLOAD

    def choose(self, candidate: Candidate) -> Action:
        return self.stored

    def block_action(self, kind: str, index: int, *, input_bytes: int, must_keep_bytes: int) -> Action:
        return Action.CHECKPOINT if self.checkpoints else Action.KEEP

    def explain(self) -> str:
        return ""


def _step_with_a_hook(model: Any, act: Callable[[list[Tensor], Tensor], object]) -> list[weakref.ref[Tensor]]:
    """Train a step in which a function holds the outputs of layers; return weak references to them."""
    outputs: list[Tensor] = []
    hooks = [block.up.register_forward_hook(lambda module, x, y: act(outputs, y)) for block in model.blocks]
    loss = model(torch.randn(8, 16)).square().mean()
    if not outputs:
        outputs.append(loss)
    loss.backward()
    for hook in hooks:
        hook.remove()
    return [weakref.ref(output) for output in outputs]


def _alive(references: list[weakref.ref[Tensor]]) -> int:
    gc.collect()
    return sum(reference() is not None for reference in references)


class Sized(nn.Module):
    """A block of which others of its class differ in size, as in a pyramid."""

    def __init__(self, inner: int) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(16, inner), nn.Linear(inner, 16)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.sigmoid(self.up(x)))


@pytest.mark.parametrize("inner", [(64, 8, 8), (8, 8, 64)])
def test_a_checkpointed_block_would_save_what_it_saved_before(inner: tuple[int, ...]) -> None:
    """Not what the latest block of its kind saved: by that, equal steps would be of different sizes."""
    plan, found = Changes(), list[int]()
    model = Stack(*map(Sized, inner))
    with ebbtide.enable_activation_offloading(model, policy=plan, min_bytes=0) as handle:
        for plan.checkpoints in (True, False, True):
            model(torch.randn(8, 16, requires_grad=True)).square().mean().backward()
            found.append(handle.stats().unique_bytes)
        assert handle.stats().checkpointed_blocks == 3
    assert found[1] == found[2]


def test_a_block_whose_output_takes_no_gradient_is_not_checkpointed() -> None:
    """Nothing of it would be saved, and a checkpoint would hold its inputs."""
    model = Stack(Block(), Block(), Block())
    model.blocks[0].requires_grad_(False)
    with ebbtide.enable_activation_offloading(model, policy=Changes(), min_bytes=0) as handle:
        for trained, checkpoints in ((False, 2), (True, 3)):
            model.blocks[0].up.requires_grad_(trained)
            for _ in range(2):
                model(torch.randn(8, 16)).square().mean().backward()
            stats = handle.stats()
            assert stats.checkpointed_blocks == stats.packs == checkpoints


def test_a_refused_kind_holds_nothing_of_its_hooks() -> None:
    model = Stack(Block(), Block(), Block())
    with ebbtide.enable_activation_offloading(model, policy="minimal", target="disk", min_bytes=0):
        held = _step_with_a_hook(model, list.append)
        assert len(held) == 3 and _alive(held) == 0


def test_blocks_that_a_changed_plan_does_not_checkpoint_hold_nothing_of_their_hooks() -> None:
    plan, model = Changes(), Stack(Block(), Block(), Block())
    with ebbtide.enable_activation_offloading(model, policy=plan, target="disk", min_bytes=0):
        held = _step_with_a_hook(model, lambda outputs, y: None)
        assert _alive(held) == 1, "the states of the last forward hold the function"
        plan.checkpoints = False
        _step_with_a_hook(model, lambda outputs, y: None)
        assert _alive(held) == 0


class Normalises(Block):
    """Begins to update running statistics, whose kernel moves no version of them."""

    updates = False

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(16))
        self.register_buffer("variance", torch.ones(16))

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(nn.functional.batch_norm(x, self.mean, self.variance, training=self.updates))  # pyright: ignore


def test_buffers_that_begin_to_change_without_a_version_fail_one_step_and_end_the_checkpoints() -> None:
    def step(model: Any, number: int) -> Tensor:
        for block in model.blocks:
            block.updates = number >= 2
        try:
            return squares(model, number)
        except ModifiedInPlaceError as error:
            assert "hint:" in str(error) and "policy 'offload'" in str(error)
            failed.append(number)
            return torch.zeros(())

    failed: list[int] = []
    _, stats = train(lambda: sgd(Stack(Normalises(), Normalises(), Normalises())), step, 5, policy=Changes())
    assert failed == [2] and stats.checkpointed_blocks == 0


def test_only_a_second_forward_that_differs_looks_for_collectives(monkeypatch: pytest.MonkeyPatch) -> None:
    def step(model: Any, number: int) -> Tensor:
        looked.clear()  # measured blocks also look for them, in the first step
        return squares(model, number)

    looked: list[nn.Module] = []
    monkeypatch.setattr(checkpointable, "has_collectives", lambda block: looked.append(block) or has_collectives(block))
    _, stats = train(lambda: sgd(Stack(Block(), Block(), Block())), step, 3, policy=Changes())
    assert stats.checkpointed_blocks == 3 and not looked


class Traces(Block):
    """Computes the gradient of a function of fake tensors first, as ``scan`` traces its function in each forward."""

    def forward(self, x: Tensor) -> Tensor:
        with FakeTensorMode():
            fake = torch.ones(16, requires_grad=True)
            torch.autograd.grad(hard(fake * fake).sum(), fake)
        return super().forward(x)


def test_fake_tensors_that_a_forward_saves_are_neither_dropped_nor_counted() -> None:
    plain, _ = train(lambda: sgd(Stack(Traces(), Traces(), Traces())), squares, 4)
    got, stats = train(lambda: sgd(Stack(Traces(), Traces(), Traces())), squares, 4, policy=Changes())
    assert difference(plain, got) == "" and stats.checkpointed_blocks == 3


@pytest.mark.parametrize("policy", ["checkpoint", "offload", REMAKE, "keep"])
def test_a_backward_in_inference_mode_restores_outside_of_it(policy: Any) -> None:
    def step(model: Any, number: int) -> Tensor:
        loss = model(torch.randn(8, 16)).square().mean()
        with torch.inference_mode():
            grads = torch.autograd.grad(loss, list(model.parameters()))
        return torch.cat([grad.flatten() for grad in grads]).clone()

    plain, _ = train(lambda: Stack(Block(), Block(), Block()), step, 3)
    checkpoints = policy == "checkpoint"
    got, stats = train(lambda: Stack(Block(), Block(), Block()), step, 3, policy=Changes() if checkpoints else policy)
    assert difference(plain, got) == "" and stats.checkpointed_blocks == (3 if checkpoints else 0)


class Small(Changes):
    """Checkpoints blocks that must keep little, unlike any plan of ours."""

    def block_action(self, kind: str, index: int, *, input_bytes: int, must_keep_bytes: int) -> Action:
        return Action.CHECKPOINT if must_keep_bytes / input_bytes < 100 else Action.KEEP


def test_a_plan_may_checkpoint_blocks_of_any_size() -> None:
    plain, _ = train(lambda: sgd(Stack(Block(), Block(), Block())), squares, 5)
    got, stats = train(lambda: sgd(Stack(Block(), Block(), Block())), squares, 5, policy=Small())
    assert difference(plain, got) == "" and stats.checkpointed_blocks == 3


NOISE = torch.Generator()


def noisy(x: Tensor) -> Tensor:
    return x * torch.rand(x.shape, generator=NOISE)


class Draws(nn.Module):
    """Draws from a generator that no module holds."""

    def forward(self, x: Tensor) -> Tensor:
        return x * torch.rand(x.shape, generator=NOISE)


class Acts(nn.Module):
    """Calls a function that it holds."""

    def __init__(self, function: Callable[[Tensor], Tensor] = torch.tanh) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: Tensor) -> Tensor:
        return self.function(x)


class Composed(Block):
    """A block with a part that has no weights."""

    def __init__(self) -> None:
        super().__init__()
        self.part = Acts()

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(self.part(x))


@pytest.mark.parametrize(
    ("change", "checkpointed"),
    [
        (lambda block: setattr(block, "part", Draws()), 0),
        (lambda block: setattr(block, "part", Acts(noisy)), 0),
        (lambda block: setattr(block.part, "__class__", Draws), 0),
        (lambda block: setattr(block, "part", nn.BatchNorm1d(16)), 0),
        (lambda block: setattr(block, "part", Acts()), 3),
        (lambda block: setattr(block, "part", nn.Sigmoid()), 3),
    ],
    ids=["draws", "holds a function that draws", "has another class", "has statistics", "is as before", "is another"],
)
def test_a_block_with_a_new_part_is_watched_as_if_it_were_new(
    change: Callable[[Any], object], checkpointed: int
) -> None:
    """On an accelerator a second forward that draws otherwise goes unnoticed in most steps."""

    def make() -> nn.Module:
        NOISE.manual_seed(3)
        return sgd(Stack(Composed(), Composed(), Composed()))

    def step(model: Any, number: int) -> Tensor:
        if number == 2:
            change(model.blocks[1])
        return squares(model, number)

    plain, _ = train(make, step, 5)
    got, stats = train(make, step, 5, policy=Changes())
    assert difference(plain, got) == "" and stats.checkpointed_blocks == checkpointed


@pytest.mark.parametrize("policy", [Changes(), "minimal"], ids=["checkpoint", "minimal"])
def test_a_frozen_norm_that_is_trained_again_in_a_block_that_always_was(policy: Any) -> None:
    def make() -> nn.Module:
        blocks = [Composed() for _ in range(3)]
        for block in blocks:
            block.part = nn.BatchNorm1d(16).eval()
        return sgd(Stack(*blocks))

    def step(model: Any, number: int) -> Tensor:
        for block in model.blocks:
            block.part.train(number >= 3)
        return squares(model, number)

    check(make, step, policies=[policy])
    assert train(make, step, 3, policy=policy)[1].checkpointed_blocks == 3


def test_a_part_may_call_its_mode_as_it_likes() -> None:
    def make() -> nn.Module:
        model = sgd(Stack(*(Composed() for _ in range(3))))
        for number, block in enumerate(model.blocks):
            block.part.training = ("warm-up", 300, None)[number]  # pyright: ignore[reportAttributeAccessIssue]
        return model

    check(make, squares, policies=[Changes()])


@pytest.mark.parametrize("policy", [Changes(), "minimal"], ids=["checkpoint", "minimal"])
def test_lazy_layers_become_others_in_the_first_forward(policy: Any) -> None:
    def make() -> nn.Module:
        model = Stack(*(Composed() for _ in range(3)))
        for block in model.blocks:
            block.part = nn.LazyLinear(16)  # pyright: ignore[reportAttributeAccessIssue]
        return model

    def step(model: Any, number: int) -> Tensor:
        loss = model(torch.randn(8, 16)).square().mean()
        if number == 0:
            sgd(model)
        model.optimizer.zero_grad()
        loss.backward()
        model.optimizer.step()
        return loss

    check(make, step, policies=[policy])
    assert train(make, step, 3, policy=policy)[1].checkpointed_blocks == 3


def _orthogonal() -> nn.Module:
    torch.manual_seed(4)
    blocks = [Block() for _ in range(3)]
    for block in blocks:
        nn.utils.parametrizations.orthogonal(block.up)
    return sgd(Stack(*blocks))


@pytest.mark.parametrize("policy", [Changes(), "minimal", "auto"], ids=["checkpoint", "minimal", "auto"])
def test_weights_that_one_forward_computes_for_the_next(policy: Any) -> None:
    """Inside ``cached()`` the second forward of the model saves fewer tensors; a checkpoint would run outside of it."""

    @step_of
    def step(model: Any) -> Tensor:
        with nn.utils.parametrize.cached():
            return model(torch.randn(8, 16)).square().mean() + model(torch.randn(8, 16)).mean()

    check(_orthogonal, step, policies=[policy])


@pytest.mark.parametrize("norm", [nn.BatchNorm1d, None], ids=["batch norm", "another buffer"])
def test_a_batch_norm_is_named_where_blocks_are_not_checkpointed(
    norm: type[nn.Module] | None, caplog: pytest.LogCaptureFixture
) -> None:
    model: Any = sgd(Stack(*(Composed() for _ in range(3))))
    for block in model.blocks:
        block.part = Counts() if norm is None else norm(16)
    with ebbtide.enable_activation_offloading(model, policy="minimal", min_bytes=0):
        squares(model, 0)
    (text,) = [record.getMessage() for record in caplog.records if "not checkpointed" in record.getMessage()]
    assert "their own tensors in place" in text and ("hint: BatchNorm" in text) is (norm is not None)


class Counts(nn.Module):
    """Counts its calls in a buffer."""

    calls: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("calls", torch.zeros(1))

    def forward(self, x: Tensor) -> Tensor:
        self.calls.add_(1)
        return x.sin()


class Casting(Block):
    """A block of which no operator saves the input."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.double()).float()


class Adding(Stack):
    """A model that changes the input of each block in place."""

    def forward(self, x: Tensor) -> Tensor:
        x = x.sin()
        for block in self.blocks:
            x += block(x)
        return x


def test_blocks_whose_inputs_change_later_are_not_checkpointed() -> None:
    """Ordinary backward does not read these inputs; a second forward would."""
    make = lambda: sgd(Adding(Casting(), Casting(), Casting()).double())  # noqa: E731
    check(make, squares, policies=("minimal", "auto", "offload"))
    check(make, squares, policies=(Changes(),))  # type: ignore[arg-type]


def test_the_input_of_a_single_block_changes_later() -> None:
    """No block of its kind follows in the forward: the end of the forward shows it."""
    check(lambda: sgd(Adding(Casting()).double()), squares, policies=(Changes(),), blocks=["blocks.0"])  # type: ignore[arg-type]


@pytest.mark.parametrize("through_model", [True, False])
def test_an_input_that_changes_after_its_backward_ends_no_checkpoint(through_model: bool) -> None:
    """A batch in a buffer that the next step fills."""
    model, x = Stack(Block(), Block(), Block()), torch.randn(8, 16, requires_grad=True)
    with ebbtide.enable_activation_offloading(model, policy=Changes(), min_bytes=0) as handle:
        for _ in range(3):
            output = model(x) if through_model else functools.reduce(lambda y, block: block(y), model.blocks, x)
            output.square().mean().backward()
            with torch.no_grad():
                x.mul_(0.5)
        assert handle.stats().checkpointed_blocks == 3


@pytest.mark.parametrize("layout", [torch.sparse_coo, torch.jagged])
def test_a_block_is_called_with_a_tensor_that_has_no_strides(layout: torch.layout) -> None:
    class Given(Stack):
        def forward(self, x: Tensor) -> Tensor:
            one = torch.eye(8)
            other = torch.nested.nested_tensor([one], layout=layout) if layout is torch.jagged else one.to_sparse()
            for block in self.blocks:
                x = block(x, other)
            return x

    class Takes(Block):
        def forward(self, x: Tensor, other: Tensor) -> Tensor:  # type: ignore[override]
            return super().forward(x if other.is_nested else other @ x)

    check(lambda: sgd(Given(Takes(), Takes(), Takes())), squares, policies=(Changes(),))  # type: ignore[arg-type]
