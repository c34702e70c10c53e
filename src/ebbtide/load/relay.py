"""Ranks without access to a checkpoint request boxes of it from a rank with access.

[Note: a relay]
A rank without access knows the contents of the checkpoint and which boxes are its own. It sends that list to a rank
with access, on its own machine if possible, and gets their bytes, in the stored dtype, packed into messages of
bounded size. So no rank sends or holds bytes outside of some shard. Both sides cut the list into messages by the same
function. Each message begins with a status word: a source that fails says so in its next message, and no rank waits.
Messages go from rank to rank; no group is made.
"""

from __future__ import annotations

import contextlib
import json
import signal
import threading
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from types import FrameType
from typing import Any

import torch
import torch.distributed as dist

from ebbtide.base.errors import DataError
from ebbtide.load.filling import SliceSource
from ebbtide.load.header import CheckpointEntry
from ebbtide.load.layout import Box, Piece
from ebbtide.load.reader import CHUNK_BYTES, spans_of

MESSAGE_BYTES = 4 * CHUNK_BYTES
_WORD_BYTES = 16
_GOOD, _FAILED = 1, 2


def servers_of(sees: Sequence[str], hosts: Sequence[str], *, one_a_host: bool) -> dict[int, int]:
    """Return requesting rank → answering rank.

    Args:
        sees: By rank, what it sees of the checkpoint; empty: nothing.
        hosts: By rank, its machine.
        one_a_host: Only the first rank of a machine reads.
    """
    seeing = [rank for rank, sight in enumerate(sees) if sight]
    servers: dict[int, int] = {}
    for rank, host in enumerate(hosts):
        near = next((r for r in seeing if hosts[r] == host), seeing[0] if seeing else rank)
        if near != rank and (one_a_host or rank not in seeing):
            servers[rank] = near
    return servers


class Client:
    """The requesting side; reads like a file."""

    def __init__(self, server: int, entries: Mapping[str, CheckpointEntry]) -> None:
        self._server, self._entries, self._device = server, entries, _device()

    def read(self, pieces: Iterable[Piece], done: Callable[[int], None] = lambda nbytes: None) -> None:
        """Request pieces and receive them.

        Raises:
            DataError: The source could not read them.
        """
        wanted = list(pieces)
        if not wanted:
            return
        raised: list[BaseException] = []  # what fails here is raised when the server has sent all of this request
        with signals_held(raised):
            self._ask([(p.key, list(p.box.start), list(p.box.size)) for p in wanted])
            for message, nbytes in _messages(wanted, self._entries):
                data = torch.empty(nbytes, dtype=torch.uint8, device=self._device)
                dist.recv(data, src=self._server)
                if int(data[0]) != _GOOD:
                    stopped = DataError(
                        f"rank {self._server} stopped sending weights",
                        expected="its part of the checkpoint",
                        hint="check the log of that rank",
                    )
                    raised.append(stopped)
                    break
                if not raised:
                    try:
                        for piece, at in message:
                            entry = self._entries[piece.key]
                            piece.into.copy_(_view(data, at, piece, entry))
                            done(piece.box.numel * entry.dtype.itemsize)
                    except BaseException as error:
                        raised.append(error)
        if raised:
            raise raised[0]

    def finish(self) -> None:
        """Tell the server that no request follows."""
        self._ask([])

    def _ask(self, wanted: list[tuple[str, list[int], list[int]]]) -> None:
        text = json.dumps(wanted).encode()
        dist.send(torch.tensor([len(text)], device=self._device), dst=self._server)
        dist.send(torch.frombuffer(bytearray(text), dtype=torch.uint8).to(self._device), dst=self._server)


