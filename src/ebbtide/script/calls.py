"""Intercept the outermost calls of modules: see [Note: any script] and the note below.

[Note: patches of calls]
A script may patch ``nn.Module.__call__`` itself (quantisers, profilers), before or after the replacement is made,
around what is there or around torch's own that it kept from before. So the replacement is around whatever is there, and
it is removed only while it is what the class holds: under a script's patch it stays, and passes each call on. A patch
that does not call it has displaced it: it is made again, around that patch, for another step.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from ebbtide.wrap.forward import while_tracing


class OutermostCalls:
    """Reports each outermost call of a module before it begins.

    Args:
        report: Called with the module.
        traced: Called when a call is compiled into surrounding code.
    """

    def __init__(self, report: Callable[[nn.Module], None], traced: Callable[[], None]) -> None:
        self._report, self._traced = report, while_tracing(traced)
        self._looking = self._inside = False
        self._ours: Any = None
        self._behind: Any = None  # replaced by ours
        self._reached: Any = None  # held by the class when ours was last called: ours, or a patch around it

    def look(self) -> None:
        """Report calls from now on."""
        self._looking = True
        if self._inside or self._is_called():  # inside, it is put back at the call's end
            return
        self._behind, call, traced = _held(), nn.Module.__call__, self._traced

        @functools.wraps(call)
        def ours(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
            if torch.compiler.is_compiling():
                traced()
                return call(module, *args, **kwargs)
            if self._inside or not self._looking or self._ours is not ours:
                return call(module, *args, **kwargs)
            return self._outermost(call, module, args, kwargs)

        self._ours = self._reached = nn.Module.__call__ = ours

    def rest(self) -> None:
        """Report no more calls, unless a patch has displaced the replacement: see [Note: patches of calls]."""
        displaced = self._looking and not self._inside and not self._is_called()
        self._looking = False
        if displaced:
            self.look()
        elif _held() is self._ours:
            nn.Module.__call__ = self._behind

    def _is_called(self) -> bool:
        return _held() is self._ours or _held() is self._reached

    def _outermost(
        self, call: Callable[..., Any], module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        ours, behind = self._ours, self._behind
        self._inside, self._reached = True, (held := _held())
        if held is ours:  # neither the layers nor Dynamo see it
            nn.Module.__call__ = behind
        try:
            self._report(module)
            return call(module, *args, **kwargs)
        finally:
            self._inside = False
            if self._looking and held is ours and _held() is behind:
                nn.Module.__call__ = ours


def _held() -> Any:
    return vars(nn.Module)["__call__"]
