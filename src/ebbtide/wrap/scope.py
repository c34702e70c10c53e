"""Follows a block's forward: which of its modules runs, and the outputs of leaf modules."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import threading
import types
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from ebbtide.engine import Block
from ebbtide.engine.run import BlockRun
from ebbtide.engine.untraced import leave_untraced
from ebbtide.wrap import checkpointed, secondrun
from ebbtide.wrap.blocks import gathered_for, weights_of
from ebbtide.wrap.forward import copy_as_usual, copy_without_hooks, eager_parts, while_tracing
from ebbtide.wrap.others import Inside


class Scope:
    """The running module of a block, in the thread that runs the block."""

    def __init__(self, block: Block, module: nn.Module) -> None:
        # Dynamo may run these hooks in eager code; where it traces them, they do nothing.
        leave_untraced(__name__, checkpointed.__name__, secondrun.__name__)
        self.block, self.module = block, module
        self.open = False
        self.inside: list[Callable[[], None]] = []  # remove the hooks of the block
        self.others = Inside()
        self.compiled: set[str] = set()  # modules whose hooks were compiled into the code around them
        self._traced = while_tracing(self.compiled.add)
        self._hooks: dict[str, tuple[nn.Module, RemovableHandle, RemovableHandle]] = {}
        self._left: set[str] = set()  # modules that get no hooks any more
        self._paused = False
        self._run: BlockRun | None = None
        self._thread = 0

    def __reduce__(self) -> tuple[type, tuple[()], dict[str, Any]]:
        """The hooks of a module that pickles itself do nothing, and need no ebbtide. See [Note: copies]."""
        nothing = contextlib.nullcontext().__exit__
        return types.SimpleNamespace, (), {"entered": nothing, "left": nothing}

    def __deepcopy__(self, memo: object) -> Scope:
        """The hooks of a module that copies itself do nothing."""
        return Scope(dataclasses.replace(self.block, weights=tuple), nn.Identity())

    def follow(self) -> None:
        """Report the block's running module and the outputs of its leaf modules to the engine."""
        self._paused = False
        for name, module in eager_parts(self.module):
            if name in self._left:
                continue
            leaf = not any(True for _ in module.children())
            before = module.register_forward_pre_hook(functools.partial(self.entered, name))
            after = module.register_forward_hook(functools.partial(self.left, name, leaf), always_call=True)
            self._hooks[name] = module, before, after
            copy_without_hooks(module)

    def leave(self) -> None:
        """Remove the hooks of the block and its modules."""
        while self.inside:
            self.inside.pop()()
        self._remove(set(self._hooks))
        self._paused = False

    def pause(self) -> None:
        """Remove the hooks of the block's modules until ``resume``: where they have nothing to report, they cost."""
        if self._hooks:
            self._remove(set(self._hooks))
            self._paused = True

    def resume(self) -> None:
        """Install again what ``pause`` has removed."""
        if self._paused:
            self.follow()

    def leave_parts(self, names: set[str]) -> None:
        """Remove the hooks of modules of the block for good."""
        self._left |= names
        self._remove(names)

    def _remove(self, names: set[str]) -> None:
        for name in names & self._hooks.keys():
            module, *handles = self._hooks.pop(name)
            for handle in handles:
                handle.remove()
            copy_as_usual(module)

    def set_run(self, run: BlockRun | None) -> None:
        """Follow a run of the block, in the calling thread only; None: it is over."""
        self._thread, self._run = threading.get_ident(), run

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
        if (
            leaf
            and run.recipes
            and running is not None
            and isinstance(output, torch.Tensor)
            and run.builder is not None
        ):
            run.builder.note_module(running, output)
