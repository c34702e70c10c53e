"""One thread at a time.

[Note: threads]
A handle follows one forward at a time: the pass, the open block and the running module belong to one thread. A
concurrent forward with gradients in another thread (``nn.parallel.parallel_apply``, workers that share a model) runs as
without ebbtide: its tensors stay on the device and its gradients are right. Backwards may run in any thread at any
time.

Module hooks belong to all threads. After an error in a forward, torch calls a module's hooks one by one; if another
thread's block ends meanwhile, and takes its hooks away, torch raises that a dictionary has changed instead of the error
(checked with torch 2.13). The first error is raised in its place.
"""

from __future__ import annotations

import functools
import logging
import threading
import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.nn.parameter import is_lazy

logger = logging.getLogger("ebbtide.wrap")


class SerialCalls:
    """Tracks the thread whose forward is offloaded. See [Note: threads].

    Args:
        model: The model that is called; held weakly.
    """

    def __init__(self, model: nn.Module) -> None:
        self._model = weakref.ref(model)
        self._versions = _versions_of(model)
        # A turn is taken or ended by one dictionary operation, atomic for threads and interrupts.
        self._owner: dict[str, int] = {}
        self._refused: set[int] = set()  # threads whose entire forward runs without a turn
        self._warned = False
        self.called = False  # also without gradients, and by a disabled handle
        self.in_backward = False  # called with gradients by a backward

    @property
    def updated(self) -> bool:
        """Whether a weight that takes a gradient has been written since the handle was made."""
        model = self._model()
        return model is not None and _versions_of(model) != self._versions

    def call(self, offloaded: Callable[[], Any], plain: Callable[[], Any]) -> Any:
        """Call ``offloaded`` if this thread has the turn or can take it for the call, else ``plain``."""
        self.called = True
        me = threading.get_ident()
        if self._owner.get("thread") == me:
            return offloaded()
        try:
            if not torch.is_grad_enabled() or me in self._refused:
                return plain()
            if torch._C._current_graph_task_id() != -1:
                self.in_backward = True
                return plain()
            if self._owner.setdefault("thread", me) == me:
                return offloaded()
            return self._without(plain, me)
        except RuntimeError as error:
            if error.__context__ is not None and _was_between_hooks(error):
                raise error.__context__ from error.__context__.__cause__
            raise
        finally:
            if self._owner.get("thread") == me:
                self._owner.pop("thread")

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


def _versions_of(model: nn.Module) -> list[int]:
    trained = [p for p in model.parameters() if p.requires_grad and not is_lazy(p) and not p.is_inference()]
    return [weight._version for weight in trained]


def _was_between_hooks(error: RuntimeError) -> bool:
    """Whether torch raised an error because hooks were taken away while it called them. See [Note: threads]."""
    trace = error.__traceback__
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    return trace is not None and trace.tb_frame.f_code is nn.Module._call_impl.__code__ and "mutated" in str(error)


def serially(call: Callable[..., Any]) -> Callable[..., Any]:
    """Decorate a method that replaces a forward to run in one thread at a time.

    The method's last arguments are the forward and its arguments; its object has ``calls``.
    """

    @functools.wraps(call)
    def method(self: Any, *arguments: Any) -> Any:
        forward, args, kwargs = arguments[-3:]
        return self.calls.call(lambda: call(self, *arguments), lambda: forward(*args, **kwargs))

    return method
