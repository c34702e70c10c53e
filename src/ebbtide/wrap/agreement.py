"""Ranks that train the same part of a model must offload it with equal settings, or raise at once.

[Note: agreement]
A checkpointed block repeats the collectives in its forward (tensor parallelism, nested units): if only one rank
checkpointed it, the others would deadlock. So ranks compare their settings when offloading is enabled, or, if the model
is wrapped later, in its first forward after that; and they decide together whether a kind of blocks with collectives is
checkpointed: each rank votes from its own batch, and one vote is enough. Only ranks with the same part of the model
take part, found from the meshes of its parameters and the groups of its wrappers; stages of a pipeline may differ.
Other collectives are detected when a block runs: see [Note: collectives seen].
"""

from __future__ import annotations

import contextlib
import json
import weakref
from collections import Counter
from collections.abc import Mapping, Sequence
from enum import StrEnum
from typing import Any

import torch.distributed as dist
from torch import nn

from ebbtide.base.errors import ConfigError, note_place, spelled
from ebbtide.engine import Block, Engine
from ebbtide.wrap.collectives import FAKE, Ranks, is_distributed, ranks_in
from ebbtide.wrap.meeting import Meeting
from ebbtide.wrap.strategy import (
    ddp_around,
    found_strategy,
    is_ddp,
    is_fsdp1,
    is_fsdp2,
    is_partitioned,
    running_ddp,
    unit_meshes,
)
from ebbtide.wrap.tree import Tree

RARELY = 256
"""Of so many blocks at least one is voted on while none had an input that needs a gradient: a vote takes long."""
SHOWN = 3
"""Most differences in one message."""
ENABLE = "enable offloading (and run a forward, if that was before wrapping)"
"""What a rank must do so that others can compare its settings."""


class Vote(StrEnum):
    """A rank's vote on whether a kind of blocks is checkpointed; of several, the last in this list prevails."""

    UNSEEN = "unseen"  # no such block had an input that needs a gradient: if so on all ranks, they vote once more
    NO = "no"
    CHECKPOINT = "checkpoint"
    LATER = "later"  # vote once more at the next block
    NEVER = "never"  # they must not be checkpointed


def groups_of(model: nn.Module, *, ddp: bool = True) -> list[Ranks]:
    """Return the groups of ranks that share a part of the model with this one; none if nothing is distributed.

    A group comes from the same mesh or process group on each of its ranks, so all of them identify it alike. Groups of
    DDP, which no forward of a block needs, are left out without ``ddp``.
    """
    if not is_distributed() or dist.get_backend() == FAKE:  # it has no other ranks
        return []
    groups: set[Ranks] = set()
    around = ddp_around(model)
    for module in (*model.modules(), *([] if around is None else [around])):
        if (ddp and is_ddp(module)) or is_fsdp1(module):
            inner: list[Any] = [module.process_group, getattr(module, "_inter_node_pg", None)]  # FSDP1's replicas
            groups.update(ranks_in(g) for g in inner if g is not None)
    meshes = {id(m): m for p in model.parameters() if (m := getattr(p, "device_mesh", None)) is not None}
    found = list(meshes.values()) or unit_meshes(model)  # in a forward all weights may be unsharded
    groups.update(tuple(sorted(m.mesh.flatten().tolist())) for m in found)
    divided = {id(g): g for p in model.parameters() if (g := getattr(p, "ds_process_group", None)) is not None}
    groups.update(ranks_in(g) for g in divided.values())
    return sorted(g for g in groups if len(g) > 1)


def terms_of(model: nn.Module, blocks: Sequence[Block], engine: Engine, plan: str) -> dict[str, str]:
    """Return the settings that ranks compare, each with its value in words; the directory of the disk tier may differ.

    Args:
        plan: How the plan described itself before it measured anything.
    """
    options = engine.options
    terms = {
        "strategy": found_strategy(model),
        "policy": plan,
        "target": engine.tier.name,
        "min_bytes": str(options.min_bytes),
        "window": f"{options.window_bytes} bytes" if options.window_bytes else "as the model needs",
        "host_budget": f"{options.host_budget_bytes} bytes" if options.host_budget_bytes else "a fair share",
        "verify": str(options.verify),
    }
    for name, filter_ in {"tensor_filter": engine.tensor_filter, "keep_filter": engine.keep_filter}.items():
        terms[name] = getattr(filter_, "__qualname__", type(filter_).__qualname__)
    return terms | {f"block {block.name}": block.kind for block in blocks}


def check_agreement(groups: Sequence[Sequence[int]], terms: Mapping[str, str]) -> None:
    """Compare settings with the ranks of each group.

    Raises:
        ConfigError: They differ, or a rank did not arrive in time.
    """
    text = json.dumps(dict(terms))
    with contextlib.ExitStack() as stack:
        # Post in all groups before waiting in any, so no two ranks wait for each other in different groups.
        for meeting in [stack.enter_context(Meeting(ranks, ENABLE, text)) for ranks in groups]:
            answers = meeting.attend()
            lines = _differences({rank: json.loads(one) for rank, one in answers.items()})
            if lines:
                more = f"; and {len(lines) - SHOWN} more differences" if len(lines) > SHOWN else ""
                raise ConfigError(
                    "; ".join(lines[:SHOWN]) + more,
                    expected=f"the same on {spelled(meeting.ranks)}, which train the same part of the model",
                    hint="pass the same arguments to enable_activation_offloading on these ranks",
                )


