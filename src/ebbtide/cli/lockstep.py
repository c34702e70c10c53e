"""The runs of a round, in lockstep where memory holds them all: see [Note: a fair comparison]."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from pathlib import Path

from ebbtide.base.units import format_size
from ebbtide.cli.children import Child, Ended
from ebbtide.cli.progress import RunProgress, RunReader

GROWTH = 1.25
"""A run's memory after its first step, times this, is expected to be its peak."""

_FIRST_SLOW = (
    "The first run may be up to a fifth slower than equal ones: it gets the memory that is free in small pieces\n"
    "({size}), which this virtual machine's host backs by small pages\n"
    "hint: as root, `echo 1 > /proc/sys/vm/compact_memory` before a comparison joins the pieces"
)


StartOf = Callable[[str, Path], tuple[list[str], dict[str, str]]]
"""Mode and run folder → a child's command and its complete environment; called when it is started."""


def run_round(
    name: str,
    modes: Sequence[str],
    folder: Path,
    start: StartOf,
    progress: RunProgress,
    *,
    ended: Callable[[str, Ended], None],
    alone: bool | None,
    report: Callable[[str], None],
) -> bool | None:
    """Run the children of a round.

    They are started one after the other, and each takes its first step alone. If memory holds them all, the other steps
    are taken in lockstep: one by each run, then the next by each. Else each runs to its end before the next is started.

    Args:
        name: Of the round, for the progress.
        modes: The modes, in order.
        folder: Has a run folder for each mode.
        start: How a run is started.
        progress: Shows them.
        ended: Called with the mode and the outcome of each run.
        alone: Whether each ends before the next is started; ``None``: the first one's first step decides.
        report: Called with the reason, if the runs follow one another.

    Returns:
        What was decided; ``None`` if no run took a step.
    """
    from ebbtide.store.pages import small_free_bytes  # its package imports torch, which `--help` does without

    with contextlib.ExitStack() as closing:
        waiting: dict[str, tuple[Child, RunReader]] = {}
        small_bytes = small_free_bytes()
        alone = True if len(modes) == 1 else alone
        for number, mode in enumerate(modes):
            reader = progress.begin(f"{name}, {mode}", folder / mode)
            command, environment = start(mode, folder / mode)
            child = Child(command, folder / mode, environment=environment)
            closing.callback(child.close)
            outcome = None if alone else _step(child, reader, progress)
            if outcome is None and alone is None:
                runs = len(modes) - number
                reason = why_alone(child.most_bytes, runs=runs, device=reader.device, processes=reader.world_size)
                alone = reason is not None
                if reason is not None:
                    report(f"The runs follow one another: {reason}.")
                elif is_first_slow(small_bytes, child.most_bytes):
                    report(_FIRST_SLOW.format(size=format_size(small_bytes)))
            if outcome is None and alone:
                child.release()
                outcome = child.follow(lambda: bool(progress.look()))
            if outcome is None:
                waiting[mode] = child, reader
            else:
                progress.end()
                ended(mode, outcome)
        while waiting:
            _step_all(waiting, progress, ended)
    return alone


def _step_all(
    waiting: dict[str, tuple[Child, RunReader]], progress: RunProgress, ended: Callable[[str, Ended], None]
) -> None:
    """Let each child take a step; remove those that have ended."""
    progress.all_stepped(
        min(reader.done for _, reader in waiting.values()),
        {mode: reader.seconds[-1] for mode, (_, reader) in waiting.items() if reader.seconds},
    )
    # No mode always comes after the same other, or first.
    first = min(reader.done for _, reader in waiting.values()) % len(waiting)
    order = list(waiting)
    for mode in [*order[first:], *order[:first]]:
        child, reader = waiting[mode]
        child.permit_step()
        outcome = _step(child, reader, progress)
        if outcome is not None:
            del waiting[mode]
            progress.end()
            ended(mode, outcome)


def _step(child: Child, reader: RunReader, progress: RunProgress) -> Ended | None:
    """Follow a child until it has taken a step and waits; return its outcome if it has ended."""
    progress.resume(reader)
    before = reader.waits

    def over() -> bool:
        progress.look()
        return reader.waits > before

    return child.follow(over)


def is_first_slow(small_bytes: int, one_bytes: int) -> bool:
    """Whether the run that starts first may get much slower memory than the others.

    The system hands out small free pieces before it divides large ones. Where the host of a virtual machine reclaims
    free huge pages, it backs these again when they are used; small pieces have what backed them first, small pages.

    Args:
        small_bytes: Free memory in small pieces before the first run.
        one_bytes: The first run's memory.
    """
    from ebbtide.store.pages import host_reclaims_pages  # as above

    return host_reclaims_pages() and 2 * small_bytes > one_bytes


def why_alone(one_bytes: int, *, runs: int, device: str, processes: int = 1) -> str | None:
    """Return why a round's runs cannot go in lockstep; ``None`` if they can.

    Args:
        one_bytes: Memory of the first run after its first step.
        runs: Runs that would be in memory at once, with the first.
        device: Where it trains.
        processes: Its processes, which may use a port that the other runs use.
    """
    if processes > 1:
        return f"each has {processes} processes"
    if device != "cpu":
        return f"they train on one {device}"
    from ebbtide.store.share import free_memory_bytes  # as above

    needed, free = int(one_bytes * GROWTH * runs) - one_bytes, free_memory_bytes()
    if needed <= free:
        return None
    return f"{runs} at once need {format_size(needed)} more memory, and {format_size(free)} are free"
