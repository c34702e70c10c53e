"""Other offloaders: saved-tensor hooks that are not ours, around a block or inside it.

[Note: two offloaders]
Of saved-tensor hooks only the innermost see what is saved. Around a block they see nothing while ours are open; opened
inside it, as transformers does around the checkpoint in its layers (``offload=True``), they leave ours with nothing to
do and nobody is told. Both are refused. Hooks that take a part of what a block saves are the block's own affair: they
are said once, and the rest is offloaded.
"""

from __future__ import annotations

import logging
from typing import Any

import torch

from ebbtide.base.errors import ConflictError
from ebbtide.engine.run import BlockRun
from ebbtide.wrap.checkpoints import checkpoint_around, innermost_hooks

logger = logging.getLogger("ebbtide.wrap")


class Inside:
    """What other hooks are opened inside a block while its forward runs. See [Note: two offloaders]."""

    def __init__(self) -> None:
        self._looked: Any = None  # at these hooks, just before
        self._found = ""
        self._told = False
        self._entered = False
        self.checkpointed = False
        """The block's first module ran in a checkpoint: the block checkpoints its own forward."""

    def look(self, run: BlockRun) -> None:
        """Look at the innermost hooks; called when a module of the block begins to run."""
        pack = innermost_hooks()
        if not self._entered:  # a reentrant checkpoint opens no hooks, but runs without gradients
            self._entered = True
            self.checkpointed = not torch.is_grad_enabled() or checkpoint_around(pack) is not None
        if pack is self._looked or getattr(pack, "__self__", None) is run:
            return
        self._looked = pack
        kept = checkpoint_around(pack)
        if kept is not None:
            taken = kept.taken()
            self._found = self._found or ("" if taken is None else f"what a checkpoint keeps is a {_name(type(taken))}")
        elif pack is not None and not isinstance(_owner(pack), BlockRun):
            self._found = self._found or _name(pack)

    def check(self, block: str, run: BlockRun) -> None:
        """Say what was found, when the block's forward has run to its end.

        Raises:
            ConflictError: Another offloader took all that the block saves.
        """
        found = self._found
        if found and not run.tally.packs:
            _refuse(f"block {block!r} saves all its tensors under other saved-tensor hooks inside it ({found})")
        if found and not self._told:
            self._told = True
            logger.warning(
                "block %r saves a part under other saved-tensor hooks (%s): ebbtide cannot offload that part",
                block, found,
            )  # fmt: skip

    def forget(self) -> None:
        """The forward is over, however it ended."""
        self._looked, self._found, self._entered = None, "", False


def refuse_around(block: str, pack: Any) -> None:
    """Raise if saved-tensor hooks that are not ours are open where ours would be entered.

    Args:
        block: Its name.
        pack: The pack hook that is innermost; None: there is none.

    Raises:
        ConflictError: Another offloader is on.
    """
    if pack is not None and not isinstance(_owner(pack), BlockRun):
        _refuse(f"block {block!r} runs under other saved-tensor hooks ({_name(pack)})")


def refuse_taken(block: str, taken: object) -> None:
    """Raise for what another offloader made of a tensor that a checkpoint around a block keeps.

    Raises:
        ConflictError: Always.
    """
    _refuse(f"block {block!r} runs under other saved-tensor hooks ({_name(type(taken))})")


def _refuse(found: str) -> None:
    raise ConflictError(
        found,
        expected="one offloader on a model",
        hint="remove that context, or unset its flag (TRL and torchtune: activation_offloading, enable_activation_"
        "offloading; transformers: gradient_checkpointing_kwargs['offload'])",
    )


def _owner(pack: Any) -> Any:
    return getattr(pack, "__self__", None)


def _name(thing: Any) -> str:
    return f"{getattr(thing, '__module__', '?')}.{getattr(thing, '__qualname__', type(thing).__qualname__)}"
