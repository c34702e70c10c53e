"""The sites at which a block saves, and what is remembered of each position from run to run.

[Note: site]
A site names a saved tensor from step to step: the kind of its block, the module that ran, the autograd node that made
the tensor, and an ordinal among the node's tensors in this module. The same few dozen sites recur in each step, so a
site's description is made once and compared: a new one is made only if something in it differs.
"""

from __future__ import annotations

import functools
from dataclasses import replace

import torch

from ebbtide.base.actions import Candidate, Site
from ebbtide.engine.memo import Memo
from ebbtide.engine.passes import Block
from ebbtide.engine.tickets import Place

FUSED_ATTENTION = "ScaledDotProduct"
"""Start of the names of attention nodes, whichever kernel ran: a site has the same name on every device."""

Memos = dict[torch.Size, Memo]
"""What is known of a tensor, by its size: lengths and routing change from step to step. See [Note: memo]."""

MOST_SIZES = 16
"""Sizes remembered for a tensor: lengths that are padded to a multiple recur, others would fill the memory."""

OUTSIDE = "(block)"
"""Where no module of the block is known to run."""


class Known:
    """What the runs of a block pass on to later runs.

    Attributes:
        candidates: The latest description of each site, without and with a recipe.
        memos: For each module, what is known of the tensors that it saves, in order.
        places: The place of each module.
    """

    __slots__ = ("candidates", "memos", "places")

    def __init__(self) -> None:
        self.candidates: dict[tuple[Site, bool], Candidate] = {}
        self.memos: dict[str, list[Memos]] = {}
        self.places: dict[str, Place] = {}


class Position:
    """How many tensors a module has saved in this run, and what is known of each.

    Args:
        place: The module and its block, as errors name them.
        memos: From earlier runs; updated in place.
    """

    __slots__ = ("memos", "next", "place")

    def __init__(self, place: Place, memos: list[Memos]) -> None:
        self.place, self.memos, self.next = place, memos, 0

    def remember(self, size: torch.Size, memo: Memo | None) -> None:
        """Replace what was known of the tensor saved last."""
        while self.next > len(self.memos):
            self.memos.append({})
        known = self.memos[self.next - 1]
        if memo is None:
            known.pop(size, None)
        else:
            if len(known) >= MOST_SIZES:
                known.clear()
            known[size] = memo


class Sites:
    """The sites of one run of a block. See [Note: site].

    Args:
        block: The block.
        known: From earlier runs of the block; updated in place.

    Attributes:
        counts: Number of tensors saved so far, by module and node.
        positions: Of the modules that ran, by name.
        position: Of the innermost running module.
    """

    def __init__(self, block: Block, known: Known) -> None:
        self._block, self._known = block, known.candidates
        self._memos, self._places = known.memos, known.places
        self.counts: dict[tuple[str, str], int] = {}
        self.positions: dict[str, Position] = {}
        self.go_to(OUTSIDE)

    def go_to(self, module: str) -> None:
        """Note that another module is the innermost running one now."""
        found = self.positions.get(module)
        if found is None:
            place = self._places.setdefault(module, (module, self._block.name))  # one for the tickets of all runs
            found = self.positions[module] = Position(place, self._memos.setdefault(module, []))
        self.position = found

    def forget(self) -> None:
        """Drop what only the block's forward needed."""
        self.counts, self.positions = {}, {}  # empty ones are not tracked by the collector

    def next(self, module: str, node_name: str) -> Site:
        """Return the site of a tensor that is saved now.

        Args:
            module: Path of the innermost running module in the block.
            node_name: Name of the node that made the tensor.
        """
        key = (module, node_name)
        if node_name.startswith(FUSED_ATTENTION):
            key = (module, FUSED_ATTENTION)
        ordinal = self.counts.get(key, 0)
        self.counts[key] = ordinal + 1
        return _site(self._block.kind, *key, ordinal)

    def candidate(
        self, site: Site, nbytes: int, *, block_input: bool, kept_bytes: int, flops: float | None = None
    ) -> Candidate:
        """Return the description of a storage.

        Args:
            site: Where it is saved.
            nbytes: Its size.
            block_input: It came into the block.
            kept_bytes: See ``Candidate.kept_bytes``.
            flops: See ``Candidate.recompute_flops``.
        """
        key = (site, flops is not None)
        found = self._known.get(key)
        if found is None or found.block != self._block.index:
            found = Candidate(
                site=site,
                block_name=self._block.name,
                block=self._block.index,
                nbytes=nbytes,
                block_input=block_input,
                recompute_flops=flops,
                kept_bytes=kept_bytes,
            )
        elif found.nbytes != nbytes or found.block_input is not block_input or found.recompute_flops != flops:
            found = replace(found, nbytes=nbytes, block_input=block_input, recompute_flops=flops)
        found = self._known[key] = found.with_kept(kept_bytes)
        return found


_site = functools.lru_cache(8192)(Site)
