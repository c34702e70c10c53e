"""Blocks that run a second time in backward: in the context of their first run, or not at all, or an error."""

from __future__ import annotations

import collections
import contextvars
import functools
import gc
import io
import itertools
import random
import types
import weakref
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn.attention.flex_attention import create_block_mask
from torch.nn.utils.parametrizations import weight_norm
from torch.nn.utils.parametrize import register_parametrization, remove_parametrizations

import ebbtide
from ebbtide.base.actions import Action, Candidate
from ebbtide.base.errors import ModifiedInPlaceError, RestoreError
from ebbtide.wrap.checkpointable import _computed_otherwise, _is_value
from ebbtide.wrap.state import States
from tests.helpers.twice import (
    Block,
    Stack,
    check,
    check_refused,
    difference,
    hard,
    only_biases,
    sgd,
    step_of,
    train,
    two_losses,
)

GENERATOR = torch.Generator()


def blocks(kind: Callable[[], nn.Module] = Block) -> nn.Module:
    return sgd(Stack(kind(), kind(), kind()))


def rows() -> Tensor:
    return torch.randn(8, 16)


squares = step_of(lambda model: model(rows()).square().mean())


def check_checkpointed(make: Any, step: Any, count: int = 3, **more: Any) -> None:
    """Check bits under Minimal and Auto, and that Minimal does repeat ``count`` blocks in the last step."""
    check(make, step, policies=("minimal", "auto"), **more)
    assert train(make, step, 3, policy="minimal")[1].checkpointed_blocks == count


def test_the_case_itself() -> None:
    check_checkpointed(blocks, squares)


class Looped(Stack):
    """Calls its layers several times, as ALBERT does."""

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(3):
            x = super().forward(x)
        return x


@pytest.mark.parametrize("verify", [False, True])
def test_layers_that_are_called_several_times(verify: bool) -> None:
    check_checkpointed(lambda: sgd(Looped(Block(), Block())), squares, count=6, verify=verify)


def test_functional_calls_with_other_weights() -> None:
    @step_of
    def step(model: Any) -> Tensor:
        fast = {n: p - 0.1 * torch.randn_like(p) for n, p in model.named_parameters()}
        return functional_call(model, fast, (rows(),)).square().mean()

    check_checkpointed(blocks, step)


def test_parameters_that_are_swapped_for_others_before_the_backward() -> None:
    def step(model: Any, number: int) -> Tensor:
        model.optimizer.zero_grad()
        loss = model(rows()).square().mean()
        own = [block.up.weight for block in model.blocks]
        for block in model.blocks:
            block.up.weight = nn.Parameter(torch.randn(16, 16))
        loss.backward()
        for block, weight in zip(model.blocks, own, strict=True):
            block.up.weight = weight
        model.optimizer.step()
        return loss

    check_checkpointed(blocks, step)


class Adapters(Block):
    """Adapters by name, like PEFT's: the active names are in a list."""

    def __init__(self) -> None:
        super().__init__()
        self.adapters = nn.ModuleDict({"a": nn.Linear(16, 16), "b": nn.Linear(16, 16)})
        self.active = ["a"]

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + hard(self.adapters[self.active[0]](x))


class Packed(nn.Parameter):
    """A weight with attributes of its own, as 8-bit weights have their columns."""


class PackedLinear(nn.Linear):
    """Takes over what its weight has in the first forward, as ``Linear8bitLt`` does; without it, it packs again."""

    def __init__(self) -> None:
        super().__init__(16, 16, bias=False)
        weight: Any = Packed(self.weight.data, requires_grad=False)
        weight.packed = weight.data / 2
        self.weight = weight
        self.state = types.SimpleNamespace(packed=None)

    def forward(self, x: Tensor) -> Tensor:
        weight: Any = self.weight
        if weight.packed is not None:
            self.state.packed, weight.packed = weight.packed, None
        elif self.state.packed is None:
            self.state.packed = self.weight.data / 3
        return F.linear(x, self.state.packed)


class Quantised(Block):
    def __init__(self, linear: Callable[[], nn.Module] = PackedLinear) -> None:
        super().__init__()
        self.packed, self.adapter = linear(), nn.Linear(16, 16)

    def forward(self, x: Tensor) -> Tensor:
        x = hard(super().forward(x))
        return self.packed(x) + self.adapter(x)


def test_what_a_first_forward_takes_from_an_attribute_of_a_weight() -> None:
    check_checkpointed(lambda: blocks(Quantised), squares)


def test_eight_bit_weights() -> None:
    bnb = pytest.importorskip("bitsandbytes")

    def linear() -> nn.Module:
        made = bnb.nn.Linear8bitLt(16, 16, bias=False, has_fp16_weights=False, threshold=6.0)
        made.weight = bnb.nn.Int8Params(made.weight.data, requires_grad=False)
        return made.to("cpu")

    check_checkpointed(lambda: blocks(functools.partial(Quantised, linear)), squares)


