"""One forward of the model: the blocks that it runs, and what each of their sites saved."""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from ebbtide.base.actions import Action, Site
from ebbtide.base.units import format_size
from ebbtide.engine.stats import Tally

if TYPE_CHECKING:
    from ebbtide.engine.run import BlockRun


@dataclass(frozen=True, slots=True, kw_only=True)
class Block:
    """A block as the engine knows it.

    Args:
        name: Path of the module in the model.
        kind: Name of its class; blocks of one kind share sites.
        index: Place in its stack.
        count: Blocks in all.
        weights: The block's parameters and buffers whose bytes are there in its forward and in its backward.
    """

    name: str
    kind: str
    index: int
    count: int
    weights: Callable[[], Iterable[torch.Tensor]]


class Pass:
    """The state of one forward's graph; several may be alive at once.

    Attributes:
        sites: Storages and their bytes by site and action. A site of several blocks, or of one storage of which a part
            is recomputed, has several actions. The sums by action are those of ``tally``.
    """

    def __init__(self) -> None:
        self.latest: BlockRun | None = None
        self.tally = Tally()
        self.checkpointed = 0
        self.offered_bytes = 0  # given to the store, or held back from it, so far
        self.sites: dict[tuple[Site, Action], tuple[int, int]] = {}
        self._staying: dict[int, weakref.ref[torch.UntypedStorage]] = {}  # kept by light tickets, and counted

    def add_site(self, site: Site, nbytes: int, action: Action, count: int = 1) -> None:
        """Count a storage at its site without the ordinal of its block."""
        storages, total = self.sites.get((site, action), (0, 0))
        self.sites[site, action] = (storages + count, total + nbytes)

    def move_site(self, site: Site, nbytes: int, before: Action, after: Action) -> None:
        """Count ``nbytes`` of a storage at its site under another action than the plan's."""
        self.add_site(site, -nbytes, before, 0)
        self.add_site(site, nbytes, after)

    def stayed(self, site: Site, nbytes: int) -> None:
        """Count a storage as kept that was counted as offloaded."""
        self.tally.add_stayed(nbytes)
        self.add_site(site, -nbytes, Action.OFFLOAD, -1)
        self.add_site(site, nbytes, Action.KEEP)

    def first_stays(self, storage: torch.UntypedStorage) -> bool:
        """Return whether a storage that stays is met for the first time in this pass."""
        known = self._staying.get(id(storage))
        if known is not None and known() is storage:
            return False
        self._staying[id(storage)] = weakref.ref(storage)
        return True

    def explain(self, min_bytes: int) -> list[str]:
        """Return a line for each action at each site, the largest site first, and one for all small storages.

        Args:
            min_bytes: Storages below this size are small.
        """
        totals: Counter[Site] = Counter()
        for (site, _), (_, nbytes) in self.sites.items():
            totals[site] += nbytes
        rows = sorted(self.sites.items(), key=lambda row: (-totals[row[0][0]], row[0][0], -row[1][1]))
        lines = [
            f"{format_size(nbytes):>10}  {action.value:<10}  x{count:<3} {site}"
            for (site, action), (count, nbytes) in rows
            if nbytes
        ]
        if self.tally.small:
            size = format_size(self.tally.small_bytes)
            lines.append(f"small storages (< {format_size(min_bytes)}) that stay: {self.tally.small}, {size}")
        return lines
