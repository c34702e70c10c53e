"""Keep Dynamo away from the code of the engine and the store.

[Note: untraced]
While a compiled function runs, Dynamo compiles every Python frame that begins, unless the frame is part of a graph. The
eager parts of such a function (a torch module next to a user's in a ``Sequential``, what follows a graph break, a
disabled function) save tensors, and a tensor of theirs may be the last holder of an entry: torch and Python then call
pack and unpack hooks, ``__del__`` methods and weak references' callbacks of ours, which Dynamo would compile, or refuse
where a full graph is required. So their code objects are marked: Dynamo does not compile a marked frame, nor whatever
it calls. The mark is part of the code object and costs nothing at a call. ``torch.compiler.disable`` would wrap each
call and import Dynamo. Checked with torch 2.13.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Iterator
from types import CodeType, FunctionType, ModuleType
from typing import Any, TypeVar

import torch

_Function = TypeVar("_Function", bound=Callable[..., Any])
_ROOMS = ("ebbtide.engine", "ebbtide.store")


def leave_untraced(*others: str) -> None:
    """Mark the code of all modules of the engine and the store that are imported by now. See [Note: untraced].

    Args:
        others: Names of further modules.
    """
    for name in [*others, *(name for name in list(sys.modules) if name.startswith(_ROOMS))]:
        _mark(name)


def untraced(function: _Function) -> _Function:
    """Mark a hook that compiled code may call: Dynamo breaks the graph there instead of inlining it.

    Args:
        function: The hook, such as one of every optimizer's ``step``.
    """
    function._torchdynamo_disable = True  # pyright: ignore[reportFunctionMemberAccess]
    _leave(set(_with_inner(function.__code__)))  # pyright: ignore[reportFunctionMemberAccess]
    return function


@functools.cache
def _mark(name: str) -> None:
    _leave(set(_codes_of(sys.modules[name], name)))


def _leave(codes: set[CodeType]) -> None:
    frames: Any = torch._C._dynamo.eval_frame  # pyright: ignore[reportAttributeAccessIssue]
    skip = frames._FrameAction.SKIP
    for code in codes:
        frames.set_code_exec_strategy(code, frames._FrameExecStrategy(skip, skip))


def _codes_of(owner: ModuleType | type, module: str) -> Iterator[CodeType]:
    """Yield the code of the functions and classes that a module or class defines."""
    for value in list(vars(owner).values()):
        if isinstance(value, type) and value.__module__ == module:
            yield from _codes_of(value, module)
        getters = (value.fget, value.fset) if isinstance(value, property) else (value,)
        for function in getters:
            function = getattr(function, "__wrapped__", function)
            if isinstance(function, FunctionType) and function.__module__ == module:
                yield from _with_inner(function.__code__)


def _with_inner(code: CodeType) -> Iterator[CodeType]:
    yield code
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _with_inner(constant)