@pytest.mark.parametrize("in_place", [False, True])
def test_adapters_that_are_switched_between_two_forwards(in_place: bool) -> None:
    def use(model: Any, name: str) -> None:
        for block in model.blocks:
            if in_place:
                block.active[0] = name
            else:
                block.active = [name]

    @step_of
    def step(model: Any) -> Tensor:
        x, loss = rows(), torch.zeros(())
        for name in ("a", "b"):
            use(model, name)
            loss = loss + model(x).square().mean()
        return loss

    check_checkpointed(lambda: blocks(Adapters), step)


def test_a_shared_block_that_is_told_apart_by_a_tuple_and_a_module() -> None:
    class Shared(Block):
        scale: tuple[float, ...] = (1.0,)
        extra: Any = None

        def forward(self, x: Tensor) -> Tensor:
            return super().forward(hard(self.extra(x)) * self.scale[0])

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.blocks = nn.ModuleList([Shared(), Shared()])
            self.extras = nn.ModuleList([nn.Linear(16, 16) for _ in range(3)])

        def forward(self, x: Tensor) -> Tensor:
            for number, extra in enumerate(self.extras):
                for block in self.blocks:
                    object.__setattr__(block, "extra", extra)
                    block.scale = (1.0 + number,)
                    x = block(x)
            return x

    check(lambda: sgd(Model(), 0.01), squares, policies=("minimal", "auto"))


def test_a_memory_of_the_step_before() -> None:
    class Remembers(Block):
        memory: Tensor | None = None

        def forward(self, x: Tensor) -> Tensor:
            h = self.up(x if self.memory is None else x + self.memory)
            self.memory = h.detach()
            return super().forward(h)

    check_checkpointed(lambda: blocks(Remembers), squares)


class Counter:
    def __init__(self) -> None:
        self.count, self.seen = 0, [0]


class Slotted:
    __slots__ = ("count", "never")

    def __init__(self) -> None:
        self.count = 0


class Keyed(dict[str, int]):
    def __setitem__(self, key: str, value: int) -> None:
        super().__setitem__(key.lower(), value)


class Listed(list[int]):
    name = ""


def _count_slot(slotted: Slotted) -> int:
    slotted.count += 1
    return slotted.count


def _count_attribute(counter: Counter) -> int:
    counter.seen.append(counter.seen[-1] + 1)
    counter.count += 1
    return counter.count + counter.seen[-1]


def _count_row(array: np.ndarray) -> int:
    array[1] += 1
    return int(array[1])


def _count_key(counts: dict[str, int]) -> int:
    counts["calls"] = counts.get("calls", 0) + 1
    return counts["calls"]


def _count_entry(entries: Listed) -> int:
    entries.append(1)
    entries.name += "."
    return len(entries) + len(entries.name)


COUNTERS: dict[str, tuple[Callable[[], Any], Callable[[Any], int]]] = {
    "an object": (Counter, _count_attribute),
    "a slotted object": (Slotted, _count_slot),
    "an array": (lambda: np.zeros(3), _count_row),
    "a Counter": (collections.Counter, _count_key),
    "a dictionary of a class": (Keyed, _count_key),
    "a list of a class": (Listed, _count_entry),
    "an iterator": (itertools.count, next),
}


@pytest.mark.parametrize("kind", COUNTERS)
def test_what_counts_the_calls_of_a_block_counts_them_once(kind: str) -> None:
    make, count = COUNTERS[kind]

    class Counts(Block):
        def __init__(self) -> None:
            super().__init__()
            self.counter = make()

        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x * (1 + 0.1 * count(self.counter)))

    def step(model: Any, number: int) -> Tensor:
        return squares(model, number) + sum(count(block.counter) for block in model.blocks)

    check(lambda: blocks(Counts), step, policies=("minimal", "auto"))
    runs = 0 if kind == "an iterator" else 3
    assert train(lambda: blocks(Counts), step, 3, policy="minimal")[1].checkpointed_blocks == runs


def make_generator(kind: str) -> Any:
    return {
        "torch": lambda: torch.Generator().manual_seed(3),
        "python": lambda: random.Random(3),
        "numpy": lambda: np.random.default_rng(3),
        "numpy, legacy": lambda: np.random.RandomState(3),
    }[kind]()


HELD: dict[str, Callable[[Any], Callable[[], Any]]] = {
    "a function": lambda own: lambda: own,
    "a partial function": lambda own: functools.partial(lambda generator: generator, generator=own),
    "a method": lambda own: types.MethodType(lambda generator: generator, own),
}


