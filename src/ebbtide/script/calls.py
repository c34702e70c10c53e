"""Intercept the outermost calls of modules: see [Note: any script] and the notes below.

[Note: patches of calls]
A script may patch ``nn.Module.__call__`` itself (quantisers, profilers), before or after the replacement is made,
around what is there or around torch's own that it kept from before. So the replacement is around whatever is there, and
it is removed only while it is what the class holds: under a script's patch it stays, and passes each call on. A patch
that does not call it has displaced it: it is made again, around that patch, for another step. A patch that a script
makes for each step, and undoes, displaces that one, too. So after a step that did not reach the replacement there is
a further one for another step: of ``_call_impl``, which torch's own ``__call__`` looks up.

[Note: calls in threads]
The class is every thread's. While one thread is inside a model, whose layers call torch's own, another's model may
begin without being seen, and go on after the replacement is back: its layers would look like models. So where
models are called in several threads, the stack is searched for a call around the one that is seen.
"""

from __future__ import annotations

import functools
import sys
import threading
from collections.abc import Callable
from types import FrameType
from typing import Any

import torch
from torch import nn

from ebbtide.wrap.forward import while_tracing

_CALL, _BENEATH = "__call__", "_call_impl"
_CALLED = nn.Module._call_impl.__code__


class OutermostCalls:
    """Reports each outermost call of a module before it begins.

    Args:
        report: Called with the module, its arguments and its keyword arguments.
        traced: Called when a call is compiled into surrounding code.
        name: The method that is replaced.
    """

    def __init__(
        self, report: Callable[[nn.Module, Any, Any], None], traced: Callable[[], None], name: str = _CALL
    ) -> None:
        self._report, self._traced, self._name = report, traced, name
        self._looking = self._was_called = False
        self._thread, self._threads = threading.local(), set[int]()
        self._beneath: OutermostCalls | None = None
        self._ours: Any = None
        self._behind: Any = None  # replaced by ours
        self._reached: Any = None  # held by the class when ours was last called: ours, or a patch around it

    @property
    def _inside(self) -> bool:
        return getattr(self._thread, "inside", False)

    def look(self) -> None:
        """Report calls from now on."""
        self._was_called = self._was_called and self._looking
        self._looking = True
        if self._inside or self._is_called():  # inside, it is put back at the call's end
            return
        self._behind, call, traced = self._held(), getattr(nn.Module, self._name), while_tracing(self._is_traced)

        @functools.wraps(call)
        def ours(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
            if torch.compiler.is_compiling():
                traced()
                return call(module, *args, **kwargs)
            if self._inside or not self._looking or self._ours is not ours:
                return call(module, *args, **kwargs)
            return self._outermost(call, module, args, kwargs)

        self._ours = self._reached = ours
        self._hold(ours)

    def rest(self) -> None:
        """Report no more calls, unless a patch has displaced the replacement: see [Note: patches of calls]."""
        beneath, self._beneath = self._beneath, None
        if beneath is not None:
            beneath.rest()
        found = beneath is not None and beneath._was_called
        displaced = self._looking and not self._inside and not self._is_called() and not found
        unreached = self._looking and not self._was_called and beneath is None and self._name == _CALL
        self._looking = False
        if unreached:
            self._beneath = OutermostCalls(self._report, self._traced, _BENEATH)
            self._beneath.look()
        if displaced or unreached:
            self.look()
        elif self._held() is self._ours:
            self._hold(self._behind)

    def _is_traced(self) -> None:
        self._was_called = True
        self._traced()

    def _is_called(self) -> bool:
        return self._held() is self._ours or self._held() is self._reached

    def _outermost(
        self, call: Callable[..., Any], module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        self._was_called = True
        self._threads.add(threading.get_ident())
        if len(self._threads) > 1 and _is_within_a_call():
            return call(module, *args, **kwargs)
        ours, behind = self._ours, self._behind
        self._thread.inside, held = True, self._held()
        if held is not behind:  # as another thread holds it
            self._reached = held
        if held is ours:  # neither the layers nor Dynamo see it
            self._hold(behind)
        try:
            self._report(module, args, kwargs)
            return call(module, *args, **kwargs)
        finally:
            self._thread.inside = False
            if self._looking and held is ours and self._held() is behind:
                self._hold(ours)

    def _held(self) -> Any:
        return vars(nn.Module)[self._name]

    def _hold(self, call: Any) -> None:
        setattr(nn.Module, self._name, call)


def _is_within_a_call() -> bool:
    """Whether a module's call is on the stack: see [Note: calls in threads]."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_code is not _CALLED:
        frame = frame.f_back
    return frame is not None
