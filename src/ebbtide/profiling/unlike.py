"""Join measured steps that run other blocks each time, as with layers that are skipped at random.

[Note: unlike steps]
No two such steps may be alike, so none with plain blocks is compared with the one before. Instead each block counts as
it ran with hooks in any of them, all of these together are the step that the plan is made for, and plain blocks are
compared with those of their kind that had hooks in the same step. A plan is judged in the same way
(``ebbtide.profiling.promise``, [Note: the loop]). If a kind of block never ran without hooks, the time of ordinary
training is not known, so nothing is promised; without a memory budget everything is then kept, without hooks.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator
from dataclasses import replace
from graphlib import CycleError, TopologicalSorter
from itertools import pairwise
from statistics import median

from ebbtide.engine.timed import TimedBlock, TimedStep
from ebbtide.profiling.baseline import (
    Baseline,
    PlainBlock,
    at_speed_of,
    has_backward,
    noise,
    plain_blocks,
    shortest,
    treated,
)

UNLIKE = 8
"""Measured steps that run other blocks than the one before until a plan is made from all of them; and as many more
until it is made without a baseline."""

_Key = tuple[str, str, int]


class UnlikeSteps:
    """Measured steps of which several did not run the blocks of the one before. See [Note: unlike steps].

    Attributes:
        differed: The number of those.
    """

    def __init__(self) -> None:
        self.differed = 0
        self._hooked: list[TimedStep] = []
        self._with_plain: list[TimedStep] = []

    def add(self, step: TimedStep) -> None:
        """Add a measured step."""
        plain = any(block.plain for block in step.blocks)
        (self._with_plain if plain else self._hooked).append(step)

    def suffice(self) -> bool:
        """Whether a plan is made from all of them now."""
        if not self.lack_plain():
            return False
        return max(self.differed, len(self._with_plain)) >= 2 * UNLIKE or self._has_baseline()

    def lack_plain(self) -> bool:
        """Whether there are enough with hooks, so that only blocks without hooks are of use."""
        return self.differed >= UNLIKE and bool(self._hooked)

    def _has_baseline(self) -> bool:
        """Whether each kind of block that has a backward ran without hooks in one of them."""
        return {block.kind for block in filter(has_backward, self.joined().blocks)} <= self._plain_blocks().keys()

    def joined(self) -> TimedStep:
        """Return a step of all blocks that ran with hooks on all, in their order, with the shortest times of each."""
        found: defaultdict[_Key, list[TimedBlock]] = defaultdict(list)
        for step in self._hooked:
            for key, block in _executions(step):
                found[key].append(block)
        order = self._order() or list(found)
        best = [max(found[key], key=lambda block: (treated(block), block.saved_bytes)) for key in order]
        blocks = tuple(shortest(block, found[key]) for key, block in zip(order, best, strict=True))
        largest = max(self._hooked, key=lambda step: step.saved_bytes)
        return replace(
            largest,
            blocks=blocks,
            head_seconds=min(step.head_seconds for step in self._hooked),
            epilogue_seconds=min(step.epilogue_seconds for step in self._hooked),
            saved_bytes=max(largest.saved_bytes, sum(block.saved_bytes for block in blocks)),
        )

    def _order(self) -> list[_Key] | None:
        """Return all blocks in the order in which steps run them; None if steps do not agree."""
        order: TopologicalSorter[_Key] = TopologicalSorter()
        for step in self._hooked:
            keys = [key for key, _ in _executions(step)]
            for key in keys[:1]:
                order.add(key)
            for before, key in pairwise(keys):
                order.add(key, before)
        try:
            return list(order.static_order())
        except CycleError:
            return None

    def baseline(self) -> Baseline:
        """Return what a plan is made from."""
        apart = [noise(before, step) for before, step in self._pairs()]
        return Baseline(
            step=self.joined(),
            plain=self._plain_blocks(),
            noise=median(apart) if apart else 0.0,
            known=self._has_baseline(),
        )

    def _plain_blocks(self) -> dict[str, PlainBlock]:
        """Return kind → times without hooks, from the step in which most blocks of the kind had none."""
        most: Counter[str] = Counter()
        found: dict[str, PlainBlock] = {}
        for before, step in self._pairs():
            counts = Counter(block.kind for block in step.blocks if block.plain)
            for kind, block in plain_blocks(before, at_speed_of(before, step)).items():
                if counts[kind] > most[kind]:
                    most[kind], found[kind] = counts[kind], block
        return found

    def _pairs(self) -> Iterator[tuple[TimedStep, TimedStep]]:
        """Yield each step with plain blocks, without blocks that are not known, after one of these with hooks."""
        joined = self.joined()
        known = dict(_executions(joined))
        for step in self._with_plain:
            blocks = [(known[key], block) for key, block in _executions(step) if key in known]
            before = replace(joined, blocks=tuple(one for one, _ in blocks))
            yield before, replace(step, blocks=tuple(one for _, one in blocks))


def _executions(step: TimedStep) -> Iterator[tuple[_Key, TimedBlock]]:
    """Yield the blocks of a step by path, kind and how often they ran before in it."""
    ran: Counter[str] = Counter()
    for block in step.blocks:
        yield (block.name, block.kind, ran[block.name]), block
        ran[block.name] += 1
