"""One forward of the model: the blocks that it runs, and what each of their sites saved."""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from ebbtide.base.actions import Action, Site
from ebbtide.base.units import format_size
from ebbtide.engine.stats import Tally
from ebbtide.schedule import LiveCount


@dataclass(frozen=True, slots=True, kw_only=True)
class Block:
    """The engine's description of a block.

    Args:
        name: Path of the module in the model before it was wrapped: plans and figures of other runs know it by that.
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
        self.latest: RunRecord | None = None
        self.called = False  # a block was, offloaded or not
        self.ended = False  # and counted
        self.tally = Tally()
        self.checkpointed = 0
        self.offered_bytes = 0  # copied out, or held back, so far
        self.in_flight_bytes = 0  # when it ended: their copies ran, so they stay until backward has read them
        self.offers_last = False  # the latest block did
        self.cast: weakref.ref[torch.Tensor] | None = None  # of a weight, by autocast: it dies when its region ends
        self.sites: dict[tuple[Site, Action], tuple[int, int]] = {}
        self._staying: dict[int, weakref.ref[torch.UntypedStorage]] = {}  # kept by light tickets, and counted

    def add_site(self, site: Site, nbytes: int, action: Action, count: int = 1) -> None:
        """Count a storage at its site without the ordinal of its block."""
        storages, total = self.sites.get((site, action), (0, 0))
        self.sites[site, action] = (storages + count, total + nbytes)

    def add_sites(self, saved: Iterable[tuple[Site, Action, int, bool]]) -> None:
        """Count storages: as ``add_site``, each."""
        sites = self.sites
        for site, action, nbytes, _ in saved:
            storages, total = sites.get((site, action), (0, 0))
            sites[site, action] = storages + 1, total + nbytes

    def stayed(self, storages: Sequence[tuple[Site, int]]) -> None:
        """Count storages, by site and bytes, as kept instead of offloaded."""
        self.tally.add_stayed(sum([nbytes for _, nbytes in storages]))
        for site, nbytes in storages:
            self.add_site(site, -nbytes, Action.OFFLOAD, -1)
            self.add_site(site, nbytes, Action.KEEP)

    def note_staying(self, storage: torch.UntypedStorage) -> bool:
        """Note a storage that stays; return whether that is the first time in this pass."""
        known = self._staying.get(id(storage))
        if known is not None and known() is storage:
            return False
        self._staying[id(storage)] = weakref.ref(storage)
        return True

    def explain(self, min_bytes: int) -> list[str]:
        """Return a heading, a line for each action at each site, the largest first, and one for all small storages.

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
        return ["in the latest pass:", *lines] if lines else []


MOST_ORDERS = 256
"""Orders that are remembered: one for each kind of block and number of tensors, which routing to experts may vary."""


class RunRecord:
    """The part of a block's run that outlives its forward: its place in the pass, and the order of its reads.

    Args:
        block: The block.
        pass_: The forward that it is a part of.
        orders: By kind and number of entries, the order in which an earlier backward read them.
        live_tickets: Counts the tickets that are alive.
        checkpointed: The block's forward runs a second time in backward.
    """

    def __init__(
        self,
        block: Block,
        pass_: Pass,
        orders: dict[tuple[str, int], tuple[int, ...]],
        live_tickets: LiveCount,
        *,
        checkpointed: bool,
    ) -> None:
        self.block, self.pass_, self.live_tickets = block, pass_, live_tickets
        pass_.offers_last = False
        self.forward_reader = "forward", block.name, None  # to whom stalls are attributed: see ``Stalls.reader``
        self.orders = orders
        self.previous: RunRecord | None = pass_.latest
        self.number: int = 0 if self.previous is None else self.previous.number + 1
        self.tally = Tally()
        self.checkpointed = checkpointed
        self.checkpointable = False  # noted in a measured step only: whether it might run again
        self.pack_seconds = 0.0  # the host's, in the pack hook where nothing is replayed, as in a measured step
        self.device: torch.device | None = None  # of its inputs; None: of none that is offloaded
        self.mark: object = None  # of the engine's live entries, while its hooks are open
        self.is_open = False  # its forward runs and holds what ``close`` releases
        self.entries: list[weakref.ref[Any]] = []  # of what it did not keep, in the order of the forward
        self.task = -1  # the backward in which this block showed last
        self.unordered = False  # its backward runs, and no run of this kind has shown the order of its reads yet
        self.reads: list[weakref.ref[Any]] = []  # in the order in which a backward asked for them
        pass_.latest = self  # last: of a run that is half made there would be no ``entries`` yet

    def close(self) -> None:
        """Forget what only the block's forward needed."""

    def backward_begins(self) -> None:
        """A backward begins to read it while its forward is open: a gradient inside that forward, which goes on."""

    def backward_order(self) -> list[weakref.ref[Any]]:
        """Return the entries in the expected order of backward's reads.

        The recorded order of another run of this kind of block with as many saved tensors; else the reverse of the
        forward's.
        """
        order = self.orders.get(self.order_key)
        return self.entries[::-1] if order is None else [self.entries[i] for i in order]

    def upcoming(self) -> Iterator[tuple[list[weakref.ref[Any]], int]]:
        """Yield what a backward that begins here will read, with the number of its run: this block's, and those before.

        References: a suspended generator would keep an entry, and with it a slot, alive.
        """
        run: RunRecord | None = self
        while run is not None:
            yield run.backward_order(), run.number
            run = run.previous

    @property
    def order_key(self) -> tuple[str, int]:
        """Key of the read order: runs of one kind of block with as many saved tensors are read in one order."""
        return self.block.kind, len(self.entries)

    def record_order(self) -> None:
        """Keep the order in which a backward read this run's entries, for the next runs of this kind of block."""
        # Python makes one plain weak reference per object: the same one here and in ``entries``, dead or alive.
        places = {id(reference): i for i, reference in enumerate(self.entries)}
        read = list(dict.fromkeys(places[id(r)] for r in self.reads if id(r) in places))
        known = set(read)
        unread = [i for i in reversed(range(len(self.entries))) if i not in known]
        while len(self.orders) >= MOST_ORDERS:
            self.orders.pop(next(iter(self.orders)), None)
        self.orders[self.order_key] = tuple(read + unread)
        self.reads = []


class PlainRun:
    """The run of a block without hooks. See [Note: plain blocks] in ``ebbtide.engine.timing``.

    Args:
        block: The block.
        pass_: The forward that it is a part of.
        device: The device of its inputs; None: of none that is offloaded.
    """

    def __init__(self, block: Block, pass_: Pass, device: torch.device | None) -> None:
        self.block, self.pass_, self.device = block, pass_, device
        pass_.offers_last = False
        self.previous = pass_.latest  # the latest run of a block with hooks
