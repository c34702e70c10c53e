"""Ranks that train the same part of a model offload it alike, or say at once that they do not.

[Note: agreement]
A block that is re-run whole in backward repeats the collectives inside it (tensor parallelism, units nested in the
block): were it re-run on one rank only, the others would wait for ever. So ranks compare what they were told when
offloading is enabled. Only ranks that hold the same part are compared, which the model tells: the meshes of its
parameters, the groups of its wrappers; stages of a pipeline differ, and may. They meet in the store that started the
process group, not in a collective: a rank that never comes is named when the store's timeout is over
(``init_process_group(timeout=...)``), and nothing is left waiting.
"""

from __future__ import annotations

import contextlib
import json
import logging
from collections.abc import Generator, Mapping, Sequence
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from torch import nn

from ebbtide.base.errors import ConfigError
from ebbtide.engine import Block, Engine
from ebbtide.wrap.strategy import found_strategy, is_ddp, is_fsdp1

logger = logging.getLogger("ebbtide.wrap")

PATIENCE_SECONDS = 30.0
"""After this long a rank says for whom it waits."""
SHOWN = 3
"""Differences told in one message."""


def ranks_of(model: nn.Module) -> tuple[int, ...]:
    """Return the ranks that hold the same part of the model as this one, in order; none if nothing is distributed."""
    if not dist.is_available() or not dist.is_initialized():
        return ()
    ranks: set[int] = set()
    for module in model.modules():
        if is_ddp(module) or is_fsdp1(module):
            groups: list[Any] = [module.process_group, getattr(module, "_inter_node_pg", None)]  # FSDP1's replicas
            ranks.update(rank for g in groups if g is not None for rank in dist.get_process_group_ranks(g))
    meshes = {id(m): m for p in model.parameters() if (m := getattr(p, "device_mesh", None)) is not None}
    for mesh in meshes.values():
        ranks.update(mesh.mesh.flatten().tolist())
    return tuple(sorted(ranks))


def terms_of(model: nn.Module, blocks: Sequence[Block], engine: Engine) -> dict[str, str]:
    """Return what ranks compare, each with its value in words.

    A directory for the disk tier is a rank's own affair.
    """
    options = engine.options
    terms = {
        "strategy": found_strategy(model),
        "plan": f"{engine.plan.name} ({engine.plan.explain()})",
        "target": engine.tier.name,
        "min_bytes": str(options.min_bytes),
        "window": f"{options.window_bytes} bytes" if options.window_bytes else "as the model needs",
        "host_budget": f"{options.host_budget_bytes} bytes" if options.host_budget_bytes else "a fair share",
        "verify": str(options.verify),
    }
    for name, filter_ in {"tensor_filter": engine._tensor_filter, "keep_filter": engine._keep_filter}.items():
        terms[name] = getattr(filter_, "__qualname__", type(filter_).__qualname__)
    return terms | {f"block {block.name}": block.kind for block in blocks}


def check_agreement(ranks: Sequence[int], terms: Mapping[str, str]) -> None:
    """Meet the other ranks and compare.

    Args:
        ranks: Who is to come; fewer than two: there is nobody to meet.
        terms: What must be the same on all of them.

    Raises:
        ConfigError: They differ, or a rank did not come in time.
    """
    if len(ranks) < 2:
        return
    found = _exchange("enable", ranks, json.dumps(dict(terms)))
    told = {rank: json.loads(text) for rank, text in found.items()}
    names = dict.fromkeys(name for one in told.values() for name in one)
    lines: list[str] = []
    for name in names:
        by_value: dict[str, list[int]] = {}
        for rank, one in told.items():
            by_value.setdefault(one.get(name, "absent"), []).append(rank)
        if len(by_value) > 1:
            lines.append(f"{name} is " + ", but ".join(f"{v!r} on {_spelled(r)}" for v, r in by_value.items()))
    if lines:
        more = f"; and {len(lines) - SHOWN} differences more" if len(lines) > SHOWN else ""
        raise ConfigError(
            "; ".join(lines[:SHOWN]) + more,
            expected=f"the same on {_spelled(ranks)}, which train the same part of the model",
            hint="pass the same arguments to enable_activation_offloading on these ranks",
        )


def _exchange(what: str, ranks: Sequence[int], text: str) -> dict[int, str]:
    """Give every rank's text to every rank; the n-th call of one meets the n-th of the others.

    Raises:
        ConfigError: A rank did not come in time.
    """
    store, me = dist.distributed_c10d._get_default_store(), dist.get_rank()
    store = dist.distributed_c10d.PrefixStore("ebbtide/" + what + "/" + "-".join(map(str, ranks)), store)
    with _counted(store, f"calls of {me}") as number:
        keys = {rank: f"{number} from {rank}" for rank in ranks}
        store.set(keys[me], text)
        try:
            _wait(store, keys)
        except BaseException:
            store.delete_key(keys[me])  # who comes later must not find a rank that has left
            raise
        return {rank: store.get(key).decode() for rank, key in keys.items()}


@contextlib.contextmanager
def _counted(store: Any, name: str) -> Generator[int]:
    """Count a meeting, unless it fails."""
    try:
        yield store.add(name, 1)
    except BaseException:
        store.add(name, -1)
        raise


def _wait(store: Any, keys: Mapping[int, str]) -> None:
    limit_seconds: float = store.timeout.total_seconds()
    first_seconds = min(PATIENCE_SECONDS, limit_seconds)
    absent = _absent(store, keys, first_seconds)
    if absent and limit_seconds > first_seconds:
        logger.warning("waiting for %s to enable offloading too", _spelled(absent))
        absent = _absent(store, keys, limit_seconds - first_seconds)
    if absent:
        raise ConfigError(
            f"{_spelled(absent)} did not enable offloading within {limit_seconds:g} s",
            expected=f"a call on each of {_spelled(list(keys))}, which train the same part of the model",
            hint="call enable_activation_offloading on every rank; the time limit is that of init_process_group",
        )


def _absent(store: Any, keys: Mapping[int, str], seconds: float) -> list[int]:
    """Wait; return the ranks whose key is not there then."""
    try:
        store.wait(list(keys.values()), timedelta(seconds=seconds))
    except RuntimeError:  # a file store has no error of its own for this
        return [rank for rank, key in keys.items() if not store.check([key])]
    return []


def _spelled(ranks: Sequence[int]) -> str:
    return ("rank " if len(ranks) == 1 else "ranks ") + ", ".join(map(str, ranks))
