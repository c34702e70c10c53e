"""Interrupts at every point of a step at which a signal can strike.

[Note: where a signal strikes]
Python checks for signals when a function begins, after a call, and at a jump back: there a handler, such as the one
that raises ``KeyboardInterrupt``, may raise. ``Fuse`` traces the instructions of chosen files and raises at the k-th
such point; swept over k, it strikes wherever Ctrl-C can. A point is left out if the tracer would raise after the end of
a ``with`` or ``try`` that still covers the true one.
"""

from __future__ import annotations

import ctypes
import dis
import functools
import operator
import os
import sys
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import pytest

import ebbtide

SOURCE = Path(ebbtide.__file__).parent
FOLDERS = tuple(str(SOURCE / name) for name in ("engine", "wrap", "store", "api.py"))
LOOKS = frozenset({"RESUME", "CALL", "CALL_KW", "CALL_FUNCTION_EX", "JUMP_BACKWARD"})


@functools.cache
def points(code: CodeType) -> frozenset[int]:
    """Offsets of the instructions before which a signal may be noticed. See [Note: where a signal strikes]."""
    table = dis._parse_exception_table(code)  # type: ignore[attr-defined]

    def handler(offset: int) -> int | None:
        return next((e.target for e in table if e.start <= offset < e.end), None)

    instructions = list(dis.get_instructions(code))
    pairs = zip(instructions, instructions[1:], strict=False)
    return frozenset(
        after.offset for at, after in pairs if at.opname in LOOKS and handler(at.offset) == handler(after.offset)
    )


class Fuse:
    """Raises once, at the ``when``-th point of the work; 0 only counts.

    Attributes:
        count: Number of points so far.
        where: ``file:line function`` where it raised, or an empty string.
    """

    def __init__(self, error: type[BaseException], when: int = 0, *, also: tuple[str, ...] = ()) -> None:
        self.error, self.when, self.count, self.where = error, when, 0, ""
        self._folders = FOLDERS + also

    def burn(self, work: Callable[[], Any]) -> Any:
        """Run ``work`` under the fuse, in this thread."""
        before = sys.gettrace()
        sys.settrace(self._called)
        try:
            return work()
        finally:
            sys.settrace(before)

    def _called(self, frame: FrameType, event: str, argument: Any) -> Any:
        name = frame.f_code.co_filename
        if not name.startswith(self._folders):
            return None
        frame.f_trace_lines, frame.f_trace_opcodes = False, True
        return self._step

    def _step(self, frame: FrameType, event: str, argument: Any) -> Any:
        if event == "opcode" and frame.f_lasti in points(frame.f_code):
            self.count += 1
            if self.count == self.when:
                code = frame.f_code
                self.where = f"{Path(code.co_filename).name}:{frame.f_lineno} {code.co_qualname}"
                raise self.error("planted")
        return self._step


def interrupted_at(place: int, parts: Iterable[Any], work: Callable[[], object]) -> bool:
    """Run ``work``, interrupted at the ``place``-th line of some functions; False: they ran fewer lines."""
    codes, lines = {part.__code__ for part in parts}, 0

    def line(frame: FrameType, event: str, argument: Any) -> Any:
        nonlocal lines
        lines += event == "line"
        if lines == place and event == "line":
            raise KeyboardInterrupt
        return line

    before = sys.gettrace()
    sys.settrace(lambda frame, event, argument: line if frame.f_code in codes else None)
    try:
        work()
    except KeyboardInterrupt:
        pass
    finally:
        sys.settrace(before)
    return lines >= place


def signalled_before_waiting(number: int, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Have a signal come just before the next system call that sleeps; return the list that will name that call.

    No bytecode lies between the two, so Python's handler cannot run: for the call, the signal never comes.
    """
    came: list[str] = []

    def patched(name: str, call: Callable[..., Any], sleeps: Callable[..., bool]) -> Callable[..., Any]:
        def calling(*given: Any) -> Any:
            if came or not sleeps(*given):
                return call(*given)
            came.append(name)
            signal = functools.partial(ctypes.CDLL(None)["raise"], int(number))
            return list(map(operator.call, [signal, functools.partial(call, *given)]))[1]

        return calling

    monkeypatch.setattr(os, "waitpid", patched("waitpid", os.waitpid, lambda pid, options: not options & os.WNOHANG))
    monkeypatch.setattr(time, "sleep", patched("sleep", time.sleep, lambda seconds: True))
    return came
