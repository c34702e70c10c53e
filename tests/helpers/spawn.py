"""Run functions on several gloo ranks, with a hard time limit.

[Note: a group's life]
``run_cases`` starts one process per rank and then runs case after case in the same group. Importing torch and the hosts
takes longer than most cases: one process imports them (``tests.helpers.warm``), and the ranks of all groups are forked
from it, with the caller's environment at that time. Ranks receive the next case over a pipe and answer
with a value (pickled: tensors come back by value, never as shared memory) or with a traceback. A case that fails on any
rank, or is not answered by all ranks in time, leaves the others inside a collective, so the entire group is ended, by
pid, and the remaining cases get a new one. A hang is a failure like any other, reported with the ranks that did not
answer and their stacks.

The functions must be importable by name (module level, not lambdas); they run with the process group initialised.
"""

from __future__ import annotations

import faulthandler
import io
import multiprocessing
import os
import pickle
import signal
import tempfile
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import torch

from tests.helpers.gloo import use_one_worker
from tests.helpers.recipes_only import minimal_by_heuristic

Case = tuple[Callable[..., Any], tuple[Any, ...]]
STARTUP_SECONDS = 120.0
SHOWN_CHARACTERS = 20_000
"""Most characters of a dead rank's output that are shown, half of them its first ones: see ``ends_of``."""
STACK_SECONDS = 2.0
"""Limit until a rank that hangs has written its stacks."""


class SpawnError(AssertionError):
    """A case failed, died or hung on some rank."""


@dataclass(kw_only=True)
class CaseResult:
    """The result of one case: the value of every rank, or the error."""

    name: str
    values_: list[Any] = field(default_factory=list)
    error: str = ""

    def values(self) -> list[Any]:
        """Return the ranks' values in rank order.

        Raises:
            SpawnError: The case failed, died or hung on some rank.
        """
        if self.error:
            raise SpawnError(f"case {self.name!r}: {self.error}")
        return self.values_


def ends_of(text: str, most: int = SHOWN_CHARACTERS) -> str:
    """Return the beginning and the end of a text that is too long.

    At a fatal signal the cause comes first, in the C library's words; then come Python's stacks, and those of C, of
    dozens of threads in a rank with many groups.
    """
    if len(text) <= most:
        return text
    left_out = len(text) - most
    return f"{text[: most // 2]}\n... {left_out} characters left out ...\n{text[-(most // 2) :]}"


def spawn(function: Callable[..., Any], world_size: int, *args: Any, timeout_seconds: float = 60.0) -> list[Any]:
    """Run ``function(*args)`` on every rank and return the values in rank order. See ``run_cases``."""
    return run_cases({"": (function, args)}, world_size, timeout_seconds=timeout_seconds)[""].values()


def run_cases(cases: Mapping[str, Case], world_size: int, *, timeout_seconds: float = 60.0) -> dict[str, CaseResult]:
    """Run many cases in one group of processes. See [Note: a group's life].

    Args:
        cases: Name → function and its arguments.
        world_size: Number of ranks.
        timeout_seconds: Hard limit of each case; starting the processes has its own.

    Returns:
        Name → result; a failed case raises only when its ``values()`` are requested.
    """
    results: dict[str, CaseResult] = {}
    group: _Group | None = None
    try:
        for name, (function, args) in cases.items():
            if group is None:
                group = _Group(world_size, timeout_seconds)
                if error := group.collect(STARTUP_SECONDS)[1]:
                    raise SpawnError(f"starting {world_size} ranks: {error}")
            group.send((function, args))
            values, error = group.collect(timeout_seconds)
            results[name] = CaseResult(name=name, values_=values, error=error)
            if error:
                group.end()
                group = None
        if group is not None:
            group.send(None)
            group.end(grace_seconds=10)
            group = None
    finally:
        if group is not None:
            group.end()
    return results


