"""One thread at a time.

[Note: threads]
A handle follows one forward at a time: the pass, the open block and the running module belong to one thread. A
concurrent forward with gradients in another thread (``nn.parallel.parallel_apply``, workers that share a model) runs as
without ebbtide: its tensors stay on the device and its gradients are right. Backwards may run in any thread at any
time.
"""

from __future__ import annotations

import functools
import logging
import threading
from collections.abc import Callable
from typing import Any

import torch

logger = logging.getLogger("ebbtide.wrap")


class SerialCalls:
    """Tracks the thread whose forward is offloaded. See [Note: threads]."""

    def __init__(self) -> None:
        # A turn is taken or ended by one dictionary operation, atomic for threads and interrupts.
        self._owner: dict[str, int] = {}
        self._refused: set[int] = set()  # threads whose entire forward runs without a turn
        self._warned = False
        self.called = False  # also without gradients, and by a disabled handle
        self.in_backward = False  # called with gradients by a backward

    def call(self, offloaded: Callable[[], Any], plain: Callable[[], Any]) -> Any:
        """Call ``offloaded`` if this thread has the turn or can take it for the call, else ``plain``."""
        self.called = True
        me = threading.get_ident()
        if self._owner.get("thread") == me:
            return offloaded()
        if not torch.is_grad_enabled() or me in self._refused:
            return plain()
        if torch._C._current_graph_task_id() != -1:
            self.in_backward = True
            return plain()
        try:
            if self._owner.setdefault("thread", me) == me:
                return offloaded()
        finally:
            if self._owner.get("thread") == me:
                self._owner.pop("thread")
        return self._without(plain, me)

    def _without(self, plain: Callable[[], Any], me: int) -> Any:
        if not self._warned:
            self._warned = True
            logger.warning(
                "nothing is offloaded in thread %r: it runs the model at the same time as another thread, and a "
                "handle follows one forward at a time; its gradients are those of ordinary training",
                threading.current_thread().name,
            )
        try:
            self._refused.add(me)
            return plain()
        finally:
            self._refused.discard(me)


def serially(call: Callable[..., Any]) -> Callable[..., Any]:
    """Decorate a method that replaces a forward to run in one thread at a time.

    The method's last arguments are the forward and its arguments; its object has ``calls``.
    """

    @functools.wraps(call)
    def method(self: Any, *arguments: Any) -> Any:
        forward, args, kwargs = arguments[-3:]
        return self.calls.call(lambda: call(self, *arguments), lambda: forward(*args, **kwargs))

    return method
