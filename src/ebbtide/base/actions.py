"""Actions, sites, and the protocol of plans.

[Note: site]
A *site* names a saved tensor in a way that is stable from step to step: the kind of block, the path of the module in
that block that was running, the autograd node that made the tensor, and the how-many-th such tensor it is in that
module call. The plan speaks of sites; the engine asks it once per storage.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import NamedTuple, Protocol, runtime_checkable


class Action(Enum):
    """What is done with a storage (KEEP, OFFLOAD, RECOMPUTE) or with a whole block (CHECKPOINT)."""

    KEEP = "keep"
    OFFLOAD = "offload"
    RECOMPUTE = "recompute"
    CHECKPOINT = "checkpoint"

    __hash__ = object.__hash__  # Enum's own is a Python function, called for every storage that is counted


class Site(NamedTuple):
    """A stable name for a saved tensor. See [Note: site]."""

    block_kind: str
    module: str
    node: str
    ordinal: int

    def __str__(self) -> str:
        where = self.module or "(block)"
        return f"{self.block_kind}/{where}/{self.node}#{self.ordinal}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """The description of a storage that a plan decides on, when it is first saved.

    Attributes:
        site: Where it was saved.
        block_name: Path of the block in the model.
        block: Index of the block in execution order of its stack.
        bytes_: Size of the storage in bytes.
        block_input: The storage came into the block from outside.
        recompute_flops: Multiply-add work of recomputing it from what else is saved, in FLOP; ``None`` if it cannot be
            recomputed. Zero for element-wise chains.
        kept_bytes: Bytes that graphs which are alive keep on the device by this plan.
    """

    site: Site
    block_name: str = ""
    block: int
    bytes_: int
    block_input: bool
    recompute_flops: float | None
    kept_bytes: int = 0


class Plan(Protocol):
    """Chooses the action of every storage and of every block; pure arithmetic, no tensors.

    Recipes cost the host more than anything else that is done for a saved tensor. A plan that knows some answers before
    it is known whether a storage can be recomputed, such as a table, may also have a method
    ``needs_recipe(candidate) -> bool``: where it returns False, ``choose`` never answers RECOMPUTE, and no recipe is
    built.
    """

    @property
    def name(self) -> str:
        """Short name for logs and reports."""
        ...

    @property
    def recomputes(self) -> bool:
        """Whether the plan may answer RECOMPUTE; if not, no recipes need to be built."""
        ...

    def choose(self, candidate: Candidate) -> Action:
        """Return KEEP, OFFLOAD or RECOMPUTE for a storage."""
        ...

    def block_action(self, kind: str, index: int, *, input_bytes: int, must_keep_bytes: int) -> Action:
        """Return CHECKPOINT to re-run a block whole, KEEP to treat its saved tensors one by one.

        Args:
            kind: The block's kind.
            index: Its index.
            input_bytes: Bytes that came into a block of this kind, as last seen (0 before the first run).
            must_keep_bytes: Bytes of this kind of block that can be neither recomputed nor left out, as last seen.
        """
        ...

    def explain(self) -> str:
        """Say in one or two lines what the plan does and why."""
        ...


class SavablePlan(Plan, Protocol):
    """A plan that can be written into a file: of ``Auto`` once its steps are measured, of ``make_plan``, of a file."""

    def save(self, path: str | Path) -> None:
        """Write the plan into a file that ``policy="plan.json"`` reads.

        Raises:
            ConfigError: The plan is not made yet, or follows from its policy alone.
            DataError: The file cannot be written.
        """
        ...


@runtime_checkable
class NamesBlocks(Protocol):
    """A plan that names the blocks to checkpoint, by what this process measured: other ranks may name others.

    So blocks whose second run needs other ranks are never checkpointed for it.
    """

    def checkpoints(self, block_name: str) -> bool:
        """Whether a block is run whole a second time in backward."""
        ...

    def may_checkpoint(self, block_name: str) -> bool:
        """Whether that may be said of the block some time: then it is seen whether it can be."""
        ...
