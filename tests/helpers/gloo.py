"""Let each gloo group complete its collectives in one thread.

[Note: gloo's workers]
A group of ``ProcessGroupGloo`` has two threads that carry out its collectives. When one of these has ended, its thread
assigns the name of its kind to ``ProcessGroupStatus::lastCompletedWorkName``, without a lock
(``ProcessGroupGloo::runLoop``; torch 2.13.0). Where both threads do that at once, and the names are too long to lie in
the string itself, both free the same memory: "malloc(): unaligned tcache chunk detected", "free(): double free detected
in tcache 2", a segmentation fault, at any later time and in any thread. ``ALLGATHER_COALESCED`` is that long: DTensors
gather by it, as in sequence parallelism and ``full_tensor()``. Waiting for each collective does not help: the waiter is
woken before the name is assigned. Ebbtide has no part in it. This dies within seconds with two workers, and not with
one:

    python -m tests.helpers.gloo 2

So the groups of tests have one. When that command survives, torch locks the assignment, and this module can go.
"""

from __future__ import annotations

import os
import sys
import time
from datetime import timedelta
from typing import Any

import torch
from torch import distributed as dist


def use_one_worker() -> None:
    """Give one worker to every gloo group that this process makes from now on. May be called repeatedly."""
    real = dist.ProcessGroupGloo.__init__
    if getattr(real, "gives_one_worker", False):
        return

    def init(
        self: Any,
        store: Any,
        rank: int,
        size: int,
        options: Any = dist.default_pg_timeout,
        *,
        timeout: Any = None,
        **more: Any,  # since torch 2.14
    ) -> None:
        options = timeout or options
        options = _options(options) if isinstance(options, timedelta) else options
        options._threads = 1
        for name, value in more.items():
            setattr(options, name, value)
        real(self, store, rank, size, options)

    init.gives_one_worker = True  # type: ignore[attr-defined]
    dist.ProcessGroupGloo.__init__ = init


def _options(timeout: timedelta) -> Any:
    """Return the options that ``ProcessGroupGloo`` takes where it gets a time limit only, as from torch."""
    options = dist.ProcessGroupGloo._Options()
    names = os.environ.get("GLOO_SOCKET_IFNAME", "")
    devices = [dist.ProcessGroupGloo.create_device(interface=name) for name in names.split(",") if name]
    options._devices = devices or [dist.ProcessGroupGloo.create_default_device()]
    options._timeout = timeout
    return options


def _race(workers: int, seconds: float = 30.0) -> int:
    """Gather with several workers; return the number of collectives, if the process lives that long."""
    options = _options(dist.default_pg_timeout)
    options._threads = workers
    group: Any = dist.ProcessGroupGloo(dist.HashStore(), 0, 1, options)
    source, targets, done = torch.ones(8), [torch.empty(8) for _ in range(64)], 0
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        for work in [group.allgather_coalesced([[target]], [source]) for target in targets]:
            work.wait()
        done += len(targets)
    return done


if __name__ == "__main__":
    print(f"{_race(int(sys.argv[1])):,} collectives, and alive")
