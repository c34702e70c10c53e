"""The run of a context that may be open around whole steps.

[Note: a backward inside a context]
``offload_saved_tensors`` may stay open while backwards run, as torch's ``save_on_cpu`` may. What only a forward needs
must not last until the context ends: operands of recipes would keep on the device all that the backward restores,
watched weights would be copied before each optimizer step, and a loop would grow. So a backward that begins to read a
run ends it and its pass, as leaving the context does, and what is saved next begins others. A backward that is recorded
itself (``create_graph=True``) is a part of a forward and ends nothing.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from ebbtide.engine.passes import Block
from ebbtide.engine.run import BlockRun, begin_block
from ebbtide.engine.tickets import LightTicket, Ticket

if TYPE_CHECKING:
    from ebbtide.engine.wrappers import Outer, WrapperTicket


CONTEXT = Block(name="context", kind="context", index=0, count=1, weights=tuple)
"""The block that a context is."""


class ContextRun(BlockRun):
    """What a context saves until a backward reads it. See [Note: a backward inside a context]."""

    _later: BlockRun | None = None  # the latest that followed it: the context's hooks stay those of its first run

    def _pack(self, tensor: torch.Tensor, outer: Outer | None) -> Ticket | LightTicket | WrapperTicket:
        if self.is_open:
            return super()._pack(tensor, outer)
        if self._later is None or not self._later.is_open:
            self.engine.begin_pass()
            self._later = begin_block(self.engine, self.block, [], kind=ContextRun)
        return self._later.pack(tensor, outer)

    def backward_begins(self) -> None:
        if not torch.is_grad_enabled():  # else the backward is recorded
            self.end()

    def end(self, *, checkpointed: bool = False) -> None:
        """End the context's latest run and its pass, unless a backward has."""
        run = self._later or self
        if run.is_open:
            try:
                self.engine.end_block(run)
            finally:
                self.engine.end_pass()
        else:
            self.engine.weights.end_pass()  # here, in the thread whose operators it counts

    def close(self) -> None:
        super().close()
        self.replays = False  # ``_pack`` is called for all that is saved from now on