def draw(generator: Any, x: Tensor) -> Tensor:
    if isinstance(generator, torch.Generator):
        return torch.rand(x.shape, generator=generator)
    return torch.full_like(x, float(generator.random() if hasattr(generator, "random") else generator.rand()))


@pytest.mark.parametrize("where", ["attribute", "list", "object", "closure", "global", *HELD])
@pytest.mark.parametrize("kind", ["torch", "python", "numpy", "numpy, legacy"])
def test_a_generator_that_can_be_reached_is_found_and_the_block_not_run_again(kind: str, where: str) -> None:
    class Holder:
        def __init__(self, generator: Any) -> None:
            self.generator = generator

    class Draws(Block):
        kept: Any = None

        def generator(self) -> Any:
            if where in HELD:
                return self.kept()
            return self.kept[0] if isinstance(self.kept, list) else getattr(self.kept, "generator", self.kept)

        def forward(self, x: Tensor) -> Tensor:
            return super().forward(hard(x * draw(self.generator(), x)))

    class DrawsFromGlobal(Draws):
        def generator(self) -> Any:
            return GENERATOR

    def make() -> nn.Module:
        own = make_generator(kind)
        if where == "global":
            GENERATOR.manual_seed(3)
            return blocks(DrawsFromGlobal)
        if where == "closure":
            return blocks(type("DrawsFromClosure", (Draws,), {"generator": lambda block: own}))
        model: Any = blocks(Draws)
        for block in model.blocks:
            held = HELD[where](own) if where in HELD else None
            block.kept = {"attribute": own, "list": [own], "object": Holder(own)}.get(where, held)
        return model

    check_checkpointed(make, squares, count=0)


def test_a_generator_that_blocks_get_later_ends_their_checkpoints() -> None:
    class Draws(Block):
        own: Any = None

        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x if self.own is None else hard(x * draw(self.own, x)))

    def step(model: Any, number: int) -> Tensor:
        if number == 2:
            own = make_generator("torch")
            for block in model.blocks:
                block.own = own
        return squares(model, number)

    check(lambda: blocks(Draws), step, policies=("minimal",), steps=4)


def test_a_single_block_that_draws_is_never_checkpointed() -> None:
    """Others of its structure have run before, so it would be checkpointed in its own first forward."""

    def make() -> nn.Module:
        model: Any = blocks()
        own = make_generator("torch")
        for number, block in enumerate(model.blocks):
            block.act = (lambda x: hard(x * draw(own, x))) if number == 2 else hard
            block.forward = types.MethodType(lambda block, x: x + block.down(block.act(block.up(x))), block)
        return nn.Sequential(nn.Linear(16, 16), model)  # the input of the first block takes a gradient

    check(lambda: sgd(make()), squares, policies=("minimal",))


class Reads(Block):
    """Reads a factor from a file in each forward."""

    def __init__(self) -> None:
        super().__init__()
        self.file = io.BytesIO(np.linspace(1, 2, 99, dtype="f4").tobytes())

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x * float(np.frombuffer(self.file.read(4), dtype="f4")[0]))


class Decays(Block):
    """Changes an array that is too large to be recorded."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = np.ones(200_000)

    def forward(self, x: Tensor) -> Tensor:
        self.scale *= 0.9
        return super().forward(x * float(self.scale[0]))


class Looks(Decays):
    """Only reads the array."""

    def forward(self, x: Tensor) -> Tensor:
        return Block.forward(self, x * float(self.scale[0]))


@pytest.mark.parametrize(("kind", "count"), [(Reads, 0), (Decays, 0), (Looks, 3)])
def test_a_file_or_a_large_array_that_changes_forbids_a_second_forward(kind: type[Block], count: int) -> None:
    check_checkpointed(lambda: blocks(kind), squares, count)


class Norms(Block):
    """Batch norm, whose kernel moves no version of its statistics."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(16))
        self.register_buffer("var", torch.ones(16))

    def forward(self, x: Tensor) -> Tensor:
        if len(x) == 1:
            raise RuntimeError("one row")
        return super().forward(F.batch_norm(x, self.mean, self.var, training=self.training))  # pyright: ignore


def _evaluate(model: Any) -> None:
    model.eval()
    model(rows())
    model.train()


def _fail(model: Any) -> None:
    for block in model.blocks:
        with pytest.raises(RuntimeError, match="one row"):
            block(rows()[:1])


@pytest.mark.parametrize("before", [_evaluate, _fail])
def test_a_block_is_watched_in_the_first_forward_of_a_mode_that_does_not_fail(before: Callable[[Any], None]) -> None:
    def step(model: Any, number: int) -> Tensor:
        if number == 0:
            before(model)
        return squares(model, number)

    check(lambda: blocks(Norms), step, policies=("minimal",))