class _Group:
    """The parent's side of a group of ranks."""

    def __init__(self, world_size: int, timeout_seconds: float) -> None:
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(["tests.helpers.warm"])
        self._folder = tempfile.TemporaryDirectory(prefix="ebbtide-spawn-")
        self._pipes: list[Connection] = []
        self._processes: list[Any] = []
        for rank in range(world_size):
            ours, theirs = context.Pipe()
            process = context.Process(
                target=_rank_main,
                args=(rank, world_size, self._folder.name, theirs, timeout_seconds, dict(os.environ)),
                daemon=True,
            )
            process.start()
            theirs.close()  # so that a rank's death is an end-of-file here
            self._pipes.append(ours)
            self._processes.append(process)

    def send(self, message: Case | None) -> None:
        for pipe in self._pipes:
            with suppress(BrokenPipeError):  # a dead rank is found when its answer is awaited
                pipe.send(message)

    def collect(self, timeout_seconds: float) -> tuple[list[Any], str]:
        """Wait for an answer of every rank; return the values, or the error of the first rank that failed."""
        deadline = time.monotonic() + timeout_seconds
        waiting = {pipe: rank for rank, pipe in enumerate(self._pipes)}
        values: list[Any] = [None] * len(self._pipes)
        while waiting:
            ready = wait(list(waiting), timeout=max(0.0, deadline - time.monotonic()))
            if not ready:
                return [], self._hang(timeout_seconds, sorted(waiting.values()))
            for pipe in ready:
                rank = waiting.pop(pipe)  # type: ignore[call-overload]
                try:
                    good, payload = pickle.loads(pipe.recv_bytes())  # type: ignore[union-attr]
                except (EOFError, ConnectionResetError):
                    self._processes[rank].join(5)
                    return [], self._died(rank)
                if not good:
                    return [], self._death(rank) or f"rank {rank} raised\n{payload}"
                values[rank] = payload
        return values, ""

    def _death(self, raised: int) -> str:
        """Name the rank that died, if any: the error of its neighbour, whose connection broke, is a consequence."""
        dead = wait([p.sentinel for rank, p in enumerate(self._processes) if rank != raised], timeout=3.0)
        for rank, process in enumerate(self._processes):
            if process.sentinel in dead:
                return self._died(rank)
        return ""

    def _died(self, rank: int) -> str:
        """Describe how a rank ended and its output: an exception, or the cause and the stacks, Python's and C's."""
        return f"rank {rank} died with exit code {self._processes[rank].exitcode}\n{ends_of(self._wrote(rank))}"

    def _wrote(self, rank: int) -> str:
        """Return a rank's standard error, its stacks included."""
        file = Path(self._folder.name, f"stderr{rank}")
        return file.read_text(errors="replace") if file.exists() else ""

    def _hang(self, timeout_seconds: float, ranks: Sequence[int]) -> str:
        stacks: list[str] = []
        for rank in ranks:
            process = self._processes[rank]
            with suppress(ProcessLookupError):
                os.kill(process.pid, signal.SIGUSR1)  # faulthandler writes the stacks
        for rank in ranks:
            deadline = time.monotonic() + STACK_SECONDS
            # This frame is below those of the case; what is above it has been written by then.
            while time.monotonic() < deadline and f"in {_rank_main.__name__}\n" not in self._wrote(rank):
                wait([self._processes[rank].sentinel], timeout=0.05)
            stacks.append(f"rank {rank}:\n{self._wrote(rank) or '(no stack)'}")
        return f"hangs: no answer of ranks {list(ranks)} within {timeout_seconds:g} s\n" + "\n".join(stacks)

    def end(self, *, grace_seconds: float = 0.0) -> None:
        """Wait a while for the ranks to end, then end them by pid: no process outlives its test."""
        deadline = time.monotonic() + grace_seconds
        for process in self._processes:
            process.join(max(0.0, deadline - time.monotonic()))
            if process.exitcode is None:
                process.kill()
        for process, pipe in zip(self._processes, self._pipes, strict=True):
            process.join()
            process.close()
            pipe.close()
        self._folder.cleanup()


def _rank_main(
    rank: int,
    world_size: int,
    folder: str,
    pipe: Connection,
    timeout_seconds: float,
    environment: dict[str, str],
) -> None:
    """One rank: initialise, report that, then answer case after case until the stop message."""
    os.environ.clear()
    os.environ.update(environment)
    stderr = Path(folder, f"stderr{rank}").open("w")  # noqa: SIM115 - faulthandler needs it open for good
    os.dup2(stderr.fileno(), 2)
    torch._C._set_print_stack_traces_on_fatal_signal(True)  # of threads that Python does not know, too
    faulthandler.enable(file=stderr, all_threads=True)
    faulthandler.register(signal.SIGUSR1, file=stderr, all_threads=True)
    size = str(world_size)  # as torchrun sets it
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=size, LOCAL_WORLD_SIZE=size)
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    torch.set_num_threads(1)
    use_one_worker()
    answer = _run(_initialise, (rank, world_size, folder, timeout_seconds))
    pipe.send_bytes(answer)
    with minimal_by_heuristic():
        while (message := pipe.recv()) is not None:
            function, args = message
            torch.manual_seed(0)
            pipe.send_bytes(_run(function, args))
    torch.distributed.destroy_process_group()


def _initialise(rank: int, world_size: int, folder: str, timeout_seconds: float) -> None:
    torch.distributed.init_process_group(
        "gloo",
        init_method=f"file://{folder}/rendezvous",
        rank=rank,
        world_size=world_size,
        timeout=timedelta(seconds=timeout_seconds * 2),  # the limit above counts; this one only ends orphans
    )


def _run(function: Callable[..., Any], args: tuple[Any, ...]) -> bytes:
    """Call, and pickle the value or the traceback."""
    try:
        return _by_value((True, function(*args)))
    except BaseException:
        return pickle.dumps((False, traceback.format_exc()))


def _by_value(value: Any) -> bytes:
    """Pickle with plain pickle: multiprocessing's own would send tensors as shared memory."""
    buffer = io.BytesIO()
    pickle.Pickler(buffer, protocol=pickle.HIGHEST_PROTOCOL).dump(value)
    return buffer.getvalue()
