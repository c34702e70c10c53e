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
import hashlib
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


def groups_of(model: nn.Module) -> list[tuple[int, ...]]:
    """Return the groups of ranks that hold a part of the model with this one; none if nothing is distributed.

    A group is told by the same mesh or process group on each of its ranks, so all of them name it alike.
    """
    if not dist.is_available() or not dist.is_initialized():
        return []
    groups: set[tuple[int, ...]] = set()
    for module in model.modules():
        if is_ddp(module) or is_fsdp1(module):
            inner: list[Any] = [module.process_group, getattr(module, "_inter_node_pg", None)]  # FSDP1's replicas
            groups.update(tuple(sorted(dist.get_process_group_ranks(g))) for g in inner if g is not None)
    meshes = {id(m): m for p in model.parameters() if (m := getattr(p, "device_mesh", None)) is not None}
    groups.update(tuple(sorted(m.mesh.flatten().tolist())) for m in meshes.values())
    return sorted(g for g in groups if len(g) > 1)


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


def check_agreement(groups: Sequence[Sequence[int]], terms: Mapping[str, str]) -> None:
    """Meet the ranks of each group and compare.

    Args:
        groups: Who is to come.
        terms: What must be the same within a group.

    Raises:
        ConfigError: They differ, or a rank did not come in time.
    """
    text = json.dumps(dict(terms))
    with contextlib.ExitStack() as stack:
        # All are opened before one is waited in: no two ranks wait for each other in different groups.
        for meeting in [stack.enter_context(_meeting(ranks, text)) for ranks in groups]:
            told = meeting.attend()
            lines = _differences({rank: json.loads(one) for rank, one in told.items()})
            if lines:
                more = f"; and {len(lines) - SHOWN} differences more" if len(lines) > SHOWN else ""
                raise ConfigError(
                    "; ".join(lines[:SHOWN]) + more,
                    expected=f"the same on {_spelled(meeting.ranks)}, which train the same part of the model",
                    hint="pass the same arguments to enable_activation_offloading on these ranks",
                )


def _differences(told: Mapping[int, Mapping[str, str]]) -> list[str]:
    lines: list[str] = []
    for name in dict.fromkeys(name for one in told.values() for name in one):
        by_value: dict[str, list[int]] = {}
        for rank, one in told.items():
            by_value.setdefault(one.get(name, "absent"), []).append(rank)
        if len(by_value) > 1:
            lines.append(f"{name} is " + ", but ".join(f"{v!r} on {_spelled(r)}" for v, r in by_value.items()))
    return lines


class _Absent(ConfigError):
    """A rank did not come."""


class _Meeting:
    """Every rank of a group gives a text to every other; the n-th meeting of one is the n-th of the others.

    Args:
        ranks: The group, in order.
        text: What this rank gives.
    """

    def __init__(self, ranks: Sequence[int], text: str) -> None:
        name = hashlib.sha256(",".join(map(str, ranks)).encode()).hexdigest()
        default: Any = dist.distributed_c10d._get_default_store()
        self.ranks, self._me = ranks, dist.get_rank()
        self._store: Any = dist.distributed_c10d.PrefixStore(f"ebbtide/{name}", default)
        self._limit_seconds: float = default.timeout.total_seconds()
        number = self._store.add(f"meetings of {self._me}", 1)
        self._keys = {rank: f"{number} from {rank}" for rank in ranks}
        digest = hashlib.sha256(text.encode()).hexdigest()
        self._store.set(self._keys[self._me] + " in full", text)
        self._store.set(self._keys[self._me], digest)

    def leave(self) -> None:
        """Undo: who comes later must not find a rank that has gone, and meets it when it comes again."""
        self._store.delete_key(self._keys[self._me])
        self._store.add(f"meetings of {self._me}", -1)

    def attend(self) -> dict[int, str]:
        """Wait for all; return the text of each rank, or of this one alone if all are equal.

        Raises:
            ConfigError: A rank did not come in time.
        """
        self._wait()
        keys = list(self._keys.values())
        found = self._store.multi_get(keys) if self._store.has_extended_api() else [self._store.get(k) for k in keys]
        differ = len(set(found)) > 1
        return {r: self._store.get(k + " in full").decode() for r, k in self._keys.items() if differ or r == self._me}

    def _wait(self) -> None:
        first_seconds = min(PATIENCE_SECONDS, self._limit_seconds)
        absent = _absent(self._store, self._keys, first_seconds)
        if absent and self._limit_seconds > first_seconds:
            logger.warning("waiting for %s to enable offloading too", _spelled(absent))
            absent = _absent(self._store, self._keys, self._limit_seconds - first_seconds)
        if absent:
            raise _Absent(
                f"{_spelled(absent)} did not enable offloading within {self._limit_seconds:g} s",
                expected=f"a call on each of {_spelled(self.ranks)}, which train the same part of the model",
                hint="call enable_activation_offloading on every rank; the time limit is that of init_process_group",
            )


@contextlib.contextmanager
def _meeting(ranks: Sequence[int], text: str) -> Generator[_Meeting]:
    meeting = _Meeting(ranks, text)
    try:
        yield meeting
    except ConfigError as error:
        if isinstance(error, _Absent):
            meeting.leave()
        raise
    except BaseException:
        meeting.leave()
        raise


def _absent(store: Any, keys: Mapping[int, str], seconds: float) -> list[int]:
    """Wait; return the ranks whose key is not there then."""
    try:
        store.wait(list(keys.values()), timedelta(seconds=seconds))
    except RuntimeError:  # a file store has no error of its own for this
        return [rank for rank, key in keys.items() if not store.check([key])]
    return []


def _spelled(ranks: Sequence[int]) -> str:
    return ("rank " if len(ranks) == 1 else "ranks ") + ", ".join(map(str, ranks))