SCALE = contextvars.ContextVar("SCALE", default=1.0)
OUTPUTS: contextvars.ContextVar[Any] = contextvars.ContextVar("OUTPUTS")


class Scaled(Block):
    """Reads a context variable, and sets it until its end."""

    def forward(self, x: Tensor) -> Tensor:
        scale = SCALE.get()
        before = SCALE.set(scale + 1)
        y = super().forward(x * scale)
        SCALE.reset(before)
        return y


def test_context_variables_are_those_of_the_first_forward() -> None:
    def step(model: Any, number: int) -> Tensor:
        model.optimizer.zero_grad()
        before = SCALE.set(2.0 + number % 2)
        loss = model(rows()).square().mean()
        SCALE.reset(before)
        loss.backward()
        model.optimizer.step()
        return loss * SCALE.get()

    check_checkpointed(lambda: blocks(Scaled), step)


def test_a_context_variable_with_a_graph_does_not_keep_it() -> None:
    def outputs(policy: str) -> list[weakref.ref[Tensor]]:
        model = blocks(Scaled)
        with ebbtide.enable_activation_offloading(model, policy=policy, min_bytes=0):
            for _ in range(3):
                squares(model, 0)
            before = OUTPUTS.set(held := [])
            held.append(model(rows()))  # no backward
            OUTPUTS.reset(before)
            found = [weakref.ref(held[0])]
            held = None
            gc.collect()
            return found

    assert outputs("minimal")[0]() is None


class Above:
    """A plan that checkpoints blocks with large inputs."""

    name, recomputes = "above", False

    def choose(self, candidate: Candidate) -> Action:
        return Action.OFFLOAD

    def block_action(self, kind: str, index: int, *, input_bytes: int, must_keep_bytes: int) -> Action:
        return Action.CHECKPOINT if input_bytes > 100 else Action.KEEP

    def explain(self) -> str:
        return ""


def test_a_plan_may_have_a_threshold_of_its_own() -> None:
    assert train(blocks, squares, 3, policy=Above())[1].checkpointed_blocks == 3


class Holds(Block):
    """Holds an iterator."""

    def __init__(self) -> None:
        super().__init__()
        self.numbers = itertools.count()


def test_a_refused_kind_is_watched_no_more(monkeypatch: pytest.MonkeyPatch) -> None:
    searched: list[int] = []
    monkeypatch.setattr(States, "before", lambda *given: searched.append(1) or before(*given))
    train(lambda: blocks(Holds), squares, 4, policy="minimal")
    assert len(searched) == 3, "each block once"


before = States.before


