"""Counts of saved tensors by action."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from ebbtide.base.actions import Action
from ebbtide.base.events import Bus
from ebbtide.base.units import format_size
from ebbtide.store.protocol import Tier

_LEAST_STALL_SECONDS = 1e-4
"""Shorter waits of a block are counted but not emitted as events."""
_TIMED_PASSES, _PASSES_PER_TIMED = 2, 50
"""Passes that a device times, and of how many, if nobody listens and no plan is made."""
_MOST_STALLS_SHOWN = 5
_MOST_OUTSIDE = 3
"""Most modules outside the blocks that one line names."""


class Tally:
    """Bytes of one block's forward, or of one pass."""

    __slots__ = (
        "input_bytes", "kept", "largest_input_bytes", "must_keep", "offloaded", "packs", "recomputed", "replayed",
        "saved", "small", "small_bytes", "unique",
    )  # fmt: skip

    def __init__(self) -> None:
        self.packs = self.replayed = self.saved = self.unique = 0
        self.kept = self.offloaded = self.recomputed = 0
        self.input_bytes = self.must_keep = 0
        self.largest_input_bytes = 0  # floating, but it may need no gradient
        self.small = self.small_bytes = 0

    def add_saved(self, nbytes: int) -> None:
        """A tensor of ``nbytes`` was saved."""
        self.packs += 1
        self.saved += nbytes

    def add(self, action: Action, nbytes: int, *, must_keep: bool) -> None:
        """A storage was met for the first time."""
        self.add_storages([(None, action, nbytes, must_keep)])

    def add_storages(self, saved: Iterable[tuple[object, Action, int, bool]]) -> None:
        """Storages were met for the first time.

        Args:
            saved: Of each the site, the action, the bytes, and whether they can only be kept or offloaded.
        """
        for _, action, nbytes, must_keep in saved:
            self.unique += nbytes
            if action is Action.KEEP:
                self.kept += nbytes
            elif action is Action.OFFLOAD:
                self.offloaded += nbytes
            else:
                self.recomputed += nbytes
            if must_keep and action is not Action.RECOMPUTE:
                self.must_keep += nbytes

    def add_small(self, nbytes: int) -> None:
        """A storage below ``min_bytes``, which stays, was met for the first time."""
        self.small += 1
        self.small_bytes += nbytes

    def add_narrowed(self, nbytes: int, action: Action) -> None:
        """Of a storage that is to be cast up again, ``nbytes`` were offloaded, or kept, in the narrower type."""
        self.recomputed -= nbytes
        if action is Action.KEEP:
            self.kept += nbytes
        else:
            self.offloaded += nbytes

    def add_stayed(self, nbytes: int) -> None:
        """Of what was to be offloaded, ``nbytes`` stayed on the device."""
        self.offloaded -= nbytes
        self.kept += nbytes

    @property
    def checkpoint_bytes(self) -> int:
        """Bytes of a block's inputs that a checkpoint holds.

        Those that need a gradient; in a first block after frozen weights none does, so the largest stands for them.
        Others (positions, masks) are shared by the blocks.
        """
        return self.input_bytes or self.largest_input_bytes

    def unique_for(self, other: Tally) -> int:
        """Return the bytes that the same block saves with the inputs of another run, in proportion to their sizes."""
        own, others = self.input_bytes, other.input_bytes
        if not (own and others):  # a first block after frozen weights: its inputs need no gradient
            own, others = self.largest_input_bytes, other.largest_input_bytes
        return self.unique * others // own if own else self.unique

    def add_checkpointed(self, unique: int) -> int:
        """Count a checkpointed block; without a checkpoint its saved tensors would take ``unique`` bytes.

        Returns:
            The bytes that it does not hold.
        """
        dropped = max(unique - self.unique, 0)
        self.saved += dropped
        self.unique += dropped
        self.recomputed += dropped
        return dropped

    def add_all(self, other: Tally) -> None:
        """Add another tally to this one."""
        for name in self.__slots__:
            setattr(self, name, getattr(self, name) + getattr(other, name))

    def fields(self) -> dict[str, int]:
        """Return the bytes as event fields."""
        return {
            "saved_bytes": self.saved,
            "unique_bytes": self.unique,
            "kept_bytes": self.kept,
            "offloaded_bytes": self.offloaded,
            "recomputed_bytes": self.recomputed,
        }


