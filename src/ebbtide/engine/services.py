"""The engine's interface to a block's run."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from threading import RLock
from typing import Any, Protocol

import torch

from ebbtide.base.actions import Plan
from ebbtide.config import Options
from ebbtide.engine.build import Rule
from ebbtide.engine.guard import WeightGuard
from ebbtide.engine.index import StorageIndex
from ebbtide.engine.model import ModelWeights
from ebbtide.engine.numerics import Numerics
from ebbtide.engine.passes import RunRecord
from ebbtide.engine.sites import Known
from ebbtide.engine.tickets import Entry, Expr, KeptStorage
from ebbtide.engine.timing import StepTimer
from ebbtide.engine.trust import Trust
from ebbtide.schedule import LiveBytes
from ebbtide.store.protocol import Tier


class Services(Protocol):
    """The engine as seen by a run, which does not import it."""

    plan: Plan
    tier: Tier
    options: Options
    lock: RLock
    trust: Trust
    guard: WeightGuard
    weights: ModelWeights
    rules: dict[str, Rule]
    index: StorageIndex
    timer: StepTimer | None
    tensor_types: tuple[type[torch.Tensor], ...]
    tensor_filter: Callable[[torch.Tensor], bool] | None
    keep_filter: Callable[[torch.Tensor], bool] | None
    live_tickets: set[weakref.ref[Any]]
    live_entries: set[weakref.ref[Any]]
    orders: dict[tuple[str, int], tuple[int, ...]]
    known_sites: dict[str, Known]
    kept: LiveBytes
    kept_storages: dict[int, weakref.ref[KeptStorage]]

    def close_if_idle(self) -> None:
        """Close the store if the engine was closed and no graph needs it any more."""

    def unpack(self, ticket: Any) -> torch.Tensor:
        """Return the tensor of a ticket: the unpack hook."""
        ...

    def let_go_after(self, task: int, reference: weakref.ref[Any]) -> None:
        """When a backward ends, set ``restored`` of an object to None."""

    def may_move(self, tensor: torch.Tensor) -> bool:
        """Whether the user's filters let a tensor be offloaded."""
        ...

    def empty(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return a tensor of no bytes, of the same class and on the same device."""
        ...

    def park(self, run: RunRecord, entry: Entry, tensor: torch.Tensor, *, written: bool = False) -> None:
        """Begin to offload the bytes of an entry of a block."""

    def keep(self, entry: Entry, storage: torch.UntypedStorage) -> None:
        """Keep an entry's storage on the device."""

    def trusts(self, block: str, entry: Entry, recipe: Expr, base: torch.Tensor, numerics: Numerics) -> bool:
        """Whether a recipe gives the tensor that a block saves now, bitwise, under these numerics."""
        ...

    def recomputer(self, block: str, entry: Entry, recipe: Expr, base: torch.Tensor) -> Callable[[], object] | None:
        """Return a function that recomputes a tensor from operands that are there, to be timed."""
        ...

    def take_checksum(self, entry: Entry, tensor: torch.Tensor) -> None:
        """Remember the checksum of the bytes of an entry."""