@pytest.mark.parametrize(
    ("device", "normed", "refused"), [("cuda", True, True), ("xpu", False, False), ("cpu", True, False)]
)
def test_only_convolutions_on_cuda_are_refused_for_cudnns_benchmark(
    device: str, normed: bool, refused: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    layer = nn.Conv1d(2, 2, 3, bias=False)
    block = nn.Sequential(weight_norm(layer) if normed else layer)
    monkeypatch.setattr(torch.backends.cudnn, "benchmark", True)
    monkeypatch.setattr(torch.Tensor, "device", torch.device(device))
    assert (_computed_otherwise(block) is not None) is refused


class Dice:
    def __init__(self) -> None:
        self.own = random.Random(3)

    def roll(self) -> float:
        return self.own.random()


def test_a_generator_that_cannot_be_reached_is_an_error_before_a_gradient_is_wrong() -> None:
    class Draws(Block):
        def __init__(self) -> None:
            super().__init__()
            self.draw = Dice().roll

        def forward(self, x: Tensor) -> Tensor:
            return super().forward(hard(x * self.draw()))

    check_refused(lambda: blocks(Draws), squares, RestoreError, policies=("minimal",))
    model = blocks(Draws)
    with ebbtide.enable_activation_offloading(model, policy="minimal", min_bytes=0) as handle:
        failed = []
        for number in range(4):
            try:
                squares(model, number)
            except RestoreError as error:
                failed.append(error)
        assert len(failed) == 1 and handle.stats().checkpointed_blocks == 0  # who catches it trains on as plain
    check(lambda: blocks(Draws), squares, policies=("offload", "keep"))


def doubled(x: Tensor, by: float = 2.0) -> Tensor:
    return F.silu(x) * by


READ = [slice(1), torch.strided, torch.channels_last, "mask", np.float32(2), np.bool_(True), frozenset({1, "two"})]


@pytest.mark.parametrize(
    "read", [*READ, doubled, F.silu, torch.tanh, F.gelu, max], ids=lambda x: getattr(x, "__name__", type(x).__name__)
)
def test_arguments_that_nothing_can_change_do_not_end_checkpointing(read: Any) -> None:
    class Reads(Block):
        def forward(self, x: Tensor, other: Any) -> Tensor:
            return super().forward(x)

    class Passes(Stack):
        def forward(self, x: Tensor) -> Tensor:
            argument = create_block_mask(lambda b, h, q, k: q >= k, 1, 1, 8, 8, "cpu") if read == "mask" else read
            for block in self.blocks:
                x = block(x, argument)
            return x

    check_checkpointed(lambda: sgd(Passes(Reads(), Reads(), Reads())), squares)


class Applies(Block):
    def forward(self, x: Tensor, apply: Callable[[Tensor], Tensor]) -> Tensor:
        return super().forward(apply(x))


class AppliesAll(Stack):
    """Applies a function of a number that changes before the backward."""

    late = False

    def forward(self, x: Tensor) -> Tensor:
        for number, block in enumerate(self.blocks):
            x = block(x, (lambda x: x * number) if self.late else lambda x, by=number: x * by)  # noqa: B023
        return x


def test_a_function_with_its_own_numbers_is_applied_twice() -> None:
    check_checkpointed(lambda: sgd(AppliesAll(Applies(), Applies(), Applies())), squares)


def test_a_function_of_a_variable_ends_checkpointing() -> None:
    def make() -> nn.Module:
        model = AppliesAll(Applies(), Applies(), Applies())
        model.late = True
        return sgd(model)

    check(make, squares, policies=("minimal",))
    assert train(make, squares, 6, policy="minimal")[1].checkpointed_blocks == 0


SEEN: list[float] = []


def noting(x: Tensor) -> Tensor:
    SEEN.append(1.0)
    return x


def counting(x: Tensor) -> Tensor:
    return x


counting.calls = 0  # type: ignore[attr-defined]


@functools.wraps(F.gelu)
def wrapping(x: Tensor) -> Tensor:
    return noting(x)


def calling(x: Tensor) -> Tensor:
    return wrapping(x)


BOXED = torch.zeros(8)


@pytest.mark.parametrize(
    "argument",
    [
        noting,
        counting,
        SEEN.append,
        lambda x, seen=[]: x,
        frozenset({Dice()}),
        np.zeros(1, "i4,i4")[0],
        wrapping,
        calling,
        frozenset({BOXED}),
    ],
    ids=[
        "a list",
        "an attribute",
        "a method",
        "a default",
        "an object",
        "a record",
        "another's name",
        "what it calls",
        "a tensor in a set",
    ],
)
def test_what_can_change_in_an_argument_is_no_value(argument: Any) -> None:
    assert not _is_value(argument)


@pytest.mark.parametrize("late", [0, 2])
def test_a_change_in_place_that_plain_training_refuses_is_refused_in_any_step(late: int) -> None:
    class Changes(Block):
        bad = False

        def forward(self, x: Tensor) -> Tensor:
            y = self.up(x).exp()
            if self.bad:
                y.mul_(2)
            return x + self.down(hard(y))

    def step(model: Any, number: int) -> Tensor:
        for block in model.blocks:
            block.bad = number >= late
        return squares(model, number)

    plain, _ = train(lambda: blocks(Changes), step, 4)
    got, _ = train(lambda: blocks(Changes), step, 4, policy="minimal")
    assert isinstance(plain[-1], RuntimeError) and isinstance(got[-1], ModifiedInPlaceError)
    assert len(plain) == len(got) == late + 1 and difference(plain, got) == ""


def test_a_parameter_that_is_frozen_between_forward_and_backward() -> None:
    def step(model: Any, number: int) -> Tensor:
        model.optimizer.zero_grad()
        loss = model(rows()).square().mean()
        model.blocks[1].requires_grad_(False)
        loss.backward()
        model.blocks[1].requires_grad_(True)
        model.optimizer.step()
        return loss

    check_checkpointed(blocks, step)


@pytest.mark.parametrize("fused", [False, True])
def test_an_optimizer_that_steps_between_two_backwards(fused: bool) -> None:
    def adamw(weights: Any) -> torch.optim.Optimizer:
        return torch.optim.AdamW(weights, lr=0.1, fused=fused)

    check_checkpointed(lambda: only_biases(Stack(Block(), Block(), Block()), adamw), two_losses)


def test_a_weight_that_is_changed_through_data_is_an_error() -> None:
    def step(model: Any, number: int) -> Tensor:
        model.optimizer.zero_grad()
        noise = [0.01 * torch.randn_like(p) for p in model.parameters()]
        for p, n in zip(model.parameters(), noise, strict=True):
            p.data.add_(n)
        loss = model(rows()).square().mean()
        for p, n in zip(model.parameters(), noise, strict=True):
            p.data.sub_(n)
        loss.backward()
        model.optimizer.step()
        return loss

    check_refused(blocks, step, ModifiedInPlaceError, policies=("minimal",))


def test_statistics_whose_kernel_moves_no_version_are_updated_once() -> None:
    def step(model: Any, number: int) -> Tensor:
        loss = squares(model, number)
        return torch.cat([loss.detach()[None], *(buffer for buffer in model.buffers())])

    check_checkpointed(lambda: blocks(Norms), step, count=0)


def test_a_parameter_that_its_own_forward_changes_is_treated_tensor_by_tensor() -> None:
    class Decays(Block):
        def forward(self, x: Tensor) -> Tensor:
            y = super().forward(x)
            with torch.no_grad():
                self.down.bias.mul_(0.9)
            return y

    check_checkpointed(lambda: blocks(Decays), squares, count=0)


class LearnsLocally(Block):
    """Adds the gradient of its own loss in its forward."""

    def forward(self, x: Tensor) -> Tensor:
        self.down(self.up(x.detach())).square().mean().backward()
        return super().forward(x)


class HalvesGradients(Block):
    """Registers a hook on a weight in each forward, and removes the previous one."""

    hook: Any = None

    def forward(self, x: Tensor) -> Tensor:
        if self.hook is not None:
            self.hook.remove()
        self.hook = self.up.weight.register_hook(lambda gradient: gradient * 0.5)
        return super().forward(x)


@pytest.mark.parametrize("kind", [LearnsLocally, HalvesGradients])
def test_what_a_forward_leaves_on_its_weights_is_left_once(kind: type[Block]) -> None:
    check_checkpointed(lambda: blocks(kind), squares, count=0)


class Plus(nn.Module):
    """A parametrization: something is added to a weight."""

    def __init__(self, more: Tensor) -> None:
        super().__init__()
        self.more = more

    def forward(self, weight: Tensor) -> Tensor:
        return weight + self.more


class AddsToWeight(Block):
    """Computes with a weight plus a product, by a parametrization that stays for one forward: PEFT's target_parameters.

    With it the weight gets a new version, and keeps its bytes, until ``grows``.
    """

    grows = False

    def __init__(self) -> None:
        super().__init__()
        self.left, self.right = nn.Parameter(torch.randn(16, 2)), nn.Parameter(torch.randn(2, 16))

    def forward(self, x: Tensor) -> Tensor:
        weight = self.up.weight
        register_parametrization(self.up, "weight", Plus(self.left @ self.right))
        if self.grows:
            with torch.no_grad():
                weight += 1
        try:
            return super().forward(x)
        finally:
            remove_parametrizations(self.up, "weight", leave_parametrized=False)


@pytest.mark.parametrize("step", [squares, two_losses])
@pytest.mark.parametrize("learns", [False, True])
def test_a_parameter_with_a_new_version_and_the_same_bytes_did_not_change(learns: bool, step: Any) -> None:
    def make() -> nn.Module:
        model = Stack(AddsToWeight(), AddsToWeight(), AddsToWeight())
        for block in model.blocks:
            block.up.weight.requires_grad_(learns)  # type: ignore[union-attr]
        return sgd(model)

    check_checkpointed(make, step)


class Renews(Block):
    """Gives a weight a new version before it is used, so plain autograd may save it."""

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            self.up.weight.set_(self.up.weight)  # type: ignore[call-overload]
        return super().forward(x)


def test_a_renewed_parameter_that_is_saved_itself_is_no_error() -> None:
    check_checkpointed(lambda: blocks(Renews), squares)


class Counts(Block):
    """Adds to a buffer in each forward: nothing at first."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("count", torch.zeros(1))

    def forward(self, x: Tensor) -> Tensor:
        self.count += 0
        return super().forward(x)


def test_a_buffer_that_is_written_may_change_later() -> None:
    check_checkpointed(lambda: blocks(Counts), squares, count=0)


def test_a_parameter_that_forwards_begin_to_change_raises() -> None:
    model = blocks(AddsToWeight)
    with ebbtide.enable_activation_offloading(model, policy="minimal", min_bytes=0) as handle:
        for step in range(3):
            squares(model, step)
        assert handle.stats().checkpointed_blocks == 3
        AddsToWeight.grows = True
        try:
            with pytest.raises(ModifiedInPlaceError):
                squares(model, 3)
        finally:
            AddsToWeight.grows = False


class Given(Block):
    """Takes a second tensor, and changes it."""

    detaches = False

    def forward(self, x: Tensor, other: Tensor) -> Tensor:
        if self.detaches:
            return super().forward(hard(x + other.detach_()))
        return super().forward(F.batch_norm(x, other[0], other[1], training=True))


class Gives(Stack):
    """Passes its blocks running statistics, or a tensor that is computed for each."""

    def __init__(self, *blocks: nn.Module, detaches: bool) -> None:
        super().__init__(*blocks)
        self.statistics = nn.Parameter(torch.ones(2, 16), requires_grad=False)
        for block in blocks:
            block.detaches = self.detaches = detaches

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x, x + 1 if self.detaches else self.statistics)
        return x


@pytest.mark.parametrize("detaches", [False, True])
def test_what_a_forward_does_to_its_arguments_without_a_new_version_is_done_once(detaches: bool) -> None:
    check_checkpointed(lambda: sgd(Gives(Given(), Given(), Given(), detaches=detaches)), squares, count=0)


class Seeded(torch.autograd.Function):
    """Saves memory with different contents in each run, like the unwritten seeds of attention."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, dtype: torch.dtype, count: int) -> Tensor:
        ctx.save_for_backward(x, torch.tensor([next(CONTENTS) for _ in range(count)], dtype=dtype))
        return hard(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:  # pyright: ignore[reportIncompatibleMethodOverride]
        x, _ = ctx.saved_tensors
        return gradient * x, None, None


CONTENTS = itertools.cycle([True, False, False, True, False])
"""Two runs that take the same number of these find others."""


def seeded(dtype: torch.dtype, count: int) -> type[nn.Module]:
    class SeededBlock(Block):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x) + Seeded.apply(x, dtype, count)

    return SeededBlock


@pytest.mark.parametrize(("dtype", "count"), [(torch.int64, 1), (torch.int64, 2), (torch.uint64, 2), (torch.uint8, 8)])
def test_seeds_and_workspaces_that_nothing_wrote_are_not_compared(dtype: torch.dtype, count: int) -> None:
    check_checkpointed(lambda: blocks(seeded(dtype, count)), squares)


@pytest.mark.parametrize(("dtype", "count"), [(torch.int64, 3), (torch.bool, 2), (torch.float32, 2)])
def test_indices_masks_and_noise_of_another_second_forward_are_an_error(dtype: torch.dtype, count: int) -> None:
    check_refused(lambda: blocks(seeded(dtype, count)), squares, RestoreError, policies=("minimal",))


def test_an_index_of_one_number_of_another_second_forward_is_an_error() -> None:
    class Selects(Block):
        def __init__(self) -> None:
            super().__init__()
            self.draw = Dice().roll

        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x).index_select(1, torch.tensor([int(16 * self.draw())])).expand(-1, 16)

    check_refused(lambda: blocks(Selects), squares, RestoreError, policies=("minimal",))


