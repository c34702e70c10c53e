"""What recomputes cost in a measured step.

[Note: the price of a recompute]
Of each site and size one saved tensor with a recipe is recomputed in its forward and timed there. That is the price of
a recompute that is not executed in the measured step. But there its operands are in the caches and its memory was just
used, and nothing is compared. In backward a recompute waits for memory and runs our own code, which on a CPU makes
small ones several times as long. So those that the step executes are timed there, too, without the copies of operands
that they wait for. One that also recomputes operands is divided among them in proportion to their prices in forward.
Their median over all blocks counts: of many noisy prices, planning would otherwise pick those that are too low by
chance.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from statistics import median

import torch

from ebbtide.base.actions import Site
from ebbtide.store.meter import Edges, Meter, Timestamp

SiteBytes = tuple[Site, int]
"""Where a tensor is saved, and its bytes: of all such tensors recomputes have one price."""


class Execution:
    """One recompute in backward.

    Args:
        began: When it began.

    Attributes:
        made: What was recomputed.
        waits: Copies of operands that it waited for.
        ended: When it was over.
    """

    def __init__(self, began: Timestamp) -> None:
        self.began, self.ended = began, began
        self.made: list[SiteBytes] = []
        self.waits: list[Edges] = []


class RecomputeTimer:
    """Times the recomputes of one measured step. See [Note: the price of a recompute].

    Args:
        meter: Provides timestamps.
    """

    def __init__(self, meter: Meter) -> None:
        self._meter = meter
        self._forward: dict[SiteBytes, Edges | None] = {}
        self._executions: list[Execution] = []
        self._open: Execution | None = None

    def time(self, saved: SiteBytes, recompute: Callable[[], object] | None, device: torch.device | None) -> None:
        """Recompute a saved tensor in its forward.

        Args:
            saved: The tensor.
            recompute: Does it; None: it may not be recomputed.
            device: The device.
        """
        self._forward[saved] = None
        if recompute is not None:
            recompute()  # warms up
            began = self._meter.timestamp(device)
            recompute()
            self._forward[saved] = began, self._meter.timestamp(device)

    def knows(self, saved: SiteBytes) -> bool:
        """Whether such a tensor was timed in its forward, or may not be recomputed."""
        return saved in self._forward

    def begin(self, device: torch.device | None) -> None:
        """A recompute begins in backward."""
        self._open = Execution(self._meter.timestamp(device))

    def made(self, saved: SiteBytes) -> None:
        """The open recompute has made a tensor."""
        if self._open is not None:
            self._open.made.append(saved)

    def operand(self, read: Callable[[], torch.Tensor], device: torch.device | None) -> torch.Tensor:
        """Return what ``read`` returns, an operand that is copied in; its time is not the recompute's."""
        began = self._meter.timestamp(device)
        content = read()
        if self._open is not None:
            self._open.waits.append((began, self._meter.timestamp(device)))
        return content

    def end(self, device: torch.device | None) -> None:
        """The open recompute is over."""
        if self._open is not None:
            self._open.ended = self._meter.timestamp(device)
            self._executions.append(self._open)
            self._open = None

    def prices(self) -> dict[SiteBytes, float]:
        """Return the seconds of each saved tensor that may be recomputed; waits for the device."""
        seconds = self._meter.seconds
        prices = {saved: seconds(*edges) for saved, edges in self._forward.items() if edges is not None}
        executed: defaultdict[SiteBytes, list[float]] = defaultdict(list)
        for execution in self._executions:
            took = seconds(execution.began, execution.ended) - sum(seconds(*edges) for edges in execution.waits)
            total = sum(prices.get(saved, 0.0) for saved in execution.made)
            for saved in execution.made:
                share = prices.get(saved, 0.0) / total if total else 1 / len(execution.made)
                executed[saved].append(took * share)
        known = {saved: max(median(found), prices[saved]) for saved, found in executed.items() if saved in prices}
        return prices | known
