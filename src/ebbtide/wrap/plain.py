"""Blocks that run without hooks. See [Note: plain blocks] in ``ebbtide.engine.timing``."""

from __future__ import annotations

import copy
import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from ebbtide.base.actions import Action, Site
from ebbtide.engine import Block, Engine
from ebbtide.engine.inputs import node_of
from ebbtide.engine.passes import PlainRun
from ebbtide.engine.run import BlockRun
from ebbtide.engine.stats import Tally
from ebbtide.engine.timing import GROWTH
from ebbtide.engine.untraced import leave_untraced
from ebbtide.wrap.called import Called
from ebbtide.wrap.coverage import tensors_in

STATES = 8
"""States that are remembered for a block."""

_State = tuple[bytes, int, tuple[torch.Size, ...]]
"""Which weights are trained, and which modules are in training; how many inputs take a gradient; their shapes."""


class _Seen(NamedTuple):
    """A block as it ran with hooks."""

    tally: Tally
    elements: float  # of all its inputs; with more it runs with hooks
    learned: int  # elements of the inputs to which its saved bytes are in proportion


class PlainBlocks:
    """Runs blocks without hooks when the engine's timer requests it, and counts the bytes they keep.

    A block called with clearly larger inputs than in the measured step that the plan was made from runs with hooks: the
    plan does not keep that much. So does each block if other weights are trained, or a dimension of an input is larger
    (attention scores grow with the square of the length), until a pass has shown that it saves hardly more.
    """

    def __init__(self, engine: Engine) -> None:
        leave_untraced(__name__)
        self._engine = engine
        self._trains, self._planned_bytes = b"", 0  # saved in the step that the plan was made from
        self.ran = False
        self.order: list[str] = []  # paths of the blocks of the latest pass
        self.counted: dict[str, Tally] = {}  # of its plain ones, by path: what they kept
        self._pending: list[tuple[str, _State, _Seen]] = []  # of the current pass
        self._seen: dict[str, dict[_State, _Seen]] = {}  # by path of the block

    def begin_pass(self, trains: bytes) -> None:
        """A pass begins, with ``Tree.trains`` of the model; learn from the one before."""
        timer, saved_bytes = self._engine.timer, self._engine.last_tally.unique
        if timer is not None and timer.wanted and not self.ran:
            self._planned_bytes = saved_bytes
            for name, _, _ in self._pending:
                self._seen[name] = {}
            for name, state, found in self._pending:
                self._seen[name][state] = found._replace(elements=GROWTH * found.elements)
        elif saved_bytes <= GROWTH * self._planned_bytes:
            for name, state, found in self._pending:
                known = self._seen.get(name, {})
                most = max((each.elements for each in known.values()), default=0)
                if found.elements <= most and state not in known:
                    if len(known) == STATES:
                        del known[list(known)[1]]  # the first one was measured
                    known[state] = found
        self._trains, self.ran = trains, False
        self._pending.clear()
        self.order.clear()
        self.counted.clear()

    def saw(self, run: BlockRun, inputs: Sequence[torch.Tensor]) -> None:
        """Remember a block that ran with hooks."""
        if self._engine.timer is not None:
            found = _Seen(run.tally, _elements(inputs), _learned(inputs))
            self._pending.append((run.block.name, self._state(inputs), found))

    def _state(self, inputs: Sequence[torch.Tensor]) -> _State:
        return self._trains, sum([t.requires_grad for t in inputs]), tuple(shapes_of(inputs))

    def wanted(self, block: Block, inputs: Sequence[torch.Tensor]) -> _Seen | None:
        """Return how a block ran with hooks and such inputs, if it should run without hooks now."""
        timer = self._engine.timer
        if timer is None or not timer.runs_plain(block.name):
            return None
        (*state, shapes), elements = self._state(inputs), _elements(inputs)
        for (*known, measured), seen in self._seen.get(block.name, {}).items():
            # Whatever their shapes are, measured steps need blocks without hooks.
            if known == state and elements <= seen.elements and (timer.wanted or within(shapes, measured)):
                return seen
        return None

    def call(self, block: Block, called: Called, seen: _Seen) -> Any:
        """Run a block without hooks, of which ``wanted`` returned how it ran with them."""
        engine = self._engine
        timer, pass_ = engine.timer, engine.current_pass
        device = next((t.device for t in called.tensors if engine.tier.owns(t)), None)
        run, self.ran = PlainRun(block, pass_, device), True
        if timer is not None:
            timer.block_begins(run)
        try:
            output = called.run()
        finally:
            kept = all_kept(seen.tally, _learned(called.tensors), seen.learned)
            pass_.tally.add_all(kept)
            self.counted.setdefault(block.name, Tally()).add_all(kept)
            pass_.add_site(plain_site(block.kind), kept.unique, Action.KEEP)
            if timer is not None:
                timer.block_ends(run)
            if engine.bus.active:
                engine.emit_block(block, kept, "keep")
        self.mark(run, called.tensors, output)
        return output

    def mark(self, run: BlockRun | PlainRun, inputs: Sequence[torch.Tensor], output: Any) -> None:
        """Notify the timer, and listeners of a plain block, when the gradient of a block's output is ready.

        A plain block after blocks with hooks starts their prefetches, which its backward hides. An input that a block
        returns is not its own output.
        """
        self.order.append(run.block.name)
        timer = self._engine.timer
        plain = isinstance(run, PlainRun) and (run.previous is not None or self._engine.bus.active)
        if timer is None or not (plain or timer.times_blocks):
            return
        input_nodes = set(map(node_of, inputs))
        for node in set(map(node_of, tensors_in(output))) - input_nodes:
            if node is not None:
                node.register_prehook(functools.partial(self._backward_begins, run))
        if timer.times_blocks and timer.is_first(run):
            for node in filter(None, input_nodes):
                node.register_prehook(functools.partial(self._backward_leaves, run))

    def _backward_begins(self, run: BlockRun | PlainRun, gradients: tuple[torch.Tensor, ...]) -> None:
        with self._engine.lock:
            if isinstance(run, PlainRun):  # the engine reports others
                self._engine.bus.emit("block_backward", index=run.block.index, name=run.block.name)
                task = torch._C._current_graph_task_id()
                measured = self._engine.timer is not None and self._engine.timer.wanted  # timed alone
                if run.previous is not None and run.previous.task != task and not measured:
                    self._engine.restorer.begin_block(run.previous, task)
            if self._engine.timer is not None:
                self._engine.timer.backward_begins(run)
                if self._engine.timer.times_blocks:
                    self._engine.restorer.watch(torch._C._current_graph_task_id())

    def _backward_leaves(self, run: BlockRun | PlainRun, gradients: tuple[torch.Tensor, ...]) -> None:
        with self._engine.lock:
            if self._engine.timer is not None:
                self._engine.timer.backward_leaves(run)


