"""Detect which other ranks a block's forward needs, from the counters of process groups.

[Note: collectives seen] Megatron's tensor parallelism, expert parallelism and all-to-all sequence parallelism call
collectives in a block's forward that neither wrappers nor parameters reveal. But every process group counts its
collectives, so a forward that raised the count has used the group. All ranks of a group call the same collectives in
the same order, so all of them make the same observation in the same block. Blocks whose modules have the same classes
are assumed to use the same groups; the first of them is never checkpointed.

Not detected: NCCL's point-to-point messages, and kernels that read other ranks' memory without a process group. Some
backends do not count (MPI; torch's ``fake``, if all groups are of it): with a group of one, no block is checkpointed.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Generator, Hashable
from enum import Enum
from typing import Any

import torch.distributed as dist
from torch import nn

from ebbtide.engine import Block

Ranks = tuple[int, ...]
"""A group of ranks, in order."""

FAKE = "fake"
"""The backend whose groups exchange nothing."""

is_distributed: Callable[[], bool] = getattr(dist, "is_initialized", bool)
"""Whether there are process groups; ``bool`` returns False in a torch without them."""


class Collectives:
    """The groups with which blocks were seen to call collectives. See [Note: collectives seen]."""

    def __init__(self) -> None:
        self._numbers: dict[Hashable, int] = {}  # what distinguishes blocks: hashed once for each block
        self._structures: dict[tuple[str, bool], tuple[int, int]] = {}  # block, mode → classes of modules, structure
        self._watched: set[int] = set()  # structures of which a block has run
        self._seen: dict[int, set[Ranks]] = {}  # classes → groups

    def known(self, block: Block, module: nn.Module) -> bool:
        """Whether a block like this was observed, with the other ranks if there are any.

        Blocks that need other ranks are alike if their classes are: switches may depend on the rank.
        """
        classes, structure = self._structure(block, module)
        if classes not in self._seen and shared_groups():
            return False
        return bool(self._seen.get(classes)) or structure in self._watched

    def looked(self, block: Block, module: nn.Module) -> bool:
        """Whether a forward has shown which groups blocks of these classes use."""
        return self._structure(block, module)[0] in self._seen

    def groups(self, block: Block, module: nn.Module) -> list[Ranks]:
        """Return the groups that blocks of these classes were seen to use."""
        return sorted(self._seen.get(self._structure(block, module)[0], ()))

    @contextlib.contextmanager
    def look(self, block: Block, module: nn.Module) -> Generator[None]:
        """Observe which groups a block's forward uses.

        One that changes the classes of modules (lazy ones get their sizes) shows nothing of the next block like it.
        """
        before, parts = _counts(), list(map(type, module.modules()))
        classes, structure = self._structure(block, module)
        yield  # a forward that raises has shown nothing
        if list(map(type, module.modules())) != parts:
            return
        self._watched.add(structure)
        if before:
            seen = self._seen.setdefault(classes, set())
            counts = _counts().items()  # a group may have been made in this forward
            seen.update(ranks_in(group) for group, count in counts if count != before.get(group, [0] * len(count)))

    def forget(self, block: Block) -> None:
        """Look at the modules of a block once more: they were replaced."""
        for training in (True, False):
            self._structures.pop((block.name, training), None)

    def _structure(self, block: Block, module: nn.Module) -> tuple[int, int]:
        place = block.name, module.training
        if place not in self._structures:
            classes = module.training, *map(type, module.modules())
            first, second = (self._numbers.setdefault(one, len(self._numbers)) for one in (classes, _structure(module)))
            self._structures[place] = first, second
        return self._structures[place]


def _structure(module: nn.Module) -> Hashable:
    """Return what distinguishes blocks that do different things: modules, buffers, and attributes.

    Of attributes their types, and the values of switches and names; numbers count layers, or are probabilities.
    """
    return tuple(
        (
            name,
            type(part),
            *(key for key, _ in part.named_buffers(recurse=False)),
            *((key, _kind(value)) for key, value in vars(part).items()),
        )
        for name, part in module.named_modules()
    )


def _kind(value: Any) -> Hashable:
    sort = type(value)  # ``isinstance`` asks the value, which raises if it is a proxy of a dead object
    if issubclass(sort, Enum):
        return sort, value.name  # one may not be hashable
    if issubclass(sort, str):
        text = str.__str__(value)
        return sort if any(map(str.isdigit, text)) else text  # one with a digit counts layers, too
    return value if sort is bool else sort


def shared_groups() -> list[Any]:
    """Return the process groups that this rank shares with others, without placeholders.

    Where ranks communicate, a group of the ``fake`` backend is one: torchtitan has them for axes that it does not use.
    """
    if not is_distributed():
        return []
    groups = [(group, backend) for group, (backend, _) in dist.distributed_c10d._world.pg_map.items()]
    simulated = all(backend == FAKE for _, backend in groups)
    return [group for group, backend in groups if group.size() > 1 and (simulated or backend != FAKE)]


def ranks_in(group: Any) -> Ranks:
    """Return the ranks of a process group, in order."""
    return tuple(sorted(dist.get_process_group_ranks(group)))


def uncounted() -> list[str]:
    """Return the backends of this rank's groups that do not count their collectives."""
    groups = shared_groups()
    counted = _counts() if groups else {}
    return sorted({str(dist.get_backend(group)) for group in groups if group not in counted})


def _counts() -> dict[Any, list[int]]:
    """Return how many collectives each process group has started, by backend; checked with torch 2.13."""
    counts: dict[Any, list[int]] = {}
    for group in shared_groups():
        with contextlib.suppress(RuntimeError):  # a backend that does not count
            backends = [group._get_backend(device) for device in group._device_types]
            counts[group] = [backend._get_sequence_number_for_group() for backend in backends]
    return counts