class StallBook:
    """Attributes stalls to blocks: reads them from the store, which may know them only later, and emits them.

    Args:
        tier: The store.
        bus: Receives stalls above a threshold.
    """

    def __init__(self, tier: Tier, bus: Bus) -> None:
        self._tier, self._bus, self._stalls = tier, bus, tier.stalls
        self._passes = 0
        self.by_block: dict[str, float] = {}

    def begin_pass(self, *, measured: bool) -> None:
        """Time the copies and waits of a pass if somebody reads the times; else those of one pass in many.

        Args:
            measured: Whether a plan is to be made of this pass.
        """
        number, self._passes = self._passes % _PASSES_PER_TIMED, self._passes + 1
        self._stalls.timed = measured or self._bus.active or number < _TIMED_PASSES

    def flush(self) -> None:
        """Count and emit the stalls known by now."""
        found: dict[tuple[str, str], tuple[float, int | None]] = {}
        for reader, seconds in self._tier.counters.stalls.read():
            if reader is not None:
                phase, block, nbytes = reader
                total, moved = found.get((phase, block), (0.0, None))
                found[phase, block] = total + seconds, moved if nbytes is None else nbytes + (moved or 0)
        for (phase, block), (seconds, nbytes) in found.items():
            name = f"{phase} {block}"
            self.by_block[name] = self.by_block.get(name, 0.0) + seconds
            if seconds > _LEAST_STALL_SECONDS:
                self._bus.emit("stall", where=phase, block=block, seconds=seconds, bytes=nbytes)


@dataclass(frozen=True, kw_only=True)
class Coverage:
    """The blocks' share of the bytes that autograd saves in the model's forward.

    Attributes:
        inside_bytes: Bytes of the distinct storages saved in blocks, weights left out.
        outside: Path of a module → bytes of the distinct storages saved in its forward, outside of the blocks and of
            its own submodules.
        checkpointed: Blocks inside checkpoints of the model's own, which save nothing but their inputs.
    """

    inside_bytes: int
    outside: Mapping[str, int]
    checkpointed: int = 0

    @property
    def total_bytes(self) -> int:
        """Bytes saved inside and outside of the blocks."""
        return self.inside_bytes + sum(self.outside.values())

    @property
    def percent(self) -> float | None:
        """Share of the bytes that is saved in blocks; None if nothing is saved."""
        return 100.0 * self.inside_bytes / self.total_bytes if self.total_bytes else None

    def __str__(self) -> str:
        if self.percent is None:
            return "autograd saves nothing in the model's forward"
        largest = sorted(((n, path) for path, n in self.outside.items() if n), reverse=True)[:_MOST_OUTSIDE]
        named = ", ".join(f"{path or 'the forward of the model itself'} {format_size(n)}" for n, path in largest)
        return f"blocks hold {self.percent:.0f} % of what autograd saves" + (f"; outside: {named}" if named else "")