def plain_site(kind: str) -> Site:
    """Return the site at which all that a plain block keeps is counted."""
    return Site(kind, "", "plain", 0)


def shapes_of(tensors: Sequence[torch.Tensor]) -> list[torch.Size]:
    """Return the shapes of tensors; of strided nested ones, which have none, their numbers of elements."""
    strided = torch.strided
    return [torch.Size([t.numel()]) if t.is_nested and t.layout is strided else t.shape for t in tensors]


def _elements(inputs: Sequence[torch.Tensor]) -> int:
    return sum(t.numel() for t in inputs)


def _learned(inputs: Sequence[torch.Tensor]) -> int:
    """Return the elements of the inputs that take a gradient; of all, where none does."""
    return _elements([t for t in inputs if t.requires_grad]) or _elements(inputs)


def all_kept(seen: Tally, elements: int, seen_elements: int) -> Tally:
    """Return the counts of a block or a pass that keeps everything, its bytes in proportion to its inputs.

    Args:
        seen: The counts of one under hooks.
        elements: Of the inputs now.
        seen_elements: Of the inputs then.
    """
    kept = copy.copy(seen)
    if seen_elements:  # else the inputs' tensors are in objects
        for name in ("saved", "unique", "small_bytes"):
            setattr(kept, name, getattr(seen, name) * elements // seen_elements)
    kept.kept, kept.offloaded, kept.recomputed = kept.unique, 0, 0
    return kept


def within(shapes: Sequence[torch.Size], measured: Sequence[torch.Size]) -> bool:
    """Whether no dimension of any tensor is clearly larger than in the measured pass. Jagged ones must be equal."""
    return shapes == measured or (list(map(len, shapes)) == list(map(len, measured)) and all(
        type(size) is type(known) is int and size <= GROWTH * known  # no symbol
        for shape, other in zip(shapes, measured, strict=True)
        for size, known in zip(shape, other, strict=True)
    ))  # fmt: skip
