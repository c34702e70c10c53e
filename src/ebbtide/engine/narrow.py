"""What was cast up is stored in the type that it came from: bf16 cast up for a norm crosses the link as bf16."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from ebbtide.base.actions import Action
from ebbtide.engine.build import Builder
from ebbtide.engine.layout import Layout
from ebbtide.engine.recipe import Expr
from ebbtide.engine.tickets import Entry, Ticket, version_probe

if TYPE_CHECKING:
    from torch.autograd.graph import Node

    from ebbtide.engine.run import BlockRun

NARROWER = {
    torch.float32: (torch.bfloat16, torch.float16),
    torch.float64: (torch.bfloat16, torch.float16, torch.float32),
}
"""Types whose values a wider type holds exactly: a tensor cast up from one is stored as it was."""


@dataclass(frozen=True, slots=True)
class Narrow:
    """Where a tensor was cast up from.

    Attributes:
        node: The autograd node of the value that was cast up.
        output_nr: Which of its outputs.
        dtype: Its type.
        nbytes: What the tensor takes in that type.
    """

    node: Node
    output_nr: int
    dtype: torch.dtype
    nbytes: int


def narrower(builder: Builder | None, entry: Entry, base: torch.Tensor) -> Narrow | None:
    """Return where a tensor was cast up from, if that type holds all its values; else None.

    Args:
        builder: Of the block's forward; None: it is over.
        entry: The tensor's.
        base: The tensor.
    """
    node = base.grad_fn
    if builder is None or node is None or node.name() != "ToCopyBackward0" or base._version:
        return None
    if not entry.base_layout.whole(entry.nbytes):
        return None
    source, number = node.next_functions[0]
    if source is None or getattr(source, "variable", None) is not None:
        return None
    dtype = source._input_metadata[number].dtype
    if dtype not in NARROWER.get(base.dtype, ()):
        return None
    return Narrow(source, number, dtype, base.numel() * dtype.itemsize)


def park_narrowed(run: BlockRun, entry: Entry, base: torch.Tensor, narrow: Narrow) -> Expr:
    """Offload a tensor in the type that it was cast up from; return how to cast it up again.

    Args:
        run: The block.
        entry: The tensor's.
        base: The tensor.
        narrow: As ``narrower`` returned it.
    """
    engine, wide = run.engine, base.dtype
    with torch.no_grad():
        small = base.detach().to(narrow.dtype)
    layout = Layout.of(small)
    region = (0, small.untyped_storage().nbytes())
    empty = engine.empty(small)
    inner = Entry(empty, site=entry.site, region=region, base_layout=layout, at=0, living=engine.live_entries)
    inner.action = Action.OFFLOAD
    engine.park(run, inner, small)
    ticket = Ticket(inner, layout, run, version_probe(small, empty), 0)
    if run.builder is not None:
        run.builder.note_ticket(narrow.node, narrow.output_nr, ticket)  # keeps the node, so that its id stays its own
    run.keep_narrowed((id(narrow.node), narrow.output_nr), ticket, inner.nbytes)
    return Expr(lambda x: x.to(wide), (ticket,), key=("cast", wide))
