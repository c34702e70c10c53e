"""The steps of a script without ebbtide in its code: phases, losses and the end, observed through torch.

[Note: a script's steps]
A step ends when an optimizer with parameters of a switched model has taken a step. Of several, the first to step
counts, until another one steps twice in between: a later stage of the training has an optimizer of its own. Where it
steps within a backward (gradient release), for one weight after the other, the step ends with that backward. As in a
recipe, ``forward`` begins with the first call of a switched model and ends where ``backward`` begins, with the loss
computed. The loss is the argument of backward, summed over micro-batches; if it is not one number, no loss is recorded.
Training that does not count, such as a probe's, adds to the sum of the step around it; if that lasts, none is recorded.
Of a loss that torch.amp's ``GradScaler`` or FSDP1's has scaled, the unscaled one is recorded, and none of a step that
it skips.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import math
import os
import sys
import time
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.optim.optimizer import Optimizer
from torch.utils.weak import WeakTensorKeyDictionary

from ebbtide.base.errors import DataError
from ebbtide.base.events import BUS
from ebbtide.engine.storages import plain_tensors
from ebbtide.script.request import Request
from ebbtide.store.allocator import trim_heap
from ebbtide.track import RunFile
from ebbtide.track.parts import TRAINED, model_bytes, optimizer_bytes, tensor_bytes
from ebbtide.wrap.collectives import is_distributed
from ebbtide.wrap.forward import StandIn, called_attribute, in_backward

STEPS_TO_TRIM = 3
"""From this many steps on, the last one measures memory on a trimmed heap: see [Note: steady steps]."""

MOST_LOSSES = 4096
"""Most losses of one step; of a step with more, none is recorded."""


class ScriptSteps:
    """Marks and records the steps of a script, and ends it after a number of them."""

    def __init__(self, request: Request) -> None:
        self._request = request
        self._models: list[tuple[nn.Module, Any]] = []
        self.around: list[nn.Parameter] = []
        """What optimizers hold, where only the layers of a model are known: see [Note: where a script is switched]."""
        self._run: RunFile | None = None
        self._clock: Callable[[], Optimizer | None] = lambda: None
        self._others: weakref.WeakKeyDictionary[Optimizer, tuple[int, float]] = weakref.WeakKeyDictionary()
        """Optimizers that have stepped since the clock: the losses by then, and the time."""
        self._released: Callable[[], Optimizer | None] = lambda: None
        """Return the optimizer whose steps within the latest backward are a step."""
        self._step, self._began, self._phase = 0, 0.0, ""
        self._losses: list[torch.Tensor | None] = []
        self._unscaled = WeakTensorKeyDictionary()
        self._ended = False

    def is_main(self) -> bool:
        """Whether this process is the one that records the training."""
        if is_distributed():
            return dist.get_rank() == 0
        return (os.environ.get("RANK") or "0") == "0"

    def follow(self, called: Sequence[nn.Module], models: list[tuple[nn.Module, Any]]) -> None:
        """Mark the calls of a newly switched model; the first model starts the record.

        Args:
            called: The modules of it that the script calls: the model, or the blocks of its stack.
            models: The switch's list of switched models and their handles; the new one is the last.
        """
        first = not self._models and not self._began
        self._models = models
        for module in called:
            StandIn(module, self._forward, called_attribute(module))
        if first:
            self._watch_backward()
            self._watch_scaler()
            if self._request.record and self.is_main():
                self._open(models[-1][0])
            self._began = time.perf_counter()

    def _open(self, model: nn.Module) -> None:
        request, name = self._request, type(model).__name__
        run = RunFile(request.folder, model=name, mode=request.mode, config={"command": sys.argv})
        try:
            self._run = run.__enter__()
        except DataError as error:  # another process of the command trains, too, and was first
            self._request.note("unrecorded", reason=error.found)
        except Exception as error:  # a record must not end a training run
            self._request.note("unrecorded", reason=f"{type(error).__name__}: {error}")

    # Phases

    def _forward(self, forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if not self._ended and not self._phase and torch.is_grad_enabled() and not in_backward() and BUS.active:
            if self._trims() and trim_heap():
                BUS.emit("trim", step=self._step + 1)
            self._begin("forward")
        return forward(*args, **kwargs)

    def _watch_backward(self) -> None:
        plain = torch.autograd.backward

        @functools.wraps(plain)
        def backward(tensors: Any, *args: Any, **kwargs: Any) -> None:
            if self._ended or self._phase == "backward" or in_backward():  # a checkpoint's recomputation
                return plain(tensors, *args, **kwargs)
            if not isinstance(tensors, (torch.Tensor, torch.autograd.graph.GradientEdge)):
                tensors = tuple(tensors)  # an iterator yields them once
            if len(self._losses) < MOST_LOSSES:
                self._losses.append(_loss(tensors, args, kwargs, self._unscaled))
            else:
                self._losses[-1] = None
            if self._phase == "forward":
                if self._trims():
                    trim_heap()
                self._end()
            self._released = lambda: None
            self._begin("backward")
            try:
                plain(tensors, *args, **kwargs)
            finally:
                self._end()
            if (optimizer := self._released()) is not None:
                self._end_step(optimizer)

        torch.autograd.backward = backward

    def _watch_scaler(self) -> None:
        kind: Any = torch.amp.GradScaler
        stepping = kind.step

        def watched(scaling: Callable[..., Any]) -> Callable[..., Any]:
            @functools.wraps(scaling)
            def scale(scaler: Any, outputs: Any) -> Any:
                scaled = scaling(scaler, outputs)
                if isinstance(outputs, torch.Tensor):
                    self._unscaled[scaled] = outputs.detach()
                return scaled

            return scale

        @functools.wraps(stepping)
        def step(scaler: Any, optimizer: Any, *args: Any, **kwargs: Any) -> Any:
            before = self._step
            result = stepping(scaler, optimizer, *args, **kwargs)
            if self._step == before and self._counts(optimizer):
                self._losses = []  # the step was skipped
            return result

        for one in (kind, *kind.__subclasses__()):
            if "scale" in vars(one):  # FSDP1's ShardedGradScaler has its own
                one.scale = watched(one.scale)
        kind.step = step

    def optimizer_begins(self, optimizer: Optimizer, *arguments: object) -> None:
        """Mark the optimizer's start, unless a closure computes a loss inside of its step (Lightning, LBFGS).

        Args:
            optimizer: The optimizer.
            arguments: Of its step.
        """
        if self._losses and not self._phase and not any(map(callable, arguments)) and self._counts(optimizer):
            self._begin("optimizer")

    def _begin(self, phase: str) -> None:
        self._phase = phase
        BUS.emit("phase", name=phase, edge="begin", step=self._step + 1)

    def _end(self) -> None:
        BUS.emit("phase", name=self._phase, edge="end", step=self._step + 1)
        self._phase = ""

    def _trims(self) -> bool:
        last = self._request.steps
        return last is not None and self._step + 1 == last >= STEPS_TO_TRIM and not torch.accelerator.is_available()

    # Steps

    def _counts(self, optimizer: Optimizer) -> bool:
        """Whether an optimizer's steps count: see [Note: a script's steps]."""
        clock = self._clock()
        if clock is None and self._holds(optimizer):
            self._clock = weakref.ref(optimizer)
            return True
        return clock is optimizer

    def _holds(self, optimizer: Optimizer) -> bool:
        own = {id(parameter) for parameter in self._of_models()}
        return any(id(p) in own for group in optimizer.param_groups for p in group["params"])

    def _takes_over(self, optimizer: Optimizer) -> bool:
        """Whether the steps of another optimizer count from this one on."""
        if optimizer not in self._others:
            if self._holds(optimizer):
                self._others[optimizer] = len(self._losses), time.perf_counter()
            return False
        losses, self._began = self._others[optimizer]
        del self._losses[:losses]
        self._clock = weakref.ref(optimizer)
        return True

    def step_ends(self, optimizer: Optimizer) -> None:
        """Mark a step's end, if an optimizer's step is one; after the last requested one, end the script.

        Raises:
            SystemExit: The requested steps are done.
        """
        within, released = in_backward(), self._released()
        if released is not None and (within or released is optimizer):
            return  # which is the next weight's, or, after the backward, has nothing left to do
        if not self._counts(optimizer) and not self._takes_over(optimizer):
            return
        if within:
            self._released = weakref.ref(optimizer)
        else:
            self._end_step(optimizer)

    def _end_step(self, optimizer: Optimizer) -> None:
        optimizers = [optimizer, *self._others]
        self._others.clear()
        if self._phase == "optimizer":
            self._end()
        self._synchronize()
        now = time.perf_counter()
        self._step += 1
        BUS.emit("step", step=self._step, loss=_sum(self._losses), seconds=now - self._began, tokens=None)
        for _, handle in self._models:
            if handle is not None:
                BUS.emit("stats", step=self._step, **handle.stats().as_dict())
        if BUS.active and (self._step == 1 or (self._step == 2 and len(optimizers) > 1)):  # the others step later
            self._emit_parts(optimizers)
        self._losses, self._began = [], time.perf_counter()
        if self._request.steps is not None and self._step >= self._request.steps:
            self.end()
            raise SystemExit(0)

    def _synchronize(self) -> None:
        """Wait for the current device, and for those of the models, which need not be on it."""
        if (found := torch.accelerator.current_accelerator(check_available=True)) is None:
            return
        where = {p.device.index for model, _ in self._models for p in model.parameters() if p.device.type == found.type}
        for index in where | {torch.accelerator.current_device_index()}:
            torch.accelerator.synchronize(index)

    def _emit_parts(self, optimizers: Sequence[Optimizer]) -> None:
        """Report the bytes of the models and their optimizers on this process."""
        models = [(type(model).__name__, model.parameters()) for model, _ in self._models]
        BUS.emit(
            "parts",
            step=self._step,
            weights=model_bytes([*models, (TRAINED, self.around)]),
            gradient_bytes=tensor_bytes(p.grad for p in self._trained() if p.grad is not None),
            optimizer_bytes=optimizer_bytes(optimizers),
        )

    def _trained(self) -> Iterable[nn.Parameter]:
        return dict.fromkeys([*self._of_models(), *(each for each in self.around if each.requires_grad)])

    def _of_models(self) -> Iterator[nn.Parameter]:
        for model, _ in self._models:
            yield from (parameter for parameter in model.parameters() if parameter.requires_grad)

    # The end

    def leave(self) -> None:
        """Count and mark nothing more: this process is a forked child, whose steps are not the run's."""
        self._ended, self._models, self._clock = True, [], lambda: None

    def end(self) -> None:
        """Close the record when the process ends or after the last requested step. May be called repeatedly."""
        if self._ended:
            return
        self._ended = True
        error = getattr(sys, "last_value", None)  # the exception that ends the process, if any
        stats = [handle.stats() for _, handle in self._models if handle is not None]
        self._request.note(
            "end",
            main=self.is_main(),
            steps=self._step,
            failed=error is not None,
            unique_bytes=sum(each.unique_bytes for each in stats),
            memory_saved_bytes=sum(each.memory_saved_bytes for each in stats),
            small_storages=sum(each.small_storages for each in stats),
        )
        if self._run is not None:
            if self._request.compared and error is None:
                self._emit_checksum()
            self._run.__exit__(None if error is None else type(error), error, None)

    def _emit_checksum(self) -> None:
        try:
            BUS.emit("parameters", step=self._step, checksum=_checksum(self._trained()))
        except Exception as error:  # they are not compared then
            sys.stderr.write(f"ebbtide: the trained parameters are not compared: {error}\n")