@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize("verify", [False, True])
def test_the_noise_of_rrelu_is_saved_before_it_is_drawn(training: bool, verify: bool) -> None:
    class Noisy(Block):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(nn.functional.rrelu(self.up(x), training=training))

    check_checkpointed(lambda: blocks(Noisy), squares)
    check(lambda: blocks(Noisy), squares, verify=verify)


@pytest.mark.parametrize("training", [False, True])
def test_the_noise_of_rrelu_in_place_is_saved_before_it_is_drawn(training: bool) -> None:
    """The operator in place has an autograd node of its own."""

    class Noisy(Block):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(nn.functional.rrelu(self.up(x) * 2, training=training, inplace=True))

    check_checkpointed(lambda: blocks(Noisy), squares)
    check(lambda: blocks(Noisy), squares)


@pytest.mark.parametrize("count", [4, 16])
def test_a_checkpointed_block_counts_what_inputs_of_another_size_save(count: int) -> None:
    """So Auto also notices longer inputs if every block is checkpointed."""

    def saved(*counts: int) -> tuple[int | None, int]:
        torch.manual_seed(0)
        model = blocks()
        with ebbtide.enable_activation_offloading(model, policy="minimal", min_bytes=0) as handle:
            for rows in counts:
                model(torch.randn(rows, 16)).square().mean().backward()
            stats = handle.stats()
            return stats.checkpointed_blocks, stats.saved_bytes

    assert saved(8, 8, 8, count) == saved(count, count, count, count)
    assert saved(8, 8, 8, count)[0] == 3


