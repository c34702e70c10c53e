"""Follows a block's forward: which of its modules runs, and the outputs of leaf modules.

[Note: module hooks]
Modules of a block have our hooks only while the block runs under its saved-tensor hooks. At any other time they would
change what others do who look at them: torch copies hooks with a module, moves them when it fuses modules, compiles
them into TorchScript, and forgoes its [Note: fused layers]. Hooks are installed for each run, by writing to the
dictionaries that ``Module`` calls them from (checked with torch 2.13): ``register_forward_hook`` takes many times as
long.

[Note: compiled units]
The module hooks of a compiled module run inside its compiled call, those of FSDP too. So a unit that is compiled in
place, or lies in what ``torch.compile`` returned, has no bytes yet where our hooks around the compiled call begin. And
compiled code may save weights as plain tensors: the local ones of DTensors, views from before a graph break, those of
FSDP1. When such a block saves a storage that is not known, its units are looked at: those that were gathered meanwhile
have other objects in their modules' dictionaries of parameters. Checked with torch 2.13.
"""

from __future__ import annotations

import contextlib
import functools
import threading
import weakref
from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from ebbtide.engine import Block
from ebbtide.engine.run import BlockRun
from ebbtide.engine.untraced import leave_untraced
from ebbtide.wrap import checkpointed, checkpointedcall
from ebbtide.wrap.blocks import gathered_for, parts_of, weights_of
from ebbtide.wrap.forward import eager_parts, encoder_layers, is_compiled, while_tracing
from ebbtide.wrap.other_offloaders import Inside
from ebbtide.wrap.strategy import is_fsdp1, is_fsdp2

Part = tuple[weakref.ref[nn.Module], Callable[..., None], Callable[..., None], weakref.ref[nn.Module] | None]
"""A module of a block, its two hooks, and the layer around it that runs without modules. See [Note: module hooks]."""

Unit = tuple[weakref.ref[nn.Module], weakref.ref[nn.Module], str]
"""An FSDP unit in compiled code, a module that has one of its parameters, and the parameter's name there."""


class ModuleHook(functools.partial[None]):
    """A module hook. In a copy of its module, or in a file, it does nothing, and needs no ebbtide."""

    def __reduce__(self) -> tuple[Any, ...]:
        return getattr, (contextlib.nullcontext(), "__exit__")


class Scope:
    """The running module of a block, in the thread that runs the block. See [Note: module hooks]."""

    def __init__(self, block: Block, module: nn.Module) -> None:
        # Dynamo may run these hooks in eager code; where it traces them, they do nothing.
        leave_untraced(__name__, checkpointed.__name__, checkpointedcall.__name__)
        self.block, self.module = block, module
        self.open = False
        self.inside: list[Callable[[], None]] = []  # restore the block's forward
        self.others = Inside()
        self.compiled: set[str] = set()  # modules whose hooks were compiled into the code around them
        self._traced = while_tracing(self.compiled.add)
        self._number = RemovableHandle(OrderedDict()).id  # of the hooks, in each module
        self._parts: list[Part] | None = None
        self._units: list[Unit] = []  # see [Note: compiled units]
        self._hooked: list[Part] = []  # of the current run
        self._left: set[str] = set()  # modules that get no hooks any more
        self._run: BlockRun | None = None
        self._thread = 0

    def leave(self) -> None:
        """Restore the block's forward."""
        while self.inside:
            self.inside[-1]()
            self.inside.pop()
        self.end()  # of a run that an interrupt struck at its end
        self.forget_parts()

    def leave_parts(self, names: set[str]) -> None:
        """Never again put hooks on these modules of the block."""
        self._left |= names
        self.forget_parts()

    def forget_parts(self) -> None:
        """Look for the block's modules again before its next run: some may have been replaced or compiled."""
        self._parts = None

    def _find_parts(self) -> list[Part]:
        parts = [] if is_compiled(self.module) else eager_parts(self.module)
        around = encoder_layers(self.module)
        found: list[Part] = []
        for name, part in parts:
            if name in self._left:
                continue
            leaf = not any(True for _ in part.children())
            before, after = ModuleHook(self.entered, name), ModuleHook(self.left, name, leaf)
            found.append((weakref.ref(part), before, after, around.get(id(part))))
        return found

    def begin(self, run: BlockRun) -> None:
        """Follow a run of the block, in the calling thread only: report its modules to the engine."""
        self._thread, self._run = threading.get_ident(), run
        if self._parts is None:
            self._parts, self._units = self._find_parts(), _compiled_units(self.module)
        if self._units:
            run.weights.gathered = _gathered(self._units)
        self._hooked, number = self._parts, self._number
        for held, before, after, around in self._hooked:
            part, layer = held(), None if around is None else around()
            if part is None or (layer is not None and not layer.training):
                continue
            part._forward_pre_hooks[number] = before
            part._forward_hooks[number] = after
            part._forward_hooks_always_called[number] = True

    def end(self) -> None:
        """The run is over, even a failed one."""
        self._run, number = None, self._number
        for held, *_ in self._hooked:
            part = held()
            if part is not None:
                part._forward_pre_hooks.pop(number, None)
                part._forward_hooks.pop(number, None)
                part._forward_hooks_always_called.pop(number, None)
        self._hooked = []

    def entered(self, name: str, module: nn.Module, args: Any) -> None:
        if torch.compiler.is_compiling():
            self._traced(name)
            return
        run = self._run
        if run is not None and self._thread == threading.get_ident():
            self.others.look(run)
            run.enter(name, module)
            if run.engine.weights.move:
                run.weights.see((*weights_of(module), *gathered_for(module)))

    def left(self, name: str, leaf: bool, module: nn.Module, args: Any, output: Any) -> None:
        if torch.compiler.is_compiling():
            self._traced(name)
            return
        run = self._run
        if run is None or self._thread != threading.get_ident():
            return
        running = run.leave()
        if leaf and run.notes and running is not None and isinstance(output, torch.Tensor) and run.builder is not None:
            run.builder.note_module(running, output)


def _compiled_units(block: nn.Module) -> list[Unit]:
    """Return the FSDP units that gather their weights in compiled code. See [Note: compiled units]."""
    compiled = [module for module in block.modules() if is_compiled(module)]
    units = dict.fromkeys(m for module in compiled for m in module.modules() if is_fsdp2(m) or is_fsdp1(m))
    found: list[Unit] = []
    for unit in units:
        for part in parts_of(unit):
            name = next((name for name, weight in part._parameters.items() if weight is not None), None)
            if name is not None:
                found.append((weakref.ref(unit), weakref.ref(part), name))
                break
    return found


def _gathered(units: list[Unit]) -> Callable[[], list[torch.Tensor]]:
    """Return a function that returns the weights of the units that were gathered since it was last called."""
    before: list[torch.Tensor | None] = [None] * len(units)

    def gathered() -> list[torch.Tensor]:
        found: list[torch.Tensor] = []
        for number, (unit, owner, name) in enumerate(units):
            module, holder = unit(), owner()
            now = None if holder is None else holder._parameters.get(name)
            if module is not None and now is not before[number]:
                before[number] = now
                found += weights_of(module)
        return found

    return gathered