def _loss(
    tensors: Any, args: tuple[Any, ...], kwargs: dict[str, Any], unscaled: WeakTensorKeyDictionary
) -> torch.Tensor | None:
    """Return a copy of the number that backward is called on, before it was scaled; ``None`` if it is not one."""
    roots = tensors if type(tensors) is tuple else (tensors,)  # an edge is a named tuple
    gradients = args[0] if args else kwargs.get("grad_tensors")
    weighted = any(g is not None for g in gradients) if isinstance(gradients, (tuple, list)) else gradients is not None
    if len(roots) != 1 or weighted or not isinstance(roots[0], torch.Tensor) or roots[0].numel() != 1:
        return None
    loss = unscaled[roots[0]] if roots[0] in unscaled else roots[0]
    return loss.detach().clone()


def _sum(losses: list[torch.Tensor | None]) -> float | None:
    """Return the sum of a step's losses, rounded once; ``None`` if one is unknown."""
    values = [None if loss is None else float(loss) for loss in losses]
    known = [value for value in values if value is not None]
    if not known or len(known) < len(values):
        return None
    return math.fsum(known) if all(map(math.isfinite, known)) else sum(known)


def _checksum(parameters: Iterable[nn.Parameter]) -> str:
    digest = hashlib.blake2b(digest_size=16)
    for parameter in parameters:
        for part in plain_tensors([parameter.detach()]):
            host = part.contiguous().cpu()
            size, address = host.numel() * host.element_size(), host.data_ptr()
            if size and not address:
                raise RuntimeError(f"the bytes of a {type(part).__name__} cannot be read")
            if size:
                digest.update((ctypes.c_ubyte * size).from_address(address))
    return digest.hexdigest()
