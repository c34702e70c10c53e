"""Equal blocks: a few are simulated and represent the others.

[Note: repeated blocks]
A model has dozens of blocks that differ only in their index, and simulating each costs as much as the first. Blocks are
alike if they have the same class, submodules, attributes, weight shapes, and neighbours of the same kinds. Of those the
first and the last run, with their neighbours; the others are *skipped*: in place of their forward an autograd function
returns tensors of the right shapes, saves one of them so that the block appears in backward, and takes no time.
Afterwards the first block's figures are used for all of its kind; bytes that a block adds in forward and frees in
backward shift the memory of everything in between.

This is verified: the first and the last block must save the same bytes, take the same time and add the same memory,
the block after the first must save the same bytes in the same time (every second block may be another, by its number),
their calls must be alike, and a block may leave only its gradients behind. Otherwise ``NotAlike`` is raised, and the
step is simulated block by block.
"""

from __future__ import annotations

import functools
import math
import weakref
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_flatten, tree_unflatten

from ebbtide.engine import Block
from ebbtide.engine.passes import PlainRun, RunRecord
from ebbtide.engine.timed import TimedStep
from ebbtide.engine.timing import StepTimer
from ebbtide.profiling.faketensors import FakeMachine
from ebbtide.wrap.forward import StandIn

FEWEST = 7
"""Least number of alike blocks of which some are skipped; the first, the last and their neighbours always run."""

_PLAIN = (type(None), bool, int, float, complex, str, bytes, torch.dtype, torch.device, torch.layout)
_BARE = frozenset(vars(nn.Module())) - {"training"}
_SAME_SECONDS = 1e-6
"""Relative difference of sums of the same times in different order."""


class NotAlike(Exception):
    """Blocks that looked alike are not; simulate the step block by block."""


class Marks(StepTimer):
    """A timer that also notes the memory at the beginning of each block's forward and backward."""

    def __init__(self, machine: FakeMachine, done: Callable[[TimedStep], bool], **arguments: Any) -> None:
        super().__init__(machine, done, **arguments)
        self._machine = machine
        self.forward: dict[str, int] = {}
        self.backward: dict[str, int] = {}

    def block_begins(self, run: RunRecord | PlainRun) -> None:
        """A block's forward begins."""
        super().block_begins(run)
        self._mark(self.forward, run)

    def backward_begins(self, run: RunRecord | PlainRun) -> None:
        """A block's backward begins."""
        super().backward_begins(run)
        self._mark(self.backward, run)

    def _mark(self, marks: dict[str, int], run: RunRecord | PlainRun) -> None:
        # A block that runs twice is marked at its latest position, which breaks the order: see ``Repeats.complete``.
        marks.pop(run.block.name, None)
        marks[run.block.name] = self._machine.live_bytes