@contextlib.contextmanager
def signals_held(raised: list[BaseException]) -> Generator[None]:
    """Keep what the handlers of SIGINT and SIGTERM raise, until the end of the context; a repeated signal is not held.

    An exception between two messages leaves the other rank in a receive or a send that nobody ends. Outside the main
    thread no handler is run, and this does nothing.
    """
    before: dict[int, Any] = {}
    held: set[int] = set()

    def hold(number: int, frame: FrameType | None) -> object:
        if number in held:
            return before[number](number, frame)
        held.add(number)
        try:
            before[number](number, frame)
        except BaseException as error:
            raised.append(error)
        return None

    if threading.current_thread() is threading.main_thread():
        before = {n: handler for n in (signal.SIGINT, signal.SIGTERM) if callable(handler := signal.getsignal(n))}
    try:
        for number in before:
            signal.signal(number, hold)
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def send_slices(
    clients: Sequence[int],
    source: SliceSource,
    entries: Mapping[str, CheckpointEntry],
    raised: list[BaseException],
) -> None:
    """Answer clients until each has finished, in turns of a message, so that none waits for all of another's part.

    Args:
        clients: Their ranks.
        source: Has the tensors.
        entries: What the tensors are.
        raised: Once it holds an error, as of the source, each client is informed with the next message to it.
    """
    waiting = deque(_answers(client, source, entries, raised) for client in clients)
    while waiting:
        answers = waiting.popleft()
        if next(answers, None) is not None:
            waiting.append(answers)


def _answers(
    client: int, source: SliceSource, entries: Mapping[str, CheckpointEntry], raised: list[BaseException]
) -> Iterator[int]:
    """Answer a client, and yield after each message the bytes sent; ``raised`` takes the source's errors."""
    device = _device()
    while wanted := _heard(client, device):
        pieces = [
            Piece(key=key, box=Box(start=tuple(start), size=tuple(size)), into=torch.empty(size, device="meta"))
            for key, start, size in wanted
        ]
        for message, nbytes in _messages(pieces, entries):
            data = torch.zeros(nbytes, dtype=torch.uint8)
            if not raised:
                try:
                    source.read(
                        Piece(key=p.key, box=p.box, into=_view(data, at, p, entries[p.key])) for p, at in message
                    )
                except BaseException as error:
                    raised.append(error)
            data[0] = _FAILED if raised else _GOOD
            dist.send(data.to(device), dst=client)
            yield nbytes
            if int(data[0]) == _FAILED:
                break


def _heard(client: int, device: torch.device) -> list[tuple[str, list[int], list[int]]]:
    length = torch.zeros(1, dtype=torch.int64, device=device)
    dist.recv(length, src=client)
    text = torch.empty(int(length), dtype=torch.uint8, device=device)
    dist.recv(text, src=client)
    return json.loads(bytes(text.tolist()))


def _messages(
    pieces: Iterable[Piece], entries: Mapping[str, CheckpointEntry]
) -> Iterator[tuple[list[tuple[Piece, int]], int]]:
    """Yield pieces with their places in a message, and the message's bytes; alike on both sides."""
    message: list[tuple[Piece, int]] = []
    at = _WORD_BYTES
    for piece in (span for p in pieces for span in spans_of(p, entries[p.key])):
        nbytes = piece.box.numel * entries[piece.key].dtype.itemsize
        if message and at + nbytes > MESSAGE_BYTES:
            yield message, at
            message, at = [], _WORD_BYTES
        message.append((piece, at))
        at += -(-nbytes // _WORD_BYTES) * _WORD_BYTES
    if message:
        yield message, at


def _view(data: torch.Tensor, at: int, piece: Piece, entry: CheckpointEntry) -> torch.Tensor:
    nbytes = piece.box.numel * entry.dtype.itemsize
    return data[at : at + nbytes].view(entry.dtype).view(piece.box.size)


def _device() -> torch.device:
    """Return the device whose tensors the process group sends."""
    group: Any = dist.distributed_c10d._get_default_group()
    kinds = [torch.device(kind).type for kind in group._device_types]
    return torch.device("cpu") if "cpu" in kinds else torch.device(kinds[0], torch.accelerator.current_device_index())
