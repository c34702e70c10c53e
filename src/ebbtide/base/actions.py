"""Actions, sites, and the protocol of plans.

[Note: site]
A *site* names a saved tensor, identically in every step: the kind of block, the path of the running module inside it,
the autograd node that produced the tensor, and an ordinal among such tensors of the module call. A plan maps sites to
actions; the engine queries it once per storage.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path
from typing import NamedTuple, Protocol, runtime_checkable

from ebbtide.base.errors import ConfigError


class Action(Enum):
    """The action for a storage (KEEP, OFFLOAD, RECOMPUTE) or for a whole block (CHECKPOINT)."""

    KEEP = "keep"
    OFFLOAD = "offload"
    RECOMPUTE = "recompute"
    CHECKPOINT = "checkpoint"

    __hash__ = object.__hash__  # Enum.__hash__ is a Python function, called for every counted storage


def keeps_all(actions: Iterable[Action]) -> bool:
    """Whether actions keep everything."""
    return all(action is Action.KEEP for action in actions)


class NoRecipe(Enum):
    """Why a storage cannot be recomputed from others; the values are for readers."""

    INPUT = "an input of its block"
    FILTERED = "kept by keep_filter"
    NO_OPERATOR = "not made by an operator of the graph"
    PART = "a part of a tensor, or written in place"
    NO_RULE = "no recompute rule"
    NO_OPERAND = "an operand of its recompute is not saved"
    DIFFERS = "its recompute differed, or failed"


class Site(NamedTuple):
    """A stable name for a saved tensor, the same in every step.

    Attributes:
        block_kind: Class of the block.
        module: Path of the running module in it; empty: the block.
        node: Autograd node that made the tensor.
        ordinal: Number among such tensors of the module's call.
    """

    block_kind: str
    module: str
    node: str
    ordinal: int

    def __str__(self) -> str:
        where = self.module or "(block)"
        return f"{self.block_kind}/{where}/{self.node}#{self.ordinal}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Unit:
    """One storage that one executed block saves; actions are assigned to units.

    Attributes:
        site: Where it is saved.
        nbytes: Its size in bytes.
        narrow_bytes: Its size in the narrower type that it was cast up from and is offloaded in; None: it was not cast.
        block_input: It came into the block from outside.
        movable: It may be offloaded.
        recompute_seconds: Time of recomputing it from other saved tensors; None if it has no recipe.
        recompute_flops: Multiply-add work of that, in FLOP; None if it has no recipe.
        no_recipe: Why it has none; None if it has one, or that is not known.
    """

    site: Site
    nbytes: int
    narrow_bytes: int | None = None
    block_input: bool = False
    movable: bool = True
    recompute_seconds: float | None = None
    recompute_flops: float | None = None
    no_recipe: NoRecipe | None = field(default=None, compare=False)

    @property
    def moved_bytes(self) -> int:
        """Bytes across the link when it is offloaded."""
        return self.nbytes if self.narrow_bytes is None else self.narrow_bytes

    @property
    def must_keep(self) -> bool:
        """Whether it stays under every plan, because it can be neither offloaded nor recomputed."""
        return not self.movable and self.recompute_seconds is None


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """A storage that a plan decides on, described when it is first saved.

    Attributes:
        site: Where it was saved.
        block_name: Path of the block in the model.
        block: Place of the block in its stack, as the model lists it, from 0.
        nbytes: Size of the storage in bytes.
        block_input: Whether the storage is an input of the block.
        recompute_flops: Multiply-add work of recomputing it from other saved tensors, in FLOP; ``None`` if it cannot be
            recomputed; 0 for element-wise chains.
        kept_bytes: Bytes that live graphs keep on the device under this plan.
    """

    site: Site
    block_name: str = ""
    block: int
    nbytes: int
    block_input: bool
    recompute_flops: float | None
    kept_bytes: int = 0

    def with_kept(self, kept_bytes: int) -> Candidate:
        """Return the same candidate with other kept bytes: ``dataclasses.replace`` at less than half of its cost."""
        if kept_bytes == self.kept_bytes:
            return self
        other, put = object.__new__(Candidate), object.__setattr__
        put(other, "site", self.site)
        put(other, "block_name", self.block_name)
        put(other, "block", self.block)
        put(other, "nbytes", self.nbytes)
        put(other, "block_input", self.block_input)
        put(other, "recompute_flops", self.recompute_flops)
        put(other, "kept_bytes", kept_bytes)
        return other


class Plan(Protocol):
    """Chooses the action of every storage and block; pure arithmetic, no tensors.

    Building a recipe is the largest host cost per saved tensor. A plan that can tell in advance that it will not
    recompute a storage, such as a table, may define ``needs_recipe(candidate) -> bool``: where it returns False, no
    recipe is built and ``choose`` must not return RECOMPUTE. One with blocks in which nothing is recomputed may define
    ``recomputes_in(block_name) -> bool``: where it returns False, no operands of recipes are noted. One that never
    reads ``Candidate.kept_bytes`` may set ``reads_kept_bytes = False``: then they are not counted for it.
    """

    @property
    def name(self) -> str:
        """Short name for logs and reports."""
        ...

    @property
    def recomputes(self) -> bool:
        """Whether the plan may return RECOMPUTE; if not, no recipes are built."""
        ...

    def choose(self, candidate: Candidate) -> Action:
        """Return KEEP, OFFLOAD or RECOMPUTE for a storage."""
        ...

    def block_action(self, kind: str, index: int, *, input_bytes: int, must_keep_bytes: int) -> Action:
        """Return CHECKPOINT for the whole block, or KEEP to decide for each saved tensor.

        Args:
            kind: The block's kind.
            index: Its index.
            input_bytes: Input bytes of the latest block of this kind (0 before the first).
            must_keep_bytes: Bytes of the latest block of this kind that have no recipe and must be stored.
        """
        ...

    def explain(self) -> str:
        """Describe the plan and its reasons in one or two lines."""
        ...


class Explained:
    """A plan that ``print`` explains; a dataclass of it needs ``repr=False``."""

    __slots__ = ()

    def __str__(self: Plan) -> str:
        return self.explain()

    def __repr__(self: Plan) -> str:
        return f"<{type(self).__name__}: {self.name}; explain() shows more>"


STORAGE_ACTIONS = Action.KEEP, Action.OFFLOAD, Action.RECOMPUTE
"""The actions for a storage; for one whose plan never recomputes, all but the last."""

BLOCK_ACTIONS = Action.KEEP, Action.CHECKPOINT
"""The actions for a block."""


def checked_action(action: Action, allowed: tuple[Action, ...], plan: Plan, method: str) -> Action:
    """Return what a plan's method returned, which may be a user's.

    Raises:
        ConfigError: It is not one of the allowed actions.
    """
    if action in allowed:
        return action
    hint = f"return ebbtide.{allowed[0]}, not its name or nothing"
    if action is Action.CHECKPOINT:
        hint = "block_action returns CHECKPOINT, for the whole block"
    elif isinstance(action, Action) and allowed is BLOCK_ACTIONS:
        hint = "choose returns it, for each storage; KEEP leaves a block's storages to choose"
    elif action is Action.RECOMPUTE:
        hint = "set recomputes = True, so that recipes are built"
    raise ConfigError(
        f"{type(plan).__name__}.{method} returned {action!r:.80}",
        expected="one of " + ", ".join(map(str, allowed)),
        hint=hint,
    )


ALWAYS = sys.maxsize
"""A result of ``StandingPlan.stands_until``: the answer is the same however much is kept."""


class StandingPlan(Plan, Protocol):
    """A plan that does not change: its answer for a candidate may be cached.

    A plan that changes may expose the plan that answers now as its attribute ``current``: None while there is none.
    """

    def stands_until(self, candidate: Candidate) -> int | None:
        """Return up to how many kept bytes ``choose`` gives the same answer for an otherwise equal candidate.

        Args:
            candidate: As passed to ``choose``.

        Returns:
            The most ``kept_bytes``; ``ALWAYS``: they do not matter; None: call ``choose`` each time.
        """
        ...


class SavablePlan(Plan, Protocol):
    """A plan that can be saved: made by ``Auto`` after its measured steps or by ``make_plan``, or read from a file.

    That of ``Minimal`` can be saved if it is a mix, which it may be on an accelerator.
    """

    def save(self, path: str | Path) -> None:
        """Write the plan to a file that ``policy="plan.json"`` reads.

        Raises:
            ConfigError: The plan is not made yet, or is determined by its policy alone.
            DataError: The name does not end in .json, or the file cannot be written.
        """


@runtime_checkable
class NamesBlocks(Protocol):
    """A plan that selects blocks to checkpoint from this process's measurements; ranks may select differently.

    It never checkpoints a block whose forward runs collectives.
    """

    def checkpoints(self, block_name: str) -> bool:
        """Whether a block is checkpointed."""
        ...

    def may_checkpoint(self, block_name: str) -> bool:
        """Whether the block may be checkpointed later; the engine then observes whether it can be."""
        ...