def test_a_checkpointed_block_counts_the_same_where_its_inputs_are_replayed() -> None:
    def counted(*, verify: bool) -> tuple[bool, tuple[int, ...]]:
        torch.manual_seed(0)
        model, x = blocks(), torch.randn(8, 16)
        with ebbtide.enable_activation_offloading(model, policy="minimal", min_bytes=0, verify=verify) as handle:
            for _ in range(5):
                model(x).square().mean().backward()
            stats = handle.stats()
        counts = stats.saved_bytes, stats.unique_bytes, stats.kept_bytes, stats.offloaded_bytes, stats.recomputed_bytes
        return stats.replayed > 0, counts

    (recorded, expected), (replayed, found) = counted(verify=True), counted(verify=False)
    assert not recorded and replayed
    assert found == expected


class Differs(Block):
    """Blocks of one class, only some of which do something that may not be repeated."""

    def __init__(self, kind: str = "") -> None:
        super().__init__()
        self.own = torch.Generator() if kind == "generator" else None
        self.norm = nn.BatchNorm1d(16) if kind == "batch norm" else nn.Identity()
        self.mixed = kind == "switch"
        if kind == "buffer":
            self.register_buffer("tokens", torch.zeros(1))
        self.lazy = nn.LazyLinear(16) if kind == "lazy" else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        if self.own is not None:
            x = x + torch.rand(x.shape, generator=self.own) * 0.1
        if "tokens" in self._buffers:
            with torch.no_grad():
                self.tokens.add_(x.shape[0])
        if self.mixed:
            SWITCHED.append(float(x.detach().sum()))
        return super().forward(self.lazy(self.norm(x)))


