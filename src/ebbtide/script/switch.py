"""Find the model that a script trains, and switch it: see [Note: any script]."""

from __future__ import annotations

import functools
import gc
import multiprocessing.util
import os
import random
import sys
import threading
import weakref
from collections.abc import Callable
from typing import Any, NoReturn

import torch
from torch import nn
from torch.optim.optimizer import Optimizer, register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from ebbtide.engine.untraced import untraced
from ebbtide.script.calls import OutermostCalls
from ebbtide.script.request import Request
from ebbtide.script.steps import ScriptSteps
from ebbtide.wrap.blocks import stack_of, stacks_in
from ebbtide.wrap.coverage import tensors_in
from ebbtide.wrap.forward import in_backward

MOST_MODELS = 4
"""Most models switched in one process; each has its own store and plan."""

SEED = 0
"""The seed of a compared script until it sets its own."""


def arm() -> None:
    """Start looking for the model; called when torch has been imported in a switched process."""
    ScriptSwitch(Request.received()).arm()


class ScriptSwitch:
    """Detects trained models and switches them to the mode of the request."""

    def __init__(self, request: Request) -> None:
        self._request = request
        self._steps = ScriptSteps(request)
        self._calls = OutermostCalls(self._outermost_call, lambda: self._note_once("traced"))
        self._optimizers: weakref.WeakKeyDictionary[Optimizer, None] = weakref.WeakKeyDictionary()  # in their order
        self._stepped: weakref.WeakSet[Optimizer] = weakref.WeakSet()
        self._inside: weakref.WeakSet[nn.Module] = weakref.WeakSet()  # switched models and all their parts
        self._switched: list[tuple[nn.Module, Any]] = []  # with their handles, in the modes that have one
        self._noted: set[str] = set()
        self._process: int | None = None  # of the first switched model; forked workers differ

    def arm(self) -> None:
        """Set the seed, watch optimizers, and intercept each outermost call of a module."""
        if self._request.compared:
            random.seed(SEED)
            torch.manual_seed(SEED)
            if "numpy" in sys.modules:
                sys.modules["numpy"].random.seed(SEED)
        made = Optimizer.__init__

        @functools.wraps(made)
        def initialise(optimizer: Optimizer, *args: Any, **kwargs: Any) -> None:
            made(optimizer, *args, **kwargs)
            self._optimizers[optimizer] = None
            self._note_once("optimizer")
            self._calls.look()

        Optimizer.__init__ = initialise  # pyright: ignore[reportAttributeAccessIssue]
        begins = self._steps.optimizer_begins
        register_optimizer_step_pre_hook(untraced(lambda optimizer, args, kwargs: begins(*args, *kwargs.values())))
        register_optimizer_step_post_hook(untraced(lambda optimizer, *_: self._step_ends(optimizer)))
        self._note_once("torch")

    def _outermost_call(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Switch a module that is about to be called, if it is a trained model or gradients pass through it."""
        if module in self._inside or not torch.is_grad_enabled() or in_backward():
            return
        if self._process not in (None, os.getpid()):
            return
        if not any(True for _ in module.children()):
            return
        if not self._is_held(module) and not self._is_passed(module, args, kwargs):
            return
        called = [module]
        if (stack := stack_of(module)) is not None:  # called one by one: see [Note: where a script is switched]
            module, called = stack, [block for _, block in stacks_in("", stack)]
        self._drop_unused()
        if len(self._switched) == MOST_MODELS:
            alike = any(type(model) is type(module) for model, _ in self._switched)
            self._note_once("more", model=type(module).__name__, alike=alike)
            return
        for model, handle in list(self._switched):
            if any(part is model for part in module.modules()):  # a part of it was called by itself before
                self._switched.remove((model, handle))
                if handle is not None:
                    handle.close()
        if self._process is None:
            self._process = os.getpid()
            os.register_at_fork(after_in_child=self._leave)
            # Not atexit, which does not run in multiprocessing's processes.
            multiprocessing.util.Finalize(None, self._process_ends, exitpriority=100)
            self._watch_exit()
        self._inside.update(module.modules())
        handle = self._switch(module)
        self._switched.append((module, handle))
        self._steps.follow(called, self._switched)
        if stack is not None:  # nobody knows the module around it
            self._steps.around += self._held()
        if handle is not None and not self._request.compared and self._steps.is_main():
            sys.stderr.write(f"ebbtide: {type(module).__name__} is offloaded: {_how(handle)}\n")

    def _drop_unused(self) -> None:
        """Drop models that nothing else holds, such as those of earlier folds: a handle ends with its model."""
        if not self._switched or self._noted & {"more", "shared"}:  # wrappers of one model may be made in each step
            return
        weak = [(weakref.ref(model), handle and weakref.ref(handle)) for model, handle in self._switched]
        around = list(map(weakref.ref, self._steps.around))
        self._switched.clear()  # the list that ``ScriptSteps`` reads, too
        self._steps.around.clear()
        gc.collect()  # a model and its handle hold each other
        held = ((model(), handle and handle()) for model, handle in weak)
        self._switched += [(model, handle) for model, handle in held if model is not None]
        self._steps.around += [parameter for known in around if (parameter := known()) is not None]

    def _is_held(self, module: nn.Module) -> bool:
        """Whether an optimizer holds parameters of a module."""
        held = set(map(id, self._held()))
        return any(id(parameter) in held for parameter in module.parameters() if parameter.requires_grad)

    def _is_passed(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        """Whether a frozen model saves tensors for gradients that pass through it to a switched model."""
        computed = self._switched and any(t.requires_grad and not t.is_leaf for t in tensors_in((args, kwargs)))
        return bool(computed) and any(True for _ in module.parameters())

    def _held(self) -> list[nn.Parameter]:
        """Return the parameters of all optimizers."""
        groups = [group for optimizer in self._optimizers for group in optimizer.param_groups]
        return [parameter for group in groups for parameter in group["params"]]

    def _switch(self, module: nn.Module) -> Any:
        """Switch a model to the mode of the request; return its handle, if it has one."""
        from ebbtide import enable_activation_offloading
        from ebbtide.base.errors import ConflictError
        from ebbtide.script.checkpointing import checkpoint_model, checkpoints_itself
        from ebbtide.wrap.other_offloaders import open_handles

        request, name = self._request, type(module).__name__
        others, ours = open_handles(module), [handle for _, handle in self._switched]
        if any(handle not in ours for handle in others):
            if request.compared:
                raise ConflictError(
                    f"the script itself enables ebbtide on {name}",
                    expected="a script without ebbtide: compare switches it on and off",
                    hint="leave enable_activation_offloading, or OffloadCallback, out of the script",
                )
            request.note("own", model=name)
            return None
        own = checkpoints_itself(module)
        handle, how = None, "as the script is"
        if others:  # of a model that shares its blocks: they are offloaded in the calls of both
            self._noted.add("shared")
            request.note("model", model=name, how="shares its blocks with another model", checkpoints_itself=own)
            return None
        if request.mode == "checkpointing":
            how = checkpoint_model(module)
        elif request.mode.startswith("ebbtide"):
            policy = "minimal" if request.mode == "ebbtide-minimal" else request.policy
            handle = enable_activation_offloading(module, policy=policy, disk_path=request.disk_path)
            how = _how(handle)
        request.note("model", model=name, how=how, checkpoints_itself=own)
        return handle

    def _step_ends(self, optimizer: Optimizer) -> None:
        self._note_once("step")
        self._stepped.add(optimizer)
        if all(one in self._stepped for one in self._optimizers):
            self._calls.rest()
        self._steps.step_ends(optimizer)

    def _leave(self) -> None:
        """Leave a forked child alone."""
        for _, handle in self._switched:
            if handle is not None:
                handle.disable()
        self._steps.leave()

    def _watch_exit(self) -> None:
        """End the record before calls that skip finalizers, which scripts avoid where they are slow or hang."""
        for name in ("_exit", "execv", "execve"):
            setattr(os, name, self._ending_first(getattr(os, name)))

    def _ending_first(self, plain: Callable[..., NoReturn]) -> Callable[..., NoReturn]:
        is_exit = plain is os._exit

        @functools.wraps(plain)
        def leave(*args: Any, **kwargs: Any) -> NoReturn:
            try:
                # A watchdog thread ends a process that hangs; a program that cannot run leaves the script running.
                is_main = threading.current_thread() is threading.main_thread()
                if is_main and (is_exit or os.access(kwargs.get("path", *args[:1]), os.X_OK)):
                    self._process_ends()
            finally:
                plain(*args, **kwargs)

        return leave

    def _process_ends(self) -> None:
        if self._process == os.getpid():
            self._steps.end()

    def _note_once(self, kind: str, **fields: Any) -> None:
        if kind not in self._noted:
            self._noted.add(kind)
            self._request.note(kind, **fields)


def _how(handle: Any) -> str:
    return f"{len(handle.blocks)} blocks, policy {handle.plan.name}"
