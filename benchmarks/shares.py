"""What each policy does with a model's saved tensors, in bytes; and why Auto moves what it moves.

The yardstick does not come from the engine: the *naive bytes* are those of the distinct storages that a second,
independent pair of hooks sees saved inside the blocks in a plain forward, weights left out. Every figure of a policy is
taken from a step whose loss, outputs and gradients are bitwise equal to those of ordinary training.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks

import ebbtide
from ebbtide.base.actions import Action, NoRecipe, Site
from ebbtide.base.events import BUS
from ebbtide.config import POLICIES
from ebbtide.engine.timed import TimedStep, TimedUnit
from ebbtide.engine.timing import StepTimer
from ebbtide.store.meter import meter_for
from ebbtide.wrap.blocks import find_blocks
from tests.helpers.models import Tiny
from tests.helpers.oracle import Outcome, differences

STEPS = {"minimal": 2}
"""Steps of a policy, if more than one: no block is re-run whole before it was seen. The last is the one that counts."""

CAST, NARROWED = "ToCopyBackward0", "(cast)"
"""Stands in place of a node for tensors that were cast up and wait in the narrower type."""


REASONS = {
    NoRecipe.INPUT: "block input",
    NoRecipe.NO_OPERATOR: "no autograd node",
    NoRecipe.PART: "part of a tensor",
    NoRecipe.NO_RULE: "no rule",
    NoRecipe.NO_OPERAND: "operand missing",
    NoRecipe.DIFFERS: "recompute differed",
}
"""The engine's reasons, as tables name them."""


class Differs(Exception):
    """A policy's step differs from ordinary training: there are no figures for it."""


@contextmanager
def naive_bytes(model: nn.Module) -> Iterator[Counter[str]]:
    """Count, while open, the bytes of distinct storages that are saved inside the model's blocks.

    Yields:
        Bytes by name of block; a storage that several blocks save counts for the first.
    """
    weights = {t.untyped_storage().data_ptr() for t in (*model.parameters(), *model.buffers())}
    alive: dict[int, torch.UntypedStorage] = {}  # held, so that no address is reused
    found: Counter[str] = Counter()

    def pack(name: str, tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        address = storage.data_ptr()
        if address not in weights and address not in alive:
            alive[address] = storage
            found[name] += storage.nbytes()
        return tensor

    open_hooks, undo = ExitStack(), ExitStack()

    def enter(name: str, module: nn.Module, args: Any) -> None:
        open_hooks.enter_context(saved_tensors_hooks(partial(pack, name), lambda tensor: tensor))

    def leave(module: nn.Module, args: Any, output: Any) -> None:
        open_hooks.close()

    with open_hooks, undo:
        for module, block in find_blocks(model):
            undo.callback(module.register_forward_pre_hook(partial(enter, block.name)).remove)
            undo.callback(module.register_forward_hook(leave).remove)
        yield found


def shares(tiny: Tiny) -> dict[str, Any]:
    """Return what each policy does with the saved tensors of a model.

    Args:
        tiny: The model with its batch; it takes steps, and is left unchanged.

    Returns:
        ``naive_bytes``, ``blocks``, for each of ``policies`` the bytes kept, moved, recomputed and (part of those)
        checkpointed, and ``moved``: the rows of ``moved_by_node`` under Auto.

    Raises:
        Differs: A step differs from ordinary training.
    """
    plain = tiny.step()
    with naive_bytes(tiny.model) as naive:
        tiny.loss()
    total = naive.total()
    result: dict[str, Any] = {"naive_bytes": total, "blocks": len(find_blocks(tiny.model)), "policies": {}}
    for policy in POLICIES:
        result["policies"][policy], moved = _under(tiny, policy, plain, naive)
        if policy == "auto":
            result["moved"] = moved
    counted = result["policies"]["keep"]["kept"]
    for found in result["policies"].values():
        found["kept"] += max(total - counted, 0)  # storages that the engine does not count stay on the device
    return result


def _under(tiny: Tiny, policy: str, plain: Outcome, naive: Counter[str]) -> tuple[dict[str, int], list[dict[str, Any]]]:
    """Return the bytes of a policy's last step, and the groups that it moved."""
    rerun: list[dict[str, Any]] = []  # the events of checkpointed blocks
    measured: list[TimedStep] = []

    def listen(kind: str, fields: dict[str, Any]) -> None:
        if kind == "block" and fields["action"] == "checkpoint":
            rerun.append(fields)

    # Of a model so small, what is held back for backward would be a large part.
    with ebbtide.enable_activation_offloading(tiny.model, policy=policy, min_bytes=0, window=1) as handle:
        engine = handle._engine
        if policy == "auto":
            engine.timer = StepTimer(meter_for(engine.tier), lambda step: bool(measured.append(step)))
            engine.timer.want()
        remove = BUS.subscribe(listen)
        try:
            for step in range(STEPS.get(policy, 1)):
                rerun.clear()
                found = differences(plain, tiny.step())
                if found:
                    raise Differs(f"{tiny.name}, {policy}, step {step}: {found[0]} and {len(found) - 1} more")
        finally:
            remove()
        stats = handle.stats()
        if engine.timer is not None:
            engine.timer.hand_over()
        units = [unit for step in measured for block in step.blocks for unit in block.units]
        moved = moved_by_node(engine.last_pass.sites, units)
    # Of a checkpointed block the engine sees only the inputs; the rest is what ordinary training saved.
    checkpointed = sum(max(naive[block["name"]] - block["offloaded_bytes"], 0) for block in rerun)
    sizes = {
        "kept": stats.kept_bytes,
        "moved": stats.offloaded_bytes,
        "recomputed": stats.recomputed_bytes - sum(block["recomputed_bytes"] for block in rerun) + checkpointed,
        "checkpointed": checkpointed,
        "checkpointed_blocks": stats.checkpointed_blocks,
    }
    return sizes, moved


def moved_by_node(
    sites: dict[tuple[Site, Action], tuple[int, int]],
    units: Iterable[TimedUnit],
) -> list[dict[str, Any]]:
    """Group the tensors that were not recomputed, by autograd node and reason.

    Args:
        sites: Storages and bytes of each action at each site in the pass.
        units: What the engine noted of storages when it measured the pass.

    Returns:
        Rows of ``node``, ``why``, ``storages`` and ``bytes``, the largest first.
    """
    measured = {unit.site: unit for unit in units}
    sizes: Counter[tuple[str, str]] = Counter()
    storages: Counter[tuple[str, str]] = Counter()
    for (site, action), (count, nbytes) in sites.items():
        if action not in (Action.RECOMPUTE, Action.CHECKPOINT) and nbytes:
            key = (site.node, reason(measured.get(site)))
            if site.node == CAST and (site, Action.RECOMPUTE) in sites:  # part of a tensor that is cast up
                key = (NARROWED, "cast up")
            sizes[key] += nbytes
            storages[key] += count
    return [
        {"node": node, "why": why, "storages": storages[node, why], "bytes": nbytes}
        for (node, why), nbytes in sizes.most_common()
    ]


def reason(unit: TimedUnit | None) -> str:
    """Return why a tensor is not recomputed under Auto; the engine measures only tensors that may be."""
    if unit is None or unit.action is Action.KEEP:
        return "never offloaded"
    return "matrix product" if unit.no_recipe is None else REASONS[unit.no_recipe]