@dataclass(frozen=True, kw_only=True)
class Stats:
    """Figures of a handle. Bytes are those of the latest pass that ran a block and has ended, except the totals.

    Attributes:
        packs: Saved tensors, weights left out.
        replayed: Those of them that were recognised from an earlier step and not analysed again. It is 0 with
            ``verify=True``, with a ``keep_filter``, and in steps that ``Auto`` measures.
        saved_bytes: Their bytes, with every alias counted.
        unique_bytes: Bytes of the distinct storages of at least ``min_bytes``: the bytes of ordinary training; but of a
            storage of which only a part was saved and offloaded, that part.
        kept_bytes: Bytes that stayed on the device, those that were held back for backward among them.
        offloaded_bytes: Bytes moved to the store.
        in_flight_bytes: Those of them whose copies still ran when the forward ended: they stay on the device until
            backward has read them. At most the window; it depends on the speed of the store and may vary.
        recomputed_bytes: Bytes dropped, to be recomputed.
        memory_saved_bytes: ``unique_bytes`` - ``kept_bytes``, as the plan has it. When the forward ended, less had left
            the device, by ``in_flight_bytes``.
        memory_saved_percent: The same in percent of ``unique_bytes``; None before the first pass.
        small_storages: Distinct storages below ``min_bytes``, weights left out: they stay on the device.
        small_bytes: Their bytes, in none of the above.
        coverage_percent: Share of what autograd saves in the model's forward that is saved in blocks, as measured in
            the first pass; None before it, or where the model's own forward is not called.
        checkpointed_blocks: Checkpointed blocks.
        total_stall_seconds: Time compute waited for copies since the handle was made, as far as the device reported. A
            device times the passes that ``Auto`` measures and those that ``track_memory`` watches; else 2 in 50.
        stalls: The same by who waited, such as ``"forward layers.3"``.
        total_copy_out_bytes: Bytes copied out since then.
        total_copy_in_bytes: Bytes copied in since then.
        copy_out_bytes_per_second: Rate while copying; None if unknown.
        copy_in_bytes_per_second: Rate while copying; None if unknown.
        total_recomputes: Tensors recomputed since then.
        total_recompute_seconds: Time spent on that, on the host's clock.
        demoted_sites: Sites whose first recompute differed, or failed, and that are offloaded instead.
        live_tickets: Tickets alive now.
        store_bytes: Bytes of store that live tickets hold now; 0 as soon as the last graph is dead.
        store: What the store holds, by name. Host memory: ``host_held_bytes``, ``host_pinned_bytes``,
            ``host_used_bytes``, ``host_most_used_bytes``, ``host_chunks``. Disk: ``disk_file_bytes``,
            ``disk_used_bytes``, ``disk_draining_bytes`` (of dead tickets, while a copy that had begun ends; used
            again only after that), ``disk_written_bytes``, ``disk_read_bytes``.
        total_refused_bytes: Bytes that stayed on the device because the store could not take them, since then.
    """

    packs: int = 0
    replayed: int = 0
    saved_bytes: int = 0
    unique_bytes: int = 0
    kept_bytes: int = 0
    offloaded_bytes: int = 0
    recomputed_bytes: int = 0
    in_flight_bytes: int = 0
    memory_saved_bytes: int = 0
    memory_saved_percent: float | None = None
    small_storages: int = 0
    small_bytes: int = 0
    coverage_percent: float | None = None
    checkpointed_blocks: int = 0
    total_stall_seconds: float = 0.0
    stalls: Mapping[str, float] = field(default_factory=dict)
    total_copy_out_bytes: int = 0
    total_copy_in_bytes: int = 0
    copy_out_bytes_per_second: float | None = None
    copy_in_bytes_per_second: float | None = None
    total_recomputes: int = 0
    total_recompute_seconds: float = 0.0
    demoted_sites: tuple[str, ...] = ()
    live_tickets: int = 0
    store_bytes: int = 0
    store: Mapping[str, int] = field(default_factory=dict)
    total_refused_bytes: int = 0

    def __str__(self) -> str:
        pace = (self.copy_out_bytes_per_second, self.copy_in_bytes_per_second)
        rate = [f"{format_size(round(r))}/s" if r else "-" for r in pace]
        small = (
            f", {format_size(self.small_bytes)} in {self.small_storages} small storages" if self.small_storages else ""
        )
        in_flight = format_size(self.in_flight_bytes)
        lines = {
            "saved": f"{format_size(self.unique_bytes)}{small}; {self.packs} tensors (latest pass)",
            "kept": format_size(self.kept_bytes),
            "offloaded": f"{format_size(self.offloaded_bytes)}, {in_flight} of it in flight when forward ended",
            "recomputed": f"{format_size(self.recomputed_bytes)}, {self.checkpointed_blocks} blocks checkpointed",
            "memory saved": "-" if self.memory_saved_percent is None else f"{self.memory_saved_percent:.1f} %",
            "in blocks": "-" if self.coverage_percent is None else f"{self.coverage_percent:.0f} % of the saved bytes",
            "copied": f"{format_size(self.total_copy_out_bytes)} out, {format_size(self.total_copy_in_bytes)} in",
            "rates": f"{rate[0]} out, {rate[1]} in",
            "stalls": f"{self.total_stall_seconds:.3f} s (total)",
            "store": f"{format_size(self.store_bytes)} now, {self.live_tickets} live tickets",
        }
        return "\n".join(f"{name:<14}{text}" for name, text in lines.items())

    def _repr_html_(self) -> str:
        """Return the same lines for notebooks."""
        return f"<pre>{self}</pre>"

    def details(self) -> list[str]:
        """Return lines on what the store holds and moved, what it could not take, and who waited longest for it."""
        size = {name: format_size(value) for name, value in self.store.items() if name.endswith("_bytes")}
        lines: list[str] = []
        if self.store.get("host_held_bytes"):
            lines.append(
                f"store: {size['host_held_bytes']} of host memory, {size['host_pinned_bytes']} of it pinned, in "
                f"{self.store['host_chunks']} chunks; {size['host_most_used_bytes']} in use at most"
            )
        if self.store.get("disk_file_bytes"):
            moved = f"{size['disk_written_bytes']} written, {size['disk_read_bytes']} read"
            lines.append(f"store: {size['disk_file_bytes']} of disk; {moved}")
        if self.total_refused_bytes:
            lines.append(f"store: {format_size(self.total_refused_bytes)} stayed on the device for want of room")
        longest = sorted(self.stalls.items(), key=lambda item: -item[1])[:_MOST_STALLS_SHOWN]
        return lines + [f"stall: {seconds:.4f} s in {name}" for name, seconds in longest if seconds]

    def as_dict(self) -> dict[str, Any]:
        """Return the fields as a dictionary."""
        return asdict(self)