SWITCHED: list[float] = []


@pytest.mark.parametrize("kind", ["generator", "batch norm", "buffer", "switch", "lazy"])
def test_a_block_that_differs_from_the_first_of_its_class_is_watched_first(kind: str) -> None:
    def make() -> nn.Module:
        torch.manual_seed(3)
        blocks = Stack(Differs(), Differs(kind), Differs(kind))
        model = nn.Sequential(nn.Linear(16, 16), blocks)  # the input of the first block takes a gradient
        with torch.no_grad():
            model(rows())  # materialises lazy layers
        SWITCHED.clear()
        return sgd(model)

    check(make, squares, policies=("minimal",))
    counts: list[int] = []
    for given in ({}, {"policy": "minimal"}):
        train(make, squares, 3, **given)
        counts.append(len(SWITCHED))
    assert counts[0] == counts[1]


class Experts(nn.Module):
    """Has more modules than the limit for other objects that a block reaches."""

    def __init__(self) -> None:
        super().__init__()
        self.router, self.down = nn.Linear(16, 160), nn.Linear(16, 16)
        self.register_buffer("tokens", torch.zeros(160))
        self.experts = nn.ModuleList(nn.Identity() for _ in range(160))

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            self.tokens += torch.bincount(self.router(x).argmax(-1), minlength=160)
        return x + self.down(hard(x))


def test_a_block_of_very_many_modules_is_watched_as_a_small_one() -> None:
    check(lambda: blocks(Experts), squares, policies=("minimal",))
    _, stats = train(lambda: blocks(Experts), squares, 3, policy="minimal")
    assert stats.checkpointed_blocks == 0


class Reaches(Block):
    def __init__(self) -> None:
        super().__init__()
        self.table = [[number] for number in range(5000)]


def test_a_block_that_reaches_too_much_is_not_checkpointed() -> None:
    check_checkpointed(lambda: blocks(Reaches), squares, 0)


data = itertools.count()
"""Has the name of an attribute that ``ReadsData`` reads."""


class ReadsData(Block):
    """Reads an attribute with the name of a global generator of its file."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + x.data.mean() * 0


def test_an_attribute_is_not_the_global_of_its_name() -> None:
    assert train(lambda: blocks(ReadsData), squares, 3, policy=Above())[1].checkpointed_blocks == 3


class Split(Block):
    """Holds views of a weight, which an optimizer writes in place: they refuse to say whether they are leaves."""

    def __init__(self) -> None:
        super().__init__()
        self.rows = self.up.weight.split(8)


def test_a_block_that_holds_several_views_of_a_weight() -> None:
    def make() -> nn.Module:
        return sgd(Stack(*(Split() for _ in range(3))))

    check(make, step_of(lambda model: model(torch.randn(8, 16)).square().mean()))


class Compressed(torch.autograd.Function):
    """Saves its input quantized."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(torch.quantize_per_tensor(x, 0.05, 0, torch.qint8))
        return x.sin()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        return gradients[0] * ctx.saved_tensors[0].dequantize().cos()


class Compressing(Block):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(Compressed.apply(x))


@pytest.mark.filterwarnings("ignore:torch.quantize_per_tensor:UserWarning")
def test_quantized_tensors_are_saved_by_checkpointed_blocks() -> None:
    check_checkpointed(lambda: blocks(Compressing), squares)


class Calling(Block):
    """Runs another block, which has run in this pass, inside."""

    inner: list[nn.Module]

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x + sum(block(x) for block in self.inner))


@pytest.mark.parametrize("policy", ["auto", "minimal", "offload", "inputs"])
def test_blocks_without_the_model_that_call_earlier_blocks(policy: str) -> None:
    """What a block calls is of its pass."""

    def make() -> nn.Module:
        first, last = Block(), Calling()
        last.inner = [first]
        return sgd(Stack(first, Block(), last))

    @step_of
    def step(model: Any) -> Tensor:
        x = rows()
        for block in model.blocks:
            x = block(x)
        return x.square().mean()

    check(make, step, policies=(policy,))
