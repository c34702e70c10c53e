"""The saved-tensor hooks of one run of a block."""

from __future__ import annotations

from typing import Any

import torch
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.checkpoint import checkpoint

from ebbtide.base.errors import note_place
from ebbtide.engine import Block, Engine
from ebbtide.engine.run import BlockRun, begin_block
from ebbtide.wrap.checkpointedcall import CheckpointedCall
from ebbtide.wrap.foreign_checkpoints import innermost_hooks

_NO_HOOKS = "support saved tensor hooks"
"""A part of torch's error for ``torch.func.grad`` and similar transforms while hooks are open."""


class offloading:
    """Opens the hooks for one block, and closes them on any exit, ``KeyboardInterrupt`` included.

    Not a generator: an interrupted one would hold the hooks open as long as the traceback lives.
    """

    def __init__(
        self,
        engine: Engine,
        block: Block,
        inputs: list[torch.Tensor],
        *,
        checkpointed: bool = False,
        kind: type[BlockRun] = BlockRun,
    ) -> None:
        self._engine, self._block, self._inputs, self._checkpointed = engine, block, inputs, checkpointed
        self._kind = kind
        self._run: BlockRun | None = None
        self._ended = False

    def __enter__(self) -> BlockRun:
        run = self._run = begin_block(
            self._engine, self._block, self._inputs, checkpointed=self._checkpointed, kind=self._kind
        )
        run.mark = self._engine.live_entries.mark  # the store stays open as long as the hooks
        saved_tensors_hooks(run.pack, self._engine.unpack).__enter__()
        return run

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        self.close(error)
        if isinstance(error, RuntimeError) and _NO_HOOKS in str(error):
            hint = "take the gradient with torch.autograd.grad, or leave the block out with blocks=..."
            note_place(error, f"in block {self._block.name!r}, which calls torch.func inside its forward; hint: {hint}")

    def close(self, error: BaseException | None = None) -> None:
        """Close the hooks and end the block, which may have raised.

        May be called repeatedly: a repeat finishes an interrupted close.
        """
        if error is not None:
            _close_checkpoints(error)
        run = self._run
        if run is None:
            return
        try:
            while _run_of(innermost_hooks()) is run:
                torch._C._autograd._pop_saved_tensors_default_hooks()  # pyright: ignore[reportAttributeAccessIssue]
            if not self._ended:
                self._ended = True
                run.end(checkpointed=self._checkpointed)
        finally:
            run.close()  # an open run references its own tickets
        self._run = None


def _close_checkpoints(error: BaseException) -> None:
    """Close the hooks of the checkpoints inside the block whose forward raised, ours and others'.

    Torch 2.8 to 2.10 leave that to the end of a generator that the traceback keeps alive, and so hide our hooks, which
    are below. Torch 2.13 has closed it: closing it again does nothing.
    """
    left: list[Any] = []
    trace = error.__traceback__
    while trace is not None:
        frame, trace = trace.tb_frame, trace.tb_next
        if frame.f_code.co_name == checkpoint.__name__ and frame.f_globals.get("__name__") == checkpoint.__module__:
            left.append(frame.f_locals.get("gen"))
    for generator in filter(None, reversed(left)):  # the innermost first
        generator.close()


def _run_of(pack: Any) -> BlockRun | None:
    """Return the run whose block opened a hook: its own, or that of its checkpoint."""
    owner = getattr(pack, "__self__", None)
    return owner.run if isinstance(owner, CheckpointedCall) else owner
