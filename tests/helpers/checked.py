"""The fake device with torch's own checker of stream order listening: ``torch.cuda._sanitizer.EventHandler``.

[Note: what the checker sees]
Every kernel that autograd launches (``Computing``), every copy, record, wait and query of the device, and every
allocation and death of device memory. Freed memory goes back to the compute stream's pool, whose next owner may write
to it freely: so a death counts as a write by compute, and memory that a side stream still uses is found at its death,
whatever the rates. Freed host memory is written by the *host*, which is ordered after the work it has seen finish and
after nothing else. Memory in host chunks is reported in pieces of 64 bytes, so that places that overlap only in part
are compared.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import types
import weakref
from collections import deque
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from typing import Any
from unittest import mock

import torch
from torch.cuda import _sanitizer
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from tests.helpers.fakedevice import FakeDevice, FakeEvent, FakeStream

GRANULE_BYTES = 64
HOST = "host"


class CheckedDevice(FakeDevice):
    """A fake device that reports every request to torch's checker.

    Args:
        out: Rate of copy-outs.
        into: Rate of copy-ins.
        forgets: Kinds of streams, waiting and awaited, whose waits are left out.
        given: Further arguments of ``FakeDevice``.

    Attributes:
        found: The checker's findings.
    """

    def __init__(self, out: float, into: float, *, forgets: tuple[str, str] | None = None, **given: Any) -> None:
        self.found: list[str] = []
        self.inside = 0
        self._forgets = forgets
        self._checker = _sanitizer.EventHandler()
        self._serials = itertools.count(1)
        self._names: weakref.WeakKeyDictionary[torch.UntypedStorage, int] = weakref.WeakKeyDictionary()
        self._events: dict[FakeEvent, int] = {}  # by identity, and all kept, so that a number stays an event's own
        self._deaths: deque[int] = deque()  # storages may die at any point
        self._chunks: set[int] = set()
        super().__init__(out, into, **given)
        for name in ("compute", HOST):
            self._checker._handle_stream_creation(name)  # type: ignore[arg-type]

    # The protocol that the tier uses

    def side_stream(self, device: torch.device, purpose: str) -> FakeStream:
        stream = super().side_stream(device, purpose)
        self._checker._handle_stream_creation(stream.name)  # type: ignore[arg-type]
        return stream

    def record(self, stream: FakeStream, *, timed: bool = False) -> FakeEvent:
        self._bury()
        event = super().record(stream)
        number = self._events[event] = next(self._serials)
        self._checker._handle_event_creation(number)
        self._checker._handle_event_record(number, stream.name)  # type: ignore[arg-type]
        return event

    def wait(self, stream: FakeStream, event: FakeEvent) -> None:
        self._bury()
        if all(map(str.startswith, (stream.name, event.stream.name), self._forgets or ("nobody", "nobody"))):
            return
        self._checker._handle_event_wait(self._events[event], stream.name)  # type: ignore[arg-type]
        with self.at_work():
            super().wait(stream, event)

    def query(self, event: FakeEvent) -> bool:
        self._bury()
        past = super().query(event)
        if past:
            self._checker._handle_event_synchronization(self._events[event])
        return past

    def synchronize(self, event: FakeEvent) -> None:
        self._bury()
        self._checker._handle_event_synchronization(self._events[event])
        with self.at_work():
            super().synchronize(event)

    def allocate(self, nbytes: int, device: torch.device) -> torch.Tensor:
        with self.at_work():
            tensor = super().allocate(nbytes, device)
        # Its last owner may not be done with it: the pool orders it only after compute.
        self.launch("compute", (), [self.name_of(tensor)], "use before")
        return tensor

    def allocate_host(self, nbytes: int, *, pinned: bool) -> torch.Tensor:
        with self.at_work():
            tensor = super().allocate_host(nbytes, pinned=pinned)
        self._names[tensor.untyped_storage()] = number = next(self._serials)
        self._chunks.add(number)
        return tensor

    def free_host(self, buffer: torch.Tensor) -> None:
        number = self._names[buffer.untyped_storage()]
        if number not in self._chunks:
            self.found.append(f"host memory {number} was given back twice")
        self._chunks.discard(number)
        self.launch(HOST, (), self.names_of(buffer), "given back")
        with self.at_work():
            super().free_host(buffer)

    def copy(self, target: torch.Tensor, source: torch.Tensor, stream: FakeStream) -> None:
        self.launch(stream.name, self.names_of(source), self.names_of(target), "copy")
        with self.at_work():
            super().copy(target, source, stream)

    def copy_now(self, target: torch.Tensor, source: torch.Tensor) -> None:
        super().copy_now(target, source)
        self.synchronize(self.record(self._compute))

    def compute(self, seconds: float, *, writes: torch.Tensor | None = None) -> None:
        if writes is not None:
            self.launch("compute", (), self.names_of(writes), "produce")
        with self.at_work():
            super().compute(seconds, writes=writes)

    # Reports to the checker

    @contextlib.contextmanager
    def at_work(self) -> Iterator[None]:
        """The device's own arithmetic is not a kernel."""
        self.inside += 1
        try:
            yield
        finally:
            self.inside -= 1

    def launch(self, stream: str, reads: Iterable[Hashable], writes: Iterable[Hashable], what: str) -> None:
        """Report a kernel or a copy."""
        self._bury()
        self._launch(stream, reads, writes, what)

    def name_of(self, tensor: torch.Tensor) -> int:
        """Return the name of a device tensor's memory; report new memory."""
        storage = tensor.untyped_storage()
        number = self._names.get(storage)
        if number is None:
            number = self._names[storage] = next(self._serials)
            self._checker._handle_memory_allocation(number)
            weakref.finalize(storage, self._deaths.append, number).atexit = False
        return number

    def names_of(self, tensor: torch.Tensor) -> list[Hashable]:
        """Return the names of a tensor's memory: one, or those of its pieces of a host chunk."""
        if self.owns(tensor):
            return [self.name_of(tensor)]
        chunk, first = self._names[tensor.untyped_storage()], int(tensor.storage_offset())
        return [(chunk, i) for i in range(first // GRANULE_BYTES, -(-(first + tensor.numel()) // GRANULE_BYTES))]

    def _bury(self) -> None:
        while self._deaths:
            number = self._deaths.popleft()
            self._launch("compute", (), [number], "freed to the pool")
            self._checker._handle_memory_deallocation(number)

    def _launch(self, stream: str, reads: Iterable[Hashable], writes: Iterable[Hashable], what: str) -> None:
        written = set(writes)
        read = set(reads) - written
        aliases = {name: [""] for name in read | written}
        found = self._checker._handle_kernel_launch(stream, read, written, set(), what, aliases)  # type: ignore[arg-type]
        for error in found:
            now, before = error.current_access, error.previous_access  # type: ignore[attr-defined]
            self.found.append(
                f"{now.operator} on {now.stream} {now.type} what {before.operator} on {before.stream} was {before.type}"
            )


class Computing(TorchDispatchMode):
    """Reports every kernel to a checked device, and charges its time.

    Args:
        device: The device.
        seconds: How long kernels take, in turn.
    """

    def __init__(self, device: CheckedDevice, seconds: Sequence[float]) -> None:
        super().__init__()
        self._device, self._seconds = device, itertools.cycle(seconds)

    @classmethod
    def is_infra_mode(cls) -> bool:
        """Stay open for what ebbtide computes. See [Note: modes] in ``engine/modes.py``."""
        return True

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        device = self._device
        if device.inside:
            return func(*args, **kwargs)
        reads: set[Hashable] = set()
        writes: set[Hashable] = set()
        named = {a.name: a for a in func._schema.arguments}
        values = [*zip(func._schema.arguments, args, strict=False), *((named[k], v) for k, v in kwargs.items())]
        for argument, value in values:
            changed = argument.alias_info is not None and argument.alias_info.is_write
            if argument.alias_info is None or changed:  # else a view, which reads nothing
                (writes if changed else reads).update(self._names(value))
        results = func(*args, **kwargs)
        if not any(r.alias_info is not None for r in func._schema.returns):
            writes.update(self._names(results))
        if reads or writes:
            device.launch("compute", reads, writes, str(func))
            device.compute(next(self._seconds))
        return results

    def _names(self, value: Any) -> Iterator[Hashable]:
        for tensor in tree_leaves(value):
            if isinstance(tensor, torch.Tensor) and tensor.layout is torch.strided and self._device.owns(tensor):
                yield self._device.name_of(tensor)


@contextlib.contextmanager
def quiet_checker() -> Iterator[None]:
    """Omit stack traces, which take most of the checker's time, and messages about unknown streams."""
    empty = types.SimpleNamespace(extract=lambda *args, **kwargs: [])
    logger = logging.getLogger("torch.cuda._sanitizer")
    cheap = types.SimpleNamespace(StackSummary=empty, walk_stack=lambda frame: ())
    before, logger.disabled = logger.disabled, True
    try:
        with mock.patch.object(_sanitizer, "traceback", cheap):
            yield
    finally:
        logger.disabled = before


def without_waits(method: Callable[..., Any]) -> Callable[..., Any]:
    """Run a tier's method without any stream wait."""

    def careless(self: Any, *args: Any, **kwargs: Any) -> Any:
        with mock.patch.object(type(self.device), "wait", lambda *a: None):
            return method(self, *args, **kwargs)

    return careless