class Repeats:
    """Skips blocks of a model and fills in their figures. See [Note: repeated blocks].

    Args:
        blocks: The model's, before hooks are put around them.
        shards: Ranks over which gradients are divided.
    """

    def __init__(self, blocks: Sequence[tuple[nn.Module, Block]], shards: int) -> None:
        self._modules, self._names = [m for m, _ in blocks], [b.name for _, b in blocks]
        self._shards = shards
        # Gradients of earlier micro-batches: those of this one are added to them.
        self._known = {p for module in self._modules for p in module.parameters() if p.grad is not None}
        self._calls: dict[int, _Call] = {}
        self._first: dict[int, int] = {}  # index of a block → that of the first alike one, if any is skipped
        self._last: dict[int, int] = {}  # first → last
        self._out: set[int] = set()
        self._choose(_kinds(self._modules))
        for place in {*self._out, *self._last}:
            StandIn(self._modules[place], functools.partial(self._call, place))

    def _choose(self, kinds: list[int]) -> None:
        around = [None, *kinds, None]
        groups: dict[tuple[int | None, ...], list[int]] = {}
        for place in range(len(kinds)):
            groups.setdefault(tuple(around[place : place + 3]), []).append(place)
        # Recomputes of a kind are timed in its first block, which changes that block's memory.
        timed = {kinds.index(kind) for kind in kinds}
        groups = {key: [place for place in places if place not in timed] for key, places in groups.items()}
        many = [places for places in groups.values() if len(places) >= FEWEST]
        runs = timed | {place for places in groups.values() if len(places) < FEWEST for place in places}
        runs |= {place for places in many for place in (places[0], places[-1])}
        runs |= {place + offset for place in runs for offset in (-1, 1)}
        for places in many:
            out = set(places) - runs
            if out:
                self._out |= out
                self._first |= dict.fromkeys(places, places[0])
                self._last[places[0]] = places[-1]

    @property
    def some(self) -> bool:
        """Whether any block is skipped."""
        return bool(self._out)

    def _call(self, place: int, forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run a first block and note its call, or return tensors in place of a skipped block."""
        if _watched(self._modules[place]):
            raise NotAlike(f"somebody listens to parts of {self._names[place]}")
        if place not in self._out:
            if place in self._calls:
                raise NotAlike(f"{self._names[place]} runs twice")
            output = forward(*args, **kwargs)
            self._calls[place] = _Call.of((args, kwargs), output)
            return output
        known = self._calls.get(self._first[place])
        if known is None or _described((args, kwargs)) != known.arguments:
            raise NotAlike(f"{self._names[place]} is called otherwise than the first of its kind")
        return known.passed_on((args, kwargs))

    def complete(self, step: TimedStep, marks: Marks) -> TimedStep:
        """Return a step with the figures of all blocks; ``marks.backward`` is completed in place.

        Raises:
            NotAlike: Blocks are not as alike as they looked.
        """
        names = self._names
        if [block.name for block in step.blocks] != names or list(marks.forward) != names:
            raise NotAlike("blocks run in another order than they stand in")
        if list(marks.backward) != names[::-1]:
            raise NotAlike("blocks do not show in backward in the reverse order")
        figures = _Figures(step, [marks.forward[name] for name in names], [marks.backward[name] for name in names])
        for first, last in self._last.items():
            self._check(figures, first, last)
        blocks = list(step.blocks)
        offset = 0
        for place in range(len(names)):
            blocks[place] = replace(
                step.blocks[self._source(place)],
                name=names[place],
                forward_peak_bytes=figures.forward_peak(self._source(place), place) + offset,
            )
            offset += figures.forward_adds(self._source(place)) - figures.forward_adds(place)
        head_peak_bytes = None if step.head_peak_bytes is None else step.head_peak_bytes + offset
        for place in reversed(range(len(names))):
            peak = figures.backward_peak(self._source(place), place) + offset
            marks.backward[names[place]] += offset
            blocks[place] = replace(blocks[place], backward_peak_bytes=peak)
            offset += figures.backward_adds(self._source(place)) - figures.backward_adds(place)
        return replace(step, blocks=tuple(blocks), head_peak_bytes=head_peak_bytes)

    def _source(self, place: int) -> int:
        """Return the index of the block whose figures are used: its own, except between first and last."""
        first = self._first.get(place, place)
        return place if place == self._last.get(first) else first

    def _check(self, figures: _Figures, first: int, last: int) -> None:
        """Compare the first block of a kind with the last, and the memory it leaves behind with its gradients."""
        one, other = figures.step.blocks[first], figures.step.blocks[last]
        seconds = ((one.forward_seconds, other.forward_seconds), (one.backward_seconds, other.backward_seconds))
        same = (
            one.units == other.units
            and figures.of(first) == figures.of(last)
            and all(_same_seconds(a, b) for a, b in seconds)
        )
        if not same:
            raise NotAlike(f"{one.name} and {other.name} look alike and take other time or memory")
        after = figures.step.blocks[first + 1]
        alike = after.units == one.units and _same_seconds(after.forward_seconds, one.forward_seconds)
        if self._first.get(first + 1) == first and not alike:
            raise NotAlike(f"{one.name} and {after.name} look alike and take other time or memory")
        # The next block, which precedes it in backward, has unsharded gradients until this one's arrive.
        gradients = self._gradients(first, 1) + self._gradients(first + 1, self._shards) - self._gradients(first + 1, 1)
        if figures.forward_adds(first) + figures.backward_adds(first) != gradients:
            raise NotAlike(f"{one.name} leaves behind more than its gradients")

    def _gradients(self, place: int, shards: int) -> int:
        trained = [p for p in self._modules[place].parameters() if p.requires_grad and p not in self._known]
        return sum(math.ceil(p.numel() / shards) * p.itemsize for p in trained)


def _same_seconds(one: float, other: float) -> bool:
    return math.isclose(one, other, rel_tol=_SAME_SECONDS, abs_tol=1e-12)


@dataclass(frozen=True, slots=True)
class _Figures:
    """A step with skipped blocks, and the memory at the beginning of each block."""

    step: TimedStep
    forward: list[int]
    backward: list[int]

    def forward_adds(self, place: int) -> int:
        """Return the memory growth from the beginning of a forward to that of the next."""
        return self.forward[place + 1] - self.forward[place] if place + 1 < len(self.forward) else 0

    def backward_adds(self, place: int) -> int:
        return self.backward[place - 1] - self.backward[place] if place else 0

    def forward_peak(self, source: int, place: int) -> int:
        """Return the peak memory in the forward of a block, from that of an alike one."""
        return self.forward[place] + (self.step.blocks[source].forward_peak_bytes or 0) - self.forward[source]

    def backward_peak(self, source: int, place: int) -> int:
        return self.backward[place] + (self.step.blocks[source].backward_peak_bytes or 0) - self.backward[source]

    def of(self, place: int) -> tuple[int, ...]:
        """Return the figures that must be equal for alike blocks, relative to the memory at their start."""
        block = self.step.blocks[place]
        return (
            self.forward_adds(place),
            self.backward_adds(place),
            self.forward_peak(place, 0) - self.forward[0],
            self.backward_peak(place, 0) - self.backward[0],
            block.forward_resident_bytes,
            block.backward_resident_bytes,
        )


Described = tuple[Any, tuple[Any, ...]]
"""A tree's shape, and each leaf: a tensor's sizes and type, or a plain value."""


@dataclass(frozen=True, slots=True)
class _Call:
    """A call of a block: for each leaf of its output a description, or its position among the inputs."""

    arguments: Described
    returned: Any
    leaves: tuple[Any, ...]

    @classmethod
    def of(cls, arguments: Any, output: Any) -> _Call:
        places = {id(x): i for i, x in enumerate(tree_flatten(arguments)[0]) if isinstance(x, torch.Tensor)}
        storages = {x.untyped_storage()._cdata for x in tree_flatten(arguments)[0] if isinstance(x, torch.Tensor)}
        found, shape = tree_flatten(output)
        leaves: list[Any] = []
        for leaf in found:
            if leaf is None:
                leaves.append(None)
            elif not isinstance(leaf, torch.Tensor):
                raise NotAlike(f"a block returns a {type(leaf).__name__}")
            elif id(leaf) in places:
                leaves.append(places[id(leaf)])
            elif leaf._base is not None or leaf.untyped_storage()._cdata in storages:
                raise NotAlike("a block returns a view")
            else:
                leaves.append(_leaf(leaf))
        return cls(_described(arguments), shape, tuple(leaves))

    def passed_on(self, arguments: Any) -> Any:
        """Return tensors of the shapes that the block would return, behind an autograd function."""
        inputs = tree_flatten(arguments)[0]
        new = [leaf for leaf in self.leaves if isinstance(leaf, tuple)]
        learned = [x for x in inputs if isinstance(x, torch.Tensor) and x.requires_grad]
        if not learned or not all(requires_grad for *_, requires_grad in new):
            raise NotAlike("a block returns what has no gradient")
        made = iter(_PassOn.apply(new, *sorted(learned, key=lambda x: -x.numel())))  # type: ignore[no-untyped-call]
        leaves = [next(made) if isinstance(x, tuple) else x if x is None else inputs[x] for x in self.leaves]
        return tree_unflatten(leaves, self.returned)


class _PassOn(torch.autograd.Function):
    """The graph node of a skipped block."""

    @staticmethod
    def forward(ctx: Any, new: list[Any], *arguments: torch.Tensor) -> tuple[torch.Tensor, ...]:
        ctx.save_for_backward(arguments[0])
        ctx.like = [(tuple(x.shape), x.dtype) for x in arguments]
        return tuple(torch.empty_strided(size, stride, dtype=dtype, device="cpu") for size, stride, dtype, _ in new)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        _ = ctx.saved_tensors  # read it, so that the block appears in backward
        return (None, *(torch.empty(size, dtype=dtype, device="cpu") for size, dtype in ctx.like))


def _leaf(leaf: Any) -> Any:
    if isinstance(leaf, torch.Tensor):
        return tuple(leaf.shape), leaf.stride(), leaf.dtype, leaf.requires_grad
    if not isinstance(leaf, _PLAIN):
        raise NotAlike(f"a block receives a {type(leaf).__name__}")
    return leaf


def _described(arguments: Any) -> Described:
    leaves, shape = tree_flatten(arguments)
    return shape, tuple(map(_leaf, leaves))


def _kinds(modules: Sequence[nn.Module]) -> list[int]:
    """Return for each block the number of its kind."""
    known: list[int] = []  # the first place of each kind
    kinds: list[int] = []
    shared = Counter(id(p) for module in modules for p in module.parameters())
    for place, module in enumerate(modules):
        alone = all(shared[id(p)] == 1 for p in module.parameters())
        found = next(
            (k for k, first in enumerate(known) if alone and _alike(modules[first], module, place - first, set())),
            len(known),
        )
        if found == len(known):
            known.append(place)
        kinds.append(found)
    return kinds


def _alike(one: Any, other: Any, distance: int, seen: set[tuple[int, int]]) -> bool:
    """Whether two values are equal except for numbers that differ by the blocks' distance."""
    if one is other or (id(one), id(other)) in seen:
        return True
    if type(one) is not type(other):
        return False
    seen.add((id(one), id(other)))
    both = functools.partial(_alike, distance=distance, seen=seen)
    match one:
        case torch.Tensor():
            return (_leaf(one), one.is_meta) == (_leaf(other), other.is_meta)
        case nn.Module():
            return both(dict(_parts(one)), dict(_parts(other)))
        case dict():
            return list(one) == list(other) and all(both(one[key], other[key]) for key in one)
        case list() | tuple():
            return len(one) == len(other) and all(map(both, one, other))
        case bool() | float() | complex() | str() | bytes():
            return one == other
        case int():
            return one == other or other - one == distance
        case weakref.ref():
            return both(one(), other())
        case functools.partial():
            return both((one.func, one.args, one.keywords), (other.func, other.args, other.keywords))
        case _ if hasattr(one, "__func__"):
            return one.__func__ is other.__func__ and both(one.__self__, other.__self__)
        case _ if hasattr(one, "__dict__") and not callable(one):
            return both(vars(one), vars(other))
        case _:
            return bool(one == other)


def _parts(module: nn.Module) -> Iterator[tuple[str, Any]]:
    yield from module._parameters.items()
    yield from module._buffers.items()
    yield from module._modules.items()
    yield from ((name, value) for name, value in vars(module).items() if name not in _BARE)


def _watched(block: nn.Module) -> bool:
    """Whether anything except ebbtide observes the inside of a block, such as a foreign hook."""
    for part in block.modules():
        if part is not block and "forward" in vars(part):
            return True
        for hook in (*part._forward_hooks.values(), *part._forward_pre_hooks.values()):
            while isinstance(hook, functools.partial):
                hook = hook.func
            if part is not block and not str(getattr(hook, "__module__", "")).startswith("ebbtide."):
                return True
    return False
