"""Mark the steps and phases of any training loop.

[Note: steps mark themselves]
A step ends when an optimizer has stepped: torch calls hooks before and after every optimizer's ``step``. Gradient
accumulation is one step, because the optimizer steps once; optimizers that step back to back are one step, too, so the
event is emitted late, when the next forward begins or one of them steps again. A step's time includes loading of data:
it runs from the end of the previous step to its own end.

Forward begins and ends with a pass of the engine, or with the forward of a followed module; backward ends with
autograd's graph task. A loss computed outside of the model's forward is therefore part of the phase ``backward``.
Without ebbtide on the model and without a followed module, the two cannot be distinguished, and the phase is called
``forward and backward``. (Hooks on all modules could, but ``torch.compile`` does not support them.)

Steps and phases that a loop marks manually (``run.phase``, ``run.step``, the recipes) are not marked here.
"""

from __future__ import annotations

import logging
import sys
import threading
import time
import weakref
from collections.abc import Callable, Generator, Mapping
from contextlib import contextmanager, nullcontext
from threading import get_ident
from types import FrameType
from typing import Any

import torch
from torch import nn
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook
from torch.utils._pytree import tree_leaves

from ebbtide.base.events import BUS
from ebbtide.base.runs import BOTH_PHASE
from ebbtide.engine.inputs import node_of
from ebbtide.engine.untraced import untraced
from ebbtide.track.parts import parts_of

logger = logging.getLogger("ebbtide.track")

_MARKED = ("forward", "backward", "optimizer")


