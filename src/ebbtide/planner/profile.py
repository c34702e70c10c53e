"""Profiles: the executed blocks of one step, the storages each saves, and the machine's rates.

A profile is measured on the machine (``ebbtide.profiling.auto``) or simulated for another. It is plain
values: numbers, names, no tensors.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from ebbtide.base.actions import Action, Site, Unit, keeps_all
from ebbtide.base.errors import ConfigError

_OF_BLOCKS = "forward_seconds", "backward_seconds", "forward_base_bytes", "backward_base_bytes", "checkpoint_base_bytes"

CHECKPOINT_HOOKS = 1 / 3
"""Assumed cost of the hooks of a checkpointed block, relative to those of one that keeps everything."""

RECOMPUTE_HOOKS = 1.75
"""The same of a block in which something is recomputed: operands of recipes are noted for all of its tensors. Measured
on a CPU, of a block that saves 38 tensors: 2.1 ms where everything is kept, 3.7 where some is recomputed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockProfile:
    """One executed block.

    Attributes:
        name: Path of the module in the model.
        kind: Its class.
        forward_seconds: From the start of its forward to the start of what follows, without stalls.
        backward_seconds: The same of its backward, without stalls and recomputes.
        units: Its saved storages, in order.
        forward_base_bytes: Most device memory while its forward runs, without what blocks have saved.
        backward_base_bytes: The same while its backward runs.
        checkpoint_base_bytes: The same if it is checkpointed, where that is known to be more.
        checkpointable: It may be checkpointed.
        input_bytes: Bytes of its inputs, which a checkpoint keeps.
        hook_seconds: Cost of its hooks when everything is kept, if measured.
        checkpoint_factor: Time of its checkpoint relative to that of its forward.
    """

    name: str
    kind: str
    forward_seconds: float
    backward_seconds: float
    units: tuple[Unit, ...]
    forward_base_bytes: int = 0
    backward_base_bytes: int = 0
    checkpoint_base_bytes: int = 0
    checkpointable: bool = False
    input_bytes: int = 0
    hook_seconds: float = 0.0
    checkpoint_factor: float = 1.0

    @property
    def seconds(self) -> float:
        """Time of its forward and backward together."""
        return self.forward_seconds + self.backward_seconds

    @property
    def checkpoint_seconds(self) -> float:
        """Time of its forward in backward, if it is checkpointed."""
        return self.forward_seconds * self.checkpoint_factor

    def hooks_under(self, actions: Sequence[Action]) -> float:
        """Return the cost of its hooks under actions for its units."""
        if Action.CHECKPOINT in actions:
            return CHECKPOINT_HOOKS * self.hook_seconds
        if Action.RECOMPUTE in actions:
            return RECOMPUTE_HOOKS * self.hook_seconds
        return 0.0 if keeps_all(actions) else self.hook_seconds

    @property
    def saved_bytes(self) -> int:
        """Bytes that it saves."""
        return sum(unit.nbytes for unit in self.units)

    @property
    def saved_input_bytes(self) -> int:
        """Bytes of its inputs that it saves."""
        return sum(unit.nbytes for unit in self.units if unit.block_input)


@dataclass(frozen=True, slots=True, kw_only=True)
class Rates:
    """The cost of offloading.

    Attributes:
        out_bytes_per_second: From the device to the store, with all ranks of the machine copying.
        in_bytes_per_second: From the store to the device.
        handling_seconds: Compute time per offloaded storage besides its copy, each way.
        handling_seconds_per_byte: Compute time per byte, each way: copies, direct I/O and fresh memory take cores on a
            CPU.
    """

    out_bytes_per_second: float
    in_bytes_per_second: float
    handling_seconds: float = 0.0
    handling_seconds_per_byte: float = 0.0

    def __post_init__(self) -> None:
        _check("out_bytes_per_second", self.out_bytes_per_second, above=0.0)
        _check("in_bytes_per_second", self.in_bytes_per_second, above=0.0)
        _check("handling_seconds", self.handling_seconds)
        _check("handling_seconds_per_byte", self.handling_seconds_per_byte)