def _differences(answers: Mapping[int, Mapping[str, str]]) -> list[str]:
    lines: list[str] = []
    for name in dict.fromkeys(name for one in answers.values() for name in one):
        by_value: dict[str, list[int]] = {}
        for rank, one in answers.items():
            by_value.setdefault(one.get(name, "absent"), []).append(rank)
        if len(by_value) > 1:
            lines.append(f"{name} is " + ", but ".join(f"{v!r} on {spelled(r)}" for v, r in by_value.items()))
    return lines


class Agreement:
    """Compares a model's settings with the other ranks, once.

    Args:
        tree: Shows whether the model was wrapped since the last search for groups.

    Attributes:
        voting: The groups that have agreed and that may be needed in a block's forward.
    """

    def __init__(self, model: nn.Module, engine: Engine, tree: Tree) -> None:
        self._model, self._engine, self._tree = model, engine, tree
        self._plan = f"{engine.plan.name} ({engine.plan.explain()})"  # later it may explain what this rank measured
        self._looked: tuple[int, weakref.ref[nn.Module] | None] | None = None  # last search for groups
        self._reached = False
        self.voting: list[Ranks] = []

    def reach(self, blocks: Sequence[tuple[nn.Module, Block]]) -> None:
        """Compare settings: when the handle is made, or in the first pass after wrapping.

        Raises:
            ConfigError: They differ, or a rank did not arrive in time.
        """
        if self._reached or not is_distributed():
            return
        around = running_ddp()
        now = self._tree.look(), None if around is None else weakref.ref(around)
        if now == self._looked:
            return
        groups = groups_of(self._model)
        if groups:
            check_agreement(groups, terms_of(self._model, [block for _, block in blocks], self._engine, self._plan))
            self._reached = True
            self.voting += groups_of(self._model, ddp=False)
        self._looked = now  # only after success: if ranks differ, every forward raises


class Votes:
    """Decides once which kinds of blocks are checkpointed, by all ranks together if a block has collectives.

    Args:
        groups: The voting ranks; may be empty until the model is wrapped. Replicas of DDP have no vote: one may run no
            such block in a step.
    """

    def __init__(self, groups: Sequence[Sequence[int]]) -> None:
        self._groups = groups
        self._decided: dict[tuple[str, tuple[Ranks, ...]], Vote | None] = {}  # None: each rank for itself
        self._unseen: Counter[tuple[str, tuple[Ranks, ...]]] = Counter()  # blocks since no rank saw an input

    def decide(self, kind: str, block: nn.Module, wish: Vote, seen: Sequence[Ranks] = ()) -> bool:
        """Return whether blocks of a kind are checkpointed, of which this rank has seen ``block``.

        Args:
            wish: The vote of this rank.
            seen: Groups with which similar blocks were seen to call collectives.

        Raises:
            ConfigError: A rank did not arrive in time.
        """
        groups = self._with_own(block, seen)
        if (kind, groups) not in self._decided:
            unseen = self._unseen[kind, groups]  # the same number on all ranks, so that all of them vote
            rests = unseen & (unseen - 1) and unseen % RARELY
            answer = Vote.UNSEEN if rests else self._ask(f"run {kind} blocks", groups, wish) if groups else None
            if answer in (Vote.UNSEEN, Vote.LATER):
                self._unseen[kind, groups] += answer is Vote.UNSEEN
                return False
            self._decided[kind, groups] = answer
        return (self._decided[kind, groups] or wish) is Vote.CHECKPOINT

    def stop(self, kind: str, block: nn.Module, seen: Sequence[Ranks], why: str) -> None:
        """End the checkpointing of a kind that ranks decided together, because this rank can no longer checkpoint it.

        Raises:
            ConfigError: Another rank goes on: it would wait for this one in backward.
        """
        groups = self._with_own(block, seen)
        if self._decided.get((kind, groups)) is not Vote.CHECKPOINT:
            return
        try:
            self._decided[kind, groups] = self._ask(f"stop checkpointing {kind} blocks", groups, Vote.NEVER)
        except ConfigError as error:
            note_place(error, f"rank {dist.get_rank()} stops, since its {kind} blocks {why}")
            raise

    def _with_own(self, block: nn.Module, seen: Sequence[Ranks]) -> tuple[Ranks, ...]:
        own = self._groups if self._groups and has_collectives(block) else ()  # each time: it may be wrapped by now
        return tuple(sorted({*seen, *map(tuple, own)}))

    @staticmethod
    def _ask(about: str, groups: Sequence[Sequence[int]], wish: Vote) -> Vote:
        for _ in groups:  # with crossing groups, a vote needs that many rounds to reach everybody
            with contextlib.ExitStack() as stack:
                meetings = [stack.enter_context(Meeting(ranks, about, wish)) for ranks in groups]
                answers = [Vote(answer) for meeting in meetings for answer in meeting.attend().values()]
                wish = max(answers, key=[*Vote].index)
        return wish


def has_collectives(block: nn.Module) -> bool:
    """Whether a second forward of the block is known to need other ranks."""
    if any(hasattr(p, "device_mesh") or is_partitioned(p) for p in block.parameters()):
        return True  # weights split by tensor parallelism, or by units below the block that are resharded
    below = (m for m in block.modules() if m is not block)
    return any(is_fsdp2(m) or is_fsdp1(m) or (isinstance(m, nn.SyncBatchNorm) and m.training) for m in below)