class StepMarker:
    """Emits ``phase``, ``step``, ``stats`` and ``parts`` while it is open. See [Note: steps mark themselves]."""

    def __init__(self) -> None:
        # Backward may run in autograd's threads, and a finalizer may emit an event in the middle of a mark.
        self._lock = threading.RLock()
        self._undo: list[Callable[[], None]] = []
        self._emitting = False
        self._hand_phases = self._hand_steps = self._warned = False
        self._step: Any = 1
        self._since: float | None = None
        """End of the previous step; for the first step, the start of its forward."""
        self._phase: str | None = None
        self._passes = 0
        """Forwards of the step."""
        self._turned: float | None = None
        """End of a forward whose backward has not begun."""
        self._stepping: torch.optim.Optimizer | None = None
        self._caller: tuple[int, FrameType] | None = None
        """The thread in which it steps, and torch's frame around its step."""
        self._stepped: list[torch.optim.Optimizer] = []
        """Optimizers that have stepped in this step."""
        self._ended: float | None = None
        """When the last of them finished."""
        self._stats: list[Mapping[str, Any]] | None = None
        self._parts: dict[str, Any] | None = None
        self._counted: weakref.WeakSet[torch.optim.Optimizer] = weakref.WeakSet()
        """Optimizers in the latest event ``parts``."""

    def __enter__(self) -> StepMarker:
        before = register_optimizer_step_pre_hook(self._before_optimizer)
        after = register_optimizer_step_post_hook(self._after_optimizer)
        self._undo = [BUS.subscribe(self._hear), before.remove, after.remove]
        return self

    def __exit__(self, *exception: object) -> None:
        while self._undo:
            self._undo.pop()()
        self.emit_ended_step()

    @contextmanager
    def follow(self, model: nn.Module) -> Generator[None, None, None]:
        """Mark forward and backward by a module's own forward."""

        def weights() -> dict[str, list[nn.Parameter]]:
            return {type(model).__name__: [*model.parameters()]}

        before = model.register_forward_pre_hook(self._before_forward)
        after = model.register_forward_hook(self._after_forward, always_call=True)
        removers = [before.remove, after.remove, BUS.provide("weights", weights)]
        try:
            yield
        finally:
            for remove in removers:
                remove()

    @contextmanager
    def share(self) -> Generator[None, None, None]:
        """Mark for one more record; marks by hand in its loop do not concern the loop around it."""
        hands = self._hand_phases, self._hand_steps
        self._counted.clear()
        try:
            yield
        finally:
            self._hand_phases, self._hand_steps = hands

    def emit_ended_step(self) -> None:
        """Emit the step that an optimizer has just ended."""
        with self._lock:
            self._emit_ended_step()

    def finish(self, **figures: Any) -> None:
        """Emit the step that an optimizer has just ended, with further figures; log those of a step marked by hand.

        Without one, as in an iteration that a gradient scaler skips, they are dropped: a record must not end a
        training run.
        """
        with self._lock:
            if self._hand_steps:
                known = {name: figure for name, figure in figures.items() if figure is not None}
                self._emit("log", step=self._step - 1 if isinstance(self._step, int) else None, logs=known)
                return
            if self._ended is None and not self._warned:
                self._warned = True
                logger.warning(
                    "run.step is called, and no optimizer has stepped since the previous step: its figures are not "
                    "recorded; hint: a gradient scaler skips some steps; call run.step once after optimizer.step(), "
                    "and with an optimizer that is not torch's pass number and time: run.step(n, seconds=...)"
                )
            self._emit_ended_step(**figures)

    # Hooks of a followed module

    def _before_forward(self, module: nn.Module, args: object) -> None:
        if torch.compiler.is_compiling() or not _in_training_forward():
            return
        with self._lock:
            if not self._is_stepping():
                self._forward_begins()

    def _after_forward(self, module: nn.Module, args: object, output: object) -> None:
        if torch.compiler.is_compiling() or not _in_training_forward():
            return
        with self._lock:
            if not self._is_stepping():
                self._forward_ends()
        for node in {node_of(x) for x in tree_leaves(output) if isinstance(x, torch.Tensor)}:
            if node is not None:
                node.register_prehook(self._before_backward)

    def _before_backward(self, gradients: object) -> None:
        with self._lock:
            if not self._is_stepping():
                self._backward_begins()

    # Events of the bus and of optimizers

    def _hear(self, kind: str, fields: dict[str, Any]) -> None:
        with self._lock:
            if self._emitting:
                return
            if kind == "phase":
                self._phase_by_hand(fields)
            elif kind == "step":
                self._step_by_hand(fields)
            elif self._is_stepping():
                return  # of an optimizer that calls the model itself, such as LBFGS
            elif kind == "pass_begin":
                self._forward_begins()
            elif kind == "pass_end":
                self._forward_ends()
            elif kind == "block_backward":
                self._backward_begins()

    def _phase_by_hand(self, fields: dict[str, Any]) -> None:
        if fields.get("name") in _MARKED and fields.get("step") is not None:
            self._hand_phases, self._phase = True, None
            self._since = time.monotonic() if self._since is None else self._since
            if self._ended is None or self._step != fields["step"]:
                self._emit_ended_step()
                self._step = fields["step"]

    def _step_by_hand(self, fields: dict[str, Any]) -> None:
        self._hand_steps = True
        self._step = fields.get("step")
        if self._ended is None:
            self._ended = time.monotonic()
        self._emit_ended_step()

    def _forward_begins(self) -> None:
        if self._phase == "forward" and self._passes:
            return  # of a followed module, which the engine also reports
        self._emit_ended_step()
        self._end_phase()
        self._turned = None
        self._begin_phase("forward")
        self._passes += 1
        if self._since is None:
            self._since = time.monotonic()

    def _forward_ends(self) -> None:
        if self._phase == "forward":
            self._end_phase()
            self._turned = time.monotonic()

    def _backward_begins(self) -> None:
        if self._phase == "backward":
            return
        if self._phase == "forward":  # blocks that are called without the model's own forward
            self._end_phase()
        self._begin_phase("backward", at=self._turned)
        self._turned = None
        if _in_backward():
            torch.autograd.Variable._execution_engine.queue_callback(self._backward_ends)

    def _backward_ends(self) -> None:
        with self._lock:
            if self._phase == "backward":
                self._end_phase()

    @untraced
    def _before_optimizer(self, optimizer: torch.optim.Optimizer, args: object, kwargs: object) -> None:
        with self._lock:
            if self._is_stepping() and self._stepping is not optimizer:
                return  # an optimizer inside another
            if any(other is optimizer for other in self._stepped):
                self._emit_ended_step()
            self._stepping, self._caller = optimizer, (get_ident(), sys._getframe(1))
            if _in_backward():
                return  # it steps inside backward, as soon as a gradient is ready
            if self._phase is None and self._turned is not None:  # no event marked backward's begin
                self._begin_phase("backward", at=self._turned)
            elif not self._passes and not self._stepped and self._since is not None:
                self._begin_phase(BOTH_PHASE, at=self._since)
            self._turned = None
            self._end_phase()
            self._begin_phase("optimizer")

    @untraced
    def _after_optimizer(self, optimizer: torch.optim.Optimizer, args: object, kwargs: object) -> None:
        with self._lock:
            if self._stepping is not optimizer:
                return
            self._stepping = self._caller = None
            if self._phase == "optimizer":
                self._end_phase()
            self._stepped.append(optimizer)
            self._ended = time.monotonic()
            if not _in_backward():
                self._look()

    def _is_stepping(self) -> bool:
        """Whether an optimizer steps now. If a step raised, torch does not report its end."""
        if self._stepping is None or self._caller is None:
            return False
        thread, caller = self._caller
        if thread != get_ident():
            return True
        frame: FrameType | None = sys._getframe(1)
        while frame is not None and frame is not caller:
            frame = frame.f_back
        if frame is None:
            self._stepping = self._caller = None
            if self._phase == "optimizer":
                self._end_phase()
        return frame is not None

    def _look(self) -> None:
        """Read the figures of the step now: when it is emitted, handles may be closed and gradients freed."""
        self._stats = BUS.ask("stats")
        if any(optimizer not in self._counted for optimizer in self._stepped):  # of a GAN each steps at another time
            self._counted.update(self._stepped)
            models = (named for found in BUS.ask("weights") for named in found.items())
            self._parts = parts_of(models, self._counted)

    # Emitting

    def _emit_ended_step(self, **figures: Any) -> None:
        """End the step if an optimizer has stepped; emit it, unless the loop does."""
        end, self._ended = self._ended, None
        if end is None:
            return
        if self._stats is None and not self._hand_steps:
            self._look()
        stats, self._stats = self._stats or [], None
        step, seconds = self._step, None if self._since is None else end - self._since
        self._stepped, self._since, self._passes = [], end, 0
        self._step = step + 1 if isinstance(step, int) else None
        if self._hand_steps:
            return
        fields = {"step": step, "loss": None, "seconds": seconds, "tokens": None, **figures}
        self._emit("step", t=end, **fields)
        for one in stats:
            self._emit("stats", t=end, step=step, **one)
        parts, self._parts = self._parts, None
        if parts is not None:
            self._emit("parts", t=end, step=step, **parts)

    def _begin_phase(self, name: str, at: float | None = None) -> None:
        self._phase = name
        self._mark("begin", {} if at is None else {"t": at})

    def _end_phase(self) -> None:
        if self._phase is not None:
            self._mark("end", {})
            self._phase = None

    def _mark(self, edge: str, when: dict[str, float]) -> None:
        if not self._hand_phases:
            self._emit("phase", name=self._phase, edge=edge, step=self._step, **when)

    def _emit(self, kind: str, **fields: Any) -> None:
        self._emitting = True
        try:
            BUS.emit(kind, **fields)
        finally:
            self._emitting = False


_records: list[StepMarker] = []
"""The open marker, once for each record: two would take each other's marks for those of the loop."""


@contextmanager
def marking(model: nn.Module | None) -> Generator[StepMarker, None, None]:
    """Mark the steps of a record: open a marker, or share the open one, which goes on counting.

    Args:
        model: The module to follow, if any.
    """
    marker = _records[0] if _records else StepMarker().__enter__()
    with nullcontext() if not _records else marker.share():
        _records.append(marker)
        try:
            with nullcontext() if model is None else marker.follow(model):
                yield marker
        finally:
            marker.emit_ended_step()  # a record that began earlier may end earlier
            _records.pop()
            if not _records:
                marker.__exit__()


def emit_ended_step() -> None:
    """Emit the step that an optimizer has just ended, before a further record begins."""
    for marker in _records[:1]:
        marker.emit_ended_step()


def _in_backward() -> bool:
    return torch._C._current_graph_task_id() != -1


def _in_training_forward() -> bool:
    """Whether a backward follows this forward: not in evaluation, nor in a checkpoint's recomputation."""
    return torch.is_grad_enabled() and not _in_backward()