@dataclass(frozen=True, slots=True, kw_only=True)
class Profile:
    """One step.

    Attributes:
        blocks: In the order in which their forwards began.
        rates: The cost of offloading.
        prologue_seconds: Before the first block's forward.
        head_seconds: From the end of the last block's forward to its backward: the head and the loss.
        epilogue_seconds: After the first block's backward: that of the parts before the blocks, and the optimizer.
        head_base_bytes: Most device memory while the head and the loss run, without what blocks have saved.
        window_bytes: Bytes allowed in flight each way; None: follows the largest block.
        store_bytes: Most bytes that the store holds at once; None: no limit.
    """

    blocks: tuple[BlockProfile, ...]
    rates: Rates
    prologue_seconds: float = 0.0
    head_seconds: float = 0.0
    epilogue_seconds: float = 0.0
    head_base_bytes: int = 0
    window_bytes: int | None = None
    store_bytes: int | None = None

    def __post_init__(self) -> None:
        for name in ("prologue_seconds", "head_seconds", "epilogue_seconds", "head_base_bytes"):
            _check(name, getattr(self, name))
        _check("store_bytes", self.store_bytes or 0)
        for block in self.blocks:
            for name in _OF_BLOCKS:
                _check(f"{name} of {block.name}", getattr(block, name))
            for unit in block.units:
                _check(f"nbytes of {unit.site}", unit.nbytes)
                _check(f"moved_bytes of {unit.site}", unit.moved_bytes)
                _check(f"recompute_seconds of {unit.site}", unit.recompute_seconds or 0.0)

    def units(self) -> Iterator[tuple[int, int, Unit]]:
        """Yield every unit with the index of its block and its index in it."""
        for place, block in enumerate(self.blocks):
            for number, unit in enumerate(block.units):
                yield place, number, unit

    @property
    def saved_bytes(self) -> int:
        """Bytes that the blocks save."""
        return sum(block.saved_bytes for block in self.blocks)

    @property
    def must_keep_bytes(self) -> int:
        """Bytes that stay under every plan."""
        return sum(unit.nbytes for _, _, unit in self.units() if unit.must_keep)

    @property
    def forward_seconds(self) -> float:
        """Time of all blocks' forwards."""
        return math.fsum(block.forward_seconds for block in self.blocks)

    @property
    def backward_seconds(self) -> float:
        """Time of all blocks' backwards."""
        return math.fsum(block.backward_seconds for block in self.blocks)

    @property
    def step_seconds(self) -> float:
        """Time of the step when everything is kept: no copies, no recomputes."""
        others = self.prologue_seconds + self.head_seconds + self.epilogue_seconds
        return self.forward_seconds + self.backward_seconds + others


def _check(name: str, value: float, *, above: float | None = None) -> None:
    enough = value >= 0 if above is None else value > above
    if not (math.isfinite(value) and enough):
        raise ConfigError(
            f"{name} is {value!r}",
            expected="a finite number, " + ("0 or more" if above is None else f"more than {above:g}"),
            hint="measure the step again; a profile is made of what was measured",
        )


@dataclass(frozen=True, slots=True)
class SiteUnits:
    """Equally large units of one site: one of them, and the indices of all, spread over the blocks."""

    unit: Unit
    places: Sequence[tuple[int, int]]


def by_site(profile: Profile) -> list[SiteUnits]:
    """Return the units that can be recomputed, by site.

    Measured times vary between blocks; a site has the mean of its blocks.
    """
    groups: dict[tuple[Site, int, int | None, bool], list[tuple[int, int, Unit]]] = defaultdict(list)
    for place, number, unit in profile.units():
        if unit.recompute_seconds is not None and unit.nbytes:
            groups[unit.site, unit.nbytes, unit.narrow_bytes, unit.movable].append((place, number, unit))
    found: list[SiteUnits] = []
    for _, group in sorted(groups.items(), key=lambda item: item[0][0]):
        seconds = sum(unit.recompute_seconds or 0.0 for *_, unit in group) / len(group)
        places = [group[i][:2] for i in _spread(len(group))]
        found.append(SiteUnits(replace(group[0][2], recompute_seconds=seconds), places))
    return found


def _spread(count: int) -> list[int]:
    """Return the numbers below ``count`` ordered so that every prefix is evenly spread."""
    step = (math.sqrt(5) - 1) / 2  # the golden ratio: each falls into one of the widest gaps (Weyl's equidistribution)
    return sorted(range(count), key=lambda i: (i + 1) * step % 1.0)
